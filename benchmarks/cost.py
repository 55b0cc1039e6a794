"""Fits the constants of `octavo plan --cluster` to published tokens/s, and tests them on other published figures.

    python benchmarks/cost.py --out benchmarks/results/cost.json               fit, test, and print both halves
    python benchmarks/cost.py --write                                          also write the fit into the package
    python benchmarks/cost.py --table --out benchmarks/results/meshes.json     best meshes from 8 to 4,096 GPUs

The figures are published by other projects about their software; nothing here runs on a GPU. All runs use only FSDP,
context and expert parallelism, because the cost model has no terms for tensor and pipeline parallelism. Of runs that
differ in size, the smaller ones are fitted; the larger ones, and runs of other software, are the test set.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from octavo.config import load_config
from octavo.config.sections.train import ParallelSection
from octavo.models.structure import shapes
from octavo.parallel import Layout
from octavo.train.estimate.memory import Card, MemoryEstimator
from octavo.train.estimate.step_time import (
    Cluster,
    Decoder,
    Group,
    Mesh,
    Rows,
    Speeds,
    Work,
    estimate,
    estimate_work,
    search,
)
from octavo.train.estimate.step_time.cluster import SPEEDS_FILE
from octavo.train.estimate.step_time.search import split_long_rows
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens

# of a link's speed, assumed: the traffic of these runs overlaps with computation, so they say little about it
LINKS = 0.8


@dataclass(frozen=True)
class Shape:
    """A language model by its dimensions. ``seen``: tokens that attention sees in half of the layers, 0: all."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    mlp: int = 0
    experts: int = 0
    choices: int = 0
    expert_mlp: int = 0
    seen: int = 0


@dataclass(frozen=True)
class Run:
    """A published run. ``rows`` of ``length`` tokens a micro-batch of the ranks that share it; ``again``: the part of
    the linear layers' forward that is recomputed, 1: all of a block. ``fit``: in the half that is fitted. ``ring``: its
    context ranks pass keys round, which computes attention in pieces."""

    name: str
    source: str
    shape: str
    gpu: str
    ranks: int
    length: int
    rows: int
    rate: float
    fit: bool
    fp8: bool = False
    blocks: str = "compiled"
    again: float = 0.0
    context: int = 1
    expert: int = 1
    ring: bool = False


