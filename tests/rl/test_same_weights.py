"""Detection of weight changes between rollout and update, and of layers that differ between rollout and trainer."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import fp8, rl
from octavo.config import Config, override
from octavo.fp8.weights import CachesWeights, codes_of_frozen
from octavo.models.tiny import tiny
from octavo.rl.phases import rl_step
from octavo.rl.phases.rl_phase import RlPhase
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.rollout.first_mismatch import first_difference, rounding
from octavo.train import TrainError
from octavo.train.step.update import AfterBackward
from tests.rl.test_rl_phase import LORA, read_metrics
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
LAYER = "model.layers.1.mlp.down_proj"


def to_weight(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight[3, 5] += 1e-3


def unseen(layer: nn.Module) -> None:
    layer.weight.data[3, 5] += 1e-3


def to_codes(layer: nn.Module) -> None:
    assert isinstance(layer, CachesWeights)
    (codes,) = layer._weight_caches()["weight"]._codes.values()
    codes.data.view(torch.uint8)[3, 5] ^= 1


def to_frozen(layer: nn.Module) -> None:
    codes = codes_of_frozen(layer.get_submodule("base_layer").weight)
    codes.scale[0] *= 2


@pytest.mark.parametrize(
    ("write", "overrides", "expected"),
    [
        (to_weight, (), r"down_proj\.weight\. "),
        (unseen, (), r"down_proj\.weight\. "),
        (to_codes, (), r"down_proj\.weight \(its codes in"),
        (to_weight, ("fp8.recipe=off",), r"down_proj\.weight\. "),
        (to_frozen, LORA, r"down_proj\.base_layer\.weight \(the scales of its codes"),
    ],
    ids=["weight", "weight unseen", "codes", "high precision", "frozen codes"],
)
def test_weights_that_change_between_rollout_and_update_stop_the_run(
    rl_config: Make, monkeypatch: pytest.MonkeyPatch, write: Callable, overrides: tuple[str, ...], expected: str
):
    make_micro_batches = RlStepper.make_micro_batches

    def write_weight(stepper: RlStepper, rollout):
        if stepper.step_number == 2:
            write(stepper.model.get_submodule(LAYER))
        return make_micro_batches(stepper, rollout)

    monkeypatch.setattr(RlStepper, "make_micro_batches", write_weight)
    cfg = rl_config(*overrides)
    with pytest.raises(
        fp8.ProofError, match=r"step 2: weights changed between its rollout and its update: " + LAYER
    ) as caught:
        rl.run(cfg)
    assert re.search(expected, str(caught.value)), caught.value
    assert len(read_metrics(cfg)) == 1


def test_all_rollouts_of_a_step_use_the_same_weights(rl_config: Make, monkeypatch: pytest.MonkeyPatch):
    generate_and_score = RlStepper._generate_and_score

    def write_weight(stepper: RlStepper, *arguments):
        rollout = generate_and_score(stepper, *arguments)
        unseen(stepper.model.get_submodule(LAYER))
        return rollout

    monkeypatch.setattr(RlStepper, "_generate_and_score", write_weight)
    with pytest.raises(fp8.ProofError, match="between its first rollout and a later one"):
        rl.run(rl_config("rl.algorithm=dapo"))


@pytest.mark.long
def test_proof_records_the_checked_steps(rl_config: Make):
    """The record matches the newest checkpoint; a stopped run continues from it."""
    uninterrupted = rl.run(rl_config(*LORA, dir="uninterrupted"))
    cfg = rl_config(*LORA)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file = Path(cfg.run.dir) / "proof.json"
    stopped = json.loads(file.read_text())["rollouts"]
    assert stopped["first"] == 1 <= stopped["last"] < 3
    rl.run(override(cfg, ["run.resume=auto"]))
    proof = json.loads(file.read_text())
    assert proof["rollouts"] == json.loads((uninterrupted.dir / "proof.json").read_text())["rollouts"]
    assert (proof["rollouts"]["first"], proof["rollouts"]["last"]) == (1, 3)
    assert proof["rollouts"]["sha256"] != stopped["sha256"] and not proof["pending"]


@pytest.mark.parametrize("overrides", [(), LORA, ("train.precision=bf16",)], ids=["full", "lora", "bf16"])
def test_gap_error_names_the_first_layer_that_differs(rl_config: Make, overrides: tuple[str, ...]):
    """With an FP8 cache the attention output of the first layer differs, which is the input of its o_proj."""
    cfg = rl_config("rl.kv=fp8", "rl.max_gap=1e-5", *overrides)
    expected = r"first layer that differs is model\.layers\.0\.self_attn \(in the input of its o_proj\), by 0\.0"
    with pytest.raises(TrainError, match=r"step 1: .* rl.max_gap is 1e-05: the " + expected):
        rl.run(cfg)
    assert not read_metrics(cfg)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_gap_error_names_a_layer_that_computes_differently_in_rollouts(
    rl_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
):
    begin, layer = RlPhase.begin, "model.language_model.layers.1.self_attn.v_proj"

    def begin_with_fault(phase, stepper, *rest):
        begin(phase, stepper, *rest)
        module = stepper.model.get_submodule(layer)
        module.register_forward_hook(lambda module, args, out: out if module.training else 1.05 * out)

    monkeypatch.setattr(RlPhase, "begin", begin_with_fault)
    tiny.write(family, tmp_path / "model", size="mini")
    with pytest.raises(TrainError, match=rf"first layer that differs is {re.escape(layer)}, by 0\.05 of"):
        rl.run(rl_config("rl.max_gap=1e-3", f"model.path={tmp_path / 'model'}"))


def test_gap_in_a_later_mini_batch_stops_before_the_first_update(rl_config: Make, monkeypatch: pytest.MonkeyPatch):
    generate, applied = rl_step.generate_completions, []

    def generate_with_fault(*args, **kwargs):
        completions, cache_bytes = generate(*args, **kwargs)
        for completion in completions:
            if completion.prompt == 3:
                completion.logps[0] += 1
        return completions, cache_bytes

    monkeypatch.setattr(rl_step, "generate_completions", generate_with_fault)
    monkeypatch.setattr(AfterBackward, "step", lambda update: applied.append(update))
    with pytest.raises(TrainError, match=r"step 1: .* differ by up to 1 nats"):
        rl.run(rl_config("rl.max_gap=0.1", "rl.mini_batches=2"))
    assert not applied


def test_rounding_is_not_reported_as_a_layer_that_differs(rl_config: Make):
    with pytest.raises(TrainError, match=r"no layer differs by more than rounding.* largest difference is [0-9.]+e-0"):
        rl.run(rl_config("rl.max_gap=1e-9"))


def test_modules_are_compared_call_by_call():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
            self.extra = 0.0

        def forward(self, x):
            return self.last(self.shared(self.shared(x) + self.extra))

    model, x = Model(), torch.randn(1, 5, 3)

    def generate(extra: float) -> None:
        model.extra = extra
        for piece in (x[:, :3], x[:, 3:4]):
            model(piece)
        model.extra = 0.0

    with torch.no_grad():
        same = first_difference(model, lambda: model(x), lambda: generate(0.0), rounding(torch.float32))
        assert same is None or not same.exceeds_rounding
        different = first_difference(model, lambda: model(x), lambda: generate(1.0), rounding(torch.float32))
        assert (
            different.exceeds_rounding
            and different.module == "the model (in the input of its shared)"
            and different.distance > 0.1
        )
        nan = first_difference(model, lambda: model(x), lambda: generate(float("nan")), rounding(torch.float32))
        assert nan.distance == float("inf")
