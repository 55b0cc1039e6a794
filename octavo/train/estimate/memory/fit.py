"""The fastest setting that fits a card: the memory and time of every combination of switches.

Memory is predicted by `footprint`. Times are **estimates** for comparing settings with each other: FLOPs and bytes
divided by assumed speeds; nothing is measured. With F the FLOPs of a forward over a step's tokens, a step costs:

    3 F                  forward and backward
    + F of a component   its blocks are recomputed in full; 0.65 of it where selective (norms and MLP)
    + 2 F                weights are updated in backward and the norm is clipped: a second backward, in which
                         recomputed blocks are recomputed again
    + F of the head      chunked logits
    + bytes / HBM        weights read in every micro-step, gradients added, weights and states updated; weights cast at
                         each use; activations saved in FP8: one more pass over the ones they replace
    + bytes / LINK       states moved to host memory and back; for activations only the time beyond the computation

Settings within 1 % of the fastest count as equally fast. Among them the more exact one is chosen: an fp32 or `bf16+16`
master before `bf16+sr`, then moments in more bits, then activations in more bits.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from octavo.config import Config
from octavo.train.errors import TrainError
from octavo.train.estimate.memory.activations import FakeForward
from octavo.train.estimate.memory.footprint import Card, Footprint, Footprints, changed, refused, value_of
from octavo.train.estimate.memory.mesh import layout_of
from octavo.train.estimate.memory.switches import SWITCHES
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
_CHOSEN = (
    "optimizer.master", "optimizer.states", "optimizer.update", "optimizer.offload",
    "fp8.activations", "fp8.weight_codes", "train.logits", "train.offload_activations",
)  # fmt: skip
_CHOICES = {key: SWITCHES[key][0] for key in _CHOSEN}
_EXACT = {
    "optimizer.master": {"fp32": 0, "bf16+16": 0, "bf16+sr": 1},
    "optimizer.states": {"fp32": 0, "bf16": 1, "fp8": 2},
    "fp8.activations": {"bf16": 0, "fp8": 1},
}


@dataclass(frozen=True)
class Setting:
    """A combination: its settings by dotted key, its footprint, and its estimated time.

    The time is relative to the fastest of all combinations, including those that do not fit.
    """

    settings: Settings
    footprint: Footprint
    seconds: float
    relative: float = 1.0

    def over(self, card: Card) -> int:
        """Bytes that it needs beyond the card's memory; negative if bytes stay free."""
        return self.footprint.total - card.usable

    def differing(self, other: Settings) -> Settings:
        """The settings that differ from ``other``; a key missing there counts as different."""
        return {key: value for key, value in self.settings.items() if key not in other or other[key] != value}

    def words(self, other: Settings) -> str:
        """The differences from ``other`` as `key=value` words for the command line, quoted where a shell needs it."""
        pairs = (f"{key}={_word(value).replace(' ', '')}" for key, value in self.differing(other).items())
        return " ".join(shlex.quote(pair) for pair in pairs)

    def yaml(self, other: Settings = MappingProxyType({})) -> list[str]:
        """The differences from ``other`` as lines of a configuration file."""
        sections: dict[str, list[str]] = {}
        for key, value in self.differing(other).items():
            section, name = key.split(".")
            sections.setdefault(section, []).append(f"  {name}: {_word(value)}")
        return [line for section, lines in sections.items() for line in (f"{section}:", *lines)]

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

    ``best`` is the fastest setting that fits, or None. ``reasons`` says what each of its switches is for. ``exacter``
    are settings that fit and round less somewhere and nowhere more, fastest first. ``faster`` are the fastest settings
    that do not fit. ``smallest`` needs the least memory. Where nothing fits, ``ranks`` is the number of GPUs over which
    something would; None means that none of the tried numbers suffices or that none was tried.
    """

    card: Card
    best: Setting | None
    reasons: tuple[str, ...]
    exacter: tuple[Setting, ...]
    faster: tuple[Setting, ...]
    smallest: Setting
    ranks: int | None
    tried: int


def propose(sizes: Footprints, card: Card, ranks: int = 1, held: Iterable[str] = ()) -> Fit:
    """Search all combinations; ``held`` are dotted keys whose configured value is not changed."""
    fixed = frozenset(held)
    every = list(_settings(sizes, card, ranks, fixed))
    best_time = min(s.seconds for s in every)
    every = [replace(s, relative=s.seconds / best_time) for s in every]
    fitting = [s for s in every if s.over(card) <= 0]
    best = _fastest(fitting)
    smallest = min(every, key=lambda s: s.footprint.total)
    if best is None:
        makes = (n for n in RANKS if n > ranks and _makes(sizes.cfg, n))
        wider = (n for n in makes if samples_per_step(sizes.cfg) % data_ranks(sizes.cfg, n) == 0)
        fitting_ranks = next(
            (n for n in wider if any(s.over(card) <= 0 for s in _settings(sizes, card, n, fixed))), None
        )
        return Fit(card, None, (), (), (), smallest, fitting_ranks, len(every))
    ahead = sorted((s for s in every if s.over(card) > 0 and s.seconds < best.seconds), key=lambda s: s.seconds)
    reasons, exacter = tuple(_reasons(best, every, card, sizes, ranks)), _first(_exacter(best, fitting))
    return Fit(card, best, reasons, exacter, _first(_spread(ahead)), smallest, None, len(every))


def _settings(sizes: Footprints, card: Card, ranks: int, held: frozenset[str]) -> Iterator[Setting]:
    """All combinations except those whose weights and states alone do not fit; all, if none remained."""
    cfg = sizes.cfg
    choices = dict(_CHOICES)
    fixed = (
        cfg.fp8.plan is not None or not sizes.plan.share
    )  # the plan file decides; without FP8 there is nothing to choose
    decided = {"fp8.activations", "fp8.weight_codes"} if fixed else set()
    held |= decided
    for key in held & set(choices):
        choices[key] = (value_of(cfg, key),)
    towers = [c for c, _ in cfg.train.recompute if c in sizes.family.components]
    ways = [dict(zip(towers, how, strict=True)) for how in itertools.product(_RECOMPUTE, repeat=len(towers))]
    if held & {"train.recompute"}:
        ways = [{c: how for c, how in cfg.train.recompute if c in towers}]
    batches = [cfg.train.micro_batch] if "train.micro_batch" in held else _batches(cfg, ranks)
    given_all = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    bases = [(values_of, changed(cfg, values_of)) for values_of in given_all]
    bases = [(values_of, base) for values_of, base in bases if not refused(base)]
    standing = [sizes.standing(base, ranks) for _, base in bases]
    limit = card.usable if min(standing, default=0) <= card.usable else max(standing, default=0)
    rows_of = {micro: micro * max(1, sizes.tokens.rows // cfg.train.micro_batch) for micro in batches}
    forwards: dict[Any, FakeForward | None] = {}  # what a forward keeps, cached by everything that it depends on

    def kept_by(candidate: Config, way: Mapping[str, str]) -> FakeForward | None:
        candidate = sizes.computing(candidate, ranks)
        key = (candidate.fp8.activations, *sizes.forward_of(candidate), candidate.train.logits, *way.values())
        rows = rows_of[candidate.train.micro_batch]
        if key not in forwards:
            forwards[key] = _kept(sizes, candidate, way)
        one = forwards[key]
        if one is not None and (*key, rows) not in forwards:
            forwards[*key, rows] = one.times(rows)
        return one and forwards[*key, rows]

    for (values_of, base), still in zip(bases, standing, strict=True):
        if still > limit:
            continue
        for micro in batches:
            if values_of["optimizer.update"] == "backward" and samples_per_step(cfg) > micro * data_ranks(cfg, ranks):
                continue
            candidate = changed(base, {"train.micro_batch": micro})
            for way in ways:
                if values_of["train.offload_activations"] and set(way.values()) == {"full"}:
                    continue
                forward = kept_by(candidate, way)
                if forward is None:
                    continue
                size = sizes.put_together(candidate, forward, rows_of[micro], ranks)
                named = {key: value for key, value in values_of.items() if key not in decided}
                settings = {**named, "train.recompute": _named(way), "train.micro_batch": micro}
                yield Setting(settings, size, _seconds(sizes, candidate, way, size, forward, ranks))


def _makes(cfg: Config, ranks: int) -> bool:
    """Whether the configured mesh can have this many ranks."""
    try:
        return layout_of(cfg, ranks).ranks > 0
    except TrainError:
        return False


def _batches(cfg: Config, ranks: int) -> list[int]:
    """The micro-batches that divide a rank's part of the global batch."""
    if cfg.data.packing:  # a micro-batch is a pack
        return [1]
    each = max(1, samples_per_step(cfg) // data_ranks(cfg, ranks))
    return [n for n in range(1, each + 1) if each % n == 0 and samples_per_step(cfg) % n == 0]


def _named(way: Mapping[str, str]) -> Any:
    values = set(way.values())
    return values.pop() if len(values) == 1 else dict(way)


def _kept(sizes: Footprints, cfg: Config, way: Mapping[str, str]) -> FakeForward | None:
    """Return what a row keeps with these kinds of recomputation, combined from the components.

    None means that this model has nothing to recompute in that way."""
    chunked = changed(cfg, {"train.recompute": "none", "train.logits": "chunked"})
    plain = sizes.forward(chunked, 1)
    if cfg.train.logits == "full":
        plain = replace(plain, logits=sizes.logits_of(cfg))
    blocks, largest, recomputed = dict(plain.blocks), dict(plain.largest), {}
    for component, how in way.items():
        if how == "none" or not plain.blocks.get(component):
            continue
        if how == "full":
            count = sizes.counts[component]
            one = sizes.input_of(component, cfg)
            blocks[component], largest[component] = count * one, one
        else:
            try:
                other = sizes.forward(changed(chunked, {"train.recompute": how}), 1)
            except TrainError:
                return None
            blocks[component], largest[component] = other.blocks[component], other.largest[component]
        recomputed[component] = max(0, plain.largest[component] - largest[component])
    return replace(plain, blocks=blocks, largest=largest, recomputed=recomputed)


def _seconds(
    sizes: Footprints, cfg: Config, way: Mapping[str, str], footprint: Footprint, saved: FakeForward, ranks: int
) -> float:
    """Estimate the time of one step on one rank; see the module docstring."""
    steps = count_micro_steps(cfg, ranks)
    forward = sizes.forward_flops(footprint.tokens)
    again = sum(forward.get(c, 0.0) * {"none": 0.0, "selective": SELECTIVE, "full": 1.0}[how] for c, how in way.items())
    total = 3 * sum(forward.values()) + again
    twice = cfg.optimizer.update == "backward" and cfg.train.clip > 0
    if twice:
        total += 2 * sum(forward.values()) + again
    if sizes.chunks(cfg):
        total += forward.get("lm_head", 0.0)
    compute = steps * total / FLOPS
    weights, grads = footprint.kinds["weights"], sizes.elements * (2 if cfg.optimizer.master != "fp32" else 4)
    states = footprint.kinds["optimizer"] + footprint.kinds["master"] + (footprint.host if cfg.optimizer.offload else 0)
    # bytes through the card's memory
    moved = 3 * weights * steps + 2 * grads * steps + 2 * (weights + states)
    if cfg.fp8.weight_codes == "recast":
        moved += 2 * 3 * sizes.elements * steps
    if cfg.fp8.activations == "fp8":
        moved += saved.activations * steps
    seconds = compute + moved / HBM
    if cfg.train.offload_activations:
        seconds += max(0.0, 2 * steps * (saved.activations - footprint.kinds["activations"]) / LINK - compute)
    if cfg.optimizer.offload:
        seconds += 2 * states / LINK
    return seconds


def _inexact(settings: Settings) -> tuple[int, ...]:
    return tuple(ranked[settings[key]] for key, ranked in _EXACT.items() if key in settings)


def _fastest(settings: list[Setting]) -> Setting | None:
    if not settings:
        return None
    limit = TIE * min(s.seconds for s in settings)
    tied = [s for s in settings if s.seconds <= limit]
    return min(tied, key=lambda s: (_inexact(s.settings), s.seconds))


def _reasons(best: Setting, every: list[Setting], card: Card, sizes: Footprints, ranks: int) -> Iterator[str]:
    """For each switch that is on, say what the same setting would need without it."""
    index = {_key(s.settings): s for s in every}
    plain = {key: values[0] for key, values in _CHOICES.items()} | {"train.recompute": "none"}
    for key, off in plain.items():
        if best.settings.get(key, off) == off:
            continue
        values = _CHOICES.get(key, _RECOMPUTE)
        value = best.settings[key]
        before = values[values.index(value) - 1] if value in values else off
        other = index.get(_key({**best.settings, key: before}))
        if other is None:  # its weights and states alone do not fit, or a rule forbids it
            without = changed(sizes.cfg, {**best.settings, key: before})
            if refused(without):
                continue
            total = sizes.of(without, ranks).total
        else:
            total = other.footprint.total
        what = f"with {key}: {_word(before)} it would need {gb(total)}, "
        if total > card.usable:
            yield f"{key}: {_word(value)}, because {what}{gb(total - card.usable)} too much"
        elif other is not None:
            slower = other.seconds / best.seconds - 1
            yield f"{key}: {_word(value)}: {what}which fits, and take {100 * slower:+.1f} % time"


def _key(settings: Settings) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in sorted(settings.items()))


