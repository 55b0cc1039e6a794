"""The task of `octavo demo --real` without its weights: what is missing, its configuration, its question and its last
screen. The table of recorded seeds."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_seeds
from octavo.cli.main import main
from octavo.report import ReportError
from octavo.report.demo import demo, pretrained
from octavo.report.demo.handwriting import HANDWRITING
from octavo.report.demo.pretrained import PRETRAINED
from octavo.report.demo.task import Answer, DemoAnswers
from octavo.report.evidence.trust_table import Check
from octavo.report.trial.judge import Verdict

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (("What does `a` do?", "Nothing."), ("What does `nlargest(n)` do?", "Finds."))
]
ABOUT = {
    "python": "3.11.7",
    **{f"instructions.{part}.jsonl": {"rows": 2, "sha256": part} for part in ("train", "eval")},
}


@pytest.fixture
def build(tmp_path: Path, monkeypatch: Any) -> Path:
    """A folder with the names of what `make real` writes, as the current directory."""
    for folder in (pretrained.MODEL, pretrained.DATA):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / pretrained.MODEL / "config.json").write_text("{}")
    (tmp_path / pretrained.MODEL / "model.safetensors").write_bytes(b"weights")
    (tmp_path / pretrained.DATA / "about.json").write_text(json.dumps(ABOUT))
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / pretrained.DATA / "instructions.eval.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("missing", [pretrained.MODEL, pretrained.DATA])
def test_missing_model_is_one_sentence_with_the_command(build: Path, missing: Path, capsys: Any) -> None:
    shutil.rmtree(build / missing)
    assert main(["demo", "--real"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"octavo demo: {missing}") and "is missing" in line and "`make real`" in line
    assert len(line) < 200 and not (build / "demo-real").exists()


def test_configuration_leads_from_the_folder_to_the_model(build: Path) -> None:
    cfg = PRETRAINED.write_inputs(Path("runs/real"), 3, None, seed=5)
    assert (cfg.train.steps, cfg.run.seed, cfg.lora is not None) == (3, 5, True)
    assert Path(cfg.model.path).resolve() == build / "build/smollm2"
    texts = {Path(part.path).resolve().parent for part in (*cfg.data.train, *cfg.data.eval)}
    assert texts == {build / "build/smollm2-data"}
    file = build / "runs/real/demo.yaml"
    assert "../../build/smollm2" in file.read_text(), "the folder may be moved with the model"
    file.write_text(file.read_text().replace("lr: 1e-3", "lr: 5e-4"))
    assert PRETRAINED.write_inputs(Path("runs/real"), 3, None).train.lr == 5e-4, "a changed file is kept"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_number_of_steps_has_a_configuration(build: Path, steps: int) -> None:
    train = PRETRAINED.write_inputs(Path("real"), steps, None).train
    assert (train.steps, train.warmup) == (steps, min(2, steps - 1))


def test_folder_of_the_digits_is_refused_before_it_changes(build: Path, capsys: Any) -> None:
    (build / "demo").mkdir()
    (build / "demo/demo.yaml").write_text(HANDWRITING.read_configuration())
    assert main(["demo", "--real", "--dir", "demo"]) == 2
    said = capsys.readouterr().err
    assert "demo/demo.yaml trains on digits/train.json, and octavo demo --real on smollm2-data/" in said
    assert [entry.name for entry in (build / "demo").iterdir()] == ["demo.yaml"]


def test_chance_is_only_stated_for_the_recorded_texts_and_settings(build: Path, monkeypatch: Any) -> None:
    cfg = PRETRAINED.write_inputs(Path("real"), PRETRAINED.steps, None)
    assert demo.demo_chance(PRETRAINED, cfg) == "", "other weights and texts"
    power = replace(PRETRAINED.power(), inputs=pretrained.identify_inputs() | {"python": "3.12.1"})
    monkeypatch.setattr(pretrained, "read_power", lambda: power)
    assert demo.demo_chance(PRETRAINED, cfg) == power.shown_probability, "equal texts of another version"
    changed = cfg.model_copy(update={"train": cfg.train.model_copy(update={"lr": 5e-4})})
    assert demo.demo_chance(PRETRAINED, changed) == ""


def test_question_is_a_held_out_one_in_words(build: Path, monkeypatch: Any) -> None:
    asked: list[Any] = []

    def answers(model: Any, tokenizer: Any, conversations: Any, sampling: Any) -> list[list[str]]:
        asked.append((conversations, sampling.temperature))
        return [[" It finds. "]]

    monkeypatch.setattr("octavo.generation.answers", answers)
    monkeypatch.setattr("octavo.train.load_run", lambda run: (None, None, None))
    interview = PRETRAINED.ask(Path("run"), Path("real"))
    assert asked == [([([ROWS[1]["messages"][0]], [])], 0)]
    assert interview.answers == (Answer("What does `nlargest(n)` do?", "It finds.", "Finds.", has_one_answer=False),)
    assert interview.answers[0].right is None and "pretrained weights" in interview.note
    shown = interview.to_interview("FP8 rowwise")
    assert (shown.picture, shown.rows[0]["right"]) == ("", None)
    file = build / "other.jsonl"
    file.write_text(json.dumps(ROWS[0]))
    assert pretrained.read_question(file) == ("What does `a` do?", "Nothing."), "texts without the usual function"


def verdict(status: str, others: int = 0) -> Verdict:
    claim = Check(
        "loss_held_out", "Held-out loss", "FP8 rowwise", 0.003, "", "", status, "so it is", -0.002, 0.008, 0.01
    )
    gemms = Check("fp8_gemms", "FP8 GEMMs ran where planned", "FP8 rowwise", 0.0, "", "", "pass", "all")
    cold = Check("dw_cosine", "Cosine", "FP8 rowwise", 0.9, "", "", "warn", "low")
    rows = [{"recipe": {"name": "rowwise", "fwd": "bf16"}}, {"recipe": None}]
    runs = [
        {
            "kind": kind,
            "name": kind,
            "eval": {"loss": loss},
            "memory": {"weights": 2**20},
            "plan": {"rows": rows},
            "proof": {"fp8_gemms": 4140},
            "environment": {},
        }
        for kind, loss in (("reference", 2.23), ("fp8", 2.2367))
    ]
    return Verdict(status, "", (), (claim, gemms, *[cold] * others), {"arms": runs, "reference_dtype": "bf16"})


@pytest.mark.parametrize(
    ("status", "begins"),
    [
        (
            "pass",
            "PASS: learns as much on an FP8 base as in bf16 (held-out loss 2.2367 nats a token",
        ),
        ("fail", "FAIL: learns less on an FP8 base than in bf16 ("),
        ("undecided", "UNDECIDED: held-out loss is not decided ("),
    ],
)
def test_last_screen_has_the_verdict_and_the_answer(status: str, begins: str, tmp_path: Path) -> None:
    answers = DemoAnswers("Asked", (Answer("What?", "Words.", "Other words.", has_one_answer=False),), 3)
    lines = demo.summary(verdict(status, others=5), answers, tmp_path, 250.0, PRETRAINED)
    assert lines[0].startswith(begins) and len(lines) == demo.MOST_LINES
    assert "2.2300 in bf16; 95 %: -0.20 to +0.80 %, margin 1.5)" in lines[0]
    counted = "4,140 GEMMs counted in its first step."
    assert lines[1] == f"All 1 planned layers computed gradients in FP8, and the forward in BF16: {counted}"
    text = "\n".join(lines)
    assert "Asked: What?\n  FP8: Words.\n  Documentation: Other words." in text
    assert "octavo generate" in text and "octavo merge" in text and "speed needs a GPU" in text


# --- the table of recorded seeds --------------------------------------------------------------------------------------


def test_table_of_seeds_shows_every_result(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    row = {"seed": 3, "status": "pass", "fp8": 0.98, "high": 0.985, "lower": -0.015, "upper": 0.005}
    file = tmp_path / "seeds.json"
    file.write_text(json.dumps({"rows": [row, {"seed": 4, "status": "FP8 blockwise failed: boom"}]}))
    monkeypatch.setattr("sys.argv", ["demo_seeds.py", "--table", str(file)])
    demo_seeds.main()
    assert capsys.readouterr().out.splitlines() == [
        "| seed | verdict | FP8 | high precision | difference, 95 % interval |",
        "|---|---|---|---|---|",
        "| 3 | pass | 98.00 % | 98.50 % | -0.50 (-1.50 to +0.50) points |",
        "| 4 | FP8 blockwise failed: boom | | | |",
    ]
    loss = {**row, "fp8": 2.2440, "high": 2.2, "lower": 0.01, "upper": 0.03}
    table = demo_seeds.format_table({"inputs": {}, "rows": [loss]})
    assert table.endswith("| 3 | pass | 2.2440 | 2.2000 | +2.00 (+1.00 to +3.00) % |")


@pytest.mark.parametrize("task", [HANDWRITING, PRETRAINED])
def test_recorded_files_name_their_task(task: Any) -> None:
    document = json.loads((Path(pretrained.__file__).parent / task.power().file).read_text())
    assert demo_seeds.task_of(document) is task
    assert demo_seeds.format_table(document).count("\n") == 1 + len(document["rows"])


@pytest.mark.parametrize("words", [[], ["0-3"]])
def test_seeds_without_a_file_are_refused(words: list[str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["demo_seeds.py", *words])
    with pytest.raises(SystemExit):
        demo_seeds.main()
    assert "--out, or a file with --table" in capsys.readouterr().err


def test_failed_fp8_run_is_reported(build: Path, monkeypatch: Any) -> None:
    failed = verdict("fail")
    failed.data["arms"][1]["failure"] = "10 steps in a row"  # type: ignore[index]

    def compare(*args: Any, ask: Any, **options: Any) -> Verdict:
        assert ask(failed) is None and options["claims"] == ("loss_held_out",)
        assert options["loss_margin"] == PRETRAINED.power().margin
        return failed

    monkeypatch.setattr(demo, "compare", compare)
    with pytest.raises(ReportError, match="FP8 rowwise failed: 10 steps in a row. The page: real/report/report.html"):
        demo.run("real", 3, task=PRETRAINED)


def test_lab_page_has_the_table_of_each_recorded_file() -> None:
    """The page names the file before each table; one that is not recorded yet has an empty table."""
    page = (ROOT / "docs/lab/demo.md").read_text(encoding="utf-8")
    tables = dict(re.findall(r"<!-- table: (\S+\.json) -->\n(.*?)<!-- end -->", page, re.DOTALL))
    assert set(tables) >= {f"octavo/report/demo/{task.power().file}" for task in (HANDWRITING, PRETRAINED)}
    for name, table in tables.items():
        file = ROOT / name
        expected = demo_seeds.format_table(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else ""
        assert table.strip() == expected, f"python benchmarks/demo_seeds.py --table {name}"


def test_lab_page_has_the_figures_of_the_real_task() -> None:
    page, recorded = (ROOT / "docs/lab/demo.md").read_text(encoding="utf-8"), PRETRAINED.power()
    for figure in (
        f"are {100 * recorded.reach:.2f} % from the mean difference of {100 * recorded.mean_difference:+.2f} %",
        f"scatter by {100 * recorded.spread:.2f} %",
        f"margin of {100 * recorded.margin:g} % the demo passes with probability {recorded.shown_probability} if",
        f"with {100 * recorded.careful_probability:.1f} % if the uncertainty",
        f"loss in FP8 is {100 * recorded.smallest_failing:.1f} % higher",
    ):
        assert figure in page, figure
