"""The device that a process computes on, and queries of its properties and abilities.

No other file names a vendor. A device is a ``torch.device``::

    accelerator.default_device()             # the accelerator that torch found, or the CPU
    accelerator.has_own_memory(device)       # whether it has its own memory and clock
    accelerator.supports_dtype(device, torch.float8_e4m3fn)
    accelerator.why_no_streams(device)       # None, or the reason as an error message quotes it

An ability is probed by a small attempt, once for each type of device, because a list of vendors would be wrong about
the next one. A feature that affects no result is skipped if the ability is missing (pinned memory; memory figures are
then None, not 0). Features that need it (offloading, graphs, several processes) raise an error.

Kernels, their clock and graphs are written for one vendor's devices and call torch directly; ``names_no_device`` in
``tests/project_rules.py`` keeps all other files from doing so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

VARIABLE = "OCTAVO_DEVICE"  # a device type that replaces torch's accelerator, such as cpu on a machine with a GPU
CPU = torch.device("cpu")
ABSENT_GPU = "cuda"  # device type of a plan for a GPU that this machine does not have
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T")


class DeviceError(ValueError):
    """The requested device is not available, or lacks a requested ability."""


# --- choice -----------------------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """Return the device type that this process computes on, without an index: torch's accelerator if it is available
    and supports FP8 dtypes, else the CPU. :data:`VARIABLE` overrides it. Raises DeviceError if the requested device is
    missing."""
    accelerator = detect()
    if requested_type := os.environ.get(VARIABLE):
        if requested_type == CPU.type:
            return CPU
        if accelerator is None or accelerator.type != requested_type:
            seen, others = (accelerator, f"cpu or {accelerator.type}") if accelerator else ("no accelerator", "cpu")
            raise DeviceError(
                f"{VARIABLE}={requested_type}, but torch sees {seen} here; unset it, or set it to {others}"
            )
        return accelerator
    return CPU if accelerator is None or why_unused(accelerator) else accelerator


def detect() -> torch.device | None:
    """Return torch's accelerator without an index, whether or not it is used, or None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def why_unused(device: torch.device) -> str | None:
    """Return why an accelerator is used only if :data:`VARIABLE` names it, or None if it is used by default."""
    missing = missing_fp8(device)
    return missing and f"{missing}; set {VARIABLE}={device.type} to use it in high precision only"


def missing_fp8(device: torch.device) -> str | None:
    """Return the FP8 dtypes that this device does not support as a clause, or None if it supports all."""
    names = [_dtype_name(dtype) for dtype in FP8 if not supports_dtype(device, dtype)]
    return f"{device.type} does not support {' and '.join(names)}" if names else None


def device_count() -> int:
    """Return the number of accelerators that this process may use, 0 if it computes on the CPU."""
    return 0 if default_device() == CPU else torch.accelerator.device_count()


def select(index: int | None = None) -> torch.device:
    """Make the accelerator with this index current and return it; by default the one that is current."""
    device = default_device()
    if device == CPU:
        return device
    device = torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)
    set_current(device)
    return device


def set_current(device: torch.device) -> None:
    """Make this accelerator the current one of this thread."""
    torch.accelerator.set_device_index(device)


# --- properties ------------------------------------------------------------------------------------------------------


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device runs asynchronously in its own memory: every device except ``cpu`` and ``meta``."""
    return device.type not in ("cpu", "meta")


def is_gpu(device: torch.device) -> bool:
    """Return whether torch calls the device ``cuda``: an NVIDIA GPU, or an AMD GPU if torch is built for ROCm.
    For kernels and libraries that support only these."""
    return device.type == "cuda"


def runs_inductor_graphs(index: int | None = None) -> bool:
    """Return True if this process runs CUDA graphs of ``torch.compile(mode="reduce-overhead")`` on the GPU with this
    index, or on the current one. A replay runs no Python."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or (index is None and not torch.cuda.is_initialized()):
        return False
    index = torch.cuda.current_device() if index is None else index
    return trees.get_manager(index, create_if_none_exists=False) is not None


def rocm_version() -> str | None:
    """Return the version of ROCm that torch is built with (it calls AMD GPUs ``cuda``), or None."""
    return torch.version.hip


