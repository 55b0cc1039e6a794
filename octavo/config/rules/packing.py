"""What cannot stand beside samples that share a row."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.rl import BEYOND_SFT

_PHASES = {
    "preference": "the two answers of a pair are rows of one batch, and what they cost is known only together",
    "rl": "completions are rows of one batch, written and learnt from by the same forward",
}
_KERNELS = {
    "auto": "kernels are timed on rows of one sample",
    "eager": "it tells samples apart by a mask of T x T alone",
    "flash_attention_2": "transformers tells it where samples begin by position ids",
    "flash_attention_3": "transformers tells it where samples begin by position ids",
}


def rules(config: Sections) -> Iterator[Finding]:
    """Every rule that a configuration with `data.packing` breaks."""
    data, train, kernel = config.data, config.train, config.model.attention.foundation
    if train.phase in BEYOND_SFT:
        fix = "remove it; rl.slots and train.micro_batch say how many rows are computed at once"
        fix = fix if train.phase == "rl" else "remove it, and raise train.micro_batch"
        yield finding("data.packing", f"phase {train.phase} packs no rows: {_PHASES[train.phase]}", fix, "train.phase")
        return
    beside = (
        ("train.micro_batch", train.micro_batch != 1, f"a micro-batch is one pack, and {train.micro_batch} are asked",
         "use 1, and raise train.seq_length for longer packs"),
        ("train.compile", train.compile, "every pack ends its samples elsewhere, and would be compiled anew",
         "use `compile: false`"),
        ("train.cuda_graphs", train.cuda_graphs, "every pack ends its samples elsewhere, and a graph replays one",
         "use `cuda_graphs: false`"),
        ("model.attention", kernel in _KERNELS, _KERNELS.get(kernel, ""),
         "use sdpa, which takes torch's flash attention for packs where it can, or cudnn, flash, efficient or math"),
    )  # fmt: skip
    for number, entry in enumerate(data.train if train.epochs is not None else ()):
        if entry.stream:
            reason = f"packs are counted before the first step, and data.train.{number} is streamed, read as steps come"
            fix = "give train.steps, or leave stream out"
            yield finding("train.epochs", reason, fix, f"data.train.{number}.stream", "data.packing")
    for key, is_there, reason, fix in beside:
        if is_there:
            yield finding(key, f"{reason} (data.packing: true)", fix, "data.packing")
