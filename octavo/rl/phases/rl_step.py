"""A step of reinforcement learning, for this rank's prompts:

    roll      the training modules generate completions (:mod:`octavo.generation`), rewards judge them
    remember  log-probabilities of the trainer with these weights, and of the reference, where the objective needs them
    judge     rewards become advantages, over the groups of all ranks, or by a critic (:mod:`octavo.rl.phases.critic`)
    update    forward, objective, backward, weights: `epochs` times over `mini_batches` parts

The rollout depends only on the weights and on (seed, step, prompt, sample, position), so a run that is stopped or
killed anywhere in a step repeats the same step.
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
from octavo.rl.objectives.advantages import ADVANTAGES, informative
from octavo.rl.objectives.importance import UNLIMITED, difference_of, gap, weights
from octavo.rl.objectives.metrics import Figures, add_up, kind, whole
from octavo.rl.objectives.penalties import kl, overlong, without_truncated
from octavo.rl.objectives.policy_losses import Batch, Counts, policy_loss
from octavo.rl.phases.completions_log import CompletionsLog, completion_lines
from octavo.rl.phases.critic import Critic
from octavo.rl.phases.mismatch_limit import MismatchLimit
from octavo.rl.phases.reference import untracked_forward, with_bytes
from octavo.rl.phases.reward_errors import RewardErrors
from octavo.rl.phases.settings import Settings, sampling_of
from octavo.rl.phases.stepper_protocol import Roles
from octavo.rl.rollout.experience import Experience, Rollout, micro_batches, spread
from octavo.rl.rollout.rollout import completion_means, generate_completions, group_figures, score_completions
from octavo.rl.rollout.same_weights import SameWeights
from octavo.rl.rollout.stale_queue import Written, restore_pending
from octavo.train import Observe
from octavo.train.forward import losses
from octavo.train.forward.forward import log_probs
from octavo.train.step.memory_report import Memory
from octavo.train.step.step import VISION, Batches, Stepper, StepResult
from octavo.train.step.update import Loss

DRAWS = 4  # the most rollouts of a step, where groups of equal rewards are replaced (DAPO's dynamic sampling)


@dataclass(kw_only=True)
class RlStepper(Stepper):
    """Runs steps from prompts.

    prompts        the loader; a step may take more prompts from it than it was passed
    reward_errors  reports rewards that returned no number; None: such a reward ends the run
    log            the file of completions; None: another rank writes it
    """

    roles: Roles
    prompts: Loader
    reward_errors: RewardErrors | None = None
    log: CompletionsLog | None = None

    def __post_init__(self) -> None:
        self.settings = Settings.of(self.cfg)
        section, encoder = self.settings.section, self.prompts.encoder
        self.sampling, self.pad_id = sampling_of(section, self.settings.seed, 0, encoder.places), encoder.pad_id
        self.same = SameWeights(self.model)
        self.critic = Critic(self) if self.settings.values else None
        self.limit = MismatchLimit(self) if section.invariant or section.max_gap is not None else None
        self.rollout = Rollout([], [], [], np.zeros(0))  # of the current step
        self.counts = Counts(0.0, 0.0, 0.0, 0.0)  # of the current update
        self.part_figures: list[Figures] = []  # of the micro-batches of the step so far
        self.cached = self.written = 0  # bytes of keys and values, and tokens, of the step's rollouts
        self._first_update: tuple[Batches, Batches] | None = None  # prompts of a step, micro-batches that they became
        self._pending: Written | None = None  # `rl.stale`: what the next step learns from
        self._resumed: dict[str, Tensor] = {}  # the same from a checkpoint, until the first step takes it

    def run(self, batches: Batches, lr: float, observe: Observe) -> StepResult:
        """One step from this rank's prompts; see this file's docstring."""
        began, section = time.perf_counter(), self.settings.section
        self.cached = self.written = 0
        # The loader of this phase yields prompts; the micro-batches of `Stepper` are made from their completions.
        due = self.next_rollout(cast(list[PromptSample], [*batches]))
        rollout, figures = due.rollout, dict(due.figures)
        self.rollout = rollout
        generated = time.perf_counter()
        self.world.at(f"step {self.number}, forward and backward")
        self.on_progress("training")
        updates = self._cut(rollout)
        several = section.epochs * section.mini_batches > 1 and not section.stale
        old = several or bool(self.settings.beta and self.settings.kl_in == "reward")
        if old or self.critic:
            self._remember([batch for part in updates for batch in part], old)
        figures |= {"kl": None, **self._judge(rollout, updates)}
        self.part_figures = []
        self.same.learns(self.number)
        results: list[StepResult] = []
        for _ in range(section.epochs):
            for part in updates:
                if not results:
                    self._first_update = batches, part
                results.append(super().run(part, lr, observe if not results else Observe()))
        figures |= self._means(results)
        # Ranks wait for the slowest, so its seconds are the step's.
        spent = self._slowest(generated - began, time.perf_counter() - generated)
        figures.pop("completions")
        if section.stale:
            self.same.moved()
            figures["weights"] = due.weights
        written = self.world.sum(torch.tensor(self.written, dtype=torch.float64))  # of every draw
        figures["rollout_tokens_per_s"] = float(written) / spent[0]
        figures["training_tokens_per_s"] = sum(result.tokens for result in results) / spent[1]
        lines = completion_lines(self.number, rollout, section.show, due.weights)
        every = self.world.gather_objects(lines)
        if self.log is not None:
            self.log.write(sum(every, []))
        if results[0].memory is not None:
            results[0] = with_bytes(results[0], self.roles.reference, kv_cache=self.cached)
        return _joined(results, figures)

    # --- rollout ------------------------------------------------------------------------------------------------------

    def next_rollout(self, prompts: list[PromptSample]) -> Written:
        """The completions that this step learns from: those of its prompts; with `rl.stale` those that were generated
        in the step before, while these prompts are for the next step."""
        if not self.settings.section.stale:
            return Written(*self.sample_step(prompts, self.number), self.number - 1)
        due = self._pending or restore_pending(self._resumed, self.prompts.at, self._text, self.world)
        self._resumed = {}
        if due is None:
            due, prompts = self._sample_ahead(prompts, self.number), [*next(self.prompts)]
        last = self.number == self.cfg.train.steps
        self._pending = None if last else self._sample_ahead(prompts, self.number + 1)
        return due

    def _sample_ahead(self, prompts: list[PromptSample], step: int) -> Written:
        """Completions for a step, with their log-probabilities under the trainer's current weights."""
        rollout, figures = self.sample_step(prompts, step)
        self.rollout = rollout
        batches = [batch for part in self._cut(rollout) for batch in part]
        self._remember(batches, old=True, roles=False)
        old: dict[int, np.ndarray] = {}
        for batch in batches:
            experience: Experience = batch["experience"]
            assert experience.old is not None
            old |= {row: experience.old[n, rollout.span(row)].numpy() for n, row in enumerate(experience.rows)}
        return Written(replace(rollout, old=[old[row] for row in sorted(old)]), figures, self.number - 1)

    def state(self) -> dict[str, Tensor]:
        return {} if self._pending is None else self._pending.tensors(self.world.rank)

    def load_state(self, extra: Mapping[str, Tensor]) -> None:
        self._resumed = dict(extra)

    def _text(self, tokens: np.ndarray) -> str:
        return str(self.roles.tokenizer.decode(tokens, skip_special_tokens=True))

    def sample_step(self, prompts: list[PromptSample], step: int) -> tuple[Rollout, dict[str, Any]]:
        """Completions for a step with their rewards, and figures over all ranks; of several draws, the first draw's
        figures."""
        first_draw = self._roll(prompts, step)
        rollout = self.add_length_penalty(first_draw)
        figures: dict[str, Any] = {
            **completion_means(rollout, self.world, self.settings.section),
            **group_figures(rollout, self.world),
        }
        if not self.settings.refill:
            return rollout, figures
        wanted, draws = len(self._numbers(first_draw)), 1
        rollout = _informative(first_draw)
        while len(self._numbers(rollout)) < wanted and draws < DRAWS:
            rollout = rollout.and_then(_informative(self._roll([*next(self.prompts)], step)))
            draws += 1
        # Chosen over all ranks, so that any number of ranks takes the same prompts.
        first = set(self._numbers(rollout)[:wanted])
        rollout = rollout.of([p for p, prompt in enumerate(rollout.prompts) if prompt.number in first])
        return self.add_length_penalty(rollout), figures | {"sampling/draws": float(draws)}

    def _numbers(self, rollout: Rollout) -> list[int]:
        """The numbers of all ranks' prompts, in the order of the data. A collective."""
        every = self.world.gather_objects([prompt.number for prompt in rollout.prompts])
        return sorted(number for mine in every for number in mine)

    def _roll(self, prompts: list[PromptSample], step: int) -> Rollout:
        section, roles = self.settings.section, self.roles
        self.world.at(f"step {self.number}, rollout")
        sampling = replace(self.sampling, step=step)
        completions, held = generate_completions(
            roles.engine, prompts, sampling, section, lambda at: self.on_progress(f"rollout {at}")
        )
        self.cached = max(self.cached, held)
        self.written += sum(len(c.tokens) for c in completions)
        self.same.wrote(self.number)
        self.world.at(f"step {self.number}, rewards")
        self.on_progress("rewards")
        rollout = score_completions(roles.rewards, roles.tokenizer, prompts, completions)
        if self.reward_errors is not None:
            self.reward_errors.report()
        return rollout

    def add_length_penalty(self, rollout: Rollout) -> Rollout:
        """The rollout with reduced rewards for long completions (DAPO). Informative groups are chosen before, by the
        rewards without this penalty."""
        if not self.settings.overlong:
            return rollout
        lengths = torch.from_numpy(rollout.lengths)
        penalty = overlong(lengths, self.settings.section.max_new_tokens, self.settings.overlong).double().numpy()
        return replace(rollout, rewards=rollout.rewards + penalty)

    def _slowest(self, *seconds: float) -> list[float]:
        return list(self.world.all_reduce_max(torch.tensor(seconds, dtype=torch.float64)).tolist())

    # --- from rewards to micro-batches --------------------------------------------------------------------------------

    def _cut(self, rollout: Rollout) -> list[list[dict[str, Any]]]:
        """The micro-batches of each mini-batch; all ranks have the same number. A collective."""
        parts, size = self.settings.section.mini_batches, self.cfg.train.micro_batch
        # Assigned in the order of the data, whichever rank has a prompt: the same updates on any number of ranks.
        part_of = {number: n % parts for n, number in enumerate(self._numbers(rollout))}
        mine = [part_of[prompt.number] for prompt in rollout.prompts]
        prompts = [[p for p, chosen in enumerate(mine) if chosen == part] for part in range(parts)]
        most = torch.tensor([len(part) * rollout.group for part in prompts], dtype=torch.float64)
        numbers = [max(1, -(-int(n) // size)) for n in self.world.all_reduce_max(most)]
        return [
            micro_batches(rollout, part, size, number, self.pad_id)
            for part, number in zip(prompts, numbers, strict=True)
        ]

    def _remember(self, batches: Sequence[dict[str, Any]], old: bool, roles: bool = True) -> None:
        """Store what the weights before the step's first update compute: with `old` the trainer's log-probabilities,
        unless they are known, which are checked against the rollout's; with `roles` the reference's log-probabilities
        and the critic's values."""
        for batch in batches:
            keep, target, _ = self.loss_positions(batch, 1.0)
            experience: Experience = batch["experience"]
            critic, values = self.critic if roles else None, list[Tensor]()
            if (old and experience.old is None) or (critic and not critic.apart):
                with untracked_forward(self.model), self.rows(), self._collect_values() as values:
                    logs, _ = log_probs(self.forward, self.head, batch, keep, target, self.settings.section.temperature)
                if experience.old is None:
                    experience.old = spread(logs, keep, batch)
                    mask = self.mask(batch, losses.targets(batch["labels"]))
                    if self.limit:
                        self.limit.hold(batch, difference_of(experience.old, experience.sampled, mask).abs())
            if critic:
                critic.remember(batch, keep, values)
            if roles:
                self._refer(batch, keep, target)

    def _refer(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> Tensor | None:
        """The reference's log-probabilities [B, P], computed once a step; None without a reference."""
        if self.roles.reference is None:
            return None
        experience: Experience = batch["experience"]
        if experience.ref is None:
            logs = self.roles.reference(batch, keep, target, self.settings.section.temperature)
            experience.ref = spread(logs, keep, batch)
        return experience.ref[:, keep].to(self.world.device)

    def _judge(self, rollout: Rollout, updates: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """Set the advantage of every completion. Returns the KL if it is counted in rewards. A collective."""
        batches, figures = [batch for part in updates for batch in part], {}
        if self.critic:
            return self.critic.judge(rollout, batches)
        if self.settings.beta and self.settings.kl_in == "reward":
            figures = {"kl": self._subtract_kl(rollout, batches)}
        mine = rollout.rewards.reshape(-1, self.settings.section.group)
        every = self.world.gather_objects(mine.tolist())
        before = sum(len(groups) for groups in every[: self.world.rank])
        rewards = torch.tensor([group for groups in every for group in groups], dtype=torch.float64)
        advantages = ADVANTAGES[self.settings.advantage](rewards) if len(rewards) else rewards.float()
        rollout.advantages = advantages[before : before + len(mine)].flatten().numpy()
        for batch in batches:
            experience: Experience = batch["experience"]
            experience.advantages[: len(experience.rows)] = torch.from_numpy(rollout.advantages[[*experience.rows]])
        return figures

    def _subtract_kl(self, rollout: Rollout, batches: Sequence[dict[str, Any]]) -> float:
        """Subtract beta times the KL of each completion from its reward; returns the mean KL of a token over all
        ranks."""
        total = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            experience: Experience = batch["experience"]
            mask = self.mask(batch, losses.targets(batch["labels"]))
            assert experience.old is not None and experience.ref is not None
            each = kl(experience.old, experience.ref, mask, self.settings.kl)
            for row, place in enumerate(experience.rows):
                rollout.rewards[place] -= self.settings.beta * float(each[row].double().sum())
            total += torch.tensor([float(each.double().sum()), float(mask.sum())], dtype=torch.float64)
        divergence, tokens = self.world.sum(total).tolist()
        return divergence / max(tokens, 1.0)

    # --- update -------------------------------------------------------------------------------------------------------

    def totals(self, batches: Batches) -> Tensor:
        """fp64 [completions, tokens, tokens learned from] of an update over all ranks. Sets `counts`. A collective."""
        real = [batch for batch in batches if batch["experience"].rows]
        masks = [self.mask(batch, losses.targets(batch["labels"])) for batch in real]
        mine = Counts.of(masks, self.settings.section.max_new_tokens)
        tokens = [sum(batch["meta"].tokens for batch in batches), sum(int(mask.sum()) for mask in masks)]
        *counts, seen, judged = self.world.sum(torch.tensor([*mine, *tokens], dtype=torch.float64)).tolist()
        self.counts = Counts(*counts)
        return torch.tensor([self.counts.sequences, seen, judged], dtype=torch.float64)

    def mask(self, batch: dict[str, Any], target: Tensor) -> Tensor:
        """bool, as `target`: the tokens that are learned from."""
        known = target != losses.IGNORE
        if self.settings.section.mask_truncated:
            return without_truncated(known, batch["experience"].truncated)
        return known

    def loss_at_positions(
        self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, share: float = 1.0
    ) -> Loss:
        """A micro-batch's part of the update's objective."""
        settings, n, device = self.settings, self.counts, self.world.device
        experience: Experience = batch["experience"]
        with self.rows(), self._collect_values() as values:
            logs, entropy = log_probs(
                self.forward, self.head, batch, keep, target, settings.section.temperature, entropy=True
            )
        assert entropy is not None
        mask = self.mask(batch, target).to(device)
        sampled = experience.sampled[:, keep].to(device)
        old = logs.detach() if experience.old is None else experience.old[:, keep].to(device)
        figures = gap(old, sampled, mask, n.tokens)
        if experience.old is None and self.limit:  # else `_remember` checked it
            self.limit.hold(batch, difference_of(old, sampled, mask).abs())
        corrected, weight_figures = weights(old, sampled, mask, settings.correction or UNLIMITED, n.tokens, n.sequences)
        figures |= weight_figures
        ref = self._refer(batch, keep, target)
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
        """Context of a forward of the policy; its list receives the critic's values."""
        return self.critic.collect_values() if self.critic else nullcontext([])

    def rows(self) -> AbstractContextManager[object]:
        """Context of a forward whose log-probabilities are compared with the rollout's: batch-invariant with
        `rl.invariant`."""
        return fp8.batch_invariant(self.model) if self.settings.section.invariant else nullcontext()

    def _means(self, results: Sequence[StepResult]) -> dict[str, Any]:
        """Figures of the step: means over its updates that had a token to learn from, or the smallest and largest. If
        no update had one, all are None, including the KL that was subtracted from rewards."""
        totals = whole(add_up(self.part_figures), self.world)
        updates = sum(result.loss_tokens > 0 for result in results)
        if not updates:
            return dict.fromkeys(["kl", *totals])
        return {name: v / updates if kind(name) == "sum" else v for name, v in totals.items()}

    def count_forwards(self, batches: Batches) -> dict[str, int]:
        """Component -> micro-batches of the first update that run it; for prompts before their update, 1 or 0: whether
        any will."""
        if self._first_update is not None and self._first_update[0] is batches:
            batches = self._first_update[1]
        if batches and isinstance(batches[0], dict):
            counts = super().count_forwards(batches)
            return self.critic.count_forwards(counts) if self.critic else counts
        seen = any(prompt.images for prompt in cast(Sequence[PromptSample], batches))
        return {name: int(seen) if name in VISION else 1 for name in self.family.components}


def _informative(rollout: Rollout) -> Rollout:
    """The prompts whose group has rewards that are not all equal."""
    if not rollout.prompts:
        return rollout
    unequal = informative(torch.from_numpy(rollout.rewards.reshape(-1, rollout.group)))
    return rollout.of([int(p) for p in unequal.nonzero().flatten()])


def _joined(results: Sequence[StepResult], figures: Mapping[str, Any]) -> StepResult:
    """The results of a step's updates as one."""
    first, n = results[0], len(results)
    return replace(
        first,
        loss=sum(r.loss for r in results) / n,
        grad_norm=sum(r.grad_norm for r in results) / n,
        tokens=sum(r.tokens for r in results),
        loss_tokens=sum(r.loss_tokens for r in results),
        applied=all(r.applied for r in results),
        overflow=any(r.overflow for r in results) and all(r.applied or r.overflow for r in results),
        figures=figures,
    )
