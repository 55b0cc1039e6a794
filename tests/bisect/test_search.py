"""The search algorithm: its results, and the number of runs."""

from __future__ import annotations

import math
import random

import pytest

from octavo.bisect.find_culprits import TooManyCulprits, minimal_failing_set


def make_fails(*culprits: set[int]):
    """Return (fails, list of its queries); it fails where all of any of these sets is on."""
    queries: list[set[int]] = []

    def fails(on):
        queries.append(set(on))
        return any(culprit_set <= set(on) for culprit_set in culprits)

    return fails, queries


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 900])
def test_single_culprit_takes_logarithmic_queries(count):
    for culprit in {0, 1 % count, count // 2, count - 1}:
        fails, queries = make_fails({culprit})
        assert minimal_failing_set(fails, range(count)) == [culprit]
        halving = [on for on in queries if on != {culprit}]
        assert len(halving) <= math.ceil(math.log2(count)) and len(queries) <= len(halving) + 2


def test_result_is_a_minimal_failing_set():
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randrange(2, 60)
        culprits = [
            set(draw.sample(range(count), draw.randrange(1, min(5, count + 1)))) for _ in range(draw.randrange(1, 4))
        ]
        fails, queries = make_fails(*culprits)
        result = set(minimal_failing_set(fails, range(count)))
        assert result in culprits and not any(other < result for other in culprits)
        assert len(queries) <= (len(result) + 1) * (math.ceil(math.log2(count)) + 1)


def test_too_many_culprits_are_reported():
    with pytest.raises(TooManyCulprits) as caught:
        minimal_failing_set(lambda on: len(set(on)) > 12, range(40))
    assert len(caught.value.failing_prefix) == 13
