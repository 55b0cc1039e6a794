"""Count the GEMMs that actually ran: the code that runs a GEMM reports it, and nothing is inferred from shapes.

Each GEMM of an FP8 layer is reported with one of four kinds and the backend that ran it:

* ``fwd``        the forward
* ``recompute``  a forward that is rerun inside a backward (activation checkpointing)
* ``dgrad``, ``wgrad``  the two GEMMs of the backward

GEMMs in high precision are reported with the backend :data:`HIGH`. This includes the linear layers that the plan leaves
in high precision (:mod:`octavo.fp8.blocks.counted`), so the share of FP8 is counted, not computed. Compiled graphs
report what they run (:mod:`octavo.fp8.dense.graph_counts`). Counters may be nested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from octavo.base.accelerator import runs_inductor_graphs
from octavo.fp8.observe import recorder
from octavo.fp8.observe.recorder import HIGH

Key = tuple[str, str, str]  # (layer, gemm, backend)


class GemmCounts(Mapping[Key, int]):
    """``counts[(layer, gemm, backend)]`` -> calls, 0 if it never ran; ``counts.flops`` has the same keys (2 M N K
    each).

    ``expected`` counts, per (layer, "dgrad" or "wgrad", "fwd" or "recompute"), the forwards that require such a GEMM,
    and ``ran`` the GEMMs that ran, by the kind of their forward. ``no_grad`` counts, per layer, the forwards without a
    graph (``torch.no_grad``, or the first run of a reentrant checkpoint). A grouped GEMM counts once per expert,
    including experts without tokens. ``idle`` counts, per layer whose experts run one by one, the experts that got no
    token in a forward.
    """

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self._flops: Counter[Key] = Counter()
        self._pending_flops: list[tuple[Key, int, Tensor]] = []
        self.expected: Counter[Key] = Counter()
        self.ran: Counter[Key] = Counter()
        self.no_grad: Counter[str] = Counter()
        self.idle: Counter[str] = Counter()

    @property
    def flops(self) -> Counter[Key]:
        """FLOPs by key. Waits for the device if it holds row counts of experts."""
        while self._pending_flops:
            key, each, rows = self._pending_flops.pop()
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
        """Count calls, optionally of one gemm, one layer, only FP8 (True) or only high precision (False)."""
        return sum(
            n
            for (a, g, b), n in self.calls.items()
            if gemm in (None, g) and layer in (None, a) and fp8 in (None, b != HIGH)
        )

    def due(self, layer: str, gemm: str) -> int:
        """Return how many backward GEMMs the forwards require.

        With non-reentrant checkpointing both runs of a forward build a graph and expect the GEMM, but the backward uses
        only the first graph. With reentrant checkpointing only the recomputation expects it. So the GEMMs expected by
        recomputations count if any of them ran, or if no first run expects one.
        """
        first = self.expected[(layer, gemm, "fwd")]
        ran = self.ran[(layer, gemm, "recompute")] or not first
        return first + (self.expected[(layer, gemm, "recompute")] if ran else 0)

    def add(self, other: GemmCounts) -> None:
        """Add the counts of ``other``, a CUDA graph that was replayed; its size tensors hold the values of this
        replay."""
        for name in ("calls", "_flops", "expected", "ran", "no_grad", "idle"):
            getattr(self, name).update(getattr(other, name))
        self._pending_flops += [(key, each, rows.clone()) for key, each, rows in other._pending_flops]

    # Called by the recorder: see `recorder.Counter`.

    def on_gemm(self, layer: str, gemm: str, backend: str, flops: int, sizes: Tensor | None) -> None:
        key = (layer, gemm, backend)
        if sizes is None:
            self.calls[key] += 1
            self._flops[key] += flops
        else:  # sizes may be on a device; they are summed when `flops` is read, after the step
            self.calls[key] += sizes.shape[0]
            self._pending_flops.append((key, flops, sizes))

    def on_expect(self, layer: str, gemm: str, kind: str, calls: int) -> None:
        self.expected[(layer, gemm, kind)] += calls

    def on_ran(self, layer: str, gemm: str, kind: str, calls: int) -> None:
        self.ran[(layer, gemm, kind)] += calls

    def on_no_grad(self, layer: str, calls: int) -> None:
        self.no_grad[layer] += calls

    def on_idle(self, layer: str, experts: int) -> None:
        self.idle[layer] += experts


_recording = 0  # active record_gemms contexts


@contextmanager
def record_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs of a CUDA graph capture, which are recorded and not run; other counters do not see them. Replays
    report them with :func:`report_replay`."""
    global _recording
    _recording += 1
    try:
        with recorder.mute_reports(), count_gemms() as tape:
            yield tape
    finally:
        _recording -= 1


