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
from octavo.train.callbacks import garbage_collection
from octavo.train.run_dir.run_dir import read_rows

pytestmark = pytest.mark.usefixtures("bare_forward", "unseen")


@pytest.fixture
def thawed() -> Iterator[None]:
    """The test ends with the collector as it found it: what leaves something behind fails. What the suite froze is
    thawed meanwhile, and frozen again."""
    suite = gc.get_freeze_count()
    gc.unfreeze()
    before = gc.isenabled(), gc.get_threshold()
    yield
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == (*before, 0)
    if suite:
        gc.freeze()


class Collector:
    """Python's, as a run sees it, but that it does not go through what it is to freeze or collect: half a million
    objects of the suite, half a second each time."""

    def __init__(self) -> None:
        self.collected, self.frozen = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self) -> None:
        self.collected += 1

    def freeze(self) -> None:
        self.frozen = True

    def unfreeze(self) -> None:
        self.frozen = False

    def get_freeze_count(self) -> int:
        return int(self.frozen)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """What a run asks in place of `gc`; it leaves it, and Python's, as they were."""
    monkeypatch.setattr(garbage_collection, "gc", made := Collector())
    before = gc.isenabled(), gc.get_threshold()
    yield made
    assert (gc.isenabled(), gc.get_threshold(), made.frozen) == (*before, False)


class Look(train.Callback):
    """What the collector is like during each step, and how often it had collected all until then."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, tuple[int, ...], bool]] = []
        self.collected: list[int] = []

    def before_step(self, run: train.Run, number: int, batches: Any) -> None:
        self.seen.append((gc.isenabled(), gc.get_threshold(), garbage_collection.gc.get_freeze_count() > 0))
        self.collected.append(garbage_collection.gc.collected)


def looked(make: Any, *over: str, dir: str = "run") -> tuple[Look, list[float]]:
    cfg = make("data.eval=[]", "train.steps=3", *over, dir=dir)
    train.run(cfg, callbacks=[look := Look()])
    return look, [row["loss"] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]


def test_gc_settings_freeze_and_collect(make, uncounted, collector, monkeypatch) -> None:
    """Losses are the same; the file that a run leaves says the same again."""
    monkeypatch.setattr(garbage_collection, "SETTLE_STEPS", 2)
    whole = gc.get_threshold()
    plain, losses = looked(make)
    assert plain.seen == [(True, whole, False)] * 3
    frozen, same = looked(make, "train.gc=freeze", dir="freeze")
    assert frozen.seen == [(True, whole, False)] * 2 + [(True, whole, True)] and same == losses
    assert (plain.collected, frozen.collected) == ([0, 0, 0], [0, 0, 1])
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    third, same = looked(make, "train.gc=700,10,1000", dir="thresholds")
    recorded = (Path(make(dir="thresholds").run.dir) / "environment.json").read_text()
    assert json.loads(recorded)["settings"]["gc.threshold"] == [700, 10, 1000] and "hunter2" not in recorded
    assert third.seen == [(True, (700, 10, 1000), False)] * 3 and same == losses
    often, same = looked(make, "train.gc=2", dir="often")
    assert often.seen == [(False, whole, False)] * 2 + [(False, whole, True)] and same == losses


def test_gc_collects_only_every_n_steps(make, uncounted, collector) -> None:
    """Of its own accord it does not meanwhile: it is off."""
    train.run(make("data.eval=[]", "train.steps=6", "train.gc=2"), callbacks=[look := Look()])
    assert look.collected == [0, 0, 1, 1, 2, 3], "behind 2 and 4, and where what is there is frozen, behind 5"
    assert [enabled for enabled, *_ in look.seen] == [False] * 6


def test_gc_settings_are_restored_after_an_error(thawed) -> None:
    for how in ("freeze", 5, (5, 5, 5)):
        with pytest.raises(ZeroDivisionError), garbage_collection.gc_settings(how):
            gc.freeze() if how == "freeze" else None
            raise ZeroDivisionError
        assert gc.isenabled() and gc.get_threshold() != (5, 5, 5)


def test_objects_frozen_by_another_program_stay_frozen(thawed) -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with garbage_collection.gc_settings("freeze"):
            gc.freeze()
        assert gc.get_freeze_count() >= count > 0
        gc.disable()
        with garbage_collection.gc_settings((700, 10, 1000)):
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
        gc.unfreeze()


def test_resumed_run_may_change_gc_settings(make, uncounted) -> None:
    train.run(make("data.eval=[]", "train.steps=2", "train.warmup=0", "run.save_every=1"))
    again = make("data.eval=[]", "train.steps=2", "train.warmup=0", "train.gc=freeze", "run.resume=auto")
    assert train.run(again).status == "finished"


@pytest.mark.parametrize(
    ("written", "read"),
    [("700,10,1000", (700, 10, 1000)), ("[700, 10, 1000]", (700, 10, 1000)), ("' 1 , 2,3 '", (1, 2, 3)), ("100", 100),
     ("freeze", "freeze"), ("null", None)],
)  # fmt: skip
def test_gc_setting_accepts_valid_values(make, written, read) -> None:
    cfg = make(f"train.gc={written}")
    assert cfg.train.gc == read and load_config_text(to_yaml(cfg), []).train.gc == read


@pytest.mark.parametrize(
    "written", ["off", "0", "-5", "700,10", "[700, 10]", "0,10,10", "7,7,7,7", "1.5", "true", "[]"]
)
def test_gc_setting_rejects_invalid_values(make, written) -> None:
    with pytest.raises(ConfigError, match=r"train\.gc") as found:
        make(f"train.gc={written}")
    assert "700,10,1000" in str(found.value) or "," not in written
