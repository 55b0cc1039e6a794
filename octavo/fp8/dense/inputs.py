"""The input of a layer: its dtype under autocast, the casts that GEMMs ask of it, and one cast for q, k and v.

Layers that multiply one input do not know each other. Each thread remembers the last input that it cast, with its
codes, and the next layer that brings the same input finds them. The wgrad codes that these layers save for backward are
then one tensor, and under autocast the input is lowered once.

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

A layer that quantizes what it computes, such as a norm, leaves its codes here for the layers that it feeds
(:func:`offer`), under the same rules. Delayed scaling has a history for each layer and shares nothing. A layer whose
input can be computed again in backward need not save it: whoever computes it says how (:func:`behind`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from octavo.base import accelerator
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.capture import capturing
from octavo.fp8.kernels.registry import Backend, GemmOnlyBackend
from octavo.fp8.weights.shards import ordinary
from octavo.fp8.weights.versions import listen

# --- autocast ---------------------------------------------------------------------------------------------------------


def compute_dtype(x: Tensor) -> torch.dtype:
    """What the GEMMs of x take: autocast's dtype under autocast, which leaves float64 alone, else x's own."""
    lowered = autocast_enabled(x) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowered else x.dtype


_AS_IT_IS = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else _AS_IT_IS


def autocast_enabled(x: Tensor) -> bool:
    """False also for devices without autocast, such as meta, where asking is an error."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def transformed() -> bool:
    """Whether this runs under a transform of torch.func, which the gradients of FP8 layers do not know."""
    return torch._C._are_functorch_transforms_active()


# --- casts ------------------------------------------------------------------------------------------------------------


class CastRequest(NamedTuple):
    """A cast that a GEMM asks for: by which backend, under which spec."""

    backend: Backend
    spec: CastSpec


Pair = tuple["Quantized | None", "Quantized | None"]
"""The codes of a matrix for a contraction of its columns, and for one of its rows."""


def cast_matrix(x: Tensor, row: CastRequest | None, col: CastRequest | None) -> Pair:
    """(x under ``row`` for a contraction of dimension 1, x under ``col`` for one of dimension 0), in one pass over x
    where the first backend, or its cast backend, can do both: all backends give the same codes. Under one spec these
    are the same codes in two layouts, so that no GEMM has to lay them out anew."""
    if row is not None and col is not None:
        first = row.backend
        one = first is col.backend or isinstance(first, GemmOnlyBackend)
        if one or first.supports("quantize", col.spec, x.device, x.shape) is None:
            return first.quantize_both(x, row.spec, col.spec)
    return (
        None if row is None else row.backend.quantize(x, row.spec, 1),
        None if col is None else col.backend.quantize(x, col.spec, 0),
    )


# --- an input that several layers multiply ----------------------------------------------------------------------------


class Input:
    """The input of one layer as its GEMMs see it: ``rows`` x ``features`` in ``dtype`` (autocast's under autocast).

    Args:
        given: what the layer was called with, [..., features].
        user: the layer, the same object at every call; None shares nothing.
        dtype: what its GEMMs take; None asks autocast.
        cast: how a matrix becomes codes under two requests.

    ``source``: how to compute it again, where somebody said so. ``forget()`` is for its backward: the codes that this
    layer found or made serve nobody from then on; it holds no codes.
    """

    __slots__ = (
        *("autocast_off", "cast", "dtype", "features", "forget", "given", "rows", "source", "user"),
        *("_found", "_matrix"),
    )

    def __init__(
        self,
        given: Tensor,
        user: object,
        dtype: torch.dtype | None = None,
        cast: Callable[[Tensor, CastRequest | None, CastRequest | None], Pair] = cast_matrix,
    ) -> None:
        self.given, self.user, self.cast = given, user, cast
        self.autocast_off = without_autocast(given)  # a context to work in
        if dtype is None:
            dtype = given.dtype if self.autocast_off is _AS_IT_IS else compute_dtype(given)
        self.dtype = dtype
        self.source = source_of(given)
        self.forget: Callable[[], None] = _nothing
        self.rows, self.features = given.shape[:-1].numel(), given.shape[-1]  # no -1, ambiguous in an empty tensor
        self._matrix: Tensor | None = None
        self._found: _Entry | None = None

    def matrix(self) -> Tensor:
        """[rows, features] in ``dtype``."""
        if self._matrix is None:
            x = self.given.detach().to(self.dtype)
            self._matrix = x if x.dim() == 2 else x.reshape(self.rows, self.features)
        return self._matrix

    def high(self) -> Tensor:
        """The same for a GEMM in high precision: what autocast made of the input is made once for all layers."""
        if self.dtype != self.given.dtype:
            entry = _entry(self)
            if entry.high is None:
                entry.high = self.matrix()
            self._matrix = entry.high
        return self.matrix()

    def codes(self, row: CastRequest | None, col: CastRequest | None) -> Pair:
        """x under ``row`` for a contraction of its features and under ``col`` for one of its rows; None for None.

        Where both are wanted and neither is there, they are made in one pass over x if the backend can.
        """
        if row is None and col is None:
            return None, None
        entry = _entry(self)
        found = entry.find(row, col)
        missing = (None if found[0] is not None else row, None if found[1] is not None else col)
        if missing != (None, None):
            made = self.cast(self.matrix(), *missing)
            entry.hold(missing, made)
            found = found[0] or made[0], found[1] or made[1]
        return found


