"""Count the GEMMs that really ran: the code that runs them reports them, nothing is computed from shapes.

Every GEMM of an FP8 layer reports itself under one of four words and the backend that ran it:

* ``fwd``        the forward
* ``recompute``  the same forward run again inside a backward (activation checkpointing)
* ``dgrad``, ``wgrad``  the two GEMMs of the backward

A GEMM kept in high precision reports the backend :data:`HIGH`. So do, while a counter is open, the linear layers that
the plan left in high precision: the share of FP8 is a counted figure and not a computed one. Counts may be nested.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from octavo.fp8.observe import recorder
from octavo.fp8.observe.recorder import HIGH

Key = tuple[str, str, str]  # (layer, gemm, backend)


class GemmCounts(Mapping[Key, int]):
    """``counts[(layer, gemm, backend)]`` -> calls, 0 for what never ran; ``counts.flops`` the same keys (2 M N K each).

    ``expected`` counts, per (layer, "dgrad" or "wgrad", "fwd" or "recompute"), the forwards that made such a GEMM
    necessary, and ``ran`` the GEMMs that ran, by the kind of forward they belong to. ``no_grad`` counts, per layer,
    the forwards that ran without a graph (``torch.no_grad``, or the first run of a reentrant checkpoint).
    A GEMM of all experts in one counts as one of each expert, those without tokens included. ``idle`` counts, per
    layer of experts that run one by one, the experts that a forward gave no token.
    """

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self._flops: Counter[Key] = Counter()
        self._owed: list[tuple[Key, int, Tensor]] = []
        self.expected: Counter[Key] = Counter()
        self.ran: Counter[Key] = Counter()
        self.no_grad: Counter[str] = Counter()
        self.idle: Counter[str] = Counter()

    @property
    def flops(self) -> Counter[Key]:
        """FLOPs by key. Reading them waits for a device that counted rows of its own (experts)."""
        while self._owed:
            key, each, rows = self._owed.pop()
            self._flops[key] += each * int(rows.sum())
        return self._flops

    def __getitem__(self, key: Key) -> int:
        return self.calls[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"GemmCounts({self.total()} GEMMs of {len({k[0] for k in self.calls})} layers)"

    def total(self, gemm: str | None = None, layer: str | None = None, fp8: bool | None = None) -> int:
        """Calls, all or of one gemm, one layer, FP8 only (True) or high precision only (False)."""
        return sum(
            n
            for (a, g, b), n in self.calls.items()
            if gemm in (None, g) and layer in (None, a) and fp8 in (None, b != HIGH)
        )

    def due(self, layer: str, gemm: str) -> int:
        """How many backward GEMMs the forwards made necessary.

        A checkpointed forward expects one twice when its first run already builds a graph (non-reentrant); the backward
        then goes only through that first run. Reentrant, only the recomputation expects it and gets it. So what the
        recomputations expect is due where any of it ran, or where no first run expects anything.
        """
        first = self.expected[(layer, gemm, "fwd")]
        ran = self.ran[(layer, gemm, "recompute")] or not first
        return first + (self.expected[(layer, gemm, "recompute")] if ran else 0)

    def add(self, other: GemmCounts) -> None:
        """What ``other`` counted ran again: a replayed graph, whose tensors of sizes hold what this replay made."""
        for name in ("calls", "_flops", "expected", "ran", "no_grad", "idle"):
            getattr(self, name).update(getattr(other, name))
        self._owed += [(key, each, rows.clone()) for key, each, rows in other._owed]

    # What the recorder calls: see `recorder.Counter`.

    def on_gemm(self, layer: str, gemm: str, backend: str, flops: int, sizes: Tensor | None) -> None:
        key = (layer, gemm, backend)
        if sizes is None:
            self.calls[key] += 1
            self._flops[key] += flops
        else:  # the sizes may live on a device; they are added up when `flops` is read, after the step
            self.calls[key] += sizes.shape[0]
            self._owed.append((key, flops, sizes))

    def on_expect(self, layer: str, gemm: str, kind: str, calls: int) -> None:
        self.expected[(layer, gemm, kind)] += calls

    def on_ran(self, layer: str, gemm: str, kind: str, calls: int) -> None:
        self.ran[(layer, gemm, kind)] += calls

    def on_no_grad(self, layer: str, calls: int) -> None:
        self.no_grad[layer] += calls

    def on_idle(self, layer: str, experts: int) -> None:
        self.idle[layer] += experts


@contextmanager
def record_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that are recorded inside and not run, without a report to other counters. For a graph that is
    captured, whose replays then report themselves by :func:`report_replay`."""
    with recorder.mute_reports(), count_gemms() as tape:
        yield tape


def report_replay(tape: GemmCounts) -> None:
    """Report the GEMMs of a recorded graph that ran to all counters that are open now."""
    for counter in recorder.counters():
        if isinstance(counter, GemmCounts):
            counter.add(tape)


_lock = threading.Lock()
_counts = 0  # how many `count_gemms` are open


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that run inside, whichever thread runs them."""
    counts = GemmCounts()
    with recorder.attach(counter=counts):
        _watch_modules(+1)
        try:
            yield counts
        finally:
            _watch_modules(-1)


# --- linear layers in high precision, counted only while a counter is open --------------------------------------------


class HighPrecisionGemms(NamedTuple):
    """The GEMMs of a module that stays in high precision: (name, N, K) each. ``routed``: the second argument holds
    top-k indices, one row of work for each."""

    gemms: tuple[tuple[str, int, int], ...]
    routed: bool


_MARK = "_fp8_watched"  # in the module's __dict__, so that copies and pickles keep it
_hook: Any = None


def watch_module(module: nn.Module, watched: HighPrecisionGemms) -> None:
    """Let counters see this module, which the plan keeps in high precision."""
    module.__dict__[_MARK] = watched


def _watch_modules(change: int) -> None:
    """One hook for all modules, present only while a counter is open: without one a module pays nothing."""
    global _hook, _counts
    with _lock:
        _counts += change
        if _counts and _hook is None:
            _hook = nn.modules.module.register_module_forward_hook(_observe_module, with_kwargs=True)
        elif not _counts and _hook is not None:
            _hook.remove()
            _hook = None


@recorder.observer_hook
def _observe_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    watched = module.__dict__.get(_MARK)
    if watched is None:
        return
    inputs = [*args, *kwargs.values()]
    if not inputs or not isinstance(inputs[0], Tensor):
        return
    x = inputs[0]
    y = output[0] if isinstance(output, tuple) else output
    if watched.routed:
        rows = inputs[1].numel() if len(inputs) > 1 and isinstance(inputs[1], Tensor) else 0
    else:
        rows = x.numel() // max(watched.gemms[0][2], 1)
    # Read now: whether a gradient is due is decided by the forward, and may change before the backward.
    needs_x = x.requires_grad
    needs_w = any(p.requires_grad and p.dim() > 1 for p in module._parameters.values() if p is not None)
    seen = [(recorder.begin(name, False, False, grad=True), 2 * rows * n * k) for name, n, k in watched.gemms]
    for one, flops in seen:
        one.gemm("fwd", HIGH, flops)

    def backward(_: Tensor) -> None:
        for one, flops in seen:
            if needs_x:
                one.gemm("dgrad", HIGH, flops)
            if needs_w:
                one.gemm("wgrad", HIGH, flops)

    if isinstance(y, Tensor) and y.requires_grad:
        y.register_hook(backward)
