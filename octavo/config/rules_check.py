"""What checks for silent corruption (`run.check_every`) may not be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.rules.findings import Finding, finding
from octavo.config.rules.lora import runs_fp8
from octavo.config.sections.all_sections import Sections

KEY = "run.check_every"


def rules(config: Sections) -> Iterator[Finding]:
    """Every rule on `run.check_every` that the configuration breaks."""
    every, train = config.run.check_every, config.train
    if not every:
        return
    beside = (
        ("train.compile", train.compile, "a compiled graph shows nobody what its GEMMs multiply"),
        ("train.cuda_graphs", train.cuda_graphs, "a CUDA graph shows nobody what its GEMMs multiply"),
    )
    for other, is_on, found in beside:
        if is_on:
            yield finding(other, found, f"use false, or remove {KEY}", KEY)
    if train.steps is not None and every > train.steps:
        yield finding(KEY, f"no step of {train.steps} is a check", f"use at most {train.steps}", "train.steps")
    fp8 = config.fp8
    head = fp8.lm_head is not None and fp8.lm_head.recipe != "off"
    if fp8.plan is None and not head and not runs_fp8(fp8):
        yield finding(KEY, "checks FP8 GEMMs, and nothing runs in FP8", "remove it, or set fp8.recipe", "fp8.recipe")
