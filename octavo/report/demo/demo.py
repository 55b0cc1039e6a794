"""The demo: trains a model in high precision and in FP8, judges one claim, writes the report, and asks the FP8 model.

A :class:`~octavo.report.demo.task.DemoTask` says what is trained: a tiny Qwen3-VL on handwritten digits
(:mod:`octavo.report.demo.handwriting`), or adapters of SmolLM2-135M (:mod:`octavo.report.demo.pretrained`). What a
demo can decide was measured before (:mod:`octavo.report.demo.power`).

All results are computed during the run. A second run in the same folder reuses finished parts.

    demo.yaml                        the configuration (yours to change and rerun)
    arms/    report/                 the trial: its run directories, and the page
    digits/  model/  answer.png      only of handwriting: the data, the untrained checkpoint, and a held-out image with
                                     the questions, the FP8 model's answers and the truth
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import Config, load_config_text
from octavo.report.demo.handwriting import HANDWRITING, STEPS
from octavo.report.demo.task import DemoAnswers, DemoTask, RunData
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trust_table import FAIL, PASS, UNDECIDED, WARN, Check
from octavo.report.run.page_parts import choose_unit, memory_total
from octavo.report.trial.compare import compare
from octavo.report.trial.judge import Verdict
from octavo.report.trial.report_page import Interview, computed_on

if TYPE_CHECKING:
    from rich.console import Console

MOST_LINES = 12  # of the last screen


def run(
    directory: str | Path = "demo",
    steps: int = STEPS,
    fresh: bool = False,
    console: Console | None = None,
    seed: int = 0,
    task: DemoTask = HANDWRITING,
) -> Verdict:
    """Write the inputs of ``task`` in ``directory``, train ``steps`` steps in high precision and as many in FP8, judge
    its claim, ask the FP8 model, and print the results.

    ``seed`` is of the first weights and of the order of the data. ``fresh`` trains the runs again. ``console`` is a
    rich console; None prints nothing. Raises ``ReportError`` if the folder holds a demo with other settings, and the
    errors of the functions that it calls.
    """
    if steps < 1:
        raise ReportError(f"steps={steps}: the demo needs at least one step")
    directory, started = Path(directory), time.monotonic()
    page = directory / "report" / "report.html"
    cfg = task.write_inputs(directory, steps, console, seed)
    if console is not None:
        print_introduction(console, task, cfg, page)
    answers: list[DemoAnswers] = []

    # Called before the page is written, which shows the answers.
    def ask(verdict: Verdict) -> Interview | None:
        run = next(run for run in verdict.data["arms"] if run["kind"] == "fp8")
        if run["failure"]:
            return None
        answers.append(task.ask(directory / "arms" / run["name"], directory))
        return answers[0].to_interview(run["label"])

    margin = task.power().margin
    verdict = compare(
        cfg, [task.recipe], directory, console=console, fresh=fresh, jobs=_jobs(), accuracy_margin=margin,
        loss_margin=margin, savings=False, claims=(task.claim,), announce=False, ask=ask,
    )  # fmt: skip
    if not answers:
        failure = next(run["failure"] for run in verdict.data["arms"] if run["kind"] == "fp8")
        raise ReportError(f"FP8 {task.recipe} failed: {failure}. The page: {page}")
    if console is not None:
        for line in summary(verdict, answers[0], directory, time.monotonic() - started, task):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return verdict


def _jobs() -> int:
    """Return how many runs train at the same time: one per CPU core, because a run of the demo has one thread; one on
    an accelerator."""
    from octavo.base import accelerator

    if accelerator.device_count():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_introduction(console: Console, task: DemoTask, cfg: Config, page: Path) -> None:
    """Print what is trained, what the trial can decide, and where its page will be."""
    chance = demo_chance(task, cfg)
    odds = f"If FP8 changes nothing, it passes with probability {chance} ({task.command} --power)."
    for line in (*task.describe(cfg), *([odds] if chance else []), f"The page: {page}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def demo_chance(task: DemoTask, cfg: Config) -> str:
    """Return the probability to pass that was recorded, or nothing if ``demo.yaml`` or the data are others."""
    shipped = load_config_text(task.read_configuration(), [f"run.seed={cfg.run.seed}"])
    used, usual = ((c.fp8, c.optimizer, c.train, c.lora, c.model.load_in_fp8) for c in (cfg, shipped))
    return task.power().shown_probability if used == usual and task.has_recorded_inputs(cfg) else ""


def summary(
    verdict: Verdict, answers: DemoAnswers, directory: Path, seconds: float, task: DemoTask = HANDWRITING
) -> list[str]:
    """Return the last lines to print, at most :data:`MOST_LINES`: the verdict, what was counted, and what to do."""
    high, fp8 = (next(run for run in verdict.data["arms"] if run["kind"] == kind) for kind in ("reference", "fp8"))
    # A task whose loss ends near zero does not describe it: such a loss says nothing about answers.
    dtype, claim = verdict.data["reference_dtype"], next(c for c in verdict.claims if c.name == task.claim)
    status, others = verdict.status, _others(verdict, task)
    result = task.results.get(claim.status, f"{claim.title[0].lower()}{claim.title[1:]} is not decided")
    lines = [f"{status.upper()}: {result.format(dtype=dtype)}"]
    if status != claim.status and others:
        lines = [f"{status.upper()}: {others[0].title}: {others[0].sentence}. It {lines[0].partition(': ')[2]}"]
    if claim.low is not None and claim.high is not None:
        lines[0] += f" ({task.describe_figures(claim, fp8, high, dtype)})"
    if claim.status == UNDECIDED:
        lines[0] += f": {claim.sentence}"
    gemms = next(check for check in verdict.checks if check.name == "fp8_gemms")
    lines.append(_describe_gemms(fp8) if gemms.status == PASS else f"{gemms.status.upper()}: {gemms.sentence}")
    totals = [memory_total(run["memory"]) for run in (fp8, high)]
    if all(totals):
        unit, size = choose_unit(max(totals))
        sizes = [f"{total / size:.1f}" for total in totals]
        lines.append(
            "What training keeps (weights, gradients, moments, activations, codes) takes "
            f"{sizes[0]} {unit}, {sizes[1]} in {dtype}."
        )
    end = task.describe_answers(answers, directory).splitlines()
    if computed_on(high["environment"]) == "cpu":
        end.append("On this CPU FP8 is emulated: speed needs a GPU.")
    end.append(f"{seconds:.0f} s. The page: {directory / 'report' / 'report.html'}")
    first, *rest = task.next_commands(directory, fp8["name"])
    end += [f"Next: {first}", *(f"      {command}" for command in rest)]
    shown = others[status != claim.status :][: min(3, MOST_LINES - len(lines) - len(end))]
    return [*lines, *(f"{check.status.upper()}: {check.title}: {check.sentence}" for check in shown), *end]


def _describe_gemms(fp8: RunData) -> str:
    """Return the sentence about the FP8 GEMMs of a run in which every planned one was counted."""
    recipes = [row["recipe"] for row in fp8["plan"]["rows"] if row["recipe"] is not None]
    counted = f"{fp8['proof'].get('fp8_gemms', 0):,} GEMMs counted in its first step."
    if any(recipe.get("fwd") == "bf16" for recipe in recipes):
        return f"All {len(recipes)} planned layers computed gradients in FP8, and the forward in BF16: {counted}"
    return f"All {len(recipes)} planned layers ran in FP8: {counted}"


def _others(verdict: Verdict, task: DemoTask) -> list[Check]:
    """Return the checks that neither passed nor are in the summary, the worst first."""
    checks = [check for check in verdict.checks if check.status in (FAIL, WARN, UNDECIDED)]
    return sorted(
        (c for c in checks if c.name not in (task.claim, "fp8_gemms")), key=lambda check: check.status != FAIL
    )


def exit_code(verdict: Verdict) -> int:
    """Return 1 if the verdict is fail, 3 if it is undecided, else 0."""
    return verdict.exit_code
