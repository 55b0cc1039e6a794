"""The stream of a rank: exact, resumable, independent of the number of workers, with a report of skipped rows."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.data import BadSample, DataError, Encoder, EvalSet, Loader, Mixture
from octavo.data.batching.collate import make_micro_batches
from octavo.data.errors import WorkerDied
from octavo.data.loaders.from_config import worker_count
from octavo.data.loaders.loader import EncodedRows, _RowChunks, run_workers


@pytest.fixture
def source(folder):
    images = [folder.image(f"{n}.png", color=(n, 0, 0)) for n in range(6)]
    rows = [folder.llava("<image>First?" if n % 3 else "none?", str(n), **({"image": images[n % 6]} if n % 3 else {}))
            for n in range(12)]  # fmt: skip
    return folder.read([dict(row, id=str(n)) for n, row in enumerate(rows)])


@pytest.fixture
def encoder(models):
    return Encoder(models("qwen3_vl"), 64)


def loader(source, encoder, **options):
    options = {"micro_batch": 2, "global_batch": 4, **options}
    return Loader(Mixture([source], seed=1), encoder, **options)


def steps(stream, count):
    return [next(stream) for _ in range(count)]


def rows(step):
    return [row for batch in step for row in batch["meta"].rows]


def batches_equal(a, b):
    assert a["meta"] == b["meta"] and a.keys() == b.keys()
    return all(torch.equal(a[key], b[key]) for key in a if key != "meta")


def test_steps_have_the_configured_micro_batches(source, encoder):
    stream = loader(source, encoder)
    assert stream.rows == 0
    first = next(stream)
    assert len(first) == 2 and all(batch["meta"].samples == 2 for batch in first) and stream.rows == 4
    epoch = rows(first) + [row for step in steps(stream, 2) for row in rows(step)]
    assert sorted(epoch) == list(range(12)) and stream.rows == 12
    assert [len(s) for s in steps(loader(source, encoder, micro_batch=3), 1)] == [2]  # 3 + 1


def test_resume_is_exact(source, encoder):
    whole = steps(loader(source, encoder), 8)
    stream = loader(source, encoder)
    steps(stream, 5)
    rest = steps(loader(source, encoder, start_row=stream.rows), 3)
    assert all(
        batches_equal(a, b) for one, two in zip(whole[5:], rest, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_ranks_share_a_step(source, encoder):
    whole = steps(loader(source, encoder), 4)
    ranks = [steps(loader(source, encoder, rank=r, world=2), 4) for r in (0, 1)]
    for number in range(4):
        assert rows(ranks[0][number]) + rows(ranks[1][number]) == rows(whole[number])


class Plain:
    """An encoder that returns rows unchanged."""

    pad_id = 0

    @staticmethod
    def encode_all(rows):
        return [SimpleNamespace(row=row, nbytes=8, notes=[]) for row in rows]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.integers(0, 40))
def test_all_ranks_have_equally_many_micro_batches(batch, micro, world, start):
    """Slices may differ by a row and ranks may have none; together they have the rows of a single rank, from any
    start."""
    mixture = Mixture([range(7), range(5)], seed=2)

    def step(rank, world):
        pieces = {"gather": lambda rows, size, pad: make_micro_batches(rows, size, pad, lambda samples, pad: samples)}
        (found,) = steps(Loader(mixture, Plain, micro, batch, rank, world, start, **pieces), 1)
        return found

    shares = [step(rank, world) for rank in range(world)]
    assert {len(share) for share in shares} == {math.ceil(math.ceil(batch / world) / micro)}
    row_numbers = [samples.row for share in shares for piece in share for samples in piece]
    assert row_numbers == [
        mixture.sources[source][row] for source, row in map(mixture.row, range(start, start + batch))
    ]


def test_rank_without_rows_runs_as_many_forwards(source, encoder):
    """Three ranks share two rows, with workers; then the run resumes with two ranks."""
    ranks = [loader(source, encoder, global_batch=2, micro_batch=1, rank=r, world=3, workers=1) for r in range(3)]
    steps_by_rank = [steps(stream, 2) for stream in ranks]
    for stream in ranks:
        stream.close()
    assert [[len(step) for step in rank] for rank in steps_by_rank] == [[1, 1]] * 3
    assert [rows(step) for step in steps_by_rank[0]] == [[], []] and {stream.rows for stream in ranks} == {4}
    assert (steps_by_rank[0][0][0]["labels"] == -100).all()
    expected = steps(loader(source, encoder, global_batch=2), 4)
    assert [rows(steps_by_rank[1][n]) + rows(steps_by_rank[2][n]) for n in (0, 1)] == [
        rows(step) for step in expected[:2]
    ]
    two = [next(loader(source, encoder, global_batch=2, rank=r, world=2, start_row=4)) for r in (0, 1)]
    assert rows(two[0]) + rows(two[1]) == rows(expected[2])


def test_workers_do_not_change_batches_or_position(source, encoder):
    state = torch.get_rng_state()
    inline = steps(loader(source, encoder), 5)
    for workers in (1, 2):
        stream = loader(source, encoder, workers=workers)
        taken_steps = steps(stream, 5)
        assert stream.rows == 20
        stream.close()
        assert all(
            batches_equal(a, b) for x, y in zip(inline, taken_steps, strict=True) for a, b in zip(x, y, strict=True)
        )
    assert torch.equal(state, torch.get_rng_state())  # the global random state does not change


def test_dead_worker_is_named(source, encoder):
    stream = loader(source, encoder, workers=2)
    next(stream)
    handler = signal.getsignal(signal.SIGCHLD)
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    time.sleep(0.2)  # no exception from a signal handler here
    with pytest.raises(
        WorkerDied, match=rf"data worker \d \(pid {victim.pid}, killed by signal 9\) died\. .*lower data"
    ):
        for _ in range(50):
            next(stream)
    assert signal.getsignal(signal.SIGCHLD) == handler
    assert not multiprocessing.active_children()


def test_hanging_worker_is_named_with_its_rows(folder):
    class Rows:
        sources = (folder.read([folder.llava("q", "a")] * 9),)

        def __getitem__(self, places):
            if (0, 7) in places:
                time.sleep(60)
            return places

    stream = run_workers(Rows(), _RowChunks([(0, row) for row in range(18)], 2), 2, timeout=2.0)
    assert [place for _ in range(3) for place, _ in next(stream)] == [(0, row) for row in range(6)]
    pids = sorted(child.pid for child in multiprocessing.active_children())
    with pytest.raises(
        WorkerDied, match=r"data worker 1 \(pid (\d+)\) hangs: it did not return row 6, 7 of .*/.*json "
    ) as seen:
        next(stream)
    assert "in 1.5 s (run.timeout: 2 s)" in str(seen.value) and str(pids[1]) in str(seen.value)
    assert not multiprocessing.active_children()


ORPHANS = """
import itertools, multiprocessing, time
from octavo.data.loaders.loader import run_workers, _RowChunks

