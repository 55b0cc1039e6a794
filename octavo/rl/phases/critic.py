"""The critic in a step of PPO; its arithmetic is in :mod:`octavo.rl.objectives.gae`, its parameters are in
:mod:`octavo.train.forward.critic`:

    store_values        values of the rollout's tokens, with the weights that generated the rollout
    compute_advantages  rewards per token; advantages by GAE, whitened over the tokens of the step on all ranks; returns
    losses              the loss of a micro-batch: from the policy's forward if both train the same layers
                        (:meth:`Critic.collect_values`), else by a separate forward and backward with the second adapter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo import adapters
from octavo.rl.objectives.gae import gae_of_micro_batches, moments, token_rewards, value_loss, whiten
from octavo.rl.objectives.metrics import Figures
from octavo.rl.objectives.penalties import kl
from octavo.rl.phases.reference import untracked_forward
from octavo.rl.phases.stepper_protocol import StepperProtocol
from octavo.rl.rollout.experience import Experience, Rollout, scatter_to_positions
from octavo.train.forward import critic, losses
from octavo.train.step.memory_report import Memory
from octavo.train.step.update import Loss


class Critic:
    """The critic of a run. ``has_separate_layers``: it trains a second adapter instead of the policy's layers."""

    def __init__(self, stepper: StepperProtocol) -> None:
        assert stepper.settings.values is not None
        self.stepper, self.settings = stepper, stepper.settings.values
        self.has_separate_layers = stepper.cfg.lora is not None

    def collect_values(self) -> AbstractContextManager[list[Tensor]]:
        """Return the context of a policy forward. It yields a list that receives the values of that forward; the list
        stays empty if the critic has separate layers."""
        return nullcontext([]) if self.has_separate_layers else critic.values(self.stepper.model, alone=False)

    def store_values(self, batch: dict[str, Any], keep: Tensor, values: Sequence[Tensor]) -> None:
        """Store the values of a micro-batch's tokens before the first update of the step. `values` are those that
        :meth:`collect_values` collected."""
        if self.has_separate_layers:
            with untracked_forward(self.stepper.model), adapters.use_second_adapter(self.stepper.model):
                values = self._forward(batch, keep)
        batch["experience"].values = scatter_to_positions(_select_positions(values[0], keep), keep, batch)

    def compute_advantages(self, rollout: Rollout, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Set the advantage and the return of every token. Returns the critic's figures, and the KL if it is part of
        the reward. Collective call."""
        settings, world = self.stepper.settings, self.stepper.world
        in_reward = bool(settings.beta) and settings.kl_in == "reward"
        experiences: list[Experience] = [batch["experience"] for batch in batches]
        masks = [self.stepper.mask(batch, losses.targets(batch["labels"])) for batch in batches]
        rewards, distances = [], []
        for e, mask in zip(experiences, masks, strict=True):
            assert e.values is not None
            scores = torch.zeros(len(mask), dtype=torch.float64)
            scores[: len(e.rows)] = torch.from_numpy(rollout.rewards[[*e.rows]])
            distance = torch.zeros_like(e.values)
            if in_reward:
                assert e.old is not None and e.ref is not None
                distance = kl(e.old, e.ref, mask, settings.kl)
            rewards.append(token_rewards(scores, mask, distance, settings.beta))
            distances.append(distance)
        values = [e.values for e in experiences if e.values is not None]
        estimates = gae_of_micro_batches(rewards, values, masks, self.settings.gamma, self.settings.lam)
        sums = torch.zeros(3, 3, dtype=torch.float64)  # moments of advantages, returns and the KL
        for (advantages, returns), mask, distance in zip(estimates, masks, distances, strict=True):
            sums += torch.stack([moments(values, mask) for values in (advantages, returns, distance)])
        of_batch = world.sum(sums)
        rollout.advantages = rollout.rewards.astype("float32")
        for e, mask, (advantages, returns) in zip(experiences, masks, estimates, strict=True):
            e.advantages, e.returns = whiten(advantages, mask, of_batch[0]), returns
            means = e.advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
            # A completion's figure in completions.jsonl is the mean over its tokens.
            rollout.advantages[[*e.rows]] = means[: len(e.rows)].numpy()
        residual_variance, return_variance = _variance(of_batch[0]), _variance(of_batch[1])
        tokens = max(float(of_batch[2, 0]), 1.0)
        figures: dict[str, Any] = {
            "explained_variance": 1 - residual_variance / return_variance if return_variance > 0 else None
        }
        return figures | ({"kl": float(of_batch[2, 1]) / tokens} if in_reward else {})

    def loss(
        self, batch: dict[str, Any], keep: Tensor, mask: Tensor, values: Sequence[Tensor]
    ) -> tuple[Tensor, Figures]:
        """Return a micro-batch's part of the critic's weighted loss, and of the figures. `mask` [B, P]."""
        e: Experience = batch["experience"]
        assert e.values is not None and e.returns is not None
        old_values, returns = (known[:, keep].to(values[0].device) for known in (e.values, e.returns))
        clip = self.settings.clip or None
        loss, figures = value_loss(
            _select_positions(values[0], keep), old_values, returns, mask, self.stepper.counts, clip
        )
        return self.settings.weight * loss, figures

    def losses(self, batch: dict[str, Any], memory: Memory | None) -> Iterator[Loss]:
        """Yield the losses of a micro-batch that the policy's forward does not compute. The caller runs the backward of
        each before it takes the next."""
        if not self.has_separate_layers:
            return
        keep, target, _ = self.stepper.loss_positions(batch, 1.0)
        with adapters.use_second_adapter(self.stepper.model):
            with memory.forward() if memory else nullcontext():
                values = self._forward(batch, keep)
                mask = self.stepper.mask(batch, target).to(values[0].device)
                loss, figures = self.loss(batch, keep, mask, values)
            self.stepper.part_figures.append(figures)
            yield Loss(loss, torch.stack([loss, torch.zeros_like(loss)]).detach())

    def count_forwards(self, policy: Mapping[str, int]) -> dict[str, int]:
        """Return the forwards of each component in an update, given the policy's forwards. A critic with separate
        layers runs all components except the head a second time."""
        return {name: n * 2 if self.has_separate_layers and name != "lm_head" else n for name, n in policy.items()}

    def _forward(self, batch: dict[str, Any], keep: Tensor) -> list[Tensor]:
        with critic.values(self.stepper.model, alone=True) as values:
            self.stepper.forward(batch, keep)
        return values


def _select_positions(values: Tensor, keep: Tensor) -> Tensor:
    """Return the values at the positions `keep`. `values` has those positions, or all positions."""
    return values if values.shape[1] == len(keep) else values[:, keep.to(values.device)]


def _variance(sums: Tensor) -> float:
    """Return the variance from :func:`octavo.rl.objectives.gae.moments`, or 0 if it is within fp64 rounding."""
    _, mean, squares = (sums / sums[0].clamp(min=1)).tolist()
    variance = squares - mean * mean
    return variance if variance > 1e-12 * squares else 0.0
