"""Assigns samples to packs, and packs to ranks: pure functions of lengths and costs.

Best-fit decreasing (Johnson 1973): the longest sample first, each into the fullest pack that it fits into. A list of
packs sorted by free space and searched by bisection is enough: 20,000 rows take about 0.03 s.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

LINEAR_COST = 50_000
"""Tokens of a sample whose attention costs as much as its GEMMs: parameters that multiply a token, divided by (layers x
heads x head size), for a decoder of 8 B parameters (7.57e9 / 147,456). Packs are about equally full and so differ
mainly in attention; the exact figure matters little."""


def pack(lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Return the indices of the samples in each pack, in ascending order: every sample once, no pack over `capacity`
    tokens.

    Longest first, ties by index; each goes into the fullest pack that it fits into, on a tie into the oldest. So the
    result depends on the arguments only. Raises ValueError for a length that is not from 1 to `capacity`.
    """
    if bad := [(number, length) for number, length in enumerate(lengths) if not 0 < length <= capacity]:
        number, length = bad[0]
        raise ValueError(f"sample {number} has {length} tokens; packs of {capacity} take samples of 1 to {capacity}")
    packs: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, pack), the fullest first
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        place = bisect_left(free_space, (length, -1))
        space, chosen = free_space.pop(place) if place < len(free_space) else (capacity, len(packs))
        if chosen == len(packs):
            packs.append([])
        packs[chosen].append(number)
        if space > length:
            insort(free_space, (space - length, chosen))
    return [tuple(sorted(numbers)) for numbers in packs]


def pack_cost(lengths: Sequence[int]) -> int:
    """Return the relative cost of training a pack with these lengths: sum(l^2) for attention, all else linear in
    tokens."""
    return sum(length * length for length in lengths) + LINEAR_COST * sum(lengths)


def assign_to_ranks(costs: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Return the packs of a step by rank: the most expensive first, each to the rank with the lowest cost so far, on a
    tie to the first. No rank has more packs than ceil(packs / ranks)."""
    loads = [0] * ranks
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    max_packs = -(-len(costs) // ranks)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        candidates = (rank for rank in range(ranks) if len(assigned[rank]) < max_packs)
        rank = min(candidates, key=lambda rank: (loads[rank], rank))
        assigned[rank].append(number)
        loads[rank] += costs[number]
    return [tuple(sorted(numbers)) for numbers in assigned]


def padding_share(packs: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """Return the share of padding, 0 to 1, if each pack were padded to its capacity."""
    return 1 - sum(lengths) / (len(packs) * capacity) if packs else 0.0