def cuda_version() -> str | None:
    """Return the version of CUDA that this torch is built with."""
    return torch.version.cuda


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return NVIDIA's compute capability, or None for other devices. AMD GPUs report numbers with another meaning."""
    if not is_gpu(device) or rocm_version():
        return None
    return torch.cuda.get_device_capability(device)


def properties(device: torch.device) -> dict[str, Any]:
    """Return the name, and what torch's module reports besides: memory_bytes, multiprocessors, capability (NVIDIA),
    architecture (AMD)."""
    reported = _driver_properties(device)
    sm = compute_capability(device)
    values = {
        "name": getattr(reported, "name", None) or device.type,
        "capability": None if sm is None else f"{sm[0]}.{sm[1]}",
        "memory_bytes": getattr(reported, "total_memory", None),
        "multiprocessors": getattr(reported, "multi_processor_count", None),
        "architecture": getattr(reported, "gcnArchName", None) if rocm_version() else None,
    }
    return {key: value for key, value in values.items() if value is not None}


def identifiers(device: torch.device) -> list[str]:
    """Return what distinguishes the device from others of its kind, if the driver reports it: name, UUID, PCI bus."""
    reported = _driver_properties(device)
    uuid, bus = getattr(reported, "uuid", None), getattr(reported, "pci_bus_id", None)
    words = [str(getattr(reported, "name", None) or device.type)]
    words += [f"UUID {uuid}"] * (uuid is not None)
    if bus is not None:
        domain, number = getattr(reported, "pci_domain_id", 0), getattr(reported, "pci_device_id", 0)
        words.append(f"PCI {domain:04x}:{bus:02x}:{number:02x}")
    return words


def _driver_properties(device: torch.device) -> object:
    """Return the properties that torch's module reports, in a vendor's class, or None."""
    reader = getattr(module(device), "get_device_properties", None)
    return None if reader is None else reader(device)


def all_properties(device: torch.device) -> list[dict[str, Any]]:
    """Return the :func:`properties` of every device of this type."""
    return [properties(torch.device(device.type, index)) for index in range(torch.accelerator.device_count())]


def module(device: torch.device) -> Any:
    """Return torch's module for this type of device, such as ``torch.xpu``, or None."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


# --- dtypes and computation -------------------------------------------------------------------------------------------


def supports_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device can allocate tensors of this dtype, cast fp32 to it and read it as bytes."""
    # Not probed if torch always supports FP8: the probe would initialize CUDA, and this process may still fork.
    return not has_own_memory(device) or is_gpu(device) or _supports_dtype(device.type, dtype)


@lru_cache(maxsize=64)
def _supports_dtype(kind: str, dtype: torch.dtype) -> bool:
    def attempt() -> None:
        cast = torch.ones(2, device=kind).to(dtype)
        cast.view(torch.uint8 if dtype.itemsize == 1 else dtype).cpu()

    return _failure_text(attempt) is None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that high precision runs in: BF16 by autocast, or None for fp32 where torch has no autocast for
    the device, and on the CPU, which is not faster in BF16."""
    if not has_own_memory(device):
        return None
    return torch.bfloat16 if is_gpu(device) or _autocasts_to_bf16(device.type) else None


@lru_cache(maxsize=8)
def _autocasts_to_bf16(kind: str) -> bool:
    """Return whether a matrix product under autocast is BF16 there: autocast accepts device types that it has no rules
    for."""

    def attempt() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            product = torch.ones(2, 2, device=kind) @ torch.ones(2, 2, device=kind)
        if product.dtype != torch.bfloat16:
            raise NotImplementedError(f"a product under autocast is {product.dtype}")

    return torch.amp.is_autocast_available(kind) and _failure_text(attempt) is None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context that autocasts to this dtype; None disables autocast."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@lru_cache(maxsize=2)
def multiplies_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products of BF16 or of FP16, by torch's own test."""
    name = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, name)())


def supports_fp32_product(device: torch.device) -> bool:
    """Return whether BF16 matrices can be multiplied with an fp32 result (``torch.mm(..., out_dtype=)``)."""
    return is_gpu(device) or (has_own_memory(device) and _supports_fp32_product(device.type))


