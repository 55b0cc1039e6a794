"""A mixture of experts: do its routers choose other experts in FP8, is the load another, and what does it cost?

Forks from high precision after step 200 of 300 go on to the end with the same data, in FP8. Of what they trained, the
held-out tokens are routed in FP8 and in high precision by the same weights; how far apart that is, is held against what
BF16 itself does (the weights of high precision, in fp32 and under BF16 autocast): routers flip between any two
roundings.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import texts
from study import Design, Outcomes, Study, beside_high, gap, held, pooled, row, same_weights
from unit import Unit
from units import TRAINED, UNITS, bare

STEPS, DEPTH, SEEDS = 300, 200, 4
RECIPES = ("blockwise", "tensorwise")
FORK, SAME = 0.0015, 0.001


def units(home: Path) -> list[Unit]:
    cfg = texts.prepare(home, STEPS, "qwen3_moe")
    planned = []
    for seed in range(SEEDS):
        name = f"high-seed-{seed}"
        high = bare(cfg, home, name, seed, f"run.milestones=[{DEPTH}]")
        planned.append(Unit(name, high, keeps=True, look=("moe", "routing")))
        begin = f"run.fork={home / UNITS / name / TRAINED / 'milestones' / f'step_{DEPTH}'}"
        for recipe in RECIPES:
            fork = f"fork-{recipe}-seed-{seed}"
            fp8 = bare(cfg, home, fork, seed, f"fp8.recipe={recipe}", begin)
            planned.append(Unit(fork, fp8, DEPTH, look=("moe", "routing")))
    return planned


def routing(run: Any) -> dict[str, Any]:
    """How the trained model routes held-out tokens in its own precision and in high precision; a model that is in high
    precision, under BF16 autocast and without.

    flips: the share of a token's experts that are others, mean over tokens and layers; load_moved: the share of all
    choices that moved from one expert to another (total variation); busiest: the most loaded expert's load over the
    mean, [own, high], mean over layers.
    """
    import torch

    from octavo import fp8

    if run.fp8:
        ways = nullcontext(), fp8.high_precision(run.model)
    else:
        ways = torch.autocast("cpu", torch.bfloat16), nullcontext()
    chosen = []
    for way in ways:
        with way:
            chosen.append(_chosen(run))
    flips, moved, busiest = [], [], []
    for in_fp8, high in zip(*chosen, strict=True):
        same = (in_fp8[:, :, None] == high[:, None, :]).any(-1).float().mean()
        flips.append(1 - float(same))
        loads = [torch.bincount(of.flatten(), minlength=run.model.config.num_experts).double() for of in (in_fp8, high)]
        moved.append(float((loads[0] - loads[1]).abs().sum() / 2 / loads[1].sum()))
        busiest.append([float(load.max() / load.mean()) for load in loads])
    layers = len(flips)
    return {
        "flips": sum(flips) / layers, "load_moved": sum(moved) / layers,
        "busiest": [sum(pair[side] for pair in busiest) / layers for side in (0, 1)],
    }  # fmt: skip


def _chosen(run: Any) -> list[Any]:
    """The experts [tokens, k] that each router chose, layer by layer, over the held-out tokens."""
    import torch

    from octavo import train

    routers = [module for module in run.model.modules() if type(module).__name__.endswith("TopKRouter")]
    seen: list[list[Any]] = [[] for _ in routers]
    hooks = [
        router.register_forward_hook(lambda module, args, out, into=into: into.append(out[2].cpu()))
        for router, into in zip(routers, seen, strict=True)
    ]
    try:
        train.evaluate(run.model, run.job.evalset, run.job.stepper.forward, run.world)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in seen]


def judge(home: Path, outcomes: Outcomes) -> dict[str, Any]:
    rows = []
    names = [f"high-seed-{seed}" for seed in range(SEEDS)]
    high, _ = pooled(outcomes, names)
    routed = [_routed("BF16, same weights", [one.more for one in high])]
    for recipe in RECIPES:
        forks, lost = pooled(outcomes, [f"fork-{recipe}-seed-{seed}" for seed in range(SEEDS)], beside_high)
        sides = [(one, outcomes[beside_high(one.name)]) for one in forks]
        middle = (DEPTH + STEPS) // 2
        rows.append(row("forks", recipe, [gap(one, other, middle + 1, STEPS) for one, other in sides], FORK, lost))
        rows.append(row("forks, held-out at the end", recipe, [held(one, other) for one, other in sides], FORK, lost))
        rows.append(row("same weights", recipe, same_weights(forks), SAME, lost))
        routed.append(_routed(f"{recipe}, same weights", [one.more for one in forks]))
    return {"rows": rows, "routing": routed}


def _routed(what: str, looks: list[Any]) -> dict[str, Any]:
    """Means over seeds with Student's intervals."""
    from octavo.report.evidence.claims import mean_gap

    line: dict[str, Any] = {"what": what, "units": len(looks)}
    for figure in ("flips", "load_moved"):
        interval = mean_gap([one[figure] for one in looks])
        line[figure] = None if interval is None else [interval.estimate, interval.low, interval.high]
    if looks:
        line["busiest"] = [sum(one["busiest"][side] for one in looks) / len(looks) for side in (0, 1)]
    return line


ASSUMED = "assumed: twice the spread of forks of a dense decoder, since routers flip"
STUDY = Study(
    "moe",
    "Do routers choose other experts in FP8, is the load of experts another, and what does it cost?",
    (Design("forks", SEEDS, 0.00032, ASSUMED, FORK), Design("same weights", SEEDS, 0.0002, ASSUMED, SAME)),
    units, judge,
)  # fmt: skip
