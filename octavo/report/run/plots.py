"""The plots of a report, each drawn once and saved as a PNG file and as SVG for the page.

In the SVG every colour of ``PALETTE`` becomes a CSS variable, so the same drawing follows the page from light to dark.
A page has each drawing twice: ``WIDE``, and ``NARROW`` for a telephone, where the text of a wide drawing would be too
small to read. Long runs are averaged to at most ``POINTS`` points per curve before drawing. Figures are made without
pyplot (no global state, no display); draw and save them inside ``matplotlib.rc_context(STYLE)``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import RcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from octavo.report.evidence.run_reader import LayerHealth
from octavo.report.evidence.trust_table import COSINE_MIN, SQNR_WARN, UNDERFLOW_FAIL, UNDERFLOW_WARN, Check, seed_noise

POINTS = 800
WIDE, NARROW = 9.0, 4.3  # inches; at 400 pixels a point of the narrow drawing is 1.2 pixels

#: colours of the light scheme, by the name of the CSS variable that replaces them in the SVG
PALETTE = {
    "paper": "#fdfdfc",
    "ink": "#22262b",
    "soft": "#6b7178",
    "line": "#dcdfe2",
    "base": "#4b5a6b",
    "noise": "#a9b4c0",
    "fp8-0": "#c8571b",
    "fp8-1": "#1d7f79",
    "fp8-2": "#7a4fa3",
    "fp8-3": "#a3831c",
    "fp8-4": "#b23a62",
    "good": "#2f7d4f",
    "warn": "#b7791f",
    "bad": "#b3392f",
    "kind-0": "#56708f",
    "kind-1": "#86a0b8",
    "kind-2": "#c6a15b",
    "kind-3": "#d0703c",
    "kind-4": "#6f9d86",
    "kind-5": "#b9bec4",
    "band": "#f1f2f3",
}

STYLE = RcParams(
    {
        "figure.facecolor": PALETTE["paper"],
        "axes.facecolor": PALETTE["paper"],
        "savefig.facecolor": PALETTE["paper"],
        "axes.edgecolor": PALETTE["line"],
        "axes.labelcolor": PALETTE["soft"],
        "axes.titlecolor": PALETTE["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.labelsize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": PALETTE["line"],
        "grid.linewidth": 0.7,
        "text.color": PALETTE["ink"],
        "xtick.color": PALETTE["soft"],
        "ytick.color": PALETTE["soft"],
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "lines.solid_capstyle": "round",
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": "octavo",
    }
)


@dataclass(frozen=True)
class Curve:
    """The losses of one run. ``kind`` is reference, noise or fp8; ``color`` a name in ``PALETTE``."""

    label: str
    kind: str
    color: str
    steps: np.ndarray
    losses: np.ndarray


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred mean over ``window`` steps, ignoring NaN; the window shrinks near the ends."""
    known = np.isfinite(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(values))
    half = window // 2
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    size = count[high] - count[low]
    return np.where(size > 0, (total[high] - total[low]) / np.maximum(size, 1), np.nan)


def window_for(steps: int) -> int:
    """Return the number of steps that smoothed curves average: a twenty-fifth of the run, at least one."""
    return max(1, steps // 25)


def _downsample(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if len(values) <= POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(values)), POINTS)
    return np.array([steps[p].mean() for p in parts]), np.array([np.nanmean(values[p]) for p in parts])


def loss_figure(curves: Sequence[Curve], width: float = WIDE) -> Figure:
    """Plot the loss of each run, raw in pale and smoothed in strong lines. The axis is logarithmic if the loss falls
    twentyfold."""
    figure = Figure(figsize=(width, 3.9), layout="constrained")
    axes = figure.subplots()
    # High precision last, so that the other curves do not hide it.
    for curve in sorted(curves, key=lambda c: {"noise": 0, "fp8": 1, "reference": 2}[c.kind]):
        color = PALETTE[curve.color]
        axes.plot(*_downsample(curve.steps, curve.losses), color=color, lw=0.6, alpha=0.28)
        smoothed = smooth(curve.losses, window_for(len(curve.losses)))
        style = {"reference": (0, (4, 2)), "noise": "-", "fp8": "-"}[curve.kind]
        axes.plot(*_downsample(curve.steps, smoothed), color=color, lw=1.9, ls=style, label=curve.label)
    finite = np.concatenate([c.losses[np.isfinite(c.losses)] for c in curves])
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 20:
        axes.set_yscale("log")
    window = window_for(max(len(c.losses) for c in curves))
    by_step = "Loss by step" if width >= WIDE else "Loss"
    title = by_step if window == 1 else f"{by_step}, and its mean over {window} steps"
    axes.set(title=title, xlabel="step", ylabel="nats per token")
    axes.margins(x=0.01)
    axes.legend(loc="upper right")
    return figure


