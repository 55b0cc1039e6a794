"""What `octavo plan` says of the memory of these phases, beside what their runs count."""

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
from octavo.train.estimate.memory.footprint import Footprint, Footprints
from octavo.train.estimate.memory.switches import savings
from octavo.train.forward import losses
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens, _patches, assume_tokens, count_tokens
from tests.generation.test_memory import Peak

pytestmark = pytest.mark.usefixtures("unseen")

Make = Callable[..., Config]
LORA = ("lora={rank: 4}", "model.load_in_fp8=block")
STILL = ("weights", "master", "gradients", "optimizer", "codes")
ONE = ("train.steps=1", "train.warmup=0")


def memory_of(cfg: Config) -> dict[str, int]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")[0]["memory"]


def predicted(cfg: Config, batches: list[dict]) -> Footprint:
    """For the micro-batch of these with the most tokens."""
    batch = max(batches, key=lambda b: b["input_ids"].numel())
    rows, length = batch["input_ids"].shape
    judged = int((losses.targets(batch["labels"]) != losses.IGNORE).any(dim=0).sum())
    patches, out, images = _patches(batch, models.read_config(Path(cfg.model.path)))
    counts = {"foundation": rows * length, "lm_head": rows * judged, "image_encoder": patches, "image_projector": out}
    model, family = planning.meta_model(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    tokens = Tokens(counts, length, patches // images)
    return Footprints(cfg, model, family, plan, tokens, device="cpu", copy=rl.reference_of(cfg) == "copy").of(cfg)


def agree(found: dict[str, int], want: Footprint) -> None:
    """To the byte, what a forward keeps within 5 %, and the whole within 5 %."""
    assert {kind: found[kind] for kind in STILL} == {kind: want.kinds[kind] for kind in STILL}
    assert found.get("reference", 0) == want.kinds["reference"]
    kept = ("activations", "logits")
    assert found["activations"] == pytest.approx(want.kinds["activations"], rel=0.05)
    counted = sum(found[kind] for kind in (*STILL, *kept)) + found.get("reference", 0)
    assert counted == pytest.approx(want.update - want.kinds["workspace"], rel=0.05)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize(
    "over",
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
def test_a_step_of_rl_counts_what_was_predicted(reinforcing: Make, monkeypatch, over: tuple[str, ...]) -> None:
    cfg = reinforcing(*ONE, *over, "train.micro_batch=4")
    seen, peaks = [], []
    cut, generate = rl_step.micro_batches, generation.Engine.generate

    def watched(engine, *args):
        assert all(p.grad is None for p in engine.caller.model.parameters())
        with Peak() as peak:
            out = generate(engine, *args)
        peaks.append(peak.most)
        return out

    monkeypatch.setattr(rl_step, "micro_batches", lambda *args: [seen.append(b) or b for b in cut(*args)])
    monkeypatch.setattr(generation.Engine, "generate", watched)
    rl.run(cfg)
    found, want = memory_of(cfg), predicted(cfg, seen)
    agree(found, want)
    assert want.rollout is not None and found["kv_cache"] == want.rollout.kinds["kv_cache"] > 0
    if over[0] == "fp8.recipe=off":  # in FP8 the reference backend computes in fp32, as no other does
        kinds = want.rollout.kinds
        assert "gradients" not in kinds and len(peaks) == 2
        assert all(peak == pytest.approx(kinds["kv_cache"] + kinds["workspace"], rel=0.05) for peak in peaks)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("over", [(), (*LORA, "preference={loss: ipo}")], ids=["full", "lora"])
def test_a_step_of_preferences_counts_what_was_predicted(preferring: Make, monkeypatch, over: tuple[str, ...]) -> None:
    cfg = preferring(*ONE, *over)
    seen, loss_at = [], preference_phase.PreferenceStepper.loss_at_positions

    def watched(stepper, batch, *args):
        seen.append(batch)
        return loss_at(stepper, batch, *args)

    monkeypatch.setattr(preference_phase.PreferenceStepper, "loss_at_positions", watched)
    rl.run(cfg)
    assert seen[0]["input_ids"].shape[0] == 2 * cfg.train.micro_batch
    agree(memory_of(cfg), predicted(cfg, seen))


@pytest.mark.usefixtures("bare_forward")
def test_a_rollout_takes_as_many_sequences_as_there_is_room_for(reinforcing: Make, monkeypatch) -> None:
    """The same completions at whatever number; where not even one fits, it says what would."""
    said = []
    for name, free in (("all", None), ("some", 300_000), ("one", 1)):
        cfg = reinforcing("fp8.recipe=off", *ONE, "rl.show=16", dir=name)
        used = []

        def room(*args, used=used):
            used.append(slots_for(*args))
            return used[-1]

        monkeypatch.setattr(rollout, "free_bytes", lambda device, free=free: free)
        monkeypatch.setattr(rollout, "slots_for", room)
        if name == "one":
            with pytest.raises(TrainError, match=r"0.0 MB are free for the rollout, and one completion .*rl.kv: fp8"):
                rl.run(cfg)
            continue
        rl.run(cfg)
        said.append((Path(cfg.run.dir) / "completions.jsonl").read_text())
        assert used == [16] if free is None else 1 < used[0] < 16
    assert said[0] == said[1]


def test_where_rows_hold_no_answer_the_longest_micro_batch_is_planned_for(reinforcing: Make, preferring: Make) -> None:
    """A measured plan asks for it; prompts and pairs are no rows of SFT."""
    for make, rows in ((reinforcing, 8), (preferring, 4)):
        cfg = make("data.train=[{path: /nowhere/rows.jsonl}]", "train.seq_length=64")
        model, family = planning.meta_model(cfg)
        found = count_tokens(cfg, None, family, model.config)
        assert found == assume_tokens(cfg, family.components, model.config)[0] and found.rows == rows
        assert found.counts["lm_head"] == rows * (4 if make is reinforcing else 64)


def test_no_switch_is_shown_that_phase_rl_refuses(reinforcing: Make):
    cfg = reinforcing()
    model, family = planning.meta_model(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    sizes = Footprints(cfg, model, family, plan, assume_tokens(cfg, family.components, model.config)[0], device="cpu")
    keys = [switch.key for switch in savings(sizes)]
    assert "optimizer.states" in keys and "optimizer.update" not in keys
