"""The one place that layers report to: which GEMMs ran, on which operands, with which gradients.

A layer calls :func:`begin` once a forward and keeps the result for its backward. Listeners attach themselves from
outside: counters of GEMMs (:mod:`octavo.fp8.observe.counts`), watchers of figures (:mod:`octavo.fp8.observe.health`),
judges, which see the operands of GEMMs in high precision, also of GEMMs that do not run in FP8
(:mod:`octavo.fp8.adapting.judge`), and checkers, which see the result of an FP8 GEMM that they chose
(:mod:`octavo.fp8.proof.checking`). Without listeners a report only looks at an empty list.

The forward of a layer runs as one of two kinds, ``fwd`` or ``recompute`` (the same again inside a backward, under
activation checkpointing); inside :func:`uncounted` it reports nothing. Listeners are process-wide, because a
backward may run on autograd's own threads.
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
    """Counts GEMMs. ``sizes`` [experts]: the rows of each expert, where one GEMM of all experts is reported; the FLOPs
    are then per row."""

    def on_gemm(self, layer: str, gemm: str, backend: str, flops: int, sizes: Tensor | None) -> None: ...

    def on_expect(self, layer: str, gemm: str, kind: str, calls: int) -> None: ...

    def on_ran(self, layer: str, gemm: str, kind: str, calls: int) -> None: ...

    def on_no_grad(self, layer: str, calls: int) -> None: ...

    def on_idle(self, layer: str, experts: int) -> None: ...


class Watcher(Protocol):
    """Receives figures of operands and gradients."""

    def on_operand(self, layer: str, role: str, figures: metrics.OperandMetrics) -> None: ...

    def on_gradient(self, layer: str, cosine: float) -> None: ...


class OperandObserver(Protocol):
    """Receives both operands of GEMMs in high precision: x [M, K] and w [N, K] of fwd, dy [M, N] and w of dgrad, dy and
    x of wgrad; one expert at a time."""

    def on_product(self, layer: str, gemm: str, a: Tensor, b: Tensor) -> None: ...


class Result(NamedTuple):
    """The result of one FP8 GEMM: a x b of fwd (x, w), dgrad (dy, w) or wgrad (dy, x); of experts, for one expert.

    ``a`` and ``b`` are what ``a_q`` and ``b_q`` were cast from in high precision; None where that is not at hand, or
    nothing was cast. ``noted``: the scales of x and dy were noted before, in the histories of delayed scaling. ``out``
    is as the step goes on with it, and ``again()`` the same GEMM once more.
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
    """Computes the results of some FP8 GEMMs of a step again."""

    def gemms_of(self, layer: str) -> Collection[str]:
        """The GEMMs of a layer that it asks for. The same all through a step: layers save for it what they save."""

    def pick(self, count: int) -> int:
        """Which of ``count`` experts it wants to see."""

    def on_result(self, layer: str, result: Result) -> None: ...


_lock = threading.Lock()
_counters: list[Counter] = []
_watchers: list[Watcher] = []
_observers: list[OperandObserver] = []
_checkers: list[Checker] = []  # one at most
_muted = 0  # how many `muted` are open that had watchers or judges before


@contextmanager
def attach(
    counter: Counter | None = None,
    watcher: Watcher | None = None,
    observer: OperandObserver | None = None,
    checker: Checker | None = None,
) -> Iterator[None]:
    """Report what runs inside to a listener, on any thread. Raises RuntimeError for a second checker."""
    if checker is not None and _checkers:
        raise RuntimeError("A step is checked already; there can be one checker at a time.")
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
    """Report nothing that runs inside: a backward that runs again over the same graph, which is reported once. Checkers
    still receive reports: what is computed twice may go wrong twice.

    Layers still are :func:`is_watching`, as they were in its forward: what is computed again must save what it saved,
    or torch refuses it.
    """
    global _muted
    with _lock:
        held = list(_counters), list(_watchers), list(_observers)
        _counters.clear()
        _watchers.clear()
        _observers.clear()
        _muted += bool(held[1] or held[2])
    try:
        yield
    finally:
        with _lock:
            _counters[:], _watchers[:], _observers[:] = held
            _muted -= bool(held[1] or held[2])


def counters() -> tuple[Counter, ...]:
    """The counters that are attached now."""
    return tuple(_counters)


def is_watching() -> bool:
    """Whether blocks run as single layers, for figures of each. A checker sees of fused ones what there is to see, so
    that a step computes what it computes without."""
    return bool(_watchers or _observers or _muted)


Hook = TypeVar("Hook", bound=Callable[..., Any])


def observer_hook(hook: Hook) -> Hook:
    """Mark a hook on all modules that only watches, so that blocks run as they run without it."""
    hook._octavo_watches = True  # type: ignore[attr-defined]
    return hook


