"""PPO inside a run: an update against plain fp64, the critic's own learning rate and limit, and what leaves a run."""

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
from tests.rl.test_rl_phase import LORA, rows_of

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

Make = Callable[..., Config]
ONE = ("train.steps=1", "train.warmup=0")
PPO = ("rl.algorithm=ppo", "fp8.recipe=off", *ONE)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """head(spread, bias): values that are not 0 as a run begins."""
    begin = ValueHead.__init__

    def set_to(spread: float, bias: float) -> None:
        def planted(self: ValueHead, *args: Any) -> None:
            begin(self, *args)
            noise = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(7))
            self.weight.data.copy_(spread * noise), self.bias.data.fill_(bias)

        monkeypatch.setattr(ValueHead, "__init__", planted)

    return set_to


class Seen:
    """Trained parameters and gradients at each update, the rollout, and the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        step, run = AfterBackward.step, RlStepper.run

        def stepping(update: AfterBackward) -> Any:
            trained = [(n, p) for n, p in update.model.named_parameters() if p.requires_grad]
            self.weights.append({n: p.detach().clone() for n, p in trained})
            self.gradients.append({n: p.grad.detach().clone() for n, p in trained if p.grad is not None})
            return step(update)

        def running(stepper: RlStepper, *args: Any) -> Any:
            self.stepper = stepper
            return run(stepper, *args)

        monkeypatch.setattr(AfterBackward, "step", stepping)
        monkeypatch.setattr(RlStepper, "run", running)


def whole(stock: nn.Module, leaves: dict[str, Tensor], layers: dict[str, Any], adapter: str) -> dict[str, Tensor]:
    """The stock model's parameters in fp64, with an adapter folded in; without adapters those that are trained."""
    found = {name: p.detach().double() for name, p in stock.named_parameters()}
    if not layers:
        return found | {name: leaf for name, leaf in leaves.items() if name in found}
    for name, layer in layers.items():
        a, b = (leaves[f"{name}.lora_{part}.{adapter}.weight"] for part in "AB")
        found[f"{name}.weight"] = found[f"{name}.weight"] + layer.scaling[adapter] * b @ a
    return found


def judged(stock: nn.Module, leaves: dict[str, Tensor], layers: dict[str, Any], batch: dict, keep: Tensor):
    """Log-probabilities and values [B, P] of the tokens of a batch, by stock modules in fp64."""
    known = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids")
    given = {n: batch[n].double() if batch[n].is_floating_point() else batch[n] for n in known if n in batch}

    def hidden(adapter: str) -> Tensor:
        weights = {n.removeprefix("model."): w for n, w in whole(stock, leaves, layers, adapter).items()}
        return torch.func.functional_call(stock.model, weights, kwargs=given).last_hidden_state[:, keep]

    policy, of_critic = hidden("default"), hidden("second" if layers else "default")
    (head,) = (name for name, p in stock.named_parameters() if p is stock.lm_head.weight)  # it may be the embedding's
    logits = policy @ whole(stock, leaves, layers, "default")[head].T
    logs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, keep + 1, None])[..., 0]
    return logs, of_critic @ leaves["value_head.weight"] + leaves["value_head.bias"]


