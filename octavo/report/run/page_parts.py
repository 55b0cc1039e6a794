"""Helpers shared by all pages: formatting of tables and numbers, and templates with Octavo's filters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from octavo import version as octavo_version
from octavo.report.evidence.trust_table import percent
from octavo.report.run import completions, plots

TEMPLATES = Path(__file__).parents[1] / "templates"

#: order and labels of the memory table; other kinds of a run follow
KINDS = {
    "weights": "weights",
    "master": "master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "codes": "cached FP8 codes",
    "reference": "reference model",
    "kv_cache": "keys and values",
    "activations": "saved activations",
    "logits": "logits",
    "workspace": "workspace",
}
#: totals that a run records in addition to kinds. The peak of the process is not shown because runs share a process
TOTALS = {"peak_cuda": "peak of the GPU", "peak_device": "peak of the device"}
NOT_KINDS = (*TOTALS, "peak_rss")


def render(name: str, folder: Path = TEMPLATES, **values: Any) -> str:
    """Render a page from its template in ``folder``; style and version are the same on all pages."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"percent": percent, "bytes": format_bytes, "fixed": format_fixed, "short": format_number}
    environment.filters["capitalized"] = lambda text: f"{text[:1].upper()}{text[1:]}"
    environment.filters |= {"svg": Markup, "dotted": _break_after_dots, "cut": completions.truncate}
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return environment.get_template(name).render(
        version=octavo_version.__version__, css=css, colors=plots.PALETTE, **values
    )


def memory_kinds(bars: Sequence[tuple[str, Mapping[str, int]]]) -> list[str]:
    """Return the kinds of memory that any run recorded, in the order of ``KINDS``, without peaks."""
    seen = dict.fromkeys(kind for _, memory in bars for kind in memory if kind not in NOT_KINDS)
    return [kind for kind in KINDS if kind in seen] + [kind for kind in seen if kind not in KINDS]


def memory_total(memory: Mapping[str, int]) -> int:
    """Return the bytes of all kinds that a run recorded, without peaks."""
    return sum(size for kind, size in memory.items() if kind not in NOT_KINDS)


def choose_unit(size: float) -> tuple[str, float]:
    """Return (name, bytes) of the largest of KiB, MiB and GiB that is at most ``size`` bytes."""
    for name, unit in (("GiB", 2.0**30), ("MiB", 2.0**20)):
        if size >= unit:
            return name, unit
    return "KiB", 2.0**10


def format_bytes(size: float) -> str:
    """Format bytes, for example 12.3 MiB."""
    name, unit = choose_unit(size)
    return f"{size / unit:.1f} {name}" if size else "0"


def plan_groups(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Group the rows of a plan that only differ in the numbers in their names."""
    groups: dict[tuple, dict[str, Any]] = {}
    for row in plan.get("rows", ()):
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row["name"])
        recipe = row.get("recipe")
        name = describe_recipe(recipe)
        shape = " x ".join(map(str, row.get("shape") or ()))
        reason = row.get("reason") or ""
        key = (pattern, row.get("component"), row.get("kind"), shape, name, reason)
        group = groups.setdefault(
            key,
            {"pattern": pattern, "component": row.get("component") or "", "kind": row.get("kind") or "", "shape": shape,
             "recipe": name, "reason": reason, "count": 0, "share": 0.0},
        )  # fmt: skip
        group["count"] += 1
        group["share"] += float(row.get("share") or 0.0)
    return list(groups.values())


def gemm_counts(proof: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the counts of a proof by component and GEMM: calls in FP8 with their backends, and in high precision."""
    rows = []
    for component, gemms in (proof.get("components") or {}).items():
        for gemm, calls in gemms.items() if isinstance(gemms, Mapping) else ():
            fp8 = {backend: count for backend, count in calls.items() if backend != "high"}
            share = (proof.get("shares") or {}).get(component)
            rows.append({"component": component, "share": share, "gemm": gemm, "fp8": sum(fp8.values()),
                         "backends": ", ".join(fp8), "high": calls.get("high", 0)})  # fmt: skip
    return rows


def describe_recipe(recipe: Any) -> str | None:
    """Describe the recipe of a plan row, including GEMMs in other recipes or in high precision; None for high precision
    in all GEMMs."""
    if not isinstance(recipe, Mapping):
        return recipe
    by_precision: dict[str, list[str]] = {}
    for gemm in ("fwd", "dgrad", "wgrad"):
        if (word := recipe.get(gemm, "fp8")) != "fp8":
            by_precision.setdefault("in high precision" if word == "bf16" else word, []).append(gemm)
    name = f"{recipe['name']} {recipe.get('format') or ''}".strip()
    text = "; ".join(f"{', '.join(gemms)} {word}" for word, gemms in by_precision.items())
    return f"{name} ({text})" if text else name


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a nested mapping to (dotted key, text) rows for a table."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            if value and all(isinstance(inner, Mapping) for inner in value):
                for number, inner in enumerate(value):
                    rows += flatten(inner, f"{name}[{number}].")
            elif value:
                rows.append((name, ", ".join(map(str, value))))
        elif value is not None and value != "":
            rows.append((name, f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows


def _break_after_dots(name: str) -> Markup:
    """Return a module name with optional line breaks after dots."""
    return Markup(".<wbr>").join(name.split("."))


def format_number(value: float) -> str:
    """Format a number with four significant digits, or a dash if it is not finite."""
    return f"{value:.4g}" if math.isfinite(value) else "\N{EN DASH}"


def format_fixed(value: float | None, digits: int = 2) -> str:
    """Format a number with fixed digits and thousands separators, or a dash if it is missing."""
    if value is None or not np.isfinite(value):
        return "\N{EN DASH}"
    return f"{value:,.{digits}f}"
