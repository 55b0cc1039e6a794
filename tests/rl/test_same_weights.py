"""What wrote a step's completions and what learns from them: other weights in between, and layers that differ."""

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
from tests.rl.test_rl_phase import LORA, rows_of
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
    (codes,) = layer._weight_codes()["weight"]._codes.values()
    codes.data.view(torch.uint8)[3, 5] ^= 1


def to_frozen(layer: nn.Module) -> None:
    codes = codes_of_frozen(layer.get_submodule("base_layer").weight)
    codes.scale[0] *= 2


@pytest.mark.parametrize(
    ("write", "over", "found"),
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
    reinforcing: Make, monkeypatch: pytest.MonkeyPatch, write: Callable, over: tuple[str, ...], found: str
):
    cut = RlStepper._make_micro_batches

    def writing(stepper: RlStepper, rollout):
        if stepper.number == 2:
            write(stepper.model.get_submodule(LAYER))
        return cut(stepper, rollout)

    monkeypatch.setattr(RlStepper, "_make_micro_batches", writing)
    cfg = reinforcing(*over)
    with pytest.raises(
        fp8.ProofError, match=r"step 2: weights changed between its rollout and its update: " + LAYER
    ) as caught:
        rl.run(cfg)
    assert re.search(found, str(caught.value)), caught.value
    assert len(rows_of(cfg)) == 1


def test_further_rollouts_of_a_step_are_by_the_same_weights(reinforcing: Make, monkeypatch: pytest.MonkeyPatch):
    roll = RlStepper._generate_and_score

    def writing(stepper: RlStepper, *given):
        found = roll(stepper, *given)
        unseen(stepper.model.get_submodule(LAYER))
        return found

    monkeypatch.setattr(RlStepper, "_generate_and_score", writing)
    with pytest.raises(fp8.ProofError, match="between its first rollout and a later one"):
        rl.run(reinforcing("rl.algorithm=dapo"))


@pytest.mark.long
def test_the_proof_says_which_steps_were_held_to_it(reinforcing: Make):
    """As of the newest checkpoint; a run that was stopped goes on from there."""
    whole = rl.run(reinforcing(*LORA, dir="whole"))
    cfg = reinforcing(*LORA)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file = Path(cfg.run.dir) / "proof.json"
    stopped = json.loads(file.read_text())["rollouts"]
    assert stopped["first"] == 1 <= stopped["last"] < 3
    rl.run(override(cfg, ["run.resume=auto"]))
    proven = json.loads(file.read_text())
    assert proven["rollouts"] == json.loads((whole.dir / "proof.json").read_text())["rollouts"]
    assert (proven["rollouts"]["first"], proven["rollouts"]["last"]) == (1, 3)
    assert proven["rollouts"]["sha256"] != stopped["sha256"] and not proven["pending"]


@pytest.mark.parametrize("over", [(), LORA, ("train.precision=bf16",)], ids=["full", "lora", "bf16"])
def test_a_gap_names_the_layer_that_differs_first(reinforcing: Make, over: tuple[str, ...]):
    """Keys and values of the rollout in FP8: attention of the first layer differs, in what it hands to its o_proj."""
    cfg = reinforcing("rl.kv=fp8", "rl.max_gap=1e-5", *over)
    found = r"first layer that differs is model\.layers\.0\.self_attn \(in the input of its o_proj\), by 0\.0"
    with pytest.raises(TrainError, match=r"step 1: .* rl.max_gap is 1e-05: the " + found):
        rl.run(cfg)
    assert not rows_of(cfg)


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_a_layer_that_computes_otherwise_in_rollouts_is_named(
    reinforcing: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
):
    begin, layer = RlPhase.begin, "model.language_model.layers.1.self_attn.v_proj"

    def planted(phase, stepper, *rest):
        begin(phase, stepper, *rest)
        planted_in = stepper.model.get_submodule(layer)
        planted_in.register_forward_hook(lambda module, given, out: out if module.training else 1.05 * out)

    monkeypatch.setattr(RlPhase, "begin", planted)
    tiny.write(family, tmp_path / "model", size="mini")
    with pytest.raises(TrainError, match=rf"first layer that differs is {re.escape(layer)}, by 0\.05 of"):
        rl.run(reinforcing("rl.max_gap=1e-3", f"model.path={tmp_path / 'model'}"))


def test_a_gap_in_a_later_mini_batch_stops_before_the_first_update(reinforcing: Make, monkeypatch: pytest.MonkeyPatch):
    wrote, applied = rl_step.generate_completions, []

    def planted(*given, **more):
        completions, held = wrote(*given, **more)
        for completion in completions:
            if completion.prompt == 3:
                completion.logps[0] += 1
        return completions, held

    monkeypatch.setattr(rl_step, "generate_completions", planted)
    monkeypatch.setattr(AfterBackward, "step", lambda update: applied.append(update))
    with pytest.raises(TrainError, match=r"step 1: .* differ by up to 1 nats"):
        rl.run(reinforcing("rl.max_gap=0.1", "rl.mini_batches=2"))
    assert not applied


def test_rounding_is_no_layer_that_differs(reinforcing: Make):
    with pytest.raises(TrainError, match=r"no layer differs by more than rounding.* largest difference is [0-9.]+e-0"):
        rl.run(reinforcing("rl.max_gap=1e-9"))


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
        found = first_difference(model, lambda: model(x), lambda: generate(1.0), rounding(torch.float32))
        assert (
            found.exceeds_rounding and found.module == "the model (in the input of its shared)" and found.distance > 0.1
        )
        nan = first_difference(model, lambda: model(x), lambda: generate(float("nan")), rounding(torch.float32))
        assert nan.distance == float("inf")
