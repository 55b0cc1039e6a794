"""What ran: counts of GEMMs and their FLOPs, FP8 and high precision alike.

Every GEMM of an FP8 layer reports itself here, under the layer's name, one of four words and the backend that ran it:

* ``fwd``        the forward
* ``recompute``  the same forward run again inside a backward (activation checkpointing)
* ``dgrad``, ``wgrad``  the two GEMMs of the backward

A GEMM kept in high precision reports the backend :data:`HIGH`. So do, while somebody counts, the linear layers that
the plan left alone; that makes the share of FP8 a counted figure and not a computed one.

Collectors are process-wide, because a backward may run on autograd's own threads, and may be nested.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

HIGH = "high"  # the "backend" of a GEMM in high precision
Key = tuple[str, str, str]  # (layer, gemm, backend)


class Phase(NamedTuple):
    """Why a forward runs: ``counted`` is False on behalf of a dummy, ``recompute`` is True inside a backward."""

    counted: bool
    recompute: bool

    @property
    def gemm(self) -> str:
        return "recompute" if self.recompute else "fwd"


class GemmCounts(Mapping[Key, int]):
    """``counts[(layer, gemm, backend)]`` -> calls, 0 for what never ran; ``counts.flops`` the same keys (2 M N K each).

    ``due`` counts, per (layer, "dgrad" or "wgrad", "fwd" or "recompute"), the forwards that promised such a GEMM, and
    ``came`` the GEMMs that ran, by the kind of forward they belong to. ``gradless`` counts, per layer, the forwards
    that ran without a graph (``no_grad``, or the first run of a reentrant checkpoint).
    A GEMM of all experts in one counts as one of each expert, those without tokens included. ``idle`` counts, per
    layer of experts that run one by one, the experts that a forward gave no token.
    """

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self._flops: Counter[Key] = Counter()
        self._owed: list[tuple[Key, int, Tensor]] = []
        self.due: Counter[Key] = Counter()
        self.came: Counter[Key] = Counter()
        self.gradless: Counter[str] = Counter()
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

    def promised(self, layer: str, gemm: str) -> int:
        """How many backward GEMMs the forwards made necessary.

        A checkpointed forward promises twice when its first run already builds a graph (non-reentrant); the backward
        then goes through that first run alone. Reentrant, only the recomputation promises and keeps it. So what the
        recomputations promised is due where they kept any of it, or where nobody else promised anything.
        """
        first = self.due[(layer, gemm, "fwd")]
        kept = self.came[(layer, gemm, "recompute")] or not first
        return first + (self.due[(layer, gemm, "recompute")] if kept else 0)


_lock = threading.Lock()
_collectors: list[GemmCounts] = []
_state = threading.local()


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

    def hold(self, number: int) -> bool:
        at = bisect_right(self.firsts, number) - 1
        return at >= 0 and number < self.lasts[at]


_MOST_SPANS = 1 << 16  # blocks of a thread whose backward may still be to come
_all_spans: WeakSet[_Spans] = WeakSet()


def _spans() -> _Spans:
    """The spans of this thread."""
    if not hasattr(_state, "spans"):
        _state.spans = _Spans()
        _all_spans.add(_state.spans)
    return _state.spans


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that run inside, whichever thread runs them."""
    counts = GemmCounts()
    with _lock:
        _collectors.append(counts)
        _watch_modules()
    try:
        yield counts
    finally:
        with _lock:
            _collectors[:] = [c for c in _collectors if c is not counts]
            _watch_modules()


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


@contextmanager
def muted() -> Iterator[None]:
    """GEMMs inside enter no count: a backward that runs again over the same graph, which owes each of them once."""
    with _lock:
        held = list(_collectors)
        _collectors.clear()
    try:
        yield
    finally:
        with _lock:
            _collectors[:] = held


