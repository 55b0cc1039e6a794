"""The demo: trains a tiny Qwen3-VL on handwritten digits in high precision and in FP8, judges its accuracy, writes the
report, and asks the FP8 model. What it can decide was measured before (:mod:`octavo.report.demo.power`).

All results are computed during the run. A second run in the same folder reuses finished parts.

    digits/  model/  demo.yaml       the data, the untrained checkpoint, the configuration (yours to change and rerun)
    arms/    report/                 the trial: its run directories, and the page
    answer.png                       a held-out image with the questions, the FP8 model's answers and the truth
"""

from __future__ import annotations

import base64
import io
import json
import os
import time
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import Config, load_config, load_config_text
from octavo.report.demo import power
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_claims import ACCURACY
from octavo.report.evidence.trust_table import FAIL, PASS, UNDECIDED, WARN, Check, percent
from octavo.report.run.page_parts import choose_unit, memory_total
from octavo.report.trial.compare import compare
from octavo.report.trial.judge import Verdict
from octavo.report.trial.memory_savings import enabled_savings
from octavo.report.trial.report_page import Interview, computed_on

if TYPE_CHECKING:
    from PIL.Image import Image

RECIPE = "blockwise"
STEPS = 500
ROW = 0  # the held-out image of the questions


@dataclass(frozen=True)
class Answer:
    """One question about the image, the answer of the FP8 model, and the truth."""

    question: str
    answer: str
    truth: str

    @property
    def right(self) -> bool:
        return self.answer == self.truth


@dataclass(frozen=True)
class DemoAnswers:
    """A held-out image, the answers to its questions, and the number of FP8 GEMMs that computed them."""

    image: Image
    answers: tuple[Answer, ...]
    gemms: int

    def to_interview(self, label: str) -> Interview:
        """Return what the page of the trial shows; ``label``: of the run that answered."""
        out = io.BytesIO()
        self.image.save(out, "PNG")
        picture = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        return Interview(picture, label, [asdict(answer) | {"right": answer.right} for answer in self.answers])


def run(
    directory: str | Path = "demo", steps: int = STEPS, fresh: bool = False, console: Any = None, seed: int = 0
) -> Verdict:
    """Write the data set and the model in ``directory``, train it for ``steps`` steps in high precision and as many in
    FP8, judge its accuracy, ask the FP8 model, and print the results.

    ``seed`` is of the model's first weights and of the order of the data. ``fresh`` trains the runs again. ``console``
    is a rich console; None prints nothing. Raises ``ReportError`` if the folder holds a demo with other settings, and
    the errors of the functions that it calls.
    """
    if steps < 1:
        raise ReportError(f"steps={steps}: the demo needs at least one step")
    directory, started = Path(directory), time.monotonic()
    page = directory / "report" / "report.html"
    cfg = write_inputs(directory, steps, console, seed)
    if console is not None:
        print_introduction(console, cfg, page)
    answers: list[DemoAnswers] = []

    # Called before the page is written, which shows the answers.
    def ask(verdict: Verdict) -> Interview | None:
        run = next(run for run in verdict.data["arms"] if run["kind"] == "fp8")
        if run["failure"]:
            return None
        answers.append(ask_model(directory / "arms" / run["name"], directory / "digits" / "test.json", ROW))
        save_figure(answers[0], directory / "answer.png")
        return answers[0].to_interview(run["label"])

    verdict = compare(
        cfg, [RECIPE], directory, console=console, fresh=fresh, jobs=_jobs(), accuracy_margin=power.MARGIN,
        savings=False, claims=(ACCURACY,), announce=False, ask=ask,
    )  # fmt: skip
    if not answers:
        failure = next(run["failure"] for run in verdict.data["arms"] if run["kind"] == "fp8")
        raise ReportError(f"FP8 {RECIPE} failed: {failure}. The page: {page}")
    if console is not None:
        for line in summary(verdict, answers[0], directory, time.monotonic() - started):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return verdict


