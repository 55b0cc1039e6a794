"""Memory of a run between steps: weights, master copies, gradients and optimizer states.

The bytes follow from the shapes and the plan. FSDP2 splits every parameter along its first dimension into equal
numbers of rows, with fewer for the last ranks, so rank 0 has the most, and all counts are for rank 0. They are exact:
`tests/train/memory/` compares them with the storages of real models and optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from octavo import adapters, fp8, models
from octavo.adapters.experts import stock_name
from octavo.config import Config
from octavo.fp8.arithmetic import GROUP, CastSpec, layout
from octavo.fp8.weights import Fp8Weight, Shards, codes_of_frozen, is_frozen
from octavo.models.structure.structure import behind_features
from octavo.train.forward import critic
from octavo.train.forward.forward import model_dtype

# Bytes of both moments: (for each element, for each group of elements that share scales).
STATES = {
    "fp32": (8, 0),
    "bf16": (4, 0),
    "fp8": (2, 8),  # one fp32 scale of m, two BF16 bounds of v
    "coat": (2, 24),  # scale, exponent and centre in fp32, for m and for v
}
_STEP = 4  # the step count in fp32, one for each parameter


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter; tied parameters are counted once.

    ``block`` is the name of its block, "" for the root. ``codes`` is the cast of a frozen FP8 weight, whose codes are
    stored in the layout of its GEMM, or transposed if ``transposed``. ``is_added`` marks parameters of an adapter
    or a critic, which the base model does not have. ``is_fp32`` marks frozen fp32 parameters of a 16-bit model, such as
    the bias corrections of Ernie's routers. ``has_gradient``: False for trained parameters that no loss depends on.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    block: str
    component: str
    codes: CastSpec | None = None
    transposed: bool = False
    is_added: bool = False
    is_fp32: bool = False
    has_gradient: bool = True

    def rows(self, ranks: int) -> int:
        """Return the number of rows on rank 0."""
        return math.ceil(self.shape[0] / ranks) if self.shape else 1

    def elements(self, ranks: int = 1) -> int:
        """Return the number of elements on rank 0."""
        return self.rows(ranks) * math.prod(self.shape[1:])

    def width(self, cfg: Config) -> int:
        """Return the bytes of an element (and of an element of the gradient) of a parameter that is not stored as
        codes."""
        return 4 if self.is_fp32 else trained_width(cfg) if self.is_added else weight_width(cfg)

    def bytes(self, cfg: Config, ranks: int = 1, element_bytes: int | None = None) -> int:
        """Return the bytes on rank 0.

        These are the values, at ``element_bytes`` per element (by default `width`), or the codes together with the
        scales of all blocks that contain its rows.
        """
        if self.codes is None:
            return (self.width(cfg) if element_bytes is None else element_bytes) * self.elements(ranks)
        inner = self.shape[-2:][::-1] if self.transposed else self.shape[-2:]
        if len(self.shape) == 3:
            return self.rows(ranks) * matrix_code_bytes((inner[0], inner[1]), self.codes)
        return matrix_code_bytes((self.rows(ranks), inner[1]), self.codes)


def list_parameters(model: nn.Module, family: models.Family) -> tuple[ParameterInfo, ...]:
    """Return the parameters of a model, including its adapters. The model may be on the meta device."""
    block_names = {
        f"{name}.{inner}": name for name, block in family.layers(model) for inner, _ in block.named_parameters()
    }
    behind = behind_features(model, family.tower)
    has_16_bit = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return tuple(
        ParameterInfo(
            name,
            tuple(p.shape),
            p.requires_grad,
            block_names.get(name, ""),
            family.component_of(name.rpartition(".")[0]) or "foundation",
            codes_of_frozen(p).spec if is_frozen(p) else None,
            is_frozen(p) and isinstance(p, Fp8Weight) and p.is_transposed,
            adapters.is_adapter_parameter(name) or critic.is_critic_parameter(name),
            has_16_bit and p.dtype == torch.float32 and not p.requires_grad,
            name not in behind,
        )
        for name, p in model.named_parameters()
    )


def weight_width(cfg: Config) -> int:
    """Return the bytes of an element of a model weight, and of its gradient."""
    return model_dtype(cfg).itemsize


def sent_width(cfg: Config, stored_width: int) -> int:
    """Return the bytes of an element, and of its gradient, as sent between ranks.

    ``stored_width`` is the bytes of the stored element.
    """
    return min(2, stored_width) if cfg.train.gather == "bf16" else stored_width


def adapter_width(cfg: Config) -> int:
    """Return the bytes of an element of an adapter, and of its gradient."""
    return 2 if cfg.lora is not None and cfg.lora.dtype == "bf16" else 4


def trained_width(cfg: Config) -> int:
    """Return the bytes of an element of the trained parameters."""
    return weight_width(cfg) if cfg.lora is None else adapter_width(cfg)


def weight_bytes(cfg: Config, parameters: Iterable[ParameterInfo], ranks: int = 1) -> int:
    return sum(p.bytes(cfg, ranks) for p in parameters)


def master_bytes(cfg: Config, parameters: Iterable[ParameterInfo], ranks: int = 1) -> int:
    """Return the bytes of the master copies.

    With `bf16+16` a copy has the other 16 bits of each weight; for BF16 adapters with an fp32 master it has all 32
    bits. An fp32 weight needs no copy.
    """
    extra = 4 if trained_width(cfg) == 2 and cfg.optimizer.master == "fp32" else 0
    each = 2 if cfg.optimizer.master == "bf16+16" else extra
    return each * sum(p.elements(ranks) for p in parameters if p.trained)


def gradient_bytes(cfg: Config, parameters: Iterable[ParameterInfo], ranks: int = 1) -> int:
    """Return the bytes of the gradients after backward; 0 if each gradient is applied and freed during backward."""
    if cfg.optimizer.update == "backward":
        return 0
    return sum(p.width(cfg) * p.elements(ranks) for p in parameters if p.trained and p.has_gradient)


def moment_bytes(cfg: Config, parameters: Iterable[ParameterInfo], ranks: int = 1) -> int:
    """Return the bytes of both moments."""
    element, group = STATES[cfg.optimizer.states]
    trained = [p.elements(ranks) for p in parameters if p.trained and p.has_gradient]
    return sum(_STEP + element * n + group * math.ceil(n / GROUP) for n in trained)


def checkpoint_bytes(cfg: Config, parameters: Iterable[ParameterInfo], ranks: int = 1) -> int:
    """Return the bytes of rank 0's part of a checkpoint.

    A LoRA run saves the trained parameters; other runs save everything except frozen codes. Both save the master
    copies and, with `run.save_states`, the moments.
    """
    parameters = tuple(p for p in parameters if p.trained or (cfg.lora is None and p.codes is None))
    state_bytes = master_bytes(cfg, parameters, ranks) + (
        moment_bytes(cfg, parameters, ranks) if cfg.run.save_states else 0
    )
    return weight_bytes(cfg, parameters, ranks) + state_bytes


def code_bytes(
    plan: fp8.Plan, reached: Collection[str], ranks: int = 1, frozen: Collection[str] = (), shared: bool | None = None
) -> int:  # fmt: skip
    """Return the bytes of the FP8 codes and scales that are kept from step to step in addition to the weights.

    A ``frozen`` weight is itself stored as codes, so only its second layout for dgrad is counted. Under FSDP2, codes
    are freed together with the gathered weight, except codes of weights that are FP8 between steps (`fp8.param`): these
    are cast from the shard and kept with it. For ``reached`` see :func:`reached_by_backward`. ``shared`` is
    True if FSDP2 is used, which is possible even if each rank holds a whole copy; the default is ``ranks > 1``.
    """
    if plan.policy.weight_codes == "recast":
        return 0
    if ranks > 1 if shared is None else shared:
        return sum(shard_code_bytes(_weight_shape(row), weight_casts(row), ranks) for row in fp8_weights(plan))
    return sum(
        layer_code_bytes(row, _cached_gemms(plan, row, row.row.module in reached, weight_name(row) in frozen))
        for row in _skip_tied(plan.rows)
    )


def _cached_gemms(
    plan: fp8.Plan, row: fp8.PlanRow, reached: bool = True, frozen: bool = False
) -> tuple[Any, ...] | None:
    """Return the GEMMs whose weight codes are kept, as :func:`layer_code_bytes` takes them.

    On a CPU the reference reads codes in either orientation and keeps one layout for every value of `fp8.weight_codes`.
    """
    both, recipe = plan.policy.weight_codes == "both", row.recipe
    if frozen:
        shared = recipe and recipe.fwd and recipe.dgrad and recipe.fwd.b == recipe.dgrad.b
        return (recipe.dgrad,) if recipe and shared and both and reached else ()
    if recipe is None or (reached and not both):
        return None
    return (recipe.fwd, recipe.dgrad) if reached else (recipe.fwd,)


_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate and up", "up_proj": "gate and up"}


def reached_by_backward(model: nn.Module) -> frozenset[str]:
    """Return the modules whose input requires a gradient, so that dgrad multiplies by their weight.

    They follow a trained parameter in module order, which is the order of execution in the supported models. Sibling
    projections share an input (q, k and v; gate and up), so the first of them decides for all. In Whisper and SigLIP
    the first is k.
    """
    reached: set[str] = set()
    decided: dict[tuple[str, str], bool] = {}
    trained = False
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if decided.setdefault((parent, _SIBLINGS.get(last, last)), trained):
            reached.add(name)
        trained = trained or any(p.requires_grad for p in module.parameters(recurse=False))
    return frozenset(reached)


def frozen_names(parameters: Iterable[ParameterInfo]) -> frozenset[str]:
    """Return the stock names of the frozen FP8 weights."""
    return frozenset(stock_name(p.name) for p in parameters if p.codes is not None)


def fp8_weights(plan: fp8.Plan) -> tuple[fp8.PlanRow, ...]:
    """Return the rows whose weight is FP8 between steps (`fp8.param`); tied weights are listed once.

    An FP8 GEMM multiplies by such a weight, and no layer in high precision shares it.
    """
    names = {weight_name(row) for row in plan.rows if plan.policy.param_of(row.component) and weight_casts(row)}
    return tuple(row for row in _skip_tied(plan.rows) if weight_name(row) in names and names.issuperset(row.row.tied))


def weight_name(row: fp8.PlanRow) -> str:
    """Return the name of the row's weight parameter."""
    return row.name if row.kind == "experts" else f"{row.name}.weight"


