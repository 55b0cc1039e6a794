"""An extension of Griffe, which reads the docstrings for the API reference: the project's ways of writing as Markdown.

:func:`octavo.fp8.plan`      a link to it, where the site has it
name   what it is            of several names, a line each, in columns: a list
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([\w.]+)`")
COLUMNS = re.compile(r"^(\w[\w, .*]*?) {2,}(\S.*)$")


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            first, *more = ROLE.sub(_link, obj.docstring.value).split("\n\n")
            if not any(COLUMNS.match(line) or line.startswith(" ") for line in first.split("\n")):
                first = " ".join(first.split("\n"))  # tables show the first line, and should show the first sentence
            obj.docstring.value = _columns("\n\n".join([first, *more]))


def _link(found: re.Match[str]) -> str:
    return f'<autoref identifier="{found[1]}" optional><code>{found[1]}</code></autoref>'


def _columns(text: str) -> str:
    """Lines `name   meaning`, continued by indented ones, as a list."""
    lines, inside = [], False
    for line in text.split("\n"):
        if found := COLUMNS.match(line):
            lines += ([] if inside else [""]) + [f"- `{found[1]}`: {found[2]}"]
            inside = True
        else:
            inside = inside and line.startswith("  ")
            lines.append(f"    {line.strip()}" if inside else line)
    return "\n".join(lines)
