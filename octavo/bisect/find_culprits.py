"""The search for the cause of a broken configuration: its runs and their order.

    1. The configuration, and high precision without savings. If it is not worse by the margin, there is nothing to
    find. 2. The smallest set that breaks a run (:func:`smallest`), by runs as short as the harm allows. 3. One of that
    set is removed, and the search repeats while the rest is still broken; finally over all steps. 4. Whether another
    recipe works for the layers of the removed GEMMs, so that they stay in FP8.

If many candidates each do a little harm, there is no small set: then whole recipes, components, kinds of GEMMs and
features are tried instead, and the first change that works is the answer.

:func:`smallest` finds a smallest set of candidates that fails, with as few runs as halving needs.

``fails(on)`` is whether a run with these candidates on fails: it passes with none and fails with all. Halving finds the
shortest prefix of the candidates that fails, in ceil(log2 n) runs: its last candidate is a culprit, because the prefix
without it passes. If the culprits so far fail without the others, they are complete; else the search repeats over the
candidates before, with the culprits on. So k culprits cost k ceil(log2 n) + k runs. This is the dichotomic search for a
minimal unsatisfiable set (F. Hemery, C. Lecoutre, L. Sais, F. Boussemart, Extracting MUCs from constraint networks,
ECAI 2006), with runs for constraints.

It assumes that a failing set also fails with more candidates on. If that does not hold, each culprit is still one whose
removal, at that point, made a run pass.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from octavo.base import atomic_write
from octavo.base.recipe_specs import PER_TOKEN
from octavo.bisect.candidates import Candidate, Space, extras
from octavo.bisect.failure_criterion import MARGINS, Bar, By, short
from octavo.bisect.page import document, write
from octavo.bisect.search_result import DIFFUSE, FOUND, SOUND, UNSOLVED, Answer, Line, brief, named, said
from octavo.bisect.short_runs import DONE, BisectError, Trials, fork_step
from octavo.config import Config, to_yaml
from octavo.config.sections.rl import BEYOND_SFT
from octavo.fp8 import PlanError
from octavo.fp8.arithmetic import GEMMS
from octavo.report.evidence.run_reader import read_json_file
from octavo.report.trial.memory_savings import enabled_savings, with_plain_storage
from octavo.report.trial.reuse import check_same_files
from octavo.report.trial.runs import own_recipe
from octavo.train.setup.resolve_config import resolve_recipe, resolve_steps

MOST_SETS = 6
T = TypeVar("T")


def bisect(
    cfg: Config,
    directory: str | Path,
    by: By = "loss",
    margin: float | None = None,
    steps: int | None = None,
    start: str | Path | None = None,
    console: Any = None,
    fresh: bool = False,
) -> Answer:
    """Find what breaks the run of a configuration.

    Args:
        directory: for the runs, ``bisect.json``, ``bisect.html`` and ``works.yaml``; an interrupted search continues.
        by: the criterion, "loss" or "time" of a step. A run that raises or whose loss is not finite is always broken.
        margin: the share by which a run must be worse than high precision to be broken (0.02; by time 0.05).
        steps: the most steps of a run; None: all of ``train.steps``. The harm must appear in them.
        start: a checkpoint (``runs/first/milestones/step_200``) from which all runs continue, with its optimizer;
        settings
            that store weights or states in fewer bytes are then off.
        console: a rich console (None: silent).
        fresh: train all runs again.

    Raises BisectError if there is nothing to search or high precision itself fails, and the errors of training that do
    not depend on the candidates: an invalid plan, data or model.
    """
    directory = Path(directory)
    if fresh:
        _clear(directory)
    original = resolve_steps(resolve_recipe(cfg))
    cfg = _begins(original, start)
    if own_recipe(cfg) == "off" and not enabled_savings(cfg) and not extras(cfg):
        raise BisectError("the configuration is high precision without savings: nothing in it could break a run")
    # Runs of other lengths would run other parts of a schedule, so their losses could not be compared.
    timed = any(rule.first is not None or rule.last is not None for rule in cfg.fp8.rules)
    if cfg.fp8.adapt is not None or timed:
        raise BisectError(
            "a search compares fixed plans, and here precision changes during the run "
            f"({'fp8.adapt' if cfg.fp8.adapt is not None else 'rules with first or last'}). Search without: "
            f"{'fp8.adapt=false' if cfg.fp8.adapt is not None else 'remove the spans of the rules'}"
        )
    if cfg.train.phase in BEYOND_SFT and by == "loss":
        raise BisectError(
            f"the losses of phase {cfg.train.phase} do not measure what is learned. Search the "
            "same model and fp8 section in phase sft, or by time"
        )
    total = cfg.train.total_steps - fork_step(cfg)
    if total < 1 or (steps is not None and not 1 <= steps <= total):
        raise BisectError(f"steps={steps}: the run has {max(total, 0)} from where it begins (train.steps, --from)")
    check_same_files(cfg, directory)
    session = _Session(Trials(directory, _sayer(console)), by)
    answer = _answer(cfg, session, by, MARGINS[by] if margin is None else margin, steps or total)
    if answer.works is not None:
        works = answer.works.model_copy(update={"run": original.run, "data": original.data})
        atomic_write.write_text(directory / "works.yaml", to_yaml(works))
    atomic_write.write_text(directory / "bisect.json", json.dumps(document(answer), indent=1, allow_nan=False) + "\n")
    write(answer, directory)
    return answer


class _Session:
    """Runs configurations and records their results."""

    def __init__(self, trials: Trials, by: By) -> None:
        self.trials, self.by, self.log = trials, by, trials.log
        self.lines: list[Line] = []

    def figure(self, cfg: Config, bar: Bar, words: str) -> float:
        """The figure of a configuration's run."""
        before = self.trials.trained
        outcome = self.trials.outcome(cfg, bar.steps, words)
        value = bar.figure(outcome)
        if self.trials.trained == before:
            self.log(f"read: {words}")
        self.lines.append(Line(words, outcome, value, value > bar.bar))
        self.log(f"  {said(self.by, value)}: {'broken' if value > bar.bar else 'works'}")
        return value

    def works(self, cfg: Config, bar: Bar, words: str) -> bool:
        """Whether a change works; False if the model cannot have it."""
        try:
            return self.figure(cfg, bar, words) <= bar.bar
        except PlanError as error:
            self.log(f"  not possible: {error}")
            return False


