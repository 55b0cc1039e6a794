"""The demo's own task: a tiny Qwen3-VL learns to read handwritten digits, which the package writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import Config
from octavo.report.demo import power
from octavo.report.demo.task import CONFIGURATION, Answer, DemoAnswers, DemoTask, RunData
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_claims import ACCURACY
from octavo.report.evidence.trust_table import FAIL, PASS, WARN, Check, percent
from octavo.report.trial.memory_savings import enabled_savings

if TYPE_CHECKING:
    from rich.console import Console

MARGIN = 0.032
"""How many answers FP8 may lose, as a share. It was fixed by the recorded seeds."""
SEEDS = "seeds.json"
RECIPE = "blockwise"
STEPS = 300
ROW = 0  # the held-out image of the questions


def read_power() -> power.DemoPower:
    """Return what the recorded seeds say about this task."""
    return power.read(SEEDS, MARGIN, power.ACCURACY_POINTS)


def describe(cfg: Config) -> list[str]:
    savings = ", ".join([RECIPE, *(saving.words for saving in enabled_savings(cfg))])
    return [
        f"A tiny Qwen3-VL learns to read handwriting, {cfg.train.steps} steps in high precision and the same in FP8 "
        f"({savings}).",
        "Then both answer questions about held-out handwriting. Pass: FP8 loses at most "
        f"{100 * MARGIN:g} points (95 % interval).",
    ]


def write_inputs(directory: Path, steps: int, console: Console | None, seed: int = 0) -> Config:
    """Write digits, the untrained checkpoint and ``demo.yaml``; existing files must be the same. Raises
    ``ReportError``, before anything is written, if the folder has another ``demo.yaml``."""
    from octavo.data.builtin import digits
    from octavo.models import ModelError
    from octavo.models.tiny import tiny

    HANDWRITING.check_folder(directory)
    directory.mkdir(parents=True, exist_ok=True)
    digits.write(directory / "digits", console=console)
    texts = tokenizer_texts(directory / "digits" / "train.json")
    try:
        tiny.write("qwen3_vl", directory / "model", seed=seed, texts=texts)
    except ModelError as error:
        raise ReportError(
            f"{directory} has a demo of another seed or version; name another folder with --dir ({error})"
        ) from error
    file = directory / CONFIGURATION
    if not file.is_file():
        file.write_text(HANDWRITING.read_configuration(), encoding="utf-8")
    return HANDWRITING.load_configuration(directory, steps, seed)


def tokenizer_texts(file: Path) -> list[str]:
    """Return the texts of the conversations for the tokenizer, so that questions and digits become single tokens."""
    rows = json.loads(file.read_text(encoding="utf-8"))[:200]
    return [turn["value"].replace("<image>", "") for row in rows for turn in row["conversations"]]


def ask(run: Path, directory: Path) -> DemoAnswers:
    """Ask the model of a run about a held-out image, and save the picture with the answers."""
    answers = ask_model(run, directory / "digits" / "test.json", ROW)
    save_figure(answers, directory / "answer.png")
    return answers


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
    return DemoAnswers("Asked about a held-out picture", tuple(answers), sum(counts.values()), image)


def save_figure(interview: DemoAnswers, path: Path) -> None:
    """Save a figure of the image with the questions, the answers and the truth."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    from octavo.report.run.plots import PALETTE, STYLE

    assert interview.image is not None
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


def describe_figures(claim: Check, fp8: RunData, high: RunData, dtype: str) -> str:
    assert claim.low is not None and claim.high is not None
    shares = [percent(run["eval"]["exact_match"], 1) for run in (fp8, high)]
    return (
        f"{shares[0]} of the answers are right, {shares[1]} in {dtype}; 95 %: {100 * claim.low:+.1f} to "
        f"{100 * claim.high:+.1f} points, margin {100 * MARGIN:g}"
    )


def describe_answers(answers: DemoAnswers, directory: Path) -> str:
    replies = ", ".join(f"{a.question} {a.answer or '(nothing)'}" for a in answers.answers)
    right = sum(bool(answer.right) for answer in answers.answers)
    return f"Asked about {directory / 'answer.png'}: {replies} ({right} of {len(answers.answers)} right)."


def next_commands(directory: Path, name: str) -> list[str]:
    image = directory / "digits" / "images" / "test" / "00001.png"
    return [
        f'octavo generate {directory / "arms" / name} --image {image} --prompt "First?"',
        f"octavo plan {directory / 'demo.yaml'}",
    ]


HANDWRITING = DemoTask(
    command="octavo demo",
    configuration="demo.yaml",
    directory="demo",
    recipe=RECIPE,
    steps=STEPS,
    claim=ACCURACY,
    power=read_power,
    describe=describe,
    write_inputs=write_inputs,
    has_recorded_inputs=lambda cfg: True,  # the package writes them
    ask=ask,
    results={
        PASS: "reads handwriting as well as {dtype}",
        FAIL: "reads handwriting worse than {dtype}",
        WARN: "reads handwriting better than {dtype} by more than the margin",
    },
    describe_figures=describe_figures,
    describe_answers=describe_answers,
    next_commands=next_commands,
)
