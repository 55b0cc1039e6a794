"""Activation offload: tensors that blocks save for backward are kept in host memory (Rhu et al. 2016, vDNN).

    handle = offload(blocks)              # (name, block) pairs in the order of the forward; undo with handle.remove()

    forward    block i ends: its saved tensors are copied to pinned host memory, on a separate stream
               block i + 1 ends: the compute stream has waited for that copy, and the memory of block i is free
    backward   block i begins: the tensors of block i - 1 are fetched, while block i computes

So the activations of at most two blocks are on the device at any time, and the host never waits. A storage is moved
once, even if several views of it are saved. These stay on the device: tensors smaller than ``least`` bytes, parameters
(including FSDP2's gathered ones and autocast's copies), further arguments of blocks (masks, cos and sin, which all
blocks share), and tensors that functions hold without autograd.

The copies are hidden if a block computes for longer than its copies take. Saving in FP8 halves the bytes, and with
checkpointing (:mod:`octavo.fp8.memory.recompute`) only the inputs of recomputed regions are copied.

``synchronize_per_layer`` limits the memory of the allocator: the host waits for the device after the forward and the
backward of each block, so that streams cannot run ahead of freed memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from octavo.base import accelerator

MIN_BYTES = 1 << 18  # bytes: below, a copy takes less time than its launch
Blocks = Iterable[tuple[str, nn.Module]]


class Copies(Protocol):
    """Copies bytes between a device and the host without waiting. ``ready`` is a handle for :meth:`wait`."""

    def to_host(self, here: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy ``here`` [bytes] to host memory, after the pending work of the device; return (copy, ready)."""

    def to_device(self, on_host: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy ``on_host`` [bytes] to the device; return (copy, ready)."""

    def wait(self, ready: Any) -> None:
        """Make later work of the device wait for the copy."""


class StreamCopies:
    """Copies on a separate stream, with pinned host memory if the device supports it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, accelerator.new_stream(device)

    def to_host(self, here: Tensor) -> tuple[Tensor, torch.Event]:
        on_host = accelerator.empty_pinned(here.shape, here.dtype, self.device)
        return on_host, self._copy(on_host, here)

    def to_device(self, on_host: Tensor) -> tuple[Tensor, torch.Event]:
        here = torch.empty(on_host.shape, dtype=on_host.dtype, device=self.device)
        ready = self._copy(here, on_host)
        here.record_stream(self.stream)  # it may be dropped unused, while it is still being written
        return here, ready

    def _copy(self, to: Tensor, source: Tensor) -> torch.Event:
        self.stream.wait_stream(accelerator.current_stream(self.device))
        with self.stream:
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, ready: torch.Event) -> None:
        accelerator.current_stream(self.device).wait_event(ready)


