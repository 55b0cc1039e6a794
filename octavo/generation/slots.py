"""Who is under way: prompts whose samples wait, and one row of state for each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.generation.pages import pages_of
from octavo.generation.request import Prompt, Sampling
from octavo.generation.sampling import choose


@dataclass
class Group:
    """A prompt and its samples.

    `index`: of the prompt in the list given · `pages`: that hold the prompt · `logits` [V]: after it ·
    `next_position`: of the first new token · `started`: samples that have a slot, or had one
    """

    index: int
    prompt: Prompt
    samples: int
    pages: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    next_position: int = 0
    started: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt.input_ids)


class Slots:
    """S sequences. On the host, what is decided by (numpy [S]); on the device, what is computed with ([S, N], N the
    most new tokens).

    `held`: tokens in the cache · `position`: of the token that comes next · `made`: tokens chosen · `pages`: of each
    sequence [S, W] · `promised`: pages that it may still take · `first`: of its pages, those shared with the group
    """

    def __init__(self, slots: int, most: int, pages: int, device: torch.device) -> None:
        self.groups: list[Group | None] = [None] * slots
        self.samples, self.held, self.position, self.made, self.promised, self.first = np.zeros(
            (6, slots), dtype=np.int64
        )
        self.pages = np.zeros((slots, pages), dtype=np.int64)
        self.device = device
        self.tokens = torch.zeros(slots, most, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(slots, most, dtype=torch.float64, device=device)
        self.logps, self.entropies = torch.zeros(2, slots, most, device=device)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.tokens, self.uniforms, self.logps, self.entropies))

    @property
    def active(self) -> np.ndarray:
        return np.array([slot for slot, group in enumerate(self.groups) if group is not None], dtype=np.int64)

    @property
    def free(self) -> list[int]:
        return [slot for slot, group in enumerate(self.groups) if group is None]

    def enter(self, slot: int, group: Group, sample: int, pages: list[int], promised: int, page: int) -> None:
        """Put the next sample of a group into a slot, with the pages that it holds."""
        self.groups[slot] = group
        self.samples[slot], self.promised[slot], self.made[slot] = sample, promised, 0
        self.held[slot], self.position[slot] = group.tokens, group.next_position
        self.first[slot] = group.tokens // page if group.samples > 1 else 0
        self.pages[slot, : len(pages)] = pages

    def choose(
        self, at: Tensor, made: Tensor, logits: Tensor, sampling: Sampling, given: Tensor | None, invariant: bool
    ) -> Tensor:
        """Choose and keep the next token of the slots `at` [B], which have `made` [B], by their logits [B, V]; with
        `given` [T] that one is taken. int64 [B], -1 where logits are no numbers."""
        tokens, logps, entropies = choose(logits, sampling, self.uniforms[at, made], invariant)
        tokens = tokens if given is None else given[made]
        self.tokens[at, made], self.logps[at, made], self.entropies[at, made] = tokens, logps, entropies
        return tokens.masked_fill(logps.isnan(), -1)

    def leave(self, slot: int, page: int) -> list[int]:
        """Free a slot; gives the pages that it held."""
        self.groups[slot], self.promised[slot] = None, 0
        return self.pages[slot, : pages_of(int(self.held[slot]), page)].tolist()
