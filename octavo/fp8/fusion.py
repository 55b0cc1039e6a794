"""q, k and v as one GEMM, gate and up as one GEMM; names, modules and checkpoints stay stock.

Sisters are the linear layers of one module that multiply the same input x [M, K] (:data:`SISTERS`, by name). With
w = [w_1; w_2; ...] their weights one below the other, and dy = [dy_1, dy_2, ...] the gradients side by side::

    fwd    [y_1, y_2, ...] = x @ w.T      dgrad  dx = dy @ w      wgrad  [dw_1; dw_2; ...] = dy.T @ x

The first sister that is called with an x computes all outputs; the others hand out theirs when they are called with the
very same tensor. Codes, outputs and dw are bit for bit those of single GEMMs; dx is better by the roundings between the
sisters' sums, and not equal.

Which is why only recipes whose blocks end where a layer ends can fuse: a scale that spans a whole row of dy (rowwise)
or a whole tensor would be another one for the joined matrix. :func:`fuse` says so, layer by layer.

The outputs are columns of one buffer: ``y.stride(-2)`` is the sum of the outputs, and the buffer lives as long as any
of them. What splits features (``y.view(*lead, heads, head_dim)``, ``chunk``, attention, SwiGLU) works as ever. A
``view`` that merges rows with features, such as ``y.view(-1)``, raises, where a stock layer's output is contiguous.
Copies would make it safe, and cost a write and a read of all outputs, more than fusing saves: use ``reshape``, or let
such a module run apart.

A sister that is not called, or called with something else, costs the GEMM that was made for her, and everything stays
right: counters see a layer's GEMMs only when it is called, and a backward that some outputs did not reach runs one
GEMM a layer. A group that misses twice in a row goes back to single GEMMs for good.

What nobody claimed is freed with the input, with the next call of any group in the thread, with a backward that passes,
with the next optimizer step, and by :func:`octavo.fp8.invalidate`. The input itself is held that long only where it is
a leaf that asks for a gradient, since the graph of the outputs holds it.

The outputs have one node in the graph. Backwards that reach them one by one work, each by the layer's own GEMMs; the
codes of x are then kept until every sister that was called has had hers, or the graph is gone. A write to x that
moves no version (``x.data.mul_()``) between two sisters is not seen; see :mod:`octavo.fp8.dense.inputs`.

Activation checkpointing counts what a region saves, so a recomputation must fuse what its forward fused. Therefore
nothing is carried into a region or out of it, and a group that gives up does so for calls that build a graph when the
next optimizer step has been taken.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.blocks import gated_mlp, rmsnorm
from octavo.fp8.dense.casts import _autocast_enabled, compute_dtype, transformed
from octavo.fp8.dense.inputs import torch_alone_writes
from octavo.fp8.dense.linear import Linear
from octavo.fp8.dense.swap import Swapped, unswap
from octavo.fp8.fused_linear import Call, FusedGemms, Marks
from octavo.fp8.joined import Joined
from octavo.fp8.kernels.layout import ALIGN
from octavo.fp8.kernels.registry import Selection
from octavo.fp8.observe import counts
from octavo.fp8.observe.health import watching
from octavo.fp8.weights import cache
from octavo.fp8.weights.frozen import is_frozen
from octavo.fp8.weights.shards import is_whole, ordinary
from octavo.fp8.weights.versions import listen, now

__all__ = ["SISTERS", "Fusion", "Group", "Sister", "families", "fuse", "fused", "obstacle", "unfuse", "unite"]

SISTERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that are known to multiply the same input."""

NOT_ALL = "not all of them run in FP8"
_MISSES = 2  # in a row, after which a group runs as single layers


class Fusion(NamedTuple):
    """What :func:`fuse` made of the sisters of one module: ``reason`` is None if they now run as one, else why not."""

    names: tuple[str, ...]
    reason: str | None


