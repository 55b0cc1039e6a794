"""The proof: the GEMMs that were counted against the GEMMs that were planned.

For a step in which a component ran n forwards (micro-batches), every one of its FP8 layers must have run::

    fwd        n times, or a multiple of n where the model calls it more often; experts n times each, idle ones included
    recompute  never, or as often as fwd
    wgrad      as often as fwd; never for a frozen weight
    dgrad      as often as a forward had an input that asked for a gradient

each on the backend that the plan named. What differs stops the run with a :class:`ProofError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.fp8.observe import HIGH, GemmCounts

if TYPE_CHECKING:
    from octavo.fp8.plan import Plan, PlanRow

_OUTSIDE = ("lm_head", "patch_embed")


class ProofError(RuntimeError):
    """FP8 GEMMs did not run where, how often or on what the plan says."""


class Proof:
    """Checks counts against a plan and keeps what it saw.

    ``pending`` holds the components with FP8 layers that no observed step has reached yet (a text-only batch does not
    reach the image encoder).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pending: set[str] = {r.component for r in plan.rows if r.fp8}
        self.missing: list[str] = []
        self.unused: list[str] = []
        self._calls: Counter[tuple[str, str, str]] = Counter()  # (component, gemm, backend)
        self._flops: Counter[tuple[str, str, bool]] = Counter()  # (component, gemm, FP8)

    def observe(self, counts: GemmCounts, forwards: Mapping[str, int]) -> None:
        """Check one step, counted from its first forward to the end of its backward.

        Args:
            counts: what :func:`octavo.fp8.count_gemms` gave.
            forwards: component -> forwards of it in the step (uncounted dummies left out).

        Raises:
            ProofError: at the first step that does not match; names the layers, what was planned and what was counted.
        """
        problems: list[str] = []
        for component, n in forwards.items():
            rows = [r for r in self.plan.rows if r.component == component]
            if n <= 0 or not rows:
                continue
            unused = [r.name for r in rows if r.fp8 and _unused(r, counts)]
            if unused and len(unused) == sum(r.fp8 for r in rows):
                problems.append(f"{component}: no backward reached any of its FP8 layers")
            for row in rows:
                if row.fp8:
                    problems += [f"{row.name}: {p}" for p in _mismatches(row, counts, n, row.name in unused)]
            self.unused += [u for u in unused if u not in self.unused]
            self._add(component, {r.name: r for r in rows}, counts)
        if problems:
            self.missing += problems
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ProofError(
                f"FP8 did not run as planned: {'; '.join(problems[:5])}{more}. Every layer of the plan must be "
                "called as a module in "
                "each forward of its component; leave a layer out with a rule (recipe: off) if the model does "
                "not use it so."
            )
        self.pending -= {c for c, n in forwards.items() if n > 0}

    def _add(self, component: str, rows: Mapping[str, PlanRow], counts: GemmCounts) -> None:
        for key, calls in counts.items():
            layer, gemm, backend = key
            if layer not in rows:
                continue
            self._calls[(component, gemm, backend)] += calls
            if rows[layer].kind not in _OUTSIDE:
                self._flops[(component, gemm, backend != HIGH)] += counts.flops[key]

    def share(self, component: str | None = None) -> float | None:
        """Share of the counted linear FLOPs that ran in FP8 (0 to 1), all or of one component; None before any."""
        kept = {k: v for k, v in self._flops.items() if component in (None, k[0])}
        total = sum(kept.values())
        return sum(v for k, v in kept.items() if k[2]) / total if total else None

    def report(self) -> dict[str, Any]:
        """What was counted, as JSON types: ``share`` and ``shares`` (of linear FLOPs in FP8, by component),
        ``fp8_gemms`` and ``high_gemms`` (calls), ``components`` (calls by gemm and backend), ``pending``, ``missing``
        (what did not match), ``unused`` (layers whose output did not reach the loss)."""
        components: dict[str, dict[str, dict[str, int]]] = {}
        for (component, gemm, backend), calls in self._calls.items():
            components.setdefault(component, {}).setdefault(gemm, {})[backend] = calls
        seen = list(dict.fromkeys(c for c, _, _ in self._flops))
        return {
            "share": self.share(),
            "shares": {c: self.share(c) for c in seen},
            "fp8_gemms": sum(n for (_, _, b), n in self._calls.items() if b != HIGH),
            "high_gemms": sum(n for (_, _, b), n in self._calls.items() if b == HIGH),
            "components": components,
            "pending": sorted(self.pending),
            "missing": list(self.missing),
            "unused": list(self.unused),
        }


def _unused(row: PlanRow, counts: GemmCounts) -> bool:
    """True if forwards promised backward GEMMs and none came: the output did not reach the loss."""
    promised = sum(counts.promised(row.name, g) for g in ("dgrad", "wgrad"))
    return promised > 0 and not any(counts.total(g, row.name) for g in ("dgrad", "wgrad"))


def _mismatches(row: PlanRow, counts: GemmCounts, n: int, unused: bool) -> list[str]:
    name = row.name
    ran = {g: counts.total(g, name) for g in ("fwd", "recompute", "dgrad", "wgrad")}
    idle = counts.idle[name]
    want = n * (row.row.experts or 1)
    out = []
    if ran["fwd"] + idle == 0:
        return [f"planned {want} fwd, counted none"]
    if (ran["fwd"] + idle) % want:
        out.append(f"planned {want} fwd (or a multiple), counted {ran['fwd'] + idle}")
    due = {g: counts.promised(name, g) for g in ("dgrad", "wgrad")}
    if any(due.values()) and ran["recompute"] not in (0, ran["fwd"]):
        out.append(f"{ran['recompute']} of {ran['fwd']} fwd were recomputed")
    planned = 0 if row.row.frozen else ran["fwd"]
    if due["wgrad"] != planned:
        out.append(
            f"planned {planned} wgrad, but the weight asked for {due['wgrad']} (was it frozen or thawed after the "
            "plan?)"
        )
    if not unused:
        out += [f"planned {due[g]} {g}, counted {ran[g]}" for g in ("dgrad", "wgrad") if ran[g] != due[g]]
    for (layer, gemm, backend), calls in counts.items():
        if layer == name and calls:
            selection = row.selections.get("fwd" if gemm == "recompute" else gemm)
            named = HIGH if selection is None else selection.backend.name
            if backend != named:
                out.append(f"{gemm} planned on {named}, {calls} ran on {backend}")
    return out
