"""The input of a layer: its dtype under autocast, the casts for its GEMMs, and one cast shared by q, k and v.

Layers that multiply the same input do not know each other. Each thread remembers the last input that it cast, with its
codes, and the next layer with the same input reuses them. The wgrad codes that these layers save for the backward are
then one tensor, and under autocast the input is converted once.

Two inputs are the same if they have the same storage, version, address, shape, strides and dtype, are converted to the
same dtype, and are on the same stream, both inside or both outside of a CUDA graph capture.

Some writes do not change the version: ``x.data.mul_()``, a replayed graph that writes into its static output, a
collective, a custom kernel, another process. Therefore codes are dropped early. An entry serves each layer once: a
layer that needs it again, as in the next micro-batch or in a recomputation, gets a new cast. An entry is dropped with
the storage of its input; when the thread casts another input, so that at most one input's codes are held; when a
backward reaches a layer that it served; at every optimizer step; by :func:`octavo.fp8.invalidate`. Memory that NumPy
can write gets no entry.

**Not detected**: such a write between the calls of two layers, with none of these events in between. The second layer
then multiplies the values that the first one saw. This happens if the model writes this way between q and k, or if,
without gradients, one buffer is refilled this way and the layers alternate (q in this step, k in the next). Write to x
itself, which is detected, or call ``fp8.invalidate`` after the write.

A layer that quantizes its output, such as a norm, stores the codes here for the layers that it feeds
(:func:`store_output_codes`), with the same rules. Delayed scaling has a history for each layer and shares nothing. A
layer whose input can be recomputed in the backward need not save it: the caller that computes it provides a source
(:func:`with_source`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from octavo.base import accelerator
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.capture import is_capturing
from octavo.fp8.kernels.registry import Backend, GemmOnlyBackend
from octavo.fp8.weights.shards import is_plain_tensor
from octavo.fp8.weights.versions import listen

# --- autocast ---------------------------------------------------------------------------------------------------------


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the GEMMs of x: autocast's under autocast, which does not change float64, else x's own."""
    lowered = is_autocast_enabled(x) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowered else x.dtype


_NO_OP_CONTEXT = nullcontext()  # one object for all layers, which also tells that autocast is off


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast on x's device."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_enabled(x) else _NO_OP_CONTEXT


def is_autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for x's device; False for devices without autocast, such as meta, where torch raises."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def is_functorch_active() -> bool:
    """Whether a transform of torch.func is active, which the gradients of FP8 layers do not support."""
    return torch._C._are_functorch_transforms_active()


# --- casts ------------------------------------------------------------------------------------------------------------


class CastRequest(NamedTuple):
    """A cast for a GEMM: the backend and the spec."""

    backend: Backend
    spec: CastSpec


QuantizedPair = tuple["Quantized | None", "Quantized | None"]
"""The codes of a matrix for a contraction of its columns, and for one of its rows."""


