"""Measures the cost of encryption at rest: bytes per second of a file, and seconds to save and load a run state.

    python benchmarks/encryption.py [--megabytes 256] [--repeats 5] [--scratch FOLDER] [--out FILE]

Times in turn: writing random bytes to a plain file that is synced to disk, and to files encrypted in chunks of 64 KiB,
256 KiB (the default of Octavo), 1 MiB and 4 MiB; reading each from the page cache; reading 4 KiB at random offsets of
each, which is the cost of a row; and `checkpoint.save` and `load` of a state of the same size, plain and encrypted.
Contents are compared before timing. The fastest of several turns counts, because other processes may use the machine;
CPU seconds are also printed. The default size writes results/encryption_cpu.json.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import turns
from torch import nn

from octavo import checkpoint
from octavo.base import encryption, safe_read
from octavo.base.encryption.writer import open_encrypted
from octavo.bench import record

RESULT = Path(__file__).resolve().parent / "results" / "encryption_cpu.json"
SIZE = {"megabytes": 256, "repeats": 5}
CHUNKS = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
READS = 200  # of 4 KiB, at random places


class One:
    """A world of one."""

    rank, size = 0, 1

    def gather_objects(self, value: object) -> list[object]:
        return [value]


def timed(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Each work by turns: seconds and CPU seconds, the least of each."""
    taken = turns.take(works, repeats)
    return {n: {"seconds": min(t.seconds), "cpu_seconds": min(t.cpu_seconds)} for n, t in taken.items()}


def write_plain(path: Path, data: bytes) -> None:
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def write_encrypted(path: Path, data: bytes, chunk: int) -> None:
    with open_encrypted(path, chunk) as out:
        out.write(data)


def read(path: Path) -> int:
    size, buffer = 0, bytearray(1 << 22)
    with safe_read.open_file(path, buffering=0) as file:
        while got := file.readinto(buffer):  # type: ignore[attr-defined]
            size += got
    return size


def some(path: Path, size: int) -> None:
    places = random.Random(0)
    with safe_read.open_file(path, buffering=0) as file:
        for _ in range(READS):
            file.seek(places.randrange(size - 4096))
            assert len(file.read(4096)) == 4096


def of_files(scratch: Path, size: int, repeats: int) -> dict[str, dict[str, float]]:
    data = random.Random(1).randbytes(size)
    paths = {"plain": scratch / "plain", **{f"{chunk >> 10} KiB": scratch / str(chunk) for chunk in CHUNKS}}
    write_plain(paths["plain"], data)
    for chunk in CHUNKS:
        write_encrypted(paths[f"{chunk >> 10} KiB"], data, chunk)
    for path in paths.values():
        assert safe_read.read_bytes(path, limit=2 * size) == data
    works: dict[str, Callable[[], object]] = {"write, plain": lambda: write_plain(paths["plain"], data)}
    for chunk in CHUNKS:
        name = f"{chunk >> 10} KiB"
        works[f"write, {name}"] = lambda name=name, chunk=chunk: write_encrypted(paths[name], data, chunk)
    works |= {f"read, {name}": lambda path=path: read(path) for name, path in paths.items()}
    works |= {f"rows, {name}": lambda path=path: some(path, size) for name, path in paths.items()}
    return timed(works, repeats)


def of_states(scratch: Path, size: int, repeats: int) -> dict[str, dict[str, float]]:
    width = int((size / 4 / 3) ** 0.5)  # weights and two moments, fp32
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()

    def save(encrypt: bool) -> None:
        shutil.rmtree(scratch / str(encrypt), ignore_errors=True)
        checkpoint.save(
            scratch / str(encrypt), 1, model=model, optimizer=optimizer, extra={}, counters={}, world=One(), keep=1,
            encrypt=encrypt,
        )  # fmt: skip

    def load(encrypt: bool) -> None:
        checkpoint.load(scratch / str(encrypt) / "step_1", model=model, optimizer=optimizer, world=One())

    works: dict[str, Callable[[], object]] = {}
    for encrypt, name in ((False, "plain"), (True, "encrypted")):
        works[f"save, {name}"] = lambda encrypt=encrypt: save(encrypt)
        works[f"load, {name}"] = lambda encrypt=encrypt: load(encrypt)
    return timed(works, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop(encryption.FILE, None)
    os.environ[encryption.VALUE] = os.urandom(32).hex()
    size, sizes = args.megabytes * 10**6, {name: getattr(args, name) for name in SIZE}
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        rows = of_files(Path(folder), size, args.repeats) | of_states(Path(folder), size, args.repeats)
    for name, row in rows.items():
        if name.startswith("rows"):
            row["microseconds_a_row"] = row["seconds"] / READS * 1e6
        else:
            row["gigabytes_a_second"] = size / row["seconds"] / 1e9
        print(f"{name:16}" + "".join(f"  {key} {value:.3g}" for key, value in row.items()))
    if out := args.out or (RESULT if sizes == SIZE else None):
        command = "python benchmarks/encryption.py" + "".join(
            f" --{name} {value}" for name, value in sizes.items() if sizes != SIZE
        )
        result = {
            "command": command,
            "settings": {**sizes, "threads": 1},
            "rows": rows,
            "machine": record.describe_machine(),
        }
        print(f"wrote {record.save(result, out)}")
    else:
        print("wrote no file: this is not the default size; --out FILE keeps the figures")


if __name__ == "__main__":
    main()
