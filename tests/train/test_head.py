"""`fp8.lm_head`: a run whose head multiplies in FP8."""

from __future__ import annotations

import json

import pytest

from octavo import train

from .test_ranks import losses, on_ranks

pytestmark = pytest.mark.usefixtures("bare_forward")

COMMON = ("train.steps=4", "train.warmup=0", "data.eval=[]", "run.gain_steps=1")
HEAD = "fp8.lm_head={recipe: blockwise}"


def proof(run):
    return json.loads((run.dir / "proof.json").read_text())


@pytest.mark.parametrize("logits", ["chunked", "full"])
def test_head_in_fp8_trains_close_to_bf16_and_is_in_the_proof(make, logits):
    plain = train.run(make(*COMMON, f"train.logits={logits}", dir="plain"))
    head = train.run(make(*COMMON, f"train.logits={logits}", HEAD, dir="head"))
    assert head.losses() == pytest.approx(plain.losses(), rel=2e-2) and head.losses() != plain.losses()
    assert "lm_head" not in proof(plain)["components"] or "high" in str(proof(plain)["components"]["lm_head"])
    counted = proof(head)["components"]["lm_head"]
    assert {gemm: list(backends) for gemm, backends in counted.items() if gemm != "recompute"} == {
        gemm: ["reference"] for gemm in ("fwd", "dgrad", "wgrad")
    }
    assert ("recompute" in counted) == (logits == "chunked") and proof(head)["share"] == proof(plain)["share"]
    assert json.loads((head.dir / "gain.json").read_text())["steps"] == 1


def test_a_run_goes_on_with_its_head(make):
    cfg = make("train.steps=4", "train.warmup=0", "data.eval=[]", "run.save_every=2", HEAD)
    whole = train.run(cfg)
    model, _, _ = train.load_run(whole.dir)
    assert model.get_output_embeddings().recipe.name == "blockwise"
    high, _, _ = train.load_run(whole.dir, recipe="off")
    assert not hasattr(high.get_output_embeddings(), "recipe")


@pytest.mark.long
def test_two_ranks_train_as_one_does(make):
    over = ("train.steps=4", "train.warmup=0", "data.eval=[]", "train.lr=5e-4", HEAD)
    one, two = make(*over, dir="one"), make(*over, dir="two")
    alone = train.run(one)
    on_ranks(two)
    assert losses(two) == pytest.approx(list(alone.losses().values()), rel=1e-3)
