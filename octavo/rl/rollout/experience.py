"""The training data of a rollout: prompts with their completions, in micro-batches.

Rollout      all completions of a step on this rank, with their rewards
Experience   the inputs of the objective for a micro-batch, in addition to the inputs of the model's forward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import data
from octavo.data.encoding.sample import IGNORE, Sample, with_answer_tokens
from octavo.data.tasks.prompts import PromptSample
from octavo.generation import Completion, Prompt


@dataclass
class Rollout:
    """The completions of P prompts, G per prompt, in the order of the prompts.

    scores      name of a reward -> [P G]; NaN if it returned no number, which counts as 0
    rewards     [P G] fp64: the weighted sum of the scores, plus penalties
    advantages  [P G] fp32, once they are computed
    old         [T] fp32 per completion: the trainer's log-probabilities with the weights that generated it; only for
                pending completions (:mod:`octavo.rl.rollout.stale_queue`)
    """

    prompts: list[PromptSample]
    completions: list[Completion]
    texts: list[str]
    rewards: np.ndarray
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    advantages: np.ndarray | None = None
    old: list[np.ndarray] | None = None

    @property
    def group(self) -> int:
        return len(self.completions) // max(len(self.prompts), 1)

    @property
    def truncated(self) -> np.ndarray:
        """bool [P G]: completions that were cut off at max_new_tokens."""
        return np.array([c.reason == "length" for c in self.completions], dtype=bool)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(c.tokens) for c in self.completions], dtype=np.int64)

    def span(self, row: int) -> slice:
        """Return the positions that predict a completion's tokens, in the sequence of prompt and completion."""
        start = len(self.prompts[row // self.group].input_ids) - 1
        return slice(start, start + len(self.completions[row].tokens))

    def of(self, prompts: Sequence[int]) -> Rollout:
        """Return the part of the rollout with the prompts of these indices."""
        rows = [p * self.group + g for p in prompts for g in range(self.group)]
        return Rollout(
            [self.prompts[p] for p in prompts],
            [replace(self.completions[row], prompt=n // self.group) for n, row in enumerate(rows)],
            [self.texts[row] for row in rows],
            self.rewards[rows],
            {name: scores[rows] for name, scores in self.scores.items()},
            old=None if self.old is None else [self.old[row] for row in rows],
        )

    def concatenate(self, other: Rollout) -> Rollout:
        """Return this rollout followed by another."""
        shift = len(self.prompts)
        return Rollout(
            self.prompts + other.prompts,
            self.completions + [replace(c, prompt=c.prompt + shift) for c in other.completions],
            self.texts + other.texts,
            np.concatenate([self.rewards, other.rewards]),
            {name: np.concatenate([self.scores[name], other.scores[name]]) for name in self.scores},
            old=None if self.old is None or other.old is None else self.old + other.old,
        )


@dataclass
class Experience:
    """The B completions of a micro-batch whose tokens are [B, T]. Per-token tensors are [B, T - 1], by the position
    that predicts the token, like the targets of a loss.

    rows         indices in the rollout
    sampled      log-probabilities of the rollout (0 at other positions)
    truncated    bool [B]: cut off at max_new_tokens
    advantages   [B], once rewards are known; [B, T - 1] with a critic
    old, ref     log-probabilities under the trainer with the weights of the rollout, and under the reference, or None
                 if they are not computed yet
    values       the critic's values with the weights of the rollout
    returns      the critic's targets
    """

    rows: tuple[int, ...]
    sampled: Tensor
    truncated: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


def engine_prompt(sample: PromptSample) -> Prompt:
    """Convert a sample to the prompt that the generation engine takes."""
    return Prompt(
        sample.input_ids, sample.number, sample.pixel_values, sample.image_grid_thw, sample.mm_token_type_ids,
        sample.images, sample.place, sample.extra,
    )  # fmt: skip


def micro_batches(
    rollout: Rollout, prompts: Sequence[int], size: int, number: int, pad_id: int
) -> list[dict[str, Any]]:
    """Split the completions of these prompts into `number` micro-batches of up to `size` rows; the last may be empty.

    Each is a batch of :func:`octavo.data.batching.collate` with labels on the completions, and has its
    :class:`Experience` under the key "experience"."""
    rows = [p * rollout.group + g for p in prompts for g in range(rollout.group)]
    return [_batch(rollout, tuple(rows[n * size : (n + 1) * size]), pad_id) for n in range(number)]


def _batch(rollout: Rollout, rows: tuple[int, ...], pad_id: int) -> dict[str, Any]:
    samples = [full_sample(rollout.prompts[row // rollout.group], rollout.completions[row]) for row in rows]
    batch = data.collate(samples, pad_id)
    shape = batch["input_ids"].shape
    sampled = torch.zeros(shape[0], shape[1] - 1)
    old = None if rollout.old is None else torch.zeros_like(sampled)
    for n, row in enumerate(rows):
        logps, span = rollout.completions[row].logps, rollout.span(row)
        sampled[n, span] = torch.from_numpy(logps)
        if old is not None and rollout.old is not None:
            old[n, span] = torch.from_numpy(rollout.old[row])
    truncated = torch.zeros(shape[0], dtype=torch.bool)
    truncated[: len(rows)] = torch.from_numpy(rollout.truncated[list(rows)])
    batch["experience"] = Experience(rows, sampled, truncated, torch.zeros(shape[0]), old)
    return batch


def full_sample(prompt: PromptSample, completion: Completion) -> Sample:
    """Join a prompt and its completion into a sample with labels only on the completion."""
    count, new = len(prompt.input_ids), len(completion.tokens)
    labels = np.concatenate([np.full(count, IGNORE, dtype=np.int64), completion.tokens])
    kinds = prompt.mm_token_type_ids
    return Sample(
        np.concatenate([prompt.input_ids, completion.tokens]),
        labels,
        None if kinds is None else np.concatenate([kinds, np.zeros(new, dtype=kinds.dtype)]),
        prompt.pixel_values,
        prompt.image_grid_thw,
        images=prompt.images,
        answers=((count, count + new),),
        length=count + new,
        extra=with_answer_tokens(prompt.extra, count, new),
        file=prompt.file,
        row=prompt.row,
        id=prompt.id,
    )


def scatter_to_positions(values: Tensor, keep: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Write values [B, P] to the positions `keep` of a zero tensor [B, T - 1] in host memory."""
    ids = batch["input_ids"]
    out = torch.zeros(ids.shape[0], ids.shape[1] - 1)
    out[:, keep] = values.float().cpu()
    return out