@lru_cache(maxsize=8)
def _supports_fp32_product(kind: str) -> bool:
    ones = torch.ones(16, 16, device=kind, dtype=torch.bfloat16)
    return _failure_text(lambda: torch.mm(ones, ones, out_dtype=torch.float32)) is None


def accepts_parameter_data(device: torch.device) -> bool:
    """Return whether ``parameter.data`` on the CPU can be set to a tensor there, as for the devices that torch
    knows."""
    return not has_own_memory(device) or is_gpu(device) or _accepts_parameter_data(device.type)


@lru_cache(maxsize=8)
def _accepts_parameter_data(kind: str) -> bool:
    return torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=kind))


def move(model: M, device: torch.device) -> M:
    """``model.to(device)``, in place: parameters stay the objects that modules share. By default ``to`` creates new
    parameters where a CPU tensor cannot become one of the device (PrivateUse1), which would untie tied weights."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or not accepts_parameter_data(device))
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# --- time -------------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; returns at once on the CPU."""
    if has_own_memory(device):
        torch.accelerator.synchronize(device)


def why_no_streams(device: torch.device) -> str | None:
    """Return why copies cannot overlap computation there, or None if the device has streams and events."""
    if not has_own_memory(device):
        return f"{device.type} has no separate memory"
    return None if is_gpu(device) else _why_no_streams(device.type)


@lru_cache(maxsize=8)
def _why_no_streams(kind: str) -> str | None:
    def attempt() -> None:
        device = torch.device(kind, torch.accelerator.current_device_index())
        with new_stream(device) as side_stream:
            new_event(device).record(side_stream)
        side_stream.wait_stream(current_stream(device))
        side_stream.synchronize()

    error = _failure_text(attempt)
    return None if error is None else f"{kind} has only its default stream ({error})"


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream; ``with`` makes it the current one."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that work is queued on now."""
    return torch.accelerator.current_stream(device)


def module_has_streams() -> bool:
    """Return whether the module of torch's accelerator has ``current_stream``, which libraries that copy tensors before
    writing them (DCP) call, even if the accelerator is not used."""
    device = detect()
    return device is None or hasattr(module(device), "current_stream")


def set_stream(new: torch.Stream) -> None:
    """Make this the current stream of this thread."""
    torch.accelerator.set_stream(new)


def stream_id(device: torch.device) -> int:
    """Return the id of the current stream among the streams of the device; 0 on the CPU."""
    return current_stream(device).stream_id if has_own_memory(device) else 0


def new_event(device: torch.device, timing: bool = False) -> torch.Event:
    """Return a new event."""
    return torch.Event(device, enable_timing=timing)


# --- memory -----------------------------------------------------------------------------------------------------------


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors occupy there, or None if the device does not count them."""
    return _read_memory_stat(device, torch.accelerator.memory_allocated)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak number of bytes that tensors occupied there since :func:`reset_peak`, or None if the device
    does not count them."""
    return _read_memory_stat(device, torch.accelerator.max_memory_allocated)


def empty_cache_and_reset_peak(device: torch.device) -> None:
    """Return cached, unused memory to the device, and restart :func:`peak_bytes`."""
    empty_cache(device)
    _read_memory_stat(device, torch.accelerator.reset_peak_memory_stats)


def reset_peak(device: torch.device) -> None:
    """Restart :func:`peak_bytes`."""
    _read_memory_stat(device, torch.accelerator.reset_peak_memory_stats)


def requested_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors requested, without the allocator's rounding, or None if not counted."""
    stats = _read_memory_stat(device, getattr(module(device), "memory_stats", lambda device: None))
    return None if stats is None else stats.get("requested_bytes.all.current")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated there, including unused memory that torch caches, or None if the
    device does not report it."""
    info = _read_memory_stat(device, torch.accelerator.get_memory_info)
    reserved, used = _read_memory_stat(device, torch.accelerator.memory_reserved), allocated_bytes(device)
    return None if info is None or reserved is None or used is None else info[0] + reserved - used


def empty_cache(device: torch.device) -> None:
    """Return cached, unused memory to the device."""
    if _has_memory_stats(device):
        torch.accelerator.empty_cache()


def _read_memory_stat(device: torch.device, reader: Callable[[torch.device], T]) -> T | None:
    return reader(device) if _has_memory_stats(device) else None


def _has_memory_stats(device: torch.device) -> bool:
    return has_own_memory(device) and (is_gpu(device) or _probe_memory_stats(device.type))


@lru_cache(maxsize=8)
def _probe_memory_stats(kind: str) -> bool:
    return _failure_text(lambda: torch.accelerator.memory_allocated(torch.device(kind, 0))) is None


def empty_pinned(size: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate host memory, pinned if that lets ``device`` copy asynchronously."""
    return torch.empty(size, dtype=dtype, device=CPU, pin_memory=can_pin_memory(device))


