"""What a process computes on: every question to a device, asked here and answered by torch.

Elsewhere nobody says the name of a vendor. A device is a ``torch.device``; what it is and what it can do is asked::

    accelerator.here()                       # the accelerator that torch found, or the CPU
    accelerator.beside_host(device)          # whether it has memory and a clock of its own
    accelerator.holds(device, torch.float8_e4m3fn)
    accelerator.why_no_streams(device)       # None, or the sentence that an error carries

A question is answered by a small try, once for each type of device, as a list of vendors would be wrong about the next
one. What a device lacks is either gone without, where no result depends on it (pinned memory, figures of memory: None,
which is not 0), or the reason of an error of who stands on it (offloading, graphs, several processes).

Kernels, their clock and graphs are written for one vendor's devices and ask torch themselves; the rule that keeps the
others from it is ``names_no_device`` in ``tests/project_rules.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

VARIABLE = "OCTAVO_DEVICE"  # a type of device: takes the place of torch's accelerator, such as cpu beside a GPU
CPU = torch.device("cpu")
CARD = "cuda"  # the type of device of a plan for a card that is not here
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


M = TypeVar("M", bound=torch.nn.Module)


class DeviceError(ValueError):
    """A device that was asked for is not here, or lacks what was asked of it."""


# --- which ------------------------------------------------------------------------------------------------------------


def here() -> torch.device:
    """What this process computes on, without an index: torch's accelerator where it is available and holds FP8 dtypes,
    else the CPU; :data:`VARIABLE` names another type. Raises DeviceError for one that is not here."""
    accelerator = found()
    if asked := os.environ.get(VARIABLE):
        if asked == CPU.type:
            return CPU
        if accelerator is None or accelerator.type != asked:
            seen, others = (accelerator, f"cpu or {accelerator.type}") if accelerator else ("no accelerator", "cpu")
            raise DeviceError(f"{VARIABLE}={asked}, and torch sees {seen} here; unset it, or name {others}")
        return accelerator
    return CPU if accelerator is None or left_out(accelerator) else accelerator


def found() -> torch.device | None:
    """torch's accelerator, without an index, whether or not it is used; None where there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def left_out(device: torch.device) -> str | None:
    """Why an accelerator is used by those alone who name it in :data:`VARIABLE`; None: it is used."""
    lacks = no_fp8(device)
    return lacks and f"{lacks}; {VARIABLE}={device.type} uses it in high precision alone"


def no_fp8(device: torch.device) -> str | None:
    """Which FP8 dtypes tensors there cannot have; None: none."""
    lacks = [_short(dtype) for dtype in FP8 if not holds(device, dtype)]
    return f"{device.type} holds no {' and no '.join(lacks)}" if lacks else None


def count() -> int:
    """How many accelerators this process may use: 0 where it computes on the CPU."""
    return 0 if here() == CPU else torch.accelerator.device_count()


def take(index: int | None = None) -> torch.device:
    """What this process computes on from now on, with its index: this one, or the one that is current."""
    device = here()
    if device == CPU:
        return device
    device = torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)
    use(device)
    return device


def use(device: torch.device) -> None:
    """Make this accelerator the current one of this thread."""
    torch.accelerator.set_device_index(device)


# --- what it is -------------------------------------------------------------------------------------------------------


def beside_host(device: torch.device) -> bool:
    """Whether it computes beside the program, in memory of its own: all but the CPU and the device without values."""
    return device.type not in ("cpu", "meta")


def is_gpu(device: torch.device) -> bool:
    """Whether torch calls it ``cuda``: a GPU of NVIDIA's, or of AMD's where torch is built for those (:func:`rocm`).
    For kernels and libraries that are made for these alone."""
    return device.type == "cuda"


def rocm() -> str | None:
    """The version of ROCm that this torch is built with, which calls AMD's GPUs ``cuda``; None: it is for others."""
    return torch.version.hip


