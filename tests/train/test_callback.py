"""What a user's callback is told, when, and what it may add; what becomes of its errors."""

from __future__ import annotations

import re
import runpy
import signal
from pathlib import Path

import pytest

from octavo import train
from octavo.config import override
from octavo.train.run_dir.run_dir import read_rows

from .conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/callback.py"


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
    over = ("train.steps=4", "run.log_every=4", "run.save_every=2", "run.eval_every=3", "train.micro_batch=2")
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


def mine(**methods) -> train.Callback:
    """A callback of functions, which is equal to every other."""
    return type("Mine", (train.Callback,), {"__eq__": lambda *_: True, "__hash__": None, **methods})()


def put(place: str, name: str, value: object):
    """What sets an attribute of the run or step it is called with."""
    return lambda _, run, *given: setattr(run if place == "run" else given[0], name, value)


def entry(name: str, value: object):
    return lambda _, run, step: step.row.update({name: value})


WRONG = {
    "an answer": ("before_step", lambda *_: True, "it returned True, which is neither None nor a train.Observe"),
    "batches": ("before_step", lambda *given: given[3].clear(), "AttributeError: 'tuple' object"),
    "stopping": ("before_step", put("run", "stopping", True), "it changed run.stopping"),
    "no row": ("after_step", put("step", "row", None), "it changed the type of step.row"),
    "wanted": ("after_step", put("step", "wanted", "yes"), "it changed the type of step.wanted"),
    "result": ("after_step", put("step", "result", None), "it changed step.result"),
    "no JSON": ("after_step", entry("mine", object()), "TypeError: Object of type object is not JSON"),
    "a name that is no JSON": ("after_step", entry((1,), 1), "TypeError: keys must be str"),
    "loss": ("after_step", entry("loss", "x"), r"it changed step.row\['loss'\]"),
    "memory": ("after_step", entry("memory", "lots"), r"it changed step.row\['memory'\]"),
    "eval": ("after_step", entry("eval", "good"), r"it changed step.row\['eval'\]"),
    "cleared": ("after_step", lambda _, run, step: step.row.clear(), "it changed step.row"),
    "an early save": ("after_step", lambda _, run, step: run.save(), "save in end_step"),
    "figures": ("evaluated", lambda _, run, figures: figures.update(bad=object()), "TypeError: Object of type object"),
    "a figure": ("evaluated", lambda _, run, figures: figures.update(loss=0.0), "it changed run.eval"),
    "a save in between": ("evaluated", lambda _, run, figures: run.save(), "save in end_step"),
    "a late entry": ("end_step", entry("mine", 1), "it changed run.row"),
}


@pytest.mark.parametrize("event", ["before_step", "after_step", "evaluated", "end_step"])
def test_what_a_callback_may_not_do_is_refused_with_its_name_and_the_step(make, event: str):
    for i, (what, (_, method, message)) in enumerate((k, v) for k, v in WRONG.items() if v[0] == event):
        over = ("train.steps=1", "train.warmup=0", "train.micro_batch=2", "train.global_batch=2")
        over += () if event == "evaluated" else ("data.eval=[]",)
        with pytest.raises(train.TrainError) as caught:
            train.run(make(*over, dir=str(i)), callbacks=[mine(**{event: method})])
        begins = f"the callback Mine failed in {event} at step 1: "
        assert str(caught.value).startswith(begins) and re.search(message, str(caught.value)), (what, caught.value)
        assert not (Path(make(dir=str(i)).run.dir) / "result.json").exists()


def test_what_is_no_list_of_callbacks_is_refused_before_there_is_a_run(make):
    cfg = make("train.steps=1", "train.warmup=0", "data.eval=[]")
    for wrong in ([train.Callback], train.Callback(), None, "mine"):
        with pytest.raises(
            train.TrainError,
            match=r"callbacks: expected (a list of )?octavo.train.Callback, found .*; pass a list of instances",
        ):
            train.run(cfg, callbacks=wrong)
    assert not Path(cfg.run.dir).exists()


