"""Bytes that a configuration holds between steps, from shapes and the plan alone: weights, master, gradients, states.

Under FSDP2 every parameter is cut along its first dimension into equal numbers of rows, the last ranks getting less, so
rank 0 holds the most; that rank is counted. Counts are exact: `tests/train/memory/` compares them with
the storages of real models and optimizers.
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

# Bytes of both moments: (an element, a group of elements that share figures).
STATES = {
    "fp32": (8, 0),
    "bf16": (4, 0),
    "fp8": (2, 8),  # one fp32 scale of m, two BF16 bounds of v
    "coat": (2, 24),  # scale, exponent and centre in fp32, of m and of v
}
_STEP = 4  # the step's number, fp32, one for each parameter


@dataclass(frozen=True)
class Held:
    """One parameter, tied ones once: its name, shape, whether it is trained, and its block ("": the root's). ``codes``:
    the cast of a frozen FP8 weight, stored as its GEMM multiplies by it or ``turned``; ``beside``: of an adapter or a
    critic, which no base holds; ``wide``: frozen, and in fp32 in a model that is not (corrections of Ernie's routers).
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
        """Rows on rank 0."""
        return math.ceil(self.shape[0] / ranks) if self.shape else 1

    def elements(self, ranks: int = 1) -> int:
        """Elements on rank 0."""
        return self.rows(ranks) * math.prod(self.shape[1:])

    def width(self, cfg: Config) -> int:
        """Bytes of an element, and of its gradient, where it has values."""
        return 4 if self.wide else trained_width(cfg) if self.beside else width(cfg)

    def bytes(self, cfg: Config, ranks: int = 1, each: int | None = None) -> int:
        """On rank 0: values (``each`` bytes an element; None: their width), or codes and the scales of all blocks that
        its rows lie in."""
        if self.codes is None:
            return (self.width(cfg) if each is None else each) * self.elements(ranks)
        inner = self.shape[-2:][::-1] if self.turned else self.shape[-2:]
        if len(self.shape) == 3:
            return self.rows(ranks) * bytes_of((inner[0], inner[1]), self.codes)
        return bytes_of((self.rows(ranks), inner[1]), self.codes)


def held(model: nn.Module, family: models.Family) -> tuple[Held, ...]:
    """The parameters of a model, which may be on the meta device; adapters among them where it has some."""
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
            is_frozen(p) and isinstance(p, Fp8Weight) and p.turned,
            adapters.is_adapter_parameter(name) or critic.owns(name),
            mixed and p.dtype == torch.float32 and not p.requires_grad,
        )
        for name, p in model.named_parameters()
    )


def width(cfg: Config) -> int:
    """Bytes of an element of a weight of the model, and of its gradient."""
    return model_dtype(cfg).itemsize


def sent_width(cfg: Config, width_of_weight: int) -> int:
    """Bytes of an element that is kept in ``own``, and of its gradient, on their way between ranks."""
    return min(2, width_of_weight) if cfg.train.gather == "bf16" else width_of_weight


def adapter_width(cfg: Config) -> int:
    """Bytes of an element of an adapter, and of its gradient."""
    return 2 if cfg.lora is not None and cfg.lora.dtype == "bf16" else 4


def trained_width(cfg: Config) -> int:
    """Bytes of an element of what is trained."""
    return width(cfg) if cfg.lora is None else adapter_width(cfg)


