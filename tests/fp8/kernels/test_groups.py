"""Groups of experts: rows of pairs, tiles of experts, and padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.fp8.kernels.groups import TILE, Groups, Routing, group_rows


def check(chosen: torch.Tensor, experts: int) -> Routing:
    """The layout against its definition, one pair at a time."""
    routing = group_rows(chosen, experts)
    groups, pairs = routing.groups, chosen.numel()
    sizes, starts, tiles = (t.tolist() for t in (groups.sizes, groups.starts, groups.tiles))
    assert all(t.dtype is torch.int32 for t in groups[:3]) and groups.experts == experts
    assert len(starts) == experts + 1 and len(tiles) == groups.rows // TILE and groups.rows % TILE == 0
    assert sizes == [int((chosen == e).sum()) for e in range(experts)]
    assert starts[0] == 0 and all(s % TILE == 0 for s in starts) and starts[-1] <= groups.rows
    for e in range(experts):
        assert 0 <= starts[e + 1] - starts[e] - sizes[e] < TILE
    expected = [-1] * len(tiles)
    for e in range(experts):
        for tile in range(starts[e] // TILE, starts[e + 1] // TILE):
            expected[tile] = e
    assert tiles == expected
    filled = [pairs] * groups.rows
    taken = list(starts)
    rows = []
    for pair, expert in enumerate(chosen.tolist()):
        if 0 <= expert < experts:
            rows.append(taken[expert])
            filled[taken[expert]] = pair
            taken[expert] += 1
        else:
            rows.append(groups.rows)
    assert routing.row_of.tolist() == rows and routing.pair_of.tolist() == filled
    return routing


@pytest.mark.parametrize("pairs", (0, 1, 127, 128, 129, 300))
@pytest.mark.parametrize("experts", (1, 2, 7))
def test_rows_match_definition(pairs: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(pairs + experts)
    check(torch.randint(experts, (pairs,), generator=generator), experts)


def test_experts_without_rows_and_pairs_without_experts() -> None:
    check(torch.tensor([3, 3, 3, 1]), 5)
    check(torch.tensor([-1, 9, 2, 2]), 4)
    routing = check(torch.tensor([-1, 7]), 3)
    assert set(routing.groups.tiles.tolist()) == {-1}
    check(torch.full((128,), 2), 4)


def test_worst_case_fits() -> None:
    """One row too many for each expert's tile: the most that padding can cost."""
    experts = 6
    for full in (0, 1, 2):
        check(torch.arange(experts).repeat_interleave(full * TILE + 1), experts)
    check(torch.cat([torch.zeros(500, dtype=torch.long), torch.arange(experts)]), experts)


def test_size_depends_only_on_counts() -> None:
    rows = {
        group_rows(chosen, 4).groups.rows for chosen in (torch.zeros(200), torch.arange(200) % 4, torch.full((200,), 9))
    }
    assert len(rows) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-1, 5), max_size=300), st.integers(1, 5))
def test_random_choices(chosen: list[int], experts: int) -> None:
    check(torch.tensor(chosen, dtype=torch.int64), experts)


def test_two_dimensions_of_choices_and_int32() -> None:
    """The top k of each token, as a router gives them, count as pairs in order."""
    chosen = torch.tensor([[0, 1], [1, 2]])
    assert isinstance(group_rows(chosen.reshape(-1).int(), 3).groups, Groups)
    check(chosen.reshape(-1).int(), 3)
