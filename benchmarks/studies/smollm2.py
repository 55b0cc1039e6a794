"""SmolLM2: does FP8 keep the loss of a pretrained model, and what does it cost where?

    equal weights    each recipe on the pretrained weights without training: losses of held-out windows, one gradient
    layers           the same with FP8 in some layers, GEMMs or operands only
    forks            continued training on text from the pretrained weights, FP8 and high precision with the same data
                     in the same order: held-out loss after 25, 50 and 100 steps; some longer, or with another rate
    parts            forks of 40 steps with one thing in FP8 at a time: which of them makes the gap grow
    instructions     forks on instruction rows, full-parameter and LoRA on an FP8 base

High precision is fp32. The list of units is the rule by which the study is cut: where the processor hours end
(--hours), the units that are left are the last ones of the list. Done units are kept in
benchmarks/results/smollm2_units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import smollm2_equal as equal
import smollm2_plots
import smollm2_text as text
from smollm2_equal import ATTENTION, MLP
from study import Design, Outcomes, Study, held, row
from unit import Unit
from units import bare

from octavo.config import Config, load_config_text
from octavo.config.config import PRESETS

STEPS, SHORT, LONG = 100, 40, 300
WATCHED = (25, 40, 50, 200)
FEW, MANY = 24, 48  # held-out windows at a look, and at the end
FORK = 0.0015  # the bar, as a share of the loss
SAME = 0.0005  # of two recipes of which one shall replace the other, on both sides
SEEDS, GOAL_SEEDS = 4, 3  # of the goal a fourth comes after one seed of everything
LR = "5e-5"
FIRST_LAST = tuple(f"**.layers.{number}.**" for number in (0, 1, 28, 29))
CONFIG = """
model: {{path: {model}}}
fp8: {{recipe: "off"}}
data: {{train: [{{path: {data}/{rows}.train.jsonl}}], eval: {eval}}}
train: {{phase: {phase}, steps: {steps}, seq_length: 256, micro_batch: 2, global_batch: 2, lr: {lr}, schedule: constant,
  warmup: 5}}
