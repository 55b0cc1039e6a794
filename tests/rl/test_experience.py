"""What is known of a completion stays with it: its prompt, text and rewards, and each token's log-probability."""

from __future__ import annotations

import numpy as np

from octavo import data
from octavo.generation import Completion
from octavo.rl.rollout.experience import Rollout, micro_batches


def rollout(*numbers: int) -> Rollout:
    """Two completions of each prompt, of 1 and 2 tokens: prompt 3 has 4 tokens, and its completions begin with 30 and
    31, which are their rewards too."""
    prompts = [data.PromptSample(np.full(n + 1, n), np.full(n + 1, data.IGNORE), number=n) for n in numbers]
    completions = [
        Completion(place, g, np.array([10 * n + g, 9][: g + 1]), np.float32([-n - g, -0.5][: g + 1]), np.zeros(g + 1),
                   "length" if g else "stop")
        for place, n in enumerate(numbers) for g in range(2)
    ]  # fmt: skip
    worth = np.array([float(c.tokens[0]) for c in completions])
    return Rollout(prompts, completions, [str(c.tokens[0]) for c in completions], worth, {"own": worth + 0.5})


def test_groups_that_are_kept_and_put_together_keep_what_is_theirs() -> None:
    found = rollout(1, 2, 3).of([2, 0]).concatenate(rollout(4, 5).of([1]))
    assert [prompt.number for prompt in found.prompts] == [3, 1, 5] and found.group == 2
    first = [10 * found.prompts[c.prompt].number + c.sample for c in found.completions]
    assert first == [30, 31, 10, 11, 50, 51] == [c.tokens[0] for c in found.completions]
    assert [int(text) for text in found.texts] == first == found.rewards.tolist()
    assert found.scores["own"].tolist() == [x + 0.5 for x in first]
    assert found.lengths.tolist() == [1, 2] * 3 and found.truncated.tolist() == [False, True] * 3


def test_micro_batches_have_each_tokens_log_probability_where_it_is_predicted() -> None:
    given = rollout(1, 2, 3)
    batches = micro_batches(given, [0, 2], size=3, number=3, pad_id=0)
    assert [batch["experience"].rows for batch in batches] == [(0, 1, 4), (5,), ()]
    for batch in batches:
        known, target = batch["experience"], batch["labels"][:, 1:]
        for row, place in enumerate(known.rows):
            at = target[row] != data.IGNORE
            assert target[row][at].tolist() == given.completions[place].tokens.tolist()
            assert known.sampled[row][at].tolist() == given.completions[place].logps.tolist()
            assert not known.sampled[row][~at].any() and bool(known.truncated[row]) == (place % 2 == 1)
    assert not batches[2]["experience"].sampled.any() and (batches[2]["labels"] == data.IGNORE).all()