class Hooks:
    """Handles of hooks on modules; ``remove()`` removes them."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def offload(blocks: Blocks, *, least: int = MIN_BYTES, copies: Copies | None = None) -> Hooks:
    """Keep tensors that the forwards of these blocks save for backward in host memory.

    Args:
        blocks: (name, block) in the order in which the model calls them.
        least: smaller tensors, in bytes, stay on the device.
        copies: performs the copies. Default: on a stream of the device of the parameters.

    Raises ValueError if there are no blocks, or, without ``copies``, if the parameters are not on a device with
    separate memory and streams.
    """
    blocks = _require_blocks(blocks, "offload_activations")
    if copies is None:
        copies = StreamCopies(
            _require_device(blocks, "offload_activations", "host memory is what activations are in already", True)
        )
    manager = _Manager(copies, least, next(iter(_devices(blocks))))
    handles: list[Any] = []
    for number, (_, block) in enumerate(blocks):
        enter, leave = manager.make_hooks(number)
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(block.register_forward_hook(leave, always_call=True))
    return Hooks(handles)


def synchronize_per_layer(blocks: Blocks, wait: Callable[[], None] | None = None) -> Hooks:
    """Make the host wait for the device after the forward and the backward of each block.

    Args:
        blocks: (name, block).
        wait: function that waits. Default: ``accelerator.synchronize``.

    Raises ValueError if there are no blocks, or, without ``wait``, if the parameters are on the CPU.
    """
    blocks = _require_blocks(blocks, "synchronize_per_layer")
    if wait is None:
        device = _require_device(blocks, "synchronize_per_layer", "its computing is never ahead of the program")

        def wait() -> None:
            accelerator.synchronize(device)

    def begins(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            first_input = next(
                (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad), None
            )
            if first_input is not None:
                first_input.register_hook(
                    lambda gradient: wait()
                )  # called when the backward of the whole block is done

    def ends(block: nn.Module, args: Any, output: Any) -> None:
        wait()

    return Hooks(
        [block.register_forward_pre_hook(begins, with_kwargs=True) for _, block in blocks]
        + [block.register_forward_hook(ends) for _, block in blocks]
    )


def _require_blocks(blocks: Blocks, option: str) -> list[tuple[str, nn.Module]]:
    blocks = list(blocks)
    if not blocks:
        raise ValueError(f"{option} was asked for no blocks at all; switch it off, or give the blocks of the model")
    return blocks


def _devices(blocks: list[tuple[str, nn.Module]]) -> set[torch.device]:
    return {p.device for _, block in blocks for p in block.parameters()}


def _require_device(
    blocks: list[tuple[str, nn.Module]], option: str, why_not: str, copies: bool = False
) -> torch.device:
    devices = _devices(blocks)
    device = next(iter(devices), torch.device("cpu"))
    if copies and accelerator.has_own_memory(device) and (lack := accelerator.why_no_streams(device)):
        raise ValueError(f"{option}: true was asked, and {lack}. Set {option}: false")
    if len(devices) != 1 or not accelerator.has_own_memory(device):
        listed = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(
            f"{option}: true was asked, and it needs a GPU with a memory of its own; found the blocks on {listed}, "
            f"where {why_not}. Set {option}: false, or run on a GPU"
        )
    return device


# --- one block's forward and backward ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Slot:
    """One storage: ``here`` has its bytes on the device, ``on_host`` on the host; None while there is no copy."""

    here: Tensor | None
    alias: Tensor  # shares the version counter of what was saved
    version: int
    on_host: Tensor | None = None
    leaving: Any = None  # handle of the copy to the host, until the device waited for it
    coming: Any = None  # handle of the copy to the device
    handles: int = 0  # number of saved tensors that are views of it
    uses: int = 0  # number of them that this backward has used


@dataclass(eq=False)
class _Group:
    """Tensors that one forward of one block saved."""

    number: int
    stays: set[int]  # storages that are not moved
    previous: weakref.ref[_Group] | None
    slots: dict[int, _Slot] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _OffloadedTensor:
    """Placeholder of a saved tensor in the graph."""

    group: _Group
    slot: _Slot
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Manager:
    def __init__(self, copies: Copies, least: int, device: torch.device) -> None:
        self.copies, self.least, self.device = copies, least, device
        self._open: list[tuple[_Group | None, saved_tensors_hooks | None]] = []
        self._last: weakref.ref[_Group] | None = None  # the group whose copy may still be pending
        self._active: weakref.ref[_Group] | None = None  # the group whose backward is running

    def make_hooks(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks before and after the forward of block ``number``."""

        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self._open.append((None, None))
                return
            extra_inputs = [x for x in torch.utils._pytree.tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
            stay = {_storage_key(t) for t in (*block.parameters(), *block.buffers()) if _is_plain(t)}
            stay |= {_storage_key(t) for t in extra_inputs if _is_plain(t) and not t.requires_grad}
            last = None if self._last is None else self._last()
            follows = last is not None and last.number < number
            group = _Group(number, stay, self._last if follows else None)
            hooks = saved_tensors_hooks(lambda tensor: self._pack(group, tensor), self._unpack)
            hooks.__enter__()
            self._open.append((group, hooks))

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            group, hooks = self._open.pop()
            if group is not None and hooks is not None:
                hooks.__exit__()
                self._begin_offload(group)

        return enter, leave

    def _pack(self, group: _Group, tensor: Tensor) -> Any:
        if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or _is_lowered_parameter(tensor):
            return tensor
        storage, key = tensor.untyped_storage(), _storage_key(tensor)
        if key in group.stays or storage.nbytes() < self.least or tensor.device != self.device:
            return tensor
        slot = group.slots.get(key)
        if slot is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            slot = group.slots[key] = _Slot(whole, tensor.detach(), tensor._version)
        slot.handles += 1
        return _OffloadedTensor(group, slot, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _begin_offload(self, group: _Group) -> None:
        for slot in group.slots.values():
            if slot.alias._version != slot.version:
                raise RuntimeError(
                    f"a tensor of shape {list(slot.alias.shape)} that a block saved for its backward was written to "
                    "afterwards in the same block. Write to a copy of it, or switch offload_activations off"
                )
            assert slot.here is not None
            slot.on_host, slot.leaving = self.copies.to_host(slot.here)
            slot.alias = slot.alias.new_empty(0)  # frees the device memory
        last = None if self._last is None else self._last()
        if last is not None:
            self._drop(last)
        self._last = weakref.ref(group)

    def _drop(self, group: _Group) -> None:
        for slot in group.slots.values():
            self._free(slot)

    def _free(self, slot: _Slot) -> None:
        """Free the copy on the device after its pending reads and writes."""
        if slot.leaving is not None:
            self.copies.wait(slot.leaving)
        slot.here, slot.leaving, slot.coming, slot.uses = None, None, None, 0

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        active = None if self._active is None else self._active()
        if active is not saved.group:
            if active is not None:
                self._drop(active)
            self._active = weakref.ref(saved.group)
            self._fetch(saved.group)
            before = None if saved.group.previous is None else saved.group.previous()
            if before is not None:
                self._fetch(before)
        slot = saved.slot
        if slot.here is None:  # another backward through a retained graph
            slot.here, slot.coming = self.copies.to_device(slot.on_host)
        if slot.coming is not None:
            self.copies.wait(slot.coming)
            slot.coming = None
        here = slot.here
        empty = torch.empty(0, dtype=saved.dtype, device=here.device)
        tensor: Tensor = empty.set_(here.untyped_storage(), saved.offset, saved.shape, saved.stride)
        slot.uses += 1
        if slot.uses == slot.handles:
            self._free(slot)
        return tensor

    def _fetch(self, group: _Group) -> None:
        for slot in group.slots.values():
            if slot.here is None and slot.on_host is not None:
                slot.here, slot.coming = self.copies.to_device(slot.on_host)


def _is_plain(tensor: Tensor) -> bool:
    """Return True for a plain strided tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_VIEWS = {f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View")}


def _is_lowered_parameter(tensor: Tensor) -> bool:
    """Return True for autocast's copy of a parameter, or a view of it."""
    node = tensor.grad_fn
    for _ in range(3):
        if node is None or node.name() not in _VIEWS:
            return False
        node = node.next_functions[0][0]
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            return isinstance(node.variable, nn.Parameter)  # type: ignore[attr-defined]
    return False
