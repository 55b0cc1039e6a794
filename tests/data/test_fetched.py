"""Data sets at a URL: equal rows, a bounded folder shared by processes, and errors that name the URL."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import pickle
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.cli.arguments import missing_files
from octavo.config import Dataset, load_config_text
from octavo.data import DataError, Loader, Mixture, read
from octavo.data.batching.collate import make_micro_batches
from octavo.data.batching.prefetch import make_prefetcher
from octavo.data.storage import fetched, remote
from octavo.data.storage.fetched import Store, open_fetched, open_shard
from octavo.data.storage.open_rows import open_rows
from octavo.train.run_dir import input_fingerprints
from tests.data.test_tar import make_tar, talk

SHARDS, ROWS = 6, 10  # and rows per file


class Plain:
    """An encoder that returns rows unchanged."""

    pad_id = 0

    @staticmethod
    def encode_all(rows):
        return [SimpleNamespace(row=int(row.turns[1].text), nbytes=8, notes=[], images=row.images) for row in rows]


def write_files(folder: Path, kind: str) -> Path:
    """Write 60 conversations, each with its number as the answer, to six files of one format."""
    folder.mkdir()
    for part in range(SHARDS):
        rows = [talk("?" * 50, str(n)) for n in range(part * ROWS, (part + 1) * ROWS)]
        file = folder / f"part-{part:02}.{kind}"
        if kind == "jsonl":
            file.write_text("\n".join(map(json.dumps, rows)))
        elif kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), file)
        else:
            make_tar(file, *((f"{n}.json", row) for n, row in enumerate(rows, part * ROWS)))
    return folder


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    remote.list_files.cache_clear()


@pytest.fixture
def url_of_rows(tmp_path):
    """Return the URL of a folder of six JSONL files."""
    return f"file://{write_files(tmp_path / 'there', 'jsonl')}"


def list_fetched(folder: Path) -> dict[str, int]:
    """Return name -> bytes of the fetched files in a folder and its subfolders, without temporary files."""
    found = {}
    for file in folder.glob("**/*.arrow"):
        with contextlib.suppress(FileNotFoundError):
            found |= {} if file.name.startswith(".") else {file.name: file.stat().st_size}
    return found


def take_rows(stream, steps):
    """Return the rows of the next steps."""
    return [[sample.row for piece in next(stream) for sample in piece] for _ in range(steps)]


def loader(source, **options):
    pieces = lambda rows, size, pad: make_micro_batches(rows, size, pad, lambda made, pad: made)  # noqa: E731
    return Loader(Mixture([source], seed=1), Plain, 2, 4, gather=pieces, **options)


@pytest.mark.parametrize("kind", ("jsonl", "parquet", "tar"))
def test_fetched_rows_equal_local_rows(tmp_path, kind):
    """In file order and in training, after pickling, and for numbered files and folders; rows are counted once."""
    log_lines: list[str] = []
    folder = write_files(tmp_path / "there", kind)
    rows = pickle.loads(pickle.dumps(open_fetched(f"file://{folder}", tmp_path / "own", log_lines.append)))
    local = open_rows(folder)
    assert len(rows) == 60 and [rows[n] for n in (59, 0, 31)] == [local[n] for n in (59, 0, 31)]
    open_fetched(f"file://{folder}", tmp_path / "own", log_lines.append)
    assert len(log_lines) == 1 and "the rows of 6 file(s) are counted, once" in log_lines[0]
    one, other = (read(Dataset(path=path, shuffle_buffer=20)) for path in (f"file://{folder}", str(folder)))
    assert take_rows(loader(one), 30) == take_rows(loader(other), 30)
    some = open_fetched(f"file://{folder}/part-{{02..04}}.{kind}", None)
    assert some.shards == [10, 10, 10] and some[0] == local[20]


def test_store_is_bounded_and_has_the_next_files(url_of_rows, tmp_path):
    """With two windows of two files at a time, rows do not depend on workers, ranks or start position."""
    size = sum(file.stat().st_size for file in (tmp_path / "there").iterdir())
    limit = 5 * size / SHARDS * 1.8  # an Arrow file has about 1.6 times the bytes
    source = read(Dataset(path=url_of_rows, shuffle_buffer=20, fetch_gb=limit / 1e9))
    stream = loader(source)
    inside: list[int] = []
    whole = []
    for _ in range(30):
        whole += take_rows(stream, 1)
        inside.append(sum(list_fetched(tmp_path / "cache").values()))
    stream.close()
    assert sorted(row for step in whole[:15] for row in step) == list(range(60))
    assert 0 < max(inside) <= limit
    ranks = [loader(source, rank=rank, world=3, start_row=40, workers=rank % 2) for rank in range(3)]
    shares = [take_rows(rank, 3) for rank in ranks]
    for rank in ranks:
        rank.close()
    assert [sum((share[n] for share in shares), []) for n in range(3)] == whole[10:13]


def test_files_are_prefetched_in_order(url_of_rows, tmp_path):
    source = read(Dataset(path=url_of_rows, shuffle_buffer=20))
    mixture = Mixture([source], seed=1)
    store = source.rows.store
    for file in store.folder.iterdir():
        file.unlink()
    ahead = make_prefetcher(mixture)
    ahead.prefetch_from(20)
    needed = {shard for _, shard in mixture.shards(20, [0])}
    assert {mixture.row(n)[1] // ROWS for n in range(20, 60)} == needed and len(needed) < SHARDS
    wanted = {f"{source.rows.files[shard].key}.arrow" for shard in needed}
    for _ in range(500):
        if {*list_fetched(store.folder)} == wanted:
            break
        time.sleep(0.02)
    assert {*list_fetched(store.folder)} == wanted
    ahead.close()


def test_concurrent_readers_fetch_a_file_once(url_of_rows, tmp_path, monkeypatch):
    downloads: list[str] = []
    download = remote.download

    def slowly(shard, to):
        downloads.append(shard.url)
        time.sleep(0.05)
        download(shard, to)

    monkeypatch.setattr(remote, "download", slowly)
    found = remote.list_files(url_of_rows)
    stores = [Store(tmp_path / "store", 10**9) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        rows = [*pool.map(lambda store: [len(open_shard(store, shard)) for shard in found[:2]], stores)]
    assert rows == [[10, 10]] * 4 and len(downloads) == 2
    shard = found[3]
    with fetched.cache.lock(tmp_path / "store" / f".{shard.key}.lock"):
        assert stores[0].file(shard, wait=False) is None  # another process is downloading it
    assert stores[0].file(shard, wait=False) is not None


def test_least_recently_used_file_is_evicted_and_open_file_stays_readable(url_of_rows, tmp_path):
    found = remote.list_files(url_of_rows)
    store = Store(tmp_path / "store", 10**9)
    first, second = open_shard(store, found[0]), open_shard(store, found[1])
    size = max(list_fetched(store.folder).values())
    store.limit = int(2.5 * size)
    store.file(found[0])
    left = store.folder / ".gone.0.tmp.jsonl"  # of a killed process
    left.write_bytes(b"x")
    os.utime(left, (0, 0))
    open_shard(store, found[2])
    names = {file.name for file in store.folder.iterdir() if not file.name.endswith(".lock")}
    assert names == {f"{found[0].key}.arrow", f"{found[2].key}.arrow"}
    assert second[9]["messages"][1]["content"] == "19" and first[0]
    store.limit = size // 9
    with pytest.raises(DataError, match=r"part-03\.jsonl takes .* here, and fetch_gb of its data set allows"):
        open_shard(store, found[3])
    assert not [*store.folder.glob(".*.tmp*")]


class Flaky:
    """An in-memory file system whose reads are interrupted a given number of times."""

    def __init__(self, monkeypatch, how: Exception | int, times: int) -> None:
        self.tries, open_file = 0, fsspec.implementations.memory.MemoryFileSystem._open

        def opened(system, path, mode="rb", **options):
            file = open_file(system, path, mode, **options)
            if mode != "rb":
                return file
            self.tries += 1
            if self.tries > times:
                return file
            if isinstance(how, Exception):
                raise how
            import io

            return io.BytesIO(file.read()[:how])

        monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "_open", opened)


@pytest.fixture
def in_memory(url_of_rows, tmp_path):
    """Return the URL of the same files in the in-memory file system."""
    url = f"memory://{tmp_path.name}"
    for file in (tmp_path / "there").iterdir():
        fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{file.name}", file.read_bytes())
    return url


@pytest.mark.parametrize("how", (ConnectionError("reset by peer"), 100))
def test_failed_fetch_is_retried_then_reported(in_memory, tmp_path, monkeypatch, how):
    shard, store = remote.list_files(in_memory)[1], Store(tmp_path / "store", 10**9)
    flaky = Flaky(monkeypatch, how, 3)
    assert len(open_shard(store, shard)) == 10 and flaky.tries == 4
    flaky = Flaky(monkeypatch, how, 99)
    with pytest.raises(DataError, match=r"memory://.*part-02\.jsonl could not be read in 4 tries \(.*(reset|100 by)"):
        open_shard(store, remote.list_files(in_memory)[2])
    assert flaky.tries == 4 and not [*store.folder.glob(".*.tmp*")]


def test_missing_or_changed_remote_file_is_named(in_memory, tmp_path):
    rows = open_fetched(in_memory, tmp_path / "own")
    for file in rows.store.folder.glob("*.arrow"):
        file.unlink()
    system, name = fsspec.filesystem("memory"), f"/{tmp_path.name}/part-0"
    again = open_fetched(in_memory, tmp_path / "own")
    system.rm(f"{name}3.jsonl")
    with pytest.raises(DataError, match=r"part-03\.jsonl cannot be read \(FileNotFoundError.*; check the URL"):
        again[35]
    system.pipe(f"{name}4.jsonl", b"{}\n")
    with pytest.raises(DataError, match=r"part-04\.jsonl could not be read in 4 tries \(3 bytes received, expected"):
        again[45]
    remote.list_files.cache_clear()
    before, fresh = remote.fingerprint(in_memory), open_fetched(in_memory, tmp_path / "own")
    assert fresh.shards == [10, 10, 10, 1, 10] and fresh[30] == {}
    remote.list_files.cache_clear()
    assert remote.fingerprint(in_memory) == before and before["size"] == sum(shard.size for shard in fresh.files)


def test_index_must_match_its_files(tmp_path):
    """With a valid index no file is fetched at startup."""
    folder = write_files(tmp_path / "there", "tar")
    entries = [{"url": f"part-{part:02}.tar", "nsamples": ROWS} for part in range(SHARDS)]

    def opened(entries):
        (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": entries}))
        remote.list_files.cache_clear()
        return open_fetched(f"file://{folder}", tmp_path / "own")

    rows = opened(entries)
    assert not rows.store.folder.exists() and rows[59]["id"] == "59"
    rows = opened([{**entries[0], "nsamples": 12}, *entries[1:]])
    assert len(rows) == 62
    with pytest.raises(DataError, match=r"part-00\.tar has 10 rows, and 12 were expected: it changed, was not copied"):
        rows[3]
    for wrong, message in (
        (entries[1:], r"index\.json does not match these files: part-00\.tar is there, and the index does not name it"),
        ([*entries, {"url": "s3://x/z.tar", "nsamples": 1}], r"z\.tar is missing, and the index names it"),
        ([{"url": "z.tar"}], "has no key 'shardlist.0.nsamples'"),
    ):
        with pytest.raises(DataError, match=message):
            opened(wrong)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere", r"memory://nowhere cannot be read \(FileNotFoundError"),
        ("nosuch://x/y", r"nosuch://x/y cannot be read \(ValueError: Protocol not known: nosuch"),
        ("file:///etc/hostname", "has a format that is not supported"),
    ],
)
def test_unreadable_urls_are_rejected(url, message):
    with pytest.raises(DataError, match=message):
        open_fetched(url, None)


def test_invalid_folders_and_ranges_are_rejected(url_of_rows, tmp_path):
    (tmp_path / "there" / "more.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"has files of several formats \(.csv, .jsonl\); all must have one format"):
        open_fetched(url_of_rows, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty is a folder without files of rows"):
        open_fetched(f"file://{tmp_path}/empty", None)
    with pytest.raises(DataError, match=r"part-06\.jsonl is missing, which .*part-\{00\.\.09\}\.jsonl names"):
        open_fetched(url_of_rows + "/part-{00..09}.jsonl", None)


def test_errors_name_the_url(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nno\n')
    (tmp_path / "b.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match=rf"file://{tmp_path}/a.jsonl, row 1: line 2 is not JSON"):
        open_fetched(f"file://{tmp_path}/a.jsonl", None)[1]
    with pytest.raises(DataError, match=rf"file://{tmp_path}/b.csv: its first line is \['a', 'a'\]"):
        open_fetched(f"file://{tmp_path}/b.csv", None)


def test_full_disk_is_reported(url_of_rows, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("octavo.data.formats.registry.write_texts", full)
    with pytest.raises(DataError, match=r"store cannot keep .*part-00\.jsonl .*: the disk is full .*Lower fetch_gb"):
        open_shard(Store(tmp_path / "store", 10**9), remote.list_files(url_of_rows)[0])
    assert not [*(tmp_path / "store").glob("*.arrow")]


def test_windows_over_the_disk_limit_are_rejected(url_of_rows):
    source = read(Dataset(path=url_of_rows, shuffle_buffer=30, fetch_gb=3e-6))
    with pytest.raises(DataError, match=r"30 rows are shuffled together, which are in files of up to .* raise it, or"):
        loader(source)


def test_prefetch_does_not_evict_the_current_window(url_of_rows):
    """If two windows exceed the limit, the files that come first in the order are stored."""
    source = read(Dataset(path=url_of_rows, shuffle_buffer=20))
    mixture, store = Mixture([source], seed=1), source.rows.store
    size = max(list_fetched(store.folder).values())
    store.limit = int(3.5 * size)
    for file in store.folder.glob("*.arrow"):
        file.unlink()
    ahead = make_prefetcher(mixture)
    ahead.prefetch_from(0)
    first = [f"{source.rows.files[shard].key}.arrow" for _, shard in mixture.shards(0, [0])][:3]
    for _ in range(500):
        if all((store.folder / name).exists() for name in first):
            break
        time.sleep(0.02)
    ahead.close()
    assert {*list_fetched(store.folder)} == {*first}


def test_files_beyond_max_samples_are_not_fetched(url_of_rows):
    source = read(Dataset(path=url_of_rows, max_samples=ROWS + 1, fetch_gb=3e-6))
    loader(source).close()  # two files fit
    assert [shard for _, shard in Mixture([source], seed=1).shards(0, [0])] == [0, 1]


def _rows_of(url: str, folder: Path) -> int:
    rows = open_fetched(url, folder, limit=6000)
    return sum(int(rows[n]["messages"][1]["content"]) for n in range(59, -1, -1))


def test_processes_share_a_store_smaller_than_the_data(url_of_rows, tmp_path):
    """Each process reads every row although others evict files, and the folder stays within its limit."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(3, context) as pool:
        assert [*pool.map(_rows_of, [url_of_rows] * 3, [tmp_path / "own"] * 3)] == [sum(range(60))] * 3
    assert 0 < sum(list_fetched(tmp_path / "own").values()) <= 6000


def test_commands_do_not_treat_urls_as_paths(url_of_rows):
    cfg = load_config_text(
        f"model: {{path: an/original}}\ndata: {{train: [{{path: '{url_of_rows}'}}]}}\ntrain: {{steps: 1}}"
    )
    assert missing_files(cfg, None) == [] and input_fingerprints.fingerprints(cfg)["data"][url_of_rows]["size"] > 0
