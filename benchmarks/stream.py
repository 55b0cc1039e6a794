"""Measures the cost of a very large data set: time and memory until the first row, and while training reads rows.

    python benchmarks/stream.py [--rows 1000000] [--shards 100] [--steps 500] [--out FILE.json]

Conversations of about 200 bytes are written to a folder of shards as JSONL, parquet and tar, and read in each supported
way. A separate process opens each with `octavo.data.read`, first with an empty cache, then again, and takes steps of 8
rows from a Loader in training order. Measured from before the import of pyarrow: seconds until the first step, seconds
per step after it, and the largest growth in MiB of anonymous memory, which no other process shares. `shuffle_buffer`
is that many rows; without it, all rows are shuffled together.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from octavo.bench import record

BUFFER = 16384

OPEN = """
import json, sys, time
from types import SimpleNamespace
import numpy, torch, octavo.config  # which a run has in any case

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Anonymous:"))

class Plain:
    pad_id = 0
    encode_all = staticmethod(lambda rows: [SimpleNamespace(nbytes=0, notes=[]) for _ in rows])

dataset, steps = json.loads(sys.argv[1]), int(sys.argv[2])
before, began = anonymous(), time.perf_counter()
from octavo.data import Loader, Mixture, read
source = read(octavo.config.Dataset(**dataset))
loader = Loader(Mixture([source]), Plain, 8, 8, cache_bytes=0, gather=lambda rows, size, pad: rows)
next(loader)
first = time.perf_counter() - began
most = anonymous()
began = time.perf_counter()
for number in range(steps):
    next(loader)
    if number % 20 == 0:
        most = max(most, anonymous())
each = (time.perf_counter() - began) / steps
loader.close()
print(json.dumps({"rows": len(source), "first_s": first, "step_ms": 1e3 * each, "mib": most - before}))
"""


def rows_of(first: int, last: int) -> list[dict[str, Any]]:
    said = "words that give a row the length of a short question and answer, and no more than that"
    return [
        {"id": str(n), "messages": [{"role": "user", "content": f"{n}: {said}"}, {"role": "assistant", "content": "7"}]}
        for n in range(first, last)
    ]


def write(folder: Path, rows: int, shards: int) -> None:
    """The same rows as shards of every kind."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    for kind in ("jsonl", "parquet", "tar"):
        (folder / kind).mkdir()
    for number in range(shards):
        some = rows_of(number * rows // shards, (number + 1) * rows // shards)
        name = f"part-{number:05}"
        texts = [json.dumps(row) for row in some]
        (folder / "jsonl" / f"{name}.jsonl").write_text("\n".join(texts))
        parquet.write_table(pa.Table.from_pylist(some), folder / "parquet" / f"{name}.parquet", row_group_size=1000)
        with tarfile.open(folder / "tar" / f"{name}.tar", "w") as archive:
            for row, text in zip(some, texts, strict=True):
                entry = tarfile.TarInfo(f"{row['id']}.json")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))


def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> a data set of the configuration."""
    window = {"shuffle_buffer": BUFFER}
    return {
        "JSONL, converted": {"path": str(folder / "jsonl")},
        "JSONL, converted, shuffle_buffer": {"path": str(folder / "jsonl"), **window},
        "JSONL, stream, shuffle_buffer": {"path": str(folder / "jsonl"), "stream": True, **window},
        "parquet, converted": {"path": str(folder / "parquet")},
        "parquet, stream, shuffle_buffer": {"path": str(folder / "parquet"), "stream": True, **window},
        "tar": {"path": str(folder / "tar")},
        "tar, shuffle_buffer": {"path": str(folder / "tar"), **window},
        "JSONL, fetched": {"path": f"file://{folder}/jsonl", "fetch_gb": 1.0},
        "tar, fetched": {"path": f"file://{folder}/tar", "fetch_gb": 1.0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    timed = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.rows, args.shards)
        print(f"{'':34} {'first: s':>9} {'again: s':>9} {'ms a step':>10} {'MiB':>6}")
        for name, dataset in ways(Path(folder)).items():
            environ = {**os.environ, "OCTAVO_CACHE": f"{folder}/cache of {name}", "OMP_NUM_THREADS": "1"}

            def opened() -> dict[str, float]:
                words = [sys.executable, "-c", OPEN, json.dumps(dataset), str(args.steps)]  # noqa: B023
                done = subprocess.run(words, env=environ, check=True, stdout=subprocess.PIPE, text=True)  # noqa: B023
                return json.loads(done.stdout.splitlines()[-1])

            first, again = opened(), opened()
            most = max(first["mib"], again["mib"])
            print(f"{name:34} {first['first_s']:9.2f} {again['first_s']:9.2f} {again['step_ms']:10.2f} {most:6.0f}",
                  flush=True)  # fmt: skip
            timed.append({"way": name, "first": first, "again": again})
    if args.out:
        command = f"python benchmarks/stream.py --rows {args.rows} --shards {args.shards} --steps {args.steps}"
        record.save({"command": command, "machine": record.describe_machine(), "ways": timed}, args.out)


if __name__ == "__main__":
    main()
