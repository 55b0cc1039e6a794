"""PPO in a run: updates against plain fp64, the critic's learning rate and gradient limit, and the saved models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo import adapters, models, rl, train
from octavo.config import Config
from octavo.rl.objectives.policy_losses import Batch
from octavo.rl.phases.rl_step import RlStepper
from octavo.rl.rollout.experience import micro_batches
from octavo.train.forward import critic, losses
from octavo.train.forward.critic import ValueHead
from octavo.train.step.update import FACTOR, AfterBackward
from tests.rl.test_gae import plain
from tests.rl.test_rl_phase import LORA, read_metrics

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
ONE = ("train.steps=1", "train.warmup=0")
PPO = ("rl.algorithm=ppo", "fp8.recipe=off", *ONE)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """head(scale, bias): set initial values that are not 0."""
    begin = ValueHead.__init__

    def set_to(scale: float, bias: float) -> None:
        def init_with_values(self: ValueHead, *args: Any) -> None:
            begin(self, *args)
            noise = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(7))
            self.weight.data.copy_(scale * noise), self.bias.data.fill_(bias)

        monkeypatch.setattr(ValueHead, "__init__", init_with_values)

    return set_to


class UpdateRecorder:
    """Records trained parameters and gradients at each update, and the stepper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        step, run = AfterBackward.step, RlStepper.run

        def recording_step(update: AfterBackward) -> Any:
            trained = [(n, p) for n, p in update.model.named_parameters() if p.requires_grad]
            self.weights.append({n: p.detach().clone() for n, p in trained})
            self.gradients.append({n: p.grad.detach().clone() for n, p in trained if p.grad is not None})
            return step(update)

        def recording_run(stepper: RlStepper, *args: Any) -> Any:
            self.stepper = stepper
            return run(stepper, *args)

        monkeypatch.setattr(AfterBackward, "step", recording_step)
        monkeypatch.setattr(RlStepper, "run", recording_run)


def merged_parameters(
    stock: nn.Module, leaves: dict[str, Tensor], layers: dict[str, Any], adapter: str
) -> dict[str, Tensor]:
    """Return the stock model's parameters in fp64, with an adapter merged in; without adapters, with the trained
    ones."""
    parameters = {name: p.detach().double() for name, p in stock.named_parameters()}
    if not layers:
        return parameters | {name: leaf for name, leaf in leaves.items() if name in parameters}
    for name, layer in layers.items():
        a, b = (leaves[f"{name}.lora_{part}.{adapter}.weight"] for part in "AB")
        parameters[f"{name}.weight"] = parameters[f"{name}.weight"] + layer.scaling[adapter] * b @ a
    return parameters


def reference_forward(stock: nn.Module, leaves: dict[str, Tensor], layers: dict[str, Any], batch: dict, keep: Tensor):
    """Compute log-probabilities and values [B, P] of the tokens of a batch with stock modules in fp64."""
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids")
    inputs = {n: batch[n].double() if batch[n].is_floating_point() else batch[n] for n in names if n in batch}

    def hidden(adapter: str) -> Tensor:
        weights = {n.removeprefix("model."): w for n, w in merged_parameters(stock, leaves, layers, adapter).items()}
        return torch.func.functional_call(stock.model, weights, kwargs=inputs).last_hidden_state[:, keep]

    policy_hidden, critic_hidden = hidden("default"), hidden("second" if layers else "default")
    (head,) = (name for name, p in stock.named_parameters() if p is stock.lm_head.weight)  # it may be the embedding's
    logits = policy_hidden @ merged_parameters(stock, leaves, layers, "default")[head].T
    logs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, keep + 1, None])[..., 0]
    return logs, critic_hidden @ leaves["value_head.weight"] + leaves["value_head.bias"]


