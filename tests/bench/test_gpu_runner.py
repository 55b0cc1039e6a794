"""`make gpu` loses the case that crashes, hangs or cannot be written, names it, and nothing else."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import jobs, process, runner, store, worker
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.store import Store, StoreError
from octavo import bench
from octavo.base import accelerator, atomic_write
from octavo.bench import suite_step
from tests import ranks

ROOT = Path(__file__).resolve().parents[2]

# A worker without torch: its target is a list of cases, each a name and what happens in it. What takes time in it ticks
# (see `clock`): the file that it appends to is time for the runner, so that a slow machine is no slow worker.
FAKE = """
import json, os, signal, subprocess, sys, time
def tick(count=1):
    with open(os.environ["GPU_TEST_TICKS"], "ab") as ticks: ticks.write(b"." * count)
def hang():
    while True: tick(); time.sleep(0.01)
order = json.load(sys.stdin)
pipe = os.fdopen(order["pipe"], "w")
def send(**event): print(json.dumps(event), file=pipe, flush=True)
if order["kind"] == "where":
    send(device="cpu", machine={})
    sys.exit()
cases = json.loads(order["target"])
if any(what == "lose" and [case, "b"] in order["skip"] for case, what in cases):
    send(gone="No CUDA GPUs are available")
    sys.exit()
if any(what == "mute" for case, what in cases): hang()
left = [(case, what, name) for case, what in cases for name in "ab" if [case, name] not in order["skip"]]
if order["apart"] and left:
    (case, what, name), *more = left
    send(begins=[case, [name]])
    line = {"suite": "fake", "case": case, "candidate": name, "why": "OutOfMemoryError: CUDA out of memory"}
    failed = name == "a" and what == "no memory"
    send(rows=[] if failed else [{**line, "seconds": 1.0, "pid": os.getpid()}], absent=[line] * failed, cut=[])
    send(over=71 if more else 0)
    sys.exit()
for case, what in cases:
    here = [name for name in "ab" if [case, name] not in order["skip"]]
    for name in here:
        send(begins=[case, [name]])
        print("building", case, name, flush=True)
        if name == "b" and what in ("crash", "lose"): os.abort()
        if name == "b" and what == "hang":
            children = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(99)"]) for _ in "12"]
            print("children", *(child.pid for child in children), flush=True)
            hang()
        if name == "b" and what == "leave": sys.exit(3)
        if what == "terminate": os.kill(os.getppid(), 15); time.sleep(9)
        if what == "nap": tick(); time.sleep(0.01)
        if what == "break":  # the signal that asks where it hangs makes a compiler fail, and the test with it
            signal.signal(signal.SIGABRT, lambda *_: send(test=[case, "failed", 1.0, "PassManager::run failed"]))
            hang()
    if here:
        row = {"suite": "fake", "case": case, "seconds": order["seconds"], "host": 0.0}
        send(rows=[{**row, "candidate": name} for name in here], absent=[], cut=[])
send(over=0)
"""


def fake(name: str, *cases: tuple[str, str], seconds: float = 9.0, stall: float = 9.0, **more: object) -> Job:
    return Job(name, "suite", 1, json.dumps(cases), seconds, stall, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The runner's seconds, which the workers tick, 20 to a second. Its limits are then of what workers do and not of
    how fast this machine is: real time counts a fiftieth, so that nothing waits for ever."""
    ticks = tmp_path / "ticks"
    ticks.touch()
    monkeypatch.setenv("GPU_TEST_TICKS", str(ticks))
    began = time.monotonic()

    def seconds() -> float:
        return ticks.stat().st_size / 20 + (time.monotonic() - began) / 50

    for module in (runner, process):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=seconds))
    return seconds


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "fake.py").write_text(FAKE)
    return (sys.executable, "-S", "-E", str(tmp_path / "fake.py"))