def fuse(model: nn.Module) -> tuple[Fusion, ...]:
    """Let the FP8 layers of a model run together where they can: gated MLPs as one function, norms that hand their
    codes on, and the sisters that are left as one GEMM where their recipe allows it.

    Returns one :class:`Fusion` for each gated MLP and norm with an FP8 layer beside it, and for each family of sisters
    of which at least one is an FP8 layer. Parameters, names and state dicts stay; :func:`unfuse` takes it back.
    """
    blocks = [Fusion((name,), why) for name, why in (*gated_mlp.convert(model), *rmsnorm.convert(model))]
    inside = {(f"{b.names[0]}.gate_proj", f"{b.names[0]}.up_proj") for b in blocks if b.reason is None}
    return (
        *blocks,
        *(
            Fusion(names, unite(layers))
            for names, layers in families(model)
            if names not in inside and any(isinstance(layer, Linear) for layer in layers)
        ),
    )


def families(model: nn.Module) -> Iterator[tuple[tuple[str, ...], list[nn.Module]]]:
    """(names, linear layers) of the sisters of each module that has all of a family."""
    for path, parent in model.named_modules():
        for family in SISTERS:
            found = [layer for name in family if (layer := _layer(parent._modules.get(name))) is not None]
            if len(found) == len(family):
                yield tuple(f"{path}.{name}" if path else name for name in family), found


def unite(layers: Sequence[nn.Module]) -> str | None:
    """Let these layers run as one GEMM from now on; returns what stands against it instead, if anything does."""
    linears = [m for m in layers if isinstance(m, Linear)]
    if len(linears) < len(layers):
        return NOT_ALL
    if any("_group" in m.__dict__ for m in linears):
        return "fused before"
    reason = obstacle([sister(m, m.recipe, m._site.selections) for m in linears])
    if reason is None:
        group = Group(tuple(linears))
        for layer in linears:
            layer.__dict__["_group"] = group
    return reason


def unfuse(model: nn.Module) -> None:
    """Let every layer of a model run its own GEMMs again, and norms and gated MLPs their stock forward."""
    for module in list(model.modules()):
        if not (isinstance(module, Swapped) and module.precise):
            unswap(module)
        group = module.__dict__.pop("_group", None)
        if group is not None:
            group.forget()


