"""The jobs of `make gpu`: every test file of tests/gpu and every suite of `octavo bench`, in three parts.

A job is one process, or several if one crashes. Its seconds are its approximate time on an H200 with 16 cores, and
serve as weights: the time limit of a job is its share of the budget of the call. Part 1 is the most informative: cuBLAS
layouts, exactness of casts, and the speed of casts, GEMMs and linear layers. Part 2 has the other tests and the small
suites, and part 3 the suites that compile for minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/gpu"


@dataclass(frozen=True)
class Job:
    """``kind``: tests or suite. ``target``: a test file, or a module with ``run(bench)``. ``seconds``: its share.
    ``stall``: seconds without an event after which it hangs. ``alone``: a test file that times or fills the GPU."""

    name: str
    kind: str
    part: int
    target: str
    seconds: float
    stall: float = 90.0
    alone: bool = False


def _tests(part: int, seconds: dict[str, float], alone: bool = False) -> list[Job]:
    return [Job(f"test_{n}", "tests", part, f"{TESTS}/test_{n}.py", share, alone=alone) for n, share in seconds.items()]


def _suites(part: int, seconds: dict[str, float]) -> list[Job]:
    return [Job(name, "suite", part, f"octavo.bench.suite_{name}", share) for name, share in seconds.items()]


#: in the order in which a call without a part begins them: tests together, then suites one by one
JOBS: tuple[Job, ...] = (
    *_tests(1, {"torch_backend": 30, "casts": 200, "gemms": 120}),
    *_tests(2, {"moe": 60, "fused": 100, "compile": 130, "adamw": 80, "param": 40, "saved": 65}),
    *_tests(2, {"offloaded": 35, "eager": 35, "graphs": 35, "blocks": 65, "logits": 60, "generation": 120}),
    *_tests(
        2, {"optimizer_states": 45, "sharing": 20, "self_check": 60, "decode": 85, "invariant": 200, "async_saves": 25}
    ),
    *_tests(2, {"memory": 30, "plan": 120}, alone=True),
    *_suites(1, {"cast": 30, "gemm": 70, "linear": 150}),
    *_suites(3, {"layer": 130, "step": 260, "memory": 80}),
    *_suites(2, {"moe": 50, "optimizer": 40}),
)
PARTS = (1, 2, 3)


def every(root: Path = ROOT) -> list[Job]:
    """All jobs; a test file that the table does not know yet belongs to part 2."""
    known = {job.target for job in JOBS}
    files = sorted(str(path.relative_to(root)) for path in (root / TESTS).glob("test_*.py"))
    new = [Job(Path(file).stem, "tests", 2, file, 90.0) for file in files if file not in known]
    return [*(j for j in JOBS if j.kind == "tests"), *new, *(j for j in JOBS if j.kind == "suite")]


def chosen(part: int | None, only: list[str], root: Path = ROOT) -> list[Job]:
    """The jobs of a part, or those named, or all. Raises ValueError for a name that no job has."""
    jobs = every(root)
    names = [job.name for job in jobs]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"there is no job {unknown[0]!r}; there are: {', '.join(names)}")
    return [job for job in jobs if (part is None or job.part == part) and (not only or job.name in only)]
