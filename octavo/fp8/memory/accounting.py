"""Count the bytes that a forward saves for its backward, on any device.

    with count_saved(model, blocks) as k:
        loss = model(**batch).loss
    print(k.report())                     # bytes by kind, module and dtype

Hooks on saved tensors are not sufficient: autograd functions can store tensors on their context, checkpointing holds
the arguments of a region in a closure, and caches outlive the call. So storages are counted: a dispatch mode records,
with weak references, each storage that an operation of the forward creates; those alive at the end were saved. A
storage counts once with all its bytes, independent of its views. A storage that was resized to zero does not count.

Each storage belongs to the deepest module whose forward created it, and has a kind:

    activation  saved for the backward: the only kind in ``total``
    position    created outside of blocks and passed to blocks without a gradient: cos, sin, indices
    mask        the same, if the tensor is boolean or its argument is named a mask
    output      returned by the model and not needed by the backward: the caller holds it
    input       created before the forward and saved for the backward (tensors of the caller; weights never count)
    gathered    weights that FSDP2 gathered
    host        in host memory, while the model is on a device: offloaded tensors

Parameters, buffers, gradients and cached FP8 codes of weights do not count. Inputs that layers share
(:mod:`octavo.fp8.dense.inputs`) are dropped before counting, and reference cycles are collected.

Works with fake tensors (no allocation: enter FakeTensorMode first) and tensor subclasses, whose inner tensors count.
Compiled blocks run and count as in eager mode, because torch does not compile under a dispatch mode. Not counted:
memory that no torch operation allocates (``torch.from_numpy``, the random state of 5 KB per checkpointed region).
"""

from __future__ import annotations

import functools
import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten

from octavo.fp8.dense import inputs
from octavo.fp8.observe import recorder
from octavo.fp8.weights.cache import CachesWeights

