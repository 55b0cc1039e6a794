"""Optimizer states in host memory. Each batch of states is on the device only while it is updated.

States (moments, and lower halves or fp32 copies of master weights) are in pinned host memory; weights and gradients
stay on the device. A step runs in batches of about 64 MiB of states. While one batch is updated, the next is fetched on
one stream and the previous one is written back on another, so that PCI Express is used in both directions::

    inward    |  fetch 0  |  fetch 1  |  fetch 2  |
    update                | update 0  | update 1  | update 2  |
    outward                           |  write 0  |  write 1  |  write 2  |

Large parameters are split at borders of groups of 128, so the device needs only three buffers of the batch size. The
batch that followed in the last step is prefetched across calls, for updates in backward, where each parameter is a
separate call. Prefetched data is used only if the copy on the host was not written meanwhile.

    optimizer = OffloadedAdamW(model.parameters(), lr=1e-4, master="bf16+sr")       # other arguments as for AdamW

The states are transferred twice per step (with FP8 states 4.1 bytes per parameter for ``bf16+sr``, 8.2 for
``bf16+16``). State dicts read host memory, after :meth:`Offload.settle`. PyTorch rounds pinned blocks up to a power of
two, so the host may need up to twice the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.fp8.arithmetic.adamw import Hyper, Piece, find_edges, slice_piece, whole_groups
from octavo.fp8.arithmetic.moments import GROUP, MaxOverRanks
from octavo.fp8.optim.adamw import AdamW
from octavo.fp8.optim.engine import Engine, select_engine
from octavo.fp8.optim.layout import Group
from octavo.fp8.weights.shards import is_dtensor, plain

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

BATCH = 64 << 20  # bytes of states
_ALIGN = 256  # alignment of tensors in a batch, in bytes, for kernels that read 16 bytes at once
_BUFFERS = 3  # one coming in, one in use, one going out

Pairs = list[tuple[Tensor, Tensor]]  # (of the device, of the host)


class Transfers(Protocol):
    """Transfers between host and device, ordered with the device's work; ``slot`` is the index of a buffer."""

    def host(self, size: int) -> Tensor:
        """Allocate ``size`` bytes of host memory as uint8."""

    def device(self, size: int) -> Tensor:
        """Allocate ``size`` bytes of device memory as uint8."""

    def fetch(self, slot: int, pairs: Pairs, behind: Sequence[int]) -> None:
        """Begin to copy from host to device, after the last write-backs of the slots ``behind``."""

    def wait_for_fetch(self, slot: int) -> None:
        """Make later work of the device wait for the fetch of this slot."""

    def write_back(self, slot: int, pairs: Pairs) -> None:
        """Begin to copy from device to host, after the pending work of the device."""

    def settle(self) -> None:
        """Wait for all transfers."""


class StreamTransfers:
    """Transfers with pinned memory if the device supports it, on one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self._on = device
        self._inward, self._outward = accelerator.new_stream(device), accelerator.new_stream(device)
        self._arrived = [accelerator.new_event(device) for _ in range(_BUFFERS)]
        self._left = [accelerator.new_event(device) for _ in range(_BUFFERS)]

    def host(self, size: int) -> Tensor:
        return accelerator.empty_pinned((size,), torch.uint8, self._on)

    def device(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._on)
        self._inward.wait_stream(accelerator.current_stream(self._on))  # which may still use what was freed there
        return buffer

    def fetch(self, slot: int, pairs: Pairs, behind: Sequence[int]) -> None:
        for other in behind:
            self._inward.wait_event(self._left[other])
        with self._inward:
            for on_device, here in pairs:
                on_device.copy_(here, non_blocking=True)
            self._arrived[slot].record(self._inward)

    def wait_for_fetch(self, slot: int) -> None:
        accelerator.current_stream(self._on).wait_event(self._arrived[slot])

    def write_back(self, slot: int, pairs: Pairs) -> None:
        self._outward.wait_stream(accelerator.current_stream(self._on))
        with self._outward:
            for on_device, here in pairs:
                here.copy_(on_device, non_blocking=True)
            self._left[slot].record(self._outward)

    def settle(self) -> None:
        self._outward.synchronize()


class _Batch(NamedTuple):
    """Pieces whose states are fetched together. ``host``: all of their state tensors, in order."""

    pieces: tuple[Piece, ...]
    host: tuple[Tensor, ...]

    @property
    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Addresses, sizes and versions of the host tensors; a prefetch is valid only while they do not change."""
        return tuple((t.data_ptr(), t.numel(), t._version) for t in self.host)

    @property
    def place(self) -> tuple[tuple[int, int], ...]:
        return tuple((t.data_ptr(), t.numel()) for t in self.host)


