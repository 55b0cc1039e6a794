"""A model of the training step of an 8B decoder on one H200: what each part costs, and what each lever brings.

    python benchmarks/step_model.py [--json FILE]

The step is the one of suite `step`: Qwen3-VL-8B's decoder, 8,192 tokens in one row, BF16 weights. Nothing is timed
here. Seconds are computed from the stored result files of one H200 and from counts that need no GPU:

    GEMMs       FLOPs / the rate of the shape in suite `gemm`, cuBLAS
    casts       bytes / the bandwidth of the recipe's cast in suite `cast`
    generated   bytes of Inductor's kernels, fused for a GPU by the torch of the timed run (`block_bytes.json` next to
                its results) x seconds a byte of compiled BF16: what its step takes beyond its GEMMs, attention, head
                and optimizer
    fused       bytes / (bandwidth of a copy x fraction); the fraction follows from the instructions of the kernel, see
                :func:`fit_fraction`
    attention, head, optimizer   parts of the eager BF16 step; an FP8 head and FP8 moments by their GEMMs and bytes

The eager FP8 step that was measured tests the model (``error`` in the output). Rows of the table are cumulative. The
last row of each recipe is a step with `preset: fast` and the default attention; further levers are not in the preset,
or need a GPU to be chosen. Ratios are over three BF16 steps: compiled (first); with the loss of a run and the same
attention (second: the head has the same number of products, so that the model cannot tell it from the first); with FP8
moments too (third).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).parent / "results"
H200 = RESULTS / "gpu_nvidia_h200"
RECIPES = ("rowwise", "blockwise", "tensorwise")

TOKENS, HIDDEN, KV, WIDTH, LAYERS, VOCABULARY = 8192, 4096, 1024, 12288, 36, 151936  # Qwen3-VL-8B's decoder
UNIT = TOKENS * HIDDEN * 2  # bytes of one activation in 16 bits, u
#: output features, input features, and the shape of suite `gemm` whose rate is taken
LINEARS = {
    "q": (HIDDEN, HIDDEN, "qkv"),
    "k": (KV, HIDDEN, "kv"),
    "v": (KV, HIDDEN, "kv"),
    "o": (HIDDEN, HIDDEN, "qkv"),
    "gate": (WIDTH, HIDDEN, "gate_up"),
    "up": (WIDTH, HIDDEN, "gate_up"),
    "down": (HIDDEN, WIDTH, "down"),
}
WEIGHTS = LAYERS * sum(n * k for n, k, _ in LINEARS.values())
PARAMETERS = WEIGHTS + 2 * VOCABULARY * HIDDEN
GEMMS = ("fwd", "dgrad", "wgrad")
HEAD_GEMMS = ("fwd", "fwd", "dgrad", "wgrad")  # logits are computed again in backward

# AdamW without master weights reads weight, gradient and moments, and writes weight and moments: bytes a parameter.
BF16_MOMENTS, FP8_MOMENTS = 3 * 2 + 4 * 2, 3 * 2 + 4 * 1.03

#: an H200 multiprocessor copies so many bytes a clock (an error of it is absorbed by the fitted slope), and issues four
#: instructions of warps
COPY_BYTES_PER_CLOCK, ISSUED = 17.1, 4
TILE = 128 * 128


class Kernel(NamedTuple):
    """A kernel of tiles: its form in the ahead-of-time report, warps a 128x128 tile, and bytes an element it moves."""

    form: str
    warps: int
    bytes: float


#: the kernels that were timed, with the case and the candidate of suite `cast`; bytes an element of the slowest pass
TIMED: dict[Kernel, tuple[str, str]] = {
    Kernel("cast 1x128 rows", 16, 3): ("16384 x 4096", "blockwise row triton"),
    Kernel("cast 1x128 both", 8, 4): ("16384 x 4096", "blockwise both triton"),
    Kernel("swiglu blockwise", 16, 8): ("swiglu 16384 x 4096 (8 B an element fused)", "fused triton"),
    Kernel("rmsnorm_tile blockwise", 16, 6): ("rmsnorm 16384 x 4096 (6 B an element fused)", "fused triton"),
    Kernel("swiglu_backward blockwise codes only", 32, 10): (
        "swiglu backward 16384 x 4096 (10 B an element fused)",
        "fused triton",
    ),
}
#: the fused kernels as they are now, without outputs that nothing reads
NOW = {
    "rmsnorm": Kernel("rmsnorm_tile blockwise codes only", 8, 4),
    "gated_mlp": Kernel("swiglu blockwise codes only", 8, 6),
    "swiglu_backward": Kernel("swiglu_backward blockwise codes only", 8, 10),
}
CAST_OF_TENSOR = Kernel("cast tensor both, scale given", 8, 4)
RESULTS_IN_U = {"rmsnorm": 2.0, "gated_mlp": 3.0, "swiglu_backward": 6.0}  # of 16 bits, in both norms or in one MLP


@dataclass(frozen=True)
class Setting:
    """What a step does, in the words of the candidates of suite `step`, and levers that are not built."""

    recipe: str = "bf16"
    fused: bool = False
    fp8_head: tuple[str, ...] = ()  # GEMMs of the head
    fp8_moments: bool = False
    both_layouts: bool = False  # fp8.weight_codes
    wgrad_in_tiles: bool = False  # x of wgrad in blocks of 128x128
    attention_gain: float = 0.0  # seconds, in BF16 too


class Lever(NamedTuple):
    """A change of the setting. ``calls``: the operators by which it is seen in the graph of a block or of a run; empty
    if the preset does not have it."""

    name: str
    change: Mapping[str, bool | float | tuple[str, ...]]
    source: str
    calls: tuple[str, ...] = ()
    recipes: tuple[str, ...] = RECIPES


LEVERS = (
    Lever("compiled", {}, "block_bytes.json", ("cast", "linear", "dgrad", "wgrad")),
    Lever("norms and MLPs fused", {"fused": True}, "aot_triton_3_6.json", ("rmsnorm", "gated_mlp", "swiglu_backward")),
    Lever("gradients of the head in FP8", {"fp8_head": ("dgrad", "wgrad")}, "suite gemm", ("head",)),
    Lever("moments in FP8", {"fp8_moments": True}, "bytes of AdamW", ("adamw",)),
)
OUTSIDE_BLOCKS = {"head", "adamw"}  # levers of these operators are in no block's graph
FURTHER = (
    Lever("logits in FP8 too (fp8.lm_head)", {"fp8_head": GEMMS}, "suite gemm"),
    Lever("fp8.weight_codes: both", {"both_layouts": True}, "suite linear", recipes=("blockwise", "tensorwise")),
    Lever("fp8.recipe: blockwise_2d", {"wgrad_in_tiles": True}, "suite gemm, fwd", recipes=("blockwise",)),
    Lever("attention 60 ms faster, in BF16 too", {"attention_gain": 0.060}, "public figures, no run"),
)


@cache
def suites() -> dict[str, dict[tuple[str, str], dict[str, float]]]:
    """Return suite -> (case, candidate) -> row, of one H200."""
    jobs = json.loads((H200 / "suites.json").read_text())["jobs"]
    return {name: {(r["case"], r["candidate"]): r for r in job["rows"]} for name, job in jobs.items() if "rows" in job}


@cache
def block(candidate: str) -> dict[str, float]:
    """Return the bytes of a block in u: ``generated``, and of each operator; counted with the torch of the timed run,
    whose fusions decided what the BF16 step took."""
    rows = json.loads((H200 / "block_bytes.json").read_text())["rows"]
    (row,) = (row for row in rows if row["candidate"] == candidate)
    return {"generated": row["generated"], **row["moved"]}


def gemm_seconds(name: str, gemm: str, recipe: str, features: tuple[int, int]) -> float:
    """Return the seconds of a GEMM of all tokens with (outputs, inputs), at the rate of the shape that was timed."""
    candidate = recipe if recipe == "bf16" else f"{recipe} torch"
    (row,) = (
        row
        for (case, who), row in suites()["gemm"].items()
        if case.startswith(f"qwen3-8b {name} {gemm} M=") and who == candidate
    )
    return 2 * TOKENS * features[0] * features[1] * row["seconds"] / row["flops"]


def linear_seconds(recipe: str, wgrad_in_tiles: bool = False) -> float:
    """Return the seconds of the three GEMMs of all linear layers."""
    # x of wgrad in 128x128 blocks gives wgrad the form that cuBLAS has for fwd: its rate is taken.
    rate_of = {"wgrad": "fwd"} if wgrad_in_tiles else {}
    return LAYERS * sum(
        gemm_seconds(name, rate_of.get(gemm, gemm), recipe, (n, k)) for n, k, name in LINEARS.values() for gemm in GEMMS
    )


def head_seconds(setting: Setting) -> float:
    """Return the seconds of the head and its loss: in BF16 as measured; in FP8 with its GEMMs at the recipe's rates,
    and with casts of dx (fp32, into both layouts) and of the weight. The cast of h is a thousandth of them."""
    measured, features = step_parts("bf16")["head"], (VOCABULARY, HIDDEN)
    if not setting.fp8_head:
        return measured
    saved = sum(
        gemm_seconds("gate_up", gemm, "bf16", features) - gemm_seconds("gate_up", gemm, setting.recipe, features)
        for gemm in HEAD_GEMMS
        if gemm in setting.fp8_head
    )
    cast = (4 + 2) * TOKENS * VOCABULARY + 3 * VOCABULARY * HIDDEN
    return measured - saved + cast / (copy_bandwidth() * cast_fraction(setting.recipe))


def weight_seconds(setting: Setting) -> float:
    """Return the seconds of casts of weights, and of the relay of their codes for dgrad."""
    recipe, case = setting.recipe, "16384 x 4096"
    layouts = "both" if recipe == "rowwise" else "row"  # of two casts, or of one that fwd and dgrad share
    timed = suites()["cast"][case, f"{recipe} {layouts} torch"]
    seconds = WEIGHTS * timed["seconds"] / _elements(case)
    if recipe == "rowwise":
        return seconds
    if setting.both_layouts:
        return seconds + WEIGHTS / copy_bandwidth()
    name = next(case for case, _ in suites()["linear"])
    once, both = (suites()["linear"][name, f"{recipe} torch{words}"] for words in ("", ", both layouts of w"))
    n, k = (int(word.partition("=")[2]) for word in name.split()[-2:])
    return seconds + WEIGHTS * (once["seconds"] - both["seconds"]) / (n * k)


def copy_bandwidth(case: str = "16384 x 12288") -> float:
    """Return bytes per second of a copy."""
    row = suites()["cast"][case, "copy"]
    return row["bytes"] / row["seconds"]


def cast_fraction(recipe: str) -> float:
    """Return the bandwidth of the cast into both layouts, with its passes for scales, as a fraction of a copy's."""
    row = suites()["cast"]["16384 x 12288", f"{recipe} both torch"]
    return row["bytes"] / row["seconds"] / copy_bandwidth()


