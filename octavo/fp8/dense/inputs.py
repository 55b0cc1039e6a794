"""The input of a layer: its dtype under autocast, the casts for its GEMMs, and one cast shared by q, k and v.

Layers with the same input do not know each other. Each thread caches the codes of the last input that it cast, and the
next layer with the same input reuses them. These layers then save the same wgrad codes for the backward, as one tensor,
and under autocast the input is converted once.

Two inputs are the same if they have the same storage, version, address, shape, strides and dtype, are converted to the
same dtype, and are on the same stream, both inside or both outside of a CUDA graph capture.

Some writes do not change the version: ``x.data.mul_()``, a replayed graph that writes into its static output, a
collective, a custom kernel, another process. Therefore codes are dropped early. Each layer uses an entry at most once:
a layer that needs it again, in the next micro-batch or in a recomputation, casts again. An entry is dropped

- with the storage of its input,
- when the thread casts another input, so that the codes of at most one input are cached,
- when a backward reaches a layer that used the entry,
- at every optimizer step, and by :func:`octavo.fp8.invalidate`.

Memory that NumPy can write to is never cached.

**Not detected**: such a write between the calls of two layers, with none of these events in between. The second layer
then multiplies the old values. This happens if the model writes this way between q and k, or if, without gradients, one
buffer is refilled this way and the layers alternate (q in this step, k in the next). Write to x itself, which is
detected, or call ``fp8.invalidate`` after the write.

A layer that quantizes its output, such as a norm, stores the codes here for the layers that it feeds
(:func:`store_output_codes`), under the same rules. Delayed scaling has a history for each layer and shares no codes. A
layer need not save an input that the backward can recompute: the caller that computes the input provides a source
(:func:`with_recomputable`).
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
    """Return the dtype of GEMMs with input x: autocast's if autocast is on and x is not float64, otherwise x's own."""
    lowered = is_autocast_enabled(x) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if lowered else x.dtype


_NO_OP_CONTEXT = nullcontext()  # a single object, so that `is` tests whether autocast is off


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on x's device."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_enabled(x) else _NO_OP_CONTEXT


def is_autocast_enabled(x: Tensor) -> bool:
    """True if autocast is on for x's device. False for devices without autocast, such as meta, where torch raises."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def is_functorch_active() -> bool:
    """True inside a transform of torch.func, which the gradients of FP8 layers do not support."""
    return torch._C._are_functorch_transforms_active()


# --- casts ------------------------------------------------------------------------------------------------------------


class CastRequest(NamedTuple):
    """A cast for a GEMM, with the backend that runs it."""

    backend: Backend
    spec: CastSpec


QuantizedPair = tuple["Quantized | None", "Quantized | None"]
"""The codes of a matrix for a GEMM that contracts dimension 1, and for one that contracts dimension 0."""


