"""The jobs of `make gpu`: every test file of tests/gpu and every suite of `octavo bench`, in three parts, and the plan
of 7 minutes for the speed of a step.

A job is one process, or several if one crashes. Its seconds are its approximate time on an H200 with 16 cores, and
serve as weights: the time limit of a job is its share of the budget of the call. Part 1 is the most informative: cuBLAS
layouts, exactness of casts, and the speed of casts, GEMMs and linear layers. Part 2 has the other tests and the small
suites, and part 3 the suites that compile for minutes.

The part `speed` is in no call without a part. It says where the time of a step goes and what FP8 gains: what settles
most comes first, 12 blocks (whose compilation is the one of all 36) before 36, and CUDA graphs last, each in its own
process, because a capture that fails can disturb what follows. Its candidates are named; what is not measured is
missing, and the call says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/gpu"


@dataclass(frozen=True)
class Job:
    """``kind``: tests or suite. ``target``: a test file, or a module with ``run(bench)``. ``seconds``: its share.
    ``stall``: seconds without an event after which it hangs, or ``patience`` of its time if that is less. ``alone``: a
    test file that times or fills the GPU. ``apart``: a suite with one process for each candidate. ``settings``: fields
    of its Bench; names of candidates may contain {high}, high precision, and {backend}, the device's own GEMMs."""

    name: str
    kind: str
    part: int | str
    target: str
    seconds: float
    stall: float = 90.0
    alone: bool = False
    patience: float = 0.4
    apart: bool = False
    settings: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def has_names(self) -> bool:
        """Whether it names its candidates, so that an absent one is missing."""
        return bool(self.settings.get("candidates"))


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
SPEED_BUDGET = 420.0


def _speed(name: str, suite: str, seconds: float, apart: bool = False, **settings: object) -> Job:
    target = f"octavo.bench.suite_{suite}"  # most of the time of a step is one silent compilation
    return Job(f"speed_{name}", "suite", "speed", target, seconds, patience=0.75, apart=apart, settings=settings)


_RUN = "fused compiled chunked"
_PRESET = f"{_RUN} fp8 head gradients fp8 moments"

#: the part `speed`, in the order in which it runs
SPEED: tuple[Job, ...] = (
    _speed("attention", "layer", 20, cases=" attention, "),
    _speed(
        "wgrad",
        "gemm",
        20,
        cases="(qkv|gate_up|down|small) wgrad ",
        tokens=8192,
        candidates=["{high}", "blockwise {backend}", "blockwise_1d {backend}", "tensorwise {backend}"],
    ),
    _speed("cast", "cast", 20, cases="(16384 x 4096|96 x 160)"),
    _speed(
        "step12",
        "step",
        145,
        layers=12,
        candidates=[
            "{high} compiled",
            "{high} compiled chunked",
            f"blockwise {_RUN}",
            f"tensorwise {_RUN}",
            f"blockwise_1d {_RUN}",
            "blockwise compiled chunked",
            "blockwise fused",
            "{high}",
        ],
    ),
    _speed(
        "step36",
        "step",
        90,
        candidates=[
            "{high} compiled",
            "{high} compiled chunked",
            f"blockwise {_PRESET}",
            f"tensorwise {_PRESET}",
            "{high} compiled chunked fp8 moments",
            "{high} compiled again",
        ],
    ),
    _speed("optimizer", "optimizer", 20),
    _speed("head", "layer", 20, cases=" head, "),
    _speed(
        "decode",
        "decode",
        35,
        candidates=[
            "{high}",
            "{high}, cache in FP8",
            "blockwise, cache in FP8",
            "tensorwise, cache in FP8",
            "blockwise",
        ],
    ),
    _speed(
        "graphs",
        "step",
        35,
        apart=True,
        layers=12,
        candidates=["{high} chunked graph", "blockwise fused chunked graph"],
    ),
)


def every(root: Path = ROOT) -> list[Job]:
    """All jobs; a test file that the table does not know yet belongs to part 2."""
    known = {job.target for job in JOBS}
    files = sorted(str(path.relative_to(root)) for path in (root / TESTS).glob("test_*.py"))
    new = [Job(Path(file).stem, "tests", 2, file, 90.0) for file in files if file not in known]
    return [*(j for j in JOBS if j.kind == "tests"), *new, *(j for j in JOBS if j.kind == "suite")]


def chosen(part: int | str | None, only: list[str], root: Path = ROOT) -> list[Job]:
    """The jobs of a part, or the named ones, or all of parts 1 to 3. Raises ValueError for a name that no job has."""
    jobs = [*every(root), *(SPEED if part == "speed" or only else ())]
    names = [job.name for job in jobs]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"there is no job {unknown[0]!r}; there are: {', '.join(names)}")
    return [job for job in jobs if (part is None or job.part == part) and (not only or job.name in only)]