@pytest.fixture
def run(tmp_path: Path, messages: list[str], command: tuple[str, ...], clock, monkeypatch: pytest.MonkeyPatch):
    """Runs jobs into a folder; (what suites.json holds of each, exit code)."""
    monkeypatch.setattr(gpu, "log", messages.append)

    def go(*work: Job, seconds: float = 20.0, call: str = "one", least: float = 0.2):
        kept = Store(tmp_path / "out", messages.append)
        kept.apply("suite", "", {"call": call, "what": {"device": "cpu", "small": True}})
        runs = Runner(kept, messages.append, call, "cpu", True, 4, least, command)
        runs.run(work, clock() + seconds)
        code = gpu.summary(work, kept, call, runs.stopped, runs.gone)
        messages.extend(gpu.list_missing(work, kept, call))
        kept.close()
        return kept.files["suite"]["jobs"], code

    return go


def rows(entry: dict) -> list[tuple[str, str]]:
    return [(row["case"], row["candidate"]) for row in entry["rows"]]


def test_parts_cover_every_test_file_and_suite_once() -> None:
    every = jobs.chosen(None, [])
    assert [job.name for job in every][:3] == ["test_torch_backend", "test_casts", "test_gemms"]
    assert [job.name for job in every if job.kind == "suite"][:3] == ["cast", "gemm", "linear"]
    parts = [jobs.chosen(part, []) for part in jobs.PARTS]
    assert sorted(job.target for part in parts for job in part) == sorted(job.target for job in every)
    files = {path.name for path in (ROOT / jobs.TESTS).glob("test_*.py")}
    assert {Path(job.target).name for job in every if job.kind == "tests"} == files
    assert {job.name for job in jobs.JOBS if job.kind == "tests"} == {Path(name).stem for name in files}
    assert {job.name for job in every if job.kind == "suite"} == set(bench.SUITES) - {"decode"}  # only in speed
    assert {job.name for job in every[:3]} <= {job.name for job in parts[0]}
    assert len({job.target for job in every}) == len(every)
    marked = [path for path in ROOT.glob("tests/**/*.py") if re.search(r"mark\.gpu\b", path.read_text())]
    assert {path.name for path in marked} - {Path(__file__).name} == files


def test_speed_fits_its_time_and_has_graphs_last() -> None:
    speed = jobs.chosen("speed", [])
    assert speed == list(jobs.SPEED) and not {job.name for job in speed} & {job.name for job in jobs.every()}
    assert sum(job.seconds for job in speed) <= jobs.SPEED_BUDGET - gpu.END and jobs.SPEED_BUDGET <= 420
    names = [job.name for job in speed]
    assert names.index("speed_step12") < names.index("speed_step36") and names[-1] == "speed_graphs"
    graphs = [job.name for job in speed if any("graph" in name for name in job.settings.get("candidates", ()))]
    assert graphs == [job.name for job in speed if job.apart] == ["speed_graphs"]
    assert {job.stall for job in speed} == {90.0}
    assert jobs.chosen(None, ["speed_decode", "cast"]) == [
        *jobs.chosen(None, ["cast"]),
        *jobs.chosen("speed", names[7:8]),
    ]


