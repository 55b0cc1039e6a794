"""Measures the time and memory to open a data file, in the first process that opens it and in later ones.

    python benchmarks/data_files.py [--mb 100] [--rounds 3] [--out FILE.json]

Conversations are written as a JSON list, as JSONL, as parquet and as saved by `datasets`. A separate process opens each
file with `octavo.data.read` and reads 1,000 rows in random order, as an epoch does: first with an empty cache, then
again. Measured from before the import of pyarrow: seconds until the file is open, and the growth in MiB of anonymous
memory, which no other process shares. The last row is `json.load` of the list, as in a plain training script.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.bench import record

OPEN = """
import json, sys, time
from types import SimpleNamespace
import numpy, torch, octavo.config  # which a run has in any case

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Anonymous:"))

kind, path = sys.argv[1:]
before, began = anonymous(), time.perf_counter()
if kind == "json.load":
    rows = json.load(open(path))
    read = rows.__getitem__
else:
    from octavo.data import read as opened
    rows = opened(octavo.config.Dataset(path=path))
    read = rows.__getitem__
seconds = time.perf_counter() - began
for number in range(1000):
    read(number * len(rows) // 1000)
print(json.dumps({"seconds": seconds, "mib": anonymous() - before}))
"""


def written(folder: Path, megabytes: float) -> dict[str, Path]:
    """The same rows in every kind of file."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as parquet

    draw = random.Random(0)
    words = [f"{draw.getrandbits(40):x}" for _ in range(5000)]
    rows: list[dict[str, Any]] = []
    size = 0
    while size < megabytes * 1e6:
        said = [" ".join(draw.choices(words, k=draw.randint(5, 40))) for _ in range(2)]
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        rows.append({"id": f"row {len(rows)}", "messages": turns})
        size += len(json.dumps(rows[-1]))
    files = {kind: folder / f"rows.{kind}" for kind in ("json", "jsonl", "parquet", "saved")}
    files["json"].write_text(json.dumps(rows))
    files["jsonl"].write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pa.Table.from_pylist(rows), files["parquet"])
    datasets.Dataset.from_list(rows).save_to_disk(files["saved"])
    return files | {"json.load": files["json"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3, help="later openings, of which the median counts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OCTAVO_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}

        def opened(kind: str, path: Path) -> dict[str, float]:
            done = subprocess.run(
                [sys.executable, "-c", OPEN, kind, path], env=environ, check=True, stdout=subprocess.PIPE, text=True
            )
            return json.loads(done.stdout.splitlines()[-1])

        print(f"{'':10} {'first: s':>9} {'MiB':>6} {'later: s':>9} {'MiB':>6}")
        for kind, path in written(Path(folder), args.mb).items():
            first, *later = (opened(kind, path) for _ in range(1 + args.rounds))
            row = {
                "kind": kind,
                "first": first,
                "later": {key: statistics.median(x[key] for x in later) for key in first},
            }
            print(f"{kind:10} {first['seconds']:9.2f} {first['mib']:6.0f} "
                  f"{row['later']['seconds']:9.2f} {row['later']['mib']:6.0f}", flush=True)  # fmt: skip
            rows.append(row)
    if args.out:
        about = {"command": f"python benchmarks/data_files.py --mb {args.mb:g}", "machine": record.describe_machine()}
        record.save({**about, "megabytes": args.mb, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
