"""Phases beyond SFT in FP16: rollouts, references and critics compute in it too, and one loss scale serves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import generation, rl, train
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.step import loss_scale

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("uncounted")]


def scales(run: train.RunResult) -> list[float]:
    return [row["loss_scale"] for row in read_rows(Path(run.dir) / "metrics.jsonl")]


@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
def test_preferences(preferring, loss: str):
    over = (f"preference={{loss: {loss}}}", "fp8.recipe=rowwise")
    low, exact = (rl.run(preferring(*over, f"train.precision={p}", dir=p)) for p in ("fp16", "fp32"))
    assert list(low.losses().values()) == pytest.approx(list(exact.losses().values()), rel=2e-2)
    assert scales(low) == [65536.0] * 3 and low.overflowed == 0


@pytest.mark.parametrize("over", [
    ("rl.mini_batches=2",), ("rl.algorithm=ppo",), ("rl.kl=0.1", "rl.reference=copy"), ("rl.invariant=true",),
    ("rl.stale=1",)])  # fmt: skip
def test_reinforcement_learning(reinforcing, monkeypatch, over: tuple[str, ...]):
    """Each update is a step of the scale: it doubles every two."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    seen, made = set[torch.dtype](), generation.Engine.generate

    def watched(self: generation.Engine, *more, **named):
        seen.add(self.caller.dtype)
        return made(self, *more, **named)

    monkeypatch.setattr(generation.Engine, "generate", watched)
    run = rl.run(reinforcing(*over, "fp8.recipe=rowwise", "train.precision=fp16"))
    assert run.status == "finished" and seen == {torch.float16} and run.skipped == run.overflowed == 0
    updates = 2 if "mini_batches" in over[0] else 1
    assert scales(run) == [65536.0 * 2 ** (updates * step // 2) for step in range(3)]
    assert all(row["loss"] is not None for row in read_rows(Path(run.dir) / "metrics.jsonl"))
