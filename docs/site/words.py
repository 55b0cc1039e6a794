"""Writes the words of other frameworks into docs/coming_from.md, from the table that error messages use:
python docs/site/words.py"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.config.sections import foreign_words as words

PAGE = Path(__file__).resolve().parents[1] / "coming_from.md"
BEGIN, END = "<!-- words: python docs/site/words.py -->", "<!-- end of words -->"


def _rows(entries: Iterable[tuple[str, words.Word]]) -> Iterator[str]:
    """Yield one row for each of Octavo's words with a reason, with all words that mean it."""
    grouped: dict[words.Word, list[str]] = {}
    for word, meaning in entries:
        grouped.setdefault(meaning, []).append(f"`{word}`")
    for (own, why), theirs in grouped.items():
        yield f"| {', '.join(theirs)} | `{own}` | {why} |"


def section() -> str:
    """Return the tables: keys, keys in one section, keys without a counterpart, names of components, values."""
    head = "| there | here | |\n|---|---|---|"
    scoped = ((f"{section}: {{{key}}}", meaning) for (section, key), meaning in words.IN_SECTION.items())
    values = (
        (f"{'.'.join(path)}: {value}", (f"{'.'.join(path)}: {own}", why))
        for path, meanings in words.VALUES.items()
        for value, (own, why) in meanings.items()
    )
    components = ((name, (own, "a component")) for name, own in words.COMPONENT_WORDS.items())
    without = words.WITHOUT_COUNTERPART
    tables = {
        "Keys": _rows(words.KEYS.items()),
        "Keys of a section": _rows(scoped),
        "Without a counterpart": _rows((word, ("none", why)) for word, why in without.items()),
        "Components": _rows(components),
        "Values": _rows(values),
    }
    return "\n\n".join(f"### {title}\n\n" + "\n".join([head, *rows]) for title, rows in tables.items())


def page() -> str:
    """Return the page with these tables in place of those between the marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n\n{section()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
