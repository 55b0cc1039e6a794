"""Plans as plain text, and the cost of padding for sizes that tensor cores do not support (3420 in Qwen2.5-VL's tower).

An explicit recipe converts layers of every size (the table of ``auto`` skips some on a GPU, and the row's reason says
so). Code buffers are zero-padded to multiples of 16, and along the contraction to the block of the recipe if that is
larger (:mod:`octavo.fp8.kernels`, ``layout``). With a weight [N, K] the forward contracts K, dgrad N and wgrad tokens.
The padding adds this part of the work:

    part = mean over the GEMMs in FP8 of  N' K' / (N K) - 1

This counts the padding of code buffers. The tiles of 64 to 256 in kernels, which BF16 kernels have too, are not
counted. Some backends write padded results and copy the real columns out (``Backend.pads_results``): y of width N, dx
and dw of width K, if that is not a multiple of 16. Such a copy moves 4 bytes per element, which for a GEMM with 1280
inputs costs much more than the padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.fp8.arithmetic.recipe import GEMMS, Recipe
from octavo.fp8.kernels import ALIGN, Backend, padded_sizes
from octavo.fp8.planning.rows import PlanRow, components, share
from octavo.fp8.policy.globs import template

_SHOWN = 3  # kinds of padded layers that are listed
HEAD = ("component", "layer", "N x K", "layers", "recipe", "backend", "reason")


class BackendLine(NamedTuple):
    """The backend of one GEMM of a recipe and shape, the reason, and the rejected backends with their reasons."""

    recipe: str
    shape: tuple[int, int]
    gemm: str
    backend: str
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        rejected = [list(pair) for pair in self.rejected]
        return {**self._asdict(), "shape": list(self.shape), "rejected": rejected}


def backends(rows: Iterable[PlanRow]) -> list[BackendLine]:
    """Return one line per distinct recipe, shape and GEMM that runs in FP8."""
    backend_lines = [
        BackendLine(r.recipe.summary(), r.shape, gemm, s.backend.name, s.reason, s.rejected)
        for r in rows
        if r.recipe is not None
        for gemm, s in r.selections.items()
    ]
    return list(dict.fromkeys(backend_lines))


def table(rows: Sequence[PlanRow], notes: Iterable[str]) -> str:
    """Return the table, followed by totals and notes."""
    body = lines(rows)
    widths = [max(len(line[i]) for line in [HEAD, *body]) for i in range(len(HEAD))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [HEAD, *body]]
    text.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([*text, "", *totals(rows), *[f"note: {note}" for note in notes]])


def summary(rows: Sequence[PlanRow]) -> str:
    """Return one line with the recipes, the number of FP8 layers and their GEMMs."""
    recipes = list(dict.fromkeys(row.recipe.summary() for row in rows if row.recipe is not None))
    used = {gemm for row in rows for gemm in row.selections}
    gemms = "/".join(gemm for gemm in GEMMS if gemm in used)
    count = f"{sum(row.fp8 for row in rows)} of {len(rows)} layers in FP8"
    return f"{', '.join(recipes) or 'high precision'}: {count}{f', GEMMs {gemms}' if gemms else ''}"


def html_table(rows: Sequence[PlanRow], notes: Iterable[str]) -> str:
    """Return the contents of :func:`table` as an HTML table and a list."""
    # Imported only for notebooks, because html imports two large tables of entities.
    from html import escape

    def cells(tag: str, texts: Iterable[str]) -> str:
        # Notebooks align cells to the right by default.
        return "".join(f'<{tag} style="text-align: left">{escape(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines(rows))
    sentences = "".join(f"<li>{escape(text)}</li>" for text in [*totals(rows), *(f"note: {note}" for note in notes)])
    return f"<table><thead><tr>{cells('th', HEAD)}</tr></thead><tbody>{body}</tbody></table><ul>{sentences}</ul>"


def lines(rows: Iterable[PlanRow]) -> list[tuple[str, ...]]:
    """Return the cells under :data:`HEAD`, with one line per group of repeated layers."""
    groups: dict[tuple[object, ...], list[PlanRow]] = {}
    for row in rows:
        key = (
            template(row.name),
            row.component,
            row.row.shape,
            row.recipe,
            row.reason,
            row.row.frozen,
            _backend_names(row),
        )
        groups.setdefault(key, []).append(row)
    return [_make_line(alike) for alike in groups.values()]


def fold(names: Iterable[str]) -> str:
    """Combine names that differ only in numbers: ``layers.{0..27}.mlp.up_proj``."""
    columns = list(zip(*(n.split(".") for n in names), strict=True))
    return ".".join(_fold_segment(list(dict.fromkeys(c))) for c in columns)


def _fold_segment(values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    numbers = sorted(int(v) for v in values)
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs]
    return "{" + ",".join(parts) + "}"


def _make_line(rows: list[PlanRow]) -> tuple[str, ...]:
    row = rows[0]
    shape = f"{row.shape[0]} x {row.shape[1]}"
    if row.row.experts is not None:
        active = f", {row.row.experts_per_token} per token" if row.row.experts_per_token else ""
        shape += f" ({row.row.experts} experts{active})"
    notes = [row.reason]
    if row.row.frozen:
        notes.append("frozen, no wgrad" if row.fp8 else "frozen")
    if row.row.tied:
        notes.append(f"tied to {row.row.tied[0]}")
    recipe = row.recipe.summary() if row.recipe is not None else "-"
    return (
        row.component,
        fold(r.name for r in rows),
        shape,
        str(len(rows)),
        recipe,
        _backend_names(row),
        "; ".join(notes),
    )


def _backend_names(row: PlanRow) -> str:
    return ", ".join(dict.fromkeys(s.backend.name for s in row.selections.values())) or "-"


def totals(rows: Sequence[PlanRow]) -> list[str]:
    """Return sentences on FP8 layers, layers in high precision with reasons, and the share of linear FLOPs."""
    fp8 = [r for r in rows if r.fp8]
    params = sum(r.row.params for r in rows) or 1
    inside = sum(r.row.params for r in fp8)
    out = [f"FP8: {len(fp8)} of {len(rows)} linear layers, with {inside:,} of {params:,} parameters"]
    reasons = Counter(r.reason for r in rows if not r.fp8)
    out += [f"high precision: {count} ({reason})" for reason, count in reasons.items()]
    parts = {c: [r for r in rows if r.component == c] for c in components(rows)}
    shares = [f"{c} {100 * share(members):.1f} %" for c, members in parts.items() if any(r.share for r in members)]
    out.append(
        f"linear FLOPs in FP8: {100 * share(rows):.1f} % ({', '.join(shares) or 'none'}), without lm_head and patch "
        "embedding"
    )
    return out


def describe_padding(rows: Sequence[PlanRow]) -> list[str]:
    """Return notes on padded layers: the total cost, and one line for each of the most expensive kinds; none if no
    layer is padded."""
    kinds: dict[tuple[str, tuple[int, int], Padding, tuple[str, ...]], list[PlanRow]] = {}
    for row in rows:
        runs = {gemm: s.backend for gemm, s in row.selections.items() if gemm != "wgrad" or not row.row.frozen}
        if row.recipe is not None and (padded_to := compute_padding(row.recipe, row.shape, tuple(runs))).part:
            kinds.setdefault((template(row.name), row.shape, padded_to, copied_results(row.shape, runs)), []).append(
                row
            )
    if not kinds:
        return []
    flops = {key: key[2].part * sum(row.fp8_flops for row in alike) for key, alike in kinds.items()}
    total = sum(row.flops for row in rows) or 1.0
    count = f"{sum(map(len, kinds.values()))} of {sum(row.fp8 for row in rows)} FP8 layers"
    shown = sorted(kinds, key=lambda key: -flops[key])[:_SHOWN]
    rest = f"; the {_SHOWN} most expensive of {len(kinds)} kinds:" if len(kinds) > _SHOWN else ":"
    part = _percent(sum(flops.values()) / total)
    return [
        f"{count} have sizes that are padded for tensor cores, which adds {part} to the FLOPs of all layers{rest}",
        *(f"{fold(row.name for row in kinds[key])}: {_padding_text(*key[1:])}" for key in shown),
    ]


def _padding_text(shape: tuple[int, int], padded_to: Padding, cut: Sequence[str]) -> str:
    (n, k), (wide, deep) = shape, padded_to.sizes
    copies = f", {' and '.join(cut)} copied out" if cut else ""
    return f"{n} x {k} padded to {wide} x {deep}, {_percent(padded_to.part)} more{copies}"


def _percent(part: float) -> str:
    if part < 1e-5:
        return "under 0.001 %"
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.2g} %"


class Padding(NamedTuple):
    """The largest N' and K' of a layer's GEMMs, and the added work as a fraction."""

    sizes: tuple[int, int]
    part: float