def _elements(case: str) -> int:
    rows, _, columns = case.partition(" x ")
    return int(rows) * int(columns)


@cache
def step_parts(candidate: str) -> dict[str, float]:
    """Return the seconds of a measured step (``step``) and of its parts, if it has some."""
    row = suites()["step"]["qwen3_vl_8b, 8192 tokens", candidate]
    parts: dict[str, float] = dict(row["parts"])
    return parts | {"step": row["seconds"]}


def issue_share(kernel: Kernel, executed: int) -> float:
    """Return the clocks in which a multiprocessor issues the instructions of a tile over those that copy its bytes."""
    return (executed * kernel.warps / ISSUED) / (TILE * kernel.bytes / COPY_BYTES_PER_CLOCK)


def timed_kernels() -> list[dict[str, float | str]]:
    """Return the kernels of the timed run: their issue share, and the fraction of a copy's bandwidth they reached. The
    norm's pass over x for its statistics is taken off at the bandwidth of a cast of rows."""
    counted = {row["form"]: row["executed"] for row in json.loads((H200 / "instructions.json").read_text())["rows"]}
    cast = suites()["cast"]
    rows = cast["16384 x 4096", "blockwise row triton"]
    points: list[dict[str, float | str]] = []
    for kernel, place in TIMED.items():
        elements = _elements("16384 x 4096")
        seconds = cast[place]["seconds"]
        if kernel.form.startswith("rmsnorm"):
            seconds -= 2 * elements / (rows["bytes"] / rows["seconds"])
        reached = kernel.bytes * elements / seconds / copy_bandwidth("16384 x 4096")
        points.append({"form": kernel.form, "share": issue_share(kernel, counted[kernel.form]), "fraction": reached})
    return points


