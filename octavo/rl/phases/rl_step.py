"""A step of reinforcement learning, for this rank's prompts:

    1. generate completions with the training modules (:mod:`octavo.generation`) and score them with the rewards
    2. compute log-probabilities with the current weights and with the reference, if the objective needs them
    3. compute advantages over the groups of all ranks, or with a critic (:mod:`octavo.rl.phases.critic`)
    4. update the weights: `epochs` times over `mini_batches` parts

The rollout depends only on the weights and on (seed, step, prompt, sample, position), so a run that is stopped or
killed at any point of a step repeats the same step after a resume.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from octavo import fp8
from octavo.data.loaders.loader import Loader
from octavo.data.tasks.prompts import PromptSample
from octavo.generation import Completion
from octavo.rl.fleet.sender import WeightSender
from octavo.rl.objectives.advantages import ADVANTAGES, informative
from octavo.rl.objectives.importance import UNLIMITED, gap, logp_difference, weights
from octavo.rl.objectives.metrics import Figures, combine_figures, kind, whole
from octavo.rl.objectives.penalties import kl, mask_out_truncated, overlong_penalty
from octavo.rl.objectives.policy_losses import Batch, Counts, policy_loss
from octavo.rl.phases.completions_log import CompletionsLog, completion_lines
from octavo.rl.phases.critic import Critic
from octavo.rl.phases.mismatch_limit import MismatchLimit
from octavo.rl.phases.reference import add_reference_memory, untracked_forward
from octavo.rl.phases.reward_errors import RewardErrors
from octavo.rl.phases.settings import Settings, make_sampling
from octavo.rl.phases.stepper_protocol import Roles
from octavo.rl.rollout.experience import Experience, Rollout, micro_batches, scatter_to_positions
from octavo.rl.rollout.rollout import completion_means, generate_completions, group_figures, score_completions
from octavo.rl.rollout.rollout_ahead import RolloutAhead
from octavo.rl.rollout.same_weights import SameWeights
from octavo.rl.rollout.stale_queue import VersionedRollout
from octavo.train import Observe
from octavo.train.forward import losses
from octavo.train.forward.forward import log_probs
from octavo.train.step.memory_report import Memory
from octavo.train.step.step import VISION, Batches, Stepper, StepResult
from octavo.train.step.update import Loss

MAX_ROLLOUTS_PER_STEP = 4  # with dynamic sampling (DAPO), which replaces groups of equal rewards


@dataclass(kw_only=True)
class RlStepper(Stepper):
    """Run steps of reinforcement learning.

    prompts        the loader of prompts; with dynamic sampling a step takes further prompts from it
    reward_errors  reports rewards that returned no number, or None if such a reward ends the run
    log            the file of completions, or None on ranks other than 0
    sender         gives the engine its weights, or None if it shares the trainer's
    """

    roles: Roles
    prompts: Loader
    reward_errors: RewardErrors | None = None
    log: CompletionsLog | None = None
    sender: WeightSender | None = None

    def __post_init__(self) -> None:
        self.settings = Settings.of(self.cfg)
        section, encoder = self.settings.section, self.prompts.encoder
        self.sampling, self.pad_id = make_sampling(section, self.settings.seed, 0, encoder.places), encoder.pad_id
        self.weight_check = SameWeights(self.model, self.roles.engine.shares_weights)
        self.critic = Critic(self) if self.settings.values else None
        self.mismatch_limit = MismatchLimit(self) if section.invariant or section.max_gap is not None else None
        self.rollout = Rollout([], [], [], np.zeros(0))  # of the current step
        self.counts = Counts(0.0, 0.0, 0.0, 0.0)  # of the current update
        self.part_figures: list[Figures] = []  # of the micro-batches of the step so far
        self.cache_bytes = self.generated_tokens = 0  # bytes of keys and values, and tokens, of the step's rollouts
        self._first_update: tuple[Batches, Batches] | None = None  # (prompts, micro-batches)
        overlaps = bool(section.stale) and not self.roles.engine.shares_weights and not self.settings.refill
        last = self.cfg.train.steps or 0
        self.ahead = RolloutAhead(self, self.roles.engine, overlaps, section.group, last)  # with `rl.stale`

    def run(self, batches: Batches, lr: float, observe: Observe) -> StepResult:
        """Run one step on this rank's prompts; see the module docstring."""
        began, section = time.perf_counter(), self.settings.section
        self.cache_bytes = self.generated_tokens = 0
        # The loader of this phase yields prompts, not the micro-batches that `Stepper.run` takes.
        generated = self.next_rollout(cast(list[PromptSample], [*batches]))
        rollout, figures = generated.rollout, dict(generated.figures)
        self.rollout = rollout
        rollout_end = time.perf_counter()
        self.world.set_phase(f"step {self.step_number}, forward and backward")
        self.on_progress("training")
        updates = self.make_micro_batches(rollout)
        multiple_updates = section.epochs * section.mini_batches > 1 and not section.stale
        old = multiple_updates or bool(self.settings.beta and self.settings.kl_in == "reward")
        if old or self.critic:
            self.compute_logprobs([batch for part in updates for batch in part], old)
        figures |= {"kl": None, **self._compute_advantages(rollout, updates)}
        self.part_figures = []
        self.weight_check.before_update(self.step_number)
        results: list[StepResult] = []
        for _ in range(section.epochs):
            for part in updates:
                if not results:
                    self._first_update = batches, part
                results.append(super().run(part, lr, observe if not results else Observe()))
        figures |= self._step_metrics(results)
        if self.ahead.overlaps:  # the rollout's log-probabilities were compared with themselves
            figures |= {name: None for name in figures if name.startswith("logp_gap")}
        # Ranks wait for the slowest one, so its time is the step's.
        seconds = self._max_over_ranks(rollout_end - began, time.perf_counter() - rollout_end)
        figures.pop("completions")
        if section.stale:
            self.weight_check.after_update()
            figures["weights"] = generated.weights_version
        generated_tokens = self.world.sum(torch.tensor(self.generated_tokens, dtype=torch.float64))  # of all draws
        figures["rollout_tokens_per_s"] = None if self.ahead.overlaps else float(generated_tokens) / seconds[0]
        if self.ahead.overlaps:
            figures["rollout_wait_s"] = seconds[0]
        figures["training_tokens_per_s"] = sum(result.tokens for result in results) / seconds[1]
        lines = completion_lines(self.step_number, rollout, section.show, generated.weights_version)
        all_lines = self.world.gather_objects(lines)
        if self.log is not None:
            self.log.write(sum(all_lines, []))
        if results[0].memory is not None:
            results[0] = add_reference_memory(results[0], self.roles.reference, kv_cache=self.cache_bytes)
        return _merge_results(results, figures)

    # --- rollout ------------------------------------------------------------------------------------------------------

    def next_rollout(self, prompts: list[PromptSample]) -> VersionedRollout:
        """Return the completions that this step trains on. With `rl.stale` they are of the weights before the last
        update, and `prompts` are for the next step."""
        if self.settings.section.stale:
            return self.ahead.next(prompts)
        return VersionedRollout(*self.sample_step(prompts, self.step_number), self.step_number - 1)

    def state(self) -> dict[str, Tensor]:
        return self.ahead.state()

    def load_state(self, extra: Mapping[str, Tensor]) -> None:
        self.ahead.load_state(extra)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of a completion."""
        return str(self.roles.tokenizer.decode(tokens, skip_special_tokens=True))

    def sample_step(self, prompts: list[PromptSample], step: int) -> tuple[Rollout, dict[str, Any]]:
        """Generate and score the completions of a step. Returns them with figures over all ranks; with dynamic sampling
        the figures describe the first draw."""
        first_draw = self._generate_and_score(prompts, step)
        rollout, figures = self.describe_step(first_draw)
        if not self.settings.refill:
            return rollout, figures
        wanted, draws = len(self._prompt_numbers(first_draw)), 1
        rollout = _select_informative(first_draw)
        while len(self._prompt_numbers(rollout)) < wanted and draws < MAX_ROLLOUTS_PER_STEP:
            rollout = rollout.concatenate(_select_informative(self._generate_and_score([*next(self.prompts)], step)))
            draws += 1
        # Selected over all ranks, so that the choice does not depend on the number of ranks.
        first = set(self._prompt_numbers(rollout)[:wanted])
        rollout = rollout.of([p for p, prompt in enumerate(rollout.prompts) if prompt.number in first])
        return self.add_length_penalty(rollout), figures | {"sampling/draws": float(draws)}

    def describe_step(self, first_draw: Rollout) -> tuple[Rollout, dict[str, Any]]:
        """Return the first draw of a step with the penalty on long completions, and its figures over all ranks.
        Collective call."""
        rollout = self.add_length_penalty(first_draw)
        means = completion_means(rollout, self.world, self.settings.section)
        return rollout, {**means, **group_figures(rollout, self.world)}

    def _prompt_numbers(self, rollout: Rollout) -> list[int]:
        """Return the numbers of all ranks' prompts in the order of the data. Collective call."""
        by_rank = self.world.gather_objects([prompt.number for prompt in rollout.prompts])
        return sorted(number for numbers in by_rank for number in numbers)

    def _generate_and_score(self, prompts: list[PromptSample], step: int) -> Rollout:
        section, roles = self.settings.section, self.roles
        self.world.set_phase(f"step {self.step_number}, rollout")
        sampling = replace(self.sampling, step=step)
        version = self.step_number - 1
        self.send_weights(version)
        completions, cache_size = generate_completions(
            roles.engine, version, prompts, sampling, section.group, lambda at: self.on_progress(f"rollout {at}")
        )
        self.cache_bytes = max(self.cache_bytes, cache_size)
        self.generated_tokens += sum(len(c.tokens) for c in completions)
        self.weight_check.after_rollout(self.step_number)
        return self.score(prompts, completions)

    def score(self, prompts: list[PromptSample], completions: list[Completion]) -> Rollout:
        """Return completions with their rewards. Raises RewardError."""
        self.world.set_phase(f"step {self.step_number}, rewards")
        self.on_progress("rewards")
        rollout = score_completions(self.roles.rewards, self.roles.tokenizer, prompts, completions)
        if self.reward_errors is not None:
            self.reward_errors.report()
        return rollout

    def send_weights(self, version: int) -> None:
        """Give an engine in other processes the current weights, once for each version: the number of steps."""
        if self.sender is not None:
            self.sender.send(version, self.on_progress)

    def add_length_penalty(self, rollout: Rollout) -> Rollout:
        """Reduce the rewards of long completions (DAPO). Groups are selected before, by rewards without this
        penalty."""
        if not self.settings.overlong:
            return rollout
        lengths = torch.from_numpy(rollout.lengths)
        penalty = (
            overlong_penalty(lengths, self.settings.section.max_new_tokens, self.settings.overlong).double().numpy()
        )
        return replace(rollout, rewards=rollout.rewards + penalty)

    def _max_over_ranks(self, *seconds: float) -> list[float]:
        return list(self.world.all_reduce_max(torch.tensor(seconds, dtype=torch.float64)).tolist())

    # --- from rewards to micro-batches --------------------------------------------------------------------------------

    def make_micro_batches(self, rollout: Rollout) -> list[list[dict[str, Any]]]:
        """Split the rollout into mini-batches of micro-batches, as many on every rank. Collective call."""
        parts, size = self.settings.section.mini_batches, self.cfg.train.micro_batch
        # Assigned in the order of the data, so that updates do not depend on the number of ranks.
        part_of = {number: n % parts for n, number in enumerate(self._prompt_numbers(rollout))}
        assigned = [part_of[prompt.number] for prompt in rollout.prompts]
        prompts = [[p for p, chosen in enumerate(assigned) if chosen == part] for part in range(parts)]
        most = torch.tensor([len(part) * rollout.group for part in prompts], dtype=torch.float64)
        numbers = [max(1, -(-int(n) // size)) for n in self.world.all_reduce_max(most)]
        return [
            micro_batches(rollout, part, size, number, self.pad_id)
            for part, number in zip(prompts, numbers, strict=True)
        ]

    def compute_logprobs(self, batches: Sequence[dict[str, Any]], old: bool, roles: bool = True) -> None:
        """Compute and store what the objective needs from the weights before the step's first update.

        With `old`, the trainer's log-probabilities unless they are known, checked against the rollout's; with `roles`,
        the reference's log-probabilities and the critic's values.
        """
        for batch in batches:
            keep, target, _ = self.loss_positions(batch, 1.0)
            experience: Experience = batch["experience"]
            critic, values = self.critic if roles else None, list[Tensor]()
            if (old and experience.old is None) or (critic and not critic.has_separate_layers):
                with untracked_forward(self.model), self.batch_invariant_context(), self._collect_values() as values:
                    logs, _ = log_probs(self.forward, self.head, batch, keep, target, self.settings.section.temperature)
                if experience.old is None:
                    experience.old = scatter_to_positions(logs, keep, batch)
                    mask = self.mask(batch, losses.targets(batch["labels"]))
                    if self.mismatch_limit:
                        self.mismatch_limit.check(
                            batch, logp_difference(experience.old, experience.sampled, mask).abs()
                        )
            if critic:
                critic.store_values(batch, keep, values)
            if roles:
                self._reference_logprobs(batch, keep, target)

    def _reference_logprobs(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> Tensor | None:
        """Return the reference's log-probabilities [B, P], computed once per step, or None without a reference."""
        if self.roles.reference is None:
            return None
        experience: Experience = batch["experience"]
        if experience.ref is None:
            logs = self.roles.reference(batch, keep, target, self.settings.section.temperature)
            experience.ref = scatter_to_positions(logs, keep, batch)
        return experience.ref[:, keep].to(self.world.device)

    def _compute_advantages(self, rollout: Rollout, updates: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Set the advantage of every completion. Returns the KL if it is part of the reward. Collective call."""
        batches, figures = [batch for part in updates for batch in part], {}
        if self.critic:
            return self.critic.compute_advantages(rollout, batches)
        if self.settings.beta and self.settings.kl_in == "reward":
            figures = {"kl": self._subtract_kl_from_rewards(rollout, batches)}
        local_rewards = rollout.rewards.reshape(-1, self.settings.section.group)
        by_rank = self.world.gather_objects(local_rewards.tolist())
        before = sum(len(groups) for groups in by_rank[: self.world.rank])
        rewards = torch.tensor([group for groups in by_rank for group in groups], dtype=torch.float64)
        advantages = ADVANTAGES[self.settings.advantage](rewards) if len(rewards) else rewards.float()
        rollout.advantages = advantages[before : before + len(local_rewards)].flatten().numpy()
        for batch in batches:
            experience: Experience = batch["experience"]
            experience.advantages[: len(experience.rows)] = torch.from_numpy(rollout.advantages[[*experience.rows]])
        return figures

    def _subtract_kl_from_rewards(self, rollout: Rollout, batches: Sequence[dict[str, Any]]) -> float:
        """Subtract beta times the KL of each completion from its reward. Returns the mean KL per token over all
        ranks."""
        total = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            experience: Experience = batch["experience"]
            mask = self.mask(batch, losses.targets(batch["labels"]))
            assert experience.old is not None and experience.ref is not None
            token_kl = kl(experience.old, experience.ref, mask, self.settings.kl)
            for row, place in enumerate(experience.rows):
                rollout.rewards[place] -= self.settings.beta * float(token_kl[row].double().sum())
            total += torch.tensor([float(token_kl.double().sum()), float(mask.sum())], dtype=torch.float64)
        divergence, tokens = self.world.sum(total).tolist()
        return divergence / max(tokens, 1.0)

    # --- update -------------------------------------------------------------------------------------------------------

    def totals(self, batches: Batches) -> Tensor:
        """Return fp64 [completions, tokens, tokens with a loss] of an update over all ranks, and set `counts`.
        Collective call."""
        real = [batch for batch in batches if batch["experience"].rows]
        masks = [self.mask(batch, losses.targets(batch["labels"])) for batch in real]
        local_counts = Counts.of(masks, self.settings.section.max_new_tokens)
        tokens = [sum(batch["meta"].tokens for batch in batches), sum(int(mask.sum()) for mask in masks)]
        sums = self.world.sum(torch.tensor([*local_counts, *tokens], dtype=torch.float64))
        *counts, all_tokens, loss_tokens = sums.tolist()
        self.counts = Counts(*counts)
        return torch.tensor([self.counts.sequences, all_tokens, loss_tokens], dtype=torch.float64)

    def mask(self, batch: dict[str, Any], target: Tensor) -> Tensor:
        """Return a bool mask, shaped like `target`, of the tokens with a loss."""
        known = target != losses.IGNORE
        if self.settings.section.mask_truncated:
            return mask_out_truncated(known, batch["experience"].truncated)
        return known

    def loss_at_positions(
        self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, share: float = 1.0
    ) -> Loss:
        """Return a micro-batch's part of the update's objective."""
        settings, n, device = self.settings, self.counts, self.world.device
        experience: Experience = batch["experience"]
        with self.batch_invariant_context(), self._collect_values() as values:
            logs, entropy = log_probs(
                self.forward, self.head, batch, keep, target, settings.section.temperature, entropy=True
            )
        assert entropy is not None
        mask = self.mask(batch, target).to(device)
        sampled = experience.sampled[:, keep].to(device)
        old = logs.detach() if experience.old is None else experience.old[:, keep].to(device)
        figures = gap(old, sampled, mask, n.tokens)
        if experience.old is None and self.mismatch_limit:  # else `compute_logprobs` checked it
            self.mismatch_limit.check(batch, logp_difference(old, sampled, mask).abs())
        corrected, weight_figures = weights(old, sampled, mask, settings.correction or UNLIMITED, n.tokens, n.sequences)
        figures |= weight_figures
        ref = self._reference_logprobs(batch, keep, target)
        entropy = entropy if settings.section.entropy else entropy.detach()
        advantages = experience.advantages if experience.advantages.dim() == 1 else experience.advantages[:, keep]
        correction = None if settings.correction is None else corrected
        parts = Batch(logs, old, mask, advantages.to(device), ref, correction, entropy)
        terms = settings.algorithm.objective(parts, settings.clip, n)
        in_loss = settings.beta if settings.kl_in == "loss" else 0.0
        loss, loss_figures = policy_loss(
            parts,
            terms,
            n,
            beta=in_loss,
            estimator=settings.kl,
            kl_weighted=settings.kl != "k2",
            entropy_bonus=settings.section.entropy,
        )
        if self.critic and values:
            critic_loss, critic_figures = self.critic.loss(batch, keep, mask, values)
            loss, loss_figures = loss + critic_loss, loss_figures | critic_figures
        self.part_figures.append(figures | loss_figures)
        return Loss(loss, torch.stack([loss, torch.zeros_like(loss)]).detach())

    def iter_losses(
        self, batch: dict[str, Any], denominator: float, share: float, memory: Memory | None
    ) -> Iterator[Loss]:
        yield from super().iter_losses(batch, denominator, share, memory)
        if self.critic:
            yield from self.critic.losses(batch, memory)

    def _collect_values(self) -> AbstractContextManager[list[Tensor]]:
        """Return the context of a policy forward; it yields a list that receives the critic's values."""
        return self.critic.collect_values() if self.critic else nullcontext([])

    def batch_invariant_context(self) -> AbstractContextManager[object]:
        """Return the context of a forward whose log-probabilities are compared with the rollout's."""
        return fp8.batch_invariant(self.model) if self.settings.section.invariant else nullcontext()

    def _step_metrics(self, results: Sequence[StepResult]) -> dict[str, Any]:
        """Return the step's metrics: the mean (or min/max) over updates with at least one loss token. All values,
        including the KL that was subtracted from rewards, are None if no update had one."""
        totals = whole(combine_figures(self.part_figures), self.world)
        updates = sum(result.loss_tokens > 0 for result in results)
        if not updates:
            return dict.fromkeys(["kl", *totals])
        return {name: v / updates if kind(name) == "sum" else v for name, v in totals.items()}

    def count_forwards(self, batches: Batches) -> dict[str, int]:
        """Return, by component, the number of micro-batches of the first update that run it. For prompts, before their
        micro-batches exist, return 1 or 0: whether any micro-batch will."""
        if self._first_update is not None and self._first_update[0] is batches:
            batches = self._first_update[1]
        if batches and isinstance(batches[0], dict):
            counts = super().count_forwards(batches)
            return self.critic.count_forwards(counts) if self.critic else counts
        has_images = any(prompt.images for prompt in cast(Sequence[PromptSample], batches))
        return {name: int(has_images) if name in VISION else 1 for name in self.family.components}


def _select_informative(rollout: Rollout) -> Rollout:
    """Keep the prompts whose completions have different rewards."""
    if not rollout.prompts:
        return rollout
    unequal = informative(torch.from_numpy(rollout.rewards.reshape(-1, rollout.group)))
    return rollout.of([int(p) for p in unequal.nonzero().flatten()])


def _merge_results(results: Sequence[StepResult], figures: Mapping[str, Any]) -> StepResult:
    """Merge the results of a step's updates into one."""
    first, n = results[0], len(results)
    return replace(
        first,
        loss=sum(r.loss for r in results) / n,
        grad_norm=sum(r.grad_norm for r in results) / n,
        tokens=sum(r.tokens for r in results),
        loss_tokens=sum(r.loss_tokens for r in results),
        applied=all(r.applied for r in results),
        overflow=any(r.overflow for r in results) and all(r.applied or r.overflow for r in results),
        extra_metrics=figures,
    )
