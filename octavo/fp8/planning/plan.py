"""Plans: rows, totals and their printed form. `decide` makes them, `apply` applies them to a model.

Rules may apply only in some steps, for instance to run the first and the last steps in high precision. Then a run has a
schedule with one plan per span of steps. A layer that is FP8 in any plan is an FP8 layer in all of them, and computes
in high precision in the spans whose plan requires that. Modules around linear layers follow the main plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from octavo.fp8.measuring.machine import Machine
from octavo.fp8.planning.rows import PlanBlock, PlanRow, components, share
from octavo.fp8.planning.table import BackendLine, backends, html_table, summary, table
from octavo.fp8.policy.policy import Policy


@dataclass(frozen=True)
class Plan:
    """``rows`` in the order of the model, ``blocks`` around them (norms, gated MLPs), and ``notes`` for the user.

    ``changes``: notes of a loaded plan on differences from the machine and versions that it was made with.
    """

    rows: tuple[PlanRow, ...]
    policy: Policy
    components: Mapping[str, tuple[str, ...]] | None
    tokens: Mapping[str, int] | None
    device: str
    notes: tuple[str, ...]
    machine: Machine
    micro_steps: int = 1
    blocks: tuple[PlanBlock, ...] = ()
    changes: tuple[str, ...] = ()

    @cached_property
    def share(self) -> float:
        """Share of the linear FLOPs of a training step in FP8, 0 to 1, without lm_head and patch embedding."""
        return share(self.rows)

    def share_of(self, component: str) -> float:
        """Return the share of FP8 within one component. Raises KeyError for an unknown component."""
        if component not in self.parts:
            raise KeyError(f"the model has no component {component!r}; it has {', '.join(self.parts)}")
        return share(r for r in self.rows if r.component == component)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the components in the order of the model."""
        return components(self.rows)

    def __repr__(self) -> str:
        """One line, for debuggers and logs; ``str`` and ``print`` give the table."""
        return f"Plan({summary(self.rows)})"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return html_table(self.rows, self.notes)

    def backends(self) -> list[BackendLine]:
        """Return the backend of each GEMM and the reason, once per recipe and shape."""
        return backends(self.rows)

    def table(self) -> str:
        """Return the plan as plain text: one line per group of repeated layers, then totals and notes."""
        return table(self.rows, self.notes)

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON types; equal plans give equal dictionaries."""
        return {
            "policy": self.policy.to_json(),
            "device": self.device,
            "tokens": None if self.tokens is None else dict(self.tokens),
            "share": self.share,
            "shares": {c: self.share_of(c) for c in self.parts if c != "lm_head"},
            "backends": [line.to_json() for line in self.backends()],
            "rows": [r.to_json() for r in self.rows],
            "blocks": [b.to_json() for b in self.blocks],
            "notes": list(self.notes),
        }


class Span(NamedTuple):
    """The plan of the steps ``first`` to ``last``, inclusive."""

    first: int
    last: int
    plan: Plan


@dataclass(frozen=True)
class Schedule:
    """The plans of a run. ``main``: the plan of steps outside of all spans. ``spans`` are contiguous; if there are
    none, the main plan applies to all steps."""

    main: Plan
    spans: tuple[Span, ...] = ()

    def __repr__(self) -> str:
        spans = "; ".join(f"steps {s.first} to {s.last} {summary(s.plan.rows)}" for s in self.spans)
        return f"Schedule({spans or summary(self.main.rows)})"

    def at(self, step: int) -> Plan:
        """Return the plan of a step. Steps after the last span use its plan."""
        for span in self.spans:
            if step <= span.last:
                return span.plan
        return self.spans[-1].plan if self.spans else self.main

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The distinct plans, starting with the main plan."""
        distinct = [self.main]
        distinct += [span.plan for span in self.spans if not any(span.plan is plan for plan in distinct)]
        return tuple(distinct)

    @property
    def parts(self) -> frozenset[str]:
        """Components with FP8 layers in any plan."""
        return frozenset(row.component for plan in self.plans for row in plan.rows if row.fp8)