def cast_matrix(x: Tensor, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
    """Cast x under ``row`` for a GEMM that contracts dimension 1, and under ``col`` for one that contracts dimension 0.

    This takes one pass over x if the first backend, or its cast backend, supports both casts; all backends give the
    same codes. With equal specs, the results are the same codes in two layouts, so that no GEMM copies them.
    """
    if row is not None and col is not None:
        first = row.backend
        can_share = first is col.backend or isinstance(first, GemmOnlyBackend)
        if can_share or first.supports("quantize", col.spec, x.device, x.shape) is None:
            return first.quantize_both(x, row.spec, col.spec)
    return (
        None if row is None else row.backend.quantize(x, row.spec, 1),
        None if col is None else col.backend.quantize(x, col.spec, 0),
    )


# --- an input that several layers multiply ----------------------------------------------------------------------------


class Input:
    """The input of one layer for its GEMMs: ``rows`` x ``features`` in ``dtype`` (autocast's under autocast).

    Args:
        x: the argument of the layer's call, [..., features], available as ``tensor``.
        user: the layer, the same object in every call; None disables sharing of codes.
        dtype: the dtype of its GEMMs, by default x's own or autocast's.
        cast: casts a matrix under two requests.

    ``recomputable`` recomputes the input, if possible. The backward calls ``drop_codes()``, after which no layer reuses
    the codes of this input; the callable does not keep codes alive.
    """

    __slots__ = (
        *("autocast_off", "cast", "dtype", "drop_codes", "features", "tensor", "rows", "recomputable", "user"),
        *("_entry", "_matrix"),
    )

    def __init__(
        self,
        x: Tensor,
        user: object,
        dtype: torch.dtype | None = None,
        cast: Callable[[Tensor, CastRequest | None, CastRequest | None], QuantizedPair] = cast_matrix,
    ) -> None:
        self.tensor, self.user, self.cast = x, user, cast
        self.autocast_off = without_autocast(x)  # a context for the work on this input
        if dtype is None:
            dtype = x.dtype if self.autocast_off is _NO_OP_CONTEXT else compute_dtype(x)
        self.dtype = dtype
        self.recomputable = get_recomputable(x)
        self.drop_codes: Callable[[], None] = _no_op
        self.rows, self.features = x.shape[:-1].numel(), x.shape[-1]  # no -1, ambiguous in an empty tensor
        self._matrix: Tensor | None = None
        self._entry: _Entry | None = None

    def matrix(self) -> Tensor:
        """Return the input as a matrix [rows, features] in ``dtype``."""
        if self._matrix is None:
            x = self.tensor.detach().to(self.dtype)
            self._matrix = x if x.dim() == 2 else x.reshape(self.rows, self.features)
        return self._matrix

    def high_precision(self) -> Tensor:
        """Return :meth:`matrix` for a GEMM in high precision. Layers share autocast's conversion of the input."""
        if self.dtype != self.tensor.dtype:
            entry = _find_or_start_entry(self)
            if entry.high is None:
                entry.high = self.matrix()
            self._matrix = entry.high
        return self.matrix()

    def codes(self, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """Return x cast under ``row`` for a contraction of its features, and under ``col`` for one of its rows.

        A result is None if its request is None. Casts that are not cached take one pass over x if the backend can.
        """
        if row is None and col is None:
            return None, None
        entry = _find_or_start_entry(self)
        codes = entry.find(row, col)
        missing = (None if codes[0] is not None else row, None if codes[1] is not None else col)
        if missing != (None, None):
            new = self.cast(self.matrix(), *missing)
            entry.store(missing, new)
            codes = codes[0] or new[0], codes[1] or new[1]
        return codes


class _Entry:
    """The cached codes of one input, its copy in autocast's dtype if one was needed, and the layers that used it."""

    def __init__(self, key: tuple[object, ...] = ()) -> None:
        self.key = key
        self.storage: Callable[[], object] = _no_op  # a weak reference to the input's storage
        self.drop: Callable[[], None] = _no_op
        # Keys are a request, never None, and the dimension that the GEMM contracts.
        self.codes: dict[tuple[CastRequest | None, int], Quantized] = {}
        self.high: Tensor | None = None
        self.users: set[int] = set()

    def find(self, row: CastRequest | None, col: CastRequest | None) -> QuantizedPair:
        """Return codes under ``row`` and under ``col``, preferably in the layouts for contractions of dimensions 1 and
        0; every GEMM also accepts the other layout."""
        if not self.codes:
            return None, None
        by_row, by_col = self.codes.get((row, 1)), self.codes.get((col, 0))
        return (
            self.codes.get((row, 0)) if by_row is None else by_row,
            self.codes.get((col, 1)) if by_col is None else by_col,
        )

    def store(self, requests: tuple[CastRequest | None, CastRequest | None], codes: QuantizedPair) -> None:
        for contract, request, q in zip((1, 0), requests, codes, strict=True):
            if request is not None and q is not None:
                self.codes[request, contract] = q


class _ThreadCache:
    """The last entry of one thread."""

    entry: _Entry | None = None


_thread_caches: weakref.WeakSet[_ThreadCache] = weakref.WeakSet()


class _ThreadState(threading.local):
    """The state of one thread: its cache, and the input that can be recomputed."""

    def __init__(self) -> None:
        self.cache = _ThreadCache()
        self.binding: _RecomputableBinding | None = None
        _thread_caches.add(self.cache)


_state = _ThreadState()


def store_output_codes(
    y: Tensor, dtype: torch.dtype, requests: tuple[CastRequest | None, CastRequest | None], codes: QuantizedPair
) -> Container[int]:
    """Store the codes of ``y`` in ``dtype`` for the layers that will be called with y itself.

    The codes must equal the casts of ``y.to(dtype)`` [product of leading dimensions, last] under the requests, for a
    contraction of its columns and of its rows. Returns a container that is empty until a layer uses the codes. It is
    never empty if y cannot be recognized later.
    """
    if not _is_recognizable(y):
        return (0,)
    entry = _start_entry(y.untyped_storage(), _input_key(Input(y, None, dtype)))
    entry.store(requests, codes)
    return entry.users


def drop_entries() -> None:
    """Drop the entries of all threads."""
    for cache in list(_thread_caches):
        cache.entry = None


listen(drop_entries)


def _find_or_start_entry(x: Input) -> _Entry:
    """Return the cached entry of this input if this layer may use it, otherwise a new entry. Other layers find a new
    entry only if the input can be recognized."""
    tensor = x.tensor
    if x._entry is not None:
        return x._entry
    if x.user is None or not _is_recognizable(tensor):
        x._entry = _Entry()
        return x._entry
    storage, key, entry = tensor.untyped_storage(), _input_key(x), _state.cache.entry
    if entry is None or entry.key != key or entry.storage() is not storage or id(x.user) in entry.users:
        entry = _start_entry(storage, key)
    entry.users.add(id(x.user))
    x._entry, x.drop_codes = entry, entry.drop
    return entry


def _start_entry(storage: torch.UntypedStorage, key: tuple[object, ...]) -> _Entry:
    cache = _state.cache
    cache.entry = entry = _Entry(key)
    entry.drop = partial(_drop_entry, weakref.ref(cache), weakref.ref(entry))
    # torch keeps the Python object of a storage as long as the storage itself.
    entry.storage = weakref.ref(storage, entry.drop)
    return entry


def _no_op() -> None:
    pass


def _is_recognizable(x: Tensor) -> bool:
    """True if a later call with the same tensor can be recognized, so that it may reuse the codes."""
    if (type(x) is not Tensor and not is_plain_tensor(x)) or x.is_meta or x.is_inference() or not x.numel():
        return False
    # Codes made in inference mode could not be saved for a backward later.
    return is_written_only_by_torch(x) and not torch.is_inference_mode_enabled()


def is_written_only_by_torch(x: Tensor) -> bool:
    """True if only torch can write to this memory. False for memory that NumPy owns or shares (``x.numpy()``), which
    can change without a new version; torch cannot resize such a storage, which identifies it."""
    return x.untyped_storage().resizable()


def _is_capturing(x: Tensor) -> bool:
    return x.device.type != "cpu" and is_capturing(x.device)


def _drop_entry(cache_ref: weakref.ref[_ThreadCache], entry_ref: weakref.ref[_Entry], _: object = None) -> None:
    """Drop an entry unless another one has replaced it; called when the storage of its input is freed, or by a
    backward."""
    cache, entry = cache_ref(), entry_ref()
    if cache is not None and entry is not None and cache.entry is entry:
        cache.entry = None


def _input_key(x: Input) -> tuple[object, ...]:
    """Return the properties that identify an input (see the module docstring)."""
    tensor = x.tensor
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


class Recomputable(NamedTuple):
    """A recomputation of a linear layer's input in its backward, instead of saved codes.

    ``tensors`` are saved; ``recompute(*tensors)`` returns the input bit for bit, detached.
    """

    tensors: tuple[Tensor, ...]
    recompute: Callable[..., Tensor]


class _RecomputableBinding(NamedTuple):
    x: Tensor
    version: int
    recomputable: Recomputable


@contextmanager
def with_recomputable(x: Tensor, recomputable: Recomputable) -> Iterator[None]:
    """Inside this context, layers of this thread that are called with ``x`` itself, also inside an adapter, use
    ``recomputable``."""
    before = _state.binding
    _state.binding = _RecomputableBinding(x, x._version, recomputable)
    try:
        yield
    finally:
        _state.binding = before


def get_recomputable(x: Tensor) -> Recomputable | None:
    """Return the recomputation of this tensor, or None if none is set or the tensor was written to since."""
    binding = _state.binding
    return binding.recomputable if binding is not None and binding.x is x and binding.version == x._version else None