def _answer(cfg: Config, session: _Session, by: By, margin: float, total: int) -> Answer:
    trials = session.trials
    whole = trials.outcome(cfg, total, "the unchanged configuration")
    plan = read_json_file(trials.directory / whole.name / "plan.json")
    if not plan:
        raise BisectError(f"the configuration fails before it has a plan: {whole.failure}")
    space = Space.of(cfg, plan)
    reference = trials.outcome(space.with_only([]), total, "high precision")
    full = Bar(by, reference, total, margin)
    bar = short(whole, full)
    seen = bar.figure(whole)
    session.lines += [Line("high precision", reference, 0.0, False), Line("unchanged", whole, seen, seen > margin)]
    session.log(f"unchanged: {said(by, seen)} over {bar.steps} steps; {len(space.candidates)} candidates")
    answer = Answer(SOUND, by, margin, bar.steps, len(space.candidates))
    if seen > margin:
        sets, out = _culprits(space, session, seen, bar, full)
        if sets:
            how, works = _mildest(space, session, out, full)
            answer = replace(answer, status=FOUND, sets=tuple(sets), out=tuple(out), how=how, works=works)
        else:
            changes = ((how, works) for how, works in _coarse(space) if session.works(works, full, how))
            how, changed = next(changes, ("", None))
            answer = replace(answer, status=DIFFUSE if how else UNSOLVED, how=how, works=changed)
    return replace(answer, lines=tuple(session.lines), trained=trials.trained)


def _culprits(
    space: Space, session: _Session, seen: float, bar: Bar, full: Bar
) -> tuple[list[tuple[Candidate, ...]], list[Candidate]]:
    """(smallest sets that break a run, candidates to remove so that none does); empty if they are not few. ``seen``:
    the figure of the configuration over the steps of ``bar``."""
    sets: list[tuple[Candidate, ...]] = []
    out: list[Candidate] = []
    while len(sets) < MOST_SETS:
        left = [one for one in space.candidates if one not in out]
        try:
            culprits = smallest(_question(space, session, bar.half(seen)), left)
        except Diffuse:
            break
        sets.append(tuple(culprits))
        out.append(min(culprits, key=lambda one: (bool(one.gemm), one.flops)))  # the cheapest one to lose
        session.log(f"found: {named(culprits)}")
        words, rest = f"without {named(out)}", space.without(out)
        seen = session.figure(rest, bar, words)
        if seen <= bar.bar and bar.steps < full.steps:  # another fault may appear in later steps
            bar = full
            seen = session.figure(rest, bar, f"{words}, all steps")
        if seen <= bar.bar:
            return sets, out
    return [], []