@pytest.mark.parametrize("overrides", [(), ("lora={rank: 4}", "train.precision=fp32")], ids=["full", "lora"])
def test_updates_match_plain_fp64(rl_config: Make, monkeypatch, head, overrides: tuple[str, ...]) -> None:
    """Both updates of a step of two epochs, the second with changed weights. The oracle runs all completions in one
    batch, in a different order from the run's micro-batches."""
    head(0.05, 0.3)
    cfg = rl_config(*PPO, *overrides, "train.micro_batch=5", "rl.epochs=2", "rl.gamma=0.95", "rl.lam=0.8",
                      "rl.value_clip=0.05", "rl.kl=0.2", "train.lr=2e-2")  # fmt: skip
    recorder = UpdateRecorder(monkeypatch)
    rl.run(cfg)
    stepper, rollout = recorder.stepper, recorder.stepper.rollout
    stock = models.load(cfg.model.path, dtype=torch.float32).double()
    layers = adapters.adapted_layers(stepper.model)
    (batch,) = micro_batches(rollout, [2, 0, 3, 1], 16, 1, stepper.pad_id)
    keep, target, _ = stepper.loss_positions(batch, 1.0)
    rows, mask = [*batch["experience"].rows], target != losses.IGNORE
    scores = torch.from_numpy(rollout.rewards[rows])
    leaves = [{n: w.double().requires_grad_(True) for n, w in at.items()} for at in recorder.weights]
    logs, values = zip(*(reference_forward(stock, at, layers, batch, keep) for at in leaves), strict=True)
    assert (values[1] - values[0])[mask].abs().max() > 0.05 < (logs[1] - logs[0])[mask].exp().std()
    for then, at in enumerate(leaves):
        b = Batch(logs[then].detach(), logs[0].detach(), mask, torch.zeros(len(mask), dtype=torch.float64),
                  ref_logps=logs[0].detach())  # fmt: skip
        oracle = plain(b, values[then].detach(), values[0].detach(), scores, 0.95, 0.8, 0.2, clip=0.05)
        weight = 1.0 if layers else 0.1
        total = (logs[then] * oracle["policy"][1]).sum() + weight * (values[then] * oracle["critic"][1]).sum()
        gradients = torch.autograd.grad(total, [*at.values()], allow_unused=True)
        for (name, _), gradient in zip(at.items(), gradients, strict=True):
            actual = recorder.gradients[then].get(name)
            if gradient is None or actual is None:
                assert (gradient is None or not gradient.any()) and (actual is None or not actual.any()), name
                continue
            size = max(float(gradient.norm()), 1e-3)
            assert float((actual.double() - gradient).norm()) <= 2e-4 * size, (then, name, float(gradient.norm()))


def test_exact_values_and_equal_rewards_have_no_gradient(rl_config: Make, head) -> None:
    head(0.0, 1.0)
    cfg = rl_config(*PPO, "rl.lam=1", "rl.kl=0", "rl.rewards=[{reward: regex, pattern: '.?'}]")
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    assert row["reward"] == row["value_mean"] == 1 and row["explained_variance"] is None
    assert row["loss"] == row["value_loss"] == row["grad_norm"] == 0


@pytest.mark.parametrize("overrides", [(), LORA], ids=["full", "lora"])
def test_fully_masked_step_has_no_gradient(rl_config: Make, head, overrides: tuple[str, ...]) -> None:
    head(0.05, 0.3)
    cfg = rl_config(*PPO, *overrides, "rl.mask_truncated=true", "rl.max_new_tokens=2")
    with pytest.raises(train.TrainError, match="had no loss tokens"):
        rl.run(cfg)
    (row,) = read_metrics(cfg)
    assert row["completions/clipped_ratio"] == 1 and row["explained_variance"] is None
    assert row["loss"] == row["grad_norm"] == 0 < row["reward"]
    assert {row[name] for name in ("entropy", "value_loss", "kl", "logp_gap_max")} == {None}, "no token counts"


