"""Counts the memory that a micro-batch keeps for backward, in a forward of the real modules on fake tensors.

The memory that a block keeps depends on its norms, its attention, shared inputs and recomputation, so no formula gives
it. Instead the blocks run here, with the plan applied, on fake tensors, which have a shape, a dtype and a storage size
but no allocated memory. The accountant (:mod:`octavo.fp8.memory.accounting`) counts the tensors that stay alive. A
layer of an 8-billion-parameter model takes a tenth of a second for 8192 tokens.

Only token ids, positions and masks are real, because models read their values. Equal blocks (in class, shapes and
recipes) keep equal amounts, so one of each kind runs and represents the others. It runs between two real neighbours,
because the next block determines what happens to its output. All modules outside of blocks run.

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
from octavo.train.estimate.memory.micro_batch import make_micro_batch
from octavo.train.forward import critic, losses, routing
from octavo.train.forward.forward import chunked_head, model_dtype
from octavo.train.setup import frozen_base
from octavo.train.setup.model_setup import reduce_saved_activations
from octavo.train.setup.token_counts import Tokens
from octavo.train.step.memory_report import rows_of_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ForwardBytes:
    """The bytes that one forward keeps for backward, scaled to the whole model.

    By component: ``blocks`` is kept by all repeating blocks, ``outside`` by the other modules (embedding output, final
    norm, merger), ``largest`` by the largest block, and ``recomputed`` in addition by a recomputed block during its
    backward. ``copies`` are the 16-bit weight copies that autocast keeps until the step's backward. ``logits`` is kept
    by the head and the loss. ``shared`` are positions and masks, which exist once and are not activations.
    """

    blocks: Mapping[str, int]
    outside: Mapping[str, int]
    largest: Mapping[str, int]
    copies: int
    logits: int
    shared: int
    recomputed: Mapping[str, int]

    def scale(self, rows: int) -> ForwardBytes:
        """Return the bytes of a forward of ``rows`` times as many rows of the same length."""

        def scale_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
            return {name: rows * size for name, size in sizes.items()}

        return replace(
            self,
            blocks=scale_sizes(self.blocks),
            outside=scale_sizes(self.outside),
            largest=scale_sizes(self.largest),
            recomputed=scale_sizes(self.recomputed),
            logits=rows * self.logits,
            shared=rows * self.shared,
        )

    @property
    def activations(self) -> int:
        return sum(self.blocks.values()) + sum(self.outside.values()) + self.copies


def count_forward(
    model: PreTrainedModel,
    family: models.Family,
    plan: fp8.Plan,
    tokens: Tokens,
    cfg: Config,
    autocast: torch.dtype | None,
    head_only: bool = False,
    adapted_model: nn.Module | None = None,
) -> ForwardBytes:
    """Return the bytes that a forward of these tokens keeps, without the load-balancing loss of its routers
    (:func:`count_balance_loss`).

    Args:
        model: stock, on the meta device, frozen as in the run; it is not changed.
        adapted_model: the same model with adapters, if the run has any.
        plan: the plan of this model. It is applied with the reference backend, which keeps what every backend keeps.
        tokens: rows that all have ``tokens.row`` tokens, images of ``tokens.image`` patches, and the number of tokens
            with a loss (``lm_head``).
        autocast: the dtype of autocast, or None if autocast is off.
        head_only: run as little as possible before the head; only ``logits`` is then meaningful.
        cfg: the dtype of the parameters, the recomputation of blocks, and the loss.

    Raises TrainError if the images' tokens do not fit into the rows or if the forward fails.
    """
    with _failures_as_train_errors(model, tokens):
        return _count_forward(model, adapted_model or model, family, plan, tokens, cfg, autocast, head_only)


def count_balance_loss(
    model: PreTrainedModel,
    family: models.Family,
    plan: fp8.Plan,
    tokens: Tokens,
    cfg: Config,
    autocast: torch.dtype | None,
    saved: ForwardBytes,
    adapted_model: nn.Module | None = None,
) -> int:
    """Return the bytes that the load-balancing loss of all routers keeps in addition to ``saved``, which
    :func:`count_forward` returned for the same arguments; 0 without that loss. Raises TrainError as that does.

    The loss keeps only what it computes from the outputs of the routers, so neither recomputation nor
    `fp8.activations` changes this.
    """
    adapted_model = adapted_model or model
    routers = [row.name for row in plan.rows if row.kind == "router"] if routing.aux_loss_coef(cfg, model) else []
    if not routers:
        return 0
    with _failures_as_train_errors(model, tokens):
        balanced = _count_forward(model, adapted_model, family, plan, tokens, cfg, autocast, with_balance_loss=True)
    _, represented = _keep_representatives(model, family, _block_kinds(adapted_model, family, plan))
    routers_run = sum(any(name.startswith(f"{block}.") for block in represented) for name in routers)
    return (balanced.logits - saved.logits) * len(routers) // max(1, routers_run)


@contextmanager
def _failures_as_train_errors(model: nn.Module, tokens: Tokens) -> Iterator[None]:
    """Turn what a forward on fake tensors raises into a TrainError."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # it would print a traceback of an error that is reported below
    try:
        yield
    except (RuntimeError, ValueError, AttributeError, LookupError, TypeError, ArithmeticError) as error:
        if isinstance(error, TrainError):
            raise
        raise TrainError(
            f"cannot count the activations of a forward with {tokens.row} tokens per row: {type(model).__name__} "
            f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
    finally:
        log.disabled = False


def _count_forward(
    model: PreTrainedModel,
    adapted_model: nn.Module,
    family: models.Family,
    plan: fp8.Plan,
    tokens: Tokens,
    cfg: Config,
    autocast: torch.dtype | None,
    head_only: bool = False,
    with_balance_loss: bool = False,
) -> ForwardBytes:
    """Run the forward and count.

    ``with_balance_loss`` adds the load-balancing loss of the remaining routers; ``logits`` then includes their part.
    """
    dtype = model_dtype(cfg)
    small, represented = _keep_representatives(model, family, _block_kinds(adapted_model, family, plan), head_only)
    fp8.apply(small, _restrict_plan(plan, small))
    frozen_base.attach_adapters_like(small, adapted_model, family, cfg)
    head = chunked_head(small) if cfg.train.logits == "chunked" else None
    small.train()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _replace_with_fakes(small, mode, dtype)
    small_family = replace(family, layer_globs=tuple(represented))
    reduce_saved_activations(small, small_family, plan, _without_device_settings(cfg, family), lambda text: None)
    batch = make_micro_batch(small, family, replace(tokens, image=0, sound=0) if head_only else tokens, mode)
    loss_positions = tokens.counts.get("lm_head", len(batch["input_ids"]) * tokens.row) // len(batch["input_ids"])
    with mode:
        keep = torch.arange(max(1, min(tokens.row - 1, loss_positions)))  # the last token has no next token to predict
    autocast_context = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    blocks = [(name, small.get_submodule(name)) for name in represented]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Accessing the data pointer of FakeTensor"
        )  # an adapter with 0 here could be skipped as an identity
        counting = count_saved(small, blocks)
        with _freeze_gc(), uncounted(), counting as saved, _FakeTensorFallbacks(), autocast_context:
            if autocast is None and "pixel_values" in batch:  # as in octavo.train.forward.forward
                batch["pixel_values"] = batch["pixel_values"].to(dtype)
            if with_balance_loss:
                batch["output_router_logits"] = True
            loss = _compute_loss(small, batch, keep, None if isinstance(head, str) else head, cfg)
        report = saved.report()
    del loss
    weights = set() if autocast is None else {(autocast, tuple(p.shape)) for p in small.parameters()}
    return _scale_to_model(report, small, family, represented, weights)