def multiplies_by_codes(row: fp8.PlanRow, codes: CastSpec | None) -> bool:
    """Return True if every GEMM of a frozen layer uses the codes of its weight directly."""
    if row.recipe is None or codes is None:
        return False
    used = [row.recipe.fwd, row.recipe.dgrad]
    return all(g is not None and (g.b.format, g.b.block) == (codes.format, codes.block) for g in used)


def weight_casts(row: fp8.PlanRow) -> list[CastSpec]:
    """Return the casts of a weight: the forward cast and, if it differs, the dgrad cast."""
    casts = [] if row.recipe is None else [gemm.b for gemm in (row.recipe.fwd, row.recipe.dgrad) if gemm is not None]
    return list(dict.fromkeys(casts))


def shard_code_bytes(shape: tuple[int, ...], casts: Iterable[CastSpec], ranks: int) -> int:
    """Return the bytes of codes and scales that each rank keeps and sends, for a matrix [N, K] or experts [E, N, K].

    All ranks have the same size; see :class:`octavo.fp8.weights.fp8_rows.Rows`.
    """
    total = 0
    for spec in casts:
        shards = Shards(shape[0], ranks, 0)
        if len(shape) == 3:
            total += shards.chunk * matrix_code_bytes((shape[1], shape[2]), spec)
            continue
        scales = shards.blocks(spec.block[0]) * layout(1, shape[1], spec.block).grid[1]
        total += shards.chunk * shape[1] + scales * _scale_bytes(spec)
    return total