class Rows:  # each is more than a pipe holds, so the workers block
    def __getitem__(self, places):
        return [bytes(1 << 20)]

stream = run_workers(Rows(), _RowChunks(itertools.count(), 1), 2)
next(stream)
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name != "posix", reason="a parent's end shows in getppid on POSIX only")
def test_workers_exit_when_the_trainer_is_killed():
    trainer = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    trainer.kill()
    try:
        assert trainer.communicate(timeout=30)[0] == ""  # the pipe ends when the last process that has it open ends
    except subprocess.TimeoutExpired:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail("the workers are still running after the trainer")


def bad_rows(folder, source):
    raw = [source.rows[n] for n in range(12)]
    raw[2], raw[5] = dict(raw[2], image="none.png"), {"id": "5", "conversations": []}
    raw[7] = folder.llava("long " * 100, "x", id="7")
    return folder.read([dict(row) for row in raw], "bad.json")


def test_bad_rows_stop_the_run(folder, source, encoder):
    with pytest.raises(BadSample, match=r"bad\.json, row (2|5) \(id (2|5)\)"):
        steps(loader(bad_rows(folder, source), encoder), 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_rows_are_counted_and_listed_once(folder, source, encoder, workers):
    listed = folder.path / "run" / "skipped.jsonl"
    options = {"on_bad": "skip", "report_path": listed, "workers": workers}
    stream = loader(bad_rows(folder, source), encoder, **options)
    seen = [row for step in steps(stream, 6) for row in rows(step)]
    stream.close()
    assert sorted(seen) == sorted([n for n in range(12) if n not in (2, 5, 7)] * 2)
    assert stream.report.counts == {"skipped": 2, "dropped": 1}
    found = {line["row"]: line for line in map(json.loads, listed.read_text().splitlines())}
    assert set(found) == {2, 5, 7} and len(listed.read_text().splitlines()) == 3
    assert "none.png' is missing" in found[2]["reason"] and found[7]["action"] == "dropped"
    # A resumed run or another rank lists nothing twice; an incomplete last line is kept.
    listed.write_text(listed.read_text() + '{"file": "torn')
    steps(loader(bad_rows(folder, source), encoder, **options, start_row=4), 6)
    lines = listed.read_text().splitlines()
    assert len(lines) == 4 and lines[3] == '{"file": "torn'


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_no_row_stops_a_run_that_skips_bad_rows(folder, encoder, name):
    """Neither in training nor in evaluation. Rows that are noted but trained on are listed too."""
    good, noted = folder.llava("q", "a"), folder.llava("q <|im_end|> r", "a")
    texts = [
        json.dumps(row) for row in (good, noted, folder.llava("q\ud800", "a"), folder.llava("q", "a", id="\udfff"))
    ]
    texts += [
        json.dumps(good).replace('"r"', value)
        for value in ("7" * 5000, "[" * 70 + "]" * 70, '{"":' * 9999 + "0" + "}" * 9999)
    ]
    texts += [json.dumps(folder.llava(*("q", "a") * 1000)), json.dumps(folder.llava("q" * 20_000, "a"))]
    file = folder.path / name
    file.write_text("[" + ",\n".join(texts) + "]" if name == "rows.json" else "\n".join(texts))
    listed = folder.path / "skipped.jsonl"
    stream = loader(folder.read(file), encoder, global_batch=1, micro_batch=1, on_bad="skip", report_path=listed)
    steps(stream, len(texts))
    assert stream.report.counts == {"skipped": 5, "dropped": 2, "with control tokens": 1}
    assert "contains '<|im_end|>', which the tokenizer reads" in stream.report.first["with control tokens"]["reason"]
    eval_set = EvalSet([folder.read(file)], encoder, 4, on_bad="skip")
    assert sum(batch["meta"].samples for batch in eval_set) == 2 and eval_set.report.counts == stream.report.counts
    found = {line["row"]: line["action"] for line in map(json.loads, listed.read_text().splitlines())}
    assert found == {1: "with control tokens", 2: "skipped", 3: "skipped", 4: "skipped", 5: "skipped", 6: "skipped",
                     7: "dropped", 8: "dropped"}  # fmt: skip


def test_file_name_that_is_not_utf8_is_listed(folder, encoder):
    file = folder.json([folder.llava("q", "a"), {"conversations": []}]).rename(folder.path / "r\udcff.json")
    listed = folder.path / "skipped.jsonl"
    stream = loader(folder.read(file, format="llava"), encoder, global_batch=2, on_bad="skip", report_path=listed)
    next(stream)
    assert json.loads(listed.read_text())["file"] == str(file)


def test_error_of_bad_row_does_not_keep_its_data(folder, encoder):
    """The error stays in the cache, which counts it as one kilobyte."""
    (folder.path / "broken.png").write_bytes(b"no")
    rows = EncodedRows((folder.read([folder.llava("<image>", "x", image="broken.png")]),), encoder)
    [bad] = rows[[(0, 0)]]
    assert isinstance(bad, BadSample) and (bad.__cause__, bad.__context__, bad.__traceback__) == (None, None, None)


def test_report_path_must_be_a_regular_file(folder, source, encoder):
    (folder.path / "skipped.jsonl").symlink_to("/dev/zero")
    stream = loader(bad_rows(folder, source), encoder, on_bad="skip", report_path=folder.path / "skipped.jsonl")
    with pytest.raises(DataError, match="skipped.jsonl is a device, and rows that are left out are listed in it; rem"):
        steps(stream, 3)


def test_long_rows_are_dropped_although_bad_rows_stop(folder, encoder):
    source = folder.read([folder.llava("q", "a"), folder.llava("long " * 100, "x")])
    stream = loader(source, encoder, global_batch=2)
    assert [batch["meta"].samples for batch in next(stream)] == [1]
    assert stream.report.counts == {"dropped": 1}


def test_cut_rows_are_counted(folder, models):
    source = folder.read([folder.llava("q", "a", "long " * 100, "x")])
    stream = loader(source, Encoder(models("qwen3_vl"), 20, on_long="cut"), global_batch=1, micro_batch=1)
    (batch,) = next(stream)
    assert batch["meta"].lengths == (20,) and stream.report.counts == {"cut": 1}


def test_empty_micro_batch_is_a_masked_row(folder, source, encoder):
    stream = loader(bad_rows(folder, source), encoder, micro_batch=1, on_bad="skip")
    batches = [batch for step in steps(stream, 3) for batch in step]
    empty = [batch for batch in batches if not batch["meta"].samples]
    assert len(batches) == 12 and len(empty) == 3 and (empty[0]["labels"] == -100).all()


def test_data_set_of_only_bad_rows_is_an_error(folder, source, encoder):
    bad = folder.read([{"conversations": []}] * 3, format="llava")
    stream = Loader(Mixture([source, bad]), encoder, 1, 1, on_bad="skip")
    with pytest.raises(DataError, match=r"all 3 rows were left out; .*the conversation is empty"):
        steps(stream, 30)


@pytest.mark.parametrize("workers", [0, 1])
def test_on_long_error_is_never_skipped(folder, models, workers):
    source = folder.read([folder.llava("long " * 100, "x")])
    stream = loader(source, Encoder(models("qwen3_vl"), 20, on_long="error"), on_bad="skip", workers=workers)
    with pytest.raises(DataError, match=r"row 0: is over 20 tokens long .*, seq_length is 20; raise train.seq_length"):
        next(stream)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch 0 in micro-batches of 2; give each 1 or more rows"),
        ({"micro_batch": 0}, "in micro-batches of 0"),
        ({"rank": 2, "world": 2}, "rank 2 of 2"),
        ({"on_bad": "ignore"}, "on_bad_sample is 'ignore'; it must be error or skip"),
    ],
)
def test_impossible_settings_are_rejected(source, encoder, options, message):
    with pytest.raises(DataError, match=message):
        loader(source, encoder, **options)