def cast_matrix(x: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
    """(x under ``row`` for a contraction of dimension 1, x under ``col`` for one of dimension 0), in one pass over x if
    the first backend, or its cast backend, can do both: all backends give the same codes. With equal specs these are
    the same codes in two layouts, so that no GEMM copies them."""
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
    """The input of one layer for its GEMMs: ``rows`` x ``features`` in ``dtype`` (autocast's under autocast).

    Args:
        x: the argument of the layer's call, kept as ``given``, [..., features].
        user: the layer, the same object at every call; None: codes are not shared.
        dtype: of its GEMMs; None: from autocast.
        cast: casts a matrix under two requests.

    ``source``: how to recompute the input, if known. ``forget()`` is for its backward: afterwards no layer reuses the
    codes of this input; it does not keep codes alive.
    """

    __slots__ = (
        *("autocast_off", "cast", "dtype", "features", "forget", "given", "rows", "source", "user"),
        *("_entry", "_matrix"),
    )

    def __init__(
        self,
        x: Tensor,
        user: object,
        dtype: torch.dtype | None = None,
        cast: Callable[[Tensor, CastRequest | None, CastRequest | None], QuantizedPair] = cast_matrix,
    ) -> None:
        self.given, self.user, self.cast = x, user, cast
        self.autocast_off = without_autocast(x)  # a context for the work on this input
        if dtype is None:
            dtype = x.dtype if self.autocast_off is _NO_OP_CONTEXT else compute_dtype(x)
        self.dtype = dtype
        self.source = get_source(x)
        self.forget: Callable[[], None] = _no_op
        self.rows, self.features = x.shape[:-1].numel(), x.shape[-1]  # no -1, ambiguous in an empty tensor
        self._matrix: Tensor | None = None
        self._entry: _Entry | None = None

    def matrix(self) -> Tensor:
        """[rows, features] in ``dtype``."""
        if self._matrix is None:
            x = self.given.detach().to(self.dtype)
            self._matrix = x if x.dim() == 2 else x.reshape(self.rows, self.features)
        return self._matrix

    def high(self) -> Tensor:
        """:meth:`matrix` for a GEMM in high precision: all layers share autocast's conversion of the input."""
        if self.dtype != self.given.dtype:
            entry = _find_or_start_entry(self)
            if entry.high is None:
                entry.high = self.matrix()
            self._matrix = entry.high
        return self.matrix()

    def codes(self, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """x under ``row`` for a contraction of its features and under ``col`` for one of its rows; None for None.

        If both are needed and neither is cached, they come from one pass over x if the backend can do that.
        """
        if row is None and col is None:
            return None, None
        entry = _find_or_start_entry(self)
        codes = entry.find(row, col)
        missing = (None if codes[0] is not None else row, None if codes[1] is not None else col)
        if missing != (None, None):
            new = self.cast(self.matrix(), *missing)
            entry.hold(missing, new)
            codes = codes[0] or new[0], codes[1] or new[1]
        return codes


class _Entry:
    """The codes of one input, its copy in autocast's dtype if one was needed, and the layers that used it."""

    def __init__(self, stamp: tuple[object, ...] = ()) -> None:
        self.stamp = stamp
        self.storage: Callable[[], object] = _no_op  # a weak reference to the input's storage
        self.forget: Callable[[], None] = _no_op
        # By request and the dimension that their GEMM contracts; no entry has the request None.
        self.codes: dict[tuple[CastRequest | None, int], Quantized] = {}
        self.high: Tensor | None = None
        self.served: set[int] = set()

    def find(self, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """Codes under ``row`` and under ``col``, preferably in the layouts for contractions of dimensions 1 and 0;
        every GEMM also takes the other layout."""
        if not self.codes:
            return None, None
        by_row, by_col = self.codes.get((row, 1)), self.codes.get((col, 0))
        return (
            self.codes.get((row, 0)) if by_row is None else by_row,
            self.codes.get((col, 1)) if by_col is None else by_col,
        )

    def hold(self, requests: tuple[CastRequest | None, CastRequest | None], codes: QuantizedPair) -> None:
        for contract, request, q in zip((1, 0), requests, codes, strict=True):
            if request is not None and q is not None:
                self.codes[request, contract] = q


class _ThreadCache:
    """The last entry of one thread."""

    entry: _Entry | None = None


_thread_caches: weakref.WeakSet[_ThreadCache] = weakref.WeakSet()


class _ThreadState(threading.local):
    """The state of one thread: its memo, and the input that can be recomputed."""

    def __init__(self) -> None:
        self.memo = _ThreadCache()
        self.held: _SourceBinding | None = None
        _thread_caches.add(self.memo)


_state = _ThreadState()


def store_output_codes(
    y: Tensor, dtype: torch.dtype, requests: tuple[CastRequest | None, CastRequest | None], codes: QuantizedPair
) -> Container[int]:
    """Store the codes of ``y`` in ``dtype`` for the layers that will be called with y itself.

    They must equal the casts of ``y.to(dtype)`` [product of leading dimensions, last] under the requests, for a
    contraction of its columns and of its rows. The returned container is empty until a layer uses the codes; it is
    never empty if y cannot be recognized later.
    """
    if not _is_recognizable(y):
        return (0,)
    entry = _start_entry(y.untyped_storage(), _input_key(Input(y, None, dtype)))
    entry.hold(requests, codes)
    return entry.served


def drop_entries() -> None:
    """Drop the entries of all threads."""
    for memo in list(_thread_caches):
        memo.entry = None


listen(drop_entries)


def _find_or_start_entry(x: Input) -> _Entry:
    """The entry of this input if this layer may use it, else a new one, which other layers find only if the input can
    be recognized."""
    tensor = x.given
    if x._entry is not None:
        return x._entry
    if x.user is None or not _is_recognizable(tensor):
        x._entry = _Entry()
        return x._entry
    storage, stamp, entry = tensor.untyped_storage(), _input_key(x), _state.memo.entry
    if entry is None or entry.stamp != stamp or entry.storage() is not storage or id(x.user) in entry.served:
        entry = _start_entry(storage, stamp)
    entry.served.add(id(x.user))
    x._entry, x.forget = entry, entry.forget
    return entry


def _start_entry(storage: torch.UntypedStorage, stamp: tuple[object, ...]) -> _Entry:
    memo = _state.memo
    memo.entry = entry = _Entry(stamp)
    entry.forget = partial(_drop_entry, weakref.ref(memo), weakref.ref(entry))
    # torch keeps the Python object of a storage as long as the storage itself.
    entry.storage = weakref.ref(storage, entry.forget)
    return entry


def _no_op() -> None:
    pass


def _is_recognizable(x: Tensor) -> bool:
    """Whether a later call with the same tensor can be recognized, and its codes reused."""
    if (type(x) is not Tensor and not is_plain_tensor(x)) or x.is_meta or x.is_inference() or not x.numel():
        return False
    # Codes made in inference mode could not be saved for a backward later.
    return is_written_only_by_torch(x) and not torch.is_inference_mode_enabled()


def is_written_only_by_torch(x: Tensor) -> bool:
    """Whether only torch can write this memory. False for memory that NumPy owns or shares (``x.numpy()``), which may
    change without a new version; torch cannot resize such a storage, which identifies it."""
    return x.untyped_storage().resizable()


def _is_capturing(x: Tensor) -> bool:
    return x.device.type != "cpu" and is_capturing(x.device)


def _drop_entry(of: weakref.ref[_ThreadCache], what: weakref.ref[_Entry], _: object = None) -> None:
    """Drop an entry, unless another one has replaced it. Called when the storage of its input is freed, or by a
    backward."""
    memo, entry = of(), what()
    if memo is not None and entry is not None and memo.entry is entry:
        memo.entry = None


def _input_key(x: Input) -> tuple[object, ...]:
    """What identifies an input: see the top of this file."""
    tensor = x.given
    device = tensor.device
    stream = 0 if device.type == "cpu" else accelerator.stream_id(device)
    return (
        tensor._version,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        x.dtype,
        device,
        stream,
        _is_capturing(tensor),
        # Selective checkpointing replays the operations of a region by counting them: no entry may cross its border.
        id(_get_current_dispatch_mode()),
    )


# --- an input that need not be saved ----------------------------------------------------------------------------------


class Source(NamedTuple):
    """How the backward of a linear layer recomputes its input, instead of saving codes: ``remake(*tensors)`` returns
    the input bit for bit, detached. ``tensors`` are saved."""

    tensors: tuple[Tensor, ...]
    remake: Callable[..., Tensor]


class _SourceBinding(NamedTuple):
    x: Tensor
    version: int
    source: Source


@contextmanager
def with_source(x: Tensor, source: Source) -> Iterator[None]:
    """A context in which layers of this thread that are called with ``x`` itself, also inside an adapter, use
    ``source``."""
    before = _state.held
    _state.held = _SourceBinding(x, x._version, source)
    try:
        yield
    finally:
        _state.held = before


def get_source(x: Tensor) -> Source | None:
    """The source of this tensor, if one is set and the tensor was not written since."""
    held = _state.held
    return held.source if held is not None and held.x is x and held.version == x._version else None
