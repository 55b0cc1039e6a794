"""The report about a translated file: the outcome of every key, and what is left to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.base.safe_read import printable
from octavo.config.yaml.problems import brief
from octavo.importers.common.key_outcomes import HEADINGS, Kind, Row
from octavo.importers.output_file import shown
from octavo.importers.translation import Translation

_SAYS: dict[Kind, str] = {
    "translated": "Each key, and what it became.",
    "default": "These keys ask for what Octavo does anyway.",
    "none": "Octavo has no equivalent; the run will differ from the original in this.",
    "dead": "These keys had no effect in the original run; the reason:",
    "unknown": "Octavo knows no such key of this framework: it is misspelled, or from a version that Octavo does not "
    "know.",
}


_COUNTED: dict[Kind, str] = {
    "translated": "translated",
    "default": "that Octavo does anyway",
    "none": "without equivalent",
    "dead": "that did nothing there",
    "unknown": "unknown",
}


def value(held: Any) -> str:
    return brief(shown(held), 80)


def lost_line(translation: Translation) -> str:
    """Return a line with the number of lost keys; empty if there are none."""
    count = len(translation.lost_keys)
    return "" if not count else "1 key of yours is lost" if count == 1 else f"{count} keys of yours are lost"


def markdown(translation: Translation) -> str:
    """Return the report as a Markdown page: problems and lost keys first, then a table for each outcome."""
    # Problems and lost keys come first: they are what the user must act on.
    counts = translation.counts
    lines = [f"# {translation.sources} of {translation.framework}, translated", ""]
    lines += [
        f"{sum(counts.values())} keys: " + ", ".join(f"{n} {_COUNTED[kind]}" for kind, n in counts.items() if n) + ".",
        "",
    ]
    if translation.refused:
        lines += ["## Octavo refuses this file as it is", ""]
        lines += [
            f"- `{problem.key}`: {_cell(problem.reason)}; {_cell(problem.fix)}" for problem in translation.refused
        ] + [""]
    if translation.lost_keys:
        lines += [f"## {lost_line(translation)}", ""]
        lines += [
            "They affect the numbers of the training and have no translation; each is listed below, with its reason."
        ]
        lines += ["", *[f"- `{_cell(key)}`" for key in translation.lost_keys], ""]
    if translation.notes:
        lines += ["## To know, and to do", "", *[f"- {_cell(note)}" for note in translation.notes], ""]
    for kind, heading in HEADINGS.items():
        rows = [row for row in translation.rows if row.kind == kind]
        if rows:
            lines += [f"## {heading}", "", _SAYS[kind], "", *_table(rows, kind), ""]
    if translation.lost:
        lines += ["## Keys set more than once", "", "| key | value | line | |", "|---|---|---|---|"]
        lines += [
            f"| `{entry.key}` | `{_cell(value(entry.value))}` | {entry.place} | {_cell(why)} |"
            for entry, why in translation.lost
        ]
        lines += [""]
    if translation.unread:
        lines += ["## Lines of the script that were not read", ""]
        lines += [
            f"- {place}: `{_cell(brief(text, 120))}`: {_cell(why)}" for place, text, why in translation.unread
        ] + [""]
    return "\n".join(lines)


def _table(rows: Sequence[Row], kind: Kind) -> list[str]:
    became = kind == "translated"
    lines = ["| theirs | value | line | ours | |" if became else "| theirs | value | line | |"]
    lines += ["|---|---|---|---|---|" if became else "|---|---|---|---|"]
    for row in rows:
        ours = ", ".join(f"`{_cell(target)}: {_cell(value(held))}`" for target, held in row.targets)
        cells = [f"`{_cell(row.source_key.key)}`", f"`{_cell(value(row.source_key.value))}`", str(row.source_key.place)]
        lines.append("| " + " | ".join([*cells, *([ours] if became else []), _cell(row.why)]) + " |")
    return lines


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("`", "'")


def plain(translation: Translation) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "framework": translation.framework,
        "file": str(translation.out),
        "report": str(translation.report),
        "valid": not translation.refused,
        "counts": translation.counts,
        "refused": [{"key": p.key, "found": p.reason, "fix": p.fix} for p in translation.refused],
        "lost": list(translation.lost_keys),
        "lost_line": lost_line(translation),
        "notes": list(translation.notes),
        "keys": [
            {
                "key": row.source_key.key,
                "value": row.source_key.value,
                "place": str(row.source_key.place),
                "kind": row.kind,
                "why": row.why,
                "ours": [{"key": target, "value": held} for target, held in row.targets],
            }
            for row in translation.rows
        ],
        # The names of the keys stay as they are: scripts read this document.
        "given_twice": [
            {"key": entry.key, "value": entry.value, "place": str(entry.place), "why": why}
            for entry, why in translation.lost
        ],
        "unread": [{"place": str(place), "text": text, "why": why} for place, text, why in translation.unread],
    }
