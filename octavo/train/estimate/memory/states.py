"""Bytes that a configuration holds between steps: weights, master copies, gradients and optimizer states.

They follow from the shapes and the plan alone. FSDP2 splits every parameter along its first dimension into equal
numbers of rows, with fewer for the last ranks, so rank 0 holds the most; the counts are for rank 0. They are exact:
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
class Held:
    """One parameter; tied parameters are counted once.

    ``block`` is the name of its block, "" for the root. ``codes`` is the cast of a frozen FP8 weight, whose codes are
    stored in the layout of its GEMM, or transposed where ``turned`` is set. ``beside`` marks parameters of an adapter
    or a critic, which the base model lacks. ``wide`` marks frozen fp32 parameters of a 16-bit model, such as the bias
    corrections of Ernie's routers.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    block: str
    component: str
    codes: CastSpec | None = None
    turned: bool = False
    beside: bool = False
    wide: bool = False

    def rows(self, ranks: int) -> int:
        """The number of rows on rank 0."""
        return math.ceil(self.shape[0] / ranks) if self.shape else 1

    def elements(self, ranks: int = 1) -> int:
        """The number of elements on rank 0."""
        return self.rows(ranks) * math.prod(self.shape[1:])

    def width(self, cfg: Config) -> int:
        """Bytes of an element and of its gradient, where the parameter is not stored as codes."""
        return 4 if self.wide else trained_width(cfg) if self.beside else width(cfg)

    def bytes(self, cfg: Config, ranks: int = 1, each: int | None = None) -> int:
        """Bytes on rank 0.

        They are the values, at ``each`` bytes an element (None means `width`), or the codes together with the scales
        of all blocks that contain its rows.
        """
        if self.codes is None:
            return (self.width(cfg) if each is None else each) * self.elements(ranks)
        inner = self.shape[-2:][::-1] if self.turned else self.shape[-2:]
        if len(self.shape) == 3:
            return self.rows(ranks) * bytes_of((inner[0], inner[1]), self.codes)
        return bytes_of((self.rows(ranks), inner[1]), self.codes)


def held(model: nn.Module, family: models.Family) -> tuple[Held, ...]:
    """Return the parameters of a model, including its adapters. The model may be on the meta device."""
    inside = {f"{name}.{inner}": name for name, block in family.layers(model) for inner, _ in block.named_parameters()}
    mixed = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return tuple(
        Held(
            name,
            tuple(p.shape),
            p.requires_grad,
            inside.get(name, ""),
            family.component_of(name.rpartition(".")[0]) or "foundation",
            codes_of_frozen(p).spec if is_frozen(p) else None,
            is_frozen(p) and isinstance(p, Fp8Weight) and p.is_transposed,
            adapters.is_adapter_parameter(name) or critic.is_critic_parameter(name),
            mixed and p.dtype == torch.float32 and not p.requires_grad,
        )
        for name, p in model.named_parameters()
    )


def width(cfg: Config) -> int:
    """Bytes of an element of a model weight and of its gradient."""
    return model_dtype(cfg).itemsize


def sent_width(cfg: Config, width_of_weight: int) -> int:
    """Bytes of an element, and of its gradient, as sent between ranks; it is stored in ``width_of_weight`` bytes."""
    return min(2, width_of_weight) if cfg.train.gather == "bf16" else width_of_weight


def adapter_width(cfg: Config) -> int:
    """Bytes of an element of an adapter and of its gradient."""
    return 2 if cfg.lora is not None and cfg.lora.dtype == "bf16" else 4


def trained_width(cfg: Config) -> int:
    """Bytes of an element of the trained parameters."""
    return width(cfg) if cfg.lora is None else adapter_width(cfg)


