"""Who is under way: prompts whose samples wait, and one row of state for each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.generation.kv_cache import run_of
from octavo.generation.request import Prompt, Sampling
from octavo.generation.sampling import choose


@dataclass
class Group:
    """A prompt and its samples.

    `index`: of the prompt in the list given · `pages`: that hold the prompt, once all samples have started its full
    ones · `logits` [V]: after it · `next_position`: of the first new token · `started`: samples that have a slot, or
    had one · `running`: those that have one
    """

    index: int
    prompt: Prompt
    samples: int
    pages: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    next_position: int = 0
    started: int = 0
    running: int = 0

    @property
    def tokens(self) -> int:
        return len(self.prompt.input_ids)


class Slots:
    """S sequences. On the host, what is decided by (numpy [S]); on the device, what is computed with ([S, N], N the
        most new tokens).

        `prompt`: tokens of it · `held`: tokens in the cache · `position`: of the token that comes next · `made`: tokens
    chosen, `told` [S, N] · `runs` [S, R]: the pages that are a slot's own · `pages` [S, W]: of each sequence, its
    prompt's and then those · `changes`: how often others were under way, or elsewhere, than before
    """

    def __init__(self, slots: int, most: int, longest: int, page: int, device: torch.device) -> None:
        self.groups: list[Group | None] = [None] * slots
        self.samples, self.prompt, self.held, self.position, self.made = np.zeros((5, slots), dtype=np.int64)
        self.page, self.run, self.changes = page, run_of(most, page), 0
        self.runs = np.arange(slots * self.run).reshape(slots, self.run)
        self.pages = np.zeros((slots, longest // page + self.run), dtype=np.int64)
        self.told = np.zeros((slots, most), dtype=np.int64)
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

    def enter(self, slot: int, group: Group) -> int:
        """Put the next sample of a group into a slot; gives its number."""
        sample = group.started
        group.started, group.running = sample + 1, group.running + 1
        self.samples[slot], self.made[slot] = sample, 0
        self.prompt[slot] = self.held[slot] = group.tokens
        self.position[slot] = group.next_position
        self._hold(slot, group)
        return sample

    def _hold(self, slot: int, group: Group) -> None:
        full = group.tokens // self.page
        self.groups[slot] = group
        self.pages[slot, :full] = group.pages[:full]
        self.pages[slot, full : full + self.run] = self.runs[slot]
        self.changes += 1

    def choose(
        self, at: Tensor, made: Tensor, logits: Tensor, sampling: Sampling, given: Tensor | None, invariant: bool
    ) -> Tensor:
        """Choose and keep the next token of the slots `at` [B], which have `made` [B], by their logits [B, V]; with
        `given` [T] that one is taken. int64 [B], -1 where logits are no numbers."""
        tokens, logps, entropies = choose(logits, sampling, self.uniforms[at, made], invariant)
        tokens = tokens if given is None else given[made]
        self.tokens[at, made], self.logps[at, made], self.entropies[at, made] = tokens, logps, entropies
        return tokens.masked_fill(logps.isnan(), -1)

    def leave(self, slot: int) -> Group:
        """Free a slot; gives the group whose sample it held."""
        group = self.groups[slot]
        assert group is not None
        self.groups[slot] = None
        group.running -= 1
        self.changes += 1
        return group

    def close_up(self) -> tuple[np.ndarray, np.ndarray]:
        """Move the last sequences into the slots before them that are free: (from where, to where). What their runs
        hold is left to the caller."""
        active = self.active
        free = np.setdiff1d(np.arange(len(active)), active)
        last = active[len(active) - len(free) :]
        if not len(free):
            return last, free
        for kept in (self.samples, self.prompt, self.held, self.position, self.made, self.told):
            kept[free] = kept[last]
        here, there = (torch.from_numpy(x).to(self.device) for x in (free, last))
        for values in (self.tokens, self.uniforms, self.logps, self.entropies):
            values[here] = values[there]
        for slot, before in zip(free.tolist(), last.tolist(), strict=True):
            group = self.groups[before]
            assert group is not None
            self.groups[before] = None
            self._hold(slot, group)
        return last, free
