"""The search for the cause of a broken configuration: its runs and their order.

    1. Run the configuration, and high precision without savings. If the first is not worse by more than the margin,
    nothing is broken. 2. Find a minimal set that breaks a run (:func:`minimal_failing_set`), with runs as short as
    possible. 3. Remove one candidate of that set, and repeat the search while the rest is still broken; finally check
    all steps. 4. Check whether another recipe works for the layers of the removed GEMMs, so that they stay in FP8.

If many candidates each do a little harm, there is no small set. Then whole recipes, components, kinds of GEMMs and
features are tried instead, and the first change that works is the answer.

:func:`minimal_failing_set` finds a minimal set of candidates that fails, by binary search.

``fails(enabled)`` returns whether a run with these candidates enabled fails: it passes with none and fails with all.
Halving finds the shortest prefix of the candidates that fails, in ceil(log2 n) runs. Its last candidate is a culprit,
because the prefix without it passes. If the culprits so far fail without the others, the set is complete; otherwise the
search is repeated over the candidates that precede it, with the culprits found so far enabled. So k culprits cost at
most k ceil(log2 n) + k runs. This is the dichotomic search for a minimal unsatisfiable set (F. Hemery, C. Lecoutre, L.
Sais, F. Boussemart, Extracting MUCs from constraint networks, ECAI 2006), with runs as constraints.

It assumes that a failing set also fails with more candidates enabled. If that does not hold, each culprit is still one
whose removal, at that point, made a run pass.
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
from octavo.bisect.candidates import Candidate, Space, extra_features
from octavo.bisect.failure_criterion import MARGINS, Bar, By, shorten
from octavo.bisect.page import document, write
from octavo.bisect.search_result import (
    DIFFUSE,
    FOUND,
    SOUND,
    UNSOLVED,
    Answer,
    Line,
    brief,
    describe_figure,
    list_words,
)
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

MAX_SETS = 6
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
        margin: the fraction by which a run must be worse than high precision to be broken (0.02; by time 0.05).
        steps: maximum number of steps of a run, or None for ``train.steps``. The problem must occur in them.
        start: a checkpoint (``runs/first/milestones/step_200``) that all runs start from, with its optimizer; settings
            that store weights or states in fewer bytes are then off.
        console: a rich console, or None for no output.
        fresh: retrain all runs.

    Raises BisectError if there is nothing to search or high precision itself fails, and the errors of training that do
    not depend on the candidates: an invalid plan, data or model.
    """
    directory = Path(directory)
    if cfg.train.stages:
        raise BisectError(
            f"a search trains one stage, and the configuration has {len(cfg.train.stages)}. Name the "
            f"configuration of a stage: after training, {cfg.run.dir}/config.yaml is the last one's"
        )
    if fresh:
        _clear(directory)
    original = resolve_steps(resolve_recipe(cfg))
    cfg = _set_start(original, start)
    if own_recipe(cfg) == "off" and not enabled_savings(cfg) and not extra_features(cfg):
        raise BisectError(
            "the configuration already runs in high precision without memory savings; there is nothing to search"
        )
    # Runs of different lengths would run different parts of a schedule, so their losses are not comparable.
    has_schedule = any(rule.first is not None or rule.last is not None for rule in cfg.fp8.rules)
    if cfg.fp8.adapt is not None or has_schedule:
        raise BisectError(
            "a search compares fixed plans, but precision changes during this run "
            f"({'fp8.adapt' if cfg.fp8.adapt is not None else 'rules with first or last'}). Search with "
            f"{'fp8.adapt=false' if cfg.fp8.adapt is not None else 'rules without first and last'}"
        )
    if cfg.train.phase in BEYOND_SFT and by == "loss":
        raise BisectError(
            f"the losses of phase {cfg.train.phase} do not measure what is learned. Search "
            "with the same model and fp8 section in phase sft, or by time"
        )
    total = cfg.train.total_steps - fork_step(cfg)
    if total < 1 or (steps is not None and not 1 <= steps <= total):
        raise BisectError(f"steps={steps}: the run has {max(total, 0)} steps from its start (train.steps, --from)")
    check_same_files(cfg, directory)
    session = _Session(Trials(directory, _make_log(console)), by)
    answer = _search(cfg, session, by, MARGINS[by] if margin is None else margin, steps or total)
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
        """Run a configuration and return its figure."""
        before = self.trials.trained
        outcome = self.trials.outcome(cfg, bar.steps, words)
        value = bar.figure(outcome)
        if self.trials.trained == before:
            self.log(f"reused: {words}")
        self.lines.append(Line(words, outcome, value, value > bar.bar))
        self.log(f"  {describe_figure(self.by, value)}: {'broken' if value > bar.bar else 'works'}")
        return value

    def works(self, cfg: Config, bar: Bar, words: str) -> bool:
        """Return whether a change works; False if the model does not support it."""
        try:
            return self.figure(cfg, bar, words) <= bar.bar
        except PlanError as error:
            self.log(f"  not possible: {error}")
            return False


