"""Runs benchmark cases: builds the candidates of a case, times them in turn, and records rows and failures."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.base import accelerator
from octavo.base.safe_read import first_line
from octavo.bench.record import AbsentCandidate, Result, Row
from octavo.fp8 import measuring

Call = Callable[[], Any]


class Unavailable(RuntimeError):
    """Raised if a candidate cannot run here; the message gives the reason (a package, an architecture, a shape)."""


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
    on_candidates: Callable[[str, Sequence[str]], None] = lambda case, candidates: None
    on_result: Callable[[Result], None] = lambda result: None
    skip: Collection[tuple[str, str]] = ()
    result: Result = field(init=False)

    def __post_init__(self) -> None:
        name = accelerator.properties(self.device)["name"]
        settings = {"shape": self.shape, "tokens": self.tokens, "layers": self.layers}
        chosen = {k: v for k, v in settings.items() if v is not None}
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

    def case(
        self,
        suite: str,
        name: str,
        baseline: str,
        candidates: Mapping[str, Callable[[], Call]],
        work: Work | Mapping[str, Work],
        memory: bool | Mapping[str, int] = False,
        parts: Callable[[Any], Mapping[str, float]] = lambda call: {},
    ) -> None:
        """Time the candidates of one case in one run, in both orders, and record a row for each.

        Args:
            candidates: name -> builder; a builder makes its inputs and returns the call to time. Its error is recorded
                as the reason why the candidate is absent.
            work: the work of all candidates, or of each.
            memory: True records the peak memory of each candidate in a separate call; a mapping has bytes by kind,
                filled in by the builder.
            parts: returns the seconds by part of a call; called after timing.
        """
        candidates = {key: build for key, build in candidates.items() if (name, key) not in self.skip}
        if not candidates:
            return
        if self._exceeds_budget(len(candidates)):
            which = next(iter(candidates)) if len(candidates) == 1 else "it"
            self.result.cut.append(f"{suite} {name}: the time budget of {self.budget:.0f} s is too short for {which}")
            self.on_result(self.result)
            return
        self.log(f"{suite} {name}: {', '.join(candidates)}")
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
                peaks[candidate] = self._peak(calls[candidate]) if memory is True else None
            except Exception as error:  # any error of a candidate is reported as its result
                calls.pop(candidate, None)
                self.result.absent.append(
                    AbsentCandidate(
                        suite, name, candidate, str(error) if isinstance(error, Unavailable) else first_line(error)
                    )
                )
                accelerator.synchronize(self.device)  # raises if the GPU is lost, which must end this process
                continue
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
                    )
                )
        calls.clear()  # free the candidates' memory for the next case
        gc.collect()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # else graphs of many cases accumulate up to dynamo's limit
        accelerator.empty_cache(self.device)
        self.on_result(self.result)

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
