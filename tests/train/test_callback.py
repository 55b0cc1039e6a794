"""What a user's callback is told, when, and what it may add; what becomes of its errors."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path

import pytest

from octavo import train
from octavo.config import override
from octavo.train.rundir import read_rows

from .conftest import at


class Diary(train.Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, run):
        self.lines.append(f"begin after {run.step}")

    def before_step(self, run, number, batches):
        self.lines.append(f"before {number} with {len(batches)}")

    def after_step(self, run, step):
        assert step.number == run.step and step.result.loss == step.row["loss"] and "eval" not in step.row
        assert all(p.grad is None for p in run.model.parameters())
        self.lines.append(f"after {step.number}")

    def evaluated(self, run, figures):
        self.lines.append(f"evaluated {run.step}: {figures['questions']}")

    def end_step(self, run, step):
        there = [row["step"] for row in read_rows(run.directory / "metrics.jsonl")]
        self.lines.append(f"end {step.number}, {'written' if step.number in there else 'not written'}")

    def saved(self, run, checkpoint):
        assert (checkpoint / "state.json").is_file()
        self.lines.append(f"saved {checkpoint.name}")

    def end(self, run, result):
        assert (run.directory / "result.json").exists() == (result.status == "finished")
        self.lines.append(f"{result.status} at {result.steps}")


def test_it_is_called_for_everything_in_order_also_over_a_stop(make):
    over = ("train.steps=4", "run.log_every=4", "run.save_every=2", "run.eval_every=3")
    cfg, diary = make(*over), Diary()
    train.run(cfg, callbacks=[diary, at(2, signal.SIGTERM)])
    first = [
        "begin after 0",
        "before 1 with 2", "after 1", "end 1, written",
        "before 2 with 2", "after 2", "end 2, not written", "saved step_2",
        "before 3 with 2", "after 3", "end 3, written", "saved step_3",
        "stopped at 3",
    ]  # fmt: skip
    assert diary.lines == first, "a stopped step is not evaluated, and its row is written"
    again = Diary()
    train.run(override(cfg, ["run.resume=auto"]), callbacks=[again])
    questions = again.lines[1].partition(": ")[2]
    assert int(questions) > 0 and again.lines == [
        "begin after 3", f"evaluated 3: {questions}",  # which was due
        "before 4 with 2", "after 4", f"evaluated 4: {questions}", "end 4, written", "saved step_4",
        "finished at 4",
    ]  # fmt: skip


class Column(train.Callback):
    def after_step(self, run, step):
        step.row["twice"] = 2 * step.row["loss"]
        step.wanted = step.number == 2

    def before_step(self, run, number, batches):
        return train.Observe(memory=True) if number == 2 else None


def test_what_it_adds_is_in_the_row_and_changes_no_loss(make):
    plain = train.run(make("train.steps=4", "run.log_every=3", "data.eval=[]", dir="plain"))
    result = train.run(make("train.steps=4", "run.log_every=3", "data.eval=[]"), callbacks=[Column()])
    rows = read_rows(result.dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4], "step 2 was asked for"
    assert all(row["twice"] == 2 * row["loss"] for row in rows) and result.final["twice"] == rows[-1]["twice"]
    assert "memory" in rows[1] and "memory" not in rows[2]
    assert plain.losses().items() <= result.losses().items()


@pytest.mark.parametrize("event", ["begin", "after_step", "saved", "end"])
def test_its_error_stops_the_run_and_keeps_the_cause(make, event: str):
    def fail(*given):
        raise KeyError("a name")

    callback = type("Fails", (train.Callback,), {event: fail})()
    cfg = make("train.steps=1", "train.warmup=0", "data.eval=[]")
    with pytest.raises(
        train.TrainError, match=f"the callback Fails failed in {event} at step [01]: KeyError"
    ) as caught:
        train.run(cfg, callbacks=[callback])
    assert isinstance(caught.value.__cause__, KeyError)
    assert train.run(override(cfg, ["run.resume=auto"])).status == "finished"


class Wrong(train.Callback):
    """Does what a callback may not."""

    def __init__(self, what: str) -> None:
        self.what = what

    def after_step(self, run, step):
        if self.what == "row":
            step.row["mine"] = object()
        elif self.what == "save":
            run.save()


@pytest.mark.parametrize(
    ("what", "message"),
    [("row", "the callback Wrong failed in after_step at step 1: TypeError"), ("save", "save in end_step")],
)
def test_a_row_that_is_no_json_and_a_checkpoint_without_its_row_are_refused(make, what: str, message: str):
    with pytest.raises(train.TrainError, match=message):
        train.run(make("train.steps=2", "train.warmup=0"), callbacks=[Wrong(what)])


def test_what_is_no_callback_is_refused_before_there_is_a_run(make):
    cfg = make("train.steps=2", "train.warmup=0")
    with pytest.raises(train.TrainError, match="give instances of octavo.train.Callback"):
        train.run(cfg, callbacks=[Wrong])
    assert not Path(cfg.run.dir).exists()


def test_a_train_error_of_its_own_is_left_as_it_is(make):
    class Refuses(train.Callback):
        def after_step(self, run, step):
            raise train.TrainError("enough")

    with pytest.raises(train.TrainError, match=r"^enough$"):
        train.run(make("train.steps=1", "train.warmup=0"), callbacks=[Refuses()])


def test_the_example_runs(make, tmp_path: Path, monkeypatch, capsys):
    from octavo.config import to_yaml

    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(make("train.steps=2", "train.warmup=1", "data.eval=[]")))
    monkeypatch.setattr("sys.argv", ["callback.py", str(file)])
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/callback.py"), run_name="__main__")
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["best_loss"] for row in rows] == [rows[0]["loss"], min(row["loss"] for row in rows)]
    assert "best loss" in capsys.readouterr().out