def _jobs() -> int:
    """Return how many runs train at the same time: one per CPU core, because a run of the demo has one thread; one on
    an accelerator."""
    from octavo.base import accelerator

    if accelerator.device_count():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def print_introduction(console: Any, cfg: Config, page: Path) -> None:
    """Print what is trained, what the trial can decide, and where its page will be."""
    chance = demo_chance(cfg)
    lines = [
        f"A tiny Qwen3-VL learns to read handwriting, {cfg.train.steps} steps in high precision and the same in FP8 "
        f"({', '.join([RECIPE, *(saving.words for saving in enabled_savings(cfg))])}).",
        "Then both answer questions about held-out handwriting. Pass: FP8 loses at most "
        f"{100 * power.MARGIN:g} points (95 % interval).",
        *([f"If FP8 changes nothing, it passes with probability {chance} (octavo demo --power)."] if chance else []),
        f"The page: {page}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def demo_chance(cfg: Config) -> str:
    """Return the probability to pass that was recorded, or nothing if ``demo.yaml`` was changed."""
    shipped = load_config_text(_configuration(), [f"run.seed={cfg.run.seed}"])
    used, usual = ((each.fp8, each.optimizer, each.train, each.lora) for each in (cfg, shipped))
    return power.read().shown_probability if used == usual else ""


def summary(verdict: Verdict, answers: DemoAnswers, directory: Path, seconds: float) -> list[str]:
    """Return the last lines to print, at most twelve: the verdict, what was counted, and what to do next."""
    high, fp8 = (next(run for run in verdict.data["arms"] if run["kind"] == kind) for kind in ("reference", "fp8"))
    # Losses are not among them: near zero they say nothing about answers.
    dtype, claim = verdict.data["reference_dtype"], next(c for c in verdict.claims if c.name == ACCURACY)
    results = {
        PASS: f"reads handwriting as well as {dtype}",
        FAIL: f"reads handwriting worse than {dtype}",
        WARN: f"reads handwriting better than {dtype} by more than the margin",
    }
    status, others = verdict.status, _others(verdict)
    lines = [f"{status.upper()}: {results.get(claim.status, 'accuracy is not decided')}"]
    if status != claim.status and others:
        lines = [f"{status.upper()}: {others[0].title}: {others[0].sentence}. It {lines[0].partition(': ')[2]}"]
    if claim.low is not None and claim.high is not None:
        shares = [percent(run["eval"]["exact_match"], 1) for run in (fp8, high)]
        lines[0] += (
            f" ({shares[0]} of the answers are right, {shares[1]} in {dtype}; 95 %: {100 * claim.low:+.1f} to "
            f"{100 * claim.high:+.1f} points, margin {100 * power.MARGIN:g})"
        )
    if claim.status == UNDECIDED:
        lines[0] += f": {claim.sentence}"
    layers = sum(row["recipe"] is not None for row in fp8["plan"]["rows"])
    gemms = next(check for check in verdict.checks if check.name == "fp8_gemms")
    counted = f"All {layers} planned layers ran in FP8: {fp8['proof'].get('fp8_gemms', 0):,} GEMMs counted."
    lines.append(counted if gemms.status == PASS else f"{gemms.status.upper()}: {gemms.sentence}")
    totals = [memory_total(run["memory"]) for run in (fp8, high)]
    if all(totals):
        unit, size = choose_unit(max(totals))
        sizes = [f"{total / size:.1f}" for total in totals]
        lines.append(
            "What training keeps (weights, gradients, moments, activations, codes) takes "
            f"{sizes[0]} {unit}, {sizes[1]} in {dtype}."
        )
    shown = others[status != claim.status :][:3]
    lines += [f"{check.status.upper()}: {check.title}: {check.sentence}" for check in shown]
    replies = ", ".join(f"{a.question} {a.answer or '(nothing)'}" for a in answers.answers)
    right = sum(answer.right for answer in answers.answers)
    lines.append(f"Asked about {directory / 'answer.png'}: {replies} ({right} of {len(answers.answers)} right).")
    if computed_on(high["environment"]) == "cpu":
        lines.append("On this CPU FP8 is emulated: speed needs a GPU.")
    lines.append(f"{seconds:.0f} s. The page: {directory / 'report' / 'report.html'}")
    image = directory / "digits" / "images" / "test" / "00001.png"
    lines.append(f'Next: octavo generate {directory / "arms" / fp8["name"]} --image {image} --prompt "First?"')
    lines.append(f"      octavo plan {directory / 'demo.yaml'}")
    return lines


def _others(verdict: Verdict) -> list[Check]:
    """Return the checks that neither passed nor are in the summary, the worst first."""
    checks = [check for check in verdict.checks if check.status in (FAIL, WARN, UNDECIDED)]
    return sorted((c for c in checks if c.name not in (ACCURACY, "fp8_gemms")), key=lambda check: check.status != FAIL)


def exit_code(verdict: Verdict) -> int:
    """Return 1 if the verdict is fail, 3 if it is undecided, else 0."""
    return verdict.exit_code


def write_inputs(directory: Path, steps: int, console: Any, seed: int = 0) -> Config:
    """Write digits, the untrained checkpoint and ``demo.yaml``; existing files must be the same."""
    from octavo.data.builtin import digits
    from octavo.models import ModelError
    from octavo.models.tiny import tiny

    directory.mkdir(parents=True, exist_ok=True)
    digits.write(directory / "digits", console=console)
    texts = _tokenizer_texts(directory / "digits" / "train.json")
    try:
        tiny.write("qwen3_vl", directory / "model", seed=seed, texts=texts)
    except ModelError as error:
        raise ReportError(
            f"{directory} has a demo of another seed or version; name another folder with --dir ({error})"
        ) from error
    file = directory / "demo.yaml"
    if not file.is_file():
        file.write_text(_configuration(), encoding="utf-8")
    return load_config(file, [f"train.steps={steps}", f"run.seed={seed}"])


def _configuration() -> str:
    return resources.files(__package__).joinpath("demo.yaml").read_text(encoding="utf-8")


def _tokenizer_texts(file: Path) -> list[str]:
    """Return the texts of the conversations for the tokenizer, so that questions and digits become single tokens."""
    rows = json.loads(file.read_text(encoding="utf-8"))[:200]
    return [turn["value"].replace("<image>", "") for row in rows for turn in row["conversations"]]


def ask_model(run: Path, file: Path, number: int) -> DemoAnswers:
    """Ask the model of a run, in FP8 as it was trained, every question of a held-out row.

    All questions form one conversation: each follows the model's earlier answers, right or wrong.
    """
    from octavo import fp8, generation, train
    from octavo.data.rows import image_refs

    row = json.loads(file.read_text(encoding="utf-8"))[number]
    image = image_refs.load(file.parent / row["image"])
    model, processor, _ = train.load_run(run)
    turns, answers, messages = row["conversations"], [], []
    with fp8.count_gemms() as counts:
        for question_turn, answered in zip(turns[::2], turns[1::2], strict=True):
            question = question_turn["value"].replace("<image>", "").strip()
            parts: list[dict[str, str]] = [{"type": "text", "text": question}]
            if "<image>" in question_turn["value"]:
                parts.insert(0, {"type": "image"})
            messages.append({"role": "user", "content": parts})
            greedy = generation.Sampling(4, temperature=0)
            answer = generation.answers(model, processor, [(messages, [image])], greedy)[0][0]
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            answers.append(Answer(question, answer, answered["value"]))
    return DemoAnswers(image, tuple(answers), sum(counts.values()))


def save_figure(interview: DemoAnswers, path: Path) -> None:
    """Save a figure of the image with the questions, the answers and the truth."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    from octavo.report.run.plots import PALETTE, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.25])
        left.imshow(np.asarray(interview.image.convert("L")), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        for axes in (left, right):
            axes.set_axis_off()
        right.set(xlim=(0, 1), ylim=(0, 1))
        for column, word in ((0.02, "question"), (0.42, "FP8 model"), (0.78, "truth")):
            right.text(column, 0.93, word, color=PALETTE["soft"], fontsize=10)
        for number, answer in enumerate(interview.answers):
            height = 0.76 - 0.8 * number / max(len(interview.answers), 1)
            right.text(0.02, height, answer.question, fontsize=13)
            color = PALETTE["good" if answer.right else "bad"]
            right.text(0.42, height, answer.answer or "(nothing)", fontsize=15, fontweight="bold", color=color)
            right.text(0.78, height, answer.truth, fontsize=15)
        figure.savefig(path, dpi=150)
