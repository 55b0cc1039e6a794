"""Memory that a micro-batch keeps for its backward, counted in a forward of the real modules without values.

What a block keeps depends on its norms, its attention, shared inputs and recomputation, that is on code rather than on
a formula. So the blocks themselves run here, with the plan applied, on fake tensors, which have a shape, a dtype and a
storage size but no allocated memory. The accountant (:mod:`octavo.fp8.memory.accounting`) counts what stays alive. A
layer with the width of an 8-billion-parameter model takes a tenth of a second for 8192 tokens.

Only token ids, positions and masks are real, because models read their values. Equal blocks (in class, shapes and
recipes) keep equal amounts, so one of each kind runs and represents the others. It runs between two real neighbours,
because the next block determines what happens to its output. The rest of the model runs whole.

Fake tensors are on the CPU. A GPU keeps slightly different amounts: the state of a random generator in attention, and
under autocast the results of operations that only CUDA runs in fp32.
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
from octavo.fp8.dense import select_layer_backends
from octavo.fp8.memory import ACTIVATION, ChunkedHead, SavedBytes, count_saved
from octavo.fp8.observe import uncounted
from octavo.fp8.weights import Fp8Weight, codes_of_frozen, frozen_from_codes, is_frozen
from octavo.train.errors import TrainError
from octavo.train.estimate.memory.micro_batch import micro_batch
from octavo.train.forward import critic, losses, routing
from octavo.train.forward.forward import chunked_head, model_dtype
from octavo.train.setup import frozen_base
from octavo.train.setup.model_setup import reduce_saved_activations
from octavo.train.setup.token_counts import Tokens
from octavo.train.step.memory_report import rows_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class FakeForward:
    """Bytes that one forward keeps, scaled to the whole model.

    For each component, ``blocks`` is what all its repeating blocks keep, ``outside`` what its other modules keep
    (embedding output, final norm, merger), ``largest`` the most that one block keeps, and ``recomputed`` what a
    recomputed block keeps in addition during its backward. ``copies`` are the 16-bit weight copies that autocast keeps
    until the step's backward. ``logits`` is what the head and the loss keep. ``shared`` are positions and masks, which
    exist once and are not activations.
    """

    blocks: Mapping[str, int]
    outside: Mapping[str, int]
    largest: Mapping[str, int]
    copies: int
    logits: int
    shared: int
    recomputed: Mapping[str, int]

    def times(self, rows: int) -> FakeForward:
        """Return what a forward of this many times the tokens keeps, in rows of the same length."""

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
    """Count the bytes that a forward of these tokens keeps.

    Args:
        model: stock, on the meta device, frozen as in the run; it is not changed.
        dressed: the same with adapters, where the run has any.
        plan: the plan of this model. It is applied with the reference backend, which keeps what every backend keeps.
        tokens: rows that all have ``tokens.row`` tokens, images of ``tokens.image`` patches, and the number of tokens
            with a loss (``lm_head``).
        autocast: the dtype of autocast; None means without autocast.
        head_alone: run as little as possible before the head; only ``logits`` is then meaningful.
        cfg: the dtype of the parameters, the recomputation of blocks, and the loss.

    Raises TrainError if the images' tokens do not fit into the rows or if the forward fails.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # it would print a traceback of the error that is reported below in a sentence
    try:
        dressed = model if dressed is None else dressed
        counted = _counted(model, dressed, family, plan, tokens, cfg, autocast, head_alone)
        routers = [row.name for row in plan.rows if row.kind == "router"] if routing.aux_loss_coef(cfg, model) else []
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
    """Run the forward.

    ``balanced`` adds the load-balancing loss of the remaining routers; ``logits`` then includes a part for each.
    """
    dtype = model_dtype(cfg)
    small, standing = _shrunk(model, family, _kinds(dressed, family, plan), head_alone)
    fp8.apply(small, _cut(plan, small))
    frozen_base.attach_adapters_like(small, dressed, family, cfg)
    head = chunked_head(small) if cfg.train.logits == "chunked" else None
    small.train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _without_values(small, mode, dtype)
    some = replace(family, layer_globs=tuple(standing))
    reduce_saved_activations(small, some, plan, _of_this(cfg, family), lambda text: None)
    batch = micro_batch(small, family, replace(tokens, image=0, sound=0) if head_alone else tokens, mode)
    judged = tokens.counts.get("lm_head", len(batch["input_ids"]) * tokens.row) // len(batch["input_ids"])
    with mode:
        keep = torch.arange(max(1, min(tokens.row - 1, judged)))  # the last token has no next token to predict
    computing = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    blocks = [(name, small.get_submodule(name)) for name in standing]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Accessing the data pointer of FakeTensor"
        )  # an adapter with 0 here could be skipped as an identity
        counting = count_saved(small, blocks)
        with _nothing_older(), uncounted(), counting as counted, _ForFakeTensors(), computing:
            if autocast is None and "pixel_values" in batch:  # as in octavo.train.forward.forward
                batch["pixel_values"] = batch["pixel_values"].to(dtype)
            if balanced:
                batch["output_router_logits"] = True
            loss = _loss(small, batch, keep, None if isinstance(head, str) else head, cfg)
        report = counted.report()
    del loss
    weights = set() if autocast is None else {(autocast, tuple(p.shape)) for p in small.parameters()}
    return _scaled(report, small, family, standing, weights)


