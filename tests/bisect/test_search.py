"""The search: what it finds, and in how many questions."""

from __future__ import annotations

import math
import random

import pytest

from octavo.bisect.find_culprits import Diffuse, smallest


def asked(*culprits: set[int]):
    """(fails, its questions): fails where any of these sets is on as a whole."""
    questions: list[set[int]] = []

    def fails(on):
        questions.append(set(on))
        return any(found <= set(on) for found in culprits)

    return fails, questions


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 900])
def test_one_culprit_takes_a_logarithm_of_the_candidates(count):
    for culprit in {0, 1 % count, count // 2, count - 1}:
        fails, questions = asked({culprit})
        assert smallest(fails, range(count)) == [culprit]
        halving = [on for on in questions if on != {culprit}]
        assert len(halving) <= math.ceil(math.log2(count)) and len(questions) <= len(halving) + 2


def test_several_are_found_together_and_none_of_them_can_go():
    draw = random.Random(0)
    for _ in range(200):
        count = draw.randrange(2, 60)
        culprits = [
            set(draw.sample(range(count), draw.randrange(1, min(5, count + 1)))) for _ in range(draw.randrange(1, 4))
        ]
        fails, questions = asked(*culprits)
        found = set(smallest(fails, range(count)))
        assert found in culprits and not any(other < found for other in culprits)
        assert len(questions) <= (len(found) + 1) * (math.ceil(math.log2(count)) + 1)


def test_harm_of_many_is_said_to_be_so():
    with pytest.raises(Diffuse) as caught:
        smallest(lambda on: len(set(on)) > 12, range(40))
    assert len(caught.value.beginning) == 13
