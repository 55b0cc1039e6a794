"""Everything that saves memory, in whole runs: it trains, survives a stop, a kill and another number of ranks, and
stock transformers loads what it leaves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from octavo import train
from octavo.config import override
from octavo.train.run_dir.run_dir import read_rows

from .conftest import STEPS, at
from .test_ranks import losses, on_ranks
from .test_resume import killed

pytestmark = pytest.mark.usefixtures("unseen")

SHORT = "data.eval=[]"
ROUNDED = ("optimizer={states: fp8, master: bf16+sr}", "fp8.activations=fp8", "fp8.param=true")
EXACT = ("optimizer={states: fp8, master: bf16+16, update: backward}", "train.micro_batch=4",
         "fp8.activations=fp8", "train.recompute={foundation: selective}")  # fmt: skip
PLAIN = ("optimizer={states: coat}", "fp8.weight_codes=recast", "train.recompute=full", "train.label_smoothing=0.05",
         "train.z_loss=1e-4")  # fmt: skip
ALL = {"rounded": ROUNDED, "exact": EXACT, "plain": PLAIN}


def memory(result: train.RunResult) -> dict[str, int]:
    return next(row["memory"] for row in read_rows(result.dir / "metrics.jsonl") if "memory" in row)


def test_bytes_of_a_parameter(make):
    """8.1, 6.1 and 4.1 bytes for weights, master, gradients and moments; FP8 codes of weights are apart."""

    def per_parameter(*over: str, dir: str) -> float:
        found = memory(train.run(make(SHORT, "train.steps=1", "train.warmup=0", "train.micro_batch=4", *over, dir=dir)))
        elements = found["weights"] / (4 if dir == "plain" else 2)
        assert (found["codes"] == 0) == ("fp8.weight_codes=recast" in over)
        return sum(found[kind] for kind in ("weights", "master", "gradients", "optimizer")) / elements

    small = {  # tensors of less than a group of 128 pay for a whole one: a model of toy norms is above its limit
        "exact": per_parameter("optimizer={states: fp8, master: bf16+16}", dir="exact"),
        "rounded": per_parameter("optimizer={states: fp8, master: bf16+sr}", "fp8.weight_codes=recast", dir="rounded"),
        "backward": per_parameter("optimizer={states: fp8, master: bf16+sr, update: backward}", dir="backward"),
    }  # fmt: skip
    assert small == pytest.approx({"exact": 8.07, "rounded": 6.07, "backward": 4.07}, abs=0.03)
    assert per_parameter(dir="plain") == pytest.approx(16, abs=0.01)


@pytest.mark.parametrize(
    "over",
    [pytest.param(over, id=name, marks=[pytest.mark.long] if name != "plain" else []) for name, over in ALL.items()],
)
def test_run_with_savings_matches_run_without_and_resumes_exactly(make, over):
    more = ("train.label_smoothing=0.05", "train.z_loss=1e-4") if over is PLAIN else ()  # its loss has two more terms
    plain = train.run(make(SHORT, *more, dir="without")).losses()
    whole = train.run(make(SHORT, *over, dir="whole"))
    assert list(whole.losses().values()) == pytest.approx(list(plain.values()), rel=5e-2)
    cfg = make(SHORT, *over, dir="stopped")
    assert train.run(cfg, callbacks=[at(2, signal.SIGTERM)]).steps == 3
    assert train.run(override(cfg, ["run.resume=auto"])).losses() == whole.losses()


@pytest.mark.usefixtures("bare_forward", "seen")
@pytest.mark.parametrize("over", [ROUNDED, EXACT], ids=["rounded", "exact"])
def test_stock_transformers_loads_what_was_trained(make, over):
    result = train.run(make(SHORT, *over, "run.hf=true", "train.steps=2", "train.warmup=0"))
    stock = AutoModelForImageTextToText.from_pretrained(result.dir / "hf")
    ours, _, _ = train.load_run(result.dir)
    assert stock.dtype == torch.bfloat16
    theirs = dict(stock.named_parameters())
    assert theirs.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(getattr(parameter, "master", parameter).detach(), theirs[name].detach()), name


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.parametrize(
    "over",
    [
        pytest.param(ROUNDED, id="after backward"),
        pytest.param(EXACT, id="in backward", marks=pytest.mark.long),
    ],
)
def test_second_moments_that_became_zero_are_counted(make, over, monkeypatch):
    rows = read_rows(train.run(make(SHORT, *over, "run.health_every=2")).dir / "metrics.jsonl")
    assert [row["zeroed_v"] for row in rows if "health" in row] == [0] * 3
    monkeypatch.setattr("octavo.train.step.optimizer.decode", lambda p, group, state: (None, torch.zeros(p.numel())))
    lost = train.run(make(SHORT, *over, "run.health_every=2", "train.steps=2", "train.warmup=0", dir="lost"))
    assert read_rows(lost.dir / "metrics.jsonl")[1]["zeroed_v"] > 1000


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            ("optimizer.update=backward",),
            "takes one micro-batch per step and process, but 4 samples .* are 2 of 2 on 1",
        ),
        (("optimizer.offload=true", "optimizer.states=fp8"), "optimizer.offload needs a GPU: on cpu everything is"),
        (("train.offload_activations=true",), "train.offload_activations needs a GPU.*=false"),
        (("train.synchronize_per_layer=true",), "train.synchronize_per_layer needs a GPU"),
        (("train.synchronize_per_layer=true", "train.offload_activations=true"), "per_layer need a GPU"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_is_loaded(make, over, message: str):
    cfg = make(*over, "model.path=nowhere")
    with pytest.raises(train.TrainError, match=message):
        train.run(cfg)


@pytest.mark.usefixtures("bare_forward")
def test_blocks_that_a_model_lacks_are_not_run_again(make, place: Path):
    """One word is for what the model has; a component that it lacks, named, is a mistake."""
    text = f"model.path={place / 'text'}", f"data.train=[{{path: {place / 'digits/train_text.json'}}}]", SHORT
    with pytest.raises(train.TrainError, match="image_encoder: full, but this qwen3 has no image_encoder. Remove it"):
        train.run(make(*text, "train.recompute={image_encoder: full}"))
    short = "train.steps=1", "train.warmup=0", "train.seq_length=512"
    train.run(make(*text, *short, "train.recompute=full", dir="word"))


@pytest.mark.usefixtures("bare_forward")
def test_states_of_another_kind_are_not_resumed(make):
    cfg = make(SHORT, "optimizer.states=fp8")
    train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    with pytest.raises(Exception, match="optimizer.states"):
        train.run(override(cfg, ["run.resume=auto", "optimizer.states=bf16"]))


@pytest.mark.usefixtures("bare_forward")
@pytest.mark.long
@pytest.mark.parametrize(("over", "moment"), [(ROUNDED, "mid-save"), (EXACT, "3"), (PLAIN, "mid-save")], ids=list(ALL))
def test_a_kill_loses_nothing(make, over, moment: str):
    """Other moments: test_resume.py."""
    common = (SHORT, *over, "run.save_every=2")
    whole = train.run(make(*common, dir="whole"))
    cfg = make(*common, dir="killed")
    killed(cfg, moment)
    assert train.run(override(cfg, ["run.resume=auto"])).losses() == whole.losses()


@pytest.mark.long
@pytest.mark.parametrize(("over", "tolerance"), [(ROUNDED, 2e-2), (EXACT, 5e-3), (PLAIN, 5e-3)], ids=list(ALL))
def test_two_ranks_train_as_one_and_one_resumes_what_two_saved(make, over, tolerance: float):
    common = (SHORT, *over, "run.save_every=3", "run.keep=9", "train.lr=5e-4")
    each = ("train.micro_batch=2",) if over is EXACT else ()
    one, two = make(*common, dir="one"), make(*common, *each, dir="two")
    alone = train.run(one)
    on_ranks(two)
    assert losses(two) == pytest.approx(losses(one), rel=tolerance)
    shared = read_rows(Path(two.run.dir) / "metrics.jsonl")[0]["memory"]
    assert shared["weights"] < 0.6 * memory(alone)["weights"]
    assert len(losses(two)) == STEPS
    if not each:  # one process would need another micro_batch to update in backward, which a run may not change
        resumed = train.run(make(*common, f"run.resume={Path(two.run.dir) / 'checkpoints' / 'step_3'}", dir="after"))
        assert list(resumed.losses().values()) == pytest.approx(losses(two)[3:], rel=tolerance)


def test_a_plan_file_decides_what_blocks_keep_and_attention_with_them(make, tmp_path: Path):
    from octavo import fp8
    from octavo.train.setup import planning

    asked = make(SHORT, "fp8.activations=fp8", "train.steps=1", "train.warmup=0", dir="asked")
    plan, _, _ = planning.plan_for(asked)
    file = fp8.save_plan(plan, tmp_path / "plan.json")
    given = make(SHORT, f"fp8={{plan: {file}}}", "train.steps=1", "train.warmup=0", dir="given")
    found, expected = (
        {k: n for k, n in memory(train.run(cfg)).items() if not k.startswith("peak")} for cfg in (given, asked)
    )
    assert found == expected
