"""The task of ``octavo demo --real``: LoRA on an FP8 base of SmolLM2-135M-Instruct, with its pretrained weights, learns
what functions of Python's standard library do. ``make real`` writes the model and the texts."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.base.safe_read import read_json
from octavo.config import Config
from octavo.report.demo import power
from octavo.report.demo.task import CONFIGURATION, Answer, DemoAnswers, DemoTask, RunData
from octavo.report.evidence.run_reader import ReportError
from octavo.report.evidence.trial_claims import HELD_OUT_LOSS
from octavo.report.evidence.trust_table import FAIL, PASS, WARN, Check
from octavo.report.trial.memory_savings import describe_lora_base

if TYPE_CHECKING:
    from rich.console import Console

MARGIN = 0.015
"""How much higher the held-out loss of FP8 may be, as a share. Three pilots fixed it before any recorded seed."""
SEEDS = "real_seeds.json"
NOTE = "They used the texts of Python {python}."
BUILD = Path("build")  # where `make real` writes
MODEL, DATA = BUILD / "smollm2", BUILD / "smollm2-data"
QUESTION = "`nlargest("  # the held-out question that is asked has this
ANSWER_TOKENS = 40


def read_power() -> power.DemoPower:
    """Return what the recorded seeds say about this task."""
    return power.read(SEEDS, MARGIN, power.LOSS_PERCENT, NOTE)


def describe(cfg: Config) -> list[str]:
    return [
        f"SmolLM2-135M-Instruct, with its pretrained weights, learns what Python's functions do: LoRA, "
        f"{cfg.train.steps} steps on its base in BF16 and the same with its {describe_lora_base(cfg)}.",
        f"Then both are evaluated on functions of other modules. Pass: the loss in FP8 is at most {100 * MARGIN:g} % "
        "higher (95 % interval).",
    ]


def check_files() -> None:
    """Raise ``ReportError`` if the model or the texts are missing."""
    for file in (MODEL / "config.json", DATA / "about.json"):
        if not file.is_file():
            raise ReportError(
                f"{file} is missing: octavo demo --real trains SmolLM2-135M, which `make real` in a clone of Octavo "
                "writes (a download of 93 MB); run the demo there"
            )


def write_inputs(directory: Path, steps: int, console: Console | None, seed: int = 0) -> Config:
    """Write ``demo.yaml``, whose paths lead from ``directory`` to the model and the texts. Raises
    ``ReportError``, before anything is written, if these are missing or the folder has another ``demo.yaml``."""
    check_files()
    PRETRAINED.check_folder(directory)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / CONFIGURATION
    if not file.is_file():
        build = os.path.relpath(BUILD, directory)
        file.write_text(PRETRAINED.read_configuration().replace("BUILD/", f"{build}/"), encoding="utf-8")
    return PRETRAINED.load_configuration(directory, steps, seed)


def identify_inputs() -> dict[str, str]:
    """Return the version of Python whose texts are trained on, and the digests of their files and of the weights."""
    about = read_json(DATA / "about.json", ReportError)
    digests = {name: about[name]["sha256"] for name in ("instructions.train.jsonl", "instructions.eval.jsonl")}
    with (MODEL / "model.safetensors").open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    return {"python": about["python"], **digests, "model.safetensors": digest}


def has_recorded_inputs(cfg: Config) -> bool:
    """Return whether the recorded seeds used this model and these texts; texts differ between versions of Python."""
    recorded, now = ({**inputs, "python": ""} for inputs in (read_power().inputs, identify_inputs()))
    return recorded == now


def ask(run: Path, directory: Path) -> DemoAnswers:
    """Ask the model of a run, in FP8 as it was trained, what a function of a held-out module does."""
    from octavo import fp8, generation, train

    model, tokenizer, _ = train.load_run(run)
    question, truth = read_question(DATA / "instructions.eval.jsonl")
    messages = [{"role": "user", "content": question}]
    greedy = generation.Sampling(ANSWER_TOKENS, temperature=0)
    with fp8.count_gemms() as counts:
        answer = generation.answers(model, tokenizer, [(messages, [])], greedy)[0][0].strip()
    return DemoAnswers(
        "Asked about a held-out function",
        (Answer(question, answer, truth, has_one_answer=False),),
        sum(counts.values()),
        note="The model is SmolLM2-135M-Instruct: its pretrained weights, and the adapters that this trial trained. "
        "The truth is the function's documentation. Whether another wording is right is for you to judge.",
    )


def read_question(file: Path) -> tuple[str, str]:
    """Return the question about ``heapq.nlargest`` and the documentation's answer, or the first question of a file
    without it."""
    rows = [json.loads(line)["messages"] for line in file.read_text(encoding="utf-8").splitlines()]
    messages = next((row for row in rows if QUESTION in row[0]["content"]), rows[0])
    return messages[0]["content"], messages[-1]["content"]


def describe_figures(claim: Check, fp8: RunData, high: RunData, dtype: str) -> str:
    assert claim.low is not None and claim.high is not None
    losses = [f"{run['eval']['loss']:.4f}" for run in (fp8, high)]
    return (
        f"held-out loss {losses[0]} nats a token, {losses[1]} in {dtype}; 95 %: {100 * claim.low:+.2f} to "
        f"{100 * claim.high:+.2f} %, margin {100 * MARGIN:g}"
    )


def describe_answers(answers: DemoAnswers, directory: Path) -> str:
    (answer,) = answers.answers
    return f"Asked: {answer.question}\n  FP8: {answer.answer or '(nothing)'}\n  Documentation: {answer.truth}"


def next_commands(directory: Path, name: str) -> list[str]:
    run = directory / "arms" / name
    return [
        f'octavo generate {run} --prompt "What does the Python function `len(obj)` do?"',
        f"octavo merge {run} {directory / 'merged'} --format fp8 --base high",
    ]


PRETRAINED = DemoTask(
    command="octavo demo --real",
    configuration="real.yaml",
    directory="demo-real",
    recipe="rowwise",
    steps=20,
    claim=HELD_OUT_LOSS,
    power=read_power,
    describe=describe,
    write_inputs=write_inputs,
    has_recorded_inputs=has_recorded_inputs,
    ask=ask,
    results={
        PASS: "learns as much on an FP8 base as in {dtype}",
        FAIL: "learns less on an FP8 base than in {dtype}",
        WARN: "learns more on an FP8 base than in {dtype}, by more than the margin",
    },
    describe_figures=describe_figures,
    describe_answers=describe_answers,
    next_commands=next_commands,
)
