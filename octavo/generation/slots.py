"""State of active sequences: prompts with their samples, and one row per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.generation.kv_cache import count_run_pages
from octavo.generation.request import Prompt, Sampling
from octavo.generation.sampling import choose


@dataclass
class Group:
    """A prompt and its samples.

    index          index of the prompt in the call's list
    pages          pages of the prompt; once all samples have started, only the full ones
    logits         [V] after the prompt, until all samples have started
    next_position  position of the first new token
    started        number of samples that have or had a slot
    running        number of samples that have a slot
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
    """The state of S slots: on the host (numpy [S]) for scheduling, on the device ([S, N] for N new tokens) for
    computing.

    prompt       number of prompt tokens
    cached       number of tokens in the cache
    position     position of the next token
    generated    number of tokens generated so far
    host_tokens  [S, N]: those tokens
    runs         [S, R]: the pages of each slot's run
    pages        [S, W]: the pages of each sequence, first its prompt's and then its run's
    changes      counts changes of the assignment
    """

    def __init__(self, slots: int, max_new_tokens: int, longest: int, page: int, device: torch.device) -> None:
        self.groups: list[Group | None] = [None] * slots
        self.samples, self.prompt, self.cached, self.position, self.generated = np.zeros((5, slots), dtype=np.int64)
        self.page, self.run, self.changes = page, count_run_pages(max_new_tokens, page), 0
        self.runs = np.arange(slots * self.run).reshape(slots, self.run)
        self.pages = np.zeros((slots, longest // page + self.run), dtype=np.int64)
        self.host_tokens = np.zeros((slots, max_new_tokens), dtype=np.int64)
        self.device = device
        self.tokens = torch.zeros(slots, max_new_tokens, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(slots, max_new_tokens, dtype=torch.float64, device=device)
        self.logps, self.entropies = torch.zeros(2, slots, max_new_tokens, device=device)

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

    def assign(self, slot: int, group: Group) -> int:
        """Assign the next sample of a group to a slot; returns its number."""
        sample = group.started
        group.started, group.running = sample + 1, group.running + 1
        self.samples[slot], self.generated[slot] = sample, 0
        self.prompt[slot] = self.cached[slot] = group.tokens
        self.position[slot] = group.next_position
        self._set_pages(slot, group)
        return sample

    def _set_pages(self, slot: int, group: Group) -> None:
        full = group.tokens // self.page
        self.groups[slot] = group
        self.pages[slot, :full] = group.pages[:full]
        self.pages[slot, full : full + self.run] = self.runs[slot]
        self.changes += 1

    def choose(
        self, at: Tensor, index: Tensor, logits: Tensor, sampling: Sampling, forced: Tensor | None, invariant: bool
    ) -> Tensor:
        """Choose and store token number `index` [B] of the slots `at` [B] by their logits [B, V], or take it from
        `forced` [T]. Returns int64 [B], -1 where logits are NaN or infinite."""
        tokens, logps, entropies = choose(logits, sampling, self.uniforms[at, index], invariant)
        tokens = tokens if forced is None else forced[index]
        self.tokens[at, index], self.logps[at, index], self.entropies[at, index] = tokens, logps, entropies
        return tokens.masked_fill(logps.isnan(), -1)

    def release(self, slot: int) -> Group:
        """Free a slot; returns the group of its sample."""
        group = self.groups[slot]
        assert group is not None
        self.groups[slot] = None
        group.running -= 1
        self.changes += 1
        return group

    def compact(self) -> tuple[np.ndarray, np.ndarray]:
        """Move the last sequences to free slots before them; returns (sources, targets). The caller copies their
        runs."""
        active = self.active
        free = np.setdiff1d(np.arange(len(active)), active)
        last = active[len(active) - len(free) :]
        if not len(free):
            return last, free
        for state in (self.samples, self.prompt, self.cached, self.position, self.generated, self.host_tokens):
            state[free] = state[last]
        targets, sources = (torch.from_numpy(x).to(self.device) for x in (free, last))
        for values in (self.tokens, self.uniforms, self.logps, self.entropies):
            values[targets] = values[sources]
        for slot, before in zip(free.tolist(), last.tolist(), strict=True):
            group = self.groups[before]
            assert group is not None
            self.groups[before] = None
            self._set_pages(slot, group)
        return last, free