def phase() -> Phase:
    """The phase of a forward that starts now."""
    recompute = torch._C._current_graph_task_id() != -1
    counted = getattr(_state, "depth", 0) == 0
    if not recompute:
        _spans()  # marks a thread that makes nodes
    elif counted and _all_spans:
        node = torch._C._current_autograd_node()
        if node is not None:
            # Autograd's own threads (one a GPU) make no nodes: there the node may be any thread's.
            own = getattr(_state, "spans", None)
            counted = not any(s.hold(node._sequence_nr()) for s in ([own] if own is not None else list(_all_spans)))
    return Phase(counted, recompute)


def counting() -> bool:
    return bool(_collectors)


def record(layer: str, gemm: str, backend: str, flops: int) -> None:
    for counts in _collectors:
        counts.calls[(layer, gemm, backend)] += 1
        counts._flops[(layer, gemm, backend)] += flops


def record_grouped(layer: str, gemm: str, backend: str, each: int, sizes: Tensor) -> None:
    """A GEMM of all experts in one: a call for every expert, ``each`` FLOPs for every row of ``sizes`` [experts].

    The sizes may live on a device; they are added up when somebody asks for ``flops``, after the step.
    """
    for counts in _collectors:
        counts.calls[(layer, gemm, backend)] += sizes.shape[0]
        counts._owed.append(((layer, gemm, backend), each, sizes))


def promise(layer: str, gemm: str, when: Phase, calls: int = 1) -> None:
    for counts in _collectors:
        counts.due[(layer, gemm, when.gemm)] += calls


def came(layer: str, gemm: str, when: str, calls: int = 1) -> None:
    """A backward GEMM ran for a forward of the kind ``when``."""
    for counts in _collectors:
        counts.came[(layer, gemm, when)] += calls


def gradless(layer: str, calls: int = 1) -> None:
    for counts in _collectors:
        counts.gradless[layer] += calls


def idle(layer: str, experts: int) -> None:
    for counts in _collectors:
        counts.idle[layer] += experts


# --- linear layers in high precision, seen only while somebody counts -------------------------------------------------


class Watched(NamedTuple):
    """The GEMMs of a module that stays in high precision: (name, N, K) each. ``routed``: the second argument holds
    top-k indices, one row of work for each."""

    gemms: tuple[tuple[str, int, int], ...]
    routed: bool


_MARK = "_fp8_watched"  # in the module's __dict__, so that copies and pickles keep it
_hook: Any = None


def watch(module: nn.Module, watched: Watched) -> None:
    """Let counters see this module, which the plan keeps in high precision."""
    module.__dict__[_MARK] = watched


def _watch_modules() -> None:
    """One hook for all modules, present only while somebody counts: a module nobody counts pays nothing."""
    global _hook
    if _collectors and _hook is None:
        _hook = nn.modules.module.register_module_forward_hook(_observe_module, with_kwargs=True)
    elif not _collectors and _hook is not None:
        _hook.remove()
        _hook = None


def _observe_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    watched = module.__dict__.get(_MARK)
    if watched is None:
        return
    now = phase()
    given = [*args, *kwargs.values()]
    if not now.counted or not given or not isinstance(given[0], Tensor):
        return
    x = given[0]
    y = output[0] if isinstance(output, tuple) else output
    if watched.routed:
        rows = given[1].numel() if len(given) > 1 and isinstance(given[1], Tensor) else 0
    else:
        rows = x.numel() // max(watched.gemms[0][2], 1)
    needs_x = x.requires_grad
    needs_w = any(p.requires_grad and p.dim() > 1 for p in module._parameters.values() if p is not None)
    for name, n, k in watched.gemms:
        record(name, now.gemm, HIGH, 2 * rows * n * k)

    def backward(_: Tensor) -> None:
        for name, n, k in watched.gemms:
            if needs_x:
                record(name, "dgrad", HIGH, 2 * rows * n * k)
            if needs_w:
                record(name, "wgrad", HIGH, 2 * rows * n * k)

    if isinstance(y, Tensor) and y.requires_grad:
        y.register_hook(backward)
