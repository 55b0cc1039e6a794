"""The mixture: proportions, epochs, and an order that is equal on every machine."""

from collections import Counter

import pytest

from octavo.data import DataError, Mixture


def take_rows(mixture, count, start=0):
    return [mixture.row(n) for n in range(start, start + count)]


def test_every_epoch_has_each_row_once_in_a_new_order():
    mixture = Mixture([range(10)], seed=3)
    first, second = take_rows(mixture, 10), take_rows(mixture, 10, 10)
    assert sorted(first) == sorted(second) == [(0, row) for row in range(10)]
    assert first != second and first != sorted(first)


def test_order_is_pinned():
    # Raw PCG64 words: a change here would break the resume of all existing runs.
    assert [row for _, row in take_rows(Mixture([range(8)], seed=0), 8)] == [0, 4, 6, 3, 5, 7, 1, 2]
    assert [row for _, row in take_rows(Mixture([range(8)], seed=1), 8)] != [0, 4, 6, 3, 5, 7, 1, 2]


def test_random_access_equals_the_sequence():
    sources, weights = [range(7), range(30), range(1)], [1.0, 0.5, 3.0]
    one = take_rows(Mixture(sources, weights, 5), 200)
    again = Mixture(sources, weights, 5)
    assert [again.row(n) for n in reversed(range(200))] == one[::-1]


def test_equal_weights_give_one_pass_over_all_rows():
    mixture = Mixture([range(5), range(50)], [2.0, 2.0], 0)
    assert sorted(take_rows(mixture, 55, 55)) == [(0, n) for n in range(5)] + [(1, n) for n in range(50)]


def test_weights_multiply_with_size():
    drawn = take_rows(Mixture([range(100), range(300)], [3.0, 1.0], 0), 4000)
    shares = Counter(source for source, _ in drawn)
    assert shares[0] == shares[1] == 2000
    rows = Counter(row for source, row in drawn if source == 0)
    assert set(rows.values()) == {20}  # each row as often as the others
    mixed = Counter(source for source, _ in drawn[:200])
    assert 70 < mixed[0] < 130  # and interleaved, not one after the other


def test_tiny_weight_is_still_drawn():
    drawn = take_rows(Mixture([range(3), range(1000)], [0.0001, 1.0], 0), 2100)
    assert 1 <= sum(source == 0 for source, _ in drawn) <= 3


def test_mixture_survives_pickling():
    import pickle

    mixture = Mixture([range(5), range(9)], seed=2)
    assert take_rows(pickle.loads(pickle.dumps(mixture)), 30) == take_rows(mixture, 30)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_invalid_weights_are_rejected(weights):
    with pytest.raises(DataError, match="for 2 data set.*give each a weight over 0"):
        Mixture([range(2), range(2)], weights)


def test_empty_mixture_and_negative_rows_are_rejected():
    with pytest.raises(DataError, match="the mixture has no data set; name at least one in data.train"):
        Mixture([])
    with pytest.raises(IndexError, match="row -1; rows count from 0"):
        Mixture([range(3)]).row(-1)