class LayerRecord:
    """One forward of one layer, and its backward. ``heard``: counters are open. ``watched``: the layer
    saves x in high precision for figures. ``judged``: a judge wants the operands of its GEMMs. ``checked``: the GEMMs
    whose results a checker wants. ``shown``: False where its codes were not cast from the operands that it reports, as
    within a fused block. ``counters``: those attached now, none for a dummy; without any there is nothing to report
    with :meth:`gemm`."""

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
        """A GEMM that runs: "fwd", "dgrad" or "wgrad"; ``flops`` of one row where experts run grouped."""
        for counter in self.counters:
            if gemm == "fwd":
                counter.on_gemm(self.layer, self.kind, backend, flops, self.sizes)
            else:
                counter.on_gemm(self.layer, gemm, backend, flops, self.sizes)
                counter.on_ran(self.layer, gemm, self.kind, self.calls)

    def operand(self, role: str, x: Tensor, q: Quantized) -> None:
        """An operand and its codes; an empty one has no figures."""
        if x.numel() and _watchers:
            figures = metrics.operand_metrics(x, q)
            for watcher in _watchers:
                watcher.on_operand(self.layer, role, figures)

    def gradient(self, dw: Tensor, dy: Tensor, x: Tensor) -> None:
        """A weight gradient dw [N, K], held against dyT x in fp32, from dy [M, N] and x [M, K] in high precision."""
        if x.numel() and _watchers:
            cosine = metrics.cosine(dw, dy.float().t() @ x.float())
            for watcher in _watchers:
                watcher.on_gradient(self.layer, cosine)

    def product(self, gemm: str, a: Tensor, b: Tensor) -> None:
        """The operands of a GEMM in high precision; with an empty operand there is nothing to judge."""
        if a.numel() and b.numel():
            for judge in _observers:
                judge.on_product(self.layer, gemm, a, b)

    def pick(self, count: int) -> int:
        """Which of ``count`` experts is to be checked."""
        return _checkers[0].pick(count) if _checkers else 0

    def result(self, product: Result) -> None:
        """The result of a GEMM in ``checked``; without rows there is nothing to check."""
        if product.out.numel():
            for checker in _checkers:
                checker.on_result(self.layer, product)


def begin(layer: str, dgrad: bool, wgrad: bool, grad: bool, sizes: Tensor | None = None) -> LayerRecord:
    """A forward of a layer begins. Where ``dgrad`` and ``wgrad`` will be due, counters expect them; ``grad``: gradients
    are enabled; ``sizes``: see :class:`Counter`."""
    seen = LayerRecord(layer, phase(), sizes)
    if seen.has_counters:
        for counter in _counters:
            for gemm, due in (("dgrad", dgrad), ("wgrad", wgrad)):
                if due:
                    counter.on_expect(layer, gemm, seen.kind, seen.calls)
            if not grad and not seen.recompute:
                counter.on_no_grad(layer, seen.calls)
    return seen


def record_idle_experts(layer: str, experts: int) -> None:
    """Experts of a layer that runs them one by one got no token, in a forward that counts."""
    if _counters and phase() == Phase(counted=True, recompute=False):
        for counter in _counters:
            counter.on_idle(layer, experts)


# --- why a forward runs -----------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """Why a forward runs: ``counted`` is False on behalf of a dummy, ``recompute`` is True inside a backward."""

    counted: bool
    recompute: bool


class _Spans:
    """Sequence numbers of the autograd nodes that one thread made inside uncounted(): a checkpoint that recomputes a
    dummy's forward is recognised by the node in whose backward it happens. Each thread numbers its own nodes, upwards,
    so that spans come sorted."""

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


_MOST_SPANS = 1 << 16  # blocks of a thread whose backward may still be to come
_all_spans: WeakSet[_Spans] = WeakSet()
_state = threading.local()


def _spans() -> _Spans:
    """The spans of this thread."""
    if not hasattr(_state, "spans"):
        _state.spans = _Spans()
        _all_spans.add(_state.spans)
    return _state.spans


@contextmanager
def uncounted() -> Iterator[None]:
    """Forwards inside, their recomputations and their backwards enter no amax history, health figure or GEMM count.

    For work whose result is multiplied by zero: the dummy image that keeps a sharded vision tower in step.
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
    """The phase of a forward that starts now."""
    recompute = torch._C._current_graph_task_id() != -1
    counted = getattr(_state, "depth", 0) == 0
    if not recompute:
        if not hasattr(_state, "spans"):
            _spans()  # marks a thread that makes nodes
    elif counted and _all_spans:
        node = torch._C._current_autograd_node()
        if node is not None:
            # Autograd's own threads (one a GPU) create no nodes: there the node may come from any thread.
            thread_spans = getattr(_state, "spans", None)
            counted = not any(
                s.contains(node._sequence_nr())
                for s in ([thread_spans] if thread_spans is not None else list(_all_spans))
            )
    return Phase(counted, recompute)