@cache
def fit_fraction() -> tuple[float, float]:
    """Return (offset, slope) of the line by which a kernel's fraction of a copy follows from its issue share, by least
    squares over the kernels that were timed."""
    points = timed_kernels()
    slope, offset = np.polyfit([p["share"] for p in points], [p["fraction"] for p in points], 1)
    return float(offset), float(slope)


def fraction(kernel: Kernel) -> float:
    """Return the predicted fraction of a copy's bandwidth of a kernel of today, on sm_90 with Triton 3.6."""
    report = json.loads((RESULTS / "aot_triton_3_6.json").read_text())["rows"]
    (executed,) = (row["executed"] for row in report if row["name"] == kernel.form and row["arch"] == 90)
    offset, slope = fit_fraction()
    return min(1.0, offset + slope * issue_share(kernel, executed))


def operator_seconds(setting: Setting) -> float:
    """Return the seconds of casts and fused operators of all blocks, without the casts of weights."""
    moved = dict(block(f"{setting.recipe}{' fused' if setting.fused else ''}"))
    del moved["generated"]
    unit = UNIT / copy_bandwidth()
    seconds = moved.pop("cast") * unit / cast_fraction(setting.recipe)
    streamed = suites()["cast"]["16384 x 12288", "blockwise row torch"]
    stream = streamed["bytes"] / streamed["seconds"] / copy_bandwidth()  # one pass without a transposition
    if moved and setting.recipe == "blockwise":
        seconds += sum(size * unit / fraction(NOW[name]) for name, size in moved.items())
    elif moved:
        # Scales of whole rows, columns or tensors need the finished result: it is written, and cast in another kernel.
        # The amax of a tensor is taken on the way.
        tensorwise = setting.recipe == "tensorwise"
        cast = fraction(CAST_OF_TENSOR) if tensorwise else cast_fraction(setting.recipe)
        for name, size in moved.items():
            seconds += size * unit / stream  # codes take the bytes of the result that is written instead
            seconds += 2 * RESULTS_IN_U[name] * unit / cast
    return LAYERS * seconds


