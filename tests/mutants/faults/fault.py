"""What a fault is, and the list that files of this folder enter theirs into."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """``old`` in ``file`` becomes ``new``. ``what`` is wrong then; ``tests`` are arguments of pytest."""

    name: str
    area: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]


FAULTS: list[Fault] = []


def area(name: str, *faults: tuple[str, ...]) -> None:
    """Enter faults (name, file, old, new, what, tests...) under one area."""
    for title, file, old, new, what, *tests in faults:
        FAULTS.append(Fault(title, name, f"octavo/{file}", old, new, what, tuple(f"tests/{t}" for t in tests)))
