"""How the ranks of a run are laid out: which axis of the mesh means what, and who stands where on it.

From the slowest axis to the fastest::

    replicate   copies of the model; gradients are summed over them
    shard       parts of a global batch: each trains on rows of its own
    context     ranks that share the tokens of a row

Parameters are sharded over shard x context ranks, which follow one another and so may lie in one node. Experts are
dealt to `expert` of these, the fastest axis among them, and sharded over the rest.
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
        """How many ranks there are."""
        return self.replicate * self.sharded

    @property
    def sharded(self) -> int:
        """How many ranks the parameters of a copy are sharded over."""
        return self.shard * self.context

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh over which FSDP2 works, the slowest first; one of copies only where there are some."""
        return {"shard": self.sharded} if self.replicate == 1 else {"replicate": self.replicate, "shard": self.sharded}

    @property
    def expert_axes(self) -> dict[str, int]:
        """The axes of the mesh of experts, the slowest first: those that experts are dealt to, and over which FSDP2
        shards what each of these has."""
        rest = {"rest": self.sharded // self.expert, "expert": self.expert}
        return rest if self.replicate == 1 else {"replicate": self.replicate, **rest}

    @classmethod
    def of(cls, ranks: int, section: ParallelSection) -> Layout:
        """That of so many ranks, as `parallel` in a configuration asks for it; ``shard`` "auto" takes what is left.

        Raises WorldError where the axes do not multiply to the number of ranks, or `expert` does not divide.
        """
        replicate, shard, context, expert = section.replicate, section.shard, section.context, section.expert
        within = ranks // (replicate * context) if shard == "auto" else int(shard)
        if replicate * within * context != ranks:
            auto = f"{ranks} / {replicate}" + (f" / {context}" if context > 1 else "")
            each = f"shard: {shard}" if shard != "auto" else f"shard: auto, {auto}"
            context_too = f", context: {context}" if context > 1 else ""
            raise WorldError(
                f"parallel asks for replicate: {replicate} and {each}{context_too}, and there are {ranks} ranks. Start "
                "replicate x shard x context ranks, or change parallel.replicate, parallel.shard or parallel.context"
            )
        if within * context % expert:
            raise WorldError(
                f"parallel asks for expert: {expert}, which does not divide the {within * context} ranks of shard x "
                "context. Change parallel.expert"
            )
        return cls(replicate, within, context, expert)