def toolkit() -> str | None:
    """The version of CUDA that this torch is built with."""
    return torch.version.cuda


def capability(device: torch.device) -> tuple[int, int] | None:
    """NVIDIA's compute capability; None for every other device, AMD's GPUs among them, whose numbers mean others."""
    if not is_gpu(device) or rocm():
        return None
    return torch.cuda.get_device_capability(device)


def properties(device: torch.device) -> dict[str, Any]:
    """name, and what else its module tells: memory_bytes, multiprocessors, capability (NVIDIA), architecture (AMD)."""
    reader = getattr(module(device), "get_device_properties", None)
    told = None if reader is None else reader(device)
    sm = capability(device)
    found = {
        "name": getattr(told, "name", None) or device.type,
        "capability": None if sm is None else f"{sm[0]}.{sm[1]}",
        "memory_bytes": getattr(told, "total_memory", None),
        "multiprocessors": getattr(told, "multi_processor_count", None),
        "architecture": getattr(told, "gcnArchName", None) if rocm() else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def marks(device: torch.device) -> list[str]:
    """What tells it from all others of its kind, as far as its driver says: name, UUID, place on the PCI bus."""
    reader = getattr(module(device), "get_device_properties", None)
    told = None if reader is None else reader(device)
    uuid, bus = getattr(told, "uuid", None), getattr(told, "pci_bus_id", None)
    found = [str(getattr(told, "name", None) or device.type)]
    found += [f"UUID {uuid}"] * (uuid is not None)
    if bus is not None:
        found.append(f"PCI {getattr(told, 'pci_domain_id', 0):04x}:{bus:02x}:{told.pci_device_id:02x}")
    return found


def each(device: torch.device) -> list[dict[str, Any]]:
    """:func:`properties` of every device of this type."""
    return [properties(torch.device(device.type, index)) for index in range(torch.accelerator.device_count())]


def module(device: torch.device) -> Any:
    """torch's module of this type of device, such as ``torch.xpu``; None where it has none."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


# --- what it holds and computes ---------------------------------------------------------------------------------------


def holds(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be there, be made from fp32 and be read as bytes."""
    # Not tried where torch has FP8 in every version: a try would start CUDA, and this process may fork yet.
    return not beside_host(device) or is_gpu(device) or _holds(device.type, dtype)


@lru_cache(maxsize=64)
def _holds(kind: str, dtype: torch.dtype) -> bool:
    def attempt() -> None:
        there = torch.ones(2, device=kind).to(dtype)
        there.view(torch.uint8 if dtype.itemsize == 1 else dtype).cpu()

    return _fails(attempt) is None


def low_precision(device: torch.device) -> torch.dtype | None:
    """BF16 where high precision is computed in it by autocast; None, for fp32, where torch has no autocast for the
    device, and on the CPU, which is not faster for it."""
    if not beside_host(device):
        return None
    return torch.bfloat16 if is_gpu(device) or _casts(device.type) else None


@lru_cache(maxsize=8)
def _casts(kind: str) -> bool:
    """Whether autocast makes a product BF16 there: a device may be known to it and have no rules."""

    def attempt() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            made = torch.ones(2, 2, device=kind) @ torch.ones(2, 2, device=kind)
        if made.dtype != torch.bfloat16:
            raise NotImplementedError(f"a product under autocast is {made.dtype}")

    return torch.amp.is_autocast_available(kind) and _fails(attempt) is None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast to this dtype; None: as it is."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def multiplies_wide(device: torch.device) -> bool:
    """Whether a product of BF16 matrices can be had in fp32 (``torch.mm(..., out_dtype=)``)."""
    return is_gpu(device) or (beside_host(device) and _multiplies_wide(device.type))


@lru_cache(maxsize=8)
def _multiplies_wide(kind: str) -> bool:
    one = torch.ones(16, 16, device=kind, dtype=torch.bfloat16)
    return _fails(lambda: torch.mm(one, one, out_dtype=torch.float32)) is None


def takes_place(device: torch.device) -> bool:
    """Whether ``parameter.data`` of the CPU can become a tensor there, as torch has it for the devices it knows."""
    return not beside_host(device) or is_gpu(device) or _takes_place(device.type)


@lru_cache(maxsize=8)
def _takes_place(kind: str) -> bool:
    return torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=kind))


