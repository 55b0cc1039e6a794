"""Memory that `octavo plan` predicts for phases rl and preference, compared with what their runs measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import generation, models, rl
from octavo.config import Config
from octavo.rl.phases import preference_phase, rl_step
from octavo.rl.rollout import rollout
from octavo.rl.rollout.rollout import slots_for
from octavo.train import TrainError
from octavo.train.estimate.memory.footprint import Footprint, MemoryEstimator
from octavo.train.estimate.memory.switches import savings
from octavo.train.forward import losses
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens, _patches, assume_tokens, count_tokens
from tests.generation.test_memory import Peak

pytestmark = pytest.mark.usefixtures("unseen")

Make = Callable[..., Config]
LORA = ("lora={rank: 4}", "model.load_in_fp8=block")
PERSISTENT = ("weights", "master", "gradients", "optimizer", "codes")
ONE = ("train.steps=1", "train.warmup=0")


def memory_of(cfg: Config) -> dict[str, int]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")[0]["memory"]


def predicted(cfg: Config, batches: list[dict]) -> Footprint:
    """Predict the memory for the micro-batch with the most tokens."""
    batch = max(batches, key=lambda b: b["input_ids"].numel())
    rows, length = batch["input_ids"].shape
    loss_positions = int((losses.targets(batch["labels"]) != losses.IGNORE).any(dim=0).sum())
    patches, out, images = _patches(batch, models.read_config(Path(cfg.model.path)))
    counts = {
        "foundation": rows * length,
        "lm_head": rows * loss_positions,
        "image_encoder": patches,
        "image_projector": out,
    }
    model, family = planning.meta_model(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    tokens = Tokens(counts, length, patches // images)
    return MemoryEstimator(
        cfg, model, family, plan, tokens, device="cpu", copy=rl.reference_kind(cfg) == "copy"
    ).estimate(cfg)


def assert_matches(measured: dict[str, int], prediction: Footprint) -> None:
    """Assert equal persistent memory, and activations and the total within 5 %."""
    assert {kind: measured[kind] for kind in PERSISTENT} == {kind: prediction.kinds[kind] for kind in PERSISTENT}
    assert measured.get("reference", 0) == prediction.kinds["reference"]
    forward_kinds = ("activations", "logits")
    assert measured["activations"] == pytest.approx(prediction.kinds["activations"], rel=0.05)
    counted = sum(measured[kind] for kind in (*PERSISTENT, *forward_kinds)) + measured.get("reference", 0)
    assert counted == pytest.approx(prediction.update - prediction.kinds["workspace"], rel=0.05)


@pytest.mark.usefixtures("seen", "torch_products")
@pytest.mark.parametrize(
    "overrides",
    [
        ("rl.kl=0.1",),
        (*LORA, "rl.kl=0.1", "rl.kv=fp8", "rl.slots=6"),
        pytest.param(("rl.pages=31", "fp8.recipe=off"), marks=pytest.mark.long),
        pytest.param(
            ("fp8.recipe=off", "rl.kl=0.1", "optimizer.master=bf16+sr", "train.steps=2"), marks=pytest.mark.long
        ),
        pytest.param((*LORA, "rl.algorithm=ppo", "lora.dtype=bf16"), marks=pytest.mark.long),
        pytest.param(("rl.algorithm=ppo", "optimizer.master=bf16+16", "optimizer.states=fp8"), marks=pytest.mark.long),
    ],
    ids=["full", "lora", "pages", "high", "ppo_lora", "ppo"],
)
def test_rl_step_uses_the_predicted_memory(rl_config: Make, monkeypatch, overrides: tuple[str, ...]) -> None:
    cfg = rl_config(*ONE, *overrides, "train.micro_batch=4")
    batches, peaks = [], []
    make_batches, generate = rl_step.micro_batches, generation.Engine.generate

    def record_peak(engine, *args):
        assert all(p.grad is None for p in engine.caller.model.parameters())
        with Peak() as peak:
            out = generate(engine, *args)
        peaks.append(peak.most)
        return out

    monkeypatch.setattr(rl_step, "micro_batches", lambda *args: [batches.append(b) or b for b in make_batches(*args)])
    monkeypatch.setattr(generation.Engine, "generate", record_peak)
    rl.run(cfg)
    measured, prediction = memory_of(cfg), predicted(cfg, batches)
    assert_matches(measured, prediction)
    assert prediction.rollout is not None and measured["kv_cache"] == prediction.rollout.kinds["kv_cache"] > 0
    if overrides[0] == "fp8.recipe=off":  # in FP8 only the reference backend computes in fp32
        kinds = prediction.rollout.kinds
        assert "gradients" not in kinds and len(peaks) == 2
        assert all(peak == pytest.approx(kinds["kv_cache"] + kinds["workspace"], rel=0.05) for peak in peaks)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("overrides", [(), (*LORA, "preference={loss: ipo}")], ids=["full", "lora"])
def test_preference_step_uses_the_predicted_memory(
    preference_config: Make, monkeypatch, overrides: tuple[str, ...]
) -> None:
    cfg = preference_config(*ONE, *overrides)
    batches, loss_at = [], preference_phase.PreferenceStepper.loss_at_positions

    def record_batch(stepper, batch, *args):
        batches.append(batch)
        return loss_at(stepper, batch, *args)

    monkeypatch.setattr(preference_phase.PreferenceStepper, "loss_at_positions", record_batch)
    rl.run(cfg)
    assert batches[0]["input_ids"].shape[0] == 2 * cfg.train.micro_batch
    assert_matches(memory_of(cfg), predicted(cfg, batches))


@pytest.mark.usefixtures("bare_forward")
def test_rollout_runs_as_many_sequences_as_fit(rl_config: Make, monkeypatch) -> None:
    """Completions do not depend on the number; if not even one fits, the error names the fix."""
    logs = []
    for name, free in (("all", None), ("some", 300_000), ("one", 1)):
        cfg = rl_config("fp8.recipe=off", *ONE, "rl.show=16", dir=name)
        used = []

        def record_slots(*args, used=used):
            used.append(slots_for(*args))
            return used[-1]

        monkeypatch.setattr(rollout, "free_bytes", lambda device, free=free: free)
        monkeypatch.setattr(rollout, "slots_for", record_slots)
        if name == "one":
            with pytest.raises(
                TrainError, match=r"the rollout has 1 B of free memory, but one completion .*rl.kv: fp8"
            ):
                rl.run(cfg)
            continue
        rl.run(cfg)
        logs.append((Path(cfg.run.dir) / "completions.jsonl").read_text())
        assert used == [16] if free is None else 1 < used[0] < 16
    assert logs[0] == logs[1]


def test_plan_assumes_the_longest_micro_batch_for_prompts_and_pairs(rl_config: Make, preference_config: Make) -> None:
    """A measured plan needs token counts, and prompts and pairs are not rows of SFT."""
    for make, rows in ((rl_config, 8), (preference_config, 4)):
        cfg = make("data.train=[{path: /nowhere/rows.jsonl}]", "train.seq_length=64")
        model, family = planning.meta_model(cfg)
        measured = count_tokens(cfg, None, family, model.config)
        assert measured == assume_tokens(cfg, family.components, model.config)[0] and measured.rows == rows
        assert measured.counts["lm_head"] == rows * (4 if make is rl_config else 64)


def test_savings_exclude_switches_that_phase_rl_rejects(rl_config: Make):
    cfg = rl_config()
    model, family = planning.meta_model(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    sizes = MemoryEstimator(
        cfg, model, family, plan, assume_tokens(cfg, family.components, model.config)[0], device="cpu"
    )
    keys = [switch.key for switch in savings(sizes)]
    assert "optimizer.states" in keys and "optimizer.update" not in keys
