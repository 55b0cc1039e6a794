"""Activation offload: what blocks save for backward waits in host memory (Rhu et al. 2016, vDNN).

    handle = offload(blocks)              # (name, block) pairs in the order of the forward; handle.remove() undoes it

    forward    block i ends: its saved tensors are copied to pinned host memory, on a stream of their own
               block i + 1 ends: the compute stream has waited for that copy, and the memory of block i is free
    backward   block i begins: the tensors of block i - 1 are fetched, while block i computes

So two blocks' worth of activations are on the device at any time, whatever the depth, and nothing ever makes the host
wait. A storage is moved once, however many views of it are saved. What stays on the device: tensors smaller than
``least`` bytes, parameters (what FSDP2 gathers of them and autocast's copies too), what a block was given with its
input (masks, cos and sin, which all blocks share), and what a function holds without telling autograd.

The copies are hidden where a block computes longer than its bytes travel. FP8 saving halves them, checkpointing
(:mod:`octavo.fp8.memory.recompute`) leaves the inputs of what runs again.

``synchronize_per_layer`` is for those who must cap what the allocator holds: it makes the host wait for the device
after each block's forward and backward, so that streams cannot run ahead of what has been freed.
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
    """Moves bytes between a device and the host; neither waits. ``ready`` is whatever :meth:`wait` takes."""

    def to_host(self, here: Tensor) -> tuple[Tensor, Any]:
        """(copy of ``here`` [bytes] in host memory, ready): begins when the device has computed what it has so far."""

    def to_device(self, on_host: Tensor) -> tuple[Tensor, Any]:
        """(copy of ``there`` [bytes] on the device, ready)."""

    def wait(self, ready: Any) -> None:
        """Let what the device computes from now on see the copy."""


class StreamCopies:
    """Copies on a stream of their own, from and to memory that is pinned where the device has that."""

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
    """What was hung on modules; ``remove()`` takes it off."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def offload(blocks: Blocks, *, least: int = MIN_BYTES, copies: Copies | None = None) -> Hooks:
    """Let what the forwards of these blocks save for backward wait in host memory.

    Args:
        blocks: (name, block) in the order in which the model calls them.
        least: tensors of fewer bytes stay.
        copies: how bytes are moved; None: on a stream of the device of the blocks' parameters.

    Raises ValueError where there are no blocks, or their parameters are on no device of its own memory and streams (and
    no ``copies`` were given).
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
    """Let the host wait for the device after each block's forward and backward.

    Args:
        blocks: (name, block).
        wait: how; None: ``accelerator.synchronize``.

    Raises ValueError where there are no blocks, or their parameters are on the CPU (and no ``wait`` was given).
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
                first_input.register_hook(lambda gradient: wait())  # there once the whole block went backward

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
    """One storage: ``here`` its bytes on the device (None: not now), ``on_host`` on the host (None: not yet)."""

    here: Tensor | None
    alias: Tensor  # shares the version counter of what was saved
    version: int
    on_host: Tensor | None = None
    leaving: Any = None  # the copy to the host, until the device waited for it
    coming: Any = None  # the copy back
    handles: int = 0  # saved tensors that are views of it
    uses: int = 0  # of these, asked for in this backward


@dataclass(eq=False)
class _Group:
    """What one forward of one block saved."""

    number: int
    stays: set[int]  # storages that are not moved
    previous: weakref.ref[_Group] | None
    slots: dict[int, _Slot] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _OffloadedTensor:
    """Stands for a saved tensor in the graph."""

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
        self._last: weakref.ref[_Group] | None = None  # the group whose copy may still be under way
        self._active: weakref.ref[_Group] | None = None  # the group that is going backward

    def make_hooks(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks around the forward of block ``number``."""

        def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self._open.append((None, None))
                return
            beside = [x for x in torch.utils._pytree.tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
            stay = {_storage_key(t) for t in (*block.parameters(), *block.buffers()) if _is_plain(t)}
            stay |= {_storage_key(t) for t in beside if _is_plain(t) and not t.requires_grad}
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
            slot.alias = slot.alias.new_empty(0)  # holds no memory of the device from here on
        last = None if self._last is None else self._last()
        if last is not None:
            self._drop(last)
        self._last = weakref.ref(group)

    def _drop(self, group: _Group) -> None:
        for slot in group.slots.values():
            self._free(slot)

    def _free(self, slot: _Slot) -> None:
        """Free the device's copy, once what reads or writes it is done."""
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
        if slot.here is None:  # a graph that is gone through again
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
    """A tensor whose memory is its storage, all of it."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_VIEWS = {f"{name}Backward0" for name in ("ToCopy", "T", "Transpose", "Permute", "View")}


def _is_lowered_parameter(tensor: Tensor) -> bool:
    """Whether this is autocast's copy of a parameter, or a view of one: cast and transposed, it begins at a leaf."""
    node = tensor.grad_fn
    for _ in range(3):
        if node is None or node.name() not in _VIEWS:
            return False
        node = node.next_functions[0][0]
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            return isinstance(node.variable, nn.Parameter)  # type: ignore[attr-defined]
    return False