def _weight_shape(row: fp8.PlanRow) -> tuple[int, ...]:
    """Return the shape of the row's weight in GEMMs: [N, K], or [E, N, K] for experts."""
    return row.shape if not row.row.experts else (row.row.experts, *row.shape)


def layer_code_bytes(row: fp8.PlanRow, gemms: Iterable[Any] | None = None) -> int:
    """Return the bytes of the codes of one layer's weight, over all experts.

    ``gemms`` are the GEMMs of the recipe whose codes are counted; the default is the forward and, if its cast
    differs, dgrad.
    """
    specs = weight_casts(row) if gemms is None else [gemm.b for gemm in gemms if gemm is not None]
    return (row.row.experts or 1) * sum(matrix_code_bytes(row.shape, spec) for spec in specs)


def matrix_code_bytes(shape: tuple[int, int], spec: CastSpec) -> int:
    """Return the bytes of the codes and scales of a matrix."""
    rows, cols = layout(*shape, spec.block).grid
    return shape[0] * shape[1] + rows * cols * _scale_bytes(spec)


def _scale_bytes(spec: CastSpec) -> int:
    return 1 if spec.scale == "e8m0" else 4


def _skip_tied(rows: Iterable[fp8.PlanRow]) -> Iterable[fp8.PlanRow]:
    """Yield the rows, except those whose weight is tied to the weight of an earlier row."""
    seen: set[str] = set()
    for row in rows:
        if not seen.intersection(row.row.tied):
            yield row
        seen.add(row.name)
        seen.add(f"{row.name}.weight")