def test_cache_is_bounded_and_used(source, encoder):
    def of(processed, row):
        return processed[[(0, row)]][0]

    everything = EncodedRows((source,), encoder)
    assert of(everything, 1) is of(everything, 1)
    size = of(everything, 1).nbytes + 1024
    two = EncodedRows((source,), encoder, cache_bytes=2 * size)
    first = of(two, 1)
    of(two, 2)
    assert of(two, 1) is first  # used again, so row 2 is the older one
    of(two, 4)
    assert of(two, 1) is first and set(two._cache) == {(0, 1), (0, 4)}
    nothing = EncodedRows((source,), encoder, cache_bytes=0)
    assert of(nothing, 1) is not of(nothing, 1)
    first, *others, again = everything[[(0, 2), (0, 1), (0, 3), (0, 2)]]
    assert first is again and others[0] is of(everything, 1) and [sample.row for sample in others] == [1, 3]
    for sample in EncodedRows((source,), encoder)[[(0, 1), (0, 2)]]:
        assert sample.pixel_values.base is None  # not a view of the outputs of both


def test_eval_set_has_each_row_once_in_order(source, encoder):
    alone = EvalSet([source, source], encoder, 5)
    assert len(alone) == 5 and alone.rows == 24
    for _ in range(2):
        assert [row for batch in alone for row in batch["meta"].rows] == list(range(12)) * 2
    ranks = [list(EvalSet([source, source], encoder, 5, rank=r, world=2)) for r in (0, 1)]
    assert [len(batches) for batches in ranks] == [3, 3]  # as many forwards on each
    assert ranks[1][2]["meta"].samples == 0
    rows_of = [row for pair in zip(*ranks, strict=True) for batch in pair for row in batch["meta"].rows]
    assert rows_of == list(range(12)) * 2
    first = [list(EvalSet([source, source], encoder, 2, rank=r, world=2, max_rows=13)) for r in (0, 1)]
    rows_of = [row for pair in zip(*first, strict=True) for batch in pair for row in batch["meta"].rows]
    assert rows_of == [*range(12), 0]


def test_eval_set_handles_bad_rows_like_the_loader(folder, source, encoder):
    bad = bad_rows(folder, source)
    eval_set = EvalSet([bad], encoder, 4, on_bad="skip", report_path=folder.path / "skipped.jsonl")
    assert sum(batch["meta"].samples for batch in eval_set) == 9 and eval_set.report.counts["skipped"] == 2
    with pytest.raises(BadSample, match="row 2"):
        list(EvalSet([bad], encoder, 4))


@pytest.mark.parametrize(
    ("asked", "gpu", "cores", "ranks", "workers"),
    [
        (None, False, 64, 1, 0),
        (None, True, 64, 8, 4),
        (None, True, 16, 8, 1),
        (None, True, 4, 8, 0),
        (7, False, 1, 8, 7),
    ],
)
def test_default_number_of_workers(asked, gpu, cores, ranks, workers, monkeypatch):
    """The default is 0 on a CPU, and with GPUs it depends on the number of cores."""
    monkeypatch.setattr("octavo.base.accelerator.device_count", lambda: int(gpu))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert worker_count(SimpleNamespace(data=SimpleNamespace(workers=asked))) == workers