@pytest.mark.parametrize("over", [(), ("lora={rank: 4}", "train.precision=fp32")], ids=["full", "lora"])
def test_an_update_is_what_plain_fp64_says(reinforcing: Make, monkeypatch, head, over: tuple[str, ...]) -> None:
    """Both updates of a step of two epochs: of the weights that wrote the rollout, and of those that moved since. The
    oracle sees all completions in one batch, in another order than the run's micro-batches."""
    head(0.05, 0.3)
    cfg = reinforcing(*PPO, *over, "train.micro_batch=5", "rl.epochs=2", "rl.gamma=0.95", "rl.lam=0.8",
                      "rl.value_clip=0.05", "rl.kl=0.2", "train.lr=2e-2")  # fmt: skip
    seen = Seen(monkeypatch)
    rl.run(cfg)
    stepper, rollout = seen.stepper, seen.stepper.rollout
    stock = models.load(cfg.model.path, dtype=torch.float32).double()
    layers = adapters.adapted_layers(stepper.model)
    (batch,) = micro_batches(rollout, [2, 0, 3, 1], 16, 1, stepper.pad_id)
    keep, target, _ = stepper.judged(batch, 1.0)
    rows, mask = [*batch["experience"].rows], target != losses.IGNORE
    scores = torch.from_numpy(rollout.rewards[rows])
    leaves = [{n: w.double().requires_grad_(True) for n, w in at.items()} for at in seen.weights]
    logs, values = zip(*(judged(stock, at, layers, batch, keep) for at in leaves), strict=True)
    assert (values[1] - values[0])[mask].abs().max() > 0.05 < (logs[1] - logs[0])[mask].exp().std()
    for then, at in enumerate(leaves):
        b = Batch(logs[then].detach(), logs[0].detach(), mask, torch.zeros(len(mask), dtype=torch.float64),
                  ref_logps=logs[0].detach())  # fmt: skip
        want = plain(b, values[then].detach(), values[0].detach(), scores, 0.95, 0.8, 0.2, clip=0.05)
        weight = 1.0 if layers else 0.1
        total = (logs[then] * want["policy"][1]).sum() + weight * (values[then] * want["critic"][1]).sum()
        found = torch.autograd.grad(total, [*at.values()], allow_unused=True)
        for (name, _), gradient in zip(at.items(), found, strict=True):
            ours = seen.gradients[then].get(name)
            if gradient is None or ours is None:
                assert (gradient is None or not gradient.any()) and (ours is None or not ours.any()), name
                continue
            size = max(float(gradient.norm()), 1e-3)
            assert float((ours.double() - gradient).norm()) <= 2e-4 * size, (then, name, float(gradient.norm()))


def test_a_critic_that_knows_it_all_teaches_nothing(reinforcing: Make, head) -> None:
    """Rewards that are all equal, and values that are exact."""
    head(0.0, 1.0)
    cfg = reinforcing(*PPO, "rl.lam=1", "rl.kl=0", "rl.rewards=[{reward: regex, pattern: '.?'}]")
    rl.run(cfg)
    (row,) = rows_of(cfg)
    assert row["reward"] == row["value_mean"] == 1 and row["explained_variance"] is None
    assert row["loss"] == row["value_loss"] == row["grad_norm"] == 0


@pytest.mark.parametrize("over", [(), LORA], ids=["full", "lora"])
def test_where_all_is_masked_nothing_is_learnt(reinforcing: Make, head, over: tuple[str, ...]) -> None:
    head(0.05, 0.3)
    cfg = reinforcing(*PPO, *over, "rl.mask_truncated=true", "rl.max_new_tokens=2")
    with pytest.raises(train.TrainError, match="had no loss tokens"):
        rl.run(cfg)
    (row,) = rows_of(cfg)
    assert row["completions/clipped_ratio"] == 1 and row["explained_variance"] is None
    assert row["loss"] == row["grad_norm"] == 0 < row["reward"]
    assert {row[name] for name in ("entropy", "value_loss", "kl", "logp_gap_max")} == {None}, "they are of no token"


def test_policy_and_critic_have_a_limit_and_a_learning_rate_each(reinforcing: Make, monkeypatch, head) -> None:
    """A critic that is far off, over the same base: its gradient does not shrink the policy's."""
    head(1.0, 100.0)
    cfg = reinforcing(*PPO, *LORA, "train.clip=0.5", "rl.critic_lr=0.25", "rl.value_clip=0")
    seen = Seen(monkeypatch)
    rl.run(cfg)
    (row,) = rows_of(cfg)
    (before,) = seen.gradients
    apart = {name: critic.owns(name) for name in before}
    norms = [torch.stack([g.norm() for n, g in before.items() if apart[n] == own]).norm() for own in (False, True)]
    assert norms[1] > 20 * norms[0] > 0 and row["grad_norm"] == pytest.approx(float(norms[0]), rel=1e-5)
    optimizer = seen.stepper.optimizer
    for group in optimizer.param_groups:
        own = {apart[n] for n, p in seen.stepper.model.named_parameters() for q in group["params"] if p is q}
        assert own == {FACTOR in group} and group["lr"] == pytest.approx(0.25 if own == {True} else row["lr"])
    for name, p in seen.stepper.model.named_parameters():
        if p.requires_grad:  # the first moment is a tenth of the gradient, scaled down to the limit
            clipped = before[name] * min(1.0, 0.5 / float(norms[apart[name]]))
            torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.1 * clipped, rtol=1e-4, atol=1e-7)


