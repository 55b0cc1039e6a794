"""Predicts what a machine without an NVIDIA GPU would run, from a description, so that it can be tested anywhere.

None of this was run on such a machine, only on a CPU and on the example device of the tests, and each line says so. For
a device that is present and used, ``octavo doctor`` also runs the backends (:mod:`octavo.doctor.fp8_backends`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.base.byte_size import format_bytes
from octavo.doctor.report import ABSENT, WARN, Check

UNTESTED = "never tested by this project"
_NVIDIA = "it needs an NVIDIA GPU"
_OTHERS = {"torch": _NVIDIA, "triton": _NVIDIA, "deepgemm": _NVIDIA}


@dataclass(frozen=True)
class Kind:
    """A kind of accelerator. ``sign``: its name among the signs of :func:`octavo.base.environment.describe`;
    ``package``: what torch needs to detect it; ``install``: how to install that; ``others``: why each backend except
    the reference is not used.
    """

    name: str
    sign: str
    package: str
    install: str
    others: Mapping[str, str]


KINDS = {
    "npu": Kind(
        "Ascend NPU", "ascend", "torch_npu",
        "install CANN and the torch_npu for this torch version; torch imports it automatically", _OTHERS,
    ),
    "rocm": Kind(
        "AMD GPU", "amd", "torch built for ROCm",
        "install torch for ROCm: pip install torch --index-url https://download.pytorch.org/whl/rocm6.4",
        _OTHERS | {
            "torch": "scaled_mm of gfx942 (MI300) multiplies float8_e4m3fnuz, whose codes represent other numbers than "
            "Octavo's float8_e4m3fn; gfx950 supports float8_e4m3fn, but that is not implemented here"
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
    """Return the kind of a described machine according to torch: npu, rocm, xpu, mps, or another device type. None for
    a CPU and for NVIDIA GPUs, which :mod:`octavo.doctor.machine` checks."""
    accelerator = record.get("accelerator") or {}
    device_type = accelerator.get("found") or accelerator.get("type", "cpu")
    if device_type == "cuda":
        return "rocm" if (record.get("torch") or {}).get("rocm_build") else None
    return None if device_type == "cpu" else device_type


def vendor_checks(record: Mapping[str, Any]) -> list[Check]:
    """Return the checks of a described machine: its devices, the backends that would be used, what is missing and the
    fix. Empty for a CPU without signs of an accelerator, and for NVIDIA GPUs."""
    name = kind_of(record)
    if name is None:
        return [_unseen(sign) for sign in record.get("signs") or () if sign in SIGNS]
    accelerator, kind = record["accelerator"], KINDS.get(name)
    title = f"{kind.name if kind else 'device of another kind'} ({name})"
    if (why := accelerator.get("left_out")) is not None:
        means = f"training runs on the CPU. The {title} is {UNTESTED}"
        return [
            Check("devices", name, WARN, f"not used: {why}", means, "none needed; FP8 on the CPU is correct but slow")
        ]
    checks = [
        _device(name, title, index, device, accelerator)
        for index, device in enumerate(accelerator.get("devices") or [{}])
    ]
    if missing := accelerator.get("lacks"):
        means = "features that need it stop with an error, or are skipped if no result depends on them"
        checks.append(Check("devices", f"{name} lacks", ABSENT, ", ".join(missing), means, "see docs/devices.md"))
    return checks + [_backend(backend, name, why) for backend, why in (kind.others if kind else _OTHERS).items()]


def _device(name: str, title: str, index: int, device: Mapping[str, Any], accelerator: Mapping[str, Any]) -> Check:
    size = f", {format_bytes(device['memory_bytes'], binary=True)}" if device.get("memory_bytes") else ""
    model = f" {device['architecture']}" if device.get("architecture") else ""
    description = f"{title}: {device.get('name', 'unnamed')}{model}{size}"
    if "FP8 dtypes" in accelerator.get("lacks", ()):
        means = f"only high precision works: its tensors cannot hold FP8 codes; {UNTESTED}"
        fix = "fp8.recipe: off, or OCTAVO_DEVICE=cpu for FP8"
        return Check("devices", f"{name}:{index}", WARN, description, means, fix)
    high = "BF16" if accelerator.get("high") == "bf16" else "fp32"
    means = f"the reference backend would be used, with FP8 in software and high precision in {high}: slow, {UNTESTED}"
    fix = "compare the losses of a short run with OCTAVO_DEVICE=cpu before you trust it (docs/devices.md)"
    return Check("devices", f"{name}:{index}", WARN, description, means, fix)


def _backend(backend: str, name: str, why: str) -> Check:
    return Check("fp8", f"{backend} on {name}", ABSENT, why, "the reference backend is chosen", "none needed")


def _unseen(sign: str) -> Check:
    """Return the check for a machine with signs of an accelerator that this torch does not detect."""
    kind = KINDS[SIGNS[sign]]
    problem = f"this machine seems to have an {kind.name}, but torch does not detect it: it needs {kind.package}"
    means = f"training runs on the CPU; training on the {kind.name} was {UNTESTED}"
    return Check("devices", SIGNS[sign], WARN, problem, means, kind.install)
