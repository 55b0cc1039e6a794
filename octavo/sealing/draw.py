"""Permutations drawn from a key that leave every scale of FP8 what it was.

A permutation is an array p: place i of the sealed axis holds what stood at p[i]. Scales stand for blocks of 128 places
of an axis (128 x 128, 1 x 128) or of 32 (MXFP8). They only move along if a block's members stay together, so that

    blocks of 128 change places, within each the groups of 32, within these single places; a ragged last block stays

An *item* may take several places (a head takes head_dim) and stand at several points of an axis (channels behind a
2 x 2 merge) or in several axes. Each such use is a pair (unit, offset): item i takes the places offset + i unit ...
offset + (i + 1) unit - 1. Two runs of items may be exchanged if in every use each either fills whole blocks, or both
lie in one and the same block. Whatever cannot be exchanged so stays.
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
    """Fisher and Yates's: every order equally likely. A word that would favour small numbers is thrown away."""
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


def free(key: Key, label: str, size: int) -> np.ndarray:
    """Any order of `size` items: of axes that no scale stands for."""
    return np.asarray(shuffle(range(size), key.words(label)), dtype=np.int64)


def within(key: Key, label: str, size: int, uses: Iterable[Use], blocks: Sequence[int] = BLOCKS) -> np.ndarray:
    """An order of `size` items under which the blocks of all uses stay together."""
    distinct, words = sorted(set(uses)), key.words(label)
    runs = {block // gcd(block, unit) for block in blocks for unit, _ in distinct} | {1}
    order = np.arange(size, dtype=np.int64)
    for run in sorted(runs, reverse=True):
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for number in range(size // run):
            alike[_kind(number, run, distinct, blocks)].append(number)
        moved = np.arange(size, dtype=np.int64)
        for numbers in alike.values():
            for place, number in zip(numbers, shuffle(numbers, words), strict=True):
                moved[place * run : (place + 1) * run] = np.arange(number * run, (number + 1) * run)
        order = order[moved]
    return order


def _kind(number: int, run: int, uses: Sequence[Use], blocks: Sequence[int]) -> tuple[object, ...]:
    """Equal for two runs of items that may be exchanged."""
    kind: list[object] = []
    for unit, offset in uses:
        length, start = run * unit, offset + number * run * unit
        for block in blocks:
            first, last = start // block, (start + length - 1) // block
            whole = length % block == 0 and start % block == 0
            kind.append("whole" if whole else first if first == last else ("alone", number))
    return tuple(kind)


def heads(
    key: Key, label: str, groups: int, each: int, of_groups: Iterable[Use], of_heads: Iterable[Use]
) -> tuple[np.ndarray, np.ndarray]:
    """(order of the groups, order of all heads): groups change places, and heads within their group.

    groups     heads of keys and values, each shared by the `each` query heads of its group
    of_groups  uses of the groups, (head_dim, offset)
    of_heads   uses of the heads, (head_dim, offset)
    """
    uses = list(of_heads)
    outer = within(key, f"{label} groups", groups, [*of_groups, *((each * unit, at) for unit, at in uses)])
    inner = [
        group * each
        + within(key, f"{label} heads {group}", each, [(unit, at + group * each * unit) for unit, at in uses])
        for group in range(groups)
    ]
    return outer, np.concatenate([inner[group] for group in outer])


def inverse(order: np.ndarray) -> np.ndarray:
    """What undoes a permutation."""
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return back
