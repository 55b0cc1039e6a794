"""Description of the machine and the installed versions, recorded in every run to document its measurements.

:func:`describe` never fails, and of the heavy packages imports only torch: a value that cannot be read is left out, and
the reason is listed under ``unread``. :func:`package_problems` compares the versions with the required ones.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import version as octavo_version
from octavo.base import env_vars

if TYPE_CHECKING:
    import torch

#: required packages with the versions Octavo is written for (as in pyproject.toml; a test keeps the two equal)
REQUIRED: dict[str, str] = {
    "torch": ">=2.11",
    "transformers": ">=5.17,<5.25",
    "huggingface-hub": ">=1.5",
    "fsspec": ">=2024.6",
    "safetensors": ">=0.8",
    "tokenizers": ">=0.23.1",
    "jinja2": ">=3.1.6",
    "pydantic": ">=2.12",
    "ruamel.yaml": ">=0.18",
    "pillow": ">=10.1",
    "filelock": ">=3.12",
    "numpy": ">=1.26",
    "pyarrow": ">=15",
    "datasets": ">=3",
    "rich": ">=13",
    "matplotlib": ">=3.8",
    "tensorboard": ">=2.16.2",
    "scipy": ">=1.11",
    "peft": ">=0.19",
}

#: optional packages, recorded if they are installed
OPTIONAL: tuple[str, ...] = (
    "triton", "deep_gemm", "flash-attn", "torchao", "trl", "accelerate", "vllm", "torchvision", "num2words",
    "soundfile", "soxr", "av", "cryptography",
)  # fmt: skip

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Problem:
    """A package that is missing, or has a version that Octavo is not written for."""

    package: str
    installed: str
    needed: str
    fix: str


def describe() -> dict[str, Any]:
    """Return the record of this machine, which JSON can hold: octavo, python, os, cpu, memory, torch, gpus, packages;
    the variables and settings of :mod:`octavo.base.env_vars`.

    Memory is in bytes. Takes a fraction of a second once torch is imported. Never raises; ``unread`` maps values that
    could not be read to the cause.
    """
    unread: dict[str, str] = {}

    def read(name: str, reader: Callable[[], Any]) -> Any:
        try:
            return reader()
        except Exception as error:  # recorded, not raised: a record must not stop a run
            unread[name] = f"{type(error).__name__}: {error}"
            return None

    record: dict[str, Any] = {
        "octavo": {"version": octavo_version.__version__, **(read("git", lambda: _cached(git_state)) or {})},
        "python": platform.python_version(),
        "os": read("os", platform.platform),
        "cpu": read("cpu", _cpu),
        "memory_bytes": read("memory_bytes", _memory),
        "torch": read("torch", _torch),
        "gpus": read("gpus", _gpus) or [],
        "accelerator": read("accelerator", _accelerator) or {},
        "signs": read("signs", _detect_drivers) or [],
        "driver": read("driver", _driver),
        "packages": {**(read("packages", lambda: _cached(versions)) or {})},
        "variables": env_vars.set_variables(),
        "settings": {name: read(name, reader) for name, reader in env_vars.SETTINGS.items()},
        "unread": unread,
    }
    return record


@functools.cache
def _cached(reader: Callable[[], Any]) -> Any:
    """Return the result of a reader, cached for values that do not change while a process runs: its code and
    packages."""
    return reader()


def versions() -> dict[str, str]:
    """Return the installed version of every package that Octavo needs or can use. Nothing is imported."""
    numbers = {name: version(name) for name in (*REQUIRED, *OPTIONAL)}
    return {name: number for name, number in numbers.items() if number is not None}


def version(package: str) -> str | None:
    """Return the installed version of a package from its metadata, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_problems() -> list[Problem]:
    """Return required packages that are missing or out of range, each with the command that fixes it."""
    problems = []
    for package, needed in REQUIRED.items():
        installed = version(package)
        if installed is None or not is_in_range(installed, needed):
            fix = f"pip install '{package}{needed}'"
            problems.append(Problem(package, installed or "not installed", needed, fix))
    return problems


def why_no_trackers(names: Sequence[str]) -> str | None:
    """Return why trackers cannot be used: the packages that are not installed, and the command that installs them."""
    missing = [name for name in names if version(name) is None and version(f"{name}-skinny") is None]
    if not missing:
        return None
    return (
        f"run.trackers names {', '.join(names)}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
        f"installed here: pip install {' '.join(missing)}, or leave {'it' if len(missing) == 1 else 'them'} out"
    )


def is_in_range(installed: str, needed: str) -> bool:
    """Return whether a version is in a range such as ``>=2.11,<2.14``; suffixes (``+cpu``, ``a0``) are ignored."""
    number = _parse_release(installed)
    for clause in needed.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([0-9.]+)\s*", clause)
        if match is None:
            raise ValueError(f"the version range {needed!r} contains {clause!r}; only >= and < are understood")
        bound = _parse_release(match[2])
        if not (number >= bound if match[1] == ">=" else number < bound):
            return False
    return True


