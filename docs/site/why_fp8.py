"""Draws docs/why_fp8.svg, what FP8 gains and costs, from stored measurements: python docs/site/why_fp8.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PICTURE = DOCS / "why_fp8.svg"
RESULTS = DOCS.parent / "benchmarks" / "results"
LARGE = ("qkv", "gate_up", "down")  # matrices of 8B models whose GEMMs keep tensor cores busy
RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "blockwise": "blockwise_1d"}  # name in the file -> today's
COSTS = {
    "blockwise_1d": "every GEMM in FP8",
    "blockwise_1d, attention in high precision": "... attention in BF16",
    "blockwise_1d, fwd in high precision": "forward in BF16",
}

Bar = tuple[str, float, float, bool]  # label, low, high; low == high for a single figure; whether FP8 runs

STYLE = """<style>
text { font: 13px sans-serif; fill: #222 } .head { font-weight: bold } .note { font-size: 11px; fill: #666 }
.page { fill: #fff } .axis { stroke: #999 } .fp8 { fill: #3f51b5 } .bf16 { fill: #9aa0a6 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e6e6 } .note { fill: #aaa } .page { fill: #1e2129 } .axis { stroke: #777 } .fp8 { fill: #8c9eff }
}
</style>"""


def speeds() -> list[Bar]:
    """Return speeds relative to BF16: cuBLAS on the large GEMMs, and an eager step, on one H200."""
    jobs = json.loads((RESULTS / "gpu_nvidia_h200" / "suites.json").read_text(encoding="utf-8"))["jobs"]
    seconds = {(row["case"], row["candidate"]): row["seconds"] for row in jobs["gemm"]["rows"]}
    bars: list[Bar] = []
    for stored, name in RECIPES.items():
        ratios = [
            seconds[case, "bf16"] / time
            for (case, candidate), time in seconds.items()
            if candidate == f"{stored} torch"
            and case.split()[:2] in [["qwen3-8b", matrix] for matrix in LARGE]
            and case.split()[2] in ("fwd", "dgrad", "wgrad")
        ]
        bars.append((f"GEMMs, {name}", min(ratios), max(ratios), True))
    step = {row["candidate"]: row["seconds"] for row in jobs["step"]["rows"]}
    for label, candidate in (("8B step, FP8, eager", "blockwise"), ("8B step, BF16, compiled", "bf16 compiled")):
        ratio = step["bf16"] / step[candidate]
        bars.append((label, ratio, ratio, not candidate.startswith("bf16")))
    return bars


def costs() -> list[Bar]:
    """Return how far SmolLM2's held-out loss ends above high precision's after 100 steps, in percent."""
    rows = json.loads((RESULTS / "study_smollm2.json").read_text(encoding="utf-8"))["rows"]
    gaps = {row["what"]: row["gaps"] for row in rows if row["design"] == "forks, after 100 steps"}
    means = {label: 100 * sum(gaps[what]) / len(gaps[what]) for what, label in COSTS.items()}
    return [(label, mean, mean, True) for label, mean in means.items()]


def panel(top: int, title: str, bars: list[Bar], start: float, end: float, form: str) -> Iterator[str]:
    """Yield a panel of horizontal bars from `start` to each figure; a range is drawn to its upper end, and named."""
    zero, width = 190, 170
    yield f'<text class="head" x="20" y="{top + 30}">{title}</text>'
    for number, (label, low, high, fp8) in enumerate(bars):
        y = top + 50 + 34 * number
        length = width * (high - start) / (end - start)
        figure = form.format(high) if low == high else f"{form.format(low)} to {form.format(high)}"
        yield f'<text x="{zero - 10}" y="{y + 16}" text-anchor="end">{label}</text>'
        yield f'<rect class="{"fp8" if fp8 else "bf16"}" x="{zero}" y="{y}" width="{max(length, 2):.0f}" height="22"/>'
        yield f'<text x="{zero + max(length, 2) + 8:.0f}" y="{y + 16}">{figure}</text>'
    yield f'<line class="axis" x1="{zero}" y1="{top + 44}" x2="{zero}" y2="{top + 50 + 34 * len(bars)}"/>'


def picture() -> str:
    """Return the SVG."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="436" viewBox="0 0 480 436" role="img"'
        ' aria-label="Speed of FP8 relative to BF16 on an H200, and its cost in loss on SmolLM2">',
        STYLE,
        '<rect class="page" width="480" height="436" rx="8"/>',
        *panel(0, "Speed relative to eager BF16, one H200", speeds(), 0, 2, "{:.2f}"),
        *panel(250, "Held-out loss above high precision, SmolLM2-135M", costs(), 0, 0.8, "+{:.2f} %"),
        '<text class="note" x="20" y="240">GEMMs: cuBLAS, 16,384 tokens, large matrices. Step: 8,192 tokens.</text>',
        '<text class="note" x="20" y="424">After 100 steps from the same weights; mean of 2, 1 and 3 pairs.</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
