"""The report beside the file: what became of every key, and what is left to do."""

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
    "default": "These keys ask for what Octavo does in any case.",
    "none": "Octavo has nothing that does this; the run will differ from theirs in it.",
    "dead": "These keys changed nothing in the run as it was configured there; what they really did:",
    "unknown": "Octavo knows no such key of this framework. A slip of the pen, or of a version that it does not know.",
}


_COUNTED: dict[Kind, str] = {
    "translated": "translated",
    "default": "that Octavo does anyway",
    "none": "without equivalent",
    "dead": "that did nothing there",
    "unknown": "unknown",
}


def value(found: Any) -> str:
    return brief(shown(found), 80)


def lost_line(made: Translation) -> str:
    """How many keys that decide numbers have no translation; empty where all have one."""
    count = len(made.lost_keys)
    return "" if not count else "1 key of yours is lost" if count == 1 else f"{count} keys of yours are lost"


def markdown(made: Translation) -> str:
    """The report as a page."""
    counts = made.counts
    lines = [f"# {made.sources} of {made.framework}, translated", ""]
    lines += [
        f"{sum(counts.values())} keys: " + ", ".join(f"{n} {_COUNTED[kind]}" for kind, n in counts.items() if n) + ".",
        "",
    ]
    if made.refused:
        lines += ["## Octavo refuses this as it stands", ""]
        lines += [f"- `{problem.key}`: {_cell(problem.reason)}; {_cell(problem.fix)}" for problem in made.refused] + [
            ""
        ]
    if made.lost_keys:
        lines += [f"## {lost_line(made)}", ""]
        lines += [
            "They decide numbers of the training and have no translation; each is in a list below, with its reason."
        ]
        lines += ["", *[f"- `{_cell(key)}`" for key in made.lost_keys], ""]
    if made.notes:
        lines += ["## To know, and to do", "", *[f"- {_cell(note)}" for note in made.notes], ""]
    for kind, heading in HEADINGS.items():
        rows = [row for row in made.rows if row.kind == kind]
        if rows:
            lines += [f"## {heading}", "", _SAYS[kind], "", *_table(rows, kind), ""]
    if made.lost:
        lines += ["## Given twice", "", "| key | value | line | |", "|---|---|---|---|"]
        lines += [
            f"| `{given.key}` | `{_cell(value(given.value))}` | {given.place} | {_cell(why)} |"
            for given, why in made.lost
        ]
        lines += [""]
    if made.unread:
        lines += ["## Lines of the script that were not read", ""]
        lines += [f"- {place}: `{_cell(brief(text, 120))}`: {_cell(why)}" for place, text, why in made.unread] + [""]
    return "\n".join(lines)


def _table(rows: Sequence[Row], kind: Kind) -> list[str]:
    became = kind == "translated"
    lines = ["| theirs | value | line | ours | |" if became else "| theirs | value | line | |"]
    lines += ["|---|---|---|---|---|" if became else "|---|---|---|---|"]
    for row in rows:
        ours = ", ".join(f"`{_cell(target)}: {_cell(value(found))}`" for target, found in row.targets)
        cells = [f"`{_cell(row.given.key)}`", f"`{_cell(value(row.given.value))}`", str(row.given.place)]
        lines.append("| " + " | ".join([*cells, *([ours] if became else []), _cell(row.why)]) + " |")
    return lines


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("`", "'")


def plain(made: Translation) -> dict[str, Any]:
    """The report for programs."""
    return {
        "framework": made.framework,
        "file": str(made.out),
        "report": str(made.report),
        "valid": not made.refused,
        "counts": made.counts,
        "refused": [{"key": p.key, "found": p.reason, "fix": p.fix} for p in made.refused],
        "lost": list(made.lost_keys),
        "lost_line": lost_line(made),
        "notes": list(made.notes),
        "keys": [
            {
                "key": row.given.key,
                "value": row.given.value,
                "place": str(row.given.place),
                "kind": row.kind,
                "why": row.why,
                "ours": [{"key": target, "value": found} for target, found in row.targets],
            }
            for row in made.rows
        ],
        "given_twice": [
            {"key": given.key, "value": given.value, "place": str(given.place), "why": why} for given, why in made.lost
        ],
        "unread": [{"place": str(place), "text": text, "why": why} for place, text, why in made.unread],
    }
