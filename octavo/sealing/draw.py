"""Permutations drawn from a key that preserve every FP8 scale.

A permutation is an array p: position i of the sealed axis holds the entry from p[i]. An FP8 scale covers a block of 128
positions of an axis (128 x 128, 1 x 128) or of 32 (MXFP8). It can only move with its block if the block's entries stay
together. Therefore

    blocks of 128 are permuted, within each the groups of 32, within these single positions; a partial last block stays

An *item* may have several positions (a head has head_dim) and occur several times in an axis (channels after a 2 x 2
merge) or in several axes. Each such use is a pair (unit, offset): item i has the positions offset + i unit ...
offset + (i + 1) unit - 1. Two runs of items may be exchanged if in every use each of them fills whole blocks, or both
are in the same block. All others stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import gcd

import numpy as np

from octavo.sealing.key import Key

BLOCKS = (128, 32)
Use = tuple[int, int]  # (unit, offset)


def shuffle(items: Sequence[int], words: Iterator[int]) -> list[int]:
    """Shuffle items (Fisher-Yates): all orders are equally likely. Words that would favor small numbers are
    discarded."""
    out = list(items)
    for last in range(len(out) - 1, 0, -1):
        size = last + 1
        limit = (1 << 32) // size * size
        word = next(words)
        while word >= limit:
            word = next(words)
        other = word % size
        out[last], out[other] = out[other], out[last]
    return out


def draw_order(key: Key, label: str, size: int) -> np.ndarray:
    """Return an arbitrary order of `size` items, for axes without FP8 scales."""
    return np.asarray(shuffle(range(size), key.words(label)), dtype=np.int64)


def draw_block_order(
    key: Key, label: str, size: int, uses: Iterable[Use], blocks: Sequence[int] = BLOCKS
) -> np.ndarray:
    """Return an order of `size` items that keeps the blocks of all uses together."""
    distinct, words = sorted(set(uses)), key.words(label)
    runs = {block // gcd(block, unit) for block in blocks for unit, _ in distinct} | {1}
    order = np.arange(size, dtype=np.int64)
    for run in sorted(runs, reverse=True):
        exchangeable: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number in range(size // run):
            exchangeable[_exchange_key(number, run, distinct, blocks)].append(number)
        moved = np.arange(size, dtype=np.int64)
        for numbers in exchangeable.values():
            for place, number in zip(numbers, shuffle(numbers, words), strict=True):
                moved[place * run : (place + 1) * run] = np.arange(number * run, (number + 1) * run)
        order = order[moved]
    return order


def _exchange_key(number: int, run: int, uses: Sequence[Use], blocks: Sequence[int]) -> tuple[object, ...]:
    """Return a key that is equal for two runs of items if they may be exchanged."""
    kind: list[object] = []
    for unit, offset in uses:
        length, start = run * unit, offset + number * run * unit
        for block in blocks:
            first, last = start // block, (start + length - 1) // block
            whole = length % block == 0 and start % block == 0
            kind.append("whole" if whole else first if first == last else ("alone", number))
    return tuple(kind)


def draw_head_orders(
    key: Key, label: str, groups: int, each: int, of_groups: Iterable[Use], of_heads: Iterable[Use]
) -> tuple[np.ndarray, np.ndarray]:
    """Return (order of the groups, order of all heads): permutes groups, and heads within their group.

    groups     heads of keys and values, each shared by the `each` query heads of its group
    of_groups  uses of the groups, (head_dim, offset)
    of_heads   uses of the heads, (head_dim, offset)
    """
    uses = list(of_heads)
    outer = draw_block_order(key, f"{label} groups", groups, [*of_groups, *((each * unit, at) for unit, at in uses)])
    inner = [
        group * each
        + draw_block_order(key, f"{label} heads {group}", each, [(unit, at + group * each * unit) for unit, at in uses])
        for group in range(groups)
    ]
    return outer, np.concatenate([inner[group] for group in outer])


def invert(order: np.ndarray) -> np.ndarray:
    """Return the inverse of a permutation."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back
