"""What the axes of a mesh may not be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.rl import BEYOND_SFT


def rules(config: Sections) -> Iterator[Finding]:
    """Every rule on `parallel` that the configuration breaks."""
    axes, train = config.parallel, config.train
    if axes.context > 1 and train.phase in BEYOND_SFT:
        found = f"the rows of phase {train.phase} are not shared by ranks ({axes.context} are asked to)"
        yield finding("parallel.context", found, "use context: 1", "train.phase")
    elif axes.context > 1 and not config.data.packing:
        found = f"{axes.context} ranks share the tokens of packed rows, and rows are padded"
        yield finding("parallel.context", found, "set data.packing: true and train.micro_batch: 1", "data.packing")
    if axes.ulysses != "auto" and axes.context % axes.ulysses:
        found = f"ulysses {axes.ulysses} does not divide context {axes.context}"
        yield finding("parallel.ulysses", found, "use a divisor of it, or auto", "parallel.context")
    if axes.expert > 1 and config.train.phase in BEYOND_SFT:
        found = (
            f"experts are not dealt to ranks in phase {config.train.phase}, whose other forwards are not tried with it"
        )
        yield finding("parallel.expert", found, "use `expert: 1`; experts are sharded all the same", "train.phase")
    if axes.expert > 1 and config.lora is not None:
        found = "experts are not dealt to ranks beside adapters, whose base is gathered in FP8 and has no gradients"
        yield finding("parallel.expert", found, "use `expert: 1`; experts are sharded all the same", "lora")
