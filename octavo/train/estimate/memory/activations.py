"""A forward without values: what a micro-batch keeps for its backward, counted on the modules that will run.

What a block keeps depends on its norms, its attention, on which layers share an input, on recomputation: on code rather
than on a formula. So the blocks themselves run here, after the plan was applied, on fake tensors: tensors with a shape,
a dtype and a storage of so many bytes that nobody allocates. The accountant (:mod:`octavo.fp8.memory.accounting`)
counts what stays alive. A layer of 8 billion parameters' width and 8192 tokens takes a tenth of a second.

Only token ids, positions and masks are real, because models look at them. Blocks that are equal (in class, shapes and
recipes) keep equal amounts, so one of each kind runs and stands for the others; it runs between two real neighbours,
since what becomes of its output is up to the next one. The rest of the model runs whole.

Fake tensors live on the CPU. What a GPU keeps differs in little: the state of a random generator in attention, and
under autocast the operations that CUDA runs in fp32 and the CPU does not.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import adapters, fp8, models
from octavo.config import Config
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8.dense import backends_for
from octavo.fp8.memory import ACTIVATION, ChunkedHead, SavedBytes, count_saved
from octavo.fp8.observe import uncounted
from octavo.fp8.weights import Fp8Weight, codes_of_frozen, frozen_from_codes, is_frozen
from octavo.train.errors import TrainError
from octavo.train.estimate.memory.micro_batch import micro_batch
from octavo.train.forward import critic, losses, routing
from octavo.train.forward.forward import chunked_head, model_dtype
from octavo.train.setup import frozen_base
from octavo.train.setup.model_setup import keep_less
from octavo.train.setup.token_counts import Tokens
from octavo.train.step.memory_report import made_by_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FakeForward:
    """Bytes that one forward keeps, scaled to the whole model. ``blocks``: component -> all its repeating blocks;
    ``outside``: component -> what its other modules keep (embeddings' output, final norm, merger); ``largest``: the
    block that keeps most; ``copies``: 16-bit copies of weights that autocast makes and keeps until the step's backward.
    ``logits``: what the head and the loss keep; ``shared``: positions and masks, there once, no activations;
    ``recomputed``: component -> what one of its blocks keeps besides while its backward runs, if it is recomputed.
    """

    blocks: Mapping[str, int]
    outside: Mapping[str, int]
    largest: Mapping[str, int]
    copies: int
    logits: int
    shared: int
    recomputed: Mapping[str, int]

    def times(self, rows: int) -> FakeForward:
        """What so many times the tokens keep, in rows of the same length."""

        def scaled(sizes: Mapping[str, int]) -> dict[str, int]:
            return {name: rows * size for name, size in sizes.items()}

        return replace(
            self,
            blocks=scaled(self.blocks),
            outside=scaled(self.outside),
            largest=scaled(self.largest),
            recomputed=scaled(self.recomputed),
            logits=rows * self.logits,
            shared=rows * self.shared,
        )

    @property
    def activations(self) -> int:
        return sum(self.blocks.values()) + sum(self.outside.values()) + self.copies


def fake_forward(
    model: PreTrainedModel,
    family: models.Family,
    plan: fp8.Plan,
    tokens: Tokens,
    cfg: Config,
    autocast: torch.dtype | None,
    head_alone: bool = False,
    dressed: nn.Module | None = None,
) -> FakeForward:
    """Count what a forward of these tokens keeps.

    Args:
        model: stock, on the meta device, frozen as in the run; it stays as it is.
        dressed: the same with adapters, where the run has some.
        plan: of this model. It is applied with the reference backend, which keeps what every backend keeps.
        tokens: rows of ``tokens.row`` tokens, all of one length, ``lm_head`` of which have a loss, and images of
            ``tokens.image`` patches.
        autocast: what the forward computes in under autocast (None: without).
        head_alone: run as little as there must be before the head; only ``logits`` mean anything then.
        cfg: says the dtype of the parameters, what blocks recompute, and how the loss is made.

    Raises TrainError where the images' tokens do not fit into the rows, or such a forward is not possible.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # it prints the traceback of what is told below in a sentence
    try:
        dressed = model if dressed is None else dressed
        counted = _counted(model, dressed, family, plan, tokens, cfg, autocast, head_alone)
        routers = [row.name for row in plan.rows if row.kind == "router"] if routing.coefficient(cfg, model) else []
        if not routers or head_alone:
            return counted
        with_balance = _counted(model, dressed, family, plan, tokens, cfg, autocast, balanced=True)
        _, standing = _shrunk(model, family, _kinds(dressed, family, plan))
        some = sum(any(name.startswith(f"{block}.") for block in standing) for name in routers)
        return replace(
            counted, logits=counted.logits + (with_balance.logits - counted.logits) * len(routers) // max(1, some)
        )
    except (RuntimeError, ValueError, AttributeError, LookupError, TypeError, ArithmeticError) as error:
        if isinstance(error, TrainError):
            raise
        raise TrainError(
            f"what a forward of {tokens.row} tokens a row keeps cannot be counted, because {type(model).__name__} does "
            f"not run it: {' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        log.disabled = False


def _counted(
    model: PreTrainedModel,
    dressed: nn.Module,
    family: models.Family,
    plan: fp8.Plan,
    tokens: Tokens,
    cfg: Config,
    autocast: torch.dtype | None,
    head_alone: bool = False,
    balanced: bool = False,
) -> FakeForward:
    """``balanced``: with the load-balancing loss of the routers that are left, of which ``logits`` then has a part for
    each."""
    dtype = model_dtype(cfg)
    small, standing = _shrunk(model, family, _kinds(dressed, family, plan), head_alone)
    fp8.apply(small, _cut(plan, small))
    frozen_base.dress(small, dressed, family, cfg)
    head = chunked_head(small) if cfg.train.logits == "chunked" else None
    small.train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _without_values(small, mode, dtype)
    some = replace(family, layer_globs=tuple(standing))
    keep_less(small, some, plan, _of_this(cfg, family), lambda text: None)
    batch = micro_batch(small, family, replace(tokens, image=0, sound=0) if head_alone else tokens, mode)
    judged = tokens.counts.get("lm_head", len(batch["input_ids"]) * tokens.row) // len(batch["input_ids"])
    with mode:
        keep = torch.arange(max(1, min(tokens.row - 1, judged)))  # the last token has none to predict
    computing = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    blocks = [(name, small.get_submodule(name)) for name in standing]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as an identity, which 0 may be
        counting = count_saved(small, blocks)
        with _nothing_older(), uncounted(), counting as counted, _ForFakeTensors(), computing:
            if autocast is None and "pixel_values" in batch:  # as octavo.train.forward.forward does
                batch["pixel_values"] = batch["pixel_values"].to(dtype)
            if balanced:
                batch["output_router_logits"] = True
            loss = _loss(small, batch, keep, None if isinstance(head, str) else head, cfg)
        report = counted.report()
    del loss
    weights = set() if autocast is None else {(autocast, tuple(p.shape)) for p in small.parameters()}
    return _scaled(report, small, family, standing, weights)


def _of_this(cfg: Config, family: models.Family) -> Config:
    """The configuration without recomputation of components that the model lacks, and without what has to do with a
    device: what is moved to the host is kept all the same, and counted by
    :mod:`octavo.train.estimate.memory.footprint`."""
    ways = {component: how for component, how in cfg.train.recompute if component in family.components}
    without_device = {"offload_activations": False, "synchronize_per_layer": False}
    train = cfg.train.model_copy(update={"recompute": type(cfg.train.recompute)(**ways), **without_device})
    return cfg.model_copy(update={"train": train})


def _loss(model: nn.Module, batch: dict[str, Any], keep: Tensor, head: ChunkedHead | None, cfg: Config) -> Tensor:
    """The loss of a micro-batch in which the tokens at the positions ``keep`` predict the next."""
    target = batch["input_ids"][:, keep]
    trims = "logits_to_keep" in inspect.signature(model.forward).parameters
    trim: dict[str, Any] = {"logits_to_keep": keep} if trims else {}
    if cfg.train.phase in BEYOND_SFT:
        nothing: list[Tensor] = []
        values = critic.values(model, alone=False) if critic.wanted(cfg) else nullcontext(nothing)
        with values as of_critic:
            logs = _of_log_probs(model, batch, keep if trims else None, target, head, cfg)
        return sum((value.sum() for value in of_critic), logs)
    smooth: dict[str, Any] = {"label_smoothing": cfg.train.label_smoothing, "z_loss": cfg.train.z_loss}
    if head is None:
        out = model(**batch, **trim, use_cache=False)
        loss = losses.cross_entropy(out.logits if trims else out.logits[:, keep], target, **smooth).sum()
    else:
        with head.losses(target, **smooth, chunk=target.numel()) as by_head:
            out = model(**batch, **trim, use_cache=False)
            loss = by_head.take(out.logits).sum()
    balance = getattr(out, "aux_loss", None)
    return loss if balance is None else loss + balance


def _of_log_probs(
    model: nn.Module, batch: dict[str, Any], keep: Tensor | None, target: Tensor, head: ChunkedHead | None,
    cfg: Config,
) -> Tensor:  # fmt: skip
    """The same in phases that learn from log-probabilities; what their objectives keep is a few numbers a token."""
    options: dict[str, Any] = {"use_cache": False} | ({} if keep is None else {"logits_to_keep": keep})
    entropy = cfg.train.phase == "rl"
    if head is not None:
        with head.log_probs(target, entropy=entropy, chunk=target.numel()) as by_head:
            return by_head.take(model(**batch, **options).logits).sum()
    logits = model(**batch, **options).logits
    return fp8.log_probs(logits if keep is not None else logits[:, : target.shape[1]], target).sum()


# --- one block for all of its kind ------------------------------------------------------------------------------------


def _kinds(model: nn.Module, family: models.Family, plan: fp8.Plan) -> list[tuple[str, Any]]:
    """(name, what decides what a block keeps) for every block."""
    recipes = [(row.row.module, row.recipe, row.row.frozen) for row in plan.rows]
    fused = [(block.name, block.fused) for block in plan.blocks]
    out = []
    for name, block in family.layers(model):
        inside = tuple((m.removeprefix(name), *rest) for m, *rest in recipes + fused if m.startswith(f"{name}."))
        shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
        out.append((name, (name.rpartition(".")[0], type(block), inside, shapes)))
    return out


def _shrunk(
    model: PreTrainedModel, family: models.Family, kinds: list[tuple[str, Any]], head_alone: bool = False
) -> tuple[PreTrainedModel, dict[str, int]]:
    """A copy with the blocks that are needed, and block -> how many of the model's it stands for (0: a neighbour)."""
    members: dict[Any, list[int]] = {}
    towers: dict[str, list[int]] = {}
    for i, (name, kind) in enumerate(kinds):
        members.setdefault(kind, []).append(i)
        towers.setdefault(name.rpartition(".")[0], []).append(i)
    stands = {tower[0]: 0 for tower in towers.values()}  # the first shows what blocks return
    for alike in [] if head_alone else members.values():
        stands[alike[len(alike) // 2]] = len(alike)
    for tower in towers.values():
        for i in [i for i in tower if stands.get(i, 0) > 1 and i + 1 in tower]:
            stands.setdefault(i + 1, 0)
    shapes: dict[str, list[int]] = {tower: [] for tower in towers}
    blocks = family.layers(model)
    memo: dict[int, Any] = {
        id(block): _passing(block, shapes[name.rpartition(".")[0]])
        for i, (name, block) in enumerate(blocks)
        if i not in stands
    }
    small = copy.deepcopy(model, memo)
    for i in stands:
        small.get_submodule(kinds[i][0]).register_forward_hook(_Telling(shapes[kinds[i][0].rpartition(".")[0]]))
    return small, {kinds[i][0]: n for i, n in sorted(stands.items())}


class _Telling:
    """A forward hook of the blocks that run: how many values their tuple has, nothing where they return a tensor."""

    def __init__(self, parts: list[int]) -> None:
        self.parts = parts

    def __call__(self, block: nn.Module, args: Any, output: Any) -> None:
        self.parts[:] = [len(output)] if isinstance(output, tuple) else []


class _Passing(nn.Module):
    """In place of a block that does not run: hands the hidden states on in the form that the block would."""

    def __init__(self, parts: list[int]) -> None:
        nn.Module.__init__(self)  # not that of the block's class
        self.parts = parts  # filled by the blocks of this tower that run, the first of them before all others

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self.parts[0] - 1)) if self.parts else hidden_states


def _passing(block: nn.Module, parts: list[int]) -> nn.Module:
    """Of the block's class: transformers counts layers by it, where a projector asks for the output of one."""
    kind = type(block)
    return type(f"Passing{kind.__name__}", (_Passing, kind), {})(parts)


def _cut(plan: fp8.Plan, small: nn.Module) -> fp8.Plan:
    """The plan of what is left, on backends that run on the CPU. Whether a weight is FP8 between steps changes nothing
    of what a forward keeps, so here none is."""
    names = {name for name, _ in small.named_modules()}
    cpu = torch.device("cpu")

    def moved(row: fp8.PlanRow) -> fp8.PlanRow:
        if row.recipe is None:
            return row
        return replace(row, selections=backends_for(row.recipe, cpu, (None, *row.shape), "reference", row.kind))

    parts = {name: replace(part, param=None) for name, part in plan.policy.components.items()}
    return replace(
        plan,
        policy=replace(plan.policy, param=False, components=parts),
        rows=tuple(moved(row) for row in plan.rows if row.row.module in names),
        blocks=tuple(b for b in plan.blocks if b.name in names),
    )


# --- tensors without values -------------------------------------------------------------------------------------------


def _without_values(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Exchange every parameter and buffer for a fake one on the CPU, floating parameters in ``dtype``, adapters and a
    critic in their own; frozen FP8 weights get fake codes; ties stay."""
    fakes: dict[int, Tensor] = {}
    beside = {id(p) for n, p in model.named_parameters() if adapters.is_adapter_parameter(n) or critic.owns(n)}

    def fake(tensor: Tensor) -> Tensor:
        if is_frozen(tensor):
            return frozen(tensor)
        parameter = isinstance(tensor, nn.Parameter)
        kind = dtype if parameter and tensor.is_floating_point() and id(tensor) not in beside else tensor.dtype
        with mode:
            empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty

    def frozen(tensor: Tensor) -> Tensor:
        q = codes_of_frozen(tensor)
        with mode:
            codes = torch.empty(q.data.shape, dtype=q.data.dtype, device="cpu")
            scale = torch.empty(q.scale.shape, dtype=q.scale.dtype, device="cpu")
        turned = isinstance(tensor, Fp8Weight) and tensor.turned
        return frozen_from_codes(codes, scale, q.spec, dtype, transposed=turned)

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fakes.setdefault(id(tensor), fake(tensor))  # type: ignore[assignment]
        if isinstance(module, fp8.weights.CachesWeights):
            module.own_weights()


@contextmanager
def _nothing_older() -> Iterator[None]:
    """The accountant collects cycles of objects. Those from before the forward need not be gone through for that.

    Where the caller has frozen objects, these stay so: `gc.unfreeze` would take back all of it.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _ForFakeTensors(TorchDispatchMode):
    """Four things that fake tensors do slowly or not at all.

    Their device is known at once: half of what a forward asks of its tensors is that, and no operation. A boolean mask
    says by its values how much it selects: masks are real here and become indices without values. Whether
    floats equal a number is asked of pixels, to throw tiles away that are nothing but filling: here none is (a real
    tensor of one element, repeated). The shape of what experts in high precision make torch tells of BF16 alone.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        if func is _EQUALS and isinstance(args[0], FakeTensor) and args[0].is_floating_point():
            return torch.zeros((), dtype=torch.bool).expand(args[0].shape)
        if func is _GROUPED and isinstance(args[0], FakeTensor) and args[0].dtype != torch.bfloat16:
            with args[0].fake_mode:
                return torch.empty(args[0].shape[0], args[1].shape[-1], dtype=args[0].dtype, device="cpu")
        if func in _INDEXING and isinstance(args[0], FakeTensor):
            indices: list[Tensor | None] = []
            for index in args[1]:
                real = isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor)
                indices += self._chosen(index, args[0].fake_mode) if real else [index]
            args = (args[0], indices, *args[2:])
        return func(*args, **(kwargs or {}))

    def _chosen(self, mask: Tensor, mode: FakeTensorMode) -> list[Tensor | None]:
        """Indices of what a mask chooses: so many, and which is not asked."""
        count = int(mask.sum())
        with mode:
            return [torch.empty(count, dtype=torch.int64, device="cpu") for _ in mask.shape]


_DEVICE = torch.ops.prim.device.default
_aten = torch.ops.aten
_EQUALS = _aten.eq.Scalar
_GROUPED = _aten._grouped_mm.default
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


# --- what was counted, for the whole model ----------------------------------------------------------------------------


def _scaled(
    report: SavedBytes,
    small: nn.Module,
    family: models.Family,
    standing: Mapping[str, int],
    weights: set[tuple[torch.dtype, tuple[int, ...]]],
) -> FakeForward:
    per_block: dict[str, int] = {}
    outside: dict[str, int] = {}
    copies = shared = logits = 0
    for row in made_by_model(report):
        if row.kind != ACTIVATION:
            shared += row.bytes
        elif not row.module or family.component_of(row.module) == "lm_head":
            logits += row.bytes
        elif (row.dtype, row.shape) in weights and "_to_copy" in row.op:
            copies += row.bytes * max(1, standing.get(row.block, 1))
        elif row.block:
            per_block[row.block] = per_block.get(row.block, 0) + row.bytes
        else:
            component = family.component_of(row.module) or "foundation"
            outside[component] = outside.get(component, 0) + row.bytes
    blocks: dict[str, int] = {}
    largest: dict[str, int] = {}
    for name, count in standing.items():
        component, size = family.component_of(name) or "foundation", per_block.get(name, 0)
        blocks[component] = blocks.get(component, 0) + count * size
        largest[component] = max(largest.get(component, 0), size)
    return FakeForward(blocks, outside, largest, copies, logits, shared, {})