def running_gap(losses: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the relative gap of the mean losses up to each step; the verdict uses the last value."""
    finite = np.isfinite(losses) & np.isfinite(reference)
    difference = np.cumsum(np.where(finite, losses - reference, 0.0))
    total = np.cumsum(np.where(finite, np.abs(reference), 0.0))
    return difference / np.where(total > 0, total, np.nan)


def running_noise(losses: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return ``seed_noise`` up to each step; the verdict compares gaps with the last value."""
    steps = len(losses)
    at = np.unique(np.linspace(1, steps, min(steps, 200)).astype(int))
    noise = [seed_noise(losses[:n], reference[:n], steps) for n in at]
    return np.interp(np.arange(1, steps + 1), at, noise)


def gap_figure(curves: Sequence[Curve], tolerated: float, width: float = WIDE) -> Figure:
    """Plot FP8 minus high precision: the smoothed difference and the gap of the running mean, with the seed noise."""
    reference = next(c for c in curves if c.kind == "reference")
    figure = Figure(figsize=(width, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    window = window_for(len(reference.losses))
    # The noise band is drawn first, so that the curves are on top of it.
    for curve in sorted(curves, key=lambda c: c.kind != "noise"):
        if curve.kind == "reference":
            continue
        steps, curve_at, reference_at = np.intersect1d(curve.steps, reference.steps, return_indices=True)
        difference = smooth(curve.losses[curve_at] - reference.losses[reference_at], window)
        gap = 100 * running_gap(curve.losses[curve_at], reference.losses[reference_at])
        if curve.kind == "noise":
            noise = 100 * running_noise(curve.losses[curve_at], reference.losses[reference_at])
            bands = ((upper, np.abs(difference), "another seed (absolute)"), (lower, noise, "seed noise"))
            for axes, values, label in bands:
                x, y = _downsample(steps, values)
                axes.fill_between(x, -y, y, color=PALETTE["noise"], alpha=0.45, lw=0, label=label)
        else:
            upper.plot(*_downsample(steps, difference), color=PALETTE[curve.color], lw=1.7, label=curve.label)
            lower.plot(*_downsample(steps, gap), color=PALETTE[curve.color], lw=1.7, label=curve.label)
    for axes in (upper, lower):
        axes.axhline(0, color=PALETTE["base"], lw=1, ls=(0, (4, 2)))
        axes.margins(x=0.01)
    lower.axhspan(-100 * tolerated, 100 * tolerated, color=PALETTE["good"], alpha=0.18, lw=0,
                  label=f"{100 * tolerated:g} %")  # fmt: skip
    mean = f" (mean over {window} steps)" if width >= WIDE else ""
    upper.set(title=f"Loss minus high precision{mean}", ylabel="nats per token")
    lower.set(title="Gap of the running mean loss", xlabel="step", ylabel="per cent")
    for axes in (upper, lower):
        legend_at_title(axes, width, 4 if width >= WIDE else 2, columnspacing=1.0, handlelength=1.5)
    return figure


def legend_at_title(axes: Axes, width: float, columns: int, **options: Any) -> None:
    """Add a legend in the line of the title, or below the title of a narrow drawing."""
    if width >= WIDE:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, borderpad=0, **options)
        return
    lines = -(-len(axes.get_legend_handles_labels()[1]) // columns)
    axes.set_title(axes.get_title(loc="left"), pad=8 + 14 * lines)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderpad=0, **options)


def claims_figure(claims: Sequence[Check]) -> Figure:
    """Plot each claim and its 95 % interval in units of its margin, positive if FP8 is worse: a claim passes if its
    interval ends below 1, and fails if it begins above 1."""
    shown_claims = [claim for claim in claims if claim.low is not None and claim.margin]
    has_several_runs = len({claim.run for claim in shown_claims}) > 1
    figure = Figure(figsize=(9, 1.3 + 0.5 * len(shown_claims)), layout="constrained")
    axes = figure.subplots()
    reach = 3.0  # the axis in margins; longer intervals end in an arrow, and the table has the figures
    axes.axvspan(-reach - 1, 1, color=PALETTE["good"], alpha=0.15, lw=0)
    axes.axvline(0, color=PALETTE["base"], lw=1, ls=(0, (4, 2)))
    for row, claim in enumerate(shown_claims):
        assert claim.low is not None and claim.high is not None and claim.margin and claim.figure is not None
        worse = -1 if claim.name == "accuracy" else 1
        low, high = sorted((worse * claim.low / claim.margin, worse * claim.high / claim.margin))
        middle = worse * claim.figure / claim.margin
        color = PALETTE[{"pass": "good", "fail": "bad"}.get(claim.status, "warn")]
        axes.plot([max(low, -reach), min(high, reach)], [row, row], color=color, lw=2.2, solid_capstyle="butt")
        for end, is_beyond, marker in ((-reach, low < -reach, "<"), (reach, high > reach, ">")):
            if is_beyond:
                axes.plot(end, row, marker=marker, color=color, ms=7)
        if abs(middle) <= reach:
            axes.plot(middle, row, "o", color=color, ms=6)
    names = [f"{claim.title}{f', {claim.run}' if has_several_runs else ''}" for claim in shown_claims]
    axes.set_yticks(range(len(shown_claims)), names)
    axes.set(
        xlim=(-reach - 0.15, reach + 0.15), ylim=(len(shown_claims) - 0.4, -0.6), xlabel="better  |  margins  |  worse"
    )
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_title("How much worse FP8 is: 95 % intervals, in units of the margin")
    return figure


def effects_figure(effects: Sequence[Check], width: float = WIDE) -> Figure:
    """Plot the effect of each component on each figure in per cent (accuracy in points), with its 95 % interval and the
    margin of main effects; interactions have no margin and are grey."""
    names = list(dict.fromkeys(effect.name for effect in effects))
    rows = list(dict.fromkeys(effect.run for effect in effects))
    across, down = (len(names), 1) if width >= WIDE else (1, len(names))
    figure = Figure(figsize=(width, down * (1.5 + 0.34 * len(rows))), layout="constrained")
    panels = np.atleast_1d(figure.subplots(down, across, sharey=True))
    for axes, name in zip(panels, names, strict=True):
        shown_effects = [effect for effect in effects if effect.name == name and effect.low is not None]
        margin = next((100 * effect.margin for effect in shown_effects if effect.margin), 0.0)
        for effect in shown_effects:
            assert effect.low is not None and effect.high is not None and effect.figure is not None
            shades = {"pass": "good", "fail": "bad", "reported": "noise"}
            color, row = PALETTE[shades.get(effect.status, "warn")], rows.index(effect.run)
            axes.plot([100 * effect.low, 100 * effect.high], [row, row], color=color, lw=2.2, solid_capstyle="butt")
            axes.plot(100 * effect.figure, row, "o", color=color, ms=6)
        accuracy = name.endswith("accuracy")
        # One reach for both sides keeps zero in the middle of the panel.
        reach = 1.15 * max(
            [margin, *(100 * abs(end) for e in shown_effects for end in (e.low, e.high) if end is not None)]
        )
        axes.axvspan(-margin if accuracy else -reach, reach if accuracy else margin, color=PALETTE["good"], alpha=0.15,
                     lw=0)  # fmt: skip
        axes.axvline(0, color=PALETTE["base"], lw=1, ls=(0, (4, 2)))
        axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6), xlabel="points" if accuracy else "per cent")
        axes.set_title("Held-out accuracy" if accuracy else "Held-out loss")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
    for axes in panels if width < WIDE else panels[:1]:
        axes.set_yticks(range(len(rows)), rows)
    return figure