"""

BLOCKWISE = "fp8.recipe=blockwise_1d"  # it was named blockwise when these units were trained


def rules(*settings: str) -> str:
    return f"fp8.rules=[{', '.join('{' + setting + '}' for setting in settings)}]"


def without(*globs: str) -> str:
    """Layers that stay in high precision."""
    return rules(*(f'match: "{glob}", recipe: "off"' for glob in globs))


#: what is in FP8 -> the words of its configuration, or (operands,) that are planted
PARTS: dict[str, tuple[str, ...]] = {
    "fwd": (BLOCKWISE, rules('match: "**.layers.**", dgrad: bf16, wgrad: bf16')),
    "dgrad": (BLOCKWISE, rules('match: "**.layers.**", fwd: bf16, wgrad: bf16')),
    "wgrad": (BLOCKWISE, rules('match: "**.layers.**", fwd: bf16, dgrad: bf16')),
    "weights": ("weights",),
    "activations": ("activations",),
    "gradients": ("gradients",),
    "E5M2 gradients": (BLOCKWISE, "fp8.format=hybrid"),
    "without the first and last 2 blocks": (BLOCKWISE, without(*FIRST_LAST)),
    "without attention": (BLOCKWISE, without("**.self_attn.*")),
}
#: parts that tell why, and what to do: with a second seed first
CAUSES = ("activations", "weights", "without the first and last 2 blocks", "without attention")
#: settings that were chosen from the costs at equal weights, where the forward causes all of the gap and attention half
GOAL, HALF = "blockwise_1d, fwd in high precision", "blockwise_1d, attention in high precision"
TILES = "blockwise, fwd in high precision"  # compared with GOAL, of which it differs in wgrad
FAST = "blockwise_1d, preset fast"  # compiled blocks are left out: they compute the same, and take minutes here
LOGITS = "blockwise_1d, preset fast with logits in FP8"
_PRESET = {
    **PRESETS["fast"],
    ("fp8", "lm_head"): {"recipe": "blockwise_1d", "fwd": "bf16"},
}  # whose head has its recipe
SETTINGS: dict[str, tuple[str, ...]] = {
    GOAL: (BLOCKWISE, rules('match: "**.layers.**", fwd: bf16')),
    TILES: ("fp8.recipe=blockwise", rules('match: "**.layers.**", fwd: bf16')),
    HALF: (BLOCKWISE, without("**.self_attn.*")),
    FAST: (BLOCKWISE, *(f"{s}.{key}={value}" for (s, key), value in _PRESET.items() if key != "compile")),
    LOGITS: (BLOCKWISE, "fp8.fuse=on", "fp8.lm_head={recipe: blockwise_1d}", "optimizer.states=fp8"),
}
RECIPES = ("rowwise", "tensorwise", "mxfp8", "delayed")


def config(steps: int, lr: str = LR, rows: str = "text") -> Config:
    phase = "pretrain" if rows == "text" else "sft"
    held_out = f"[{{path: {text.DATA}/instructions.eval.jsonl, max_samples: 128}}]" if phase == "sft" else "[]"
    values = {"rows": rows, "phase": phase, "steps": steps, "lr": lr, "eval": held_out}
    return load_config_text(CONFIG.format(model=text.MODEL, data=text.DATA, **values), ())


def fork(
    home: Path, name: str, cfg: Config, seed: int, words: tuple[str, ...] = (), plant: tuple[object, ...] = ()
) -> Unit:
    steps = cfg.train.steps
    if cfg.data.eval:
        return Unit(name, bare(cfg, home, name, seed, *words), plant=plant)
    return Unit(
        name,
        bare(cfg, home, name, seed, *words),
        plant=plant,
        watch=("smollm2_text", "watch", FEW, False),
        watch_at=tuple(step for step in WATCHED if step < steps),
        look=("smollm2_text", "watch_end", FEW if steps == SHORT else MANY),
    )


def pair(home: Path, kind: str, cfg: Config, seed: int, recipe: str = "blockwise_1d") -> list[Unit]:
    """A fork in FP8 and its other side, with other settings than most."""
    sides = {"high": (), recipe: (f"fp8.recipe={recipe}",)}
    return [fork(home, f"{kind}-{side}-seed-{seed}", cfg, seed, words) for side, words in sides.items()]


LORA = ("lora.rank=16", "lora.alpha=32")
_FP8_BASE = (*LORA, BLOCKWISE, "model.load_in_fp8=blockwise")
LORA_SIDES = {"high": LORA, "fp8": _FP8_BASE, "fwd": (*_FP8_BASE, "fp8.fwd=bf16")}


def lora(home: Path, seed: int) -> list[Unit]:
    cfg = config(SHORT, "2e-4", "instructions")
    return [fork(home, f"lora-{side}-seed-{seed}", cfg, seed, words) for side, words in LORA_SIDES.items()]


def units(home: Path) -> list[Unit]:
    """In the order of their importance."""
    text.check()
    return [*equal_units(), *forks(home)]


def equal_units() -> Iterator[Unit]:
    yield Unit(equal.HIGH, None, task=("smollm2_equal", "high"))
    yield Unit("equal-bf16", None, task=("smollm2_equal", "bf16"))
    for recipe in ("blockwise_1d", *RECIPES):
        yield Unit(f"equal-{recipe}", None, task=("smollm2_equal", "recipe", recipe))
    yield Unit("equal-head", None, task=("smollm2_equal", "head", "blockwise_1d"))
    yield Unit("equal-torchao", None, task=("smollm2_equal", "torchao", "tensorwise"))
    for what in ("weights", "activations"):
        yield Unit(f"equal-{what}", None, task=("smollm2_equal", "operands", "blockwise_1d", what))
    yield Unit("equal-one-cast", None, task=("smollm2_equal", "operands", "one cast", "everything"))
    yield Unit("equal-noise", None, task=("smollm2_equal", "noise", "blockwise_1d"))
    for way, size in UPDATES.items():
        yield Unit(f"equal-{way}", None, task=("smollm2_equal", "update", "blockwise_1d", size))
    for name, (globs, gemms) in LAYERS.items():
        yield Unit(f"layers-{name}", None, task=("smollm2_equal", "layers", "blockwise_1d", globs, gemms))


UPDATES = {"update-down": -1e-7, "update-up": 1e-7}  # along the gradient, of every weight
ALL = ["fwd", "dgrad", "wgrad"]
_THIRDS = {"first": range(10), "middle": range(10, 20), "last": range(20, 30)}
LAYERS: dict[str, tuple[list[str], list[str]]] = {
    **{layer: ([f"**.{layer}"], ALL) for layer in (*ATTENTION, *MLP)},
    "attention": (["**.self_attn.*_proj"], ALL),
    "mlp": (["**.mlp.*_proj"], ALL),
    "gate_up": (["**.gate_proj", "**.up_proj"], ALL),
    **{f"{third}-third": ([f"**.layers.{number}.**" for number in of], ALL) for third, of in _THIRDS.items()},
    "without-down_proj": ([f"**.{layer}" for layer in (*ATTENTION, *MLP) if layer != "down_proj"], ALL),
    "without-v_o": ([f"**.{layer}" for layer in ("q_proj", "k_proj", *MLP)], ALL),
    "without-ends": ([f"**.layers.{number}.**" for number in range(2, 28)], ALL),
    "fwd": (["**.layers.**"], ["fwd"]),
    "dgrad": (["**.layers.**"], ["dgrad"]),
    "wgrad": (["**.layers.**"], ["wgrad"]),
    "dgrad-wgrad": (["**.layers.**"], ["dgrad", "wgrad"]),
}  # 20 configurations


def forks(home: Path) -> Iterator[Unit]:
    cfg, short = config(STEPS), config(SHORT)
    # Three seeds of the goal, one seed of each recipe and part, LoRA, blockwise_1d, and then other settings and seeds.
    for seed in range(GOAL_SEEDS):
        yield from goal_forks(home, cfg, seed)
    yield fork(home, "blockwise_1d-seed-0", cfg, 0, (BLOCKWISE,))
    yield from recipe_forks(home, cfg, 0)
    yield from part_forks(home, short, 0)
    for seed in range(SEEDS):
        yield from lora(home, seed)
    yield from setting_forks(home, cfg, LOGITS, (0,))
    yield from setting_forks(home, cfg, FAST, (0,))
    yield from part_forks(home, short, 1, CAUSES)
    yield fork(home, "blockwise_1d-seed-1", cfg, 1, (BLOCKWISE,))
    yield from setting_forks(home, cfg, TILES, range(GOAL_SEEDS))
    yield fork(home, "blockwise_1d-seed-2", cfg, 2, (BLOCKWISE,))
    yield fork(home, "blockwise_1d-seed-3", cfg, 3, (BLOCKWISE,))
    yield from peer_forks(home, cfg, 0)
    yield from other_settings(home)
    yield from goal_forks(home, cfg, GOAL_SEEDS)
    yield from setting_forks(home, cfg, FAST, range(1, GOAL_SEEDS))
    yield from part_forks(home, short, 1, [part for part in PARTS if part not in CAUSES])
    yield from peer_forks(home, cfg, 1)
    for seed in range(1, SEEDS):
        yield from recipe_forks(home, cfg, seed)


def goal_forks(home: Path, cfg: Config, seed: int) -> Iterator[Unit]:
    yield fork(home, f"high-seed-{seed}", cfg, seed)
    yield from setting_forks(home, cfg, GOAL, (seed,))


def setting_forks(home: Path, cfg: Config, setting: str, seeds: Iterable[int]) -> Iterator[Unit]:
    for seed in seeds:
        yield fork(home, f"{folder_name(setting)}-seed-{seed}", cfg, seed, SETTINGS[setting])


def other_settings(home: Path) -> Iterator[Unit]:
    """A smaller learning rate, and more steps."""
    yield from pair(home, "slow", config(STEPS, "2e-5"), 0)
    long = config(LONG)
    yield from pair(home, "long", long, 0)
    yield fork(home, "long-rowwise-seed-0", long, 0, ("fp8.recipe=rowwise",))


def recipe_forks(home: Path, cfg: Config, seed: int) -> Iterator[Unit]:
    for recipe in RECIPES:
        yield fork(home, f"{recipe}-seed-{seed}", cfg, seed, (f"fp8.recipe={recipe}",))
    yield from setting_forks(home, cfg, HALF, (seed,))


def peer_forks(home: Path, cfg: Config, seed: int) -> Iterator[Unit]:
    """torchao's float8, and a pair on instructions."""
    yield fork(home, f"torchao-seed-{seed}", cfg, seed, (), ("smollm2_equal", "plant_torchao", "tensorwise"))
    yield from pair(home, "instructions", config(STEPS, LR, "instructions"), seed)