def expert_parameters(plan: fp8.Plan) -> frozenset[str]:
    """Return the names of the parameters that hold all experts of a layer."""
    return frozenset(row.name for row in plan.rows if row.row.experts and row.kind == "experts")


def shard_experts(
    parameters: Iterable[ParameterInfo], plan: fp8.Plan, expert_ranks: int
) -> tuple[tuple[ParameterInfo, ...], fp8.Plan]:
    """Return (parameters, plan) with only the experts of one rank when they are split over ``expert_ranks`` ranks."""
    if expert_ranks == 1:
        return tuple(parameters), plan
    names = expert_parameters(plan)
    local = (
        replace(p, shape=(-(-p.shape[0] // expert_ranks), *p.shape[1:])) if stock_name(p.name) in names else p
        for p in parameters
    )
    rows = (
        replace(row, row=replace(row.row, experts=-(-row.row.experts // expert_ranks)))
        if row.name in names and row.row.experts
        else row
        for row in plan.rows
    )
    return tuple(local), replace(plan, rows=tuple(rows))


def gathered_bytes(cfg: Config, parameters: Iterable[ParameterInfo], plan: fp8.Plan) -> dict[str, int]:
    """Return the bytes of each block's weights and their codes after FSDP2 has gathered them; the root is ""."""
    sizes = sent_bytes(cfg, parameters, plan)
    frozen = frozen_names(parameters)
    fp8_names = {row.name for row in fp8_weights(plan)}
    for row in plan.rows:
        block = next((b for b in sizes if b and row.name.startswith(f"{b}.")), "")
        cached = plan.policy.weight_codes != "recast" and weight_name(row) not in frozen
        if cached and row.name not in fp8_names:
            sizes[block] = sizes.get(block, 0) + layer_code_bytes(row, _cached_gemms(plan, row))
    return sizes


def sent_bytes(cfg: Config, parameters: Iterable[ParameterInfo], plan: fp8.Plan) -> dict[str, int]:
    """Return the bytes of each block's weights as sent by all ranks together; the root is "".

    FP8 weights are sent as codes and scales instead of values.
    """
    sizes: dict[str, int] = {}
    for p in parameters:
        sizes[p.block] = sizes.get(p.block, 0) + p.bytes(cfg, element_bytes=sent_width(cfg, p.width(cfg)))
    each = sent_width(cfg, weight_width(cfg))
    for row in fp8_weights(plan):
        block = next((b for b in sizes if b and row.name.startswith(f"{b}.")), "")
        sizes[block] += layer_code_bytes(row) - each * (row.row.experts or 1) * row.shape[0] * row.shape[1]
    return sizes


def whole_gradient_bytes(cfg: Config, parameters: Iterable[ParameterInfo]) -> dict[str, int]:
    """Return the bytes of each block's whole gradients before they are summed over ranks; the root is ""."""
    sizes: dict[str, int] = {}
    for p in parameters:
        sizes[p.block] = sizes.get(p.block, 0) + (sent_width(cfg, p.width(cfg)) * p.elements() if p.trained else 0)
    return sizes