def _question(space: Space, session: _Session, bar: Bar) -> Any:
    return lambda on: session.figure(space.with_only(on), bar, f"with {brief(on)}") > bar.bar


def _mildest(space: Space, session: _Session, out: Sequence[Candidate], full: Bar) -> tuple[str, Config]:
    """(words, configuration) of the smallest change that works: another recipe for the layers of these GEMMs, else the
    GEMMs in high precision."""
    features, gemms = ([one for one in out if bool(one.gemm) == of] for of in (False, True))
    if gemms and session.by == "loss":
        rest = replace(space, cfg=space.without(features)) if features else space
        layers = ", ".join(dict.fromkeys(one.name for one in gemms))
        for recipe in PER_TOKEN:
            how = f"{layers} in {recipe}" + (f", without {named(features)}" if features else "")
            if not space.has_recipe(gemms, recipe) and session.works(works := rest.in_recipe(gemms, recipe), full, how):
                return how, works
    return f"removing {named(out)}", space.without(out)


def _coarse(space: Space) -> Iterator[tuple[str, Config]]:
    """Changes of many layers: recipes, then components and kinds of GEMMs in high precision, those with the fewest
    FLOPs first, then features."""
    everything = list(space.gemms)
    for recipe in PER_TOKEN:
        if not space.has_recipe(everything, recipe):
            yield f"{recipe} everywhere", space.in_recipe(everything, recipe)
    components = dict.fromkeys(one.component for one in everything)
    parts = [(name, [one for one in everything if one.component == name]) for name in components]
    parts += [(f"{gemm} everywhere", [one for one in everything if one.gemm == gemm]) for gemm in GEMMS]
    for words, gemms in sorted(parts, key=lambda part: sum(one.flops for one in part[1])):
        if 0 < len(gemms) < len(everything):
            yield f"{words} in high precision", space.without(gemms)
    if features := [one for one in space.candidates if not one.gemm]:
        yield f"removing {named(features)}", space.without(features)


def _begins(cfg: Config, start: str | Path | None) -> Config:
    """The configuration with the starting point of its runs: its weights, or a checkpoint that high precision can
    resume."""
    if start is None and cfg.run.fork is None:
        return cfg
    fork = Path(start or str(cfg.run.fork)).resolve()
    if not fork.is_dir():
        raise BisectError(f"{fork} is not a checkpoint: there is no such folder")
    return with_plain_storage(cfg).model_copy(
        update={"run": cfg.run.model_copy(update={"fork": str(fork), "start_from": None})}
    )


def _clear(directory: Path) -> None:
    """Delete the results of an earlier search, and only folders that it created."""
    for folder in sorted((directory / "runs").glob("*")):
        if (folder / DONE).is_file() or (folder / "config.yaml").is_file():
            shutil.rmtree(folder)
    for name in ("files.json", "bisect.json", "bisect.html", "loss.png", "gap.png", "works.yaml"):
        (directory / name).unlink(missing_ok=True)


def _sayer(console: Any) -> Any:
    if console is None:
        return lambda text: None
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


class Diffuse(Exception):
    """More culprits are needed together than the limit: many candidates each do a little harm. ``beginning``: the
    shortest prefix of the candidates that fails."""

    def __init__(self, beginning: Sequence[object]) -> None:
        super().__init__(f"{len(beginning)} together")
        self.beginning = beginning


def smallest(fails: Callable[[Collection[T]], bool], candidates: Sequence[T], most: int = 4) -> list[T]:
    """A minimal set of candidates that fails, in the order in which they were found.

    Raises Diffuse if it would have more than ``most``.
    """
    culprits: list[T] = []
    left = list(candidates)
    first = len(left)
    while not culprits or (left and not fails(culprits)):
        if len(culprits) == most:
            raise Diffuse(candidates[:first])
        end = _shortest(lambda count: fails([*left[:count], *culprits]), len(left))  # noqa: B023  called at once
        first = end if not culprits else first
        culprits.append(left[end - 1])
        left = left[: end - 1]
    return culprits


def _shortest(fails: Callable[[int], bool], known: int) -> int:
    """The smallest count that fails, between 0, which passes, and `known`, which fails."""
    passes, failing = 0, known
    while failing - passes > 1:
        middle = (passes + failing) // 2
        if fails(middle):
            failing = middle
        else:
            passes = middle
    return failing
