"""Completions of FP8 and high precision for the same prompts at selected steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.report.evidence.run_reader import RunRecord

LENGTH = 600  # characters of a text that the page shows; completions.jsonl has them all


def side_by_side(high: RunRecord, fp8: RunRecord) -> list[dict[str, Any]]:
    """Return completions of the first, middle and last step at which both runs recorded the same prompt (or, if none,
    of any prompt).

    ``[{"step", "rows": [{"prompt", "answer", "high", "fp8"}]}]``; ``high`` and ``fp8`` are ``{"text", "reward",
    "ended"}``, or None if that run did not have this prompt at this step.
    """
    fp8_rows, high_rows = _by_step(fp8), _by_step(high)
    shared_steps = sorted(fp8_rows.keys() & high_rows.keys())
    steps = [step for step in shared_steps if fp8_rows[step].keys() & high_rows[step].keys()] or shared_steps
    chosen = dict.fromkeys(steps[place] for place in (0, len(steps) // 2, -1)) if steps else {}
    comparisons = []
    for step in chosen:
        prompts = dict.fromkeys([*high_rows[step], *fp8_rows[step]])
        rows = [
            {
                "prompt": truncate((first := high_rows[step].get(key) or fp8_rows[step][key]).get("prompt")),
                "answer": truncate(first.get("answer")),
                "high": _completion_cell(high_rows[step].get(key)),
                "fp8": _completion_cell(fp8_rows[step].get(key)),
            }
            for key in prompts
        ]
        comparisons.append({"step": step, "rows": rows})
    return comparisons


def _by_step(record: RunRecord) -> dict[int, dict[tuple[str, int, int], Mapping[str, Any]]]:
    rows_by_step: dict[int, dict[tuple[str, int, int], Mapping[str, Any]]] = {}
    for row in record.completions:
        rows_by_step.setdefault(row["step"], {})[row["file"], row["row"], row["sample"]] = row
    return rows_by_step


def _completion_cell(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {"text": truncate(row["completion"]), "reward": row["reward"], "ended": row.get("ended", "")}


def truncate(value: Any) -> str:
    """Return a text, or other values as JSON, truncated to LENGTH characters."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LENGTH else f"{text[:LENGTH]} ..."
