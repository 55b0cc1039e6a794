"""Which samples share a pack, and which rank trains it: plain functions of numbers.

Best-fit decreasing (Johnson 1973): the longest sample first, each into the pack that it fills up most. A list of packs
sorted by the room that is left, searched by bisection, needs no other structure: 20,000 rows take some 0.03 s.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

LINEAR = 50_000
"""Tokens of a sample whose attention costs as much as its GEMMs: parameters that multiply a token over (layers x heads
x head size), about that of a decoder of 8 B parameters (7.57e9 / 147,456). Packs are about equally full, so that what
they differ in is attention, and the figure matters little."""


def pack(lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """The numbers of samples by pack, each pack's in rising order: every sample once, no pack over `capacity` tokens.

    Longest first, equal ones by number; each into the pack with the least room that takes it, of equal ones the first
    that was begun. So the plan is a function of its arguments. Raises ValueError for a length that is not from 1 to
    `capacity`.
    """
    if bad := [(number, length) for number, length in enumerate(lengths) if not 0 < length <= capacity]:
        number, length = bad[0]
        raise ValueError(f"sample {number} has {length} tokens; packs of {capacity} take samples of 1 to {capacity}")
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens that are free, pack), the fullest first
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        place = bisect_left(rooms, (length, -1))
        room, chosen = rooms.pop(place) if place < len(rooms) else (capacity, len(packs))
        if chosen == len(packs):
            packs.append([])
        packs[chosen].append(number)
        if room > length:
            insort(rooms, (room - length, chosen))
    return [tuple(sorted(numbers)) for numbers in packs]


def cost(lengths: Sequence[int]) -> int:
    """What a pack of samples of these lengths costs to train: attention sum(l^2), all else in proportion to tokens."""
    return sum(length * length for length in lengths) + LINEAR * sum(lengths)


def deal(costs: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """The packs of a step by rank, the dearest first to the rank that has the least to do; of equal ones the first. No
    rank has more than the largest of equal shares."""
    loads, dealt = [0] * ranks, [[] for _ in range(ranks)]  # type: list[int], list[list[int]]
    most = -(-len(costs) // ranks)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        free = (rank for rank in range(ranks) if len(dealt[rank]) < most)
        rank = min(free, key=lambda rank: (loads[rank], rank))
        dealt[rank].append(number)
        loads[rank] += costs[number]
    return [tuple(sorted(numbers)) for numbers in dealt]


def waste(packs: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> float:
    """The share of places in packs that hold no token, 0 to 1, were each padded to its capacity."""
    return 1 - sum(lengths) / (len(packs) * capacity) if packs else 0.0
