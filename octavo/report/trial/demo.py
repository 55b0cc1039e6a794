"""The demo: trains a tiny Qwen3-VL on handwritten digits, runs the trial, writes the report, and asks the FP8 model.

All results are computed during the run. A second run in the same folder reuses finished parts.

    digits/  model/  demo.yaml       the data, the untrained checkpoint, the configuration (yours to change and rerun)
    arms/    report/                 the trial: its run directories, and the page
    answer.png                       a held-out image with the questions, the FP8 model's answers and the truth
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import Config, load_config
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trust_table import FAIL, UNDECIDED, percent
from octavo.report.trial.compare import compare
from octavo.report.trial.judge import Verdict
from octavo.report.trial.runs import make_runs

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.text import Text

RECIPE = "blockwise"
ACCURACY_MARGIN = 0.02  # with 355 different digits one point cannot be resolved
SHADES = " ░▒▓█"
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


def run(directory: str | Path = "demo", steps: int = 500, fresh: bool = False, console: Any = None) -> Verdict:
    """Write the data set and the model in ``directory``, run the trial of ``steps`` steps, ask the FP8 model, and print
    the results.

    ``fresh`` trains the runs again. ``console`` is a rich console; None prints nothing. Raises ``ReportError`` if the
    folder holds a demo with other settings, and the errors of the functions that it calls.
    """
    if steps < 1:
        raise ReportError(f"steps={steps}: the demo needs at least one step")
    directory, started = Path(directory), time.monotonic()
    clock = Clock()
    cfg = write_inputs(directory, steps, console)
    clock.record("data and model")
    verdict = compare(
        cfg, [RECIPE], directory, console=console, fresh=fresh, jobs=_jobs(), accuracy_margin=ACCURACY_MARGIN
    )
    clock.record("trial")
    failure = next(run["failure"] for run in verdict.data["arms"] if run["kind"] == "fp8")
    if failure:
        raise ReportError(f"FP8 {RECIPE} failed: {failure}. Report: {directory / 'report' / 'report.html'}")
    trained = next(run for run in make_runs(cfg, [RECIPE], directory) if run.kind == "fp8")
    interview = ask_model(Path(trained.cfg.run.dir), directory / "digits" / "test.json", ROW)
    save_figure(interview, directory / "answer.png")
    clock.record("question")
    if console is not None:
        print_answers(console, interview, directory)
        print_summary(console, verdict, directory, clock, time.monotonic() - started)
    return verdict


def _jobs() -> int:
    """Return how many runs train at the same time: one per CPU core, because a run of the demo has one thread; one on
    an accelerator."""
    from octavo.base import accelerator

    if accelerator.device_count():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exit_code(verdict: Verdict) -> int:
    """Return 1 if the verdict is fail, 3 if the accuracy is undecided, else 0. Loss claims do not count: six minutes of
    training are too short to decide them."""
    if verdict.status == FAIL:
        return 1
    accuracy = next((claim.status for claim in verdict.claims if claim.name == "accuracy"), UNDECIDED)
    return 3 if accuracy == UNDECIDED else 0


class Clock:
    """Measures seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def record(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now


def write_inputs(directory: Path, steps: int, console: Any) -> Config:
    """Write digits, the untrained checkpoint and ``demo.yaml``; existing files must be the same."""
    from octavo.data.builtin import digits
    from octavo.models.tiny import tiny

    directory.mkdir(parents=True, exist_ok=True)
    digits.write(directory / "digits", console=console)
    tiny.write("qwen3_vl", directory / "model", texts=_tokenizer_texts(directory / "digits" / "train.json"))
    file = directory / "demo.yaml"
    if not file.is_file():
        file.write_text(resources.files(__package__).joinpath("demo.yaml").read_text(encoding="utf-8"))
    return load_config(file, [f"train.steps={steps}"])


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


def render_image(image: Image, colour: bool) -> Text:
    """Render a grey image as terminal text: in colour two pixels per half block, otherwise shades, two columns per
    pixel."""
    import numpy as np
    from rich.text import Text

    grey = np.asarray(image.convert("L"))
    text = Text()
    if not colour:
        for line in grey:
            text.append("".join(SHADES[int(value) * (len(SHADES) - 1) // 255] * 2 for value in line) + "\n")
        return text
    wide = grey.repeat(2, axis=0).repeat(2, axis=1)
    for upper, lower in zip(wide[::2], wide[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            text.append("▀", style=f"rgb({above},{above},{above}) on rgb({below},{below},{below})")
        text.append("\n")
    return text


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


def print_answers(console: Any, interview: DemoAnswers, directory: Path) -> None:
    """Print the image and the conversation."""
    from rich.table import Table

    console.print("\nThe FP8 model answers questions about a held-out image:", highlight=False)
    console.print(render_image(interview.image, colour=console.color_system is not None and console.is_terminal))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for word in ("question", "FP8 model", "truth", ""):
        table.add_column(word)
    for answer in interview.answers:
        mark = "[green]right[/]" if answer.right else "[red]wrong[/]"
        table.add_row(answer.question, answer.answer or "(nothing)", answer.truth, mark)
    console.print(table)
    message = f"Computed with {interview.gemms} FP8 GEMMs; saved as {directory / 'answer.png'}"
    console.print(message, highlight=False)


def print_summary(console: Any, verdict: Verdict, directory: Path, clock: Clock, seconds: float) -> None:
    """Print the verdict, both accuracies, the seconds of each stage, and the path of the report."""
    console.print()
    for run in verdict.data["arms"]:
        right = (run["eval"] or {}).get("exact_match")
        shown = "not evaluated" if right is None else f"{percent(right, 1)} of held-out questions"
        console.print(f"  {run['label']:<24} loss {run['last_loss']:.4f}  {shown}", highlight=False)
    stages = ", ".join(f"{name} {spent:.0f} s" for name, spent in clock.seconds.items())
    console.print()
    for line in verdict.lines:
        console.print(line, highlight=False, markup=False)
    console.print(f"{seconds:.0f} s ({stages}). Report: {directory / 'report' / 'report.html'}", highlight=False)