@pytest.mark.parametrize("job", jobs.SPEED, ids=lambda job: job.name)
def test_speed_names_candidates_that_exist(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each suite would build at small sizes; nothing is built."""
    offered: dict[str, list[str]] = {}

    def case(self, suite, name, baseline, candidates, *args, **kwargs) -> None:
        if self.wants(name):
            offered.setdefault(name, []).extend(candidates)

    monkeypatch.setattr(bench.bench.Bench, "case", case)
    monkeypatch.setattr(suite_step.suite, "default_names", lambda bench: pytest.fail("it names its candidates"))
    order = {"device": "cpu", "small": True, "seconds": 60, "target": job.target, "skip": []}
    sent: list[dict] = []
    worker.suite({**order, "settings": dict(job.settings)}, lambda **event: sent.append(event), time.monotonic())
    assert sent == [{"ready": "cpu"}] and offered
    wanted = {n.format(high="fp32", backend="reference") for n in job.settings.get("candidates", ())}
    assert all(wanted <= set(candidates) for candidates in offered.values()), (wanted, offered)


def test_new_test_file_is_run_and_unknown_name_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "test_new.py").write_text("")
    assert "test_new" in [job.name for job in jobs.chosen(2, [], tmp_path)]
    assert [job.name for job in jobs.chosen(None, ["cast", "test_gemms"])] == ["test_gemms", "cast"]
    with pytest.raises(ValueError, match="there is no job 'casts'; there are: test_torch_backend"):
        jobs.chosen(None, ["casts"])


@pytest.mark.parametrize(("what", "why"), [("crash", "crashed: SIGABRT"), ("leave", "ended with exit code 3")])
def test_crash_loses_one_candidate_of_one_case(what: str, why: str, run, messages: list[str]) -> None:
    job = fake("planted", ("one", ""), ("two", what), ("three", ""))
    found, code = run(job, fake("next", ("one", "")))
    assert rows(found["planted"]) == [("one", "a"), ("one", "b"), ("two", "a"), ("three", "a"), ("three", "b")]
    (lost,) = found["planted"]["lost"]
    assert (lost["case"], lost["candidates"], lost["why"]) == ("two", ["b"], why)
    assert lost["last lines"][-1] == "building two b" and found["next"]["state"] == "done" and code == 1
    summary = "\n".join(messages)
    assert f"LOST planted in two with b: {why}\n" in summary and "    building two b" in summary
    assert "2 of 2 jobs ran, 1 cases lost" in summary


def test_hang_loses_one_case_and_kills_its_children(run) -> None:
    found, code = run(fake("planted", ("one", ""), ("two", "hang"), ("three", ""), stall=0.8))
    assert ("three", "b") in rows(found["planted"]) and ("two", "b") not in rows(found["planted"]) and code == 1
    (lost,) = found["planted"]["lost"]
    assert lost["why"] == "hung: silent for 0.8 s" and lost["candidates"] == ["b"]
    children = [int(pid) for pid in lost["last lines"][-1].split()[1:]]
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(children) == 2 and not any(alive(pid) for pid in children)


def test_hang_before_any_event_means_a_lost_device(run, messages: list[str]) -> None:
    found, code = run(fake("mute", ("one", "mute"), stall=0.8), fake("next", ("one", "")))
    assert found["mute"]["lost"][0]["why"] == "the device does not answer" and found["mute"]["state"] == "cut off"
    assert code == 1 and messages[-2:] == ["mute: a part (the device does not answer)", "next (not begun)"]


def test_hang_in_a_compilation_leaves_the_other_items(run, tmp_path: Path, messages: list[str]) -> None:
    """Its candidate is lost, the others of its item and the next items are measured, and all is on disk."""
    settings = {"candidates": ["a", "b"]}
    found, code = run(
        fake("first", ("one", ""), settings=settings),
        fake("compiles", ("two", "hang"), ("three", ""), stall=0.8, settings=settings),
        fake("last", ("four", ""), settings=settings),
    )
    assert json.loads((tmp_path / "out" / "suites.json").read_text())["jobs"] == found
    assert rows(found["compiles"]) == [("two", "a"), ("three", "a"), ("three", "b")] and len(rows(found["last"])) == 2
    assert code == 1 and messages[-1] == "compiles: b (hung: silent for 0.8 s)"


def test_failed_capture_does_not_disturb_the_next_candidate(run, messages: list[str]) -> None:
    """Each candidate of such an item has its own process."""
    job = fake("graphs", ("one", "no memory"), ("two", ""), apart=True, settings={"candidates": ["a", "b"]})
    found, code = run(fake("first", ("one", "")), job)
    assert rows(found["graphs"]) == [("one", "b"), ("two", "a"), ("two", "b")] and found["graphs"]["state"] == "done"
    assert len({row["pid"] for row in found["graphs"]["rows"]}) == 3 and len(rows(found["first"])) == 2
    assert messages[-1] == "graphs: a (OutOfMemoryError: CUDA out of memory)"


def test_lost_device_ends_the_call_with_what_was_read(run, tmp_path: Path, messages: list[str]) -> None:
    items = [
        fake("first", ("one", "")),
        fake("loses", ("one", ""), ("two", "lose"), ("three", "")),
        fake("next", ("one", "")),
    ]
    found, code = run(*items)
    assert json.loads((tmp_path / "out" / "suites.json").read_text())["jobs"] == found
    assert rows(found["loses"]) == [("one", "a"), ("one", "b")] and len(rows(found["first"])) == 2
    assert [lost["why"] for lost in found["loses"]["lost"]] == ["crashed: SIGABRT", "No CUDA GPUs are available"]
    assert found["next"]["state"] == "not begun" and code == 1
    assert any("LOST THE DEVICE: No CUDA GPUs are available" in line for line in messages)
    lost = "loses: b (crashed: SIGABRT), a part (No CUDA GPUs are available)"
    assert messages[-2:] == [lost, "next (not begun)"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


CUT = [("one", ""), *((str(i), "nap") for i in range(99))]  # never silent, and too long


def test_job_over_its_limit_is_killed_and_the_next_keeps_its_time(run, messages: list[str]) -> None:
    found, code = run(fake("slow", *CUT, seconds=1), fake("next", ("one", "")), seconds=10)
    assert found["slow"]["state"] == "cut off" and found["slow"]["lost"][0]["why"] == "its limit of 1 s was reached"
    assert rows(found["slow"])[:2] == [("one", "a"), ("one", "b")] and found["next"]["state"] == "done" and code == 1


def test_test_that_fails_while_killed_counts_as_lost(run) -> None:
    found, code = run(fake("slow", ("one", "break"), seconds=1), fake("next", ("one", "")), seconds=10)
    (lost,) = found["slow"]["lost"]
    assert lost["case"] == "one" and "limit" in lost["why"] and "tests" not in found["slow"] and code == 1


def test_shares_divide_the_remaining_time_with_unused_time(run) -> None:
    work = [fake(name, ("one", ""), seconds=share) for name, share in (("x", 1), ("y", 1), ("z", 2))]
    found, code = run(*work, seconds=8)
    given = [found[job.name]["rows"][0]["seconds"] / (1 - runner.MARGIN) for job in work]
    assert given == [pytest.approx(share, abs=0.6) for share in (2, 8 / 3, 8)] and code == 0


def test_skipped_jobs_are_listed_and_earlier_results_kept(run, messages: list[str]) -> None:
    late = fake("late", ("one", ""))
    run(late)
    found, code = run(late, fake("new", ("one", "")), seconds=0.1, call="two")
    assert found["late"]["call"] == "one" and rows(found["late"]) and found["new"]["state"] == "not begun"
    assert code == 1 and any("NOT BEGUN: late, new" in line for line in messages)


def test_result_files_contain_no_package_paths(tmp_path: Path) -> None:
    kept = Store(tmp_path / "out", print)
    lines = [f'File "{ROOT}/octavo/fp8/plan.py"', 'File "/some/.venv/lib/python3.12/site-packages/torch/x.py", line 1']
    kept.apply("tests", "t", {"lost": [{"case": "c", "last lines": lines}]})
    kept.apply("tests", "t", {"test": ["n", "failed", 1.0, "\n".join(lines)]})
    kept.save()
    kept.close()
    text = (tmp_path / "out" / "tests.json").read_text()
    assert text.count('File \\"octavo/fp8/plan.py') == text.count('File \\"torch/x.py') == 2


def test_parts_share_a_file_and_a_repeated_job_replaces_its_results(run, tmp_path: Path) -> None:
    run(fake("x", ("one", "crash"), ("two", "")))
    run(fake("y", ("one", "")), call="two")
    found, code = run(fake("x", ("two", "")), call="three")
    assert rows(found["x"]) == [("two", "a"), ("two", "b")] and not found["x"]["lost"] and rows(found["y"])
    assert code == 0 and [path.name for path in (tmp_path / "out").iterdir()] == ["suites.json"]
    assert json.loads((tmp_path / "out" / "suites.json").read_text())["jobs"] == found


def test_test_files_run_in_parallel_except_exclusive_ones(messages: list[str], tmp_path: Path, command, clock) -> None:
    kept = Store(tmp_path / "out", messages.append)
    naps = json.dumps([[str(i), "nap"] for i in range(20)])
    work = [Job(f"t{i}", "tests", 1, '[["c", "nap"]]', 9.0, alone=i == 4) for i in range(5)]
    work[3] = replace(work[3], target=naps, seconds=0.05)
    Runner(kept, messages.append, "one", "cpu", True, 3, 0.1, command).run(work, clock() + 20)
    lines = [
        line.split(":")[0] + (" +" if "begins" in line else " -") for line in messages if re.match(r"t\d: (b|d)", line)
    ]
    running = [sum(1 if line.endswith("+") else -1 for line in lines[: i + 1]) for i in range(len(lines))]
    assert max(running) == 3 and lines[-2:] == ["t4 +", "t4 -"] and len(lines) == 10
    assert not any("cut off" in line for line in messages)  # t3 takes ten times its share, and nobody waits
    kept.close()


PLANTED = """
import os, sys, time, types, pytest
def test_passes(): pass
def test_crashes():
    print("words before the crash")
    os.kill(os.getpid(), 11)
def test_fails(): assert 1 == 2, "planted"
@pytest.mark.skip(reason="no card")
def test_skips(): pass
def test_hangs():
    while True:
        with open(os.environ["GPU_TEST_TICKS"], "ab") as ticks: ticks.write(b".")
        time.sleep(0.01)
def test_loses_the_gpu():
    def synchronize(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    assert False
@pytest.mark.parametrize("x", [1, 2])
def test_last(x): assert "torch" not in sys.modules
"""


def test_crashed_or_hung_test_loses_only_itself(messages: list[str], tmp_path: Path, clock, monkeypatch) -> None:
    """The real worker, in four processes."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    job = Job("planted", "tests", 1, str(tmp_path / "test_planted.py"), 60.0, stall=6.0)
    kept = Store(tmp_path / "out", messages.append)
    Runner(kept, messages.append, "one", "cpu", True, 4, 0.2).run([job], clock() + 60)
    found = kept.files["tests"]["jobs"]["planted"]
    outcomes = {node.rpartition("::")[2]: test["outcome"] for node, test in found["tests"].items()}
    failed = dict.fromkeys(["test_fails", "test_loses_the_gpu"], "failed")
    assert outcomes == failed | {"test_skips": "skipped"} | dict.fromkeys(
        ["test_passes", "test_last[1]", "test_last[2]"], "passed"
    )
    lost = {what["case"].rpartition("::")[2]: what for what in found["lost"]}
    assert {name: what["why"] for name, what in lost.items()} == {
        "test_crashes": "crashed: SIGSEGV",
        "test_hangs": "hung: silent for 6 s",
        "test_loses_the_gpu": "CUDA error: an illegal memory access was encountered",
    }
    assert any("words before the crash" in line for line in lost["test_crashes"]["last lines"])
    assert any("in test_hangs" in line for line in lost["test_hangs"]["last lines"])
    monkeypatch.setattr(gpu, "log", messages.append)
    assert found["collected"] == 8 and gpu.summary([job], kept, "one") == 1
    assert (
        "FAILED" in "\n".join(messages)
        and "assert 1 == 2" in "\n".join(messages)
        and "skipped 1: " in "\n".join(messages)
    )
    assert "LEFT OUT" not in "\n".join(messages)
    kept.close()


def test_full_disk_loses_no_results(run, messages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is printed, each result once, and the log makes the files that found no room."""
    writes = []
    real = atomic_write.write_text

    def full_after_two(path: Path, text: str) -> None:
        writes.append(path)
        if len(writes) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, text)

    monkeypatch.setattr(atomic_write, "write_text", full_after_two)
    found, code = run(fake("x", ("one", "nap"), ("two", "crash"), ("three", "nap")))
    assert code == 1 and len(rows(found["x"])) == 5
    assert sum("cannot be written (No space left on device): results follow" in line for line in messages) == 1
    assert any("NOT SAVED: " in line and "results are above as lines of JSON" in line for line in messages)
    on_disk = json.loads((tmp_path / "out" / "suites.json").read_text())["jobs"]
    monkeypatch.setattr(atomic_write, "write_text", real)
    fresh = Store(tmp_path / "fresh", messages.append)
    store.collect(messages, fresh)
    assert list(fresh.files["suite"]["calls"]) == ["one"] and fresh.files["suite"]["jobs"]["x"]["call"] == "one"
    fresh.close()
    again = Store(tmp_path / "out", messages.append)
    assert len(on_disk["x"]["rows"]) < 5 and store.collect(messages, again) == sum(
        line.startswith("{") for line in messages
    )
    again.close()
    assert json.loads((tmp_path / "out" / "suites.json").read_text())["jobs"] == found


def test_unusable_folder_is_rejected_before_any_job(tmp_path: Path) -> None:
    first = Store(tmp_path / "out", print)
    with pytest.raises(StoreError, match="another call writes to"):
        Store(tmp_path / "out", print)
    first.close()
    (tmp_path / "out" / "tests.json").write_text('{"rows": []}')
    with pytest.raises(StoreError, match=r"tests\.json is not what a call wrote"):
        Store(tmp_path / "out", print)
    with pytest.raises(StoreError, match="cannot be used: Not a directory"):
        Store(tmp_path / "out" / "tests.json" / "below", print)


RUNS = """
import sys, time
from pathlib import Path
from benchmarks.gpu.jobs import Job
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.store import Store
kept = Store(Path(sys.argv[1]), print)
job = Job("x", "suite", 1, sys.argv[2], 60.0)
Runner(kept, print, "one", "cpu", True, 4, 0.1, sys.argv[3:]).run([job], time.monotonic() + 60)
"""


def test_killed_runner_keeps_finished_results(tmp_path: Path, command: tuple[str, ...]) -> None:
    cases = json.dumps([(str(i), "nap") for i in range(200)])
    words = [sys.executable, "-c", RUNS, str(tmp_path / "out"), cases, *command]
    killed = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    file, deadline, found = tmp_path / "out" / "suites.json", time.monotonic() + 300, {}
    while len(found.get("rows", ())) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
        found = json.loads(file.read_text())["jobs"]["x"] if file.exists() else {}  # readable at any moment
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    kept = json.loads(file.read_text())["jobs"]["x"]
    assert kept["state"] == "under way" and rows(kept)[:4] == [("0", "a"), ("0", "b"), ("1", "a"), ("1", "b")]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]):
    """`main` over a fake job; signals are set back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(gpu, "Runner", lambda *a: Runner(*a, least=0.1, command=command))
    monkeypatch.setattr(gpu, "_where", lambda: {"device": "cpu", "machine": {"cpu": "fake"}})
    monkeypatch.setattr(gpu, "_report", lambda folder, until: print(f"report of {folder.name}"))
    monkeypatch.setattr(gpu, "chosen", lambda part, only: [fake("x", ("one", ""), ("two", only[0] if only else ""))])
    yield gpu.main
    for number, handler in before.items():
        signal.signal(number, handler)


def test_command_records_its_call_and_prints_the_report(command_line, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert command_line(["--small", "--out", str(out), "--part", "2", "--budget", "60"]) == 0
    file = json.loads((out / "suites.json").read_text())
    ((call, what),) = file["calls"].items()
    assert what["part"] == 2 and what["machine"] == {"cpu": "fake"} and file["jobs"]["x"]["call"] == call
    assert re.search(r"report of out\n\S+ nothing is missing\n$", capsys.readouterr().out)


def test_last_line_says_what_is_missing(command_line, tmp_path: Path, capsys, monkeypatch) -> None:
    """Also the exit code, where a call of the part `speed` on a GPU lacks a candidate that is absent."""
    monkeypatch.setattr(gpu, "_where", lambda: {"device": "Some GPU", "machine": {}})
    job = fake("x", ("one", "no memory"), apart=True, settings={"candidates": ["a", "b"]})
    monkeypatch.setattr(gpu, "chosen", lambda part, only: [replace(job, part="speed")])
    assert command_line(["--small", "--out", str(tmp_path / "out"), "--part", "speed"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("MISSING: x: a (OutOfMemoryError: CUDA out of memory)")
    what = next(iter(json.loads((tmp_path / "out" / "suites.json").read_text())["calls"].values()))
    assert what["part"] == "speed" and what["budget"] == jobs.SPEED_BUDGET


def test_terminated_call_reports_its_results(command_line, tmp_path: Path, capsys) -> None:
    assert command_line(["--small", "--out", str(tmp_path / "out"), "--only", "terminate"]) == 1
    shown = capsys.readouterr().out
    assert "STOPPED by SIGTERM" in shown and "LOST x in two with a: the call was stopped" in shown
    assert rows(json.loads((tmp_path / "out" / "suites.json").read_text())["jobs"]["x"]) == [("one", "a"), ("one", "b")]


def test_usage_errors_and_missing_gpu_are_rejected(command_line, tmp_path: Path, monkeypatch, capsys) -> None:
    assert command_line(["--out", str(tmp_path / "out")]) == 2
    assert "make gpu needs an NVIDIA GPU" in capsys.readouterr().out and not (tmp_path / "out").exists()
    for words in (["--part", "4"], ["--budget", "10"], ["--collect", "log"]):
        with pytest.raises(SystemExit):
            command_line(words)
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert command_line(["--small"]) == 2 and "lacks no_such_package" in capsys.readouterr().out


def test_suite_reports_each_case_when_it_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's half: what Bench says becomes events, and candidates of earlier processes are left out."""
    sent: list[dict] = []

    def planted(there: bench.Bench) -> None:
        for case in ("one", "two"):
            there.case("gemm", case, "a", dict.fromkeys("ab", lambda: lambda: None), bench.bench.Work())

    monkeypatch.setitem(sys.modules, "planted_suite", types.SimpleNamespace(run=planted))
    order = {"device": "cpu", "small": True, "seconds": 60, "target": "planted_suite"}
    skip = [["one", "a"], ["one", "b"], ["two", "b"]]
    assert worker.suite({**order, "skip": skip}, lambda **event: sent.append(event), time.monotonic()) == 0
    assert sent[0] == {"ready": "cpu"}
    assert [event["begins"] for event in sent[1:3]] == [["two", ["a"]]] * 2 and len(sent) == 4
    assert [row["candidate"] for row in sent[3]["rows"]] == ["a"] and json.dumps(sent)
    sent.clear()
    worker.suite({**order, "skip": [], "seconds": 0}, lambda **event: sent.append(event), time.monotonic())
    assert [len(event["cut"]) for event in sent[1:]] == [1, 1]
    sent.clear()
    settings = {"candidates": ["b"], "cases": "t", "layers": 12}
    apart = {**order, "skip": [], "apart": True, "settings": settings}
    assert worker.suite(apart, lambda **event: sent.append(event), time.monotonic()) == 0
    assert [(row["case"], row["candidate"]) for row in sent[-1]["rows"]] == [("two", "b")]
    apart["settings"] = {}
    assert worker.suite(apart, lambda **event: sent.append(event), time.monotonic()) == worker.MORE
    assert [(row["case"], row["candidate"]) for row in sent[-1]["rows"]] == [("one", "a"), ("one", "b")]


def test_suite_on_a_lost_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be")

    monkeypatch.setattr(accelerator, "synchronize", synchronize)
    sent: list[dict] = []
    order = {"device": "cpu", "small": True, "seconds": 60, "target": "no_such_module", "skip": []}
    assert worker.suite(order, lambda **event: sent.append(event), time.monotonic()) == worker.BROKEN
    assert sent == [{"gone": "CUDA error: unspecified launch failure"}]


BARE = """
import sys
for name in ("pydantic", "ruamel", "ruamel.yaml", "rich", "matplotlib", "peft", "sklearn", "tensorboard"):
    sys.modules[name] = None  # an import of it raises
from benchmarks.gpu import __main__, report, worker
from octavo import bench
from importlib import import_module
for suite in bench.SUITES:
    import_module(f"octavo.bench.suite_{suite}")
# transformers imports Pillow where it is installed; Octavo must not need it
print(report.main(sys.argv[1:]), "octavo.models.processors.image" in sys.modules)
"""


@pytest.mark.long
def test_runner_needs_only_the_documented_packages(tmp_path: Path) -> None:
    row = {"suite": "moe", "case": "c", "candidate": "bf16", "seconds": 2.0}
    (tmp_path / "bench.json").write_text(
        json.dumps({"command": "octavo bench", "device": "NVIDIA H200", "small": False, "rows": [row]})
    )
    done = subprocess.run([sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("0 False\n"), done.stderr[-2000:]
    assert "no plot: No module named 'matplotlib" in done.stdout


@pytest.mark.long
def test_small_run_works_on_a_cpu(tmp_path: Path) -> None:
    """A test file and a suite, as typed; what all others do: see below."""
    words = ["make", "gpu", "SMALL=1", "PART=1", "ONLY=test_gemms,cast", f"OUT={tmp_path}", "BUDGET=600"]
    done = subprocess.run([*words, f"GPU_PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "They say nothing about FP8 on a GPU: no verdict." in done.stdout
    tests, suites = (json.loads((tmp_path / f"{name}.json").read_text())["jobs"] for name in ("tests", "suites"))
    assert (*tests, *suites) == ("test_gemms", "cast") and suites["cast"]["rows"]
    assert tests["test_gemms"]["state"] == suites["cast"]["state"] == "done" and len(list(tmp_path.iterdir())) <= 8


def _work(job: Job, file: Path) -> None:
    order = {"device": "cpu", "small": True, "seconds": 600, "target": job.target, "skip": []}
    with file.open("w") as events:

        def send(**event: object) -> None:
            print(json.dumps(event, default=str), file=events, flush=True)

        send(over=worker.tests(order, send) if job.kind == "tests" else worker.suite(order, send, time.monotonic()))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tests", "suite"])
def test_every_job_works_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """In processes that have torch already; the suites of part 3 have long tests of their own (test_bench.py)."""
    for job in jobs.every():
        if job.kind != kind or job.part == 3:
            continue
        working = multiprocessing.get_context(ranks.START).Process(target=_work, args=(job, tmp_path / job.name))
        working.start()
        working.join()
        events = [json.loads(line) for line in (tmp_path / job.name).read_text().splitlines()]
        assert events[-1] == {"over": 0}, f"{job.name}: {events}"
        assert any(event.get("rows") or event.get("collected") for event in events)
        assert "failed" not in [event["test"][1] for event in events if "test" in event], f"{job.name}: {events}"
