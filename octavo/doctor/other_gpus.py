"""What FP8 would run on GPUs that this machine does not have, from the tables of recipes and backends.

DeepGEMM is left out, because it is installed separately; :mod:`octavo.doctor.fp8_backends` lists it where it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.base.recipe_specs import NAMES, SPECS, fastest_on

CUDA = (13, 0)
"""CUDA of the torch build that :data:`INSTALL` installs."""
INSTALL = f"pip install torch --index-url https://download.pytorch.org/whl/cu{CUDA[0]}{CUDA[1]}"


@dataclass(frozen=True)
class Gpu:
    """An architecture of NVIDIA GPUs with FP8 tensor cores; ``capability``: its compute capability."""

    name: str
    examples: str
    capability: tuple[int, int]


GPUS = (
    Gpu("Ada", "L4, L40S, RTX 4090", (8, 9)),
    Gpu("Hopper", "H100, H200", (9, 0)),
    Gpu("Blackwell", "B200", (10, 0)),
    Gpu("Blackwell RTX", "RTX 5090, RTX PRO 6000", (12, 0)),
)


def describe_gpu(gpu: Gpu) -> str:
    """Return one line: the recipe that ``auto`` takes, and the recipes of each backend. A star marks recipes whose
    scales the tensor cores do not multiply by, which Triton applies itself."""
    from octavo.fp8 import recipe
    from octavo.fp8.kernels import backends_on

    by_backends: dict[str, list[str]] = {}
    for name in NAMES:
        backends = "+".join(backends_on(gpu.capability, recipe(name), CUDA))
        star = "" if SPECS[name].native <= gpu.capability else "*"
        by_backends.setdefault(backends or "none", []).append(name + star)
    parts = "; ".join(f"{backends}: {', '.join(names)}" for backends, names in by_backends.items())
    return f"{gpu.name} ({gpu.examples}): auto takes {fastest_on(gpu.capability[0])}; {parts}"
