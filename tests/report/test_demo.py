"""The demo's own parts: the embedded configuration, the question, the pictures. cli/test_package.py runs a demo."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo.cli.main import main
from octavo.report import ReportError
from octavo.report.demo import demo, handwriting, power
from octavo.report.demo.handwriting import HANDWRITING
from octavo.report.demo.pretrained import PRETRAINED
from octavo.report.demo.task import Answer, DemoAnswers, DemoTask
from octavo.report.evidence.trust_table import Check
from octavo.report.trial.judge import Verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def image() -> Image.Image:
    return Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert("RGB")


@pytest.fixture
def interview(image: Image.Image) -> DemoAnswers:
    return DemoAnswers("Asked", (Answer("First?", "7", "7"), Answer("Second?", "", "1")), 168, image)


def test_embedded_configuration_uses_paths_of_the_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("octavo.data.builtin.digits.write", lambda directory, **_: None)
    monkeypatch.setattr("octavo.models.tiny.tiny.write", lambda *_, **__: None)
    monkeypatch.setattr(handwriting, "tokenizer_texts", lambda file: [])
    cfg = handwriting.write_inputs(tmp_path / "demo", steps=40, console=None)
    assert cfg.train.steps == 40 and cfg.fp8.recipe == HANDWRITING.recipe
    assert cfg.model.path == str(tmp_path / "demo" / "model"), "paths are those of the folder, not of the package"
    assert cfg.data.eval[0].path == str(tmp_path / "demo" / "digits" / "test.json")


def test_changed_configuration_is_kept(tmp_path: Path, monkeypatch) -> None:
    test_embedded_configuration_uses_paths_of_the_folder(tmp_path, monkeypatch)
    file = tmp_path / "demo" / "demo.yaml"
    file.write_text(file.read_text().replace("lr: 2e-3", "lr: 5e-4"))
    assert handwriting.write_inputs(tmp_path / "demo", steps=40, console=None).train.lr == 5e-4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, r"trains on smollm2-data/instructions.train.jsonl, and octavo demo on digits/train.json"),
        ("lr: 1\n", "is no configuration of octavo demo; name another folder with --dir"),
    ],
)
def test_folder_of_another_demo_is_refused_before_it_changes(tmp_path: Path, text: str | None, reason: str) -> None:
    (tmp_path / "demo.yaml").write_text(text or PRETRAINED.read_configuration())
    with pytest.raises(ReportError, match=reason):
        demo.run(tmp_path, 20)
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo.yaml"]


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (5, 4), (9, 4)])
@pytest.mark.parametrize("task", [HANDWRITING, PRETRAINED])
def test_warmup_is_shorter_than_the_run(tmp_path: Path, task: DemoTask, steps: int, warmup: int) -> None:
    text = task.read_configuration().replace(", warmup: 2", "").replace("steps: ", "warmup: 4, steps: ", 1)
    (tmp_path / "demo.yaml").write_text(text.replace("  warmup: 4, steps", "  warmup: 4\n  steps"))
    train = task.load_configuration(tmp_path, steps, 0).train
    assert (train.steps, train.warmup) == (steps, warmup)


def test_tokenizer_texts_come_from_conversations(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "<image>First?"}, {"from": "gpt", "value": "7"}]}
    (tmp_path / "train.json").write_text(json.dumps([row]))
    assert handwriting.tokenizer_texts(tmp_path / "train.json") == ["First?", "7"]


@pytest.mark.parametrize("steps", [0, -1])
def test_zero_steps_are_rejected(tmp_path: Path, steps: int) -> None:
    with pytest.raises(ReportError, match=f"steps={steps}: the demo needs at least one step"):
        demo.run(tmp_path / "demo", steps=steps)
    assert not (tmp_path / "demo").exists()


def test_questions_follow_earlier_answers_of_the_model(tmp_path: Path, monkeypatch) -> None:
    heard: list[list[dict]] = []

    def answers(model, processor, conversations, sampling):
        ((messages, _),) = conversations
        heard.append([dict(m) for m in messages])
        return [[str(len(heard))]]

    Image.new("L", (16, 16), 200).save(tmp_path / "a.png")
    messages = [{"from": "human", "value": "<image>First?"}, {"from": "gpt", "value": "1"},
            {"from": "human", "value": "Second?"}, {"from": "gpt", "value": "9"}]  # fmt: skip
    (tmp_path / "test.json").write_text(json.dumps([{"image": "a.png", "conversations": messages}]))
    monkeypatch.setattr("octavo.generation.answers", answers)
    monkeypatch.setattr("octavo.train.load_run", lambda run: (None, None, None))
    found = handwriting.ask_model(tmp_path, tmp_path / "test.json", 0)
    assert [(a.question, a.answer, a.truth, a.right) for a in found.answers] == [
        ("First?", "1", "1", True),
        ("Second?", "2", "9", False),
    ]
    assert [part["type"] for part in heard[0][0]["content"]] == ["image", "text"]
    assert [m["role"] for m in heard[1]] == ["user", "assistant", "user"]
    assert heard[1][1]["content"][0]["text"] == "1"


def verdict(status: str = "pass", *, share: float = 0.992, eval: bool = True, others: tuple[Check, ...] = ()) -> Any:
    """A verdict of the demo, as `compare` returns it."""
    low, high = (-0.003, 0.025) if eval else (None, None)
    claim = Check("accuracy", "Held-out accuracy", "FP8 blockwise", 0.011, "", "", status, "so it is", low, high, 0.03)
    gemms = Check("fp8_gemms", "FP8 GEMMs ran where planned", "FP8 blockwise", 0.0, "", "", "pass", "all")
    sides = {"reference": (0.981, 100), "fp8": (share, 31)}
    arms = [
        {
            "kind": kind, "name": kind, "eval": {"exact_match": right}, "memory": {"weights": 2**20 * size},
            "plan": {"rows": [{"recipe": {}}, {"recipe": None}]}, "proof": {"fp8_gemms": 1500}, "environment": {},
        }
        for kind, (right, size) in sides.items()
    ]  # fmt: skip
    checks = (claim, gemms, *others)
    return Verdict(status, "", (), checks, {"arms": arms, "reference_dtype": "fp32"})


@pytest.mark.parametrize(
    ("status", "begins"),
    [
        (
            "pass",
            "PASS: reads handwriting as well as fp32 (99.2 % of the answers are right, 98.1 % in fp32; 95 %: -0.3",
        ),
        ("fail", "FAIL: reads handwriting worse than fp32 ("),
        ("warn", "WARN: reads handwriting better than fp32 by more than the margin ("),
        ("undecided", "UNDECIDED: "),
    ],
)
def test_last_lines_begin_with_the_result(interview: DemoAnswers, tmp_path: Path, status: str, begins: str) -> None:
    cold = Check("dw_cosine", "Cosine of weight gradients", "FP8 blockwise", 0.9, "", "", "warn", "low in one layer")
    lines = demo.summary(verdict(status, others=(cold,)), interview, tmp_path, 151.0)
    assert lines[0].startswith(begins) and len(lines) <= 12
    assert status == "undecided" or "margin 3.2)" in lines[0]
    assert lines[1] == "All 1 planned layers ran in FP8: 1,500 GEMMs counted in its first step."
    assert "takes 31.0 MiB, 100.0 in fp32." in lines[2] and lines[3].startswith("WARN: Cosine of weight gradients: low")
    text = "\n".join(lines)
    assert "First? 7, Second? (nothing) (1 of 2 right)" in text and "speed needs a GPU" in text
    assert "151 s. The page: " in text and "octavo generate " in text and "octavo plan " in text
    assert "loss" not in text, "a last loss near zero means nothing to a reader"


def test_failed_check_comes_before_a_claim_that_passes(interview: DemoAnswers, tmp_path: Path) -> None:
    broken = Check("nan_codes", "NaN codes in an applied step", "FP8 blockwise", 3.0, "", "", "fail", "3 NaN codes")
    found = verdict("pass", others=(broken,))
    lines = demo.summary(replace(found, status="fail"), interview, tmp_path, 1.0)
    assert lines[0].startswith(
        "FAIL: NaN codes in an applied step: 3 NaN codes. It reads handwriting as well as fp32 ("
    )
    assert sum("NaN codes in an applied" in line for line in lines) == 1


def test_verdict_without_an_interval_has_no_figures(interview: DemoAnswers, tmp_path: Path) -> None:
    lines = demo.summary(verdict("undecided", eval=False), interview, tmp_path, 1.0)
    assert lines[0] == "UNDECIDED: held-out accuracy is not decided: so it is"


def test_answers_are_saved_as_a_picture(interview: DemoAnswers, tmp_path: Path) -> None:
    handwriting.save_figure(interview, tmp_path / "answer.png")
    assert Image.open(tmp_path / "answer.png").size[0] > 800


# --- what the demo can decide -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "aim", "seeds"), [(HANDWRITING, 0.995, 6), (PRETRAINED, 0.995, 4)])
def test_recorded_seeds_pass_with_the_stated_probability(task: DemoTask, aim: float, seeds: int) -> None:
    """From the rows: worse ends of intervals, moved to no difference, and worse ends that scatter as they do."""
    recorded = task.power()
    assert len(recorded.results) >= seeds and recorded.pass_probability() >= aim
    rows = json.loads((Path(power.__file__).parent / recorded.file).read_text())["rows"]
    if task is PRETRAINED:
        mean = np.mean([row["fp8"] / row["high"] - 1 for row in rows])
        ends = np.array([row["upper"] for row in rows]) - mean
    else:
        mean = np.mean([row["high"] - row["fp8"] for row in rows])
        ends = -np.array([row["lower"] for row in rows]) - mean
    assert (ends <= recorded.margin).all(), "each recorded seed would pass"
    drawn = np.random.default_rng(0).normal(ends.mean(), ends.std(ddof=1), 400_000)
    assert (drawn <= recorded.margin).mean() == pytest.approx(recorded.pass_probability(), abs=5e-4)
    # A seed that is drawn with the others from an unknown spread: Student's prediction.
    sets = np.random.default_rng(1).normal(size=(200_000, len(rows) + 1))
    past, new = sets[:, :-1], sets[:, -1]
    quotient = (recorded.margin - recorded.reach) / recorded.spread
    passed = new <= past.mean(1) + quotient * past.std(1, ddof=1)
    assert passed.mean() == pytest.approx(recorded.careful_probability, abs=3e-3)
    assert recorded.careful_probability < recorded.pass_probability()
    assert recorded.pass_probability(recorded.margin) < 0.1 and recorded.smallest_failing > recorded.margin


@pytest.mark.parametrize(
    ("words", "task", "claim"),
    [
        ([], HANDWRITING, "Claim: held-out accuracy of FP8 is at most 3.2 points below"),
        (["--real"], PRETRAINED, f"Claim: held-out loss of FP8 is at most {100 * PRETRAINED.power().margin:g} % above"),
    ],
)
def test_power_is_printed_without_training(words: list[str], task: DemoTask, claim: str, capsys: Any) -> None:
    assert main(["demo", *words, "--power"]) == 0
    printed = capsys.readouterr().out
    assert claim in printed and task.power().file in printed and "It fails if FP8" in printed
    assert main(["demo", *words, "--power", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["margin"] == task.power().margin and data["pass_probability"] >= 0.99


@pytest.mark.parametrize("words", [[], ["--real"]])
def test_power_does_not_import_torch(words: list[str]) -> None:
    run = f"from octavo.cli.main import main; main(['demo', *{words}, '--power'])"
    code = f"import sys; {run}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "words",
    [("--seed", "3", "--fresh"), ("--seed", "0"), ("--steps", "500"), ("--dir", "demo"), ("--real", "--seed", "0")],
)
def test_power_refuses_options_of_a_run(words: tuple[str, ...], capsys) -> None:
    assert main(["demo", "--power", *words]) == 2
    options = ", ".join(word for word in words if word.startswith("--") and word != "--real")
    assert f"{options}: --power trains nothing" in capsys.readouterr().err


def test_lab_page_has_these_figures() -> None:
    page, recorded = (ROOT / "docs/lab/demo.md").read_text(), HANDWRITING.power()
    for figure in (
        f"scatter by {100 * recorded.spread:.2f} points",
        f"reach {100 * recorded.reach:.2f} points below",
        f"with probability {recorded.shown_probability} by that",
        f"with {100 * recorded.careful_probability:.1f} % if",
        f"margin of {100 * recorded.margin:g} points",
        f"answers {100 * recorded.smallest_failing:.1f} points fewer right",
    ):
        assert figure in page, figure
