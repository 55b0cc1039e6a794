"""Weights that are FP8 between steps: tensors of the high-precision shape and dtype that provide codes for GEMMs.

An :class:`Fp8Weight` is in one of three states:

- **a master** (:attr:`Fp8Weight.held`), which optimizers and state dicts see: the values are in
  :attr:`~Fp8Weight.master`, a plain tensor in fp32 or BF16. Every torch operation sees the master; writing to the
  weight writes the master. The FP8 codes are cast from it once per optimizer step, in one process by the cache of the
  layer (:mod:`octavo.fp8.weights.cache`), on several ranks by this tensor, for the rows of its shard
  (:mod:`octavo.fp8.weights.fp8_rows`);
- **gathered codes** (:attr:`Fp8Weight.stored`), which FSDP2 passes to a layer for a forward and a backward: codes and
  scales of the whole weight, and no values;
- **frozen codes** (``stored.frozen``), permanently: see :mod:`octavo.fp8.weights.frozen`. ``.to(device)``, copies and
  pickles keep the codes unchanged, and FSDP2 shards, pads and gathers them with their scales. A module's conversion to
  another dtype would replace them by values, so it is refused; code that reads the weight in another dtype
  (``weight.float()``, as in DoRA) gets temporary values.

``param: true`` converts the weights of FP8 GEMMs to weights with a master
(:func:`octavo.fp8.planning.apply.convert_to_fp8_weights`). In one process this changes no result; since forward and
dgrad read only codes, FSDP2 can gather codes and scales instead of 2 or 4 bytes per parameter: 1 byte with one cast of
the weight (blockwise, tensorwise), 2 with two (rowwise, mxfp8).

GEMMs read codes. Other code that reads values from a weight of codes gets them by an explicit dequantize, freed with
the result (a layer inside ``fp8.high_precision``, a GEMM that a recipe keeps out of FP8, autocast); writing raises.
Operations that need only shape and dtype (``zeros_like``) dequantize nothing. :mod:`octavo.fp8.weights.fp8_ops` has the
operations on codes and masters.

FSDP2 gathers something other than values through ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torch 2.11 to
2.13). Only the short form of the first, with just the mesh, supports uneven rows: the long form requires that all
gathered tensors have the shape of the padded shard, which scales do not have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.registry import get
from octavo.fp8.weights import fp8_rows
from octavo.fp8.weights.fp8_codes import Codes, Master, Source
from octavo.fp8.weights.fp8_rows import Need, Shards
from octavo.fp8.weights.shards import local_of
from octavo.fp8.weights.versions import called_by_conversion, peft_advice

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Fp8Weight(Tensor):
    """A weight with a master or codes, as described above. Created by :meth:`of` and :meth:`from_codes`."""

    source: Source
    held: Master | None
    stored: Codes | None
    operations: ClassVar[dict[Any, Callable[..., Any]]] = {}  # those without values: fp8_ops registers them

    @staticmethod
    @torch._disable_dynamo  # a compiler must not trace into operations of a weight
    def __new__(
        cls: type[Fp8Weight], like: Tensor, source: Source, state: Master | Codes, device: torch.device | None = None
    ) -> Fp8Weight:
        """``like``: a tensor with the shape, strides, dtype and (by default) device of the new one."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
        )
        self.source = source
        self.held, self.stored = (state, None) if isinstance(state, Master) else (None, state)
        return self

    @classmethod
    def of(cls, master: Tensor, source: Source) -> Fp8Weight:
        """Create a weight with its values in ``master``."""
        return cls(master, source, Master(master))

    @classmethod
    def from_codes(
        cls,
        codes: Codes,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        stride: Sequence[int] | None = None,
    ) -> Fp8Weight:
        """Create a weight that represents ``codes`` as values of this shape, dtype and stride (default: contiguous)."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        if stride is not None:
            like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return cls(like, codes.source, codes, device)

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def frozen(self) -> Codes | None:
        """The codes of a frozen weight; None for other weights."""
        return self.stored if self.stored is not None and self.stored.frozen else None

    @property
    def is_transposed(self) -> bool:
        """True if its codes encode its transpose; False with a master."""
        return self.stored is not None and self.stored.is_transposed

    @property
    def master(self) -> Tensor:
        """The plain tensor with this rank's values. AttributeError for a weight of codes, which has none."""
        if self.held is None:
            raise AttributeError("A gathered FP8 weight has codes and no master; the shards of its ranks have.")
        return self.held.tensor

    def values(self, slot: int | None = None) -> Tensor:
        """Return the values in high precision, the master or dequantized codes, on the device of the weight; with
        ``slot``, those of one expert."""
        if self.held is not None:
            values = self.held.tensor.detach()
            return values if slot is None else values[slot]
        return (self if slot is None else self.expert(slot)).dequantize()

    def expert(self, slot: int) -> Fp8Weight:
        """Return the codes of one expert."""
        assert self.stored is not None
        codes = self.stored.expert(slot)
        return Fp8Weight.from_codes(codes, self.shape[1:], self.dtype, self.device, self.stride()[1:])

    def dequantize(self) -> Tensor:
        """Return the values of the codes in this tensor's dtype; zeros for rows of a shard without codes."""
        assert self.stored is not None
        return self.stored.values(self.shape, self.dtype, self.device)

    def codes(self, spec: CastSpec, slot: int | None = None) -> Quantized | None:
        """Return the codes under ``spec``; with ``slot``, those of one expert. None for a weight with a master, whose
        codes its layer casts, and for frozen codes in other blocks.

        Raises RuntimeError for gathered codes if the cast was not planned when the parameter was replaced.
        """
        if self.stored is None:
            return None
        q = self.stored.find(spec)
        if q is None and not self.stored.frozen:
            specs = ", ".join(str(q.spec) for q in self.stored.codes)
            raise RuntimeError(
                f"A gathered FP8 weight of shape {list(self.shape)} has no codes under {spec}, only under {specs}. Its "
                "recipe changed after fp8.apply: apply the plan to the model again."
            )
        return q if q is None or slot is None else Quantized(q.data[slot], q.scale[slot], q.spec)

    def stamp(self) -> tuple[int, ...]:
        """Return the values that, with the version of all weights, must be unchanged for codes to be valid."""
        return () if self.held is None else (self.held.edits, self.held.version)

    @property
    def _version(self) -> int:  # type: ignore[override]
        return sum(self.stamp())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the master or of the first codes, by which FSDP2 detects that a shard was moved. For a
        whole frozen weight, return the wrapper's storage, whose address safetensors cannot read."""
        if self.frozen is None or self.frozen.shard:
            return self.first_tensor().untyped_storage()
        storage, shape = super().untyped_storage(), self.shape  # not self: the storage would keep it alive

        def refuse() -> int:
            raise RuntimeError(_no_values_message(shape))

        storage.data_ptr = refuse  # type: ignore[method-assign]
        return storage

    def data_ptr(self) -> int:
        """Return the address of the master or of gathered codes. Raises RuntimeError for frozen codes, not values."""
        if self.frozen:
            raise RuntimeError(_no_values_message(self.shape))
        return self.first_tensor().data_ptr()

    def first_tensor(self) -> Tensor:
        """Return the master, or the first codes; an empty tensor if there are no codes."""
        if self.stored is None:
            return self.master
        if self.stored.codes:
            return self.stored.codes[0].data
        return torch.empty(0, dtype=self.stored.need.spec.fmt.dtype, device=self.device)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind = "gathered codes" if self.held is None else f"master on {self.held.tensor.device}"
        if self.frozen:
            kind = f"frozen codes {self.frozen.need.spec}{', a shard' if self.frozen.shard else ''}"
        return f"Fp8Weight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, {kind})"

    # Dispatch --------------------------------------------------------------------------------------------------------

    @classmethod
    @torch._disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls.operations:
            result = cls.operations[func](*args, **kwargs)
            if result is not None:
                return result
        written = _weights_written(func, args, kwargs)
        for weight in written:
            if weight.held is None:
                raise RuntimeError(weight._refusal(f"{func} writes to"))
        targets = {id(w) for w in written}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, Fp8Weight):
                return value
            return value.master if id(value) in targets else value.values()

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        for weight in written:
            assert weight.held is not None
            weight.held.edits += 1

        def rewrap(value: Any) -> Any:  # an operation in place returns its argument
            return next((w for w in written if value is w.master), value)

        return tree_map(rewrap, out) if written else out

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """``p.data = x`` replaces the master; a frozen weight takes the codes of another frozen weight like it."""
        if self.frozen:
            if value is not self:
                self.stored = self._codes_of(value, "was given as the data of")
            return
        if isinstance(value, Fp8Weight):
            value = value.master
        if self.held is None or (value.shape, value.dtype) != (self.shape, self.dtype) or value.device != self.device:
            raise RuntimeError(
                f"The FP8 weight {self!r} cannot take a tensor of shape {list(value.shape)}, {value.dtype} on "
                f"{value.device} as its data. Use module.to(...) to change dtype or device, before fp8.apply."
            )
        self.held.tensor = value.detach()
        self.held.edits += 1

    def copy_from(self, other: object) -> None:
        """Copy the codes of ``other``, a frozen weight like this one, which also fills shards. Raises RuntimeError if
        the weights differ in more than codes."""
        assert self.stored is not None
        if isinstance(other, Fp8Weight) and other.stored is self.stored:
            return
        codes = self._codes_of(other, "was to be copied to")
        if self.stored.codes and self.stored.lead != codes.lead:
            why = "rows that begin at another place in their block"
            raise RuntimeError(self._refusal(f"A tensor ({why}) was to be copied to"))
        self.stored.copy_from(codes)

    def _codes_of(self, other: object, what: str) -> Codes:
        """Return the codes of another frozen weight. Raises RuntimeError if this weight cannot take them."""
        why: str | None = "not a frozen FP8 weight"
        if isinstance(other, Fp8Weight) and other.frozen:
            expected, given = self._identity(), other._identity()
            differing = (name for name in expected if given[name] != expected[name])
            why = next((f"{name} {given[name]}, not {expected[name]}" for name in differing), None)
            if why is None:
                return other.frozen
        raise RuntimeError(self._refusal(f"A tensor ({why}) {what}"))

    def _identity(self) -> dict[str, object]:
        """Return the properties that must be equal for a frozen weight to take the codes of another."""
        assert self.stored is not None
        spec = self.stored.need.spec
        identity = {"shape": list(self.shape), "dtype": self.dtype, "device": self.device}
        return {**identity, "codes": (spec.format, spec.block), "orientation": self.is_transposed}

    # Operations that frozen weights reject ----------------------------------------------------------------------------

    def _refusal(self, what: str) -> str:
        if self.frozen:
            return (
                f"{what} a frozen FP8 weight of shape {list(self.shape)}, whose codes stay as they are. "
                f"{peft_advice()}Call octavo.fp8.dequantize_weights(model) for weights in high precision that may be "
                "written, or fp8.load_fp8_state_dict to exchange codes for others."
            )
        return (
            f"{what} a gathered FP8 weight of shape {list(self.shape)}, which holds codes and no values. Write to the "
            "sharded parameter (model.reshard() under FSDP2), or before fully_shard."
        )

    def refuse_dtype(self, dtype: torch.dtype) -> None:
        if dtype is self.dtype or not self.frozen:
            return
        raise RuntimeError(
            f"A frozen FP8 weight of shape {list(self.shape)} that represents {self.dtype} values was to become "
            f"{dtype}, which would drop its codes and scales. Call fp8.dequantize_weights(model) first for a model in "
            "high precision (2 bytes per parameter and more), or convert only the other parts, such as "
            "model.lm_head.to(...); weight.dequantize().to(...) gives the values of this weight. It is unchanged; "
            "modules that were converted before it stay converted."
        )

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert to another device or dtype; a frozen weight in another dtype becomes values. Raises RuntimeError if
        a module would replace its parameter by them (``module.to(dtype)``, ``model.half()``)."""
        if self.frozen and called_by_conversion():
            for arg in (*args, *kwargs.values()):
                dtype = arg if isinstance(arg, torch.dtype) else arg.dtype if isinstance(arg, Tensor) else None
                if dtype is not None:
                    self.refuse_dtype(dtype)
        return super().to(*args, **kwargs)

    half = partialmethod(to, torch.float16)
    float = partialmethod(to, torch.float32)
    double = partialmethod(to, torch.float64)
    bfloat16 = partialmethod(to, torch.bfloat16)

    def type(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the name of its type; with a dtype, convert like :meth:`to`."""
        if dtype is not None and self.frozen and called_by_conversion():
            self.refuse_dtype(dtype if isinstance(dtype, torch.dtype) else torch.empty(0).type(dtype).dtype)
        return super().type(dtype, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Raises RuntimeError for True on a frozen weight."""
        if requires_grad and self.frozen:
            raise RuntimeError(self._refusal("A gradient was requested for"))
        return super().requires_grad_(requires_grad)

    @property
    def requires_grad(self) -> bool:
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    # Copies ----------------------------------------------------------------------------------------------------------

    def map(self, change: Callable[[Tensor], Tensor]) -> Fp8Weight:
        """Return a copy with ``change``, such as a move, applied to the master or to frozen codes and scales."""
        if not self.frozen:
            return Fp8Weight.of(change(self.master.detach()), self.source)
        codes = self.frozen.map(change)
        here = codes.codes[0].data if codes.codes else change(torch.empty(0, device=self.device))
        return Fp8Weight.from_codes(codes, self.shape, self.dtype, here.device, self.stride())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Tensor = self.map(lambda t: copy.deepcopy(t, memo))
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        inner = self._inner() if self.frozen else {"master": self.master.detach()}
        # pickle does not support FP8
        inner = {k: t.view(torch.uint8) if k == "codes_0" else t for k, t in inner.items()}
        grad = self.requires_grad if isinstance(self, nn.Parameter) else None
        return _unpickle, (inner, self._context(), self.shape, self.stride(), grad)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors. Because this method exists, ``module.to()`` replaces the whole object
        instead of setting ``data``."""
        if self.stored is not None:
            self.__dict__.update(self._inner())
        return list(self._inner()), self._context()

    def _inner(self) -> dict[str, Tensor]:
        if self.stored is None:
            return {"master": self.master}
        parts = [(f"codes_{i}", q.data, f"scale_{i}", q.scale) for i, q in enumerate(self.stored.codes)]
        return {name: t for c, data, s, scale in parts for name, t in ((c, data), (s, scale))}

    def _context(self) -> tuple[Any, ...]:
        """Return everything except the inner tensors, as comparable values that the compiler guards on."""
        needs, whole, keep = self.source
        named = tuple((need.spec, need.backend.name, *need[2:]) for need in needs)
        codes = self.stored
        state = None if codes is None else (codes.is_transposed, codes.frozen, codes.lead, codes.shard)
        return (named, tuple(whole), keep), self.dtype, self.device, state

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Fp8Weight:
        (named, whole, keep), dtype, device, state = context
        needs = tuple(Need(spec, get(backend), *rest) for spec, backend, *rest in named)
        source = Source(needs, torch.Size(whole), keep)
        if state is None:
            return Fp8Weight.of(inner["master"], source)
        codes = [Quantized(inner[f"codes_{i}"], inner[f"scale_{i}"], n.spec) for i, n in enumerate(needs) if inner]
        return Fp8Weight.from_codes(Codes(codes, source, *state), size, dtype, device, stride)

    # FSDP2 -----------------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], int]:
        """Return (codes and scales of this rank's rows, cast if they changed; the number of ranks). FSDP2 joins the
        tensors of all parameters of a group in one buffer."""
        return self.wire(mesh), mesh.size()

    def wire(self, mesh: DeviceMesh) -> tuple[Tensor, ...]:
        """Return the tensors that this rank sends: see :func:`octavo.fp8.weights.fp8_rows.pack_for_gather`. Collective
        call if blocks of a master cross shards; frozen codes are sent unchanged."""
        shards = Shards(self.source.whole[0], mesh.size(), mesh.get_local_rank())
        if self.stored is not None:
            return fp8_rows.pack_for_gather(self.stored.shard_rows(shards, self.device), shards)
        assert self.held is not None
        return fp8_rows.pack_for_gather(self.held.shard_rows(self.values, self.source, shards, mesh), shards)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: int,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the weight that layers see, from the tensors of all ranks. Its codes are views of FSDP2's buffers; its
        scales are separate tensors, which FSDP2 frees and allocates with them."""
        held = getattr(out, "_local_tensor", out)  # of a DTensor for distributed experts
        before = held.stored if isinstance(held, Fp8Weight) else None
        assert out is None or before is not None
        codes = Codes.gathered(all_gather_outputs, self.source, metadata, self.frozen is not None, before)
        if codes is before:
            return None
        whole = Fp8Weight.from_codes(codes, self.source.whole, param_dtype, self.device)
        return whole, tuple(q.scale for q in codes.codes)


def _unpickle(inner: dict[str, Tensor], context: Any, size: Any, stride: Any, grad: bool | None) -> Tensor:
    source, dtype, device, state = context
    if "codes_0" in inner:
        inner["codes_0"] = inner["codes_0"].view(source[0][0][0].fmt.dtype)
        device = inner["codes_0"].device  # where they were loaded to
    weight = Fp8Weight.__tensor_unflatten__(inner, (source, dtype, device, state), size, stride)
    return weight if grad is None else nn.Parameter(weight, requires_grad=grad)


def _no_values_message(shape: torch.Size) -> str:
    return (
        f"A frozen FP8 weight of shape {list(shape)} has no values in memory that could be pointed at. Save "
        "fp8.fp8_state_dict(model) for its codes and scales, or fp8.dequantize_weights(model) first for values "
        "(save_pretrained writes those); `octavo export` writes FP8 folders."
    )


def _weights_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Fp8Weight]:
    """Return the weights that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    weights: list[Fp8Weight] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        weights += [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Fp8Weight)]
    return weights