def _search(cfg: Config, session: _Session, by: By, margin: float, total: int) -> Answer:
    trials = session.trials
    unchanged = trials.outcome(cfg, total, "the unchanged configuration")
    plan = read_json_file(file := trials.directory / unchanged.name / "plan.json")
    if not plan:
        raise BisectError(f"the configuration fails before it has a plan: {unchanged.failure}")
    space = Space.of(cfg, plan, file)
    reference = trials.outcome(space.with_only([]), total, "high precision")
    full = Bar(by, reference, total, margin)
    # Many trials are needed: search over the fewest steps that show the failure; `full` confirms a change over all
    # steps.
    bar = shorten(unchanged, full)
    figure = bar.figure(unchanged)
    session.lines += [
        Line("high precision", reference, 0.0, False),
        Line("unchanged", unchanged, figure, figure > margin),
    ]
    session.log(f"unchanged: {describe_figure(by, figure)} over {bar.steps} steps; {len(space.candidates)} candidates")
    answer = Answer(SOUND, by, margin, bar.steps, len(space.candidates))
    if figure > margin:
        sets, out = _culprits(space, session, figure, bar, full)
        if sets:
            how, works = _smallest_change(space, session, out, full)
            answer = replace(answer, status=FOUND, sets=tuple(sets), out=tuple(out), how=how, works=works)
        else:
            changes = ((how, works) for how, works in _coarse_changes(space) if session.works(works, full, how))
            how, changed = next(changes, ("", None))
            answer = replace(answer, status=DIFFUSE if how else UNSOLVED, how=how, works=changed)
    return replace(answer, lines=tuple(session.lines), trained=trials.trained)


def _culprits(
    space: Space, session: _Session, figure: float, bar: Bar, full: Bar
) -> tuple[list[tuple[Candidate, ...]], list[Candidate]]:
    """Return (minimal sets that break a run, candidates to remove so that none does), or empty lists if there
    are too many culprits. ``figure``: the figure of the configuration over the steps of ``bar``."""
    sets: list[tuple[Candidate, ...]] = []
    removed: list[Candidate] = []
    while len(sets) < MAX_SETS:
        remaining = [c for c in space.candidates if c not in removed]
        try:
            culprits = minimal_failing_set(_failure_test(space, session, bar.halfway(figure)), remaining)
        except TooManyCulprits:
            break
        sets.append(tuple(culprits))
        removed.append(
            min(culprits, key=lambda candidate: (bool(candidate.gemm), candidate.flops))
        )  # the one with the fewest FLOPs
        session.log(f"found: {list_words(culprits)}")
        words, rest = f"without {list_words(removed)}", space.without(removed)
        figure = session.figure(rest, bar, words)
        if figure <= bar.bar and bar.steps < full.steps:  # later steps may have another fault
            bar = full
            figure = session.figure(rest, bar, f"{words}, all steps")
        if figure <= bar.bar:
            return sets, removed
    return [], []


def _failure_test(space: Space, session: _Session, bar: Bar) -> Any:
    return lambda on: session.figure(space.with_only(on), bar, f"with {brief(on)}") > bar.bar


