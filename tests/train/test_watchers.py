"""Those that look on: the page, trackers, and what happens when one of them fails."""

import json
import sys
import types
from pathlib import Path

import pytest

from octavo import rl, train
from octavo.report.run.live_page import Page
from octavo.train.callbacks import trackers
from octavo.train.errors import TrainError

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")


class Lines:
    """A console that keeps its lines."""

    is_terminal = False

    def __init__(self):
        self.lines = []

    def print(self, text, **_):
        self.lines.append(text)


class Breaks(train.Callback):
    def __str__(self):
        return "the one that breaks"

    def end_step(self, run, step):
        raise OSError("no network")


def test_failing_watcher_does_not_stop_the_run(make):
    cfg, console = make("run.eval_every=2", "train.steps=4"), Lines()

    class Stop(train.Callback):
        def end_step(self, run, step):
            if step.number == 2:
                run.stop()

    train.run(cfg, console=console, watchers=[Page(), Breaks()], callbacks=[Stop()])
    told = [line for line in console.lines if "was removed" in line]
    assert told == ["warning: the one that breaks failed and was removed; the run continues (OSError: no network)"]
    page = Path(cfg.run.dir) / "page.html"
    assert 'warn">stopped</span> run: step 2 of 4' in page.read_text()
    answers = (page.parent / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in answers] == [2] * 4