def test_methods_that_would_never_be_called_are_refused(make):
    class Misspelt(train.Callback):
        def after_stp(self, run, step):
            pass

        def on_step_end(self, *arguments, **state):
            pass

        def save(self):  # a helper: it has other parameters than `saved`
            pass

        def report(self, run, step):
            pass

        def _after_step(self, run, step):
            pass

    with pytest.raises(train.TrainError) as caught:
        train.run(make("train.steps=1", "train.warmup=0", "data.eval=[]"), callbacks=[Misspelt()])
    said = str(caught.value)
    assert "Misspelt.after_stp would never be called; did you mean after_step? A helper needs" in said
    assert "Misspelt.on_step_end would never be called; did you mean after_step?" in said
    assert said.count("would never be called") == 2


def test_a_generator_of_callbacks_is_called_as_a_list_is(make):
    diary = Diary()
    train.run(make("train.steps=1", "train.warmup=0", "data.eval=[]"), callbacks=(c for c in [diary]))
    assert diary.lines[0] == "begin after 0" and diary.lines[-1] == "finished at 1"


def test_an_error_at_the_end_of_a_stopped_run_says_how_to_go_on(make):
    over = ("train.steps=3", "data.eval=[]")
    with pytest.raises(train.TrainError, match=r"failed in end at step 2: .* run.resume=auto"):
        train.run(make(*over), callbacks=[at(1, signal.SIGTERM), mine(end=lambda *_: 1 / 0)])
    with pytest.raises(train.TrainError, match=r"failed in end at step 3: .* The run itself has finished"):
        train.run(make(*over, "run.resume=auto"), callbacks=[mine(end=lambda *_: 1 / 0)])


def test_a_train_error_of_its_own_is_left_as_it_is(make):
    class Refuses(train.Callback):
        def after_step(self, run, step):
            raise train.TrainError("enough")

    with pytest.raises(train.TrainError, match=r"^enough$"):
        train.run(make("train.steps=1", "train.warmup=0"), callbacks=[Refuses()])


@pytest.mark.parametrize("event", ["before_step", "after_step", "evaluated", "end_step"])
def test_it_stops_a_run_after_the_step_under_way(make, event: str):
    def stop(self, run, *given):
        if not stopped:
            stopped.append(run.step)
            run.stop()

    stopped: list[int] = []
    cfg = make("train.steps=2", "train.warmup=1", "run.eval_every=1", "run.log_every=2")
    result = train.run(cfg, callbacks=[mine(**{event: stop})])
    assert (result.status, result.steps, result.signal, result.exit_code) == ("stopped", 1, None, 0)
    assert (result.dir / "checkpoints/step_1").is_dir() and not (result.dir / "result.json").exists()
    assert (event in ("evaluated", "end_step")) == (result.eval is not None), "else it is made when the run goes on"
    result = train.run(override(cfg, ["run.resume=auto"]))
    rows = read_rows(result.dir / "metrics.jsonl")
    assert result.status == "finished" and [(row["step"], "eval" in row) for row in rows] == [(1, True), (2, True)]


def test_a_stop_in_begin_means_the_first_step_and_one_after_the_last_evaluation_nothing(make):
    cfg = make("train.steps=2", "train.warmup=1", "run.eval_every=2")
    result = train.run(cfg, callbacks=[mine(begin=lambda _, run: run.stop())])
    assert (result.status, result.steps, result.exit_code) == ("stopped", 1, 0)
    result = train.run(
        override(cfg, ["run.resume=auto"]), callbacks=[mine(evaluated=lambda _, run, figures: run.stop())]
    )
    assert (result.status, result.steps) == ("finished", 2) and (result.dir / "result.json").exists()


def test_the_example_runs(make, tmp_path: Path, monkeypatch, capsys):
    from octavo.config import to_yaml

    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(make("train.steps=2", "train.warmup=1", "data.eval=[]")))
    monkeypatch.setattr("sys.argv", ["callback.py", str(file)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["best_loss"] for row in rows] == [rows[0]["loss"], min(row["loss"] for row in rows)]
    assert "best loss" in capsys.readouterr().out
    early = runpy.run_path(str(EXAMPLE))["EarlyStop"](patience=2)
    run = type("Run", (), {"stops": 0, "stop": lambda self: setattr(self, "stops", self.stops + 1)})()
    seen = [(early.evaluated(run, {"loss": loss}), run.stops)[1] for loss in (2.0, 3.0, 1.0, 1.0, 1.5)]
    assert seen == [0, 0, 0, 0, 1], "two in a row were no better than the best"