class _FetchedBatch(NamedTuple):
    slot: int
    stamp: tuple[tuple[int, int, int], ...]
    device: tuple[Tensor, ...]


class Offload:
    """Keeps states on the host and copies them to ``device`` for their update.

    Args:
        device: where weights and gradients are.
        batch: bytes of states that are fetched together.
        transfers: performs the transfers. Default: pinned memory and streams of the device.

    Raises ValueError if ``device`` has no separate memory or streams and no ``transfers`` are given.
    """

    def __init__(self, device: torch.device | str, batch: int = BATCH, transfers: Transfers | None = None) -> None:
        device = torch.device(device)
        if transfers is None:
            if accelerator.has_own_memory(device) and (lack := accelerator.why_no_streams(device)):
                raise ValueError(f"Optimizer states were to be offloaded, and {lack}. Leave out optimizer.offload.")
            if not accelerator.has_own_memory(device):
                raise ValueError(
                    f"Optimizer states were to be offloaded from {device}, but on a run without a GPU they are in host "
                    "memory already. Leave out optimizer.offload."
                )
            transfers = StreamTransfers(device)
        if batch < 16 * GROUP:
            raise ValueError(f"A batch of {batch} bytes holds no group of {GROUP} elements; use {16 * GROUP} or more.")
        self.device, self.batch = device, batch
        self._move = transfers
        self._buffers: list[Tensor | None] = [None] * _BUFFERS
        self._wrote: list[set[int]] = [set() for _ in range(_BUFFERS)]  # addresses on the host
        self._next_slot = 0
        self._ahead: _FetchedBatch | None = None
        self._after: dict[tuple[tuple[int, int], ...], _Batch] = {}
        self._last: _Batch | None = None

    def host(self, like: Tensor) -> Tensor:
        """Copy a plain tensor to host memory, pinned if possible."""
        flat = self._move.host(like.numel() * like.element_size())
        copy = flat.view(like.dtype).view(like.shape)
        copy.copy_(like)
        return copy

    def step(
        self,
        pieces: Sequence[Piece],
        hyper: Hyper,
        factor: float | Tensor | None,
        agree: MaxOverRanks | None,
        engine: Engine,
    ) -> None:
        """Run ``engine(pieces, hyper, factor, agree)`` in batches whose states are on the device meanwhile.

        Groups on several ranks (``agree``) are all in the last batch, so that they are exchanged once.
        """
        cut = [] if agree is None else [slice_piece(e.piece, e.first, e.last) for e in find_edges(pieces)]
        batches = list(self._batches(pieces if agree is None else map(whole_groups, pieces)))
        if cut:
            batches.append(_make_batch(cut))
        for i, batch in enumerate(batches):
            fetched = self._take(batch)
            ahead = batches[i + 1] if i + 1 < len(batches) else self._after.get(batch.place)
            if ahead is not None:
                self._ahead = self._fetch(ahead)
            self._move.wait_for_fetch(fetched.slot)
            last = bool(cut) and i + 1 == len(batches)
            engine(_with_device_states(batch, fetched.device), hyper, factor, agree if last else None)
            self._move.write_back(fetched.slot, list(zip(fetched.device, batch.host, strict=True)))
            self._wrote[fetched.slot] = {place for place, _ in batch.place}
            batch = _Batch((), batch.host)  # stored without gradients, so that they can be freed
            if self._last is not None:
                self._after[self._last.place] = batch
            self._last = batch

    def settle(self) -> None:
        """Wait until host memory has the results of the last step, before it is read."""
        self._move.settle()

    def reset(self) -> None:
        """Drop prefetched data and the recorded order, after states were loaded or parameters removed."""
        self._ahead, self._last = None, None
        self._after.clear()

    def _take(self, batch: _Batch) -> _FetchedBatch:
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None and ahead.stamp == batch.stamp else self._fetch(batch)

    def _fetch(self, batch: _Batch) -> _FetchedBatch:
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % _BUFFERS
        sizes = [-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in batch.host]
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < sum(sizes):
            self._move.settle()
            self._buffers[slot] = buffer = self._move.device(max(sum(sizes), self.batch))
        device, at = [], 0
        for tensor, size in zip(batch.host, sizes, strict=True):
            place = buffer[at : at + tensor.numel() * tensor.element_size()]
            device.append(place.view(tensor.dtype).view(tensor.shape))
            at += size
        # The slot itself must be free, and host memory that another slot writes must be complete: with few batches
        # this may not be the case yet.
        places = {place for place, _ in batch.place}
        behind = [other for other, wrote in enumerate(self._wrote) if other == slot or not places.isdisjoint(wrote)]
        self._move.fetch(slot, list(zip(device, batch.host, strict=True)), behind)
        return _FetchedBatch(slot, batch.stamp, tuple(device))

    def _batches(self, pieces: Iterable[Piece]) -> Iterator[_Batch]:
        """Yield batches of pieces; large pieces are split."""
        group: list[Piece] = []
        held = 0
        for piece in pieces:
            for cut in self._cut(piece) if piece.weight.numel() else ():
                size = _state_bytes(cut)
                if group and held + size > self.batch:
                    yield _make_batch(group)
                    group, held = [], 0
                group.append(cut)
                held += size
        if group:
            yield _make_batch(group)

    def _cut(self, piece: Piece) -> Iterator[Piece]:
        """Parts of at most a batch's size that begin where a group of the whole parameter begins."""
        count, size = piece.weight.numel(), _state_bytes(piece)
        if size <= self.batch:
            yield piece
            return
        step = max(int(count * (self.batch / size)) // GROUP - 1, 1) * GROUP
        first = 0
        while first < count:
            last = min(first + step - (piece.start + first) % GROUP, count)
            yield slice_piece(piece, first, last)
            first = last


@lru_cache(maxsize=16)
def offload_for(device: torch.device) -> Offload:
    """The one that serves a device."""
    return Offload(device)


class OffloadedAdamW(AdamW):
    """:class:`octavo.fp8.AdamW` whose states are in pinned host memory, and on the GPU only for their update.

    A parameter's state is made on its device and moved away before the next one's is made. ``optimizer.state`` and
    state dicts hold CPU tensors (in a DTensor, too); what is loaded goes to the host. Results equal AdamW's, bit for
    bit. Raises ValueError for parameters that are not on a CUDA device.
    """

    def __init__(self, params: ParamsT, *args: Any, **settings: Any) -> None:
        super().__init__(params, *args, **settings)
        for device in self._devices():
            weakref.finalize(self, offload_for(device).reset)  # of() raises where there is nothing to offload from
        self.register_state_dict_pre_hook(lambda _: self.settle())
        self.register_load_state_dict_post_hook(lambda _: self._forget())

    def init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """As AdamW's, on the host."""
        state = super().init_state(p, group)
        offload = offload_for(plain(p).device)
        for name, x in state.items():
            if name != "step":
                on_host = offload.host(plain(x))
                state[name] = _wrap_like(x, on_host) if is_dtensor(x) else on_host
        return state

    def run(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None
    ) -> None:
        """As AdamW's, with states that come to the device of their weight and go back."""
        device = pieces[0].weight.device
        offload_for(device).step(pieces, hyper, factor, agree, select_engine(device))

    def settle(self) -> None:
        """Wait until host memory holds what the last step wrote: before ``optimizer.state`` is read."""
        for device in self._devices():
            offload_for(device).settle()

    def _devices(self) -> set[torch.device]:
        return {plain(p).device for group in self.param_groups for p in group["params"]}

    def _forget(self) -> None:
        for device in self._devices():
            offload_for(device).reset()


def _wrap_like(like: Any, here: Tensor) -> Tensor:
    """A DTensor like ``like`` whose part of this rank is ``here``, on whatever device: ``from_local`` would move it."""
    from torch.distributed.tensor import DTensor

    return DTensor(here, like._spec, requires_grad=False)


def _state_bytes(piece: Piece) -> int:
    return sum(-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in piece.state.values())


def _make_batch(pieces: list[Piece]) -> _Batch:
    return _Batch(tuple(pieces), tuple(t for piece in pieces for t in piece.state.values()))


def _with_device_states(batch: _Batch, device: tuple[Tensor, ...]) -> list[Piece]:
    """The pieces of a batch with the states that were fetched."""
    rest = iter(device)
    return [piece._replace(state={name: next(rest) for name in piece.state}) for piece in batch.pieces]
