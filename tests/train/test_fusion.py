"""`fp8.fuse: on` in training: the same run with gated MLPs and norms fused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import fp8, train
from octavo.config import load_config_text, override
from octavo.fp8.blocks.gated_mlp import GatedMlp
from octavo.models.tiny import tiny
from octavo.train.run_dir import run_dir
from octavo.train.setup import planning

from .test_ranks import losses, on_ranks

pytestmark = pytest.mark.usefixtures("bare_forward")

COMMON = ("train.steps=4", "train.warmup=0", "data.eval=[]", "run.save_every=2")
FUSED = [f"model.language_model.layers.{i}.mlp" for i in (0, 1)]


def plan_and_proof(run):
    """(what is fused by the run's plan.json, its proof)."""
    plan = json.loads((run.dir / "plan.json").read_text())
    return [b["name"] for b in plan["blocks"] if b["fused"]], json.loads((run.dir / "proof.json").read_text())


def fused(model):
    return [name for name, module in model.named_modules() if isinstance(module, GatedMlp)]


@pytest.fixture
def calls(monkeypatch):
    """The gated MLPs that ran as one."""
    seen = []
    real = GatedMlp.replacement_forward

    def replacement_forward(self, x):
        y = real(self, x)
        if y is not None:
            seen.append(self)
        return y

    monkeypatch.setattr(GatedMlp, "replacement_forward", replacement_forward)
    return seen


def test_losses_are_close_and_the_proof_passes(make, calls):
    separate = train.run(make(*COMMON, dir="separate"))
    assert not calls and plan_and_proof(separate)[0] == []
    one = train.run(make(*COMMON, "fp8.fuse=on", "run.gain_steps=1", dir="one"))
    names, proof = plan_and_proof(one)
    assert set(names) >= set(FUSED) and len({id(m) for m in calls}) == len(FUSED)
    assert one.losses() == pytest.approx(separate.losses(), rel=2e-3)
    assert proof == plan_and_proof(separate)[1] and proof["fp8_gemms"] > 0
    assert json.loads((one.dir / "gain.json").read_text())["steps"] == 1


def test_resume_and_evaluation_use_fused_blocks(make, calls):
    cfg = make(*COMMON, "fp8.fuse=on", dir="whole")
    whole = train.run(cfg)
    model, _, _ = train.load_run(whole.dir)
    assert fused(model) == FUSED
    (whole.dir / "result.json").unlink()
    calls.clear()
    again = train.run(override(cfg, [f"run.resume={whole.dir}/checkpoints/step_2"]))
    assert again.losses() == whole.losses() and calls
    high, _, _ = train.load_run(whole.dir, recipe="off")
    assert fused(high) == []


def test_recomputation_changes_no_loss(make, calls):
    common = (*COMMON, "fp8.fuse=on")
    assert (
        train.run(make(*common, dir="a")).losses() == train.run(make(*common, "train.recompute=full", dir="b")).losses()
    )
    assert calls


def test_a_watched_forward_keeps_what_its_recomputation_keeps(make, tmp_path: Path):
    """The first step counts saved bytes in the forward alone: gated MLPs are fused there as they are in backward."""
    tiny.write("qwen3_vl", tmp_path / "whole")
    over = (f"model.path={tmp_path / 'whole'}", "fp8.fuse=on", "train.recompute=full", "train.steps=1")
    train.run(make(*over, "train.warmup=0", "data.eval=[]"))


@pytest.mark.long
def test_two_ranks_fuse_as_one_does(make, calls):
    over = (*COMMON, "fp8.fuse=on", "train.lr=5e-4")
    one, two = make(*over, dir="one"), make(*over, dir="two")
    alone = train.run(one)
    on_ranks(two)
    assert losses(two) == pytest.approx(list(alone.losses().values()), rel=1e-3) and calls
    proofs = [json.loads((Path(cfg.run.dir) / "proof.json").read_text()) for cfg in (one, two)]
    assert proofs[0]["shares"] == proofs[1]["shares"]


def test_compiled_blocks_are_fused_unless_their_weights_are_fp8(make):
    plan, _, _ = planning.plan_for(make(*COMMON, "train.compile=true", "fp8.fuse=on"))
    assert {b.name for b in plan.blocks if b.fused} >= set(FUSED)
    with pytest.raises(fp8.PlanError, match=r"planned to be fused .*is FP8 .*outside compiled graphs. Use fuse: off"):
        planning.plan_for(make(*COMMON, "train.compile=true", "fp8.fuse=on", "fp8.param=true"))
    planning.plan_for(make(*COMMON, "train.compile=true", "fp8.param=true"))
    planning.plan_for(make(*COMMON, "fp8.fuse=on", "fp8.param=true"))


def test_auto_of_version_0_4_0_is_off_and_says_so(make):
    """Its configurations say it, as the default of then: such a run goes on."""
    old, new = make("fp8.fuse=auto"), make()
    assert run_dir.settings(old) == run_dir.settings(new)
    plan, _, notes = planning.plan_for(old)
    assert not plan.blocks and any(note.startswith("fuse: auto means off") for note in notes)
    text = "model: {path: m}\ndata: {train: [{path: d}]}\ntrain: {steps: 1}\nfp8: {plan: p.json, fuse: auto}"
    assert load_config_text(text).fp8.plan