def test_blocks_that_recompute_do_so_with_the_critics_adapters(reinforcing: Make, monkeypatch, head) -> None:
    head(0.05, 0.3)
    found = []
    for how in ("none", "full"):
        seen = Seen(monkeypatch)
        rl.run(reinforcing(*PPO, "lora={rank: 4}", "rl.epochs=2", f"train.recompute={how}", dir=how))
        found.append(seen.gradients[1])
        monkeypatch.undo(), head(0.05, 0.3)
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_a_model_whose_head_is_not_known_has_no_critic(reinforcing: Make) -> None:
    with pytest.raises(train.TrainError, match="Linear names no output embeddings"):
        critic.attach(nn.Linear(2, 2), reinforcing(*PPO))


@pytest.mark.long
@pytest.mark.parametrize("over", [(), LORA], ids=["full", "lora"])
def test_what_leaves_a_run_is_the_policy_alone(reinforcing: Make, over: tuple[str, ...]) -> None:
    cfg = reinforcing("rl.algorithm=ppo", *over, "train.steps=2", "train.warmup=1", "run.hf=true")
    asked = []

    class Look(train.Callback):
        def end(self, run: train.Run, result: train.RunResult) -> None:
            asked.append({n: p.detach().clone() for n, p in run.job.model.named_parameters()})

    result = rl.run(cfg, callbacks=[Look()])
    (trained,) = asked
    assert any(critic.owns(n) and p.any() for n, p in trained.items())
    opened, *_ = train.load_run(result.dir)
    again = dict(opened.named_parameters())
    assert again.keys() == {n for n in trained if not critic.owns(n)}
    assert all(torch.equal(again[n], trained[n]) for n in again if trained[n].requires_grad or not over)
    if not over:
        stock, info = type(opened).from_pretrained(result.dir / "hf", output_loading_info=True)
        assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(p, trained[n]) for n, p in stock.named_parameters())
        return
    saved = load_file(result.dir / "adapter" / "adapter_model.safetensors")
    mine = {n: p for n, p in trained.items() if ".default." in n}
    assert len(saved) == len(mine) and not any("second" in name or "value" in name for name in saved)
    base = peft.PeftModel.from_pretrained(models.load(cfg.model.path), result.dir / "adapter")
    loaded = {n.removeprefix("base_model.model."): p for n, p in base.named_parameters() if ".default." in n}
    assert loaded.keys() == mine.keys() and all(torch.equal(loaded[n], mine[n]) for n in mine)


@pytest.mark.long
def test_the_codes_of_the_policy_are_the_critics(reinforcing: Make) -> None:
    """Every FP8 layer ran twice as often as there are micro-batches, once for each, over one set of codes."""
    shares = {}
    for algorithm in ("grpo", "ppo"):
        cfg = reinforcing(f"rl.algorithm={algorithm}", *LORA, *ONE, dir=algorithm)
        rl.run(cfg)
        shares[algorithm] = json.loads((Path(cfg.run.dir) / "proof.json").read_text())["components"]
        shares[algorithm, "codes"] = rows_of(cfg)[0]["memory"]["codes"]
    assert shares["ppo", "codes"] == shares["grpo", "codes"]
    for gemm, backends in shares["grpo"]["foundation"].items():
        assert shares["ppo"]["foundation"][gemm] == {name: 2 * calls for name, calls in backends.items()}