SHAPES = {
    "Llama 3.1 8B": Shape(32, 4096, 32, 8, 128, 128256, 14336),
    "Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 151936, experts=128, choices=8, expert_mlp=768),
    "GPT-OSS 20B": Shape(24, 2880, 64, 8, 64, 201088, experts=32, choices=4, expert_mlp=2880, seen=128),
    "GPT-OSS 120B": Shape(36, 2880, 64, 8, 64, 201088, experts=128, choices=4, expert_mlp=2880, seen=128),
}
TITAN = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"  # H100 with HBM2e (2.4 TB/s), 500 W
H200 = "torchtitan benchmarks/llama3_8b_h200_2025-06_torchtitan.md"
AUTO = "NeMo AutoModel docs/performance-summary.md"
BLOG = "Hugging Face blog of NVIDIA, 2026-06"
BRIDGE = "Megatron-Bridge docs/performance-summary.md"
L, Q, SMALL, LARGE = SHAPES
_T: dict[str, Any] = {"again": 0.5}  # selective recomputation by operation: every other product
_C: dict[str, Any] = {"again": 1.0, "fp8": True}
_A: dict[str, Any] = {"blocks": "fused"}
RUNS = [
    Run("FSDP", TITAN, L, "h100-2.4", 8, 8192, 2, 5762, True, blocks="eager", **_T),
    Run("+ compile", TITAN, L, "h100-2.4", 8, 8192, 2, 6667, True, **_T),
    Run("+ float8", TITAN, L, "h100-2.4", 8, 8192, 2, 8532, True, fp8=True, **_T),
    Run("FSDP", TITAN, L, "h100-2.4", 128, 8192, 2, 5605, False, blocks="eager", **_T),
    Run("+ compile", TITAN, L, "h100-2.4", 128, 8192, 2, 6514, False, **_T),
    Run("+ float8", TITAN, L, "h100-2.4", 128, 8192, 2, 8380, False, fp8=True, **_T),
    Run("CP 1, 32k", TITAN, L, "h100-2.4", 8, 32768, 1, 3890, True, **_C),
    Run("CP 2, 64k", TITAN, L, "h100-2.4", 8, 65536, 1, 2540, False, context=2, ring=True, **_C),
    Run("CP 4, 128k", TITAN, L, "h100-2.4", 8, 131072, 1, 1071, True, context=4, ring=True, **_C),
    Run("CP 8, 256k", TITAN, L, "h100-2.4", 8, 262144, 1, 548, False, context=8, ring=True, **_C),
    Run("float8", H200, L, "h200", 32, 8192, 2, 10938, True, fp8=True, **_T),
    Run("float8", H200, L, "h200", 64, 8192, 2, 10753, False, fp8=True, **_T),
    Run("EP 8", BLOG, Q, "h100", 8, 4096, 1, 11340, True, again=1.0, expert=8, **_A),
    Run("EP 8", AUTO, Q, "h100", 8, 4096, 4, 12040, False, again=1.0, expert=8, **_A),
    Run("EP 8, flex", AUTO, SMALL, "h100", 8, 4096, 2, 13058, False, expert=8, **_A),
    Run("EP 64, flex", AUTO, LARGE, "h100", 64, 4096, 2, 7626, False, expert=64, **_A),
    Run("FSDP, FP8", BRIDGE, L, "h100", 8, 8192, 1, 14451, False, fp8=True, **_A),
    Run("FSDP, transformers 5", BLOG, Q, "h100", 8, 4096, 1, 3075, False, blocks="eager"),
]  # fmt: skip
# What is fitted: (name, where it begins, between what it stays).
FITTED = [
    ("bf16", 0.55, 0.3, 0.8), ("fp8", 0.45, 0.2, 0.8), ("experts", 0.7, 0.1, 1.0), ("attention", 0.35, 0.1, 0.75),
    ("compiled", 60.0, 0.0, 200.0), ("eager", 120.0, 0.0, 600.0), ("fused", 40.0, 0.0, 200.0), ("ring", 0.8, 0.3, 1.0),
    ("power", 0.85, 0.6, 1.0),
]  # fmt: skip
HOLD = 0.02  # how much a constant is held to where it begins: some runs leave two of them open