def _without_device_settings(cfg: Config, family: models.Family) -> Config:
    """Return the configuration without device settings and without recomputation of missing components.

    Memory that is moved to the host counts as kept here; :mod:`octavo.train.estimate.memory.footprint` subtracts it.
    """
    recompute = {component: how for component, how in cfg.train.recompute if component in family.components}
    without_device = {"offload_activations": False, "synchronize_per_layer": False}
    train = cfg.train.model_copy(update={"recompute": type(cfg.train.recompute)(**recompute), **without_device})
    return cfg.model_copy(update={"train": train})


def _compute_loss(
    model: nn.Module, batch: dict[str, Any], keep: Tensor, head: ChunkedHead | None, cfg: Config
) -> Tensor:
    """Return the loss of a micro-batch, for the next tokens of the positions ``keep``."""
    target = batch["input_ids"][:, keep]
    accepts_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    trim: dict[str, Any] = {"logits_to_keep": keep} if accepts_keep else {}
    if cfg.train.phase in BEYOND_SFT:
        no_values: list[Tensor] = []
        values = critic.values(model, alone=False) if critic.is_enabled(cfg) else nullcontext(no_values)
        with values as critic_values:
            log_probs = _log_prob_loss(model, batch, keep if accepts_keep else None, target, head, cfg)
        return sum((value.sum() for value in critic_values), log_probs)
    smoothing: dict[str, Any] = {"label_smoothing": cfg.train.label_smoothing, "z_loss": cfg.train.z_loss}
    if head is None:
        out = model(**batch, **trim, use_cache=False)
        loss = losses.cross_entropy(out.logits if accepts_keep else out.logits[:, keep], target, **smoothing).sum()
    else:
        with head.losses(target, **smoothing, chunk=target.numel()) as head_loss:
            out = model(**batch, **trim, use_cache=False)
            loss = head_loss.checked_losses(out.logits).sum()
    balance = getattr(out, "aux_loss", None)
    return loss if balance is None else loss + balance