def move(model: M, device: torch.device) -> M:
    """``model.to(device)``, in place: parameters stay the objects that modules share. By itself ``to`` makes new ones
    where a tensor of the CPU cannot become one of the device (PrivateUse1), and tied weights come apart."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or not takes_place(device))
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# --- time -------------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of the device has happened; at once on the CPU."""
    if beside_host(device):
        torch.accelerator.synchronize(device)


def why_no_streams(device: torch.device) -> str | None:
    """Why copies cannot go on beside the arithmetic there; None: streams and events are there."""
    if not beside_host(device):
        return f"{device.type} has no memory of its own"
    return None if is_gpu(device) else _why_no_streams(device.type)


@lru_cache(maxsize=8)
def _why_no_streams(kind: str) -> str | None:
    def attempt() -> None:
        device = torch.device(kind, torch.accelerator.current_device_index())
        with stream(device) as beside:
            event(device).record(beside)
        beside.wait_stream(current_stream(device))
        beside.synchronize()

    why = _fails(attempt)
    return None if why is None else f"{kind} has no streams and events besides its default one ({why})"


def stream(device: torch.device) -> torch.Stream:
    """A new stream; ``with`` makes it the current one."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that work goes to now."""
    return torch.accelerator.current_stream(device)


def module_has_streams() -> bool:
    """Whether the module of torch's accelerator, used or not, knows its current stream: libraries that copy ahead of
    what they write (DCP) ask it for that."""
    device = found()
    return device is None or hasattr(module(device), "current_stream")


def go_on_in(beside: torch.Stream) -> None:
    """Let what this thread asks of the device from now on go to this stream."""
    torch.accelerator.set_stream(beside)


def stream_number(device: torch.device) -> int:
    """What tells the current stream from others of the device; 0 on the CPU."""
    return current_stream(device).stream_id if beside_host(device) else 0


def event(device: torch.device, timing: bool = False) -> torch.Event:
    """A new event."""
    return torch.Event(device, enable_timing=timing)


# --- memory -----------------------------------------------------------------------------------------------------------


def allocated(device: torch.device) -> int | None:
    """Bytes that tensors hold there; None where the device does not count them."""
    return _figure(device, torch.accelerator.memory_allocated)


def peak(device: torch.device) -> int | None:
    """The most bytes that tensors held there since :func:`forget_peak`; None where the device does not count them."""
    return _figure(device, torch.accelerator.max_memory_allocated)


def forget_peak(device: torch.device) -> None:
    """Let :func:`peak` begin anew, and give back what torch keeps of the device and nobody uses."""
    empty_cache(device)
    _figure(device, torch.accelerator.reset_peak_memory_stats)


def restart_peak(device: torch.device) -> None:
    """Let :func:`peak` begin anew."""
    _figure(device, torch.accelerator.reset_peak_memory_stats)


def requested(device: torch.device) -> int | None:
    """Bytes that tensors asked for, without what the allocator rounds up; None where the device does not count them."""
    told = _figure(device, getattr(module(device), "memory_stats", lambda device: None))
    return None if told is None else told.get("requested_bytes.all.current")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that tensors could still take there, those that torch holds and nobody uses among them; None where the
    device does not tell."""
    told = _figure(device, torch.accelerator.get_memory_info)
    reserved, used = _figure(device, torch.accelerator.memory_reserved), allocated(device)
    return None if told is None or reserved is None or used is None else told[0] + reserved - used


def empty_cache(device: torch.device) -> None:
    """Give back what torch keeps of the device's memory and nobody uses."""
    if _counts(device):
        torch.accelerator.empty_cache()