def master_of(value: Any) -> Any:
    """Return the plain tensor (or DTensor) with the values of an FP8 weight, always the same object until the master
    is replaced; anything else is returned unchanged."""
    local = local_of(value)
    if not isinstance(local, Fp8Weight) or local.held is None:
        return value
    if local is value:
        return local.master
    held, kind = local.held, type(value)
    if held.dtensor is None or held.dtensor._local_tensor is not held.tensor or held.dtensor._spec != value._spec:
        held.dtensor = kind(held.tensor, value._spec, requires_grad=False)
    return held.dtensor


def fill_parameter(parameter: nn.Parameter, rows: Tensor) -> nn.Parameter:
    """Return a parameter like ``parameter``, which has no values, with the values ``rows`` (this rank's rows of a
    DTensor) and the same sharding, ``requires_grad`` and FP8 state. The rows of a frozen weight are a frozen weight.

    Raises ValueError if the rows differ in shape or dtype, or are codes instead of values or the reverse.
    """
    local = local_of(parameter)
    takes_codes, has_codes = (isinstance(x, Fp8Weight) and x.frozen is not None for x in (local, rows))
    if takes_codes != has_codes or rows.shape != local.shape or rows.dtype != local.dtype:
        raise ValueError(
            f"Rows {list(rows.shape)} in {rows.dtype}{' of codes' if has_codes else ''} do not match a parameter "
            f"with {list(local.shape)} in {local.dtype}{' of codes' if takes_codes else ''} here."
        )
    if isinstance(local, Fp8Weight) and local.held is not None:
        rows = Fp8Weight.of(rows, local.source)
    if local is not parameter:
        whole: Any = parameter
        rows = type(whole)(rows, whole._spec, requires_grad=False)
    copied = nn.Parameter(rows, requires_grad=parameter.requires_grad)
    copied.__dict__.update({k: v for k, v in parameter.__dict__.items() if k not in copied.__dict__})
    return copied


def part_of(parameter: Tensor, first: int, last: int) -> Tensor:
    """Return a copy of experts ``first`` to ``last`` of a parameter [E, ...] with values, for one rank."""
    experts = (parameter.master if isinstance(parameter, Fp8Weight) else parameter).detach()[first:last].clone()
    if not isinstance(parameter, Fp8Weight):
        return experts
    return Fp8Weight.of(experts, parameter.source._replace(whole=experts.shape))