def _smallest_change(space: Space, session: _Session, out: Sequence[Candidate], full: Bar) -> tuple[str, Config]:
    """Return (description, configuration) of the smallest change that works: another recipe for the layers of these
    GEMMs, or else the GEMMs in high precision."""
    features, gemms = ([c for c in out if bool(c.gemm) == is_gemm] for is_gemm in (False, True))
    if gemms and session.by == "loss":
        rest = replace(space, cfg=space.without(features)) if features else space
        layers = ", ".join(dict.fromkeys(candidate.name for candidate in gemms))
        for recipe in PER_TOKEN:
            how = f"{layers} in {recipe}" + (f", without {list_words(features)}" if features else "")
            if not space.has_recipe(gemms, recipe) and session.works(works := rest.in_recipe(gemms, recipe), full, how):
                return how, works
    return f"removing {list_words(out)}", space.without(out)


def _coarse_changes(space: Space) -> Iterator[tuple[str, Config]]:
    """Yield changes of many layers: recipes, then components and kinds of GEMMs in high precision, those with the
    fewest FLOPs first, then features."""
    all_gemms = list(space.gemms)
    for recipe in PER_TOKEN:
        if not space.has_recipe(all_gemms, recipe):
            yield f"{recipe} everywhere", space.in_recipe(all_gemms, recipe)
    components = dict.fromkeys(candidate.component for candidate in all_gemms)
    parts = [(name, [c for c in all_gemms if c.component == name]) for name in components]
    parts += [(f"{gemm} everywhere", [c for c in all_gemms if c.gemm == gemm]) for gemm in GEMMS]
    for words, gemms in sorted(parts, key=lambda part: sum(candidate.flops for candidate in part[1])):
        if 0 < len(gemms) < len(all_gemms):
            yield f"{words} in high precision", space.without(gemms)
    if features := [candidate for candidate in space.candidates if not candidate.gemm]:
        yield f"removing {list_words(features)}", space.without(features)


def _set_start(cfg: Config, start: str | Path | None) -> Config:
    """Return the configuration with the start of its runs: its weights, or a checkpoint that high precision can
    resume."""
    if start is None and cfg.run.fork is None:
        return cfg
    fork = Path(start or str(cfg.run.fork)).resolve()
    if not fork.is_dir():
        raise BisectError(f"{fork} is not a checkpoint: the folder does not exist")
    return with_plain_storage(cfg).model_copy(
        update={"run": cfg.run.model_copy(update={"fork": str(fork), "start_from": None})}
    )


def _clear(directory: Path) -> None:
    """Delete the results of an earlier search; only folders that a search created."""
    for folder in sorted((directory / "runs").glob("*")):
        if (folder / DONE).is_file() or (folder / "config.yaml").is_file():
            shutil.rmtree(folder)
    for name in ("files.json", "bisect.json", "bisect.html", "loss.png", "gap.png", "works.yaml"):
        (directory / name).unlink(missing_ok=True)


def _make_log(console: Any) -> Any:
    if console is None:
        return lambda text: None
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


class TooManyCulprits(Exception):
    """The minimal set has more culprits than allowed: many candidates each do a little harm. ``failing_prefix`` is the
    shortest prefix of the candidates that fails."""

    def __init__(self, failing_prefix: Sequence[object]) -> None:
        super().__init__(f"{len(failing_prefix)} candidates break the run together")
        self.failing_prefix = failing_prefix


def minimal_failing_set(
    fails: Callable[[Collection[T]], bool], candidates: Sequence[T], max_culprits: int = 4
) -> list[T]:
    """Return a minimal set of candidates that fails, in the order in which they were found.

    Raises TooManyCulprits if it would have more than ``max_culprits``.
    """
    culprits: list[T] = []
    remaining = list(candidates)
    first = len(remaining)
    while not culprits or (remaining and not fails(culprits)):
        if len(culprits) == max_culprits:
            raise TooManyCulprits(candidates[:first])
        end = _shortest_failing_prefix(lambda n: fails([*remaining[:n], *culprits]), len(remaining))  # noqa: B023
        first = end if not culprits else first
        culprits.append(remaining[end - 1])
        remaining = remaining[: end - 1]
    return culprits


def _shortest_failing_prefix(fails: Callable[[int], bool], known: int) -> int:
    """Return the smallest count that fails, between 0, which passes, and `known`, which fails."""
    passes, failing = 0, known
    while failing - passes > 1:
        middle = (passes + failing) // 2
        if fails(middle):
            failing = middle
        else:
            passes = middle
    return failing
