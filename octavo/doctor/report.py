"""The report of the doctor: one :class:`Check` per check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: ok: works · warn: works with limits · absent: optional and not installed · fail: required and broken
OK, WARN, ABSENT, FAIL = "ok", "warn", "absent", "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check; unless it is ok, also what it means and the fix."""

    area: str
    name: str
    status: str
    found: str
    means: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All checks in order, and the description of the machine."""

    checks: tuple[Check, ...]
    environment: dict[str, Any]

    @property
    def healthy(self) -> bool:
        """Whether nothing that is required is broken."""
        return all(check.status != FAIL for check in self.checks)

    def of(self, *statuses: str) -> Sequence[Check]:
        """Return the checks with one of these statuses."""
        return [check for check in self.checks if check.status in statuses]

    def to_json(self) -> dict[str, Any]:
        """Return ``{"healthy", "checks": [...], "environment"}``, ready for json.dumps."""
        return {
            "healthy": self.healthy,
            "checks": [asdict(check) for check in self.checks],
            "environment": self.environment,
        }