def _log_prob_loss(
    model: nn.Module, batch: dict[str, Any], keep: Tensor | None, target: Tensor, head: ChunkedHead | None,
    cfg: Config,
) -> Tensor:  # fmt: skip
    """Return a sum of log-probabilities, for phases that train on them.

    Their objectives keep only a few numbers per token, which are not counted.
    """
    options: dict[str, Any] = {"use_cache": False} | ({} if keep is None else {"logits_to_keep": keep})
    entropy = cfg.train.phase == "rl"
    if head is not None:
        with head.log_probs(target, entropy=entropy, chunk=target.numel()) as head_loss:
            return head_loss.checked_losses(model(**batch, **options).logits).sum()
    logits = model(**batch, **options).logits
    return fp8.log_probs(logits if keep is not None else logits[:, : target.shape[1]], target).sum()


# --- one block of each kind -------------------------------------------------------------------------------------------


def _block_kinds(model: nn.Module, family: models.Family, plan: fp8.Plan) -> list[tuple[str, Any]]:
    """Return (name, key of everything that determines its memory) for every block."""
    recipes = [(row.row.module, row.recipe, row.row.frozen) for row in plan.rows]
    fused = [(block.name, block.fused) for block in plan.blocks]
    out = []
    for name, block in family.layers(model):
        inside = tuple((m.removeprefix(name), *rest) for m, *rest in recipes + fused if m.startswith(f"{name}."))
        shapes = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
        out.append((name, (name.rpartition(".")[0], type(block), inside, shapes)))
    return out


def _keep_representatives(
    model: PreTrainedModel, family: models.Family, kinds: list[tuple[str, Any]], head_only: bool = False
) -> tuple[PreTrainedModel, dict[str, int]]:
    """Return (a copy with only the needed blocks, name -> number of blocks that it represents).

    A block that is only needed as a neighbour represents 0 blocks.
    """
    members: dict[Any, list[int]] = {}
    towers: dict[str, list[int]] = {}
    for i, (name, kind) in enumerate(kinds):
        members.setdefault(kind, []).append(i)
        towers.setdefault(name.rpartition(".")[0], []).append(i)
    represented = {tower[0]: 0 for tower in towers.values()}  # the first block shows what blocks return
    for members_of_kind in [] if head_only else members.values():
        represented[members_of_kind[len(members_of_kind) // 2]] = len(members_of_kind)
    for tower in towers.values():
        for i in [i for i in tower if represented.get(i, 0) > 1 and i + 1 in tower]:
            represented.setdefault(i + 1, 0)
    shapes: dict[str, list[int]] = {tower: [] for tower in towers}
    blocks = family.layers(model)
    memo: dict[int, Any] = {
        id(block): _make_passthrough(block, shapes[name.rpartition(".")[0]])
        for i, (name, block) in enumerate(blocks)
        if i not in represented
    }
    small = copy.deepcopy(model, memo)
    for i in represented:
        small.get_submodule(kinds[i][0]).register_forward_hook(
            _OutputLengthHook(shapes[kinds[i][0].rpartition(".")[0]])
        )
    return small, {kinds[i][0]: n for i, n in sorted(represented.items())}


class _OutputLengthHook:
    """A forward hook that records the length of a block's output tuple, or nothing if the output is a tensor."""

    def __init__(self, parts: list[int]) -> None:
        self.parts = parts

    def __call__(self, block: nn.Module, args: Any, output: Any) -> None:
        self.parts[:] = [len(output)] if isinstance(output, tuple) else []


class _Passthrough(nn.Module):
    """Replaces a block that does not run, and returns its hidden states in the block's output format."""

    def __init__(self, parts: list[int]) -> None:
        nn.Module.__init__(self)  # not the __init__ of the block's class
        self.parts = parts  # filled by the blocks of this tower that run; the first block always does

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self.parts[0] - 1)) if self.parts else hidden_states


def _make_passthrough(block: nn.Module, parts: list[int]) -> nn.Module:
    """Return a passthrough for a block, as a subclass of its class: transformers counts layers by class to record the
    outputs that some projectors need."""
    kind = type(block)
    return type(f"Passthrough{kind.__name__}", (_Passthrough, kind), {})(parts)