def is_recording() -> bool:
    """Return True inside :func:`record_gemms`."""
    return _recording > 0


def report_replay(tape: GemmCounts) -> None:
    """Report the GEMMs of a replayed graph to all active counters."""
    for counter in recorder.counters():
        if isinstance(counter, GemmCounts):
            counter.add(tape)


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that run inside the context, on any thread, also in graphs of ``torch.compile``.

    Raises RuntimeError, where a graph runs or when the context ends, for graphs that cannot be counted: CUDA graphs of
    ``torch.compile(mode="reduce-overhead")``, and weights that are not a layer's parameter.
    """
    counts = GemmCounts()
    with recorder.attach(counter=counts):
        yield counts
    if not counts and runs_inductor_graphs():
        raise RuntimeError(
            "fp8.count_gemms counted nothing, and this process runs CUDA graphs of torch.compile (mode "
            "reduce-overhead), whose replays report nothing. Count under "
            'torch.compiler.set_stance("force_eager"), or compile without CUDA graphs.'
        )


# --- modules in high precision ----------------------------------------------------------------------------------------


class HighPrecisionGemms(NamedTuple):
    """The GEMMs of a module that stays in high precision, each as (name, N, K). ``routed``: the second argument of its
    forward holds top-k indices, and each index is one row of work."""

    gemms: tuple[tuple[str, int, int], ...]
    routed: bool

    def rows(self, inputs: Sequence[object]) -> int:
        """Return the rows of work of a forward, from its arguments; 0 if they are not tensors."""
        if not inputs or not isinstance(inputs[0], Tensor):
            return 0
        if self.routed:
            return inputs[1].numel() if len(inputs) > 1 and isinstance(inputs[1], Tensor) else 0
        return inputs[0].numel() // max(self.gemms[0][2], 1)


_MARK = "_fp8_watched"  # in the module's __dict__, so that copies and pickles keep it


def watch_module(module: nn.Module, watched: HighPrecisionGemms) -> None:
    """Mark a module that the plan keeps in high precision; its forward reports with :func:`report_module`."""
    module.__dict__[_MARK] = watched


def gemms_of(module: nn.Module) -> HighPrecisionGemms | None:
    """Return what :func:`watch_module` marked the module with, or None."""
    watched: HighPrecisionGemms | None = module.__dict__.get(_MARK)
    return watched


def report_module(module: nn.Module, inputs: Sequence[object], output: object) -> None:
    """Report a forward of a marked module, and its backward when that runs."""
    watched = gemms_of(module)
    if watched is None or not inputs or not isinstance(inputs[0], Tensor):
        return
    rows, y = watched.rows(inputs), output[0] if isinstance(output, tuple) else output
    # Read now: the forward decides whether a gradient is needed, and the flags may change before the backward.
    needs_x = inputs[0].requires_grad
    needs_w = any(p.requires_grad and p.dim() > 1 for p in module._parameters.values() if p is not None)
    records = [(recorder.begin(name, False, False, grad=True), 2 * rows * n * k) for name, n, k in watched.gemms]
    for record, flops in records:
        record.gemm("fwd", HIGH, flops)

    def backward(_: Tensor) -> None:
        for record, flops in records:
            if needs_x:
                record.gemm("dgrad", HIGH, flops)
            if needs_w:
                record.gemm("wgrad", HIGH, flops)

    if isinstance(y, Tensor) and y.requires_grad:
        y.register_hook(backward)
