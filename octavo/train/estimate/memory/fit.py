"""Finds the fastest settings that fit a card, by the memory and time of every combination of switches.

Memory is predicted by `footprint`. Times are **estimates** for comparing settings with each other: FLOPs and bytes
divided by assumed speeds; nothing is measured. With F the FLOPs of a forward over a step's tokens, a step costs:

    3 F                  forward and backward
    + F of a component   if its blocks are recomputed in full; 0.65 F if selective (norms and MLP)
    + 2 F                update in backward with clipping: a second backward, in which recomputed blocks are
                         recomputed again
    + F of the head      chunked logits
    + bytes / HBM        weights read in every micro-step, gradients added, weights and states updated; weights cast at
                         each use; activations saved in FP8: one more pass over the activations they replace
    + bytes / LINK       states moved to host memory and back; for activations only the time that exceeds computation

Settings within 1 % of the fastest count as equally fast. Of these, the most exact is chosen: an fp32 or `bf16+16`
master before `bf16+sr`, then moments in more bits, then activations in more bits.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from octavo.base.byte_size import format_bytes
from octavo.config import Config
from octavo.train.errors import TrainError
from octavo.train.estimate.memory.activations import ForwardBytes
from octavo.train.estimate.memory.card import Card
from octavo.train.estimate.memory.footprint import (
    Footprint,
    MemoryEstimator,
    breaks_rule,
    value_of,
    with_settings,
)
from octavo.train.estimate.memory.mesh import make_layout
from octavo.train.estimate.memory.switches import SWITCHES, Progress, ignore_progress
from octavo.train.setup.planning import count_micro_steps, data_ranks, samples_per_step

FLOPS, HBM, LINK = 400e12, 2.5e12, 25e9  # assumed FLOP/s of GEMMs, bytes/s of the card's memory, bytes/s to the host
ASSUMED = (
    f"speeds of {FLOPS / 1e12:g} TFLOP/s, {HBM / 1e12:g} TB/s of the card's memory and {LINK / 1e9:g} GB/s to the "
    "host, not measured"
)
SELECTIVE = 0.65
TIE = 1.01
RANKS = (2, 4, 8, 16, 32, 64)

Settings = Mapping[str, Any]
_RECOMPUTE = SWITCHES["train.recompute"][0]
_SEARCHED = (
    "optimizer.master", "optimizer.states", "optimizer.update", "optimizer.offload",
    "fp8.activations", "fp8.weight_codes", "train.logits", "train.offload_activations",
)  # fmt: skip
_CHOICES = {key: SWITCHES[key][0] for key in _SEARCHED}
_ROUNDING_ORDER = {
    "optimizer.master": {"fp32": 0, "bf16+16": 0, "bf16+sr": 1},
    "optimizer.states": {"fp32": 0, "bf16": 1, "fp8": 2},
    "fp8.activations": {"bf16": 0, "fp8": 1},
}


NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """A combination of switches: settings by dotted key, footprint, and estimated seconds of a step.

    ``relative`` is the time relative to the fastest combination, including those that do not fit.
    """

    settings: Settings
    footprint: Footprint
    seconds: float
    relative: float = 1.0

    def excess(self, card: Card) -> int:
        """Return the bytes that exceed the card; negative if bytes stay free."""
        return self.footprint.total - card.usable

    def differences(self, other: Settings) -> Settings:
        """Return the settings that differ from ``other``; a key that is missing there counts as different."""
        return {key: value for key, value in self.settings.items() if key not in other or other[key] != value}

    def to_overrides(self, other: Settings, names: Mapping[str, str] = NO_NAMES) -> str:
        """Return the differences from ``other`` as `key=value` words for the command line, quoted for the shell.
        ``names``: key -> what it is called in the stage of a run (:func:`octavo.config.stages.keys_in_stage`)."""
        changes = self.differences(other).items()
        pairs = (f"{names.get(key, key)}={_format_value(value).replace(' ', '')}" for key, value in changes)
        return " ".join(shlex.quote(pair) for pair in pairs)

    def to_yaml(self, other: Settings = MappingProxyType({}), names: Mapping[str, str] = NO_NAMES) -> list[str]:
        """Return the differences from ``other`` as lines of a configuration file, in which a comment names the stage
        of the settings that belong in one (``names``, as in :meth:`to_overrides`)."""
        sections: dict[str, list[str]] = {}
        for key, value in self.differences(other).items():
            section, _, name = names.get(key, key).rpartition(".")
            header = f"{section}:" if "." not in section else f"# in {section}:"
            sections.setdefault(header, []).append(f"  {name}: {_format_value(value)}")
        return [line for header, lines in sections.items() for line in (header, *lines)]

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "memory": self.footprint.to_json(),
            "estimated_seconds": self.seconds,
            "relative_time": self.relative,
        }


@dataclass(frozen=True)
class Fit:
    """The result of the search.

    ``best`` is the fastest setting that fits, or None. ``reasons`` gives a reason for each of its switches.
    ``more_exact`` are settings that fit and round less, fastest first. ``faster`` are the fastest settings that do not
    fit. ``smallest`` needs the least memory. If nothing fits, ``ranks`` is a number of GPUs on which a setting fits, or
    None if no number was found. ``tried`` is the number of combinations.
    """

    card: Card
    best: Setting | None
    reasons: tuple[str, ...]
    more_exact: tuple[Setting, ...]
    faster: tuple[Setting, ...]
    smallest: Setting
    ranks: int | None
    tried: int


def propose(
    sizes: MemoryEstimator, card: Card, ranks: int = 1, held: Iterable[str] = (), progress: Progress = ignore_progress
) -> Fit:
    """Search all combinations; ``held`` are dotted keys that keep their configured value. ``progress`` is called with
    the number of combinations done and of all, without their micro-batches and recomputation."""
    fixed = frozenset(held)
    candidates = list(_combinations(sizes, card, ranks, fixed, progress=progress))
    best_time = min(s.seconds for s in candidates)
    candidates = [replace(s, relative=s.seconds / best_time) for s in candidates]
    fitting = [s for s in candidates if s.excess(card) <= 0]
    best = _select_fastest(fitting)
    smallest = min(candidates, key=lambda s: s.footprint.total)
    if best is None:
        possible = (n for n in RANKS if n > ranks and _is_possible(sizes.cfg, n))
        divisible = (n for n in possible if samples_per_step(sizes.cfg) % data_ranks(sizes.cfg, n) == 0)
        fitting_ranks = next(
            (n for n in divisible if any(s.excess(card) <= 0 for s in _combinations(sizes, card, n, fixed, False))),
            None,
        )
        return Fit(card, None, (), (), (), smallest, fitting_ranks, len(candidates))
    faster = sorted((s for s in candidates if s.excess(card) > 0 and s.seconds < best.seconds), key=lambda s: s.seconds)
    reasons, more_exact = tuple(_explain(best, candidates, card, sizes, ranks)), _take(_more_exact(best, fitting))
    return Fit(card, best, reasons, more_exact, _take(_spread_by_memory(faster)), smallest, None, len(candidates))


def _combinations(
    sizes: MemoryEstimator,
    card: Card,
    ranks: int,
    held: frozenset[str],
    all_if_none_fits: bool = True,
    progress: Progress = ignore_progress,
) -> Iterator[Setting]:
    """Yield all combinations except those whose weights and states alone do not fit; if none of them fit, all of them,
    or none without ``all_if_none_fits``."""
    cfg = sizes.cfg
    choices = dict(_CHOICES)
    # A plan file decides about FP8; without FP8 there is no choice.
    fixed = cfg.fp8.plan is not None or not sizes.plan.share
    decided_keys = {"fp8.activations", "fp8.weight_codes"} if fixed else set()
    held |= decided_keys
    for key in held & set(choices):
        choices[key] = (value_of(cfg, key),)
    components = [c for c, _ in cfg.train.recompute if c in sizes.family.components]
    products = itertools.product(_RECOMPUTE, repeat=len(components))
    recompute_options = [dict(zip(components, modes, strict=True)) for modes in products]
    if held & {"train.recompute"}:
        recompute_options = [{c: mode for c, mode in cfg.train.recompute if c in components}]
    micro_batches = [cfg.train.micro_batch] if "train.micro_batch" in held else _micro_batches(cfg, ranks)
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    bases = [(values, with_settings(cfg, values)) for values in combinations]
    bases = [(values, base) for values, base in bases if not breaks_rule(base)]
    persistent = [sizes.persistent_bytes(base, ranks) for _, base in bases]
    limit = card.usable
    if all_if_none_fits and min(persistent, default=0) > limit:
        limit = max(persistent)
    rows_by_micro = {micro: micro * max(1, sizes.tokens.rows // cfg.train.micro_batch) for micro in micro_batches}
    forwards: dict[Any, ForwardBytes | None] = {}  # bytes of a forward, cached by everything that they depend on

    def find_forward(candidate: Config, recompute: Mapping[str, str]) -> ForwardBytes | None:
        candidate = sizes.single_process_config(candidate, ranks)
        key = (candidate.fp8.activations, *sizes.forward_dtypes(candidate), candidate.train.logits, *recompute.values())
        rows = rows_by_micro[candidate.train.micro_batch]
        if key not in forwards:
            forwards[key] = _combine_forward(sizes, candidate, recompute)
        forward = forwards[key]
        if forward is not None and (*key, rows) not in forwards:
            forwards[*key, rows] = forward.scale(rows)
        return forward and forwards[*key, rows]

    for number, ((values, base), persistent_size) in enumerate(zip(bases, persistent, strict=True)):
        progress(number, len(bases))
        if persistent_size > limit:
            continue
        for micro in micro_batches:
            if values["optimizer.update"] == "backward" and samples_per_step(cfg) > micro * data_ranks(cfg, ranks):
                continue
            candidate = with_settings(base, {"train.micro_batch": micro})
            for recompute in recompute_options:
                if values["train.offload_activations"] and set(recompute.values()) == {"full"}:
                    continue
                forward = find_forward(candidate, recompute)
                if forward is None:
                    continue
                size = sizes.assemble(candidate, forward, rows_by_micro[micro], ranks)
                chosen = {key: value for key, value in values.items() if key not in decided_keys}
                settings = {**chosen, "train.recompute": _merge_modes(recompute), "train.micro_batch": micro}
                yield Setting(settings, size, _estimate_seconds(sizes, candidate, recompute, size, forward, ranks))


def _is_possible(cfg: Config, ranks: int) -> bool:
    """Return True if the configured mesh is possible with this many ranks."""
    try:
        return make_layout(cfg, ranks).ranks > 0
    except TrainError:
        return False


def _micro_batches(cfg: Config, ranks: int) -> list[int]:
    """Return the micro-batch sizes that divide a rank's part of the global batch."""
    if cfg.data.packing:  # a micro-batch is a pack
        return [1]
    per_rank = max(1, samples_per_step(cfg) // data_ranks(cfg, ranks))
    return [n for n in range(1, per_rank + 1) if per_rank % n == 0 and samples_per_step(cfg) % n == 0]


def _merge_modes(recompute: Mapping[str, str]) -> Any:
    values = set(recompute.values())
    return values.pop() if len(values) == 1 else dict(recompute)


def _combine_forward(sizes: MemoryEstimator, cfg: Config, recompute: Mapping[str, str]) -> ForwardBytes | None:
    """Return the bytes of a forward of one row with these modes of recomputation, combined from the components.

    Returns None if the model cannot be recomputed that way."""
    chunked = with_settings(cfg, {"train.recompute": "none", "train.logits": "chunked"})
    plain = sizes.estimate_forward(chunked, 1)
    if cfg.train.logits == "full":
        plain = replace(plain, logits=sizes.head_bytes(cfg))
    blocks, largest, recomputed = dict(plain.blocks), dict(plain.largest), {}
    for component, mode in recompute.items():
        if mode == "none" or not plain.blocks.get(component):
            continue
        if mode == "full":
            block_input = sizes.block_input_bytes(component, cfg)
            blocks[component], largest[component] = sizes.counts[component] * block_input, block_input
        else:
            try:
                other = sizes.estimate_forward(with_settings(chunked, {"train.recompute": mode}), 1)
            except TrainError:
                return None
            blocks[component], largest[component] = other.blocks[component], other.largest[component]
        recomputed[component] = max(0, plain.largest[component] - largest[component])
    return replace(plain, blocks=blocks, largest=largest, recomputed=recomputed)


def _estimate_seconds(
    sizes: MemoryEstimator,
    cfg: Config,
    recompute: Mapping[str, str],
    footprint: Footprint,
    saved: ForwardBytes,
    ranks: int,
) -> float:
    """Return the estimated seconds of one step on one rank; see the module docstring."""
    steps = count_micro_steps(cfg, ranks)
    forward = sizes.forward_flops(footprint.tokens)
    recomputed = sum(
        forward.get(c, 0.0) * {"none": 0.0, "selective": SELECTIVE, "full": 1.0}[mode] for c, mode in recompute.items()
    )
    total = 3 * sum(forward.values()) + recomputed
    two_backwards = cfg.optimizer.update == "backward" and cfg.train.clip > 0
    if two_backwards:
        total += 2 * sum(forward.values()) + recomputed
    if sizes.uses_chunked_head(cfg):
        total += forward.get("lm_head", 0.0)
    compute = steps * total / FLOPS
    weights, grads = footprint.kinds["weights"], sizes.elements * (2 if cfg.optimizer.master != "fp32" else 4)
    states = footprint.kinds["optimizer"] + footprint.kinds["master"] + (footprint.host if cfg.optimizer.offload else 0)
    # bytes through the card's memory
    traffic = 3 * weights * steps + 2 * grads * steps + 2 * (weights + states)
    if cfg.fp8.weight_codes == "recast":
        traffic += 2 * 3 * sizes.elements * steps
    if cfg.fp8.activations == "fp8":
        traffic += saved.activations * steps
    seconds = compute + traffic / HBM
    if cfg.train.offload_activations:
        seconds += max(0.0, 2 * steps * (saved.activations - footprint.kinds["activations"]) / LINK - compute)
    if cfg.optimizer.offload:
        seconds += 2 * states / LINK
    return seconds


def _rounding_ranks(settings: Settings) -> tuple[int, ...]:
    return tuple(ranked[settings[key]] for key, ranked in _ROUNDING_ORDER.items() if key in settings)


def _select_fastest(settings: list[Setting]) -> Setting | None:
    if not settings:
        return None
    limit = TIE * min(s.seconds for s in settings)
    tied = [s for s in settings if s.seconds <= limit]
    return min(tied, key=lambda s: (_rounding_ranks(s.settings), s.seconds))


def _explain(best: Setting, candidates: list[Setting], card: Card, sizes: MemoryEstimator, ranks: int) -> Iterator[str]:
    """Yield a sentence for each switch that is on: what the same setting would need without it."""
    index = {_key(s.settings): s for s in candidates}
    plain = {key: values[0] for key, values in _CHOICES.items()} | {"train.recompute": "none"}
    for key, off in plain.items():
        if best.settings.get(key, off) == off:
            continue
        values = _CHOICES.get(key, _RECOMPUTE)
        value = best.settings[key]
        before = values[values.index(value) - 1] if value in values else off
        other = index.get(_key({**best.settings, key: before}))
        if other is None:  # it was skipped: its weights and states alone do not fit, or a rule forbids it
            without = with_settings(sizes.cfg, {**best.settings, key: before})
            if breaks_rule(without):
                continue
            total = sizes.estimate(without, ranks).total
        else:
            total = other.footprint.total
        needs = f"with {key}: {_format_value(before)} the run would need {gb(total)}"
        if total > card.usable:
            yield f"{key}: {_format_value(value)}, because {needs}, {gb(total - card.usable)} too much"
        elif other is not None:
            slower = other.seconds / best.seconds - 1
            yield f"{key}: {_format_value(value)}; {needs}, which also fits, and take {100 * slower:+.1f} % time"


def _key(settings: Settings) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(settings.items()))


