"""Checks of Python, packages, devices, memory, disk and process groups: everything except FP8 arithmetic."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

from octavo.base import environment
from octavo.base.byte_size import format_bytes
from octavo.base.safe_read import first_line
from octavo.doctor import other_vendors
from octavo.doctor.report import ABSENT, FAIL, OK, WARN, Check

GIB = 2**30
MIN_SHM = 1 * GIB
MIN_DISK = 5 * GIB


def versions() -> list[Check]:
    """Check Python and every required package against the supported versions."""
    checks = [Check("versions", "python", OK, platform.python_version())]  # pip enforces its minimum version
    problems = {problem.package: problem for problem in environment.package_problems()}
    for package, needed in environment.REQUIRED.items():
        if package in problems:
            means = f"Octavo requires {package} {needed}"
            checks.append(Check("versions", package, FAIL, problems[package].installed, means, problems[package].fix))
        else:
            checks.append(Check("versions", package, OK, f"{environment.version(package)} ({needed})"))
    return checks


def devices(record: dict[str, Any]) -> list[Check]:
    """Check CPU, memory and GPUs, from the record of :func:`octavo.base.environment.describe`."""
    cpu, memory = record.get("cpu") or {}, record.get("memory_bytes")
    size = f", {format_bytes(memory, binary=True)} of memory" if memory else ""
    description = f"{cpu.get('model', 'unknown')}, {cpu.get('usable_cores')} cores{size}"
    if (record.get("torch") or {}).get("cpu_bf16") is False:
        description += ", no BF16 instructions (computed in fp32)"
    checks = [Check("devices", "cpu", OK, description)]
    others = other_vendors.vendor_checks(record)
    if other_vendors.kind_of(record) is not None:
        return checks + others
    for index, gpu in enumerate(record.get("gpus") or []):
        capability = tuple(int(part) for part in gpu["capability"].split("."))
        name = f"{(record.get('accelerator') or {}).get('found', 'gpu')}:{index}"
        description = f"{gpu['name']}, sm {gpu['capability']}, {format_bytes(gpu['memory_bytes'], binary=True)}"
        if capability >= (8, 9):
            checks.append(Check("devices", name, OK, description))
        else:
            means = "it has no FP8 units (sm 8.9 or later needed): FP8 works, but is not faster"
            checks.append(Check("devices", name, WARN, description, means, "use Ada, Hopper or later for speed"))
    if not record.get("gpus"):
        checks.append(_no_gpu(record))
    return checks + others


def _no_gpu(record: dict[str, Any]) -> Check:
    torch, driver = record.get("torch") or {}, record.get("driver")
    means = "training runs on the CPU, where FP8 is emulated: correct but slow"
    if driver and not torch.get("cuda_build"):
        fix = "install torch with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        problem = f"driver {driver} is installed, but torch {torch.get('version')} is built without CUDA"
        return Check("devices", "gpu", WARN, problem, means, fix)
    if driver:
        cause = record.get("unread", {}).get("gpus", "its CUDA is not available")
        fix = "compare the driver with torch's CUDA version (nvidia-smi); in a container, start it with --gpus all"
        problem = f"driver {driver} is installed, but torch (CUDA {torch.get('cuda_build')}) sees no GPU: {cause}"
        return Check("devices", "gpu", WARN, problem, means, fix)
    return Check("devices", "gpu", ABSENT, "none", means, "none needed for the demo; an NVIDIA GPU makes it fast")


def storage(folder: Path | None = None, shm: Path = Path("/dev/shm")) -> list[Check]:
    """Check shared memory for data workers and free disk space for checkpoints."""
    checks = []
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        space = f"{format_bytes(free, binary=True)} free"
        if free >= MIN_SHM:
            checks.append(Check("storage", str(shm), OK, space))
        else:
            means = "data workers pass batches through it, and crash with a bus error if it is full"
            fix = "data.workers: 0, or start the container with --shm-size=8g"
            checks.append(Check("storage", str(shm), WARN, space, means, fix))
    folder = folder or Path.cwd()
    free = shutil.disk_usage(folder).free
    space = f"{format_bytes(free, binary=True)} free"
    if free >= MIN_DISK:
        checks.append(Check("storage", "this folder", OK, space))
    else:
        means = "a checkpoint contains weights, master weights and two moments: about 16 bytes per parameter"
        fix = "free some space, or set run.dir to a larger disk"
        checks.append(Check("storage", "this folder", WARN, space, means, fix))
    if not os.access(folder, os.W_OK):
        means, fix = "run.dir is created here", "set run.dir, or change to another folder"
        checks.append(Check("storage", "this folder", WARN, "not writable", means, fix))
    return checks


def process_groups() -> list[Check]:
    """Check Gloo with a group of one, and NCCL on a GPU: torchrun needs them."""
    import torch.distributed as dist

    from octavo.base import accelerator

    means = "training with several processes (torchrun) does not work; one process does"
    if not dist.is_available():
        return [Check("distributed", "torch.distributed", WARN, "not built in", means, "install a stock torch build")]
    checks = [_group_of_one("gloo", means)]
    here = accelerator.default_device()
    if accelerator.has_own_memory(here):
        try:
            backend = accelerator.collective_backend(here)
        except accelerator.DeviceError as error:
            return [*checks, Check("distributed", here.type, WARN, str(error), means, "train on one process")]
        if dist.is_backend_available(backend):
            checks.append(_group_of_one(backend, means, f"{here.type}:0"))
        else:
            fix = f"install a build of torch with {backend}"
            checks.append(Check("distributed", backend, WARN, "not built in", means, fix))
    return checks


def _group_of_one(backend: str, means: str, device: str = "cpu") -> Check:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return Check("distributed", backend, OK, f"in use ({dist.get_backend()})")
    value = torch.ones(1, device=device)
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_reduce(value)
        finally:
            dist.destroy_process_group()
    except Exception as error:  # torch may raise anything; the error is shown as the result
        fix = "set GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) to a network interface that exists; see `ip link`"
        return Check("distributed", backend, WARN, first_line(error), means, fix)
    return Check("distributed", backend, OK, "a group of one reduced a tensor")
