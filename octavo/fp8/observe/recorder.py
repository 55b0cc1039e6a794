"""The recorder: layers report to it which GEMMs ran, with which operands and gradients.

A layer calls :func:`begin` once per forward and keeps the result for its backward. There are four kinds of listeners:
counters of GEMMs (:mod:`octavo.fp8.observe.counts`), watchers of metrics (:mod:`octavo.fp8.observe.health`), operand
observers, which see the high-precision operands of every GEMM, including GEMMs that do not run in FP8
(:mod:`octavo.fp8.adapting.judge`), and a checker, which sees the results of selected FP8 GEMMs
(:mod:`octavo.fp8.proof.checking`). Without listeners a report only reads an empty list.

A forward has one of two kinds: ``fwd``, or ``recompute`` if activation checkpointing reruns it inside a backward.
Inside :func:`uncounted` it reports nothing. Listeners are process-wide, because autograd may run a backward on its own
threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from octavo.fp8 import metrics
from octavo.fp8.arithmetic.cast import Quantized

HIGH = "high"
"""The "backend" of a GEMM in high precision, in the keys of :class:`~octavo.fp8.observe.counts.GemmCounts`."""


class Counter(Protocol):
    """Counts GEMMs. For grouped GEMMs ``sizes`` [experts] has the rows of each expert, and ``flops`` is per row."""

    def on_gemm(self, layer: str, gemm: str, backend: str, flops: int, sizes: Tensor | None) -> None: ...

    def on_expect(self, layer: str, gemm: str, kind: str, calls: int) -> None: ...

    def on_ran(self, layer: str, gemm: str, kind: str, calls: int) -> None: ...

    def on_no_grad(self, layer: str, calls: int) -> None: ...

    def on_idle(self, layer: str, experts: int) -> None: ...


class Watcher(Protocol):
    """Receives metrics of operands and gradients."""

    def on_operand(self, layer: str, role: str, values: metrics.OperandMetrics) -> None: ...

    def on_gradient(self, layer: str, cosine: float) -> None: ...


class OperandObserver(Protocol):
    """Receives both operands of each GEMM in high precision: x [M, K] and w [N, K] for fwd, dy [M, N] and w for dgrad,
    dy and x for wgrad. Experts are reported one at a time."""

    def on_product(self, layer: str, gemm: str, a: Tensor, b: Tensor) -> None: ...


class Result(NamedTuple):
    """The result of one FP8 GEMM a x b: fwd (x, w), dgrad (dy, w) or wgrad (dy, x). For experts, of one expert.

    ``a`` and ``b`` are the high-precision tensors that ``a_q`` and ``b_q`` were cast from, or None if they are not
    available or nothing was cast. ``noted``: the scales of x and dy came from the histories of delayed scaling. ``out``
    is the result that the step uses, and ``again()`` runs the same GEMM again.
    """

    gemm: str
    backend: str
    a: Tensor | None
    a_q: Quantized
    b: Tensor | None
    b_q: Quantized
    noted: bool
    bias: Tensor | None
    out: Tensor
    again: Callable[[], Tensor]


class Checker(Protocol):
    """Recomputes the results of some FP8 GEMMs of a step."""

    def gemms_of(self, layer: str) -> Collection[str]:
        """Return the GEMMs of a layer to check. Constant during a step, because layers save tensors for it."""

    def pick(self, count: int) -> int:
        """Return the index of the expert to check, out of ``count``."""

    def on_result(self, layer: str, result: Result) -> None: ...


_lock = threading.Lock()
_counters: list[Counter] = []
_watchers: list[Watcher] = []
_observers: list[OperandObserver] = []
_checkers: list[Checker] = []  # at most one
_muted = 0  # active `mute_reports` contexts that removed watchers or observers


@contextmanager
def attach(
    counter: Counter | None = None,
    watcher: Watcher | None = None,
    observer: OperandObserver | None = None,
    checker: Checker | None = None,
) -> Iterator[None]:
    """Report everything that runs inside the context, on any thread. Raises RuntimeError for a second checker."""
    if checker is not None and _checkers:
        raise RuntimeError("A checker is already attached to this step; only one checker can be attached at a time.")
    with _lock:
        _counters.extend(() if counter is None else (counter,))
        _watchers.extend(() if watcher is None else (watcher,))
        _observers.extend(() if observer is None else (observer,))
        _checkers.extend(() if checker is None else (checker,))
    try:
        yield
    finally:
        with _lock:
            _counters[:] = [c for c in _counters if c is not counter]
            _watchers[:] = [w for w in _watchers if w is not watcher]
            _observers[:] = [o for o in _observers if o is not observer]
            _checkers[:] = [c for c in _checkers if c is not checker]


@contextmanager
def mute_reports() -> Iterator[None]:
    """Report nothing inside the context, for a second backward over the same graph. Checkers still receive reports,
    because the second run can have faults too.

    :func:`is_watching` keeps the value that it had in the forward: a recomputed forward must save the same tensors, or
    torch raises.
    """
    global _muted
    with _lock:
        removed = list(_counters), list(_watchers), list(_observers)
        _counters.clear()
        _watchers.clear()
        _observers.clear()
        _muted += bool(removed[1] or removed[2])
    try:
        yield
    finally:
        with _lock:
            _counters[:], _watchers[:], _observers[:] = removed
            _muted -= bool(removed[1] or removed[2])


def counters() -> tuple[Counter, ...]:
    """Return the attached counters."""
    return tuple(_counters)


def is_watching() -> bool:
    """Return True if blocks must run as single layers, so that each layer can be measured. A checker does not require
    this: it checks fused blocks as they are, so that it does not change the step."""
    return bool(_watchers or _observers or _muted)


def is_active() -> bool:
    """Return True if anything listens: a cheap question before a report is put together."""
    return bool(_counters or _watchers or _observers or _checkers)


def needs_operands() -> bool:
    """Return True if a listener reads operands or results of GEMMs, which compiled graphs do not report."""
    return bool(_watchers or _observers or _checkers)


Hook = TypeVar("Hook", bound=Callable[..., Any])


def observer_hook(hook: Hook) -> Hook:
    """Mark a global module hook that only observes, so that fused blocks stay fused."""
    hook._octavo_watches = True  # type: ignore[attr-defined]
    return hook


class LayerRecord:
    """One forward of one layer, and its backward.

    ``counters`` are the attached ones, or none if the forward is not counted; then :meth:`gemm` has nothing to report.
    ``keeps_x``: the layer saves x in high precision for metrics. ``is_observed``: an observer receives the operands of
    its GEMMs. ``checked_gemms``: the GEMMs whose results are checked. ``shows_operands``: False if the codes were not
    cast from the reported operands, as in a fused block.
    """

    __slots__ = (
        *("calls", "checked_gemms", "counted", "counters", "has_counters", "is_observed", "keeps_x", "kind"),
        *("layer", "recompute", "shows_operands", "sizes"),
    )

    def __init__(self, layer: str, now: Phase, sizes: Tensor | None) -> None:
        self.layer, self.sizes, self.calls = layer, sizes, 1 if sizes is None else sizes.shape[0]
        self.counted, self.recompute = now
        self.kind = "recompute" if now.recompute else "fwd"
        self.counters: Sequence[Counter] = _counters if now.counted else ()
        self.has_counters = bool(self.counters)
        self.keeps_x = now.counted and bool(_watchers or _observers or _muted)  # the same as watching()
        self.is_observed = now.counted and bool(_observers)
        self.checked_gemms: Collection[str] = _checkers[0].gemms_of(layer) if _checkers and now.counted else ()
        self.keeps_x |= "wgrad" in self.checked_gemms
        self.shows_operands = True

    def gemm(self, gemm: str, backend: str, flops: int) -> None:
        """Report a GEMM: "fwd", "dgrad" or "wgrad". ``flops`` is per row for grouped experts."""
        for counter in self.counters:
            if gemm == "fwd":
                counter.on_gemm(self.layer, self.kind, backend, flops, self.sizes)
            else:
                counter.on_gemm(self.layer, gemm, backend, flops, self.sizes)
                counter.on_ran(self.layer, gemm, self.kind, self.calls)

    def operand(self, role: str, x: Tensor, q: Quantized) -> None:
        """Report an operand and its codes; an empty operand has no metrics."""
        if x.numel() and _watchers:
            values = metrics.operand_metrics(x, q)
            for watcher in _watchers:
                watcher.on_operand(self.layer, role, values)

    def gradient(self, dw: Tensor, dy: Tensor, x: Tensor) -> None:
        """Report a weight gradient dw [N, K]: compare it with dyT x in fp32, of dy [M, N] and x [M, K]."""
        if x.numel() and _watchers:
            cosine = metrics.cosine(dw, dy.float().t() @ x.float())
            for watcher in _watchers:
                watcher.on_gradient(self.layer, cosine)

    def product(self, gemm: str, a: Tensor, b: Tensor) -> None:
        """Report the high-precision operands of a GEMM, unless one is empty."""
        if a.numel() and b.numel():
            for observer in _observers:
                observer.on_product(self.layer, gemm, a, b)

    def pick(self, count: int) -> int:
        """Return the index of the expert to check, out of ``count``."""
        return _checkers[0].pick(count) if _checkers else 0

    def result(self, product: Result) -> None:
        """Report the result of a GEMM in ``checked_gemms``, unless it is empty."""
        if product.out.numel():
            for checker in _checkers:
                checker.on_result(self.layer, product)


def begin(layer: str, dgrad: bool, wgrad: bool, grad: bool, sizes: Tensor | None = None) -> LayerRecord:
    """Begin the forward of a layer. ``dgrad``, ``wgrad``: whether counters expect these GEMMs; ``grad``: whether
    gradients are enabled; ``sizes``: see :class:`Counter`."""
    seen = LayerRecord(layer, phase(), sizes)
    if seen.has_counters:
        for counter in _counters:
            for gemm, due in (("dgrad", dgrad), ("wgrad", wgrad)):
                if due:
                    counter.on_expect(layer, gemm, seen.kind, seen.calls)
            if not grad and not seen.recompute:
                counter.on_no_grad(layer, seen.calls)
    return seen


def count_forward(layer: str, backend: str, flops: int, dgrad: bool, wgrad: bool, grad: bool) -> None:
    """Count fwd of a compiled graph, as :func:`begin` and :meth:`LayerRecord.gemm` do."""
    now = phase()
    if not now.counted:
        return
    kind = "recompute" if now.recompute else "fwd"
    for counter in _counters:
        if dgrad:
            counter.on_expect(layer, "dgrad", kind, 1)
        if wgrad:
            counter.on_expect(layer, "wgrad", kind, 1)
        if not grad and not now.recompute:
            counter.on_no_grad(layer, 1)
        counter.on_gemm(layer, kind, backend, flops, None)


def count_backward(layer: str, gemm: str, backend: str, flops: int) -> None:
    """Count dgrad or wgrad of a compiled graph, whose backward does not know the record of its forward: the GEMM counts
    as one of a first forward, also if that forward was a recomputation."""
    if _counters and phase().counted:
        for counter in _counters:
            counter.on_gemm(layer, gemm, backend, flops, None)
            counter.on_ran(layer, gemm, "fwd", 1)


def record_idle_experts(layer: str, experts: int) -> None:
    """Report experts that got no token, in a counted forward of a layer that runs its experts one by one."""
    if _counters and phase() == Phase(counted=True, recompute=False):
        for counter in _counters:
            counter.on_idle(layer, experts)


# --- why a forward runs -----------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """Why a forward runs: ``counted`` is False inside :func:`uncounted`, ``recompute`` is True inside a backward."""

    counted: bool
    recompute: bool


class _Spans:
    """Sequence numbers of the autograd nodes that one thread created inside uncounted(). A recomputation of such a
    forward is recognized by the node whose backward runs it. Each thread numbers its nodes in ascending order, so
    spans are sorted."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        if len(self.firsts) >= _MOST_SPANS:
            del self.firsts[: _MOST_SPANS // 2], self.lasts[: _MOST_SPANS // 2]
        self.firsts.append(first)
        self.lasts.append(last)

    def contains(self, number: int) -> bool:
        at = bisect_right(self.firsts, number) - 1
        return at >= 0 and number < self.lasts[at]


_MOST_SPANS = 1 << 16  # spans per thread whose backward may still be pending
_all_spans: WeakSet[_Spans] = WeakSet()
_state = threading.local()


def _spans() -> _Spans:
    """Return the spans of this thread."""
    if not hasattr(_state, "spans"):
        _state.spans = _Spans()
        _all_spans.add(_state.spans)
    return _state.spans


@contextmanager
def uncounted() -> Iterator[None]:
    """Exclude forwards inside the context, their recomputations and backwards from amax histories, health and counts.

    For results that are multiplied by zero, such as a dummy image that keeps the ranks of a sharded vision tower in
    step.
    """
    spans, first = _spans(), torch.autograd._get_sequence_nr()
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        yield
    finally:
        _state.depth -= 1
        last = torch.autograd._get_sequence_nr()
        if last > first and _state.depth == 0:
            spans.add(first, last)


def phase() -> Phase:
    """Return the phase of a forward that starts now."""
    recompute = torch._C._current_graph_task_id() != -1
    counted = getattr(_state, "depth", 0) == 0
    if not recompute:
        if not hasattr(_state, "spans"):
            _spans()  # marks this thread as one that creates nodes
    elif counted and _all_spans:
        node = torch._C._current_autograd_node()
        if node is not None:
            # Autograd's own threads (one per GPU) create no nodes, so there the node may come from any thread.
            thread_spans = getattr(_state, "spans", None)
            counted = not any(
                s.contains(node._sequence_nr())
                for s in ([thread_spans] if thread_spans is not None else list(_all_spans))
            )
    return Phase(counted, recompute)
