"""The machine that measurements depend on: GPU, driver, and versions of torch and backends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import device as Device  # "torch" is a field here

from octavo.base import accelerator
from octavo.fp8.kernels import registry

CPU = "cpu"


@dataclass(frozen=True)
class Machine:
    """``gpu`` is the device's name, or "cpu"; ``capability`` such as "9.0"; ``backends`` name -> version."""

    gpu: str
    capability: str | None = None
    driver: str | None = None
    torch: str = ""
    cuda: str | None = None
    backends: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def detect(cls, device: Device | str) -> Machine:
        """The machine that ``device`` belongs to."""
        device = Device(device)
        versions = {name: registry.get(name).version() for name in registry.names()}
        if not accelerator.has_own_memory(device):
            return cls(CPU, torch=torch.__version__, backends=versions)
        properties = accelerator.properties(device)
        where = (
            properties["name"],
            properties.get("capability"),
            _read_driver_version() if accelerator.is_gpu(device) else None,
        )
        return cls(*where, torch.__version__, accelerator.cuda_version(), versions)

    @property
    def emulated(self) -> bool:
        """True on a CPU, and on every device without a compute capability, where FP8 is arithmetic in software: its
        times say nothing about a GPU that has it in hardware."""
        return self.gpu == CPU or self.capability is None

    @property
    def sm(self) -> tuple[int, int] | None:
        """The compute capability as numbers; None on a CPU."""
        if self.capability is None:
            return None
        major, _, minor = self.capability.partition(".")
        return int(major), int(minor or 0)

    def differences(self, other: Machine) -> list[str]:
        """Return differences as phrases, such as "gpu was NVIDIA L4, is NVIDIA H200"."""
        changes = []
        for f in fields(self):
            was, now = getattr(self, f.name), getattr(other, f.name)
            if f.name == "backends":
                for name in dict.fromkeys([*was, *now]):
                    if was.get(name) != now.get(name):
                        changes.append(f"backend {name} was {was.get(name, 'absent')}, is {now.get(name, 'absent')}")
            elif was != now:
                changes.append(f"{f.name} was {was}, is {now}")
        return changes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "backends": dict(self.backends)}


def _read_driver_version() -> str | None:
    """NVIDIA's kernel driver; None where the system does not say it there."""
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        return None
    match = re.search(r"Kernel Module.*?\s([0-9]+(\.[0-9]+)+)", file.read_text(errors="replace"))
    return match[1] if match else None