def compute_padding(recipe: Recipe, shape: tuple[int, int], gemms: Sequence[str]) -> Padding:
    """Compute the padding of a weight [N, K] over the given GEMMs (fwd, dgrad, wgrad) that the recipe runs in FP8."""
    n, k = shape
    sizes_of_gemms = []
    for name in gemms:
        if (casts := recipe.gemm(name)) is None:
            continue
        if name == "wgrad":  # N and K are the free dimensions of dy and x
            sizes = padded_sizes(1, n, casts.a, 0)[0], padded_sizes(1, k, casts.b, 0)[0]
        else:
            contracted = int(name == "fwd")
            free, along = padded_sizes(n, k, casts.b, contracted)
            sizes = (free, along) if contracted else (along, free)
        sizes_of_gemms.append(sizes)
    if not sizes_of_gemms or not n * k:
        return Padding(shape, 0.0)
    part = sum(a * b / (n * k) - 1 for a, b in sizes_of_gemms) / len(sizes_of_gemms)
    return Padding((max(a for a, _ in sizes_of_gemms), max(b for _, b in sizes_of_gemms)), part)


def copied_results(shape: tuple[int, int], backends: Mapping[str, Backend]) -> tuple[str, ...]:
    """Return which results (y, dx, dw) of a weight [N, K] are copied out of padded ones, by the backend of each
    GEMM."""
    n, k = shape
    widths = {"fwd": ("y", n), "dgrad": ("dx", k), "wgrad": ("dw", k)}
    named = (widths[gemm] for gemm, backend in backends.items() if backend.pads_results)
    return tuple(name for name, width in named if width % ALIGN)