def _component_spans(components: Sequence[str]) -> list[tuple[str, int, int]]:
    spans: list[tuple[str, int, int]] = []
    for i, name in enumerate(components):
        if spans and spans[-1][0] == name:
            spans[-1] = (name, spans[-1][1], i)
        else:
            spans.append((name, i, i))
    return spans


_ROLE_STYLE = {
    "x": ("fp8-0", "o"),
    "w": ("base", "s"),
    "dy": ("fp8-1", "^"),
    "x_wgrad": ("fp8-3", "o"),
    "dy_wgrad": ("fp8-2", "^"),
}


def _scatter_roles(
    axes: Axes, health: Sequence[LayerHealth], figure_name: str, scale: float, roles: Sequence[str]
) -> None:
    for role in roles:
        values = [getattr(layer, figure_name).get(role, np.nan) for layer in health]
        if not np.isfinite(values).any():
            continue
        color, marker = _ROLE_STYLE[role]
        size = 26 if len(health) <= 60 else 9
        axes.scatter(range(len(health)), scale * np.array(values), s=size, marker=marker, color=PALETTE[color],
                     alpha=0.85, lw=0, label=role.replace("_", ", "))  # fmt: skip


def _draw_threshold(axes: Axes, value: float, color: str, text: str) -> None:
    axes.axhline(value, color=PALETTE[color], lw=1, ls=(0, (2, 2)))
    axes.annotate(text, (1, value), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
                  ha="right", va="bottom", fontsize=8, color=PALETTE[color])  # fmt: skip


