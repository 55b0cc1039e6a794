"""Measures the padding of packed rows by the window of rows that are packed together, with synthetic lengths.

    python benchmarks/packing.py [--rows 40000] [--out FILE.json]

    text     answers of instruction data: log-normal, median 400 tokens, sigma 1
    images   one to three images of 64 to 1,280 tokens each, and a log-normal text of median 100
    mixed    half of each, shuffled

For each set, capacity (`train.seq_length`, without longer rows) and window (`data.window`): `waste` is the share of
positions without a token if every pack were filled to its capacity; `padding` is the share of padding in training rows,
which are padded to a multiple of 128; and the number of packs and the seconds per 1,000 rows on one core. `padded` is
the share of padding without packing, in micro-batches of 8 rows padded to the longest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from octavo.bench import record
from octavo.data.batching.collate import PACK_MULTIPLE
from octavo.data.batching.packing import pack, padding_share

SETS = ("text", "images", "mixed")
CAPACITIES, WINDOWS = (8192, 32768), (64, 200, 1000, 10000)
BATCH = 8


def lengths(of: str, rows: int, seed: int = 0) -> list[int]:
    """Tokens of each row of a set."""
    draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, SETS.index(of)])))
    if of == "mixed":
        both = [*lengths("text", -(-rows // 2), seed), *lengths("images", rows // 2, seed)]
        return [both[n] for n in draw.permutation(len(both))]
    text = draw.lognormal(np.log(400 if of == "text" else 100), 1.0, rows)
    images = draw.integers(64, 1281, (rows, 3)) * (np.arange(3) < draw.integers(1, 4, (rows, 1)))
    return [max(2, int(n)) for n in text + (images.sum(1) if of == "images" else 0)]


def planned(rows: Sequence[int], capacity: int, window: int) -> list[list[int]]:
    """The lengths of each pack."""
    windows = [rows[first : first + window] for first in range(0, len(rows) // window * window, window)]
    return [[of[n] for n in one] for of in windows for one in pack(of, capacity)]


def share(rows: Sequence[int], capacity: int, window: int) -> float:
    """The share of places without a token, of packs filled up to their capacity."""
    packs = planned([length for length in rows if length <= capacity], capacity, window)
    return padding_share(packs, list(chain(*packs)), capacity)


def figures(rows: Sequence[int], capacity: int, window: int) -> dict[str, float]:
    """What a set loses in packs of a window."""
    fitting = [length for length in rows if length <= capacity]
    began = time.process_time()
    packs = planned(fitting, capacity, window)
    seconds = time.process_time() - began
    tokens = sum(map(sum, packs))
    places = sum(min(-(-sum(one) // PACK_MULTIPLE) * PACK_MULTIPLE, capacity) for one in packs)
    return {
        "waste": padding_share(packs, list(chain(*packs)), capacity),
        "padding": 1 - tokens / places,
        "packs": len(packs),
        "seconds_1000_rows": 1000 * seconds / len(fitting),
    }  # fmt: skip


def padded(rows: Sequence[int], capacity: int) -> float:
    """The share of padding where rows are padded to the longest of their micro-batch."""
    fitting = [length for length in rows if length <= capacity]
    batches = [fitting[first : first + BATCH] for first in range(0, len(fitting), BATCH)]
    return 1 - sum(fitting) / sum(max(batch) * len(batch) for batch in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/packing.json"))
    args = parser.parse_args()
    sets: dict[str, dict] = {}
    for of in SETS:
        rows = lengths(of, args.rows)
        for capacity in CAPACITIES:
            by_window = {str(window): figures(rows, capacity, window) for window in WINDOWS}
            sets[f"{of} {capacity}"] = {"padded": padded(rows, capacity), "windows": by_window}
            by_window_text = ", ".join(f"{window}: {one['padding_share']:.2%}" for window, one in by_window.items())
            print(
                f"{of:7} {capacity:6}  waste by window {by_window_text}; padded "
                f"{sets[f'{of} {capacity}']['padded']:.1%}"
            )
    about = {"command": f"python benchmarks/packing.py --rows {args.rows}", "machine": record.describe_machine()}
    record.save({**about, "rows": args.rows, "sets": sets}, args.out)


if __name__ == "__main__":
    main()
