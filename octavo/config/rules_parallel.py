"""What the axes of a mesh may not be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.findings import Finding, finding
from octavo.config.whole import Sections


def rules(config: Sections) -> Iterator[Finding]:
    """Every rule on `parallel` that the configuration breaks."""
    axes = config.parallel
    if axes.ulysses != "auto" and axes.context % axes.ulysses:
        found = f"ulysses {axes.ulysses} does not divide context {axes.context}"
        yield finding("parallel.ulysses", found, "use a divisor of it, or auto", "parallel.context")
