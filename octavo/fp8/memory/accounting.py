"""The accountant of saved bytes: what a forward leaves in memory for its backward, counted on any device.

    with count_saved(model, blocks) as k:
        loss = model(**batch).loss
    print(k.report())                     # bytes by kind, module and dtype

Hooks on saved tensors are not enough: an autograd function may put tensors on its context, checkpointing holds the
arguments of a region in a closure, a cache outlives the call. So this counts storages: a dispatch mode notes, weakly,
every storage that an operation of the forward creates, and what of it is still alive at the end was saved. A storage
counts once, with all its bytes, however many views it has; one that was resized to nothing counts nothing.

Each storage is put down to the deepest module whose forward created it, and has a kind:

    activation  saved for the backward: the only kind in ``total``
    position    made outside every block and passed to blocks with their input, without gradient: cos, sin, indices
    mask        such a tensor that is boolean or called a mask
    output      what the model returned and no backward needs: the caller holds it
    input       made before the forward and saved for the backward (the caller's tensors; weights are never counted)
    gathered    what FSDP2 gathers of the weights
    host        in the memory of the host, while the model is on a device: what offload moved there

Parameters, buffers, gradients and the cached FP8 codes of weights are left out. What layers of one input remember of it
for each other (:mod:`octavo.fp8.dense.inputs`) is dropped before counting, and cycles of Python objects are collected.

Works with fake tensors (nothing is allocated: enter FakeTensorMode first) and tensor subclasses, whose inner tensors
count. A compiled block runs, and counts, as it would eagerly: torch compiles nothing under a dispatch mode. Not seen:
memory that torch did not make through an operation (``torch.from_numpy``, the random state of 5 KB that each
checkpointed region stores).
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
    """One storage that is alive. ``shape`` is the shape of the tensor that it was made for, ``dtype`` too unless saved
    under another, ``op`` what made it, ``block`` the block that it was made in ("" outside)."""

    module: str
    block: str
    kind: str
    dtype: torch.dtype
    bytes: int
    shape: tuple[int, ...]
    op: str


@dataclass(frozen=True)
class SavedBytes:
    """What a forward left alive, in bytes. ``total`` and the sums count activations, ``separate`` the other kinds."""

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
    """Count what the forward inside leaves alive.

    Args:
        model: names the modules; its weights and buffers are not counted.
        blocks: (name, block) of the repeating blocks, which tell positions and masks from activations.

    Yields:
        An :class:`Accountant`, whose ``report()`` is :class:`SavedBytes`: inside, as of now; afterwards, as of the end.
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
    """A storage, from its first appearance on."""

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
    """Notes storages; see :func:`count_saved`."""

    model: nn.Module
    blocks: Blocks
    _storages: dict[int, _StorageRecord] = field(default_factory=dict)
    _end: SavedBytes | None = None

    def __post_init__(self) -> None:
        self._names = {module: name for name, module in self.model.named_modules()}
        self._blocks = {block: name for name, block in self.blocks}
        self._thread = threading.get_ident()
        self._path: list[tuple[str, str]] = []  # (module, block) of the calls that are under way
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
        """What a model holds between steps."""
        for parameter in self.model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        for module in self.model.modules():
            for cache in module._weight_codes().values() if isinstance(module, CachesWeights) else ():
                for codes in cache._codes.values():
                    yield from (codes.data, codes.scale)

    # --- what happens during the forward ------------------------------------------------------------------------------

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
        """The arguments of a block: what was made outside blocks and has no gradient says where tokens are or what they
        may see. The first one is the hidden state."""
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
        with _disable_current_modes():  # a node that held its own result would live until a backward, if there is none
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
        """After an operation: what it was given was there before, unless noted; what else comes out it made."""
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
    """(its name, whether torch.tensor() shows itself first in it, whether it gathers weights)."""
    op = str(func)
    return op, op.startswith("aten.lift_fresh"), op.startswith("fsdp.")


def _collect(value: Any, into: list[Tensor]) -> None:
    """The tensors among an operation's arguments or results. They are nested in nothing but these containers, which is
    why no general walk through a tree, five times slower, is needed."""
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, into)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, into)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _parts(tensor: Tensor) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """The plain tensors that a tensor consists of, each with its storage."""
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