def _figure(device: torch.device, reader: Callable[[torch.device], Any]) -> Any:
    return reader(device) if _counts(device) else None


def _counts(device: torch.device) -> bool:
    return beside_host(device) and (is_gpu(device) or _has_figures(device.type))


@lru_cache(maxsize=8)
def _has_figures(kind: str) -> bool:
    return _fails(lambda: torch.accelerator.memory_allocated(torch.device(kind, 0))) is None


def pinned(size: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Empty host memory, pinned where that lets ``device`` copy beside the program."""
    return torch.empty(size, dtype=dtype, device=CPU, pin_memory=pins(device))


def pins(device: torch.device) -> bool:
    """Whether host memory can be pinned for it."""
    return beside_host(device) and (is_gpu(device) or _pins(device.type))


@lru_cache(maxsize=8)
def _pins(kind: str) -> bool:
    return _fails(lambda: torch.empty(1, pin_memory=True)) is None


def pin_in_place(memory: Tensor, device: torch.device) -> bool | None:
    """Pin host memory as it is, until :func:`unpin`: True, False where there is no room for that, None where the device
    has no such call, and copies to it are slower."""
    if not is_gpu(device):
        return None
    return not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))


def unpin(memory: Tensor) -> None:
    """Take back :func:`pin_in_place`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def allocator() -> str | None:
    """What hands out a GPU's memory: native, cudaMallocAsync or a library's; None where there is no GPU."""
    device = found()
    return torch.cuda.get_allocator_backend() if device is not None and is_gpu(device) else None


# --- random numbers, and other processes ------------------------------------------------------------------------------


def rng_state(device: torch.device) -> Tensor | None:
    """The state of the device's own generator, uint8 on the host; None on the CPU, and where there is none."""
    reader = getattr(module(device), "get_rng_state", None) if beside_host(device) else None
    return None if reader is None else reader(device)


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Set what :func:`rng_state` gave."""
    module(device).set_rng_state(state, device)


def wire(device: torch.device) -> str:
    """What carries collectives of tensors there, by torch's own table: nccl, xccl, hccl, gloo. Raises DeviceError where
    nothing is registered for it."""
    try:
        return torch.distributed.get_default_backend_for_device(device)
    except ValueError as error:
        raise DeviceError(
            f"nothing carries collectives between devices of type {device.type} in this torch ({error}). Start one "
            f"process, register a backend for it (torch.distributed.Backend.register_backend), or set {VARIABLE}=cpu"
        ) from error


def nccl_version(device: torch.device) -> str | None:
    """The version of NCCL (of RCCL, on AMD's GPUs); None where collectives are another's."""
    if not is_gpu(device) or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def traces_collectives(device: torch.device) -> bool:
    """Whether the last collectives are recorded (torch's flight recorder, of NCCL)."""
    return is_gpu(device)


def has_graphs(device: torch.device) -> bool:
    """Whether steps can be captured and replayed: graphs are written for CUDA alone."""
    return is_gpu(device)


# --- tries ------------------------------------------------------------------------------------------------------------


def abilities(device: torch.device) -> dict[str, bool]:
    """Every answer about a device, by name: what ``octavo doctor`` shows and docs/devices.md lists."""
    return {
        "FP8 dtypes": all(holds(device, dtype) for dtype in FP8),
        "float64": holds(device, torch.float64),
        "BF16 autocast": low_precision(device) is not None,
        "streams and events": why_no_streams(device) is None,
        "pinned host memory": pins(device),
        "memory figures": _counts(device),
        "generator of its own": rng_state(device) is not None,
        "collectives": _fails(lambda: wire(device)) is None,
        "graphs": has_graphs(device),
    }


def _fails(attempt: Callable[[], Any]) -> str | None:
    """What a try raised, in a line; None: it worked. Backends raise whatever they like for what they have not."""
    try:
        attempt()
    except Exception as error:
        return re.sub(r"\s+", " ", str(error)).strip()[:160] or type(error).__name__
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