def _of_this(cfg: Config, family: models.Family) -> Config:
    """Return the configuration without device settings and without recomputation of components that the model lacks.

    Memory that is moved to the host counts as kept here; :mod:`octavo.train.estimate.memory.footprint` subtracts it.
    """
    ways = {component: how for component, how in cfg.train.recompute if component in family.components}
    without_device = {"offload_activations": False, "synchronize_per_layer": False}
    train = cfg.train.model_copy(update={"recompute": type(cfg.train.recompute)(**ways), **without_device})
    return cfg.model_copy(update={"train": train})


def _loss(model: nn.Module, batch: dict[str, Any], keep: Tensor, head: ChunkedHead | None, cfg: Config) -> Tensor:
    """The loss of a micro-batch in which the tokens at the positions ``keep`` predict the next token."""
    target = batch["input_ids"][:, keep]
    trims = "logits_to_keep" in inspect.signature(model.forward).parameters
    trim: dict[str, Any] = {"logits_to_keep": keep} if trims else {}
    if cfg.train.phase in BEYOND_SFT:
        nothing: list[Tensor] = []
        values = critic.values(model, alone=False) if critic.is_enabled(cfg) else nullcontext(nothing)
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
            loss = by_head.checked_losses(out.logits).sum()
    balance = getattr(out, "aux_loss", None)
    return loss if balance is None else loss + balance


def _of_log_probs(
    model: nn.Module, batch: dict[str, Any], keep: Tensor | None, target: Tensor, head: ChunkedHead | None,
    cfg: Config,
) -> Tensor:  # fmt: skip
    """The same for phases that learn from log-probabilities; their objectives keep only a few numbers per token."""
    options: dict[str, Any] = {"use_cache": False} | ({} if keep is None else {"logits_to_keep": keep})
    entropy = cfg.train.phase == "rl"
    if head is not None:
        with head.log_probs(target, entropy=entropy, chunk=target.numel()) as by_head:
            return by_head.checked_losses(model(**batch, **options).logits).sum()
    logits = model(**batch, **options).logits
    return fp8.log_probs(logits if keep is not None else logits[:, : target.shape[1]], target).sum()


# --- one block of each kind -------------------------------------------------------------------------------------------


def _kinds(model: nn.Module, family: models.Family, plan: fp8.Plan) -> list[tuple[str, Any]]:
    """Return (name, everything that determines the memory that it keeps) for every block."""
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
    """Return a copy with only the needed blocks, and how many blocks each represents (0: only a neighbour)."""
    members: dict[Any, list[int]] = {}
    towers: dict[str, list[int]] = {}
    for i, (name, kind) in enumerate(kinds):
        members.setdefault(kind, []).append(i)
        towers.setdefault(name.rpartition(".")[0], []).append(i)
    stands = {tower[0]: 0 for tower in towers.values()}  # the first block shows what blocks return
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
    """A forward hook that records how many values a block's tuple has, and nothing where it returns a tensor."""

    def __init__(self, parts: list[int]) -> None:
        self.parts = parts

    def __call__(self, block: nn.Module, args: Any, output: Any) -> None:
        self.parts[:] = [len(output)] if isinstance(output, tuple) else []