def weights(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    return sum(p.bytes(cfg, ranks) for p in parameters)


def master(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """Bytes of the master copies.

    Under `bf16+16` they are the other 16 bits of each weight, and for BF16 adapters with an fp32 master all 32 bits.
    An fp32 weight is its own master.
    """
    beside = 4 if trained_width(cfg) == 2 and cfg.optimizer.master == "fp32" else 0
    each = 2 if cfg.optimizer.master == "bf16+16" else beside
    return each * sum(p.elements(ranks) for p in parameters if p.trained)


def gradients(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """Bytes of the gradients after the backward pass; none where each gradient is applied and freed during backward."""
    if cfg.optimizer.update == "backward":
        return 0
    return sum(p.width(cfg) * p.elements(ranks) for p in parameters if p.trained)


def states(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """Bytes of both moments."""
    element, group = STATES[cfg.optimizer.states]
    trained = [p.elements(ranks) for p in parameters if p.trained]
    return sum(_STEP + element * n + group * math.ceil(n / GROUP) for n in trained)


def saved(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """Bytes of rank 0's part of a checkpoint.

    In a LoRA run it holds the trained parameters, in other runs everything but frozen codes. It also holds the master
    copies and, with `run.save_states`, the moments.
    """
    parameters = tuple(p for p in parameters if p.trained or (cfg.lora is None and p.codes is None))
    of = master(cfg, parameters, ranks) + (states(cfg, parameters, ranks) if cfg.run.save_states else 0)
    return weights(cfg, parameters, ranks) + of


def codes(
    plan: fp8.Plan, reached: Collection[str], ranks: int = 1, frozen: Collection[str] = (), shared: bool | None = None
) -> int:  # fmt: skip
    """Bytes of the FP8 codes and scales that are kept from step to step in addition to the weights.

    A ``frozen`` weight is itself stored as codes, so only its second layout for dgrad is counted. Under FSDP2, codes
    are freed together with the gathered weight. Codes of weights that are FP8 between steps (`fp8.param`) are cast from
    the shard and kept with it instead. For ``reached`` see :func:`backward_reaches`. ``shared`` says whether FSDP2 is
    used, which may be the case even where each rank holds a whole copy; None means with several ranks.
    """
    if plan.policy.weight_codes == "recast":
        return 0
    if ranks > 1 if shared is None else shared:
        return sum(shard_of_codes(_whole(row), casts_of(row), ranks) for row in fp8_weights(plan))
    return sum(
        codes_of(row, _held_gemms(plan, row, row.row.module in reached, weight_name(row) in frozen))
        for row in _once(plan.rows)
    )


def _held_gemms(plan: fp8.Plan, row: fp8.PlanRow, reached: bool = True, frozen: bool = False) -> tuple[Any, ...] | None:
    """The GEMMs whose weight codes are kept, in the form that :func:`codes_of` takes.

    On a CPU the reference reads codes in either orientation and keeps one layout whatever `fp8.weight_codes` says.
    """
    both, recipe = plan.policy.weight_codes == "both", row.recipe
    if frozen:
        shared = recipe and recipe.fwd and recipe.dgrad and recipe.fwd.b == recipe.dgrad.b
        return (recipe.dgrad,) if recipe and shared and both and reached else ()
    if recipe is None or (reached and not both):
        return None
    return (recipe.fwd, recipe.dgrad) if reached else (recipe.fwd,)


_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate and up", "up_proj": "gate and up"}


def backward_reaches(model: nn.Module) -> frozenset[str]:
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


def frozen_of(parameters: Iterable[Held]) -> frozenset[str]:
    """The stock names of frozen FP8 weights."""
    return frozenset(stock_name(p.name) for p in parameters if p.codes is not None)


def fp8_weights(plan: fp8.Plan) -> tuple[fp8.PlanRow, ...]:
    """The rows whose weight is FP8 between steps (`fp8.param`); tied weights are listed once.

    An FP8 GEMM multiplies by such a weight, and no layer in high precision shares it.
    """
    sure = {weight_name(row) for row in plan.rows if plan.policy.param_of(row.component) and casts_of(row)}
    return tuple(row for row in _once(plan.rows) if weight_name(row) in sure and sure.issuperset(row.row.tied))


def weight_name(row: fp8.PlanRow) -> str:
    """The name of the row's weight parameter."""
    return row.name if row.kind == "experts" else f"{row.name}.weight"


def multiplies_by_codes(row: fp8.PlanRow, codes: CastSpec | None) -> bool:
    """Whether every GEMM of a frozen layer uses the codes of its weight directly."""
    if row.recipe is None or codes is None:
        return False
    used = [row.recipe.fwd, row.recipe.dgrad]
    return all(g is not None and (g.b.format, g.b.block) == (codes.format, codes.block) for g in used)


def casts_of(row: fp8.PlanRow) -> list[CastSpec]:
    """Return the casts of a weight for the forward and, where it differs, for dgrad."""
    casts = [] if row.recipe is None else [gemm.b for gemm in (row.recipe.fwd, row.recipe.dgrad) if gemm is not None]
    return list(dict.fromkeys(casts))


def shard_of_codes(shape: tuple[int, ...], casts: Iterable[CastSpec], ranks: int) -> int:
    """Bytes of codes and scales that each rank keeps and sends, for a matrix [N, K] or for experts [E, N, K].

    See :class:`octavo.fp8.weights.fp8_rows.Rows`; the size is the same on every rank.
    """
    total = 0
    for spec in casts:
        shards = Shards(shape[0], ranks, 0)
        if len(shape) == 3:
            total += shards.chunk * bytes_of((shape[1], shape[2]), spec)
            continue
        scales = shards.blocks(spec.block[0]) * layout(1, shape[1], spec.block).grid[1]
        total += shards.chunk * shape[1] + scales * _scale_width(spec)
    return total


def _whole(row: fp8.PlanRow) -> tuple[int, ...]:
    """The shape of the row's weight as used in GEMMs."""
    return row.shape if not row.row.experts else (row.row.experts, *row.shape)


def codes_of(row: fp8.PlanRow, gemms: Iterable[Any] | None = None) -> int:
    """Bytes of the codes of one layer's weight, over all experts.

    ``gemms`` are the GEMMs of the recipe whose codes are counted. None means the forward and, where it has its own
    cast, dgrad.
    """
    specs = casts_of(row) if gemms is None else [gemm.b for gemm in gemms if gemm is not None]
    return (row.row.experts or 1) * sum(bytes_of(row.shape, spec) for spec in specs)


def bytes_of(shape: tuple[int, int], spec: CastSpec) -> int:
    """Bytes of the codes and scales of a matrix."""
    rows, cols = layout(*shape, spec.block).grid
    return shape[0] * shape[1] + rows * cols * _scale_width(spec)


def _scale_width(spec: CastSpec) -> int:
    return 1 if spec.scale == "e8m0" else 4


def _once(rows: Iterable[fp8.PlanRow]) -> Iterable[fp8.PlanRow]:
    """Return the rows whose weight is not tied to an earlier row's."""
    seen: set[str] = set()
    for row in rows:
        if not seen.intersection(row.row.tied):
            yield row
        seen.add(row.name)
        seen.add(f"{row.name}.weight")


def experts_of(plan: fp8.Plan) -> frozenset[str]:
    """The names of the parameters that hold all experts of a layer."""
    return frozenset(row.name for row in plan.rows if row.row.experts and row.kind == "experts")


def dealt(parameters: Iterable[Held], plan: fp8.Plan, ways: int) -> tuple[tuple[Held, ...], fp8.Plan]:
    """Return (parameters, plan) with only the experts that one rank holds when they are split ``ways`` ways."""
    if ways == 1:
        return tuple(parameters), plan
    names = experts_of(plan)
    local = (
        replace(p, shape=(-(-p.shape[0] // ways), *p.shape[1:])) if stock_name(p.name) in names else p
        for p in parameters
    )
    rows = (
        replace(row, row=replace(row.row, experts=-(-row.row.experts // ways)))
        if row.name in names and row.row.experts
        else row
        for row in plan.rows
    )
    return tuple(local), replace(plan, rows=tuple(rows))


def gathered(cfg: Config, parameters: Iterable[Held], plan: fp8.Plan) -> dict[str, int]:
    """For each block, the bytes of its weights and their codes after FSDP2 has gathered them; the root is ""."""
    out = sent(cfg, parameters, plan)
    frozen = frozen_of(parameters)
    exchanged = {row.name for row in fp8_weights(plan)}
    for row in plan.rows:
        home = next((b for b in out if b and row.name.startswith(f"{b}.")), "")
        cached = plan.policy.weight_codes != "recast" and weight_name(row) not in frozen
        if cached and row.name not in exchanged:
            out[home] = out.get(home, 0) + codes_of(row, _held_gemms(plan, row))
    return out


def sent(cfg: Config, parameters: Iterable[Held], plan: fp8.Plan) -> dict[str, int]:
    """For each block, the bytes of its weights as sent by all ranks together; the root is "".

    FP8 weights are sent as codes and scales instead of values.
    """
    out: dict[str, int] = {}
    for p in parameters:
        out[p.block] = out.get(p.block, 0) + p.bytes(cfg, each=sent_width(cfg, p.width(cfg)))
    each = sent_width(cfg, width(cfg))
    for row in fp8_weights(plan):
        home = next((b for b in out if b and row.name.startswith(f"{b}.")), "")
        out[home] += codes_of(row) - each * (row.row.experts or 1) * row.shape[0] * row.shape[1]
    return out


def ungathered(cfg: Config, parameters: Iterable[Held]) -> dict[str, int]:
    """For each block, the bytes of its whole gradients before they are summed over ranks; the root is ""."""
    out: dict[str, int] = {}
    for p in parameters:
        out[p.block] = out.get(p.block, 0) + (sent_width(cfg, p.width(cfg)) * p.elements() if p.trained else 0)
    return out