def work(run: Run) -> Work:
    """What a run's micro-batch costs; weights are gathered in BF16 and gradients summed in fp32."""
    s, tokens = SHAPES[run.shape], run.rows * run.length
    attention = s.hidden * (s.heads + 2 * s.kv_heads) * s.head_dim + s.heads * s.head_dim * s.hidden
    dense = attention + 3 * s.hidden * s.mlp + s.hidden * s.experts
    expert, head = 3 * s.hidden * s.expert_mlp, s.hidden * s.vocabulary
    seen = run.length if not s.seen else run.length / 2 + s.seen
    forward = {
        "bf16": 2.0 * tokens * (head + (0 if run.fp8 else s.layers * dense)),
        "fp8": 2.0 * tokens * s.layers * dense * run.fp8,
        "experts_bf16": 2.0 * tokens * s.layers * s.choices * expert,
        "attention": 2.0 * tokens * s.layers * s.heads * s.head_dim * seen,
    }
    full = run.again == 1
    again = {kind: run.again * size for kind, size in forward.items() if kind != "attention" or full}
    again["bf16"] -= run.again * 2.0 * tokens * head

    def groups(axes: Layout) -> tuple[Group, ...]:
        ranks, rest = axes.sharded, axes.sharded // axes.expert
        parts = [Group("", ranks, 4 * head // ranks, 8 * head // ranks, False)]  # embedding and head
        parts += [Group("layers", ranks, 2 * s.layers * dense // ranks, 4 * s.layers * dense // ranks, True)]
        if s.experts:
            each = s.layers * s.experts // axes.expert * expert // rest
            parts.append(Group("experts", rest, 2 * each, 4 * each, True))
        return tuple(parts)

    def updated(axes: Layout) -> float:
        return 28.0 * (s.layers * (dense + s.experts * expert) + 2 * head) / axes.sharded

    decoder = Decoder(
        s.layers, s.hidden, s.heads, s.kv_heads, s.head_dim, s.layers if s.experts else 0, s.experts, s.choices
    )
    flops = {kind: 3 * size for kind, size in forward.items()}
    rows, elements = (
        Rows(tokens, recomputed_attention=int(full), recomputed_experts=int(full)),
        float(tokens * s.hidden * s.layers),
    )
    return Work(decoder, rows, flops, forward, elements, groups, updated, again, compiled=True)


def predicted(run: Run, constants: dict[str, float]) -> float:
    """Tokens a second and GPU under these constants."""
    rates = {name: constants[name] for name in ("bf16", "fp8", "experts", "attention")}
    if run.ring:
        rates["attention"] *= constants["ring"]
    speeds = Speeds(**rates, compiled=constants[run.blocks], eager=constants["eager"], links=LINKS)
    memory, hbm = (Card.parse("141GB"), 4.8e12) if run.gpu == "h200" else (Card.parse("80GB"), 3.35e12)
    hbm = 2.4e12 if run.gpu == "h100-2.4" else hbm
    power = constants["power"] if run.gpu == "h100-2.4" else 1.0
    cluster = Cluster(run.gpu, 989e12 * power, 1979e12 * power, memory, hbm, 450e9, 50e9, 8, -(-run.ranks // 8), speeds)
    layout = Layout.from_section(run.ranks, ParallelSection(context=run.context, expert=run.expert))
    mesh = Mesh.from_layout(layout, 1 if run.ring else "auto", SHAPES[run.shape].heads)
    return estimate(work(run), mesh, cluster).rate


def fit() -> dict[str, float]:
    names, begin, low, high = zip(*FITTED, strict=True)
    half = [run for run in RUNS if run.fit]

    def off(x: Any) -> list[float]:
        constants = dict(zip(names, x, strict=True))
        held = [HOLD * (value / start - 1) for value, start in zip(x, begin, strict=True)]
        return [math.log(predicted(run, constants) / run.rate) for run in half] + held

    return dict(zip(names, map(float, least_squares(off, np.array(begin), bounds=(low, high)).x), strict=True))


def judged(constants: dict[str, float]) -> list[dict[str, Any]]:
    out = []
    for run in RUNS:
        rate = predicted(run, constants)
        out.append({**asdict(run), "predicted": round(rate), "off": round(rate / run.rate - 1, 4)})
    return out


def show(rows: list[dict[str, Any]]) -> None:
    for half in (True, False):
        print("fitted:" if half else "judged:")
        print("| model | run | GPUs | published | predicted | off by |\n|---|---|---|---|---|---|")
        some = [row for row in rows if row["fit"] is half]
        for row in some:
            of = f"{row['name']} ({row['source'].split(' ')[0]})"
            gpus = f"{row['ranks']} {row['gpu'].split('-')[0].upper()}"
            print(f"| {row['shape']} | {of} | {gpus} | {row['rate']:,} | {row['predicted']:,} | {row['off']:+.1%} |")
        good = sum(abs(row["off"]) <= 0.15 for row in some)
        print(f"{good} of {len(some)} within 15 %\n")


def write(constants: dict[str, float], path: Path = SPEEDS_FILE) -> None:
    """The constants for `octavo plan --cluster`, with where they come from."""
    names = ("bf16", "fp8", "experts", "attention", "compiled", "eager")
    speeds = {name: round(constants[name], 4) for name in names} | {"links": LINKS}
    sources = sorted({run.source for run in RUNS if run.fit})
    about = "written by benchmarks/cost.py --write: fitted to tokens/s that others publish, no GPU of ours"
    path.write_text(json.dumps({"about": about, "sources": sources, "speeds": speeds}, indent=1) + "\n")


# The table: FP8, packs of samples of 4,096 tokens, a quarter of them of images, four a GPU and step.
MODELS = {
    "Qwen3-VL-8B": "qwen3_vl_8b", "Qwen3-VL-30B-A3B": "qwen3_vl_30b_a3b", "Qwen3-VL-235B-A22B": "qwen3_vl_235b_a22b",
}  # fmt: skip
PACK, SAMPLE = 16384, 4096
SETTINGS = (
    "fp8.recipe=blockwise", "optimizer.states=fp8", "optimizer.master=bf16+16", "train.logits=chunked",
    "train.recompute=full", "train.micro_batch=1", f"train.seq_length={PACK}",
    "data.packing=true",
)  # fmt: skip


def table(most: int) -> list[dict[str, Any]]:
    """The best mesh of each model on 8, 16, ... H100, eight in a node."""
    out = []
    for title, name in MODELS.items():
        counts = {"foundation": PACK, "lm_head": PACK, "image_encoder": PACK, "image_projector": PACK // 4}
        tokens = split_long_rows(Tokens(counts, PACK, 4096, SAMPLE))
        model, family = shapes.shape_model(name)
        cfg = load_config(None, [f"model.path={name}", "data.train=[{path: none}]", "train.steps=1", *SETTINGS])
        plan, _, _ = planning.plan_model(cfg, model, family)
        sizes = MemoryEstimator(cfg, model, family, plan, tokens)
        decoder, ranks = estimate_work(sizes, cfg).decoder, 8
        while ranks <= most:
            sizes.cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"global_batch": 4 * ranks})})
            best = search(sizes, Cluster.parse(f"h100x8x{ranks // 8}"), decoder)[0]
            fits, chosen = best.excess <= 0, best.estimate
            out.append({
                "model": title, "gpus": ranks, "mesh": str(best.mesh) if fits else None,
                "gib": round(best.memory / 2**30, 1), "tokens_per_second_per_gpu": round(chosen.rate) if fits else None,
                "bound": chosen.bound if fits else best.explain(best),
            })  # fmt: skip
            ranks *= 2
    return out


def show_table(rows: list[dict[str, Any]]) -> None:
    print("| model | GPUs | best mesh | GiB per rank | tokens/s per GPU | share of time |\n|---|---|---|---|---|---|")
    for row in rows:
        fits = row["mesh"] is not None
        rate = f"{row['tokens_per_second_per_gpu']:,}" if fits else ""
        cells = (row["model"], f"{row['gpus']:,}", row["mesh"] or "none fits", row["gib"], rate, row["bound"])
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the figures, JSON")
    parser.add_argument(
        "--write", action="store_true", help="keep the constants in octavo/train/estimate/step_time/speeds.json"
    )
    parser.add_argument("--table", action="store_true", help="the best meshes on 8, 16, ... GPUs, and nothing else")
    parser.add_argument("--most", type=int, default=4096, help="GPUs of the table's last rows")
    args = parser.parse_args()
    if args.table:
        best = table(args.most)
        show_table(best)
        if args.out is not None:
            args.out.write_text(json.dumps(best, indent=1) + "\n")
        return 0
    constants = fit()
    rows = judged(constants)
    print(", ".join(f"{name} {value:.3g}" for name, value in constants.items()) + f", links {LINKS} (assumed)\n")
    show(rows)
    if args.out is not None:
        args.out.write_text(json.dumps({"constants": constants, "links": LINKS, "runs": rows}, indent=1) + "\n")
    if args.write:
        write(constants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