class _Entry:
    """What was made of one input (codes, and a copy in autocast's dtype if one was needed) and whom it served."""

    def __init__(self, stamp: tuple[Any, ...] = ()) -> None:
        self.stamp = stamp
        self.storage: Any = None  # a weak reference to the input's storage
        self.forget: Callable[[], None] = _nothing
        # By the dimension that their GEMM contracts; nothing is held under None, which asks for nothing.
        self.codes: dict[tuple[CastRequest | None, int], Quantized] = {}
        self.high: Tensor | None = None
        self.served: set[int] = set()

    def find(self, row: CastRequest | None, col: CastRequest | None) -> Pair:
        """Codes under ``row`` and under ``col``, laid out for contractions of dimensions 1 and 0 if such are there: any
        GEMM takes the others too."""
        if not self.codes:
            return None, None
        by_row, by_col = self.codes.get((row, 1)), self.codes.get((col, 0))
        return (
            self.codes.get((row, 0)) if by_row is None else by_row,
            self.codes.get((col, 1)) if by_col is None else by_col,
        )

    def hold(self, asked: tuple[CastRequest | None, CastRequest | None], made: Pair) -> None:
        for contract, request, q in zip((1, 0), asked, made, strict=True):
            if request is not None and q is not None:
                self.codes[request, contract] = q


class _Memo:
    """The last entry of one thread."""

    entry: _Entry | None = None


_memos: weakref.WeakSet[_Memo] = weakref.WeakSet()


class _Thread(threading.local):
    """What one thread knows: its memo, and whose input can be computed again."""

    def __init__(self) -> None:
        self.memo = _Memo()
        self.held: _Held | None = None
        _memos.add(self.memo)


_state = _Thread()


def offer(
    y: Tensor, dtype: torch.dtype, asked: tuple[CastRequest | None, CastRequest | None], codes: Pair
) -> Container[int]:
    """Leave the codes of ``y`` in ``dtype`` for the layers that will be called with y itself.

    They must be those that the requests would get of ``y.to(dtype)`` [product of leading dimensions, last] for a
    contraction of its columns and for one of its rows. What comes back is empty until a layer found them; it never is
    where y cannot be recognised again.
    """
    if not _recognisable(y):
        return (0,)
    entry = _begin(y.untyped_storage(), _stamp(Input(y, None, dtype)))
    entry.hold(asked, codes)
    return entry.served


def forget() -> None:
    """Drop what every thread remembers."""
    for memo in list(_memos):
        memo.entry = None


listen(forget)


def _entry(x: Input) -> _Entry:
    """The entry of this input if it may serve this layer, else a new one (which nobody will find where the input cannot
    be recognised again)."""
    given = x.given
    if x._found is not None:
        return x._found
    if x.user is None or not _recognisable(given):
        x._found = _Entry()
        return x._found
    storage, stamp, entry = given.untyped_storage(), _stamp(x), _state.memo.entry
    if entry is None or entry.stamp != stamp or entry.storage() is not storage or id(x.user) in entry.served:
        entry = _begin(storage, stamp)
    entry.served.add(id(x.user))
    x._found, x.forget = entry, entry.forget
    return entry


def _begin(storage: torch.UntypedStorage, stamp: tuple[Any, ...]) -> _Entry:
    memo = _state.memo
    memo.entry = entry = _Entry(stamp)
    entry.forget = partial(_forget, weakref.ref(memo), weakref.ref(entry))
    # torch keeps the Python object of a storage as long as the storage itself.
    entry.storage = weakref.ref(storage, entry.forget)
    return entry


def _nothing() -> None:
    pass


def _recognisable(given: Tensor) -> bool:
    if (
        (type(given) is not Tensor and not ordinary(given))
        or given.is_meta
        or given.is_inference()
        or not given.numel()
    ):
        return False
    # Codes made in inference mode could not be saved for a backward later.
    return torch_alone_writes(given) and not torch.is_inference_mode_enabled()


def torch_alone_writes(x: Tensor) -> bool:
    """False for memory that NumPy owns, or was shown (``x.numpy()``): torch may not resize it, which tells, and it may
    be written at any time without a new version."""
    return x.untyped_storage().resizable()


def _capturing(given: Tensor) -> bool:
    return given.device.type != "cpu" and capturing(given.device)


def _forget(of: weakref.ref[_Memo], what: weakref.ref[_Entry], _: object = None) -> None:
    """Called when the storage of an input is freed, or by a backward: its codes go too, unless another input took their
    place."""
    memo, entry = of(), what()
    if memo is not None and entry is not None and memo.entry is entry:
        memo.entry = None


def _stamp(x: Input) -> tuple[Any, ...]:
    given = x.given
    device = given.device
    stream = 0 if device.type == "cpu" else accelerator.stream_number(device)
    return (
        given._version,
        given.data_ptr(),
        given.shape,
        given.stride(),
        given.dtype,
        x.dtype,
        device,
        stream,
        _capturing(given),
        # Selective checkpointing replays the operations of a region by counting them: no entry crosses its border.
        id(_get_current_dispatch_mode()),
    )


# --- an input that need not be saved ----------------------------------------------------------------------------------


class Source(NamedTuple):
    """How the backward of a linear layer gets its input again, instead of codes of it: ``remake(*tensors)`` is the
    input bit for bit, off the graph. ``tensors`` are saved."""

    tensors: tuple[Tensor, ...]
    remake: Callable[..., Tensor]


class _Held(NamedTuple):
    x: Tensor
    version: int
    source: Source


@contextmanager
def behind(x: Tensor, source: Source) -> Iterator[None]:
    """Inside, a layer of this thread that is called with ``x`` itself (also inside an adapter) finds its source."""
    before = _state.held
    _state.held = _Held(x, x._version, source)
    try:
        yield
    finally:
        _state.held = before


def source_of(x: Tensor) -> Source | None:
    """The source of this very tensor, unwritten since; None if nobody said so."""
    held = _state.held
    return held.source if held is not None and held.x is x and held.version == x._version else None