def _first(settings: Iterable[Setting], most: int = 3) -> tuple[Setting, ...]:
    return tuple(itertools.islice(settings, most))


def _exacter(best: Setting, fitting: list[Setting]) -> Iterator[Setting]:
    """The fastest setting for each way of rounding less than the best."""
    here, seen = _inexact(best.settings), set()
    for setting in sorted(fitting, key=lambda s: s.seconds):
        inexact = _inexact(setting.settings)
        if inexact == here or inexact in seen or any(a > b for a, b in zip(inexact, here, strict=True)):
            continue
        seen.add(inexact)
        yield setting


def _spread(ahead: list[Setting]) -> Iterator[Setting]:
    """The fastest, then each next one that needs clearly less; near neighbours add no information."""
    last = None
    for setting in ahead:
        if last is None or setting.footprint.total < 0.95 * last:
            last = setting.footprint.total
            yield setting


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
    return str(value)


def settings_of(cfg: Config) -> Settings:
    """The configured values of the settings that a proposal may change."""
    values = {key: value_of(cfg, key) for key in (*_CHOICES, "train.recompute", "train.micro_batch")}
    return {**values, "train.recompute": _named(dict(cfg.train.recompute))}


def gb(size: float) -> str:
    """Format bytes as GB (10^9 bytes)."""
    return f"{size / 1e9:.1f} GB" if abs(size) >= 1e8 else f"{size / 1e6:.1f} MB"
