"""Two-level orders: every row once per epoch, few shards at a time, and random access."""

from __future__ import annotations

import pickle
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.data import Mixture, order
from octavo.data.order import FullShuffle, WindowShuffle, make_order

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


class Rows(SimpleNamespace):
    """A data set with the attributes that an order reads."""

    def __len__(self) -> int:
        return sum(self.shards)


@settings(deadline=None)
@given(SIZES, st.integers(1, 12), st.integers(0, 5), st.integers(0, 3))
def test_windows_have_every_row_once_and_need_few_shards(sizes, window, seed, epoch):
    rows = WindowShuffle(sizes, window, seed, 1)
    found = [rows.row(epoch, n) for n in range(rows.size)]
    assert sorted(found) == list(range(sum(sizes)))
    owner = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    for begin in range(0, rows.size, window):
        needed = {owner[row] for row in found[begin : begin + window]}
        first = list(rows.shards(epoch, begin + min(window, rows.size - begin) // 2))
        assert needed == {*first[: len(needed)]}
        # then those of the next window, which is in the next epoch at the end of this one
        behind = [rows.row(epoch + (begin + window >= rows.size), n % rows.size)
                  for n in (range(begin + window, min(begin + 2 * window, rows.size))
                            if begin + window < rows.size else range(min(window, rows.size)))]  # fmt: skip
        assert {owner[row] for row in behind} == {*first[len(needed) :]}
    assert [rows.row(epoch, n) for n in reversed(range(rows.size))] == found[::-1]  # independent of earlier calls
    assert [pickle.loads(pickle.dumps(rows)).row(epoch, n) for n in range(rows.size)] == found


def test_window_order_changes_every_epoch_and_is_pinned():
    rows = WindowShuffle([3, 2, 4, 1], 5, 0, 0)
    epochs = [[rows.row(epoch, n) for n in range(10)] for epoch in range(3)]
    assert epochs[0] == [0, 1, 2, 9, 3, 7, 5, 8, 4, 6]
    assert len({*map(tuple, epochs)}) == 3 and len({tuple(sorted(epoch[:5])) for epoch in epochs}) > 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(SIZES, st.integers(1, 9), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=3),
    st.integers(1, 20), st.integers(0, 3),
)  # fmt: skip
def test_blocks_draw_every_row_equally_often_and_name_their_shards(sets, block, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "FULL_SHUFFLE_ROWS", 0)
        patch.setattr(order, "BLOCK", block)
        drawn = Mixture([Rows(shards=sizes, window=window) for sizes, window, _ in sets], [w for *_, w in sets], seed)
        count = 2 * sum(drawn.draws)
        found = [drawn.row(n) for n in range(count)]
        for source, (draws, size) in enumerate(zip(drawn.draws, drawn.sizes, strict=True)):
            rows = [row for s, row in found if s == source]
            assert len(rows) == 2 * draws
            assert all(sorted(rows[at : at + size]) == list(range(size)) for at in range(0, len(rows) - size + 1, size))
        assert [drawn.row(n) for n in reversed(range(count))] == found[::-1]
        for n in range(0, count, 3):
            source, row = found[n]
            owner = [shard for shard, size in enumerate(sets[source][0]) for _ in range(size)]
            assert (source, owner[row]) in {*drawn.shards(n, [source])}


def test_blocks_have_each_data_set_in_proportion(monkeypatch):
    """As in one shuffled round, except that a block may have one row more or less."""
    monkeypatch.setattr(order, "FULL_SHUFFLE_ROWS", 0)
    monkeypatch.setattr(order, "BLOCK", 100)
    drawn = Mixture([range(900), range(90), range(10)])
    for n in range(0, 2000, 100):
        counts = [sum(drawn.row(m)[0] == source for m in range(n, n + 100)) for source in range(3)]
        assert all(abs(count - share) <= 2 for count, share in zip(counts, (90, 9, 1), strict=True)), counts


def test_default_windows_depend_on_size(monkeypatch):
    """Small data sets are shuffled as a whole, others in windows of shards, or of pieces if there are no shards."""
    assert isinstance(make_order(range(50), 0, 0), FullShuffle)
    assert isinstance(make_order(Rows(shards=[5, 5], window=None), 0, 0), FullShuffle)
    assert isinstance(
        make_order(Rows(shards=[5, 5], window=10), 0, 0), FullShuffle
    )  # no window order: all files are needed
    assert make_order(Rows(shards=[5, 5], window=4), 0, 0).sizes.tolist() == [5, 5]
    monkeypatch.setattr(order, "FULL_SHUFFLE_ROWS", 40)
    monkeypatch.setattr(order, "WINDOW", 16)
    monkeypatch.setattr(order, "PIECE", 20)
    found = make_order(range(50), 0, 0)
    assert (found.sizes.tolist(), found.window) == ([20, 20, 10], 16)


def test_billion_rows_are_ordered_in_little_memory():
    """For several data sets, any epoch and any position; measures the memory."""
    tracemalloc.start()
    drawn = Mixture([range(10**9), range(10**8), range(77)], seed=5)
    found = {drawn.row(n) for n in range(3 * 10**9, 3 * 10**9 + 50)}
    assert len(found) == 50 and drawn.row(3 * 10**9 + 7) == drawn.row(3 * 10**9 + 7)
    assert tracemalloc.get_traced_memory()[1] < 150 << 20
    tracemalloc.stop()
