"""Switches outside the configuration file: environment variables, and settings of torch and Python, that change
results, speed, or time limits. ``environment.json`` records only those listed below, because the environment of
a process also contains keys and passwords. ``docs/switches.md`` describes each, and when to change it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: subject -> names of environment variables; the values of those that are set are recorded
VARIABLES: dict[str, tuple[str, ...]] = {
    "devices": (
        "OCTAVO_DEVICE", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "allocator": (
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "MALLOC_ARENA_MAX",
        "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
    ),
    "threads": (
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY", "KMP_BLOCKTIME", "TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS",
    ),
    "numbers": (
        "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE", "MKL_CBWR", "ONEDNN_DEFAULT_FPMATH_MODE", "TRITON_INTERPRET",
    ),
    "collectives": (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "NCCL_ALGO", "NCCL_PROTO",
        "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    ),
    "launch": (
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RAY_ADDRESS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    "files": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"),
}  # fmt: skip


def cache_home() -> Path:
    """Return the folder of files that can be made again: `OCTAVO_CACHE`, else `octavo` in the user's folder of
    caches."""
    if folder := os.environ.get("OCTAVO_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def set_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of :data:`VARIABLES` that are set, with their values."""
    return {name: environ[name] for names in VARIABLES.values() for name in names if name in environ}


def _affinity() -> list[int] | None:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _torch_setting(read: Callable[[Any], object]) -> Callable[[], object]:
    """Return a reader of a setting of torch, which imports torch only when it is called."""

    def setting() -> object:
        import torch

        return read(torch)

    return setting


def _allocator() -> str | None:
    from octavo.base import accelerator  # imports torch

    return accelerator.allocator()


#: setting -> reader of its value in this process; recorded when a run is assembled
SETTINGS: dict[str, Callable[[], object]] = {
    "gc.threshold": lambda: list(gc.get_threshold()),
    "gc.enabled": gc.isenabled,
    "gc.frozen": gc.get_freeze_count,
    "cpu.affinity": _affinity,
    "torch.threads": _torch_setting(lambda torch: torch.get_num_threads()),
    "torch.interop_threads": _torch_setting(lambda torch: torch.get_num_interop_threads()),
    "torch.float32_matmul_precision": _torch_setting(lambda torch: torch.get_float32_matmul_precision()),
    "torch.deterministic": _torch_setting(lambda torch: torch.are_deterministic_algorithms_enabled()),
    "torch.cudnn.allow_tf32": _torch_setting(lambda torch: torch.backends.cudnn.allow_tf32),
    "torch.cudnn.benchmark": _torch_setting(lambda torch: torch.backends.cudnn.benchmark),
    "torch.cuda.allocator": _allocator,
}
