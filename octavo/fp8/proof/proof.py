"""Check counted GEMMs against the plan.

In a step with n forwards (micro-batches) of a component, each of its FP8 layers must run::

    fwd        n times, or a multiple of n if the model calls it more often; experts n times each, including idle ones
               (only the local experts of this rank); a head at least n times: once per block of the vocabulary
    recompute  at most as often as fwd
    wgrad      as often as fwd; never for a frozen weight
    dgrad      once for each forward whose input requires a gradient

on the planned backend, and layers in high precision must not run in FP8. Differences raise :class:`ProofError`. If
plans follow each other (:meth:`Proof.switch_plan`), each of them is checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.fp8.arithmetic.errors import ProofError
from octavo.fp8.observe.counts import HIGH, GemmCounts
from octavo.fp8.planning.plan import Plan
from octavo.fp8.planning.rows import PlanRow
from octavo.fp8.planning.table import summary
from octavo.fp8.policy.decisions import OUTSIDE
from octavo.fp8.policy.topology import CONVENTIONS

_BACKWARD = ("dgrad", "wgrad")
_Ran = dict[tuple[str, str], int]  # one layer's calls by (gemm, backend)


class Proof:
    """Checks counts against a plan and accumulates them.

    ``pending`` has the components with FP8 layers that no observed step has used yet (a text-only batch does not use
    the image encoder). ``dealt``: number of ranks that the experts of a layer are distributed over. ``parts``:
    additional components to check, such as those that are FP8 in another plan of the run. ``step``: first step of the
    plan.
    """

    def __init__(self, plan: Plan, dealt: int = 1, parts: Iterable[str] = (), step: int = 1) -> None:
        self.dealt, self.parts = dealt, frozenset(parts)
        self._spans: list[dict[str, Any]] = []
        self.switch_plan(plan, step)
        self.missing: list[str] = []
        self.unused: list[str] = []
        self._calls: Counter[tuple[str, str, str]] = Counter()  # (component, gemm, backend)
        self._flops: Counter[tuple[str, str, bool]] = Counter()  # (component, gemm, FP8)

    def __repr__(self) -> str:
        waits = f"not reached yet: {', '.join(sorted(self.pending))}" if self.pending else "every component reached"
        return f"Proof({summary(self.plan.rows)}; {waits})"

    def switch_plan(self, plan: Plan, step: int) -> None:
        """Check against another plan from ``step`` on; its counts start at zero."""
        if self._spans:
            self._finish_span(step - 1)
        self.plan, self.pending = plan, {r.component for r in plan.rows if r.fp8} | self.parts
        self._spans.append({"steps": [step, None]})
        self._span_flops: Counter[bool] = Counter()  # FLOPs under this plan, by whether they ran in FP8

    def _finish_span(self, step: int | None) -> None:
        """Record the counts of the current plan."""
        total = sum(self._span_flops.values())
        share = self._span_flops[True] / total if total else None
        self._spans[-1] |= {"share": share, "planned": self.plan.share, "pending": sorted(self.pending)}
        self._spans[-1]["steps"][1] = step

    def observe(self, counts: GemmCounts, forwards: Mapping[str, int]) -> None:
        """Check one step, counted from its first forward to the end of its backward.

        Args:
            counts: from :func:`octavo.fp8.count_gemms`.
            forwards: component -> number of its forwards in the step, without uncounted ones.

        Raises:
            ProofError: the counts do not match. The message has the layers, the planned and the counted GEMMs.
        """
        known = {*self.plan.parts, *(self.plan.components or CONVENTIONS), "foundation"}
        unknown = [c for c in forwards if c not in known]
        if any(forwards[c] > 0 for c in unknown):
            raise ProofError(
                f"forwards names {', '.join(map(repr, unknown))}, but the plan has the components "
                f"{', '.join(self.plan.parts) or '(none)'}. Count the forwards of these."
            )
        ran: dict[str, _Ran] = defaultdict(dict)
        for (layer, gemm, backend), calls in counts.items():
            if calls:
                ran[layer][gemm, backend] = calls
        # Before the checks, so that the reported share includes a step that fails them.
        self._add_counts(counts)
        problems: list[str] = []
        for component, n in forwards.items():
            rows = [r for r in self.plan.rows if r.component == component and r.fp8]
            if n <= 0 or not rows:
                continue
            unused = [r.name for r in rows if _is_unused(r, counts, ran[r.name])]
            if len(unused) == len(rows):
                problems.append(f"{component}: no backward reached any of its FP8 layers")
            for row in rows:
                expected = n * ((row.row.experts or self.dealt) // self.dealt)
                mismatches = _list_mismatches(row, counts, ran[row.name], expected, row.name in unused)
                problems += [f"{row.name}: {p}" for p in mismatches]
            self.unused += [u for u in unused if u not in self.unused]
        problems += self._unplanned_fp8(ran)
        if problems:
            self.missing += problems
            rest = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ProofError(
                f"FP8 did not run as planned: {'; '.join(problems[:5])}{rest}. Every layer of the plan must be called "
                "as a module in each forward of its component; leave a layer out with a rule (recipe: off) if the "
                "model does not use it so."
            )
        self.pending -= {c for c, n in forwards.items() if n > 0}

    def _unplanned_fp8(self, ran: Mapping[str, _Ran]) -> list[str]:
        """Return FP8 GEMMs of layers that are planned in high precision."""
        return [
            f"{row.name}: planned in high precision, {calls} {gemm} ran on {backend}"
            for row in self.plan.rows
            if not row.fp8
            for (gemm, backend), calls in ran.get(row.name, {}).items()
            if backend != HIGH
        ]

    def _add_counts(self, counts: GemmCounts) -> None:
        """Add all counts to the shares, also of components that are not checked."""
        rows = {r.name: r for r in self.plan.rows}
        for key, calls in counts.items():
            layer, gemm, backend = key
            row = rows.get(layer)
            if row is None:
                continue
            self._calls[(row.component, gemm, backend)] += calls
            if row.kind not in OUTSIDE:
                self._flops[(row.component, gemm, backend != HIGH)] += counts.flops[key]
                self._span_flops[backend != HIGH] += counts.flops[key]

    def share(self, component: str | None = None) -> float | None:
        """Return the share of counted linear FLOPs in FP8 (0 to 1), overall or of one component, or None without
        counts."""
        counted = {k: v for k, v in self._flops.items() if component in (None, k[0])}
        total = sum(counted.values())
        return sum(v for k, v in counted.items() if k[2]) / total if total else None

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON types: ``share`` and ``shares`` (of linear FLOPs in FP8, by component),
        ``fp8_gemms`` and ``high_gemms`` (calls), ``components`` (calls by gemm and backend), ``pending``, ``missing``
        (mismatches), ``unused`` (layers whose output did not reach the loss), and, if the plan changed, ``spans`` with
        their steps, counted share and planned share."""
        components: dict[str, dict[str, dict[str, int]]] = {}
        for (component, gemm, backend), calls in self._calls.items():
            components.setdefault(component, {}).setdefault(gemm, {})[backend] = calls
        seen = list(dict.fromkeys(c for c, _, _ in self._flops))
        self._finish_span(None)
        return {
            "share": self.share(),
            "shares": {c: self.share(c) for c in seen},
            "fp8_gemms": sum(n for (_, _, b), n in self._calls.items() if b != HIGH),
            "high_gemms": sum(n for (_, _, b), n in self._calls.items() if b == HIGH),
            "components": components,
            "pending": sorted(self.pending),
            "missing": list(self.missing),
            "unused": list(self.unused),
            **({"spans": self.spans} if len(self._spans) > 1 else {}),
        }

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The spans of plans, as of the latest report."""
        return [dict(span) for span in self._spans]


def _count_calls(ran: _Ran, gemm: str) -> int:
    return sum(n for (g, _), n in ran.items() if g == gemm)


def _is_unused(row: PlanRow, counts: GemmCounts, ran: _Ran) -> bool:
    """Return True if backward GEMMs were expected and none ran: the output did not reach the loss."""
    expected = any(counts.due(row.name, g) for g in _BACKWARD)
    return expected and not any(_count_calls(ran, g) for g in _BACKWARD)


def _list_mismatches(row: PlanRow, counts: GemmCounts, ran: _Ran, want: int, unused: bool) -> list[str]:
    """Return the mismatches of one layer as phrases. ``want``: expected number of forward GEMMs."""
    forward, idle = _count_calls(ran, "fwd"), counts.idle[row.name]
    if forward + idle == 0:
        return [f"planned {want} fwd, counted none"]
    out = []
    # The head of chunked losses runs one GEMM per block of the vocabulary, at least one per forward.
    if forward < want if row.kind == "lm_head" else (forward + idle) % want:
        out.append(f"planned {want} fwd (or a multiple), counted {forward + idle}")
    due = {g: counts.due(row.name, g) for g in _BACKWARD}
    if any(due.values()) and _count_calls(ran, "recompute") > forward:
        out.append(f"{forward} fwd were recomputed {_count_calls(ran, 'recompute')} times")
    planned = 0 if row.row.frozen else forward
    if due["wgrad"] != planned:
        no_grad = counts.no_grad[row.name]
        if no_grad and due["wgrad"] + no_grad == planned:
            why = (
                f"{no_grad} of {forward} fwd ran under no_grad; put forwards that do not train into "
                "fp8.observe.uncounted(), or outside count_gemms()"
            )
        else:
            why = f"the weight asked for {due['wgrad']} (was it frozen or thawed after the plan?)"
        out.append(f"planned {planned} wgrad, but {why}")
    if not unused:
        out += [
            f"planned {due[g]} {g}, counted {_count_calls(ran, g)}" for g in _BACKWARD if _count_calls(ran, g) != due[g]
        ]
    for (gemm, backend), calls in ran.items():
        selection = row.selections.get("fwd" if gemm == "recompute" else gemm)
        named = HIGH if selection is None else selection.backend.name
        if backend != named:
            out.append(f"{gemm} planned on {named}, {calls} ran on {backend}")
    return out