def test_unwritable_page_is_reported_once(make, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.report.run.run_page.write_page", full)
    console = Lines()
    assert train.run(make(), console=console, watchers=[Page()]).status == "finished"
    told = [line for line in console.lines if "page.html" in line]
    assert len(told) == 1 and "No space left on device" in told[0] and "the run continues" in told[0]


def test_live_pages_take_a_limited_share_of_time(monkeypatch, tmp_path):
    """With a page that takes a second and a step of ten there is one each hundred seconds."""
    now, written = types.SimpleNamespace(at=0.0), []

    def write(*_):
        now.at += 1.0
        written.append(now.at)

    monkeypatch.setattr("octavo.report.run.live_page.time", types.SimpleNamespace(monotonic=lambda: now.at))
    monkeypatch.setattr("octavo.report.run.run_page.write_page", write)
    page, run = Page(), types.SimpleNamespace(directory=tmp_path, step=0, log=print)
    monkeypatch.setattr(
        "octavo.report.run.live_page.History.begin", lambda _: types.SimpleNamespace(steps=1, add=lambda row: 0)
    )
    page.begin(run)
    for number in range(1, 101):
        now.at += 10.0
        page.saved(run, tmp_path)
        page.end_step(run, types.SimpleNamespace(number=number, wanted=True, row={"step": number, "loss": 1.0}))
    assert 8 <= len(written) <= 10 and written[0] > 100 and all(n / at < 0.0101 for n, at in enumerate(written[1:], 2))


@pytest.mark.parametrize(("error", "told"), [(True, "enough"), (False, "were skipped")], ids=["a step", "the end"])
def test_a_run_that_fails_leaves_a_page_of_it(make, error, told):
    class Fails(train.Callback):
        def end_step(self, run, step):
            if error and step.number == 2:
                raise ValueError("enough")
            run.job.progress.consecutive_skips = step.number // run.cfg.train.steps  # as if the last one were skipped

    cfg = make()
    with pytest.raises(TrainError, match=told):
        train.run(cfg, watchers=[Page()], callbacks=[Fails()])
    assert 'fail">failed</span>' in (Path(cfg.run.dir) / "page.html").read_text()


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the library: its few calls, and all that it was told, by run."""
    told = types.SimpleNamespace(begun=[], rows={}, closed=[], breaks=0)

    def init(**given):
        told.begun.append(given)
        name = given["id"] or f"id{len(told.begun)}"
        rows = told.rows.setdefault(name, [])

        def log(row):
            if told.breaks == row["step"]:
                raise ConnectionError("gone")
            rows.append(row)

        end = told.closed.append
        return types.SimpleNamespace(
            id=name, log=log, define_metric=lambda *_, **__: None, finish=lambda exit_code: end(exit_code)
        )

    module = types.ModuleType("wandb")
    module.init, module.Html = init, lambda file, inject: ("html", file)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("octavo.base.environment.version", lambda name: "1" if name == "wandb" else None)
    return told


def test_a_tracker_gets_configuration_rows_and_the_page_and_goes_on_after_a_resume(make, wandb):
    cfg = make("run.trackers=[wandb]", "run.log_every=2", "run.eval_every=3")

    class Stop(train.Callback):
        def end_step(self, run, step):
            if step.number == 4:
                run.stop()

    train.run(cfg, watchers=[Page()], callbacks=[Stop()])
    assert wandb.closed == [1]
    train.run(make("run.trackers=[wandb]", "run.log_every=2", "run.eval_every=3", "run.resume=auto"), watchers=[Page()])
    html = (Path(cfg.run.dir) / "page.html").read_text()
    assert 'pass">finished</span> run: step 6 of 6' in html
    steps = html.split("<h2>Held-out data</h2>")[1].split("</table>")[0]
    assert [part.split("<")[0] for part in steps.split('<tr><td class="n">')[1:]] == ["3", "6"]
    first, again = wandb.begun
    assert first["config"]["train"]["steps"] == 6 and first["id"] is None and again["id"] == "id1"
    (rows,) = wandb.rows.values()
    steps = [(row["step"], "page" in row) for row in rows]
    assert steps == [(1, False), (2, False), (3, False), (4, False), (4, True), (5, False), (6, False), (6, True)]
    assert "eval/loss" in rows[2] and "train/loss" in rows[0] and "train/lr" in rows[0] and wandb.closed == [1, 0]
    assert rows[-1]["page"][1].endswith("page.html") and all(
        isinstance(value, int | float) for row in rows for key, value in row.items() if key != "page"
    )


def test_failing_tracker_is_reported_once(make, wandb):
    wandb.breaks, console = 3, Lines()
    assert train.run(make("run.trackers=[wandb]"), console=console).status == "finished"
    told = [line for line in console.lines if "the tracker wandb failed and was removed" in line]
    assert len(told) == 1 and "ConnectionError: gone" in told[0]
    assert [row["step"] for row in wandb.rows["id1"]] == [1, 2]


def test_trackers_that_cannot_begin_are_refused_before_the_first_step(make, wandb, monkeypatch):
    def init(**_):
        raise RuntimeError("no API key")

    monkeypatch.setattr(sys.modules["wandb"], "init", init)
    with pytest.raises(TrainError, match=r"run.trackers: wandb could not start \(RuntimeError: no API key\)"):
        train.run(make("run.trackers=[wandb]", dir="refused"))
    monkeypatch.setattr("octavo.base.environment.version", lambda name: "1" if name == "wandb" else None)
    with pytest.raises(TrainError, match=r"trackio is not installed here: pip install trackio, or leave it out"):
        rl.run(make("run.trackers=[wandb, trackio]", dir="missing"))
    assert not (Path(make(dir="missing").run.dir)).exists()


LIBRARIES = {
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    "trackio": {"TRACKIO_DIR": "{}/trackio"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///{}/mlflow.db"},
    "swanlab": {"SWANLAB_MODE": "offline"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_library_itself_offline_also_after_a_resume(name, make, monkeypatch, tmp_path):
    """As each library is: what it calls the run stays over a resume, and its rows are there where it lets one read."""
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    for key, value in LIBRARIES[name].items():
        monkeypatch.setenv(key, value.format(tmp_path))
    console, cfg = Lines(), make(f"run.trackers=[{name}]")

    class Stop(train.Callback):
        def end_step(self, run, step):
            if step.number == 4:
                run.stop()

    train.run(cfg, console=console, watchers=[Page()], callbacks=[Stop()])
    file = Path(cfg.run.dir) / trackers.FILE
    before = json.loads(file.read_text())
    train.run(make(f"run.trackers=[{name}]", "run.resume=auto"), console=console, watchers=[Page()])
    assert json.loads(file.read_text()) == before and not [line for line in console.lines if "warning" in line]
    if name == "mlflow":
        import mlflow

        client = mlflow.MlflowClient()
        history = client.get_metric_history(before[name], "train/loss")
        assert [metric.step for metric in history] == [*range(1, 7)]
        assert client.get_run(before[name]).data.params["train.steps"] == "6"
        assert [artifact.path for artifact in client.list_artifacts(before[name])] == ["page.html"]
