"""Settings that do not work with packing."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.rl import BEYOND_SFT

_PHASES = {
    "preference": "the two answers of a pair are rows of one batch, and their loss needs both",
    "rl": "completions are rows of one batch, generated and trained by the same forward",
}
_KERNELS = {
    "auto": "kernels are timed on rows of one sample",
    "eager": "it separates samples only by a mask of T x T",
    "flash_attention_2": "transformers passes it the starts of samples by position ids",
    "flash_attention_3": "transformers passes it the starts of samples by position ids",
}


def rules(config: Sections) -> Iterator[Finding]:
    """Yield the findings of a configuration with `data.packing`."""
    data, train, kernel = config.data, config.train, config.model.attention.foundation
    if train.phase in BEYOND_SFT:
        fix = "remove it; rl.slots and train.micro_batch set how many rows are computed at once"
        fix = fix if train.phase == "rl" else "remove it, and raise train.micro_batch"
        yield finding(
            "data.packing", f"phase {train.phase} does not pack rows: {_PHASES[train.phase]}", fix, "train.phase"
        )
        return
    conflicts = (
        ("train.micro_batch", train.micro_batch != 1,
         f"a micro-batch is one pack, and micro_batch is {train.micro_batch}",
         "use 1, and raise train.seq_length for longer packs"),
        ("train.compile", train.compile,
         "the boundaries of samples differ in every pack, which would be compiled again",
         "use `compile: false`"),
        ("train.cuda_graphs", train.cuda_graphs,
         "the boundaries of samples differ in every pack, and a graph replays fixed ones",
         "use `cuda_graphs: false`"),
        ("model.attention", kernel in _KERNELS, _KERNELS.get(kernel, ""),
         "use sdpa, which uses torch's flash attention for packs where possible, or cudnn, flash, efficient or math"),
    )  # fmt: skip
    # Epochs of packs need the lengths of all rows, which a stream does not have before it is read.
    for number, entry in enumerate(data.train if train.epochs is not None else ()):
        if entry.stream:
            reason = f"packs are counted before the first step, and data.train.{number} is streamed during training"
            fix = "set train.steps, or remove stream"
            yield finding("train.epochs", reason, fix, f"data.train.{number}.stream", "data.packing")
    for key, is_there, reason, fix in conflicts:
        if is_there:
            yield finding(key, f"{reason} (data.packing: true)", fix, "data.packing")
