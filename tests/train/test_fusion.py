"""`fp8.fuse: on` in training: the same run, with q, k and v, and gate and up, as one GEMM each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import fp8, train
from octavo.config import override
from octavo.fp8 import fusion
from octavo.models import tiny
from octavo.train import planning

from .test_ranks import losses, torchrun

# Under mxfp8, whose blocks of 32 outputs end where k and v of 64 do; under blockwise's 128 those of this model do not.
COMMON = ("fp8.recipe=mxfp8", "train.steps=4", "train.warmup=0", "data.eval=[]", "run.save_every=2")
QKV = {tuple(f"model.language_model.layers.{i}.self_attn.{name}_proj" for name in "qkv") for i in (0, 1)}


def kept(run):
    """(what fused by the run's plan.json, its proof)."""
    plan = json.loads((run.dir / "plan.json").read_text())
    return [tuple(g["names"]) for g in plan["groups"] if g["fused"]], json.loads((run.dir / "proof.json").read_text())


@pytest.fixture
def calls(monkeypatch):
    """The names of the layers of each GEMM that ran for several."""
    seen = []
    real = fusion.Group._compute

    def compute(self, member, x):
        seen.append(tuple(m.name for m in self.members))
        return real(self, member, x)

    monkeypatch.setattr(fusion.Group, "_compute", compute)
    return seen


def test_losses_are_close_and_the_proof_passes(make, calls):
    apart = train.run(make(*COMMON, dir="apart"))
    assert not calls and kept(apart)[0] == []
    joined = train.run(make(*COMMON, "fp8.fuse=on", "run.gain_steps=1", dir="joined"))
    groups, proof = kept(joined)
    assert set(groups) >= QKV and set(calls) == set(groups)
    assert joined.losses()[1] == apart.losses()[1]  # codes and outputs are the same bits, dx is not
    assert joined.losses() == pytest.approx(apart.losses(), rel=2e-3)
    assert proof == kept(apart)[1] and proof["fp8_gemms"] > 0
    assert json.loads((joined.dir / "gain.json").read_text())["steps"] == 1


def test_a_run_goes_on_fused_and_is_evaluated_fused(make, calls):
    cfg = make(*COMMON, "fp8.fuse=on", dir="whole")
    whole = train.run(cfg)
    model, _, _ = train.load_run(whole.dir)
    assert fusion.fused(model) == tuple(kept(whole)[0]) != ()
    (whole.dir / "result.json").unlink()
    calls.clear()
    again = train.run(override(cfg, [f"run.resume={whole.dir}/checkpoints/step_2"]))
    assert again.losses() == whole.losses() and calls
    high, _, _ = train.load_run(whole.dir, recipe="off")
    other, _, _ = train.load_run(whole.dir, recipe="rowwise")  # which cannot fuse
    assert fusion.fused(high) == fusion.fused(other) == ()


@pytest.mark.long
def test_a_measured_plan_is_the_runs_own(make, calls):
    """`auto` goes on with what its plan.json says, also of sisters."""
    cfg = make(*COMMON, "fp8.recipe=auto", "fp8.candidates=[mxfp8]")
    first = train.run(cfg)
    assert not calls and kept(first)[0] == []
    found = json.loads((first.dir / "plan.json").read_text())
    for line in found["sisters"]:
        line["fuse"] = "on" if line["names"] == "q_proj k_proj v_proj" else "off"
    (first.dir / "plan.json").write_text(json.dumps(found))
    (first.dir / "result.json").unlink()
    train.run(override(cfg, [f"run.resume={first.dir}/checkpoints/step_2"]))
    assert set(calls) == QKV


def test_recomputation_changes_no_loss(make, calls):
    common = (*COMMON, "fp8.fuse=on")
    assert (
        train.run(make(*common, dir="a")).losses() == train.run(make(*common, "train.recompute=full", dir="b")).losses()
    )
    assert calls


def test_a_watched_forward_keeps_what_its_recomputation_keeps(make, tmp_path: Path):
    """The first step counts kept bytes in the forward alone: gated MLPs are fused there as they are in backward."""
    tiny.write("qwen3_vl", tmp_path / "whole")
    over = (f"model.path={tmp_path / 'whole'}", "fp8.fuse=on", "train.recompute=full", "train.steps=1")
    train.run(make(*over, "train.warmup=0", "data.eval=[]"))


@pytest.mark.long
def test_two_ranks_fuse_as_one_does(make, calls):
    over = (*COMMON, "fp8.fuse=on", "train.lr=5e-4")
    one, two = make(*over, dir="one"), make(*over, dir="two")
    alone = train.run(one)
    done = torchrun(two)
    assert done.returncode == 0, done.stderr
    assert losses(two) == pytest.approx(list(alone.losses().values()), rel=1e-3) and calls
    proofs = [json.loads((Path(cfg.run.dir) / "proof.json").read_text()) for cfg in (one, two)]
    assert proofs[0]["shares"] == proofs[1]["shares"]


def test_compiled_blocks_are_not_fused_and_the_plan_says_so(make, tmp_path):
    plan, _, notes = planning.plan_for(make(*COMMON, "train.compile=true"))
    assert plan.groups and not any(g.fused for g in plan.groups)
    assert any("compiled blocks run each layer's own GEMMs" in note for note in notes)
    fused, _, _ = planning.plan_for(make(*COMMON, "fp8.fuse=on"))
    file = fp8.save_plan(fused, tmp_path / "plan.json")
    with pytest.raises(fp8.PlanError, match=r"fuses \d+ groups of layers .*Use train.compile: false"):
        planning.plan_for(make(f"fp8.plan={file}", "train.compile=true"))


def test_the_plan_of_a_run_says_which_groups_are_one(make):
    one = "model.language_model.layers.{0,1}.self_attn.q_proj + k_proj + v_proj, 2 groups"
    plan, _, _ = planning.plan_for(make(*COMMON, "fp8.fuse=on"))
    assert f"one GEMM: {one} (fuse: on)" in plan.table()
    plan, _, _ = planning.plan_for(make("fp8.fuse=on"))
    assert f"own: {one} (64 outputs are no multiple of 128, so that blocks of w would mix)" in plan.table()
