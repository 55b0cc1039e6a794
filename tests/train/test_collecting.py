"""`train.gc`: what each word does to the collector, at which step, and that it is as it was when a run ends."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import train
from octavo.config import ConfigError, load_config_text, to_yaml
from octavo.train import collecting
from octavo.train.rundir import read_rows

pytestmark = pytest.mark.usefixtures("bare_forward", "unseen")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Every test ends with the collector as it found it: a run that leaves something behind fails. What the suite froze
    is thawed meanwhile, and frozen again."""
    suite = gc.get_freeze_count()
    gc.unfreeze()
    before = gc.isenabled(), gc.get_threshold()
    yield
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == (*before, 0)
    if suite:
        gc.freeze()


class Look(train.Callback):
    """What the collector is like during each step, and which steps had a whole collection behind them."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, tuple[int, ...], bool]] = []

    def before_step(self, run: train.Run, number: int, batches: Any) -> None:
        self.seen.append((gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0))


def looked(make: Any, *over: str, dir: str = "run") -> tuple[Look, list[float]]:
    cfg = make("data.eval=[]", "train.steps=3", *over, dir=dir)
    train.run(cfg, callbacks=[look := Look()])
    return look, [row["loss"] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]


def test_what_each_word_does(make, uncounted, monkeypatch) -> None:
    """Losses are the same; the file that a run leaves says the same again."""
    monkeypatch.setattr(collecting, "SETTLED", 2)
    whole = gc.get_threshold()
    plain, losses = looked(make)
    assert plain.seen == [(True, whole, False)] * 3
    frozen, same = looked(make, "train.gc=freeze", dir="freeze")
    assert frozen.seen == [(True, whole, False)] * 2 + [(True, whole, True)] and same == losses
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    third, same = looked(make, "train.gc=700,10,1000", dir="thresholds")
    recorded = (Path(make(dir="thresholds").run.dir) / "environment.json").read_text()
    assert json.loads(recorded)["settings"]["gc.threshold"] == [700, 10, 1000] and "hunter2" not in recorded
    assert third.seen == [(True, (700, 10, 1000), False)] * 3 and same == losses
    often, same = looked(make, "train.gc=2", dir="often")
    assert often.seen == [(False, whole, False)] * 2 + [(False, whole, True)] and same == losses


def test_every_so_many_steps_it_collects_and_then_alone(make, uncounted, monkeypatch) -> None:
    """What refers to itself is alive until then."""
    found: list[tuple[int, int]] = []
    begun = lambda phase, info: found.append((step[0], info["generation"])) if phase == "start" else None  # noqa: E731
    step = [0]

    class Number(train.Callback):
        def before_step(self, run: train.Run, number: int, batches: Any) -> None:
            step[0] = number

    gc.callbacks.append(begun)
    try:
        train.run(make("data.eval=[]", "train.steps=5", "train.gc=2"), callbacks=[Number()])
    finally:
        gc.callbacks.remove(begun)
    assert [at for at, generation in found if at in (1, 2, 3, 4) and generation == 2] == [2, 4]
    assert not [at for at, generation in found if at in (1, 3)]


def test_it_is_as_it_was_after_a_run_that_failed() -> None:
    for how in ("freeze", 5, (5, 5, 5)):
        with pytest.raises(ZeroDivisionError), collecting.collecting(how):
            gc.freeze() if how == "freeze" else None
            raise ZeroDivisionError
        assert gc.isenabled() and gc.get_threshold() != (5, 5, 5)


def test_what_another_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collecting.collecting("freeze"):
            gc.freeze()
        assert gc.get_freeze_count() >= count > 0
        gc.disable()
        with collecting.collecting((700, 10, 1000)):
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_resumed_run_may_have_another(make, uncounted) -> None:
    train.run(make("data.eval=[]", "train.steps=2", "train.warmup=0", "run.save_every=1"))
    again = make("data.eval=[]", "train.steps=2", "train.warmup=0", "train.gc=freeze", "run.resume=auto")
    assert train.run(again).status == "finished"


@pytest.mark.parametrize(
    ("written", "read"),
    [("700,10,1000", (700, 10, 1000)), ("[700, 10, 1000]", (700, 10, 1000)), ("' 1 , 2,3 '", (1, 2, 3)), ("100", 100),
     ("freeze", "freeze"), ("null", None)],
)  # fmt: skip
def test_how_it_may_be_written(make, written, read) -> None:
    cfg = make(f"train.gc={written}")
    assert cfg.train.gc == read and load_config_text(to_yaml(cfg), []).train.gc == read


@pytest.mark.parametrize(
    "written", ["off", "0", "-5", "700,10", "[700, 10]", "0,10,10", "7,7,7,7", "1.5", "true", "[]"]
)
def test_what_it_may_not_be(make, written) -> None:
    with pytest.raises(ConfigError, match=r"train\.gc") as found:
        make(f"train.gc={written}")
    assert "700,10,1000" in str(found.value) or "," not in written
