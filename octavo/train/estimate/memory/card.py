"""The memory of a GPU card, and the part of it that tensors can use."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.base.wording import nearest
from octavo.train.errors import TrainError

# Memory outside of tensors: the CUDA context with its kernels and the workspaces of cuBLAS and NCCL (about
# 1 GB), and the share that the allocator loses to fragmentation. Both are assumptions until a run measures them.
CONTEXT, FRAGMENTS = 1.0e9, 0.02

#: GPU -> its memory in GB, from NVIDIA's data sheets. There is an A100 with 40 GB as well.
GPU_MEMORY = {"a100": 80, "h100": 80, "h800": 80, "h200": 141, "b200": 180}


@dataclass(frozen=True)
class Card:
    """A GPU card. ``size`` is in bytes and taken literally: 80GB is 80e9, although such a card has 85e9 bytes."""

    name: str
    size: int

    @property
    def reserve(self) -> int:
        """The bytes that a run's tensors must leave free."""
        return int(CONTEXT + FRAGMENTS * self.size)

    @property
    def usable(self) -> int:
        return self.size - self.reserve

    @classmethod
    def parse(cls, text: str) -> Card:
        """Parse ``80GB``, ``24GiB``, ``141`` or the name of a GPU; raises TrainError for anything else."""
        words = text.strip().lower()
        if words in GPU_MEMORY:
            return cls(f"{GPU_MEMORY[words]}GB", GPU_MEMORY[words] * 10**9)
        number, unit = words, 1e9
        for ending, size in (("gib", 2.0**30), ("gb", 1e9)):
            if words.endswith(ending):
                number, unit = words[: -len(ending)], size
                break
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 1 <= value <= 10000:
            close = nearest(words, GPU_MEMORY)
            hint = f"did you mean {close}? Else " if close else ""
            raise TrainError(
                f"cannot parse the card {text[:60]!r}: {hint}give its memory, e.g. 80GB, 24GiB or 141, or one of "
                f"{', '.join(GPU_MEMORY)}"
            )
        return cls(text.strip(), int(value * unit))