def fused(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of the layers that run as one, group by group; groups that gave up are left out."""
    groups: dict[int, list[str]] = {}
    for module in model.modules():
        group = module.__dict__.get("_group")
        if group is not None and group.off is None:
            groups.setdefault(id(group), [m.name for m in group.members])
    return tuple(tuple(names) for names in groups.values())


def _layer(module: nn.Module | None) -> nn.Module | None:
    """The linear layer itself, also inside an adapter that wraps it (PEFT's ``base_layer``)."""
    inner = None if module is None else module._modules.get("base_layer")
    return inner if isinstance(inner, nn.Module) else module


class Sister(NamedTuple):
    """What decides whether a layer can run as one with others; known before its weights are."""

    recipe: Recipe | None
    backends: Mapping[str, str]
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    trained: bool
    weight: int  # the parameter's identity
    codes: bool = False  # a frozen FP8 weight


def sister(layer: nn.Module, recipe: Recipe | None, selections: Mapping[str, Selection]) -> Sister:
    """A linear layer, also one without weights, as it runs or will run."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    backends = {gemm: s.backend.name for gemm, s in selections.items()}
    n, k = weight.shape
    codes = is_frozen(weight)
    return Sister(recipe, backends, (n, k), weight.dtype, weight.device, weight.requires_grad, id(weight), codes)


def obstacle(sisters: Sequence[Sister]) -> str | None:
    """Why these layers cannot run as one GEMM, None if they can."""
    first = sisters[0]
    if first.recipe is None or any(s.recipe is None for s in sisters):
        return NOT_ALL
    for what, of in (
        ("different recipes", lambda s: s.recipe),
        ("different backends", lambda s: s.backends),
        ("different numbers of inputs", lambda s: s.shape[1]),
        ("different dtypes", lambda s: s.dtype),
        ("different devices", lambda s: s.device),
        ("frozen and trained weights", lambda s: s.trained),
    ):
        if any(of(s) != of(first) for s in sisters):
            return what
    if len({s.weight for s in sisters}) < len(sisters):
        return "tied weights"
    if any(s.codes for s in sisters):
        return "joined, codes of frozen weights would take a second byte a parameter; their cast of x is shared"
    return recipe_obstacle(first.recipe, [s.shape[0] for s in sisters])


def recipe_obstacle(recipe: Recipe, outputs: Sequence[int]) -> str | None:
    """Blocks must end where a layer ends: then joining matrices joins their codes."""
    if recipe.delayed is not None:
        return "delayed scaling keeps an amax history of each layer"
    high = [gemm for gemm in GEMMS if recipe.gemm(gemm) is None]
    if high:
        return f"{high[0]} stays in high precision"
    for operand, spec, side in _along_outputs(recipe):
        block = spec.block[side]
        if block == -1:
            return f"one scale of {operand} spans all outputs of a layer ({spec})"
        wrong = [n for n in outputs if n % max(block, ALIGN)]
        if wrong:
            return f"{wrong[0]} outputs are no multiple of {max(block, ALIGN)}, so that blocks of {operand} would mix"
    return None


def _along_outputs(recipe: Recipe) -> list[tuple[str, CastSpec, int]]:
    """(operand, cast, the dimension of it that runs over the outputs) of the four operands that have one."""
    fwd, dgrad, wgrad = recipe.fwd, recipe.dgrad, recipe.wgrad
    assert fwd is not None and dgrad is not None and wgrad is not None
    return [("w", fwd.b, 0), ("w in dgrad", dgrad.b, 0), ("dy in dgrad", dgrad.a, 1), ("dy in wgrad", wgrad.a, 1)]


class Group:
    """Sisters that run as one. ``off`` says why the group gave up, None while it has not."""

    def __init__(self, members: tuple[Linear, ...]) -> None:
        self.members = members
        self.off: str | None = None
        self.since = -1  # the epoch in which it gave up
        self.misses = 0
        self._joined: Joined | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"members": self.members, "off": self.off}  # codes are derived data

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, since=-1, misses=0, _joined=None)

    @property
    def joined(self) -> Joined:
        """The joined codes of the weights; new ones where the layers got new caches."""
        caches = tuple(m._weight_codes()["weight"] for m in self.members)
        if self._joined is None or not self._joined.serves(caches):
            self._joined = Joined(caches)
        return self._joined

    def forget(self) -> None:
        """Free the joined codes."""
        if self._joined is not None:
            self._joined.drop()

    @torch._disable_dynamo
    def output(self, member: Linear, x: Tensor) -> Tensor | None:
        """What ``member`` gives for x, if the group can tell; None sends the layer to its own GEMMs."""
        if self.off is not None and (now() != self.since or not torch.is_grad_enabled()):
            self.forget()
            return None
        pending = _pending()
        if pending is not None:
            here = pending.group is self and pending.context == _context()
            y = pending.take(member, x) if here else None
            if y is not None:
                return y
            alone = here and pending.waits_for(member)  # called with something else than her sisters
            pending.drop()
            _local.pending = None
            if alone:
                return None
        return self._compute(member, x) if self._can(x) else None

    def miss(self) -> None:
        self.misses += 1
        if self.misses >= _MISSES and self.off is None:
            self.off, self.since = "its layers were not called with the same input", now()

    def _can(self, x: Tensor) -> bool:
        """Whether this call may be fused; what is wrong with it otherwise is for the single layer to say."""
        first = self.members[0].weight
        if watching() or not ordinary(x) or x.is_meta or x.is_inference() or not x.numel():
            return False
        if transformed() or not torch_alone_writes(x):
            return False
        return (
            x.dim() > 0
            and x.shape[-1] == first.shape[1]
            and all(
                is_whole(m.weight)
                and not any(p.is_inference() for p in m._parameters.values() if p is not None)
                and m.weight.dtype == first.dtype
                and m.weight.device == x.device
                and m.weight.requires_grad == first.requires_grad
                for m in self.members
            )
        )

    def _compute(self, member: Linear, x: Tensor) -> Tensor:
        now = counts.phase()
        marks = Marks(torch.is_grad_enabled(), len(self.members))
        sites = tuple(m._site for m in self.members)
        owners, biases = tuple(m.weight for m in self.members), tuple(m.bias for m in self.members)
        try:
            ys = FusedGemms.apply(x, Call(self, sites, self.joined, marks), *owners, *biases)
        except Exception:
            # A recomputation ends by an exception at the last tensor that is needed: the GEMM has run by then.
            for at, layer in enumerate(self.members if now.recompute else ()):
                _report(at, layer, x, marks)
            raise
        pending = _Pending(self, x, ys, marks, now.recompute)
        marks.pending = weakref.ref(pending)
        _local.pending = pending
        y = pending.take(member, x)
        assert y is not None
        return y


class _Pending:
    """Outputs that were computed and not handed out yet. One a thread: the next group's take its place.

    What is dropped still says who was called, so that whether a call is fused does not hang on when an input died.
    """

    def __init__(self, group: Group, x: Tensor, ys: tuple[Tensor, ...], marks: Marks, recompute: bool) -> None:
        self.group, self.marks, self.recompute = group, marks, recompute
        self.ys: list[Tensor | None] = list(ys)
        self.called = [False] * len(ys)
        self.context = _context()
        self.stamp = _stamp(x)
        self.holds = [_held(m) for m in group.members]
        mine = weakref.ref(self)

        def freed(_: object) -> None:
            pending = mine()
            if pending is not None:
                pending.drop()

        self.x = weakref.ref(x, freed)

    def take(self, member: Linear, x: Tensor) -> Tensor | None:
        """The output of ``member``, if it was computed from this x, with the weight and bias as they are now."""
        at = self._place(member)
        y = self.ys[at]
        if y is None or self.x() is not x or self.stamp != _stamp(x) or self.holds[at] != _held(member):
            return None
        self.ys[at], self.called[at] = None, True
        _report(at, member, x, self.marks)
        if all(self.called):
            self.group.misses = 0
            _local.pending = None
        return y

    def waits_for(self, member: Linear) -> bool:
        return not self.called[self._place(member)]

    def _place(self, member: Linear) -> int:
        return next(i for i, m in enumerate(self.group.members) if m is member)

    def drop(self) -> None:
        """Let go of what nobody took. A recomputation may stop before it has called everybody."""
        left = any(y is not None for y in self.ys)
        self.ys = [None] * len(self.ys)
        if left and not self.recompute:
            self.group.miss()


def _report(at: int, member: Linear, x: Tensor, marks: Marks) -> None:
    """The layer was called: what its own forward would have reported."""
    now, site = counts.phase(), member._site
    marks.called[at] = True
    marks.counted[at], marks.born[at] = now.counted, now.gemm
    if not now.counted or not counts.counting():
        return
    counts.record(site.name, now.gemm, site.selections["fwd"].backend.name, 2 * x.numel() * member.weight.shape[0])
    for gemm, needed in (("dgrad", marks.needs_x), ("wgrad", marks.needs_w)):
        if needed:
            counts.promise(site.name, gemm, now)
    if not marks.grad and not now.recompute:
        counts.gradless(site.name)


_local = threading.local()


def _pending() -> _Pending | None:
    return getattr(_local, "pending", None)


def _drop_pending() -> None:
    pending = _pending()
    if pending is not None:
        pending.drop()


listen(_drop_pending)


def _stamp(x: Tensor) -> tuple[Any, ...]:
    """What must be the same for an output to be handed out, besides the input itself."""
    return (
        x._version,
        torch_alone_writes(x),
        x.requires_grad,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        compute_dtype(x),
        _autocast_enabled(x),
        cache.capturing(x),
        now(),
    )


def _context() -> tuple[Any, ...]:
    """Where a call happens: inside which region that saves tensors its own way (activation checkpointing), in the
    recomputation of which backward, under which dispatch mode (selective checkpointing)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack = None if hooks is None else _Same(hooks[0])
    return pack, torch._C._current_graph_task_id(), id(_get_current_dispatch_mode())


class _Same:
    """An object by identity, held weakly; equal to nothing once it is gone."""

    def __init__(self, held: Any) -> None:
        self._held = weakref.ref(held)

    def __eq__(self, other: object) -> bool:
        mine = self._held()
        return isinstance(other, _Same) and mine is not None and mine is other._held()

    __hash__ = None  # type: ignore[assignment]


def _held(member: Linear) -> tuple[Any, ...]:
    """The parameters of a layer: who they are, at which version, and where their values lie."""
    return tuple(
        None if p is None else (id(p), p._version, p.data_ptr(), p.requires_grad) for p in (member.weight, member.bias)
    )
