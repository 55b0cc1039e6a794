"""The tensor of a frozen weight: codes and scales for good, in the shape and the dtype of the values they stand for.

It moves as one: ``.to(device)``, copies and pickles carry the very codes, and FSDP2 shards, pads and gathers codes and
the scales of the blocks they lie in. A conversion to another dtype would put values in their place, so it is refused,
of the tensor and of every module that holds it; so are writes and gradients. Reading is not: an operation of torch (and
autocast) gets dequantized values for as long as it runs.

A shard holds the rows that FSDP2 gave it, and the scales of all blocks that its rows touch. A block that a border cuts
has its scale on every rank it reaches; :attr:`Store.lead` says how many rows of the first block lie on ranks before.
FSDP2 makes a shard as it makes any: cut (``chunk``), an empty one of the padded size (``new_zeros``), of which the
first rows are written (``narrow``, ``copy_``). The padding has no codes; it is added when the rows are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.layout import ceil_div
from octavo.fp8.kernels.registry import get
from octavo.fp8.weights import fp8_rows
from octavo.fp8.weights.fp8_rows import Need
from octavo.fp8.weights.fp8_tensor import Fp8Weight, Gathered, Source

__all__ = ["FrozenWeight", "Store"]

aten = torch.ops.aten


class Store(Gathered):
    """The codes that lie on this rank, one for all aliases of a weight; ``codes`` is empty before a shard is filled.

    ``lead``: the rows of the first block that lie on ranks before this one. ``shard``: made by FSDP2.
    """

    def __init__(self, codes: list[Quantized], turned: bool, lead: int = 0, shard: bool = False) -> None:
        super().__init__(codes, turned)
        self.lead = lead
        self.shard = shard


def _no_values(shape: torch.Size) -> str:
    return (
        f"A frozen FP8 weight of shape {list(shape)} has no values in memory that could be pointed at. Save "
        "fp8.fp8_state_dict(model) for its codes and scales, or fp8.thaw(model) first for values (save_pretrained "
        "writes those); `octavo export` writes FP8 folders."
    )


class FrozenWeight(Fp8Weight):
    """See the module's docstring. Made by :func:`octavo.fp8.weights.frozen`."""

    frozen = True
    gathered: Gathered

    @classmethod
    def made(
        cls, codes: list[Quantized], need: Need, shape: torch.Size, whole: torch.Size, dtype: torch.dtype,
        device: torch.device, lead: int = 0, shard: bool = False,
    ) -> FrozenWeight:  # fmt: skip
        """The weight of ``codes`` (one, or none yet), of ``shape``: its own, or that of its rows of ``whole``."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        return cls(like, Source((need,), whole), None, Store(codes, need.transposed, lead, shard), device)

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def own(self) -> Quantized | None:
        """The codes that lie here; None in a shard without rows."""
        return self.gathered.codes[0] if self.gathered.codes else None

    @property
    def spec(self) -> CastSpec:
        return self.source.needs[0].spec

    @property
    def lead(self) -> int:
        return getattr(self.gathered, "lead", 0)

    @property
    def shard(self) -> bool:
        return getattr(self.gathered, "shard", False)

    def codes(self, spec: CastSpec, slot: int | None = None) -> Quantized | None:
        """The codes, of one expert if ``slot`` says so, with the scales that they came with; None if they lie in other
        blocks than those of ``spec``."""
        q = self.own
        if q is None or (q.spec.format, q.spec.block) != (spec.format, spec.block):
            return None
        return q if slot is None else Quantized(q.data[slot], q.scale[slot], q.spec)

    def dequantize(self) -> Tensor:
        """code * scale of the rows here, in this tensor's dtype; zeros where a shard has no codes."""
        q, need = self.own, self.source.needs[0]
        if q is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self.lead:
            q = _by_row(q, self.lead)
        values = fp8_rows.dequantize(q, need, self.dtype)
        if self.gathered.turned:
            values = values.mT
        missing = self.shape[0] - values.shape[0]
        return values if not missing else torch.cat([values, values.new_zeros(missing, *values.shape[1:])])

    def data_ptr(self) -> int:
        """Refused: what lies there are codes, and whoever asks (safetensors) would read them as values."""
        raise RuntimeError(_no_values(self.shape))

    def untyped_storage(self) -> torch.UntypedStorage:
        """A shard's is that of its codes, by which FSDP2 tells whether it was moved; else it is the wrapper's.

        The wrapper's says why it has no address, to all who save by address: `model.save_pretrained`, safetensors.
        """
        q = self.own
        if not self.shard:
            storage, shape = torch.Tensor.untyped_storage(self), self.shape  # never self: the storage would keep it

            def refuse() -> int:
                raise RuntimeError(_no_values(shape))

            storage.data_ptr = refuse  # type: ignore[method-assign]
            return storage
        return torch.empty(0, device=self.device).untyped_storage() if q is None else q.data.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"FrozenWeight(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, codes={self.spec}"
            f"{', a shard' if self.shard else ''})"
        )

    # What is refused -------------------------------------------------------------------------------------------------

    def _refusal(self, what: str) -> str:
        return (
            f"{what} a frozen FP8 weight of shape {list(self.shape)}, whose codes stay as they are. Call "
            "fp8.thaw(model) for weights in high precision that may be written, or fp8.load_fp8_state_dict to exchange "
            "codes for others."
        )

    def _refuse_dtype(self, dtype: torch.dtype) -> None:
        raise RuntimeError(
            f"A frozen FP8 weight of shape {list(self.shape)} that stands for {self.dtype} values was to become "
            f"{dtype}, which would drop its codes and scales. Call fp8.thaw(model) first for a model in high precision "
            "(2 bytes a parameter and more), or convert the other parts alone, such as model.lm_head.to(...); "
            "weight.dequantize().to(...) gives the values of this weight. It is unchanged; modules that were converted "
            "before it stay converted."
        )

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """To another device. RuntimeError for another dtype, as ``module.to(dtype)`` and ``model.half()`` ask it."""
        for given in (*args, *kwargs.values()):
            dtype = given if isinstance(given, torch.dtype) else given.dtype if isinstance(given, Tensor) else None
            if dtype is not None and dtype is not self.dtype:
                self._refuse_dtype(dtype)
        return super().to(*args, **kwargs)

    def half(self, *_: Any, **__: Any) -> Tensor:
        return self.to(torch.float16)

    def float(self, *_: Any, **__: Any) -> Tensor:
        return self.to(torch.float32)

    def double(self, *_: Any, **__: Any) -> Tensor:
        return self.to(torch.float64)

    def bfloat16(self, *_: Any, **__: Any) -> Tensor:
        return self.to(torch.bfloat16)

    def type(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Its type's name; RuntimeError for another dtype."""
        return super().type() if dtype is None else self.to(dtype) if isinstance(dtype, torch.dtype) else self.to(
            torch.empty(0).type(dtype).dtype
        )  # fmt: skip

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """RuntimeError for True."""
        if requires_grad:
            raise RuntimeError(self._refusal("A gradient was asked of"))
        return self

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """``p.data = x`` takes the codes of another frozen weight like this one."""
        if value is self:
            return
        why = self._differs(value)
        if why is not None:
            raise RuntimeError(self._refusal(f"A tensor ({why}) was given as the data of"))
        assert isinstance(value, FrozenWeight)
        self.gathered = value.gathered

    def _differs(self, other: object) -> str | None:
        """Why the codes of ``other`` cannot be these, None if they can."""
        if not isinstance(other, FrozenWeight):
            return "no frozen FP8 weight"
        for what, of in (
            ("shape", lambda w: list(w.shape)),
            ("dtype", lambda w: w.dtype),
            ("device", lambda w: w.device),
            ("codes", lambda w: (w.spec.format, w.spec.block)),
            ("orientation", lambda w: w.gathered.turned),
        ):
            if of(self) != of(other):
                return f"{what} {of(other)}, not {of(self)}"
        return None

    # How it is copied ------------------------------------------------------------------------------------------------

    def _with(self, change: Callable[[Tensor], Tensor]) -> FrozenWeight:
        """The same with codes and scales passed through ``change``, which may move them."""
        made = [Quantized(change(q.data), change(q.scale), q.spec) for q in self.gathered.codes]
        device = made[0].data.device if made else change(torch.empty(0, device=self.device)).device
        store = Store(made, self.gathered.turned, self.lead, self.shard)
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return FrozenWeight(like, self.source, None, store, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made: Tensor = self._with(lambda t: copy.deepcopy(t, memo))
            memo[id(self)] = nn.Parameter(made, requires_grad=False) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        need, q = self.source.needs[0], self.own
        state = {
            "bytes": None if q is None else q.data.view(torch.uint8),  # pickle itself does not know FP8
            "scale": None if q is None else q.scale,
            "format": need.spec.format,
            "block": need.spec.block,
            "scale_kind": need.spec.scale,
            "stored_transposed": need.transposed,
            "turned": self.gathered.turned,
            "shape": tuple(self.shape),
            "stride": self.stride(),
            "whole": tuple(self.source.whole),
            "dtype": self.dtype,
            "device": str(self.device),
            "lead": self.lead,
            "shard": self.shard,
            "parameter": isinstance(self, nn.Parameter),
        }
        return _unpickled, (state,)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Its inner tensors by name, and values that can be compared: the compiler guards on them."""
        names = []
        for q in self.gathered.codes:
            self.__dict__["codes_0"], self.__dict__["scale_0"] = q.data, q.scale
            names = ["codes_0", "scale_0"]
        need = self.source.needs[0]
        where = (tuple(self.source.whole), need.transposed, self.gathered.turned, self.lead, self.shard)
        return names, (need.spec, self.dtype, self.device, where)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Fp8Weight:
        spec, dtype, device, (whole, transposed, turned, lead, shard) = context
        made = [Quantized(inner["codes_0"], inner["scale_0"], spec)] if inner else []
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        source = Source((Need(spec, get("reference"), 1, transposed),), torch.Size(whole))
        return FrozenWeight(like, source, None, Store(made, turned, lead, shard), device)

    # How FSDP2 shards it ---------------------------------------------------------------------------------------------

    def rows(self, start: int, end: int) -> FrozenWeight:
        """Rows (or experts) ``start`` to ``end`` with the scales of their blocks: views, no copies."""
        q, need = self.own, self.source.needs[0]
        shape = torch.Size((end - start, *self.shape[1:]))
        if q is None or (start == 0 and end == q.data.shape[0]):  # all there is, or nothing yet: also what comes later
            like = torch.empty(shape, dtype=self.dtype, device="meta")
            return FrozenWeight(like, self.source, None, self.gathered, self.device)
        height, first = need.spec.block[0], start + self.lead
        if q.data.dim() == 3:
            scale, lead = q.scale[start:end], 0
        elif height == -1:
            scale, lead = q.scale, first
        else:
            scale, lead = q.scale[first // height : ceil_div(end + self.lead, height)], first % height
        parts = [Quantized(q.data[start:end], scale, q.spec)] if end > start else []
        return FrozenWeight.made(parts, need, shape, self.source.whole, self.dtype, self.device, lead, self.shard)

    def receive(self, other: object) -> None:
        """Become a copy of ``other``: how a shard is filled, and how codes are exchanged. RuntimeError if they differ
        in more than codes."""
        if isinstance(other, Fp8Weight) and other.gathered is self.gathered:
            return
        why = self._differs(other)
        if why is None and self.gathered.codes and self.lead != other.lead:  # type: ignore[attr-defined]
            why = "rows that begin at another place in their block"
        if why is not None:
            raise RuntimeError(self._refusal(f"A tensor ({why}) was to be copied to"))
        assert isinstance(other, FrozenWeight)
        if not self.gathered.codes:
            filled = [Quantized(q.data.clone(), q.scale.clone(), q.spec) for q in other.gathered.codes]
            self.gathered.codes[:] = filled
            if isinstance(self.gathered, Store):
                self.gathered.lead = other.lead
            return
        for mine, its in zip(self.gathered.codes, other.gathered.codes, strict=True):
            mine.data.view(torch.uint8).copy_(its.data.view(torch.uint8))
            mine.scale.copy_(its.scale)

    def pieces(self, shards: fp8_rows.Shards) -> tuple[Tensor, Tensor]:
        """What this rank sends: the codes of its rows as bytes, zeros in the padding, and the scales of the blocks that
        begin here (those of a block that a border cuts are the same on every rank it reaches)."""
        need, q, whole = self.source.needs[0], self.own, self.source.whole
        codes_shape, scale_shape = fp8_rows.shapes(need, whole, shards)
        if q is None:
            codes = torch.zeros(codes_shape, dtype=torch.uint8, device=self.device)
            return codes, torch.ones(scale_shape, dtype=torch.float32, device=self.device)
        scale, height = q.scale, need.spec.block[0]
        if len(whole) == 2:
            first, last = (shards.first_block(shards.rank + i, height) for i in (0, 1))
            before = first - (0 if height == -1 else shards.here[0] // height)
            scale = scale[before : before + last - first]
        return _padded(q.data.view(torch.uint8), codes_shape, 0), _padded(scale, scale_shape, 1)

    def wire(self, mesh: Any) -> tuple[Tensor, ...]:
        """The same as FSDP2 gathers it. No collective, no cast."""
        shards = fp8_rows.Shards(self.source.whole[0], mesh.size(), mesh.get_local_rank())
        codes, scale = self.pieces(shards)
        return fp8_rows.wire(fp8_rows.Rows([codes], [scale]), shards)


def _unpickled(state: dict[str, Any]) -> Tensor:
    spec = CastSpec(state["format"], tuple(state["block"]), state["scale_kind"])
    need = Need(spec, get("reference"), 1, state["stored_transposed"])
    codes = []
    if state["bytes"] is not None:
        codes.append(Quantized(state["bytes"].view(spec.fmt.dtype), state["scale"], spec))
    device = codes[0].data.device if codes else torch.device(state["device"])
    like = torch.empty_strided(state["shape"], state["stride"], dtype=state["dtype"], device="meta")
    store = Store(codes, state["turned"], state["lead"], state["shard"])
    made: Tensor = FrozenWeight(like, Source((need,), torch.Size(state["whole"])), None, store, device)
    return nn.Parameter(made, requires_grad=False) if state["parameter"] else made


def _by_row(q: Quantized, lead: int) -> Quantized:
    """Codes whose first block lacks ``lead`` rows, with a scale for each row."""
    height, rows = q.spec.block[0], q.data.shape[0]
    scale = q.scale.expand(rows, -1) if height == -1 else q.scale.repeat_interleave(height, 0)[lead : lead + rows]
    return Quantized(q.data, scale.contiguous(), CastSpec(q.spec.format, (1, q.spec.block[1]), q.spec.scale))


def _padded(part: Tensor, shape: torch.Size, fill: int) -> Tensor:
    missing = shape[0] - part.shape[0]
    part = part if not missing else torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)])
    return part.contiguous()


# What operations return; None lets them see values --------------------------------------------------------------------


def _slice(
    weight: FrozenWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> FrozenWeight | None:
    if dim != 0 or step != 1 or (weight.gathered.turned and weight.dim() == 2):
        return None
    first, last, _ = slice(start, end).indices(weight.shape[0])
    return weight.rows(first, max(first, last))


def _narrow(weight: FrozenWeight, dim: int, start: int, length: int) -> FrozenWeight | None:
    return _slice(weight, dim, start, start + length)


def _split(weight: FrozenWeight, size: int, dim: int = 0) -> list[FrozenWeight] | None:
    rows = weight.shape[0]
    parts = [_slice(weight, dim, at, min(at + size, rows)) for at in range(0, rows, size)]
    return None if any(p is None for p in parts) else parts  # type: ignore[return-value]


def _split_sizes(weight: FrozenWeight, sizes: list[int], dim: int = 0) -> list[FrozenWeight] | None:
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = [_slice(weight, dim, a, b) for a, b in zip(ends, ends[1:], strict=False)]
    return None if any(p is None for p in parts) else parts  # type: ignore[return-value]


def _new_zeros(weight: FrozenWeight, size: Any, **how: Any) -> FrozenWeight | None:
    """An empty shard, to be filled by ``copy_``; read before, it is zeros."""
    other = [v for k, v in how.items() if v is not None and k != "pin_memory"]
    if other or len(size) != weight.dim() or tuple(size[1:]) != tuple(weight.shape[1:]):
        return None
    if weight.gathered.turned and weight.dim() == 2:
        return None
    whole, need = weight.source.whole, weight.source.needs[0]
    return FrozenWeight.made([], need, torch.Size(size), whole, weight.dtype, weight.device, shard=True)


def _view(weight: FrozenWeight, size: Any) -> Tensor | None:
    """FSDP2 remembers the padded shard as one flat tensor, by which it tells whether it was moved: its codes."""
    if tuple(size) == tuple(weight.shape):
        return weight.detach()
    q = weight.own
    if not weight.shard or list(size) not in ([-1], [weight.numel()]):
        return None
    return torch.empty(0, dtype=weight.spec.fmt.dtype, device=weight.device) if q is None else q.data.view(-1)


def _copy(weight: object, source: Any, non_blocking: bool = False) -> FrozenWeight | None:
    if not isinstance(weight, FrozenWeight):
        return None
    weight.receive(source)
    return weight


def _clone(weight: FrozenWeight, **_: Any) -> FrozenWeight:
    return weight._with(torch.clone)


def _to_copy(weight: FrozenWeight, **how: Any) -> FrozenWeight | None:
    dtype, device = how.get("dtype"), how.get("device")
    if dtype is not None and dtype is not weight.dtype:
        if weight.shard:  # a module's shards are converted like this, whatever else sees values
            weight._refuse_dtype(dtype)
        return None
    blocking = bool(how.get("non_blocking", False))
    target = weight.device if device is None else device
    return weight._with(lambda t: t.to(target, non_blocking=blocking, copy=True))


def _pin(weight: FrozenWeight, device: Any = None) -> FrozenWeight:
    return weight._with(lambda t: t.pin_memory())


def _pinned(weight: FrozenWeight, device: Any = None) -> bool:
    return all(q.data.is_pinned() for q in weight.gathered.codes)


FrozenWeight.kept = {
    **Fp8Weight.kept,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_sizes,
    aten.new_zeros.default: _new_zeros,
    aten.view.default: _view,
    aten.copy_.default: _copy,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin,
    aten.is_pinned.default: _pinned,
}