def health_figure(
    health: Sequence[LayerHealth], components: Mapping[str, str], title: str, width: float = WIDE
) -> Figure:
    """Plot SQNR and underflow by operand for each FP8 layer, in the order of the model, and the cosine of weight
    gradients if any layer has one (frozen layers have none)."""
    layers = [h.layer for h in health]
    few = len(layers) <= 48 and width >= WIDE  # their names fit below the axis
    cosines = np.array([np.nan if h.cosine is None else h.cosine for h in health])
    heights = [1.25, 1, 1] if np.isfinite(cosines).any() else [1.25, 1]
    size = (8.4 if few else 7.2) * sum(heights) / 3.25
    figure = Figure(figsize=(width, size), layout="constrained")
    top, middle, *experts = panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    _scatter_roles(top, health, "sqnr", 1, ("x", "w", "dy"))
    _scatter_roles(middle, health, "underflow", 100, ("x", "w", "dy", "x_wgrad", "dy_wgrad"))
    top.set(title=f"{title}: signal to quantization noise" if width >= WIDE else "Signal to noise", ylabel="dB")
    underflow = "Underflow: non-zero values that became zero" if width >= WIDE else "Values that became zero"
    middle.set(title=underflow, ylabel="per cent")
    _draw_threshold(top, SQNR_WARN["e4m3"], "warn", "E4M3 warns below")
    most = max([100 * v for h in health for v in h.underflow.values()], default=0.0)
    middle.set_yscale("symlog", linthresh=0.01)
    middle.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    middle.set_ylim(-0.002, max(10.0, 2 * most))
    _draw_threshold(middle, 100 * UNDERFLOW_WARN, "warn", "fwd, dgrad operands warn above")
    _draw_threshold(middle, 100 * UNDERFLOW_FAIL, "bad", "fail above")
    for axes in experts:
        axes.scatter(range(len(layers)), cosines, s=26 if few else 9, marker="D", color=PALETTE["fp8-4"], lw=0)
        compared = " to high precision's" if width >= WIDE else ""
        axes.set(title=f"Cosine of the weight gradient{compared}", ylabel="cosine")
        axes.set_ylim(min(float(np.nanmin(cosines)), COSINE_MIN) - 0.01, 1.004)
        _draw_threshold(axes, COSINE_MIN, "warn", "warns below")
    for axes in panels:
        for i, (_, first, last) in enumerate(_component_spans([components.get(name, "") for name in layers])):
            if i % 2 == 0:
                axes.axvspan(first - 0.5, last + 0.5, color=PALETTE["band"], lw=0, zorder=0)
        axes.set_xlim(-0.5, len(layers) - 0.5)
    widest: dict[str, tuple[int, int]] = {}
    for name, first, last in _component_spans([components.get(name, "") for name in layers]):
        if name not in widest or last - first >= widest[name][1] - widest[name][0]:
            widest[name] = first, last
    for name, (first, last) in widest.items():  # labelled once: layers of towers and projectors may alternate
        centre = ((first + last) / 2, 1)
        top.annotate(name.replace("_", " "), centre, xycoords=("data", "axes fraction"), va="top",
                     xytext=(0, -4), textcoords="offset points", ha="center", fontsize=9,
                     color=PALETTE["soft"])  # fmt: skip
    top.set_ylim(top=top.get_ylim()[1] + 3)
    for axes, columns in ((top, 3), (middle, 5)):
        legend_at_title(axes, width, columns, handletextpad=0.1, columnspacing=1.0)
    if few:
        panels[-1].set_xticks(
            range(len(layers)), [short_layer_name(name) for name in layers], rotation=90, fontsize=7.5
        )
    else:
        panels[-1].set_xlabel("FP8 layer, in the model's order")
    return figure


