"""Going on from another run's checkpoint, in another precision or order of data: what may differ, and what may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo import train
from octavo.config import override

from .conftest import STEPS

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

BEGINS = STEPS - 2


def last_losses(result: train.RunResult) -> list[float]:
    return [loss for step, loss in result.losses().items() if step > BEGINS]


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return {}


@pytest.fixture
def reference(make, kept: dict[str, Any]) -> Any:
    """A finished run in high precision, and the checkpoint of its milestone."""
    if not kept:
        result = train.run(make(f"run.milestones=[{BEGINS}]", "fp8.recipe=off", "run.save_every=1", dir="reference"))
        kept.update(result=result, checkpoint=result.dir / "milestones" / f"step_{BEGINS}")
    return kept


def test_fork_without_changes_equals_the_run(make, reference) -> None:
    """Milestones outlive run.keep; the fork has the same losses and can be killed and resumed like any run."""
    assert reference["checkpoint"].is_dir()
    cfg = make("fp8.recipe=off", f"run.fork={reference['checkpoint']}", dir="same")
    fork = train.run(cfg)
    assert last_losses(fork) == last_losses(reference["result"])
    assert train.run(override(cfg, ["run.resume=auto"])).status == "finished"


def test_a_fork_goes_on_in_fp8_and_with_other_data(make, reference) -> None:
    more = [f"run.fork={reference['checkpoint']}", "data.eval=[]"]
    fp8 = train.run(make("fp8.recipe=delayed", *more, dir="fp8"))
    proof = json.loads((fp8.dir / "proof.json").read_text())
    assert proof["fp8_gemms"] and last_losses(fp8) != last_losses(reference["result"])
    assert last_losses(fp8) == pytest.approx(last_losses(reference["result"]), rel=0.05)
    seed = train.run(make("fp8.recipe=off", "run.seed=5", *more, dir="seed"))
    assert last_losses(seed) != last_losses(reference["result"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("train.lr=1e-5", r"different settings: train\.lr was"),
        ("optimizer.states=fp8", r"optimizer\.states was 'fp32', is now 'fp8'"),
        ("run.fork=nowhere/step_1", "nowhere/step_1 does not exist; name a checkpoint"),
    ],
)
def test_fork_rejects_changed_settings(make, reference, changed: str, message: str) -> None:
    with pytest.raises(train.TrainError, match=message):
        train.run(make("fp8.recipe=off", f"run.fork={reference['checkpoint']}", changed, dir="wrong"))
