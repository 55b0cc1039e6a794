"""A plan: its rows, its totals and how it is printed. Made by `decide`, put into effect by `apply`.

Rules may hold only in some steps of a run, such as the first and the last ones in high precision. Then the run has a
schedule of plans, one for each span of steps. A layer that any of them has in FP8 is an FP8 layer in all of them, and
computes in high precision where a plan says so. Modules around linear layers follow the main plan.
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
    """Rows in the order of the model, ``blocks`` around them (norms, gated MLPs), and ``notes`` on what else
    matters; of a plan that was loaded, ``changes`` are the notes on what differs from when it was made."""

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
        """Share of the linear FLOPs of a training step in FP8, 0 to 1; lm_head and patch embedding are outside."""
        return share(self.rows)

    def share_of(self, component: str) -> float:
        """The same within one component. Raises KeyError for one that the model lacks."""
        if component not in self.parts:
            raise KeyError(f"the model has no component {component!r}; it has {', '.join(self.parts)}")
        return share(r for r in self.rows if r.component == component)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The components, in the order of the model."""
        return components(self.rows)

    def __repr__(self) -> str:
        """One line, for debuggers and logs; ``str`` and ``print`` give the table."""
        return f"Plan({summary(self.rows)})"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return html_table(self.rows, self.notes)

    def backends(self) -> list[BackendLine]:
        """The backend of each GEMM and why, once for each recipe and shape."""
        return backends(self.rows)

    def table(self) -> str:
        """The plan as plain text: repeated layers in one line, then what is FP8, what is not and why."""
        return table(self.rows, self.notes)

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types; equal plans give equal dictionaries."""
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
    """The steps ``first`` to ``last``, both of them included, and their plan."""

    first: int
    last: int
    plan: Plan


@dataclass(frozen=True)
class Schedule:
    """``main``: the plan outside of the spans of rules. ``spans`` follow each other without gaps; without any, the main
    plan holds in every step."""

    main: Plan
    spans: tuple[Span, ...] = ()

    def __repr__(self) -> str:
        spans = "; ".join(f"steps {s.first} to {s.last} {summary(s.plan.rows)}" for s in self.spans)
        return f"Schedule({spans or summary(self.main.rows)})"

    def at(self, step: int) -> Plan:
        """The plan of a step; steps before the first span use its plan, steps after the last one the last plan."""
        for span in self.spans:
            if step <= span.last:
                return span.plan
        return self.spans[-1].plan if self.spans else self.main

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Each plan once, the main one first."""
        distinct = [self.main]
        distinct += [span.plan for span in self.spans if not any(span.plan is one for one in distinct)]
        return tuple(distinct)

    @property
    def parts(self) -> frozenset[str]:
        """The components that any plan has in FP8."""
        return frozenset(row.component for one in self.plans for row in one.rows if row.fp8)