def part_forks(home: Path, cfg: Config, seed: int, parts: Iterable[str] = tuple(PARTS)) -> Iterator[Unit]:
    for part in parts:
        words = PARTS[part]
        name = f"part-{part.replace(' ', '_')}-seed-{seed}"
        if len(words) == 1:
            yield fork(home, name, cfg, seed, (), ("smollm2_operands", "plant", "blockwise_1d", *words))
        else:
            yield fork(home, name, cfg, seed, words)


def folder_name(setting: str) -> str:
    return setting.replace(",", "").replace(" ", "_")


def gaps(outcomes: Outcomes, name: str, high: str, step: int, side: str = "own") -> list[float]:
    """Relative gaps of the forks of all seeds at a step, or on held-out rows at the end (step 0); of the FP8 weights in
    high precision for ``side`` "high"."""
    values = []
    for seed in range(SEEDS):
        low, full = (outcomes.get(f"{of}-seed-{seed}") for of in (name, high))
        if low is None or full is None or low.failure or full.failure:
            continue
        if not step:
            values.append(held(low, full, side))
            continue
        look, exact = (of.more.get(str(step)) for of in (low, full))
        if look and exact and side in look:
            count = min(len(look[side]), len(exact["own"]))  # a look at the end has more windows than an earlier one
            values.append(sum(look[side][:count]) / sum(exact["own"][:count]) - 1)
    return values


