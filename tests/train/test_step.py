"""One optimizer step: accumulation, clipping, and what happens to a step that is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import fp8, models, train
from octavo.parallel import World
from octavo.train.forward.forward import autocast_dtype, model_dtype
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.step.update import AfterBackward, InBackward, Loss

pytestmark = pytest.mark.usefixtures("bare_forward")


@pytest.mark.parametrize("reduction", ["token", pytest.param("sample", marks=pytest.mark.long)])
def test_micro_batch_and_accumulation_change_no_loss(make, reduction: str):
    """Nine steps over the same global batches of six, cut into micro-batches of 6, 3, 2 and 1."""
    curves = []
    for micro in (6, 3, 2, 1):
        cfg = make(
            "fp8.recipe=off", f"train.loss={reduction}", "train.global_batch=6", f"train.micro_batch={micro}",
            "train.steps=5", "data.eval=[]", dir=f"micro{micro}",
        )  # fmt: skip
        curves.append(list(train.run(cfg).losses().values()))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-6)


def test_clipping_bounds_the_step_and_reports_the_norm_before(make):
    over = ("fp8.recipe=off", "train.steps=2", "train.warmup=0", "data.eval=[]")
    free = train.run(make(*over, "train.clip=0", dir="free"))
    clipped = train.run(make(*over, "train.clip=0.001", "optimizer.eps=1.0", dir="clipped"))
    norms = [read_rows(r.dir / "metrics.jsonl")[0]["grad_norm"] for r in (free, clipped)]
    assert norms[0] == norms[1] > 0.001


def test_precision_defaults_to_the_device(make):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [autocast_dtype(make(f"train.precision={p}"), d) for p in ("auto", "bf16", "fp32") for d in (cpu, cuda)] == [
        None, torch.bfloat16, torch.bfloat16, torch.bfloat16, None, None
    ]  # fmt: skip


@pytest.mark.parametrize("master", ["bf16+16", "bf16+sr"])
def test_a_model_of_bf16_weights_computes_in_bf16_without_autocast(make, master: str):
    cfg = make(f"optimizer.master={master}", "train.precision=bf16")
    assert model_dtype(cfg) == torch.bfloat16 and autocast_dtype(cfg, torch.device("cuda")) is None
    assert model_dtype(make()) == torch.float32


def test_bf16_trains_near_fp32(make):
    over = ("data.eval=[]", "train.steps=3", "train.warmup=0")
    fp32 = train.run(make(*over, dir="fp32")).losses()
    bf16 = train.run(make(*over, "train.precision=bf16", dir="bf16")).losses()
    assert list(bf16.values()) == pytest.approx(list(fp32.values()), rel=2e-2)
    assert bf16 != fp32


def poison(cfg, tensor: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model of the next run be loaded with a weight overwritten."""
    load = models.load

    def poisoned(*args, **kwargs):
        model = load(*args, **kwargs)
        with torch.no_grad():
            model.get_parameter(tensor).fill_(value)
        return model

    monkeypatch.setattr("octavo.train.setup.model_setup.models.load", poisoned)


def test_ten_nonfinite_steps_stop_the_run_and_name_the_layer(make, monkeypatch):
    cfg = make("train.steps=30", "data.eval=[]")
    poison(cfg, "model.language_model.layers.1.mlp.down_proj.weight", 3e38, monkeypatch)
    with pytest.raises(train.TrainError, match="10 steps in a row, up to step 10") as stopped:
        train.run(cfg)
    assert "the forward of model.language_model.layers.1.mlp.down_proj (Linear) produced the first" in str(
        stopped.value
    )
    rows = read_rows(Path(cfg.run.dir) / "metrics.jsonl")
    assert all(row["skipped"] for row in rows) and [row["step"] for row in rows] == list(range(1, 11))


def test_nonfinite_weight_is_named(make, monkeypatch):
    cfg = make("train.steps=30", "data.eval=[]", "fp8.recipe=off")
    poison(cfg, "model.language_model.layers.0.input_layernorm.weight", float("nan"), monkeypatch)
    with pytest.raises(
        train.TrainError, match="the weight model.language_model.layers.0.input_layernorm.weight itself"
    ):
        train.run(cfg)


def test_a_skipped_step_leaves_no_amax_in_the_histories(make, monkeypatch):
    from octavo.train.step.step import Stepper

    run, before, after = Stepper.run, [], []

    def watched(self, *args):
        before.append(fp8.scaling_state(self.model))
        result = run(self, *args)
        after.append(fp8.scaling_state(self.model))
        return result

    clip = AfterBackward._unscale_and_clip
    monkeypatch.setattr(Stepper, "run", watched)
    norm_factor = lambda: float("inf") if len(before) == 2 else 1  # noqa: E731
    monkeypatch.setattr(AfterBackward, "_unscale_and_clip", lambda self: clip(self) * norm_factor())
    train.run(make("train.steps=3", "data.eval=[]", "fp8.recipe=delayed"))
    same = [all(torch.equal(old[k], new[k]) for k in old) for old, new in zip(before, after, strict=True)]
    assert before[0] and same == [False, True, False]


def test_one_bad_step_is_skipped_counted_and_reported(make, monkeypatch):
    cfg = make("train.steps=4", "data.eval=[]")
    clip, seen = AfterBackward._unscale_and_clip, []

    def once(self):
        norm = clip(self)
        seen.append(norm)
        return norm * float("inf") if len(seen) == 2 else norm

    monkeypatch.setattr(AfterBackward, "_unscale_and_clip", once)
    result = train.run(cfg)
    rows = read_rows(result.dir / "metrics.jsonl")
    assert [row.get("skipped", False) for row in rows] == [False, True, False, False]
    assert rows[1]["grad_norm"] is None
    assert (result.status, result.skipped) == ("finished", 1)


@pytest.mark.parametrize("way", [AfterBackward, InBackward])
def test_an_infinite_loss_under_finite_gradients_moves_no_weight(way):
    """As where a sum over tokens overflows: the gradients are probabilities, and look sound."""
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    update = way(fp8.AdamW(model.parameters(), lr=0.1), model, 1.0, World())
    for cross_entropy, applied in ((float("inf"), False), (2.0, True)):
        model.zero_grad()
        update.backward(Loss(model(torch.ones(2, 4)).sum(), torch.tensor([cross_entropy, 0.0])))
        assert update.step().applied is applied and torch.equal(model.weight, before) is not applied


def test_a_short_run_that_applied_no_step_does_not_end_as_finished(make, monkeypatch):
    cfg = make("train.steps=3", "data.eval=[]")
    poison(cfg, "model.language_model.layers.1.mlp.down_proj.weight", 3e38, monkeypatch)
    with pytest.raises(train.TrainError, match="3 steps in a row, up to step 3, had a loss or a gradient that is not"):
        train.run(cfg)
    assert not (Path(cfg.run.dir) / "result.json").exists()