def _take(settings: Iterable[Setting], limit: int = 3) -> tuple[Setting, ...]:
    return tuple(itertools.islice(settings, limit))


def _more_exact(best: Setting, fitting: list[Setting]) -> Iterator[Setting]:
    """Yield the fastest setting for each combination that rounds less than the best."""
    best_rounding, seen = _rounding_ranks(best.settings), set()
    for setting in sorted(fitting, key=lambda s: s.seconds):
        rounding = _rounding_ranks(setting.settings)
        if (
            rounding == best_rounding
            or rounding in seen
            or any(a > b for a, b in zip(rounding, best_rounding, strict=True))
        ):
            continue
        seen.add(rounding)
        yield setting


def _spread_by_memory(faster: list[Setting]) -> Iterator[Setting]:
    """Yield the fastest setting, then each next one that needs at least 5 % less memory."""
    last = None
    for setting in faster:
        if last is None or setting.footprint.total < 0.95 * last:
            last = setting.footprint.total
            yield setting


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
    return str(value)


def configured_settings(cfg: Config) -> Settings:
    """Return the configured values of the settings that a proposal may change."""
    values = {key: value_of(cfg, key) for key in (*_CHOICES, "train.recompute", "train.micro_batch")}
    return {**values, "train.recompute": _merge_modes(dict(cfg.train.recompute))}


def gb(size: float) -> str:
    """Format bytes as GB (10^9 bytes) or MB with one decimal, which lines up in tables; smaller sizes as KB."""
    if 0 < abs(size) < 1e5:
        return format_bytes(size)
    return f"{size / 1e9:.1f} GB" if abs(size) >= 1e8 else f"{size / 1e6:.1f} MB"
