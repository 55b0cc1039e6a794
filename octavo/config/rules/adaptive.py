"""Settings that do not work with precision that changes during a run: `fp8.adapt`, and rules for some steps."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.names import COMPONENTS, is_delayed
from octavo.config.sections.rl import BEYOND_SFT

ADAPT = "fp8.adapt"


def rules(config: Sections) -> Iterator[Finding]:
    """Yield the findings on `fp8.adapt` and on the spans of `fp8.rules`."""
    fp8 = config.fp8
    yield from _spans(config)
    timed = [f"fp8.rules.{n}" for n, rule in enumerate(fp8.rules) if rule.first is not None or rule.last is not None]
    changing = [*([ADAPT] if fp8.adapt is not None else []), *timed]
    if changing:
        yield from _conflicts(config, changing[0])
    if timed and fp8.lm_head is not None and fp8.lm_head.recipe != "off":
        reason = "the head has one recipe for the whole run"
        yield finding("fp8.lm_head", reason, "use `recipe: off` there, or remove the spans of rules", timed[0])
    if fp8.adapt is not None:
        yield from _adapt(config)


def _spans(config: Sections) -> Iterator[Finding]:
    steps = config.train.steps
    for number, rule in enumerate(config.fp8.rules):
        key = f"fp8.rules.{number}"
        if rule.first is not None and rule.last is not None:
            reason = "a rule holds either in the first steps or in the last ones"
            yield finding(f"{key}.last", reason, "write a rule for each", f"{key}.first")
        if rule.first is not None and steps is not None and rule.first >= steps:
            reason = f"the first {rule.first} are all of {steps} steps"
            yield finding(f"{key}.first", reason, f"remove it, or use at most {steps - 1}", "train.steps")


def _conflicts(config: Sections, key: str) -> Iterator[Finding]:
    """Settings that need one recipe for a whole run."""
    fp8, train, what = config.fp8, config.train, "fp8.adapt" if key == ADAPT else "the rule's span"
    parts = {f"fp8.{name}": part for name in COMPONENTS if (part := getattr(fp8, name)) is not None}
    param = [f"{name}.param" for name, part in {"fp8": fp8, **parts}.items() if part.param]
    delayed = [f"{name}.recipe" for name, part in {"fp8": fp8, **parts}.items() if is_delayed(part.recipe)]
    delayed += [f"fp8.rules.{n}.recipe" for n, rule in enumerate(fp8.rules) if is_delayed(rule.recipe)]
    delayed += ["fp8.candidates"] if any(map(is_delayed, fp8.candidates)) else []
    conflicts = (
        ("train.compile", train.compile, "a compiled graph holds the recipes that it was traced with", "use false"),
        ("train.cuda_graphs", train.cuda_graphs, "a CUDA graph holds the kernels that it captured", "use false"),
        ("fp8.fuse", fp8.fuse == "on", "a fused block runs the recipe that it was fused for", "use `fuse: off`"),
        (param[0] if param else "fp8.param", bool(param), "weights are codes of one recipe between steps", "use false"),
        (delayed[0] if delayed else "fp8.recipe", bool(delayed),
         "the amax histories of delayed scaling belong to one recipe", "use tensorwise"),
        ("lora", config.lora is not None, "the frozen base of adapters has one recipe", "remove it"),
        ("model.load_in_fp8", bool(config.model.load_in_fp8.kinds), "frozen codes belong to one recipe",
         "remove it"),
        ("train.exchange", train.exchange == "fp8", "ranks exchange the codes of one recipe", "use `exchange: stored`"),
        ("train.phase", train.phase in BEYOND_SFT,
         f"phase {train.phase} compares the policy with a reference or a rollout of one precision",
         "use sft or pretrain"),
    )  # fmt: skip
    for other, is_on, reason, fix in conflicts:
        if is_on:
            yield finding(other, reason, f"{fix}, or remove {what}", key)


def _adapt(config: Sections) -> Iterator[Finding]:
    fp8, adapt, steps = config.fp8, config.fp8.adapt, config.train.steps
    assert adapt is not None
    if steps is not None and adapt.every > steps:
        reason = f"none of {steps} steps is a check"
        yield finding(f"{ADAPT}.every", reason, f"use at most {steps}", "train.steps")
    if adapt.recipes is not None and len(set(adapt.recipes)) < len(adapt.recipes):
        yield finding(f"{ADAPT}.recipes", "a recipe is named more than once", "name each once")
    if fp8.plan is None and not fp8.in_use:
        yield finding(ADAPT, "has no effect where nothing runs in FP8", "remove it, or set fp8.recipe", "fp8.recipe")
    parts = (fp8, *(part for name in COMPONENTS if (part := getattr(fp8, name)) is not None), *fp8.rules)
    if adapt.time is not None and not any(part.recipe == "auto" for part in parts):
        reason = "needs the times of layers, which recipe auto measures"
        yield finding(f"{ADAPT}.time", reason, "use `recipe: auto`, or remove it and see budget", "fp8.recipe")
