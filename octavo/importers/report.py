"""The report on a translated file: the outcome of every key, and notes on what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.base.safe_read import printable
from octavo.config.yaml.problems import brief
from octavo.importers.common.key_outcomes import HEADINGS, Kind, Row
from octavo.importers.output_file import format_value
from octavo.importers.translation import Translation

_INTRODUCTIONS: dict[Kind, str] = {
    "translated": "Each key and the Octavo setting that it became.",
    "default": "Octavo already behaves as these keys request.",
    "none": "Octavo has no equivalent setting. The note gives the reason, and what to use instead.",
    "dead": "These keys had no effect in the original run.",
    "unknown": "Octavo knows no such key of this framework: it is misspelled, or from a version that Octavo does not "
    "know.",
}


_COUNT_LABELS: dict[Kind, str] = {
    "translated": "translated",
    "default": "already the default",
    "none": "without equivalent",
    "dead": "without effect",
    "unknown": "unknown",
}


def shorten_value(found_value: Any) -> str:
    return brief(format_value(found_value), 80)


def lost_line(translation: Translation) -> str:
    """Return a line with the number of lost keys; empty if there are none."""
    count = len(translation.lost_keys)
    if not count:
        return ""
    return (
        f"{count} keys that affect training were not translated"
        if count > 1
        else "1 key that affects training was not translated"
    )


def markdown(translation: Translation) -> str:
    """Return the report as a Markdown page with problems, lost keys, and a table for each outcome."""
    # Problems and lost keys come first because the user must act on them.
    counts = translation.counts
    lines = [f"# Translation of {translation.sources} ({translation.framework})", ""]
    lines += [
        f"{sum(counts.values())} keys: "
        + ", ".join(f"{n} {_COUNT_LABELS[kind]}" for kind, n in counts.items() if n)
        + ".",
        "",
    ]
    if translation.problems:
        lines += ["## Octavo rejects this file as written", ""]
        lines += [
            f"- `{problem.key}`: {_cell(problem.reason)}; {_cell(problem.fix)}" for problem in translation.problems
        ] + [""]
    if translation.lost_keys:
        lines += [f"## {lost_line(translation)}", ""]
        lines += ["These keys affect training results. Each is listed below with the reason."]
        lines += ["", *[f"- `{_cell(key)}`" for key in translation.lost_keys], ""]
    if translation.notes:
        lines += ["## Notes", "", *[f"- {_cell(note)}" for note in translation.notes], ""]
    for kind, heading in HEADINGS.items():
        rows = [row for row in translation.rows if row.kind == kind]
        if rows:
            lines += [f"## {heading}", "", _INTRODUCTIONS[kind], "", *_table(rows, kind), ""]
    if translation.overridden:
        lines += ["## Keys set more than once", "", "| key | value | line | note |", "|---|---|---|---|"]
        lines += [
            f"| `{entry.key}` | `{_cell(shorten_value(entry.value))}` | {entry.place} | {_cell(why)} |"
            for entry, why in translation.overridden
        ]
        lines += [""]
    if translation.unread:
        lines += ["## Lines of the script that were not read", ""]
        lines += [
            f"- {place}: `{_cell(brief(text, 120))}`: {_cell(why)}" for place, text, why in translation.unread
        ] + [""]
    return "\n".join(lines)


def _table(rows: Sequence[Row], kind: Kind) -> list[str]:
    is_translated = kind == "translated"
    lines = [
        "| source key | value | line | Octavo setting | note |"
        if is_translated
        else "| source key | value | line | note |"
    ]
    lines += ["|---|---|---|---|---|" if is_translated else "|---|---|---|---|"]
    for row in rows:
        settings = ", ".join(
            f"`{_cell(target)}: {_cell(shorten_value(found_value))}`" for target, found_value in row.targets
        )
        cells = [
            f"`{_cell(row.source_key.key)}`",
            f"`{_cell(shorten_value(row.source_key.value))}`",
            str(row.source_key.place),
        ]
        lines.append("| " + " | ".join([*cells, *([settings] if is_translated else []), _cell(row.why)]) + " |")
    return lines


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("`", "'")


def to_json(translation: Translation) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "framework": translation.framework,
        "file": str(translation.out),
        "report": str(translation.report),
        "valid": not translation.problems,
        "counts": translation.counts,
        "refused": [{"key": p.key, "found": p.reason, "fix": p.fix} for p in translation.problems],
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
                "ours": [{"key": target, "value": found_value} for target, found_value in row.targets],
            }
            for row in translation.rows
        ],
        # Scripts read this document, so its keys keep their names.
        "given_twice": [
            {"key": entry.key, "value": entry.value, "place": str(entry.place), "why": why}
            for entry, why in translation.overridden
        ],
        "unread": [{"place": str(place), "text": text, "why": why} for place, text, why in translation.unread],
    }
