"""What has no meaning for rows that were made numbers before, and sealed."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.train import DataSection, Dataset

_MADE = (
    *("on_long", "join", "train_on_prompt", "max_pixels", "min_pixels", "max_image_megapixels", "video"),
    *("system", "template_args", "mask_empty_think", "mask_reasoning", "split_turns"),
)
_OF_FILES = ("revision", "split", "subset", "images", "stream", "fetch_gb", "shuffle_buffer", "columns", "format")


def rules(config: Sections) -> Iterator[Finding]:
    """Every rule of `data.sealed` that a configuration breaks."""
    data = config.data
    if not data.sealed:
        return
    if config.train.phase == "rl":
        found = "phase rl rewards words, and sealed rows hold none"
        yield finding("data.sealed", found, "use another phase", "train.phase")
    if config.preference is not None and config.preference.loss == "kto":
        found = "of preferences pairs are sealed, and kto learns from labelled answers"
        yield finding("data.sealed", found, "use a loss of pairs", "preference.loss")
    for key in _MADE:
        if getattr(data, key) != DataSection.model_fields[key].get_default():
            yield finding(f"data.{key}", "has no effect on sealed rows, which are numbers already",
                          f"remove it, and give it to `octavo seal data` (data.{key}=...)", "data.sealed")  # fmt: skip
    for name, sets in (("train", data.train), ("eval", data.eval)):
        for number, dataset in enumerate(sets):
            for key in _OF_FILES:
                if getattr(dataset, key) != Dataset.model_fields[key].get_default():
                    found = "has no effect on a sealed data set, which is a folder of one form"
                    yield finding(f"data.{name}.{number}.{key}", found, "remove it", "data.sealed")
