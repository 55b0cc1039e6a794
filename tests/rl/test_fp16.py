"""Phases rl and preference in FP16: rollouts, references and critics compute in it, with one loss scale."""

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
def test_preferences_in_fp16_match_fp32(preference_config, loss: str):
    overrides = (f"preference={{loss: {loss}}}", "fp8.recipe=rowwise")
    low, exact = (rl.run(preference_config(*overrides, f"train.precision={p}", dir=p)) for p in ("fp16", "fp32"))
    assert list(low.losses().values()) == pytest.approx(list(exact.losses().values()), rel=2e-2)
    assert scales(low) == [65536.0] * 3 and low.overflowed == 0


@pytest.mark.parametrize("overrides", [
    ("rl.mini_batches=2",), ("rl.algorithm=ppo",), ("rl.kl=0.1", "rl.reference=copy"), ("rl.invariant=true",),
    ("rl.stale=1",)])  # fmt: skip
def test_rl_in_fp16_scales_the_loss(rl_config, monkeypatch, overrides: tuple[str, ...]):
    """Each update counts for the scale, which doubles after every two."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    dtypes, generate = set[torch.dtype](), generation.Engine.generate

    def record_dtype(self: generation.Engine, *args, **kwargs):
        dtypes.add(self.caller.dtype)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(generation.Engine, "generate", record_dtype)
    run = rl.run(rl_config(*overrides, "fp8.recipe=rowwise", "train.precision=fp16"))
    assert run.status == "finished" and dtypes == {torch.float16} and run.skipped == run.overflowed == 0
    updates = 2 if "mini_batches" in overrides[0] else 1
    assert scales(run) == [65536.0 * 2 ** (updates * step // 2) for step in range(3)]
    assert all(row["loss"] is not None for row in read_rows(Path(run.dir) / "metrics.jsonl"))
