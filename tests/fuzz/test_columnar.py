"""Damaged Arrow, Feather and parquet files give rows or an error that names the file, and never end the process.

    python -m tests.fuzz.test_columnar --cases 10000 --seed 1

Arrow trusts the offsets of a file, so a flipped bit may cause a signal. Cases run in child processes, and one that ends
by a signal is a finding like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest

from octavo.data.errors import BadSample, DataError
from octavo.data.formats import columnar
from octavo.data.formats.arrow_rows import ColumnRows, Text, TextRows, write_texts
from octavo.data.storage import cache
from octavo.data.storage.hub_datasets import validate
from octavo.data.storage.open_rows import open_rows
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, bounds, command

SECONDS, MEGABYTES = 10.0, 600  # of processor time and of memory for one case
A_CHILD = 250  # cases


class Kind(NamedTuple):
    """A valid file (or one in a folder), and a function that reads all its rows."""

    file: Path
    read: Callable[[Path], object]


def rows_of(rows: Any) -> None:
    for row in range(min(len(rows), 200)):
        try:
            rows[row]
        except BadSample:
            continue


def table(rows: int) -> pa.Table:
    """Make a table with every layout that a row of a data set may have."""
    turns = [[{"from": "human", "value": f"é{n}" * (n % 9)}, {"from": "gpt", "value": None}] for n in range(rows)]
    tags = pa.array([["a", "b"][: n % 3] for n in range(rows)], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    return pa.table({
        "conversations": turns,
        "image": [{"bytes": bytes([n % 256]) * 40, "path": None if n % 2 else f"{n}.png"} for n in range(rows)],
        "text": pa.array([None if n % 5 == 0 else f"row {n}" * 7 for n in range(rows)], pa.large_string()),
        "level": [None if n % 3 == 0 else n for n in range(rows)],
        "tags": tags,
        "size": pa.array([[n, -n] for n in range(rows)], pa.list_(pa.int32(), 2)),
        "more": pa.array([[("k", n)] for n in range(rows)], pa.map_(pa.string(), pa.int64())),
        "when": pa.array(range(rows), pa.timestamp("ms")),
        "sure": [n % 2 == 0 for n in range(rows)],
    })  # fmt: skip


def build(place: Path) -> list[Kind]:
    """Write one valid file of each kind."""
    import datasets

    datasets.disable_progress_bars()
    whole, kinds = table(60), []
    datasets.Dataset.from_dict({"messages": whole["conversations"].to_pylist(), "n": [*range(60)]}).save_to_disk(
        str(place / "saved")
    )
    kinds.append(Kind(next((place / "saved").glob("*.arrow")), lambda file: rows_of(open_rows(file.parent))))
    with pa.OSFile(str(place / "stream.arrow"), "wb") as out, pa.ipc.new_stream(out, whole.schema) as into:
        into.write_table(whole, 20)
    kinds.append(Kind(place / "stream.arrow", lambda file: _stream(file)))
    with pa.OSFile(str(place / "kept.arrow"), "wb") as out, pa.ipc.new_file(out, whole.schema) as into:
        into.write_table(whole.combine_chunks())
    kinds.append(Kind(place / "kept.arrow", lambda file: rows_of(ColumnRows(file, file))))
    write_texts(place / "texts.arrow", (Text(b'{"n": %d}' % n, n) for n in range(60)))
    kinds.append(Kind(place / "texts.arrow", lambda file: rows_of(TextRows(file, file))))
    for compression in ("lz4", "uncompressed"):
        file = place / f"{compression}.feather"
        feather.write_feather(whole, file, compression)
        kinds.append(Kind(file, _stream))
    plain = whole.drop_columns(["tags"])
    for number, options in enumerate(
        ({"compression": "zstd"}, {"compression": "none", "use_dictionary": False, "write_page_checksum": True},
         {"compression": "snappy", "data_page_version": "2.0", "row_group_size": 20, "store_schema": False})
    ):  # fmt: skip
        parquet.write_table(plain, place / f"{number}.parquet", **options)
        for stream in (False, True):
            read = lambda file, stream=stream: rows_of(open_rows(file, stream=stream))  # noqa: E731
            kinds.append(Kind(place / f"{number}.parquet", read))
    return kinds


def _stream(file: Path) -> None:
    """Read all rows of an Arrow file, after validating it."""
    validate(file, file.parent / "notes")
    with pa.memory_map(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        found = reader.read_all()
    try:
        columnar.find_large_rows(found)
        found.to_pylist()
    except UnicodeDecodeError:  # bytes that are not UTF-8: `decode_row` names them
        return
    except (
        ValueError,
        OverflowError,
        KeyError,
        pa.ArrowException,
    ):  # a time that Python cannot represent: it names it too
        return


def one(number: int, seed: int, kinds: list[Kind], place: Path, found: list[Finding]) -> None:
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice(kinds)
    folder = place / f"case-{number}"
    if kind.file.parent.name == "saved":
        mutate.copy_tree(kind.file.parent, folder)
    else:
        folder.mkdir()
    file, raw = folder / kind.file.name, kind.file.read_bytes()
    mutate.write(file, mutate.flip(rng, raw) if rng.random() < 0.6 else mutate.damage(rng, raw))
    label = f"case {number} of seed {seed}, {kind.file.name}"
    with bounds(label, found, 12 * SECONDS, MEGABYTES, cpu=SECONDS):
        try:
            kind.read(file)
        except DataError as refused:
            if str(folder) not in str(refused):
                found.append(Finding(label, f"names no file: {str(refused)[:300]}"))
        except Exception as error:  # a finding
            found.append(Finding(label, f"{type(error).__name__}: {error}"[:300]))
    for left in (*folder.iterdir(), folder):
        left.rmdir() if left.is_dir() and not [*left.iterdir()] else left.unlink() if left.is_file() else None


def run(seed: int, cases: int, only: int | None = None) -> list[Finding]:
    """Return the findings, which depend only on the seed and `cases`."""
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        kinds, numbers = build(place), [*range(cases)] if only is None else [only]
        while numbers:
            part, numbers = numbers[:A_CHILD], numbers[A_CHILD:]
            done = _in_child(part, seed, kinds, place, found)
            numbers = part[done:] + numbers
    return found


def _in_child(numbers: list[int], seed: int, kinds: list[Kind], place: Path, found: list[Finding]) -> int:
    """Run cases in a child process; returns the number of cases it ran, including the one that ended it."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        os.environ["OCTAVO_CACHE"] = str(place / "cache")
        cache.SMALL_FILE = cache.SMALL_FILE if seed % 2 else 0
        for number in numbers:
            wrong: list[Finding] = []
            try:
                one(number, seed, kinds, place, wrong)
            except BaseException as error:
                wrong.append(Finding(f"case {number} of seed {seed}", f"{type(error).__name__}: {error}"[:300]))
            sender.send([tuple(finding) for finding in wrong])
        os._exit(0)
    sender.close()
    done = 0
    while True:
        try:
            found += [Finding(*finding) for finding in receiver.recv()]
        except EOFError:
            break
        done += 1
    status = os.waitpid(child, 0)[1]
    if done < len(numbers):
        found.append(Finding(f"case {numbers[done]} of seed {seed}", f"ended the process ({status})"))
        done += 1
    return done


def test_damaged_columns() -> None:
    assert run(seed=2, cases=60) == []


@pytest.mark.parametrize(("seed", "case"), [(100, 1661), (100, 3359), (101, 1000), (293664, 147)])
def test_former_findings_are_handled(seed: int, case: int) -> None:
    """Columns of another file read as texts; statistics in a footer that made pyarrow end the process; a column name
    that is not UTF-8."""
    assert run(seed, 1, only=case) == []


@pytest.mark.long
def test_more_damaged_columns() -> None:
    assert run(seed=13, cases=600) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=1, whole=True)