def test_policy_and_critic_have_separate_clipping_and_learning_rates(rl_config: Make, monkeypatch, head) -> None:
    """The large gradient of an inaccurate critic does not shrink that of the policy."""
    head(1.0, 100.0)
    cfg = rl_config(*PPO, *LORA, "train.clip=0.5", "rl.critic_lr=0.25", "rl.value_clip=0")
    recorder = UpdateRecorder(monkeypatch)
    rl.run(cfg)
    (row,) = read_metrics(cfg)
    (before,) = recorder.gradients
    is_critic = {name: critic.is_critic_parameter(name) for name in before}
    norms = [
        torch.stack([g.norm() for n, g in before.items() if is_critic[n] == kind]).norm() for kind in (False, True)
    ]
    assert norms[1] > 20 * norms[0] > 0 and row["grad_norm"] == pytest.approx(float(norms[0]), rel=1e-5)
    optimizer = recorder.stepper.optimizer
    for group in optimizer.param_groups:
        kinds = {is_critic[n] for n, p in recorder.stepper.model.named_parameters() for q in group["params"] if p is q}
        assert kinds == {FACTOR in group} and group["lr"] == pytest.approx(0.25 if kinds == {True} else row["lr"])
    for name, p in recorder.stepper.model.named_parameters():
        if p.requires_grad:  # the first moment is a tenth of the gradient, scaled down to the limit
            clipped = before[name] * min(1.0, 0.5 / float(norms[is_critic[name]]))
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.1 * clipped, rtol=1e-4, atol=1e-7)


def test_recomputation_uses_the_adapters_of_the_critic(rl_config: Make, monkeypatch, head) -> None:
    head(0.05, 0.3)
    gradients = []
    for mode in ("none", "full"):
        recorder = UpdateRecorder(monkeypatch)
        rl.run(rl_config(*PPO, "lora={rank: 4}", "rl.epochs=2", f"train.recompute={mode}", dir=mode))
        gradients.append(recorder.gradients[1])
        monkeypatch.undo(), head(0.05, 0.3)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_model_without_output_embeddings_has_no_critic(rl_config: Make) -> None:
    with pytest.raises(train.TrainError, match="Linear names no output embeddings"):
        critic.attach(nn.Linear(2, 2), rl_config(*PPO))


@pytest.mark.long
@pytest.mark.parametrize("overrides", [(), LORA], ids=["full", "lora"])
def test_saved_models_contain_only_the_policy(rl_config: Make, overrides: tuple[str, ...]) -> None:
    cfg = rl_config("rl.algorithm=ppo", *overrides, "train.steps=2", "train.warmup=1", "run.hf=true")
    captured = []

    class CaptureParameters(train.Callback):
        def end(self, run: train.Run, result: train.RunResult) -> None:
            captured.append({n: p.detach().clone() for n, p in run.job.model.named_parameters()})

    result = rl.run(cfg, callbacks=[CaptureParameters()])
    (trained,) = captured
    assert any(critic.is_critic_parameter(n) and p.any() for n, p in trained.items())
    opened, *_ = train.load_run(result.dir)
    loaded_parameters = dict(opened.named_parameters())
    assert loaded_parameters.keys() == {n for n in trained if not critic.is_critic_parameter(n)}
    assert all(
        torch.equal(loaded_parameters[n], trained[n])
        for n in loaded_parameters
        if trained[n].requires_grad or not overrides
    )
    if not overrides:
        stock, info = type(opened).from_pretrained(result.dir / "hf", output_loading_info=True)
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(p, trained[n]) for n, p in stock.named_parameters())
        return
    saved = load_file(result.dir / "adapter" / "adapter_model.safetensors")
    policy = {n: p for n, p in trained.items() if ".default." in n}
    assert len(saved) == len(policy) and not any("second" in name or "value" in name for name in saved)
    base = peft.PeftModel.from_pretrained(models.load(cfg.model.path), result.dir / "adapter")
    loaded = {n.removeprefix("base_model.model."): p for n, p in base.named_parameters() if ".default." in n}
    assert loaded.keys() == policy.keys() and all(torch.equal(loaded[n], policy[n]) for n in policy)


@pytest.mark.long
def test_policy_and_critic_share_fp8_codes(rl_config: Make) -> None:
    """Every FP8 layer runs twice per micro-batch, with one set of codes."""
    shares = {}
    for algorithm in ("grpo", "ppo"):
        cfg = rl_config(f"rl.algorithm={algorithm}", *LORA, *ONE, dir=algorithm)
        rl.run(cfg)
        shares[algorithm] = json.loads((Path(cfg.run.dir) / "proof.json").read_text())["components"]
        shares[algorithm, "codes"] = read_metrics(cfg)[0]["memory"]["codes"]
    assert shares["ppo", "codes"] == shares["grpo", "codes"]
    for gemm, backends in shares["grpo"]["foundation"].items():
        assert shares["ppo"]["foundation"][gemm] == {name: 2 * calls for name, calls in backends.items()}