def weights(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    return sum(p.bytes(cfg, ranks) for p in parameters)


def master(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """What makes a BF16 weight exactly fp32: its other 16 bits, or of adapters in BF16 all 32. An fp32 weight is its
    own master."""
    beside = 4 if trained_width(cfg) == 2 and cfg.optimizer.master == "fp32" else 0
    each = 2 if cfg.optimizer.master == "bf16+16" else beside
    return each * sum(p.elements(ranks) for p in parameters if p.trained)


def gradients(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """After backward; none where each is used and freed in backward."""
    if cfg.optimizer.update == "backward":
        return 0
    return sum(p.width(cfg) * p.elements(ranks) for p in parameters if p.trained)


def states(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """Both moments."""
    element, group = STATES[cfg.optimizer.states]
    trained = [p.elements(ranks) for p in parameters if p.trained]
    return sum(_STEP + element * n + group * math.ceil(n / GROUP) for n in trained)


def saved(cfg: Config, parameters: Iterable[Held], ranks: int = 1) -> int:
    """What a checkpoint holds of rank 0's part: of a LoRA run what is trained, else all but frozen codes; and what the
    optimizer keeps of it, without `run.save_states` that of weights alone."""
    parameters = tuple(p for p in parameters if p.trained or (cfg.lora is None and p.codes is None))
    of = master(cfg, parameters, ranks) + (states(cfg, parameters, ranks) if cfg.run.save_states else 0)
    return weights(cfg, parameters, ranks) + of


def codes(
    plan: fp8.Plan, reached: Collection[str], ranks: int = 1, frozen: Collection[str] = (), shared: bool | None = None
) -> int:  # fmt: skip
    """FP8 codes of weights that outlive a step, with their scales, beside the weights themselves: of ``frozen`` ones,
    which are codes, dgrad's second layout alone.

    Under FSDP2 codes go with the gathered weight; those of a weight that is FP8 between steps (`fp8.param`) are cast
    from its shard and stay with that. ``reached``: see :func:`backward_reaches`. ``shared``: under FSDP2, also where a
    copy is whole on each rank (None: where there are several ranks).
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
    """The GEMMs whose codes of a weight are held, as :func:`codes_of` takes them. (On a CPU the reference reads codes
    either way round and holds one layout whatever `fp8.weight_codes` says.)"""
    both, recipe = plan.policy.weight_codes == "both", row.recipe
    if frozen:
        shared = recipe and recipe.fwd and recipe.dgrad and recipe.fwd.b == recipe.dgrad.b
        return (recipe.dgrad,) if recipe and shared and both and reached else ()
    if recipe is None or (reached and not both):
        return None
    return (recipe.fwd, recipe.dgrad) if reached else (recipe.fwd,)


_SIBLINGS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate and up", "up_proj": "gate and up"}


def backward_reaches(model: nn.Module) -> frozenset[str]:
    """Modules whose input asks for a gradient, so that dgrad multiplies by their weight: those behind a trained
    parameter in the order of the modules, which is the order of execution in the models that Octavo knows. Of sibling
    projections, which have one input (q, k and v; gate and up), the first decides for all, whichever it is: Whisper's
    and SigLIP's is k."""
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
    """The rows whose weight is FP8 between steps (`fp8.param`), tied ones once: an FP8 GEMM multiplies by it, and it
    is no other layer's in high precision."""
    sure = {weight_name(row) for row in plan.rows if plan.policy.param_of(row.component) and casts_of(row)}
    return tuple(row for row in _once(plan.rows) if weight_name(row) in sure and sure.issuperset(row.row.tied))


def weight_name(row: fp8.PlanRow) -> str:
    """The name of its parameter."""
    return row.name if row.kind == "experts" else f"{row.name}.weight"


def multiplies_by_codes(row: fp8.PlanRow, codes: CastSpec | None) -> bool:
    """Whether every GEMM of a frozen layer multiplies by the codes of its weight."""
    if row.recipe is None or codes is None:
        return False
    used = [row.recipe.fwd, row.recipe.dgrad]
    return all(g is not None and (g.b.format, g.b.block) == (codes.format, codes.block) for g in used)


def casts_of(row: fp8.PlanRow) -> list[CastSpec]:
    """The casts of a weight: the forward's, and dgrad's where that has another."""
    casts = [] if row.recipe is None else [gemm.b for gemm in (row.recipe.fwd, row.recipe.dgrad) if gemm is not None]
    return list(dict.fromkeys(casts))


def shard_of_codes(shape: tuple[int, ...], casts: Iterable[CastSpec], ranks: int) -> int:
    """Codes and scales that each of the ranks keeps, and sends, of a matrix [N, K] or of experts [E, N, K]:
    :class:`octavo.fp8.weights.fp8_rows.Rows`, as large on every rank."""
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
    """The shape of its weight, as GEMMs multiply by it."""
    return row.shape if not row.row.experts else (row.row.experts, *row.shape)


def codes_of(row: fp8.PlanRow, gemms: Iterable[Any] | None = None) -> int:
    """Bytes of the codes of one layer's weight, those of all experts.

    ``gemms``: of the recipe, whose codes are counted (None: of the forward, and of dgrad where that casts anew)."""
    specs = casts_of(row) if gemms is None else [gemm.b for gemm in gemms if gemm is not None]
    return (row.row.experts or 1) * sum(bytes_of(row.shape, spec) for spec in specs)


def bytes_of(shape: tuple[int, int], spec: CastSpec) -> int:
    """Codes and scales of a matrix."""
    rows, cols = layout(*shape, spec.block).grid
    return shape[0] * shape[1] + rows * cols * _scale_width(spec)


def _scale_width(spec: CastSpec) -> int:
    return 1 if spec.scale == "e8m0" else 4


def _once(rows: Iterable[fp8.PlanRow]) -> Iterable[fp8.PlanRow]:
    """Rows without those whose weight is another's."""
    seen: set[str] = set()
    for row in rows:
        if not seen.intersection(row.row.tied):
            yield row
        seen.add(row.name)
        seen.add(f"{row.name}.weight")


def experts_of(plan: fp8.Plan) -> frozenset[str]:
    """The names of parameters that hold all experts of a layer."""
    return frozenset(row.name for row in plan.rows if row.row.experts and row.kind == "experts")


def dealt(parameters: Iterable[Held], plan: fp8.Plan, ways: int) -> tuple[tuple[Held, ...], fp8.Plan]:
    """(parameters, plan) with the experts of a layer that one of so many ranks has."""
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
    """Block -> bytes of its weights when FSDP2 has gathered them, with their codes; the root under ""."""
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
    """Block -> bytes of its weights as all ranks together send them; the root under "".

    FP8 weights are sent as codes and scales, and have no values then.
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
    """Block -> bytes of its whole gradients before they are summed over ranks; the root under ""."""
    out: dict[str, int] = {}
    for p in parameters:
        out[p.block] = out.get(p.block, 0) + (sent_width(cfg, p.width(cfg)) * p.elements() if p.trained else 0)
    return out
