"""Globs on dotted names: `*` stays inside one segment, `**` spans any number of segments, also none.

`model.layers.*` is every decoder block, `model.layers.**` is the list, the blocks and all they hold,
`**.mlp.*` is every child of an `mlp` wherever it sits. A pattern is anchored at both ends.
"""

import re
from functools import lru_cache


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str]:
    segments = pattern.split(".")
    parts: list[str] = []
    for index, segment in enumerate(segments):
        if segment == "**":
            # A leading or inner `**` swallows "a.b." or nothing, a final one ".a.b" or nothing.
            parts.append("(?:[^.]+\\.)*" if index < len(segments) - 1 else "(?:[^.]+(?:\\.[^.]+)*)?")
        else:
            body = re.escape(segment).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
            parts.append(body + ("\\." if index < len(segments) - 1 else ""))
    text = "".join(parts)
    if len(segments) > 1 and segments[-1] == "**" and segments[-2] != "**":
        # `a.**` also matches `a` itself: the dot before the final `**` belongs to the optional part.
        text = text[: -len("\\.(?:[^.]+(?:\\.[^.]+)*)?")] + "(?:\\.[^.]+)*"
    return re.compile(text)


def matches(name: str, pattern: str) -> bool:
    """Whether the dotted `name` as a whole is described by `pattern`."""
    return _compiled(pattern).fullmatch(name) is not None
