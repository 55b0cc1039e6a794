"""`optimizer.offload`: the run with states in host memory is the run without, resumed too.

Both memories are the CPU's here, and every copy happens as late as it may, so that whoever does not wait for one reads
what is not there yet.
"""

from __future__ import annotations

import signal

import pytest
import torch

from octavo import train
from octavo.config import override
from octavo.fp8.optim import offload as offload_file
from octavo.fp8.optim.offload import Offload, OffloadedAdamW
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import build
from octavo.train.step.optimizer import adamw
from tests.fp8.optim.test_offload import Late

from .conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

SHORT = ("train.steps=4", "data.eval=[]")
INSIDE = ("optimizer.update=backward",)


class Counted(Late):
    """Transfers that count the bytes that were asked for in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def host(self, size: int) -> torch.Tensor:
        self.made += size
        return torch.full((size,), 0xA5, dtype=torch.uint8)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Let a step take the way of states that lie elsewhere than their weights."""
    moves = Counted()
    served = Offload("cpu", batch=64 << 10, transfers=moves)
    monkeypatch.setattr(build, "check_supported", lambda cfg, world: None)
    monkeypatch.setattr(offload_file, "offload_for", lambda device: served)
    return moves


@pytest.mark.parametrize(
    ("master", "over"),
    [("bf16+16", ()), pytest.param("bf16+sr", INSIDE, marks=pytest.mark.long)],
    ids=["step", "backward"],
)
def test_the_run_is_the_one_without_and_resumes(make, transfers, master: str, over):
    kept = (*SHORT, *over, "optimizer.states=fp8", f"optimizer.master={master}", "run.health_every=2")
    whole = train.run(make(*kept, dir="whole"))
    assert not transfers.made, "states were not to leave the device"
    cfg = make(*kept, "optimizer.offload=true", "run.save=async", dir="away")
    train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    fetched = len(transfers.log)
    assert fetched > 20 and transfers.made
    away = train.run(override(cfg, ["run.resume=auto"]))
    assert away.losses() == whole.losses() and len(transfers.log) > fetched
    zeroed = [[row.get("zeroed_v") for row in read_rows(run.dir / "metrics.jsonl")] for run in (whole, away)]
    assert zeroed[0] == zeroed[1]


def test_the_optimizer_is_the_one_that_was_asked_for(make, transfers):
    model = torch.nn.Linear(8, 8)
    settings = ("optimizer.states=fp8", "optimizer.master=fp32")
    assert type(adamw(model, make(*settings, "optimizer.offload=true"))) is OffloadedAdamW
    assert not isinstance(adamw(model, make(*settings)), OffloadedAdamW)