def _restrict_plan(plan: fp8.Plan, small: nn.Module) -> fp8.Plan:
    """Return the plan of the remaining layers, on CPU backends.

    `fp8.param` is switched off, because it does not change what a forward keeps.
    """
    names = {name for name, _ in small.named_modules()}
    cpu = torch.device("cpu")

    def move_row(row: fp8.PlanRow) -> fp8.PlanRow:
        if row.recipe is None:
            return row
        return replace(
            row, selections=select_layer_backends(row.recipe, cpu, (None, *row.shape), "reference", row.kind)
        )

    parts = {name: replace(part, param=None) for name, part in plan.policy.components.items()}
    return replace(
        plan,
        policy=replace(plan.policy, param=False, components=parts),
        rows=tuple(move_row(row) for row in plan.rows if row.row.module in names),
        blocks=tuple(b for b in plan.blocks if b.name in names),
    )


# --- tensors without values -------------------------------------------------------------------------------------------


def _replace_with_fakes(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> None:
    """Replace every parameter and buffer with a fake one on the CPU.

    Floating-point parameters get ``dtype``, except in adapters and a critic, which keep their dtype. Frozen FP8 weights
    get fake codes. Ties are kept.
    """
    fakes: dict[int, Tensor] = {}
    kept_dtype = {
        id(p) for n, p in model.named_parameters() if adapters.is_adapter_parameter(n) or critic.is_critic_parameter(n)
    }

    def fake(tensor: Tensor) -> Tensor:
        if is_frozen(tensor):
            return frozen(tensor)
        parameter = isinstance(tensor, nn.Parameter)
        kind = dtype if parameter and tensor.is_floating_point() and id(tensor) not in kept_dtype else tensor.dtype
        with mode:
            empty = torch.empty(tensor.shape, dtype=kind, device="cpu")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty

    def frozen(tensor: Tensor) -> Tensor:
        q = codes_of_frozen(tensor)
        with mode:
            codes = torch.empty(q.data.shape, dtype=q.data.dtype, device="cpu")
            scale = torch.empty(q.scale.shape, dtype=q.scale.dtype, device="cpu")
        transposed = isinstance(tensor, Fp8Weight) and tensor.is_transposed
        return frozen_from_codes(codes, scale, q.spec, dtype, transposed=transposed)

    # Tied tensors have one fake, found by the identity of the original.
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fakes.setdefault(id(tensor), fake(tensor))  # type: ignore[assignment]
        if isinstance(module, fp8.weights.CachesWeights):
            module.register_caches()


@contextmanager
def _freeze_gc() -> Iterator[None]:
    """Freeze existing objects, so that the accountant's garbage collections do not scan them.

    Does nothing if the caller has frozen objects, because `gc.unfreeze` would unfreeze those too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _FakeTensorFallbacks(TorchDispatchMode):
    """Handles four operations that fake tensors support slowly or not at all.

    The device is returned directly, since half of all tensor calls in a forward query it. The number of elements that a
    boolean mask selects depends on its values, so masks are real and become fake indices. Models compare pixels with a
    number to drop padding tiles; no tile is padding here, so the result is an expanded real tensor. For experts in
    high precision, torch infers the shape of the result only in BF16.
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
                indices += self._fake_indices(index, args[0].fake_mode) if real else [index]
            args = (args[0], indices, *args[2:])
        return func(*args, **(kwargs or {}))

    def _fake_indices(self, mask: Tensor, mode: FakeTensorMode) -> list[Tensor | None]:
        """Return fake indices, as many as a mask selects."""
        count = int(mask.sum())
        with mode:
            return [torch.empty(count, dtype=torch.int64, device="cpu") for _ in mask.shape]


_DEVICE = torch.ops.prim.device.default
_aten = torch.ops.aten
_EQUALS = _aten.eq.Scalar
_GROUPED = _aten._grouped_mm.default
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


# --- scaling the counts to the whole model ----------------------------------------------------------------------------


def _scale_to_model(
    report: SavedBytes,
    small: nn.Module,
    family: models.Family,
    represented: Mapping[str, int],
    weights: set[tuple[torch.dtype, tuple[int, ...]]],
) -> ForwardBytes:
    """Scale a report of the blocks that ran to the whole model; ``represented`` maps a block to its number of
    blocks."""
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
            copies += row.bytes * max(1, represented.get(row.block, 1))
        elif row.block:
            per_block[row.block] = per_block.get(row.block, 0) + row.bytes
        else:
            component = family.component_of(row.module) or "foundation"
            outside[component] = outside.get(component, 0) + row.bytes
    blocks: dict[str, int] = {}
    largest: dict[str, int] = {}
    for name, count in represented.items():
        component, size = family.component_of(name) or "foundation", per_block.get(name, 0)
        blocks[component] = blocks.get(component, 0) + count * size
        largest[component] = max(largest.get(component, 0), size)
    return ForwardBytes(blocks, outside, largest, copies, logits, shared, {})
