"""The layout of a run's ranks: the axes of the device mesh.

From the slowest axis to the fastest::

    replicate   copies of the model; gradients are summed over them
    shard       parts of a global batch: each part trains on different rows
    context     ranks that share the tokens of a row

Parameters are sharded over shard x context ranks. These are consecutive, so they can be on one node. Experts are
distributed over `expert` of them, the fastest axis, and sharded over the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.sections.train import ParallelSection
from octavo.parallel.errors import WorldError


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.replicate * self.sharded

    @property
    def sharded(self) -> int:
        """The number of ranks over which a copy's parameters are sharded."""
        return self.shard * self.context

    @property
    def axes(self) -> dict[str, int]:
        """The axes of FSDP2's mesh, slowest first; "replicate" only if there is more than one copy."""
        return {"shard": self.sharded} if self.replicate == 1 else {"replicate": self.replicate, "shard": self.sharded}

    @property
    def expert_axes(self) -> dict[str, int]:
        """The axes of the expert mesh, slowest first: experts are distributed over "expert", and FSDP2 shards each
        rank's experts over the others."""
        rest = {"rest": self.sharded // self.expert, "expert": self.expert}
        return rest if self.replicate == 1 else {"replicate": self.replicate, **rest}

    @classmethod
    def from_section(cls, ranks: int, section: ParallelSection) -> Layout:
        """Create the layout of ``ranks`` ranks for the configuration section `parallel`; ``shard: auto`` takes the
        ranks that the other axes leave.

        Raises WorldError if the product of the axes is not the number of ranks, or if `expert` does not divide
        shard x context.
        """
        replicate, shard, context, expert = section.replicate, section.shard, section.context, section.expert
        shards = ranks // (replicate * context) if shard == "auto" else int(shard)
        if replicate * shards * context != ranks:
            auto = f"{ranks} / {replicate}" + (f" / {context}" if context > 1 else "")
            shard_words = f"shard: {shard}" if shard != "auto" else f"shard: auto, {auto}"
            context_words = f", context: {context}" if context > 1 else ""
            raise WorldError(
                f"parallel has replicate: {replicate} and {shard_words}{context_words}, but there are {ranks} ranks. "
                "Start replicate x shard x context ranks, or change parallel.replicate, parallel.shard or "
                "parallel.context"
            )
        if shards * context % expert:
            raise WorldError(
                f"parallel.expert is {expert}, which does not divide the {shards * context} ranks of shard x "
                "context. Change parallel.expert"
            )
        return cls(replicate, shards, context, expert)
