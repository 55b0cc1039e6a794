"""Decode steps by torch, for which the host selects the pages to gather."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.generation.attention import Decode, InvariantDecode, Shared
from octavo.generation.caller import Caller
from octavo.generation.kv_cache import Cache, count_pages
from octavo.generation.request import Sampling
from octavo.generation.slots import Slots
from octavo.models.forward.paged import Attend


class TorchDecoder:
    """Decodes the active sequences, which occupy the first slots, without padding."""

    def __init__(self, caller: Caller, cache: Cache, slots: Slots, sampling: Sampling, forced: Tensor | None) -> None:
        self.caller, self.cache, self.slots, self.page = caller, cache, slots, cache.page
        self.sampling, self.forced = sampling, forced
        self._shared: tuple[int, Shared] | None = None  # with the value of Slots.changes when it was computed

    def __call__(self, active: np.ndarray) -> Tensor:
        """Choose the next token of the slots `active` [B]. Returns int64 [B], -1 for NaN logits."""
        slots, at, generated = self.slots, self._device(active), self._device(self.slots.generated[active])
        last = slots.tokens[at, generated - 1]
        position = self._device(slots.position[active]).expand(self.caller.axes, -1)
        logits = self.caller.forward(last, position, self._attention(active))
        return slots.choose(at, generated, logits, self.sampling, self.forced, self.caller.invariant)

    def _attention(self, active: np.ndarray) -> Attend:
        slots, page = self.slots, self.page
        cached, pages, prompt = slots.cached[active], slots.pages[active], slots.prompt[active]
        where = np.take_along_axis(pages, cached[:, None] // page, 1)[:, 0] * page + cached % page
        places = self.cache.places(self._device(where))
        if self.caller.invariant:
            tables = self.cache.tables(self._device(pages[:, : int(cached.max()) // page + 1]))
            return InvariantDecode(self.cache, places, tables, self._device(cached)[:, None])
        begin = prompt % page  # of the completion in a run
        end = begin + cached + 1 - prompt
        first, last = int(begin.min()), int(end.max())
        bias = self._bias(first, last, begin, end)
        return Decode(self.cache, places, slots.run, first, last, bias, self._shared_prompts(active))

    def _shared_prompts(self, active: np.ndarray) -> Shared:
        if self._shared is None or self._shared[0] != self.slots.changes:
            self._shared = self.slots.changes, self._share(active)
        return self._shared[1]

    def _share(self, active: np.ndarray) -> Shared:
        """Return the distinct prompts of the active sequences, with the page table of any of their samples."""
        slots = self.slots
        index = np.array([group.index for slot in active if (group := slots.groups[slot])])
        _, first_slot, group_row, counts = np.unique(index, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(group_row, kind="stable")
        nth = np.empty_like(group_row)
        nth[order] = np.arange(len(group_row)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = group_row * counts.max() + nth
        members = np.zeros(len(counts) * counts.max(), dtype=np.int64)
        members[place] = np.arange(len(group_row))
        prompt = slots.prompt[active]
        longest = int(prompt.max())
        table = self._device(slots.pages[active[first_slot], : count_pages(longest, self.page)])
        bias = self._bias(0, longest, prompt * 0, prompt)
        return Shared(self.cache.tables(table), longest, bias, self._device(members), self._device(place))

    def _bias(self, first: int, last: int, begin: np.ndarray, end: np.ndarray) -> Tensor:
        """Return fp32 [B, 1, last - first]: 0 for the tokens from `begin` [B] to `end` [B], -inf for the others."""
        token = np.arange(first, last)
        inside = (token >= begin[:, None]) & (token < end[:, None])
        return self._device(np.where(inside, np.float32(0), np.float32(-np.inf)))[:, None]

    def _device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.slots.device, non_blocking=True)
