"""What a machine without an NVIDIA GPU would run: a function of its description, so that every kind can be asked about
on any machine.

Nothing of this was ever run by us, but on the CPU and on the example device of the tests, and each line says so. On a
device that is here and used, ``octavo doctor`` tries the backends besides (:mod:`octavo.doctor.fp8_backends`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.doctor.report import ABSENT, WARN, Check

GIB = 2**30
UNTRIED = "never tried by us"
_NVIDIA = "it is written for NVIDIA GPUs"
_OTHERS = {"torch": _NVIDIA, "triton": _NVIDIA, "deepgemm": _NVIDIA}


@dataclass(frozen=True)
class Kind:
    """A kind of machine. ``sign``: its word among the signs of :func:`octavo.base.environment.describe`; ``package``:
    what torch needs to see it; ``install``: how one gets that; ``others``: why each backend but the reference is not
    used.
    """

    name: str
    sign: str
    package: str
    install: str
    others: Mapping[str, str]


KINDS = {
    "npu": Kind(
        "Ascend NPU", "ascend", "torch_npu",
        "install CANN and the torch_npu of this torch's version; torch imports it by itself", _OTHERS,
    ),
    "rocm": Kind(
        "AMD GPU", "amd", "torch built for ROCm",
        "install torch for ROCm: pip install torch --index-url https://download.pytorch.org/whl/rocm6.4",
        _OTHERS | {
            "torch": "scaled_mm of gfx942 (MI300) multiplies float8_e4m3fnuz, whose codes mean other numbers than our "
            "float8_e4m3fn; of gfx950 it takes ours, which nobody has written or tried here"
        },
    ),
    "xpu": Kind(
        "Intel GPU", "intel", "torch built for XPU",
        "install torch for XPU: pip install torch --index-url https://download.pytorch.org/whl/xpu", _OTHERS,
    ),
    "mps": Kind("Apple GPU", "apple", "torch for macOS", "pip install torch", _OTHERS),
}  # fmt: skip
SIGNS = {kind.sign: name for name, kind in KINDS.items()}


def kind_of(record: Mapping[str, Any]) -> str | None:
    """The kind of a described machine by what torch found: npu, rocm, xpu, mps, the type of another device; None for a
    CPU and for NVIDIA's GPUs, which :mod:`octavo.doctor.machine` tells of."""
    told = record.get("accelerator") or {}
    found = told.get("found") or told.get("type", "cpu")
    if found == "cuda":
        return "rocm" if (record.get("torch") or {}).get("rocm_build") else None
    return None if found == "cpu" else found


def would_run(record: Mapping[str, Any]) -> list[Check]:
    """The lines about a described machine: its devices, what would compute on them, what is missing and the fix. Empty
    for a CPU without the sign of an accelerator, and for NVIDIA's GPUs."""
    name = kind_of(record)
    if name is None:
        return [_unseen(sign) for sign in record.get("signs") or () if sign in SIGNS]
    told, kind = record["accelerator"], KINDS.get(name)
    title = f"{kind.name if kind else 'device of another kind'} ({name})"
    if (why := told.get("left_out")) is not None:
        means = f"training runs on the CPU. The {title} is {UNTRIED}"
        return [
            Check("devices", name, WARN, f"not used: {why}", means, "none needed; FP8 is right on the CPU, and slow")
        ]
    checks = [_device(name, title, index, device, told) for index, device in enumerate(told.get("devices") or [{}])]
    if lacks := told.get("lacks"):
        means = "what stands on it is refused with its name, or gone without where no result depends on it"
        checks.append(Check("devices", f"{name} lacks", ABSENT, ", ".join(lacks), means, "see docs/devices.md"))
    return checks + [_backend(backend, name, why) for backend, why in (kind.others if kind else _OTHERS).items()]


def _device(name: str, title: str, index: int, device: Mapping[str, Any], told: Mapping[str, Any]) -> Check:
    size = f", {device['memory_bytes'] / GIB:.0f} GiB" if device.get("memory_bytes") else ""
    model = f" {device['architecture']}" if device.get("architecture") else ""
    found = f"{title}: {device.get('name', 'unnamed')}{model}{size}"
    if "FP8 dtypes" in told.get("lacks", ()):
        means = f"high precision alone: its tensors cannot hold FP8 codes; {UNTRIED}"
        return Check("devices", f"{name}:{index}", WARN, found, means, "fp8.recipe: off, or OCTAVO_DEVICE=cpu for FP8")
    high = "BF16" if told.get("high") == "bf16" else "fp32"
    means = f"the reference backend would run, FP8 in software and high precision in {high}: slow, and {UNTRIED}"
    fix = "hold a short run's losses against OCTAVO_DEVICE=cpu before you trust it (docs/devices.md)"
    return Check("devices", f"{name}:{index}", WARN, found, means, fix)


def _backend(backend: str, name: str, why: str) -> Check:
    return Check("fp8", f"{backend} on {name}", ABSENT, why, "the reference backend is chosen", "none needed")


def _unseen(sign: str) -> Check:
    """A machine that shows an accelerator which this torch does not see."""
    kind = KINDS[SIGNS[sign]]
    found = f"this machine shows an {kind.name}, and torch sees none: it needs {kind.package}"
    means = f"training runs on the CPU; on the {kind.name} it is {UNTRIED}"
    return Check("devices", SIGNS[sign], WARN, found, means, kind.install)
