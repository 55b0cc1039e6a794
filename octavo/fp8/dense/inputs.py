"""One quantization of an input that several layers multiply: q, k and v; gate and up.

The layers do not know each other. Each thread remembers the last input that it cast, with its codes, and the next layer
that brings the same input finds them. The wgrad codes that these layers save for backward are then one tensor, and
under autocast the input is lowered once.

The same input is the same storage at the same version, address, shape, strides and dtype, lowered to the same dtype, on
the same stream, inside or outside a CUDA graph capture alike.

Some writes move no version: ``x.data.mul_()``, a replayed graph that writes into its static output, a collective, a
kernel of your own, another process. They are met by dropping codes early. An entry serves each layer once: a layer that
asks again, as in the next micro-batch or in a recomputation, gets a new cast. It dies with the storage of its input;
when the thread casts another one, so that at most one input's codes are held; when a backward reaches a layer that it
served; with every optimizer step; with :func:`octavo.fp8.invalidate`. Memory that NumPy can write has none at all.

**What stays unseen**: such a write between the calls of two layers, with none of these in between. The second layer
then multiplies the values that the first one saw. Either the model writes so between q and k, or, without gradients,
one buffer is refilled so and the layers take turns (q in this step, k in the next). Write to x itself, which is seen,
or call ``fp8.invalidate`` after the write.

A layer that quantizes what it computes (:mod:`octavo.fp8.blocks.rmsnorm`) leaves its codes here for the layers that it
feeds (:func:`offer`), under the same rules. Delayed scaling has a history for each layer and shares nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.dense.casts import Want, cast_both
from octavo.fp8.weights import cache
from octavo.fp8.weights.shards import ordinary
from octavo.fp8.weights.versions import listen

__all__ = ["Input", "forget", "held_bytes", "offer", "torch_alone_writes"]


class Input:
    """The input of one layer as its GEMMs see it: ``rows`` x ``features`` in ``dtype`` (autocast's under autocast).

    Args:
        given: what the layer was called with, [..., features].
        dtype: what its GEMMs take.
        user: the layer, the same object at every call; None shares nothing.
    """

    __slots__ = ("_found", "_matrix", "dtype", "features", "given", "rows", "user")

    def __init__(self, given: Tensor, dtype: torch.dtype, user: object) -> None:
        self.given, self.dtype, self.user = given, dtype, user
        self.rows, self.features = given.shape[:-1].numel(), given.shape[-1]  # no -1, ambiguous in an empty tensor
        self._matrix: Tensor | None = None
        self._found: _Entry | None = None

    def matrix(self) -> Tensor:
        """[rows, features] in ``dtype``."""
        if self._matrix is None:
            self._matrix = self.given.detach().to(self.dtype).reshape(self.rows, self.features)
        return self._matrix

    def high(self) -> Tensor:
        """The same for a GEMM in high precision: what autocast made of the input is made once for all layers."""
        if self.dtype != self.given.dtype:
            if self._entry.high is None:
                self._entry.high = self.matrix()
            self._matrix = self._entry.high
        return self.matrix()

    def codes(self, row: Want | None, col: Want | None) -> tuple[Quantized | None, Quantized | None]:
        """x under ``row`` for a contraction of its features and under ``col`` for one of its rows; None for None.

        Where both are wanted and neither is there, they are made in one pass over x if the backend can.
        """
        if row is None and col is None:
            return None, None
        held = self._entry.codes
        if row is not None and col is not None and row not in held and col not in held:
            held[row], held[col] = cast_both(self.matrix(), row, col)
        for want, contract in ((row, 1), (col, 0)):
            if want is not None and want not in held:
                held[want] = want.backend.quantize(self.matrix(), want.spec, contract)
        return None if row is None else held[row], None if col is None else held[col]

    def forgetter(self) -> Callable[[], None]:
        """What a backward calls: the codes that this layer found or made serve nobody from then on. Holds no codes."""
        return _nothing if self._found is None else self._found.forget

    @property
    def _entry(self) -> _Entry:
        if self._found is None:
            self._found = _entry(self)
        return self._found


class _Entry:
    """What was made of one input (codes, and a copy in autocast's dtype if one was needed) and whom it served."""

    def __init__(self, stamp: tuple[Any, ...] = ()) -> None:
        self.stamp = stamp
        self.storage: Any = None  # a weak reference to the input's storage
        self.forget: Callable[[], None] = _nothing
        self.codes: dict[Want, Quantized] = {}
        self.high: Tensor | None = None
        self.served: set[int] = set()


class _Memo:
    """The last entry of one thread."""

    entry: _Entry | None = None


_state = threading.local()
_memos: weakref.WeakSet[_Memo] = weakref.WeakSet()


def offer(y: Tensor, dtype: torch.dtype, codes: Mapping[Want, Quantized]) -> Container[int]:
    """Leave the codes of ``y`` in ``dtype`` for the layers that will be called with y itself.

    They must be those that each :class:`Want` would get of ``y.to(dtype)`` [product of leading dimensions, last]. What
    comes back is empty until a layer found them; it never is where y cannot be recognised again.
    """
    if not _recognisable(y):
        return (0,)
    entry = _begin(_memo(), y.untyped_storage(), _stamp(Input(y, dtype, None)))
    entry.codes.update(codes)
    return entry.served


def held_bytes() -> int:
    """Bytes that the threads of this process remember for the next layer, whether saved for a backward as well or
    not."""
    entries = [entry for memo in list(_memos) if (entry := memo.entry) is not None]
    kept = [t for e in entries for q in list(e.codes.values()) for t in (q.data, q.scale)]
    kept += [e.high for e in entries if e.high is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def forget() -> None:
    """Drop what every thread remembers."""
    for memo in list(_memos):
        memo.entry = None


listen(forget)


def _entry(x: Input) -> _Entry:
    """The entry of this input if it may serve this layer, else a new one (which nobody will find where the input cannot
    be recognised again)."""
    given = x.given
    if x.user is None:
        return _Entry()
    if not _recognisable(given):
        return _Entry()
    memo = _memo()
    storage, stamp, entry = given.untyped_storage(), _stamp(x), memo.entry
    if entry is None or entry.stamp != stamp or entry.storage() is not storage or id(x.user) in entry.served:
        entry = _begin(memo, storage, stamp)
    entry.served.add(id(x.user))
    return entry


def _begin(memo: _Memo, storage: torch.UntypedStorage, stamp: tuple[Any, ...]) -> _Entry:
    memo.entry = entry = _Entry(stamp)
    entry.forget = _Forget(memo, entry)
    # torch keeps the Python object of a storage as long as the storage itself.
    entry.storage = weakref.ref(storage, entry.forget)
    return entry


def _nothing() -> None:
    pass


def _recognisable(given: Tensor) -> bool:
    if not ordinary(given) or given.is_meta or given.is_inference() or not given.numel():
        return False
    # Codes made in inference mode could not be saved for a backward later.
    return torch_alone_writes(given) and not torch.is_inference_mode_enabled()


def torch_alone_writes(x: Tensor) -> bool:
    """False for memory that NumPy owns, or was shown (``x.numpy()``): torch may not resize it, which tells, and it may
    be written at any time without a new version."""
    return x.untyped_storage().resizable()


def _memo() -> _Memo:
    memo = getattr(_state, "memo", None)
    if memo is None:
        memo = _state.memo = _Memo()
        _memos.add(memo)
    return memo


class _Forget:
    """Called when the storage of an input is freed, or by a backward: its codes go too, unless another input took their
    place."""

    def __init__(self, memo: _Memo, entry: _Entry) -> None:
        self._memo, self._entry = weakref.ref(memo), weakref.ref(entry)

    def __call__(self, _: object = None) -> None:
        memo, entry = self._memo(), self._entry()
        if memo is not None and entry is not None and memo.entry is entry:
            memo.entry = None


def _stamp(x: Input) -> tuple[Any, ...]:
    given = x.given
    device = given.device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return (
        given._version,
        given.data_ptr(),
        given.shape,
        given.stride(),
        given.dtype,
        x.dtype,
        device,
        stream,
        cache.capturing(given),
        # Selective checkpointing replays the operations of a region by counting them: no entry crosses its border.
        id(_get_current_dispatch_mode()),
    )