def judge(home: Path, outcomes: Outcomes) -> dict[str, object]:
    # By what is in FP8: the gap as it trains, and of its weights in high precision.
    named = {"blockwise_1d": "blockwise_1d", **{recipe: recipe for recipe in RECIPES}, "torchao tensorwise": "torchao"}
    named |= {setting: folder_name(setting) for setting in SETTINGS}
    rows = [
        row(design, what, values, FORK)
        for what, name in named.items()
        for design, values in (
            (f"forks, after {STEPS} steps", gaps(outcomes, name, "high", STEPS)),
            (
                f"forks, after {STEPS} steps, FP8's weights in high precision",
                gaps(outcomes, name, "high", STEPS, "high"),
            ),
        )
        if values
    ]
    others = (
        (
            f"forks, after {STEPS} steps",
            "blockwise compared with blockwise_1d, fwd in high precision",
            folder_name(TILES),
            folder_name(GOAL),
            STEPS,
        ),
        ("forks on instructions", "blockwise_1d", "instructions-blockwise_1d", "instructions-high", 0),
        (f"LoRA, after {SHORT} steps", "FP8 base", "lora-fp8", "lora-high", 0),
        (f"LoRA, after {SHORT} steps", "FP8 base, fwd in high precision", "lora-fwd", "lora-high", 0),
        ("forks, learning rate 2e-5", "blockwise_1d", "slow-blockwise_1d", "slow-high", STEPS),
        (f"forks, after {LONG} steps", "blockwise_1d", "long-blockwise_1d", "long-high", LONG),
        (f"forks, after {LONG} steps", "rowwise", "long-rowwise", "long-high", LONG),
    )
    for design, what, name, high, step in others:
        equality = high == folder_name(GOAL)
        sides = ("own", "high") if name == "lora-fp8" else ("own",)
        for side, end in zip(sides, ("", ", evaluated in high precision"), strict=False):
            if values := gaps(outcomes, name, high, step, side):
                rows.append(row(design + end, what, values, SAME if equality else FORK, both_sides=equality))
    curves: dict[str, object] = {}
    for what, name in named.items():
        at = {0: _gap_before(outcomes, BEFORE.get(name, f"equal-{name}"))}
        at |= {step: gaps(outcomes, name, "high", step) for step in (*WATCHED, STEPS)}
        curves[what] = {"steps": [s for s, of in at.items() if of], "gaps": [of for of in at.values() if of]}
    parts = {"everything": gaps(outcomes, "blockwise_1d", "high", SHORT)} | {
        part: gaps(outcomes, f"part-{part.replace(' ', '_')}", "high", SHORT) for part in PARTS
    }
    trained = {part: gaps(outcomes, f"part-{part.replace(' ', '_')}", "high", SHORT, "high") for part in PARTS}
    return {
        "rows": rows,
        "growth": curves,
        "equal": _equal(outcomes),
        "parts": [{"part": part, "gaps": of, "in_high_precision": trained.get(part, [])} for part, of in parts.items()],
    }


