"""The weight that is FP8 between steps: a tensor of the high-precision shape and dtype, behind which GEMMs find codes.

An :class:`Fp8Weight` is one of two things:

- **a master with its facade**, which is what an optimizer and a state dict know: the values lie in :attr:`master`, an
  ordinary tensor in fp32 or BF16, wherever it lies (it may be in host memory while the facade is on the GPU). Every
  operation of torch sees the master; writing to the facade writes the master. The FP8 codes are cast from it once per
  optimizer step, in one process by the cache of the layer (:mod:`octavo.fp8.weights.cache`), on several ranks by this
  tensor, for the rows of its shard (:mod:`octavo.fp8.weights.fp8_rows`);
- **gathered codes**, which is what FSDP2 hands to a layer for a forward and a backward: codes and scales of the whole
  weight, and no values. GEMMs read the codes. Whatever else asks for values gets them by an explicit dequantize, freed
  with the result (a layer inside ``fp8.high_precision``, a GEMM that a recipe keeps out of FP8); writing raises. Where
  only shape and dtype are asked (``zeros_like``), nothing is dequantized. A frozen weight, which has codes for good and
  never had a master, is a subclass (:mod:`octavo.fp8.weights.frozen_tensor`).

What FSDP2 asks of a tensor to let it gather something else than its values is ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather`` (torch 2.11 to 2.13). The short form of the first, with the mesh alone, is the one that may be
used with uneven rows: the long one demands that everything that is gathered has the shape of the padded shard, which
scales have not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.weights import fp8_rows, versions
from octavo.fp8.weights.fp8_rows import Need, Rows
from octavo.fp8.weights.shards import local_of

__all__ = ["Fp8Weight", "Held", "Source", "master_of"]

aten = torch.ops.aten


class Source(NamedTuple):
    """What an :class:`Fp8Weight` knows besides values: the casts its layers ask for, the shape of the whole weight, and
    whether the codes of its rows are kept between two gathers."""

    needs: tuple[Need, ...]
    whole: torch.Size
    keep: bool = True


class Held:
    """A master, and the codes of its rows under FSDP2; one for all aliases of a weight. ``casts`` counts them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.casts = 0
        self.ahead = 0  # by how much the versions of tensors that were the master before exceed that of this one
        self.edits = 0  # writes through the facade: the same on every rank, also on one without rows
        self.rows: Rows | None = None
        self.stamp: tuple[Any, ...] = ()
        self.face: Any = None  # the DTensor of the master that state dicts get

    @property
    def version(self) -> int:
        """Rises with every write to the tensor that torch sees; does not change when the values move elsewhere."""
        return self.ahead + self.tensor._version

    def move(self, tensor: Tensor) -> None:
        """Let ``tensor``, of the same values, be the master."""
        self.ahead = self.version - tensor._version
        self.tensor = tensor


class Gathered:
    """The codes of a whole weight, one :class:`Quantized` a need, each of the matrix that the GEMM multiplies by.

    ``turned``: this tensor is the transpose of that matrix (experts stored as [E, K, N]).
    """

    def __init__(self, codes: list[Quantized], turned: bool) -> None:
        self.codes = codes
        self.turned = turned