def _parse_release(text: str) -> tuple[int, ...]:
    match = re.match(r"[0-9]+(\.[0-9]+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple(numbers + [0] * (4 - len(numbers)))


def git_state() -> dict[str, Any]:
    """Return the commit of the checkout that octavo is imported from, and whether it is dirty; {} if installed."""
    package = Path(octavo_version.__file__).resolve().parent
    if not (package.parent / ".git").exists():
        return {}
    git = ["git", "-C", str(package.parent)]
    commit = _run_command([*git, "rev-parse", "HEAD"]).strip()
    dirty = bool(_run_command([*git, "status", "--porcelain", "--untracked-files=no"]).strip())
    return {"commit": commit, "dirty": dirty}


def _run_command(command: list[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if process.returncode:
        raise OSError(f"{command[0]} ended with {process.returncode}: {process.stderr.strip()[:200]}")
    return process.stdout


def _cpu() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        model = match[1].strip() if match else model
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "machine": platform.machine(), "cores": os.cpu_count(), "usable_cores": usable}


def _memory() -> int | None:
    """Return the bytes of memory that this process may use: the machine's, or its container's limit if smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total


def _torch() -> dict[str, Any]:
    import torch

    from octavo.base import accelerator

    device = accelerator.detect()
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda_build": accelerator.cuda_version(),
        "rocm_build": accelerator.rocm_version(),
        "cuda_available": device is not None and accelerator.is_gpu(device),
        "cudnn": torch.backends.cudnn.version() if accelerator.cuda_version() else None,
        "nccl": None if device is None else accelerator.nccl_version(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpu_bf16": accelerator.multiplies_on_cpu(torch.bfloat16),  # has instructions for products
    }


def _gpus() -> list[dict[str, Any]]:
    """Return the GPUs of NVIDIA and AMD; :func:`_accelerator` describes the device that this process computes on."""
    from octavo.base import accelerator

    device = accelerator.detect()
    return [] if device is None or not accelerator.is_gpu(device) else accelerator.all_properties(device)


def _accelerator() -> dict[str, Any]:
    """Return the device that this process computes on and its missing abilities; for a CPU only the type."""
    from octavo.base import accelerator

    device, detected = accelerator.default_device(), accelerator.detect()
    record: dict[str, Any] = {
        "type": device.type,
        "found": "cpu" if detected is None else detected.type,
        "high": "bf16" if accelerator.autocast_dtype(device) else "fp32",
    }
    if accelerator.has_own_memory(device):
        missing = [name for name, present in accelerator.list_abilities(device).items() if not present]
        record |= {"devices": accelerator.all_properties(device), "lacks": missing}
    elif detected is not None:
        record |= {
            "left_out": accelerator.why_unused(detected) or f"{detected.type}: {accelerator.VARIABLE}={device.type}"
        }
    return record


#: driver files that show an accelerator which torch may not see
_FILES = {"ascend": "/dev/davinci_manager", "amd": "/dev/kfd"}
_INTEL = "0x8086"


def find_drivers() -> list[str]:
    """Return the kinds of accelerators whose drivers this machine has, without importing torch: nvidia, ascend, amd,
    intel, apple."""
    try:
        nvidia = _driver() is not None
    except (OSError, subprocess.TimeoutExpired):  # nvidia-smi exists and fails: the driver is broken
        nvidia = True
    return ["nvidia"] * nvidia + _detect_drivers()


def _detect_drivers() -> list[str]:
    """Return accelerators whose drivers this machine has, even if torch does not see them: ascend, amd, intel,
    apple."""
    names = [name for name, path in _FILES.items() if Path(path).exists()]
    # The graphics of an Intel CPU do not count: XPU means a card with its own memory.
    for card in Path("/sys/class/drm").glob("card[0-9]*/device"):
        vendor, memory = card / "vendor", card / "tile0/physical_vram_size_bytes"
        if vendor.exists() and vendor.read_text().strip() == _INTEL and (memory.exists() or any(card.glob("lmem*"))):
            names.append("intel")
            break
    return names + ["apple"] * (platform.system() == "Darwin" and platform.machine() == "arm64")


def describe_device(device: torch.device) -> str:
    """Return a torch device with what distinguishes it from others: ``cuda:3 (NVIDIA H100, UUID ..., PCI ...)``; for a
    CPU its model. Values that the driver does not report are left out."""
    from octavo.base import accelerator

    if not accelerator.has_own_memory(device):
        return f"{device.type} ({_cpu()['model']})"
    return f"{device} ({', '.join(accelerator.identifiers(device))})"


def _driver() -> str | None:
    """Return NVIDIA's driver version, or None on a machine without the driver."""
    proc = Path("/proc/driver/nvidia/version")
    if proc.exists():
        match = re.search(r"Kernel Module.*?\s([0-9]+(\.[0-9]+)+)", proc.read_text(errors="replace"))
        if match:
            return match[1]
    if shutil.which("nvidia-smi") is None:
        return None
    out = _run_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return out.split()[0] if out.split() else None