def can_pin_memory(device: torch.device) -> bool:
    """Return whether host memory can be pinned for it."""
    return has_own_memory(device) and (is_gpu(device) or _can_pin_memory(device.type))


@lru_cache(maxsize=8)
def _can_pin_memory(kind: str) -> bool:
    return _failure_text(lambda: torch.empty(1, pin_memory=True)) is None


def pin_in_place(memory: Tensor, device: torch.device) -> bool | None:
    """Pin existing host memory until :func:`unpin`. Returns True, False if the limit of pinned memory is reached, or
    None if the device has no such call, which makes copies slower."""
    if not is_gpu(device):
        return None
    return not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))


def unpin(memory: Tensor) -> None:
    """Undo :func:`pin_in_place`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def allocator() -> str | None:
    """Return the allocator of GPU memory: native, cudaMallocAsync or a library's, or None without a GPU."""
    device = detect()
    return torch.cuda.get_allocator_backend() if device is not None and is_gpu(device) else None


# --- random numbers, and other processes ------------------------------------------------------------------------------


def rng_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's random number generator, uint8 on the host; None for the CPU and for devices
    without a generator."""
    reader = getattr(module(device), "get_rng_state", None) if has_own_memory(device) else None
    return None if reader is None else reader(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Set a state that :func:`rng_state` returned."""
    module(device).set_rng_state(state, device)


def collective_backend(device: torch.device) -> str:
    """Return the backend of collectives of tensors there, from torch's table: nccl, xccl, hccl, gloo. Raises
    DeviceError if no backend is registered for the device."""
    try:
        return torch.distributed.get_default_backend_for_device(device)
    except ValueError as error:
        raise DeviceError(
            f"this torch has no backend for collectives between devices of type {device.type} ({error}). Start one "
            f"process, register a backend for it (torch.distributed.Backend.register_backend), or set {VARIABLE}=cpu"
        ) from error


def nccl_version(device: torch.device) -> str | None:
    """Return the version of NCCL (RCCL on AMD GPUs), or None if another backend runs the collectives."""
    if not is_gpu(device) or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def has_flight_recorder(device: torch.device) -> bool:
    """Return whether torch's flight recorder, which is part of NCCL, records the last collectives."""
    return is_gpu(device)


def has_graphs(device: torch.device) -> bool:
    """Return whether steps can be captured and replayed: graphs are written for CUDA only."""
    return is_gpu(device)


# --- attempts ---------------------------------------------------------------------------------------------------------


def list_abilities(device: torch.device) -> dict[str, bool]:
    """Return all abilities of a device by name, as ``octavo doctor`` prints and docs/devices.md lists them."""
    return {
        "FP8 dtypes": all(supports_dtype(device, dtype) for dtype in FP8),
        "float64": supports_dtype(device, torch.float64),
        "BF16 autocast": autocast_dtype(device) is not None,
        "streams and events": why_no_streams(device) is None,
        "pinned host memory": can_pin_memory(device),
        "memory figures": _has_memory_stats(device),
        "generator of its own": rng_state(device) is not None,
        "collectives": _failure_text(lambda: collective_backend(device)) is None,
        "graphs": has_graphs(device),
    }


def _failure_text(attempt: Callable[[], object]) -> str | None:
    """Return the message of an attempt's exception in one line, or None if it succeeded."""
    try:
        attempt()
    except Exception as error:  # backends raise exceptions of any class for a missing ability
        return re.sub(r"\s+", " ", str(error)).strip()[:160] or type(error).__name__
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