class Fp8Weight(Tensor):
    """See the module's docstring. Made by :meth:`of`, or by FSDP2 through :meth:`fsdp_post_all_gather`."""

    held: Held | None
    gathered: Gathered | None
    source: Source
    frozen: ClassVar[bool] = False  # codes for good
    kept: ClassVar[dict[Any, Callable[..., Any]]]  # what an operation returns as an Fp8Weight, None: it sees values

    @staticmethod
    @torch._disable_dynamo  # a compiler may look at what operations of a weight do, not into them
    def __new__(
        cls: type[Fp8Weight],
        like: Tensor,
        source: Source,
        held: Held | None,
        gathered: Gathered | None,
        device: torch.device | None = None,
    ) -> Fp8Weight:
        """``like``: a tensor of the shape, strides, dtype and (unless given) device that this one shows."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
        )
        self.source, self.held, self.gathered = source, held, gathered
        return self

    @classmethod
    def of(cls, master: Tensor, source: Source, device: torch.device | None = None) -> Fp8Weight:
        """The weight whose values lie in ``master``; ``device``: where its GEMMs run, if not where the values lie."""
        return cls(master, source, Held(master), None, device)

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def master(self) -> Tensor:
        """The ordinary tensor with this rank's values. AttributeError for a gathered weight, which has none."""
        if self.held is None:
            raise AttributeError("A gathered FP8 weight has codes and no master; the shards of its ranks have.")
        return self.held.tensor

    def move_master(self, device: torch.device | str, pin: bool = False) -> None:
        """Let the values lie on ``device`` (pinned there, if asked); codes and facade stay where they are, and codes
        stay valid, since no value changes. Casts bring the values over for as long as they take."""
        assert self.held is not None
        moved = self.held.tensor.detach().to(device)
        self.held.move(moved.pin_memory() if pin else moved)

    def values(self, slot: int | None = None) -> Tensor:
        """High precision, on the device of the facade: the master, or the dequantized codes of a gathered weight; of
        one expert if ``slot`` says so."""
        if self.held is not None:
            values = self.held.tensor.detach().to(self.device)
            return values if slot is None else values[slot]
        own = self if slot is None else _select(self, 0, slot)
        assert own is not None
        return own.dequantize()

    def dequantize(self) -> Tensor:
        """The values of gathered codes, in this tensor's dtype."""
        assert self.gathered is not None
        values = fp8_rows.dequantize(self.gathered.codes[0], self.source.needs[0], self.dtype)
        return values.mT if self.gathered.turned else values

    def codes(self, spec: CastSpec, slot: int | None = None) -> Quantized | None:
        """The gathered codes under ``spec``, of one expert if ``slot`` says so; None for a weight with a master, whose
        codes are for its layer to cast.

        Raises RuntimeError for a cast that nobody announced when the parameter was exchanged.
        """
        if self.gathered is None:
            return None
        q = next((q for q in self.gathered.codes if q.spec == spec), None)
        if q is None:
            there = ", ".join(str(q.spec) for q in self.gathered.codes)
            raise RuntimeError(
                f"A gathered FP8 weight of shape {list(self.shape)} was asked for codes under {spec} and holds those "
                f"under {there}. Its recipe changed after fp8.apply: apply the plan to the model again."
            )
        return q if slot is None else Quantized(q.data[slot], q.scale[slot], q.spec)

    def stamp(self) -> tuple[Any, ...]:
        """What must be the same for codes of this weight to be valid, besides the epoch."""
        if self.held is None:
            return ()
        return (self.held.edits, self.held.version)

    @property
    def _version(self) -> int:  # type: ignore[override]
        return sum(self.stamp())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Of the master, or of the first codes."""
        return (self.held.tensor if self.held is not None else self._codes()[0].data).untyped_storage()

    def data_ptr(self) -> int:
        """Of the master, or of the first codes."""
        return (self.held.tensor if self.held is not None else self._codes()[0].data).data_ptr()

    def _codes(self) -> list[Quantized]:
        assert self.gathered is not None
        return self.gathered.codes

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "gathered codes" if self.held is None else f"master on {self.held.tensor.device}"
        return f"Fp8Weight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, {kind})"

    # How torch treats it ---------------------------------------------------------------------------------------------

    @classmethod
    @torch._disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        keep = cls.kept.get(func)
        if keep is not None:
            kept = keep(*args, **kwargs)
            if kept is not None:
                return kept
        written = _written(func, args, kwargs)
        for weight in written:
            if weight.held is None:
                raise RuntimeError(weight._refusal(f"{func} writes to"))
        read = _shape_of if func in _SHAPE_ONLY else Fp8Weight.values
        targets = {id(w) for w in written}

        def plain(value: Any) -> Any:
            if not isinstance(value, Fp8Weight):
                return value
            return value.master if id(value) in targets else read(value)

        out = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        for weight in written:
            assert weight.held is not None
            weight.held.edits += 1

        def back(value: Any) -> Any:  # an operation in place returns what it was given
            return next((w for w in written if value is w.master), value)

        return tree_map(back, out) if written else out

    def _refusal(self, what: str) -> str:
        return (
            f"{what} a gathered FP8 weight of shape {list(self.shape)}, which holds codes and no values. Write to the "
            "sharded parameter (model.reshard() under FSDP2), or before fully_shard."
        )

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """``p.data = x`` exchanges the master."""
        if isinstance(value, Fp8Weight):
            value = value.master
        if self.held is None or (value.shape, value.dtype) != (self.shape, self.dtype) or value.device != self.device:
            raise RuntimeError(
                f"The FP8 weight {self!r} cannot take a tensor of shape {list(value.shape)}, {value.dtype} on "
                f"{value.device} as its data. Use module.to(...) to change dtype or device, before fp8.apply."
            )
        self.held.tensor = value.detach()
        self.held.edits += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Weight:
        if id(self) not in memo:
            memo[id(self)] = _rebuilt(copy.deepcopy(self.master.detach(), memo), self.source, self.device, self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        grad = self.requires_grad
        return _unpickled, (self.master.detach(), self.source, self.device, isinstance(self, nn.Parameter), grad)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Its inner tensors by name: also what tells torch to exchange the whole object where ``module.to()`` would
        set ``data``."""
        if self.held is not None:
            return ["master"], (self.source, self.device, None)
        names = []
        for i, q in enumerate(self._codes()):
            self.__dict__[f"codes_{i}"], self.__dict__[f"scale_{i}"] = q.data, q.scale
            names += [f"codes_{i}", f"scale_{i}"]
        turned = self.gathered.turned if self.gathered is not None else False
        return names, (self.source, self.device, (tuple(q.spec for q in self._codes()), turned, self.dtype))

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Fp8Weight:
        source, device, codes = context
        if codes is None:
            return Fp8Weight.of(inner["master"], source, device)
        specs, turned, dtype = codes
        made = [Quantized(inner[f"codes_{i}"], inner[f"scale_{i}"], spec) for i, spec in enumerate(specs)]
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return Fp8Weight(like, source, None, Gathered(made, turned), device)

    # How FSDP2 gathers it --------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], int]:
        """Codes and scales of this rank's rows, cast if they changed, which FSDP2 puts into one buffer with those of
        the group's other parameters; and the number of ranks."""
        return self.wire(mesh), mesh.size()

    def wire(self, mesh: Any) -> tuple[Tensor, ...]:
        """What this rank sends: see :func:`octavo.fp8.weights.fp8_rows.wire`. A collective where blocks cross
        shards."""
        held, (needs, whole, keep) = self.held, self.source
        assert held is not None
        shards = fp8_rows.Shards(whole[0], mesh.size(), mesh.get_local_rank())
        # Who casts takes part in a collective where blocks are cut, so all ranks must come to the same answer. The
        # master's version cannot be asked then: a rank without rows sees no write to it.
        cut = any(shards.cuts(need) for need in needs)
        stamp = (versions.now, versions.edits, held.edits, 0 if cut else held.version, shards)
        if held.rows is not None and held.stamp == stamp:
            return fp8_rows.wire(held.rows, shards)
        with torch.inference_mode(False), torch.no_grad():
            rows = fp8_rows.cast(self.values(), needs, shards, mesh)
        held.casts += 1
        held.rows, held.stamp = (rows, stamp) if keep else (None, ())
        return fp8_rows.wire(rows, shards)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: int,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight that layers see, made of what all ranks sent. Its codes lie where FSDP2 gathered them; its scales
        in tensors of their own, which FSDP2 frees and allocates with them."""
        needs, whole = self.source.needs, self.source.whole
        shards = fp8_rows.Shards(whole[0], metadata, 0)
        before = None if out is None else _gathered_of(out)
        scales = None if before is None else [q.scale for q in before.codes]
        codes = fp8_rows.gathered(all_gather_outputs, needs, whole, shards, scales)
        if before is not None:
            before.codes[:] = codes
            return None
        like = torch.empty(whole, dtype=param_dtype, device="meta")
        made = Gathered(codes, needs[0].transposed)
        return type(self)(like, self.source, None, made, self.device), tuple(q.scale for q in codes)


def _gathered_of(out: Tensor) -> Gathered:
    assert isinstance(out, Fp8Weight) and out.gathered is not None
    return out.gathered


def _unpickled(master: Tensor, source: Source, device: torch.device, parameter: bool, grad: bool) -> Tensor:
    made = Fp8Weight.of(master, source, device)
    return nn.Parameter(made, requires_grad=grad) if parameter else made


def _rebuilt(master: Tensor, source: Source, device: torch.device, like: Tensor) -> Any:
    return _unpickled(master, source, device, isinstance(like, nn.Parameter), like.requires_grad)


# Fp8Weight.kept: where FSDP2 cuts, pads and aliases weights.


def _alias(weight: Fp8Weight, *_: Any, **__: Any) -> Fp8Weight:
    return type(weight)(weight, weight.source, weight.held, weight.gathered)


def _as_strided(weight: Fp8Weight, size: Any, stride: Any, offset: int | None = None) -> Fp8Weight | None:
    same = tuple(size) == tuple(weight.shape) and tuple(stride) == weight.stride() and not offset
    return _alias(weight) if same else None


def _slice(
    weight: Fp8Weight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Fp8Weight | None:
    if weight.held is None or dim != 0 or step != 1 or weight.held.tensor.device != weight.device:
        return None
    return Fp8Weight.of(aten.slice.Tensor(weight.held.tensor.detach(), dim, start, end), weight.source)


def _new_zeros(weight: Fp8Weight, size: Any, **how: Any) -> Fp8Weight | None:
    other = [v for k, v in how.items() if v is not None and k != "pin_memory"]
    if weight.held is None or other or len(size) != weight.dim() or tuple(size[1:]) != tuple(weight.shape[1:]):
        return None
    return Fp8Weight.of(weight.held.tensor.new_zeros(size), weight.source, weight.device)


def _copied(op: Callable[..., Tensor]) -> Callable[..., Fp8Weight | None]:
    def copied(weight: Fp8Weight, **how: Any) -> Fp8Weight | None:
        if weight.held is None:
            return None
        made = op(weight.held.tensor.detach(), **how)
        stays = weight.held.tensor.device != weight.device and how.get("device") is None
        return Fp8Weight.of(made, weight.source, weight.device if stays else None)

    return copied


def _turned(weight: Fp8Weight, *dims: int) -> Fp8Weight | None:
    """The transpose of gathered codes stays codes."""
    last = weight.dim() - 1
    if weight.gathered is None or (dims and {d % weight.dim() for d in dims} != {last - 1, last}):
        return None
    like = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta").mT
    made = Gathered(weight.gathered.codes, not weight.gathered.turned)
    return type(weight)(like, weight.source, None, made, weight.device)


def _select(weight: Fp8Weight, dim: int, index: int) -> Fp8Weight | None:
    """One expert of gathered codes stays codes."""
    if weight.gathered is None or weight.dim() != 3 or dim != 0:
        return None
    codes = [Quantized(q.data[index], q.scale[index], q.spec) for q in weight.gathered.codes]
    like = torch.empty_strided(weight.shape[1:], weight.stride()[1:], dtype=weight.dtype, device="meta")
    return type(weight)(like, weight.source, None, Gathered(codes, weight.gathered.turned), weight.device)


def _unbind(weight: Fp8Weight, dim: int = 0) -> list[Fp8Weight] | None:
    parts = [_select(weight, dim, i) for i in range(weight.shape[0])]
    return None if not parts or parts[0] is None else parts  # type: ignore[return-value]


Fp8Weight.kept = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.as_strided.default: _as_strided,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _new_zeros,
    aten.clone.default: _copied(aten.clone.default),
    aten._to_copy.default: _copied(aten._to_copy.default),
    aten.t.default: _turned,
    aten.transpose.int: _turned,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
}
_SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
}


def _shape_of(weight: Fp8Weight) -> Tensor:
    """A stand-in of the weight's shape, dtype and device, one element large."""
    return torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Fp8Weight]:
    """The weights among the arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    found: list[Fp8Weight] = []
    for i, argument in enumerate(func._schema.arguments):
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        found += [v for v in (given if isinstance(given, list | tuple) else [given]) if isinstance(v, Fp8Weight)]
    return found


def master_of(value: Any) -> Any:
    """The plain tensor (or DTensor) that holds the values of an FP8 weight, always the same object while it lies where
    it does; anything else as it is."""
    local = local_of(value)
    if not isinstance(local, Fp8Weight) or local.held is None:
        return value
    if local is value:
        return local.master
    held, kind = local.held, type(value)
    if held.face is None or held.face._local_tensor is not held.tensor or held.face._spec != value._spec:
        held.face = kind(held.tensor, value._spec, requires_grad=False)
    return held.face