ACTIVATION = "activation"
Blocks = Iterable[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Row:
    """A live storage. ``shape`` and ``dtype`` describe the tensor that it was created for (or the dtype that it was
    saved with), ``op`` the operation that created it, ``block`` the block it was created in, or ""."""

    module: str
    block: str
    kind: str
    dtype: torch.dtype
    bytes: int
    shape: tuple[int, ...]
    op: str


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that a forward saved. ``total`` and the sums count activations, ``separate`` the other kinds."""

    rows: tuple[Row, ...]

    @property
    def total(self) -> int:
        return sum(r.bytes for r in self.rows if r.kind == ACTIVATION)

    @property
    def by_module(self) -> dict[str, int]:
        return self._sums(lambda r: r.module)

    @property
    def by_block(self) -> dict[str, int]:
        return self._sums(lambda r: r.block)

    @property
    def by_dtype(self) -> dict[torch.dtype, int]:
        return self._sums(lambda r: r.dtype)

    @property
    def separate(self) -> dict[str, int]:
        return _sums((r.kind, r.bytes) for r in self.rows if r.kind != ACTIVATION)

    def _sums(self, key: Callable[[Row], Any]) -> dict[Any, int]:
        return _sums((key(r), r.bytes) for r in self.rows if r.kind == ACTIVATION)

    def __str__(self) -> str:
        lines = [("bytes saved", self.total)]
        lines += [(name or "(outside modules)", n) for name, n in _sort_by_size(self.by_module)]
        lines += [(f"in {str(dtype).removeprefix('torch.')}", n) for dtype, n in _sort_by_size(self.by_dtype)]
        lines += [(f"separate: {kind}", n) for kind, n in sorted(self.separate.items())]
        return "\n".join(f"{n:>16,}  {name}" for name, n in lines)


@contextmanager
def count_saved(model: nn.Module, blocks: Blocks = ()) -> Iterator[Accountant]:
    """Count the bytes that a forward inside the context saves.

    Args:
        model: the model; its weights and buffers are not counted.
        blocks: (name, block) of the repeated blocks; their arguments identify positions and masks.

    Yields:
        An :class:`Accountant`. ``report()`` returns :class:`SavedBytes` as of the call, or after the context as of its
        end.
    """
    accountant = Accountant(model, blocks)
    hooks = [
        nn.modules.module.register_module_forward_pre_hook(accountant._enter),
        nn.modules.module.register_module_forward_hook(accountant._leave, always_call=True),
        *(
            block.register_forward_pre_hook(accountant._record_block_inputs, with_kwargs=True)
            for block in accountant._blocks
        ),
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(accountant._pack, lambda tensor: tensor), accountant._mode:
            yield accountant
        accountant._end = accountant.report()
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _StorageRecord:
    """A storage, from its first use on."""

    storage: StorageWeakRef
    module: str
    block: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    op: str
    created: bool
    role: str = ""  # position, mask or gathered
    saved: bool = False
    returned: bool = False


@dataclass(eq=False)
class Accountant:
    """Records storages; see :func:`count_saved`."""

    model: nn.Module
    blocks: Blocks
    _storages: dict[int, _StorageRecord] = field(default_factory=dict)
    _end: SavedBytes | None = None

    def __post_init__(self) -> None:
        self._names = {module: name for name, module in self.model.named_modules()}
        self._blocks = {block: name for name, block in self.blocks}
        self._thread = threading.get_ident()
        self._path: list[tuple[str, str]] = []  # (module, block) of the active calls
        self._mode = _Mode(self)

    def report(self) -> SavedBytes:
        if self._end is not None:
            return self._end
        inputs.drop_entries()
        gc.collect()
        owned = {storage._cdata for tensor in self._owned() for _, storage in _parts(tensor)}
        on_host = all(p.device.type == "cpu" for p in self.model.parameters())
        rows = []
        for seen in self._storages.values():
            storage = None if seen.storage.cdata in owned else _live_storage(seen.storage)
            kind = _kind(seen)
            if kind == ACTIVATION and storage is not None and storage.device.type == "cpu" and not on_host:
                kind = "host"
            if storage is not None and storage.nbytes() and kind is not None:
                place = (seen.module, seen.block, kind, seen.dtype)
                rows.append(Row(*place, storage.nbytes(), seen.shape, seen.op))
        return SavedBytes(tuple(rows))

    def _owned(self) -> Iterator[Tensor]:
        """Yield the tensors that the model holds between steps."""
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        for module in self.model.modules():
            for cache in module._weight_caches().values() if isinstance(module, CachesWeights) else ():
                for codes in cache._codes.values():
                    yield from (codes.data, codes.scale)

    # --- hooks of the forward -----------------------------------------------------------------------------------------

    @recorder.observer_hook
    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            outer_name, outer_block = self._path[-1] if self._path else ("", "")
            self._path.append((self._names.get(module, outer_name), self._blocks.get(module, outer_block)))

    @recorder.observer_hook
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._path:
            self._path.pop()
            if module is self.model:
                for tensor in _tensors(output):
                    for seen in self._records_of(tensor):
                        seen.returned = True

    def _record_block_inputs(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Classify the arguments of a block after the hidden state: tensors that were created outside of blocks and
        require no gradient are positions or masks."""
        arguments = [(str(i), value) for i, value in enumerate(args)] + list(kwargs.items())
        for name, value in arguments[1:] if args or "hidden_states" not in kwargs else arguments:
            for tensor in () if name == "hidden_states" else _tensors(value):
                for seen in self._records_of(tensor):
                    if seen.created and not seen.block and not tensor.requires_grad:
                        seen.role = "mask" if "mask" in name or tensor.dtype == torch.bool else "position"

    def _pack(self, tensor: Tensor) -> Tensor:
        for plain, storage in _parts(tensor):
            seen = self._record(plain, storage, "saved", False)
            seen.saved, seen.dtype = True, plain.dtype  # scales are written as integers
        if tensor.grad_fn is None:
            return tensor
        with _disable_current_modes():  # a node that held its own result would never be freed without a backward
            return tensor.detach()

    def _records_of(self, tensor: Tensor) -> list[_StorageRecord]:
        return [self._record(plain, storage, "given", False) for plain, storage in _parts(tensor)]

    def _record(self, tensor: Tensor, storage: torch.UntypedStorage, op: str, created: bool) -> _StorageRecord:
        key = storage._cdata
        seen = self._storages.get(key)
        if seen is None:  # the weak reference keeps the address from being used again
            module, block = self._path[-1] if self._path else ("", "")
            seen = _StorageRecord(
                StorageWeakRef(storage), module, block, tensor.dtype, tuple(tensor.shape), op, created
            )
            self._storages[key] = seen
        return seen

    def _record_operation(self, func: Any, operands: list[Tensor], outputs: list[Tensor]) -> None:
        """Record an operation: unknown operands existed before, and unknown outputs were created by it."""
        op, fresh, gathers = _describe_op(func)
        for tensors, created in ((operands, fresh), (outputs, True)):
            for tensor in tensors:
                for plain, storage in _parts(tensor):
                    seen = self._record(plain, storage, op, created)
                    if gathers:
                        seen.role = "gathered"


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, accountant: Accountant) -> None:
        super().__init__()
        self.accountant = accountant

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operands: list[Tensor] = []
        outputs: list[Tensor] = []
        _collect(args, operands)
        _collect(kwargs, operands)
        _collect(out, outputs)
        self.accountant._record_operation(func, operands, outputs)
        return out


def _kind(seen: _StorageRecord) -> str | None:
    if not seen.created:
        return "input" if seen.saved and seen.role != "gathered" else None
    if seen.role:
        return seen.role
    return "output" if seen.returned and not seen.saved else ACTIVATION


@functools.cache
def _describe_op(func: Any) -> tuple[str, bool, bool]:
    """Return (name, whether torch.tensor() created its operand, whether it gathers weights)."""
    op = str(func)
    return op, op.startswith("aten.lift_fresh"), op.startswith("fsdp.")


def _collect(value: Any, into: list[Tensor]) -> None:
    """Collect the tensors among arguments or results of an operation, which are nested only in these containers. Five
    times faster than a general tree traversal."""
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, into)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, into)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _parts(tensor: Tensor) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """Yield the plain tensors of a tensor, each with its storage."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):  # a DTensor names its mesh, too
                yield from _parts(inner)
    elif tensor.layout is torch.strided:
        yield tensor, tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield from _parts(tensor._indices())
        yield from _parts(tensor._values())
    else:
        raise TypeError(
            f"the accountant counts strided and COO tensors; found one of layout {tensor.layout}, whose memory it "
            "cannot see. Keep such tensors out of the forward that is counted"
        )


def _live_storage(storage: StorageWeakRef) -> torch.UntypedStorage | None:
    return None if storage.expired() else torch.UntypedStorage._new_with_weak_ptr(storage.cdata)


def _sums(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    out: dict[Any, int] = defaultdict(int)
    for key, value in pairs:
        out[key] += value
    return dict(out)


def _sort_by_size(sums: Mapping[Any, int]) -> list[tuple[Any, int]]:
    return sorted(sums.items(), key=lambda item: -item[1])
