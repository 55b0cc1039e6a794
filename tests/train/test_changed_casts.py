"""Runs under a later version, in which the name of their recipe has other casts: a resumed run keeps its casts, to the
bit, and a new run or a fork has the casts of the version."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from torch import nn

from octavo import fp8, train
from octavo.checkpoint.run_state.files import read_state
from octavo.config import Config, override
from octavo.fp8.arithmetic.recipe import CastTable
from octavo.fp8.weights.frozen import is_frozen
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup.frozen_base import quantize_frozen_weights
from tests.fp8.changed_recipe import change_recipe
from tests.rl.forks import both

from .. import ranks
from .conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

OVER = ("train.steps=4", "train.warmup=1", "data.eval=[]")
LATER = "tensorwise"  # other blocks with scales of powers of two give equal codes here, but for subnormal values
CHANGE = (
    "blockwise (e4m3): fwd x e4m3 1x128 pow2 (now e4m3 tensor fp32), fwd w e4m3 128x128 pow2 (now e4m3 tensor fp32)"
)


class Before(NamedTuple):
    """A whole run, and the same run stopped after its second step."""

    whole: train.RunResult
    stopped: Config

    @property
    def checkpoint(self) -> Path:
        return Path(self.stopped.run.dir) / "checkpoints" / "step_2"


@pytest.fixture
def before(make) -> Before:
    whole = train.run(make(*OVER, dir="whole"))
    stopped = make(*OVER, dir="stopped")
    assert train.run(stopped, callbacks=[at(1, signal.SIGTERM)]).steps == 2
    return Before(whole, stopped)


def said(cfg: Config) -> tuple[train.RunResult, str]:
    console = Console(record=True, width=1000)
    return train.run(cfg, console=console), console.export_text()


def casts_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())["casts"]["blockwise e4m3"]


def test_resumed_run_keeps_its_casts(make, before: Before, monkeypatch, tmp_path: Path) -> None:
    copied = tmp_path / "copied" / "step_2"  # without the plan.json of its run
    shutil.copytree(before.checkpoint, copied)
    change_recipe(monkeypatch, "blockwise", LATER)
    resumed, text = said(override(before.stopped, ["run.resume=auto"]))
    assert resumed.losses() == before.whole.losses()
    assert f"note: plan.json keeps the casts that it was saved with: {CHANGE}" in text
    elsewhere, text = said(make(*OVER, f"run.resume={copied}", dir="elsewhere"))
    assert [elsewhere.losses()[step] for step in (3, 4)] == [before.whole.losses()[step] for step in (3, 4)]
    assert CHANGE in text
    # What both runs write has the same casts, for the next resume.
    for run in (resumed, elsewhere):
        assert casts_of(run.dir / "plan.json") == casts_of(before.whole.dir / "plan.json")
        plan = read_state(run.dir / "checkpoints" / "step_4")["counters"]["plan"]
        assert plan["casts"]["blockwise e4m3"] == casts_of(before.whole.dir / "plan.json")


def test_new_run_and_fork_have_the_casts_of_the_version(make, before: Before, monkeypatch) -> None:
    named = train.run(make(*OVER, f"fp8.recipe={LATER}", "fp8.format=e4m3", dir="named"))
    change_recipe(monkeypatch, "blockwise", LATER)
    new, text = said(make(*OVER, dir="new"))
    assert new.losses() == named.losses() != before.whole.losses() and CHANGE not in text
    fork, text = said(make(*OVER, f"run.fork={before.checkpoint}", dir="fork"))
    assert f"note: recipes of this fork have other casts than the run that it continues: {CHANGE}" in text
    assert casts_of(fork.dir / "plan.json") == casts_of(new.dir / "plan.json")


def test_run_of_0_5_0_keeps_its_casts(make, monkeypatch) -> None:
    """Its plan.json has no casts; the first resume writes them."""
    with monkeypatch.context() as version:
        change_recipe(version, "blockwise", "blockwise_1d")
        whole = train.run(make(*OVER, dir="whole"))
        stopped = make(*OVER, dir="stopped")
        train.run(stopped, callbacks=[at(1, signal.SIGTERM)])
    file = Path(stopped.run.dir) / "plan.json"
    written = json.loads(file.read_text())
    casts = written.pop("casts")
    file.write_text(json.dumps(written))
    change = "blockwise (e4m3): wgrad x e4m3 128x1 pow2 (now e4m3 128x128 pow2)"
    resumed, text = said(override(stopped, ["run.resume=auto"]))
    assert f"note: plan.json keeps the casts that it was saved with: {change}" in text
    assert resumed.losses() == whole.losses()  # most codes of both forms are equal: see the casts, too
    assert casts_of(file) == casts["blockwise e4m3"]
    assert {**json.loads(file.read_text()), "casts": 0} == {**written, "casts": 0}


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks, which have the changed recipe")
def test_two_ranks_resume_with_the_casts_of_one(make, before: Before, monkeypatch) -> None:
    change_recipe(monkeypatch, "blockwise", LATER)
    cfg = make(*OVER, f"run.resume={before.checkpoint}", dir="two")
    for code, text in both(cfg):
        assert code == 0, text
    losses = [row["loss"] for row in read_rows(Path(cfg.run.dir) / "metrics.jsonl")]
    whole = list(before.whole.losses().values())
    assert losses == pytest.approx(whole[2:], rel=1e-5), "the casts of the version change the fourth digit"


def test_reference_of_other_casts_is_not_stored_in_codes_of_the_name() -> None:
    """A copy of the policy stores codes only if they are the codes with which the policy computes."""
    for changed, is_stored in (({}, True), ({"fwd": "e4m3 1x128 pow2 @ e4m3 row pow2"}, False)):
        casts = {key: {**entry, **changed} for key, entry in CastTable().to_json().items()}
        model = nn.Sequential(nn.Linear(32, 32))
        policy = fp8.Policy("blockwise", casts=CastTable.from_json(casts))
        quantize_frozen_weights(model, fp8.plan(model, policy))
        assert is_frozen(model[0].weight) is is_stored