def predict(setting: Setting) -> dict[str, float]:
    """Return the seconds of each part of a compiled step."""
    bf16 = step_parts("bf16")
    others = linear_seconds("bf16") + bf16["attention"] + bf16["head"] + bf16["optimizer"]
    generated = step_parts("bf16 compiled")["step"] - others
    parts = {
        "attention": bf16["attention"] - setting.attention_gain,
        "head": bf16["head"],
        "optimizer": bf16["optimizer"] * (FP8_MOMENTS / BF16_MOMENTS if setting.fp8_moments else 1),
    }
    if setting.recipe == "bf16":
        return {"gemms": linear_seconds("bf16"), "generated": generated, **parts}
    generated *= block(f"{setting.recipe}{' fused' if setting.fused else ''}")["generated"] / block("bf16")["generated"]
    return {
        "gemms": linear_seconds(setting.recipe, setting.wgrad_in_tiles),
        "generated": generated,
        "operators": operator_seconds(setting),
        "weights": weight_seconds(setting),
        **parts,
        "head": head_seconds(setting),
    }


def eager_error() -> float:
    """Return the relative error of the model for the one FP8 step that was measured: blockwise, eager."""
    setting = Setting("blockwise")
    predicted = step_parts("bf16")["step"] - linear_seconds("bf16") + linear_seconds("blockwise")
    predicted += operator_seconds(setting) + weight_seconds(setting)
    return predicted / step_parts("blockwise")["step"] - 1


def table(recipe: str) -> list[dict[str, object]]:
    """Return a row for each lever, cumulative: first the levers of the preset."""
    # A faster attention is used in BF16 too, so that each row is divided into the BF16 steps with its attention.
    lines: list[dict[str, object]] = []
    setting, before = Setting(recipe), 0.0
    for lever in (*LEVERS, *FURTHER):
        if recipe not in lever.recipes:
            continue
        setting = replace(setting, **lever.change)  # type: ignore[arg-type]
        bf16 = Setting(attention_gain=setting.attention_gain)
        parts = predict(setting)
        seconds, first, third = (
            sum(of.values()) for of in (parts, predict(bf16), predict(replace(bf16, fp8_moments=True)))
        )
        lines.append(
            {
                "recipe": recipe,
                "lever": lever.name,
                "in_preset": bool(lever.calls),
                "source": lever.source,
                "ms": round(1000 * seconds, 1),
                "gain_ms": round(1000 * (before - seconds), 1) if lines else None,
                "parts_ms": {name: round(1000 * value, 1) for name, value in parts.items()},
                "over_bf16_compiled": round(first / seconds, 3),
                "over_first": round(first / seconds, 3),
                "over_third": round(third / seconds, 3),
            }
        )
        before = seconds
    return lines


def model() -> dict[str, Any]:
    """Return the table: ``rows``, the preset last of each recipe, and ``further`` levers, which continue them."""
    lines = [line for recipe in RECIPES for line in table(recipe)]
    offset, slope = fit_fraction()
    return {
        "command": "python benchmarks/step_model.py",
        "bf16_compiled_ms": round(1000 * step_parts("bf16 compiled")["step"], 1),
        "error": round(eager_error(), 4),
        "fraction": {"offset": round(offset, 3), "slope": round(slope, 3), "timed": timed_kernels()},
        "rows": [line for line in lines if line["in_preset"]],
        "further": [line for line in lines if not line["in_preset"]],
    }


def show(result: dict[str, Any]) -> str:
    """Return the table as text."""
    lines = [
        f"BF16 compiled {result['bf16_compiled_ms']} ms (measured); the model misses the eager blockwise step by "
        f"{100 * result['error']:+.1f} %",
        f"{'recipe':11} {'cumulative':50} {'ms':>6} {'gain':>6}  over BF16 compiled  with FP8 moments",
    ]
    for title in ("rows", "further"):
        if title == "further":
            lines.append("not in the preset, or to be chosen on a GPU:")
        for row in result[title]:
            gain = "" if row["gain_ms"] is None else f"{row['gain_ms']:.1f}"
            lines.append(
                f"{row['recipe']:11} {row['lever']:50} {row['ms']:6.1f} {gain:>6}  {row['over_first']:18.3f} "
                f"{row['over_third']:17.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result = model()
    print(show(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