class _Passing(nn.Module):
    """Replaces a block that does not run; passes the hidden states on in the form that the block would."""

    def __init__(self, parts: list[int]) -> None:
        nn.Module.__init__(self)  # not the __init__ of the block's class
        self.parts = parts  # filled by the blocks of this tower that run; the first block always does

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self.parts[0] - 1)) if self.parts else hidden_states


def _passing(block: nn.Module, parts: list[int]) -> nn.Module:
    """A subclass of the block's class, by which transformers counts layers for projectors that ask for one's output."""
    kind = type(block)
    return type(f"Passing{kind.__name__}", (_Passing, kind), {})(parts)


def _cut(plan: fp8.Plan, small: nn.Module) -> fp8.Plan:
    """Return the plan of the remaining layers, on backends that run on the CPU.

    Weights that are FP8 between steps do not change what a forward keeps, so here none is.
    """
    names = {name for name, _ in small.named_modules()}
    cpu = torch.device("cpu")

    def moved(row: fp8.PlanRow) -> fp8.PlanRow:
        if row.recipe is None:
            return row
        return replace(
            row, selections=select_layer_backends(row.recipe, cpu, (None, *row.shape), "reference", row.kind)
        )

    parts = {name: replace(part, param=None) for name, part in plan.policy.components.items()}
    return replace(
        plan,
        policy=replace(plan.policy, param=False, components=parts),
        rows=tuple(moved(row) for row in plan.rows if row.row.module in names),
        blocks=tuple(b for b in plan.blocks if b.name in names),
    )


# --- tensors without values -------------------------------------------------------------------------------------------


def _without_values(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Replace every parameter and buffer by a fake one on the CPU.

    Floating-point parameters get ``dtype``, adapters and a critic their own dtype, and frozen FP8 weights fake codes.
    Ties are kept.
    """
    fakes: dict[int, Tensor] = {}
    beside = {
        id(p) for n, p in model.named_parameters() if adapters.is_adapter_parameter(n) or critic.is_critic_parameter(n)
    }

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
        turned = isinstance(tensor, Fp8Weight) and tensor.is_transposed
        return frozen_from_codes(codes, scale, q.spec, dtype, transposed=turned)

    # Tied tensors have one fake, found by the identity of the original.
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fakes.setdefault(id(tensor), fake(tensor))  # type: ignore[assignment]
        if isinstance(module, fp8.weights.CachesWeights):
            module.register_caches()


@contextmanager
def _nothing_older() -> Iterator[None]:
    """Freeze existing objects, so that the accountant's garbage collections do not scan them.

    Where the caller has frozen objects itself, nothing is done, because `gc.unfreeze` would unfreeze those too.
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
    """Handles four operations that fake tensors do slowly or not at all.

    The device is answered directly, since half of all calls on tensors in a forward ask only for that. The number of
    elements that a boolean mask selects depends on its values, so masks are real here and become indices without
    values. Models compare pixels with a number to drop padding tiles; here no tile is padding, and the answer is a real
    tensor of one element, expanded. For experts in high precision, torch knows the shape of the result only in BF16.
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
        """Return as many indices as a mask selects; their values do not matter."""
        count = int(mask.sum())
        with mode:
            return [torch.empty(count, dtype=torch.int64, device="cpu") for _ in mask.shape]


_DEVICE = torch.ops.prim.device.default
_aten = torch.ops.aten
_EQUALS = _aten.eq.Scalar
_GROUPED = _aten._grouped_mm.default
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


# --- scaling the counts to the whole model ----------------------------------------------------------------------------


def _scaled(
    report: SavedBytes,
    small: nn.Module,
    family: models.Family,
    standing: Mapping[str, int],
    weights: set[tuple[torch.dtype, tuple[int, ...]]],
) -> FakeForward:
    """Scale a report of the blocks that ran to the whole model; ``standing`` is how many each block represents."""
    # Outside of blocks, tensors count once; a block's count once for each block that it represents.
    per_block: dict[str, int] = {}
    outside: dict[str, int] = {}
    copies = shared = logits = 0
    for row in rows_of_model(report):
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
