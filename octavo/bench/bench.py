"""Runs benchmark cases: builds the candidates of a case, times them in turn, and records rows and failures."""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from octavo.base import accelerator
from octavo.base.safe_read import first_line
from octavo.bench.record import AbsentCandidate, Result, Row
from octavo.fp8 import measuring

Call = Callable[[], Any]
Describe = Callable[[Any], str]


class Unavailable(RuntimeError):
    """Raised if a candidate cannot run here; the message gives the reason (a package, an architecture, a shape)."""


class BenchError(ValueError):
    """Raised for an unknown suite or candidate, or an invalid setting."""


class Profile(Protocol):
    """The seconds of one call: in all, by kind of kernel, and by the name of a kernel."""

    @property
    def seconds(self) -> float: ...
    @property
    def kinds(self) -> Mapping[str, float]: ...
    @property
    def names(self) -> Mapping[str, float]: ...


Profiler = Callable[[Any], Profile]


@dataclass(frozen=True)
class Work:
    """The work of a call: operations, bytes that it must read and write, and tokens; 0 if not counted."""

    flops: float = 0.0
    bytes: float = 0.0
    tokens: int = 0


@dataclass
class Bench:
    """Times the cases of suites and collects their results.

    small          use sizes that a CPU finishes in seconds
    budget         seconds per suite, or None for no limit; a case or candidate is skipped if, by the mean time of the
                   earlier candidates, it would exceed the budget
    shape, tokens  the model of the layer and step suites, and the tokens of a call; None for the defaults of the suite
    layers         decoder blocks of the step suite, or None for all
    candidates     names of the candidates that run, in this order in the suite step; () for all
    cases          a regular expression that the names of cases have to contain; "" for all
    apart          run one candidate, and set `unfinished` if there are more, so that each can have its own process
    log            called with each case when it begins
    on_candidates  called with the case and the candidates that are built or timed next
    on_result      called with the result after each case
    skip           (case, name) of candidates that are skipped, because an earlier process timed them or crashed in them
    """

    device: torch.device
    small: bool = False
    budget: float | None = None
    log: Callable[[str], None] = lambda text: None
    shape: str | None = None
    tokens: int | None = None
    layers: int | None = None
    candidates: Sequence[str] = ()
    cases: str = ""
    apart: bool = False
    on_candidates: Callable[[str, Sequence[str]], None] = lambda case, candidates: None
    on_result: Callable[[Result], None] = lambda result: None
    skip: Collection[tuple[str, str]] = ()
    result: Result = field(init=False)

    def __post_init__(self) -> None:
        name = accelerator.properties(self.device)["name"]
        settings: dict[str, object] = {"shape": self.shape, "tokens": self.tokens, "layers": self.layers}
        settings |= {"candidates": list(self.candidates) or None, "cases": self.cases or None}
        chosen = {k: v for k, v in settings.items() if v is not None}
        self.unfinished, self.offered = False, set[str]()
        self.result = Result(name, self.small, settings=chosen)
        self.start_budget()

    def start_budget(self) -> None:
        """Start the time budget of a suite."""
        self._began, self._built = time.perf_counter(), 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of high precision: BF16 on a GPU; fp32 on a CPU, which has no fast BF16."""
        return accelerator.autocast_dtype(self.device) or torch.float32

    @property
    def high(self) -> str:
        """The name of high precision, the baseline of most cases."""
        return "bf16" if self.dtype is torch.bfloat16 else "fp32"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile. Small sizes on a CPU run the graphs as they were traced: compiling C++ takes
        minutes, and says nothing about the code for a GPU."""
        return "aot_eager" if self.small and not accelerator.is_gpu(self.device) else "inductor"

    def wants(self, case: str) -> bool:
        """Return whether a case of this name runs, so that a suite need not prepare others."""
        return re.search(self.cases, case) is not None

    def report_unknown(self) -> None:
        """Report names of candidates that no case has."""
        for name in self.candidates:
            if name not in self.offered:
                self.result.absent.append(AbsentCandidate("", "", name, "no case has a candidate of this name"))

    def leave_out(self, line: str) -> None:
        """Report what does not run, and why."""
        self.result.cut.append(line)
        self.on_result(self.result)

    def case(
        self,
        suite: str,
        name: str,
        baseline: str,
        candidates: Mapping[str, Callable[[], Call]],
        work: Work | Mapping[str, Work],
        memory: bool | Mapping[str, int] = False,
        parts: Callable[[Any], Mapping[str, float]] = lambda call: {},
        note: Describe = lambda call: "",
        profile: Profiler | None = None,
    ) -> None:
        """Time the candidates of one case in one run, in both orders, and record a row for each.

        Args:
            candidates: name -> builder; a builder makes its inputs and returns the call to time. Its error is recorded
                as the reason why the candidate is absent.
            work: the work of all candidates, or of each.
            memory: True records the peak memory of each candidate in a separate call; a mapping has bytes by kind,
                filled in by the builder.
            parts: returns the seconds by part of a call; called after timing.
            note: returns what a reader has to know of a call.
            profile: runs a call once and returns its seconds by kernel, which become another row.
        """
        self.offered |= candidates.keys()
        chosen = [key for key in candidates if not self.candidates or key in self.candidates]
        candidates = {key: candidates[key] for key in chosen if (name, key) not in self.skip}
        if not candidates or not self.wants(name):
            return
        if self.apart and self._built:
            self.unfinished = True
            return
        if self._exceeds_budget(len(candidates)):
            which = next(iter(candidates)) if len(candidates) == 1 else "it"
            self.leave_out(f"{suite} {name}: the time budget of {self.budget:.0f} s is too short for {which}")
            return
        self.log(f"{suite} {name}: {', '.join(candidates)}")
        calls, peaks = self._build(suite, name, candidates, memory is True)
        if calls:
            self.on_candidates(name, list(calls))
            kinds = {} if isinstance(memory, bool) else dict(memory)
            for candidate, timed in measuring.time_calls(calls, self.device).items():
                did = work if isinstance(work, Work) else work[candidate]
                self.result.rows.append(
                    Row(
                        *(suite, name, candidate, timed.device, timed.spread),
                        *(did.bytes, did.flops, "" if candidate == baseline else baseline, did.tokens),
                        peak_bytes=kinds.get("peak", peaks[candidate]),
                        memory=kinds,
                        host=timed.host,
                        parts=parts(calls[candidate]),
                        note=note(calls[candidate]),
                    )
                )
            if profile is not None:
                self.on_result(self.result)  # first what was timed: the profiler may crash
                self._profile(suite, f"{name}, one call by kernel", calls, profile)
        calls.clear()  # free the candidates' memory for the next case
        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # else graphs of many cases accumulate up to dynamo's limit
        accelerator.empty_cache(self.device)
        self.on_result(self.result)

    def _build(
        self, suite: str, name: str, candidates: Mapping[str, Callable[[], Call]], memory: bool
    ) -> tuple[dict[str, Call], dict[str, int | None]]:
        """Build the candidates and call each once. Returns the calls that work, and their peaks if ``memory``."""
        calls: dict[str, Call] = {}
        peaks: dict[str, int | None] = {}
        for candidate, build in candidates.items():
            if calls and self._exceeds_budget(1):
                self.result.cut.append(f"{suite} {name}: the time budget is too short for {candidate}")
                continue
            self.on_candidates(name, [candidate])
            self._built += 1
            try:
                calls[candidate] = build()
                calls[candidate]()  # compiles, fills caches, and fails here rather than in the timing
                peaks[candidate] = self._peak(calls[candidate]) if memory else None
            except Exception as error:  # any error of a candidate is reported as its result
                calls.pop(candidate, None)
                self.result.absent.append(
                    AbsentCandidate(
                        suite, name, candidate, str(error) if isinstance(error, Unavailable) else first_line(error)
                    )
                )
                accelerator.synchronize(self.device)  # raises if the GPU is lost, which must end this process
                continue
        return calls, peaks

    def _profile(self, suite: str, name: str, calls: Mapping[str, Call], profile: Profiler) -> None:
        for candidate, call in calls.items():
            if (name, candidate) in self.skip:
                continue
            self.on_candidates(name, [candidate])
            try:
                by_kernel = profile(call)
            except RuntimeError as error:
                self.result.cut.append(f"{suite} {name}: {candidate}: {first_line(error)}")
                accelerator.synchronize(self.device)
                continue
            seconds, kinds, names = by_kernel.seconds, dict(by_kernel.kinds), dict(by_kernel.names)
            self.result.rows.append(Row(suite, name, candidate, seconds, kernels=kinds, kernel_names=names))

    def _exceeds_budget(self, count: int) -> bool:
        """Return whether the budget is too short for this many more candidates."""
        spent = time.perf_counter() - self._began
        return self.budget is not None and spent * (1 + count / self._built if self._built else 1) > self.budget

    def _peak(self, call: Call) -> int | None:
        accelerator.synchronize(self.device)
        accelerator.reset_peak(self.device)
        if accelerator.peak_bytes(self.device) is None:
            return None
        call()
        accelerator.synchronize(self.device)
        return accelerator.peak_bytes(self.device)

    def randn(self, *shape: int, grad: bool = False) -> torch.Tensor:
        """Return standard normal values on the device, in high precision."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_(grad)


class Rotation:
    """Returns several inputs in turn, so that a call does not find its last input in a cache."""

    def __init__(self, make: Callable[[], Any], copies: int = 3) -> None:
        self._items = [make() for _ in range(copies)]
        self._next = 0

    def __call__(self) -> Any:
        self._next = (self._next + 1) % len(self._items)
        return self._items[self._next]
