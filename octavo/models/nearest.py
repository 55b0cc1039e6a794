"""The nearest known name, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(asked: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known name is close."""
    found = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""