def short_layer_name(name: str) -> str:
    """Return the distinctive part of a module name: from its first number on, or its last two segments."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[-2 if first is None else first :])


def memory_figure(
    bars: Sequence[tuple[str, Mapping[str, int]]],
    kinds: Mapping[str, str],
    unit: tuple[str, float],
    width: float = WIDE,
) -> Figure:
    """Plot bytes by kind, one stacked bar per run; ``kinds`` has their labels, ``unit`` is a name and its bytes."""
    name, size = unit
    legend_columns = min(len(kinds), 6) if width >= WIDE else 2
    legend_height = 0.2 * (-(-len(kinds) // legend_columns) - 1)
    figure = Figure(figsize=(width, 1.5 + 0.55 * len(bars) + legend_height), layout="constrained")
    axes = figure.subplots()
    for row, (_, memory) in enumerate(bars):
        left = 0.0
        for i, kind in enumerate(kinds):
            length = memory.get(kind, 0) / size
            axes.barh(row, length, left=left, height=0.62, color=PALETTE[f"kind-{min(i, 5)}"],
                      label=kinds[kind] if row == 0 else None)  # fmt: skip
            left += length
        axes.annotate(f"{left:.1f} {name}", (left, row), xytext=(5, 0), textcoords="offset points", va="center",
                      fontsize=9, color=PALETTE["ink"])  # fmt: skip
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.margins(x=0.12 if width >= WIDE else 0.3)  # room for the sum after the longest bar
    axes.set(title="Memory by kind", xlabel=name)
    figure.legend(loc="outside lower center", ncols=legend_columns)
    return figure


def save(draw: Callable[[float], Figure], path: Path) -> str:
    """Write ``path`` (PNG, wide) and return the wide and the narrow drawing as inline SVG whose colours are CSS
    variables; the page shows one of them. ``draw`` takes the width in inches."""
    figure = draw(WIDE)
    path.write_bytes(png(figure))
    figure.set_layout_engine("none")  # keep the computed layout: computing it takes as long as drawing
    return _for_both_widths(svg(figure, path.stem), draw, path.stem)


def inline(draw: Callable[[float], Figure], name: str) -> str:
    """Return the wide and the narrow drawing as in :func:`save`, without a file."""
    return _for_both_widths(svg(draw(WIDE), name), draw, name)


def _for_both_widths(wide: str, draw: Callable[[float], Figure], name: str) -> str:
    return f'<div class="wide">{wide}</div><div class="narrow">{svg(draw(NARROW), f"{name}-narrow")}</div>'


def png(figure: Figure) -> bytes:
    """Return a figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    return buffer.getvalue()


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an SVG element whose colours are CSS variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _make_inline(buffer.getvalue(), re.sub(r"\W+", "-", name))


def _make_inline(svg: str, prefix: str) -> str:
    """Convert an SVG file to an element of a page: no XML header or namespaces, unique ids, themed colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg).replace("url(#", f"url(#{prefix}-")
    svg = re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{prefix}"', 1)
    svg = re.sub(r"font: ([^;]*?)'DejaVu Sans'[^;\"]*", r"font: \1system-ui, sans-serif", svg)
    for name, value in PALETTE.items():
        svg = re.sub(re.escape(value) + r"\b", f"var(--{name})", svg, flags=re.IGNORECASE)
    return svg