def _gap_before(outcomes: Outcomes, name: str) -> list[float]:
    """The gap before the first step, on the windows of the last look."""
    unit, high = outcomes.get(name), outcomes.get(equal.HIGH)
    if unit is None or high is None:
        return []
    return [equal.summarize({"losses": unit.more["losses"][:MANY]}, high.more["losses"])["gap"]]


#: forks whose unit without training has another name: it computes the same forward
BEFORE = {folder_name(GOAL): equal.HIGH, folder_name(TILES): equal.HIGH, folder_name(HALF): "layers-mlp"}


def _equal(outcomes: Outcomes) -> list[dict[str, object]]:
    """A line for each configuration at equal weights."""
    high = outcomes.get(equal.HIGH)
    if high is None:
        return []
    lines = []
    for name, outcome in outcomes.items():
        if name.startswith(("equal-", "layers-")) and name != equal.HIGH:
            figures = dict(outcome.more)
            measured = equal.summarize(figures, high.more["losses"]) if figures["losses"] else {}
            figures.pop("losses")
            if "high" in figures:  # losses of the same weights in high precision
                figures["gap_in_high_precision"] = equal.summarize(
                    {"losses": figures.pop("high")}, high.more["losses"]
                )["gap"]
            lines.append({"what": name, **measured, **figures})
    return lines


def draw(result: Mapping[str, object], path: Path) -> None:
    smollm2_plots.draw(result, FORK, path)


TWO_FORKS = "three seeds of the second compared with high precision scatter by 0.005 %; two of these, rounded up"
STUDY = Study(
    "smollm2",
    "Does FP8 keep the loss of a pretrained model (SmolLM2-135M), and which part of it costs what?",
    (
        Design("forks, blockwise_1d", SEEDS, 0.0008, "two seeds of 40 steps, which agreed within 0.16 points", FORK),
        Design("forks, other recipes", 2, 0.0008, "the same", FORK),
        Design(f"forks, {GOAL}", GOAL_SEEDS, 0.0008, "the same", FORK),
        Design(f"forks, {TILES} compared with {GOAL}", GOAL_SEEDS, 0.0001, TWO_FORKS, SAME, both_sides=True),
    ),
    units,
    judge,
    draw,
    archive=equal.ARCHIVE,
)
