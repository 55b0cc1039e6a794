"""Rollouts and micro-batches keep the prompt, text, rewards and log-probabilities of each completion."""

from __future__ import annotations

import numpy as np

from octavo import data
from octavo.generation import Completion
from octavo.rl.rollout.experience import Rollout, micro_batches


def rollout(*numbers: int) -> Rollout:
    """Return two completions per prompt, of 1 and 2 tokens. Prompt 3 has 4 tokens, and its completions begin with 30
    and 31, which are also their rewards."""
    prompts = [data.PromptSample(np.full(n + 1, n), np.full(n + 1, data.IGNORE), number=n) for n in numbers]
    completions = [
        Completion(place, g, np.array([10 * n + g, 9][: g + 1]), np.float32([-n - g, -0.5][: g + 1]), np.zeros(g + 1),
                   "length" if g else "stop")
        for place, n in enumerate(numbers) for g in range(2)
    ]  # fmt: skip
    rewards = np.array([float(c.tokens[0]) for c in completions])
    return Rollout(prompts, completions, [str(c.tokens[0]) for c in completions], rewards, {"length": rewards + 0.5})


def test_selected_and_concatenated_groups_keep_their_data() -> None:
    merged = rollout(1, 2, 3).of([2, 0]).concatenate(rollout(4, 5).of([1]))
    assert [prompt.number for prompt in merged.prompts] == [3, 1, 5] and merged.group == 2
    first = [10 * merged.prompts[c.prompt].number + c.sample for c in merged.completions]
    assert first == [30, 31, 10, 11, 50, 51] == [c.tokens[0] for c in merged.completions]
    assert [int(text) for text in merged.texts] == first == merged.rewards.tolist()
    assert merged.scores["length"].tolist() == [x + 0.5 for x in first]
    assert merged.lengths.tolist() == [1, 2] * 3 and merged.truncated.tolist() == [False, True] * 3


def test_micro_batches_align_logprobs_with_predicted_tokens() -> None:
    full_rollout = rollout(1, 2, 3)
    batches = micro_batches(full_rollout, [0, 2], size=3, number=3, pad_id=0)
    assert [batch["experience"].rows for batch in batches] == [(0, 1, 4), (5,), ()]
    for batch in batches:
        experience, target = batch["experience"], batch["labels"][:, 1:]
        for row, place in enumerate(experience.rows):
            at = target[row] != data.IGNORE
            assert target[row][at].tolist() == full_rollout.completions[place].tokens.tolist()
            assert experience.sampled[row][at].tolist() == full_rollout.completions[place].logps.tolist()
            assert not experience.sampled[row][~at].any() and bool(experience.truncated[row]) == (place % 2 == 1)
    assert not batches[2]["experience"].sampled.any() and (batches[2]["labels"] == data.IGNORE).all()
