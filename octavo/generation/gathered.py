"""A token of each sequence where torch reads the cache: what is gathered for it is decided on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo import models
from octavo.generation.attention import Decode, InvariantDecode, Shared
from octavo.generation.caller import Caller
from octavo.generation.pages import Cache
from octavo.generation.request import Sampling
from octavo.generation.slots import Slots


class Gathered:
    """A forward of the sequences that are under way, and no other rows."""

    def __init__(self, caller: Caller, cache: Cache, slots: Slots, sampling: Sampling, given: Tensor | None) -> None:
        self.caller, self.cache, self.slots, self.page = caller, cache, slots, cache.page
        self.sampling, self.given = sampling, given

    def __call__(self, active: np.ndarray) -> Tensor:
        """Choose the next token of the slots `active` [B], which have a page for it: int64 [B], -1 for NaN."""
        slots, at = self.slots, self._device(active)
        last = slots.tokens[at, self._device(slots.made[active] - 1)]
        position = self._device(slots.position[active]).expand(self.caller.axes, -1)
        logits = self.caller.forward(last, position, self._attention(active))
        made = self._device(slots.made[active])
        return slots.choose(at, made, logits, self.sampling, self.given, self.caller.invariant)

    def _attention(self, active: np.ndarray) -> models.Attend:
        slots, page = self.slots, self.page
        held, pages, first = slots.held[active], slots.pages[active], slots.first[active]
        where = np.take_along_axis(pages, held[:, None] // page, 1)[:, 0] * page + held % page
        if self.caller.invariant:
            tables = self.cache.tables(self._device(pages[:, : int(held.max()) // page + 1]))
            return InvariantDecode(
                self.cache, self.cache.places(self._device(where)), tables, self._device(held)[:, None]
            )
        most = int((held // page - first).max()) + 1
        own = np.minimum(first[:, None] + np.arange(most), pages.shape[1] - 1)
        table = np.take_along_axis(pages, own, 1)
        bias = self._bias(held + 1 - first * page, most)
        shared = self._shared(active) if first.any() else None
        tables = self.cache.tables(self._device(table))
        return Decode(self.cache, self.cache.places(self._device(where)), tables, bias, shared)

    def _shared(self, active: np.ndarray) -> Shared:
        """The pages that samples of a prompt share: a line of the table for each prompt."""
        slots = self.slots
        index = np.array([group.index for slot in active if (group := slots.groups[slot])])
        _, one, line, counts = np.unique(index, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(line, kind="stable")
        nth = np.empty_like(line)
        nth[order] = np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = line * counts.max() + nth
        members = np.zeros(len(counts) * counts.max(), dtype=np.int64)
        members[place] = np.arange(len(line))
        first = slots.first[active[one]]
        table = slots.pages[active[one], : first.max()]
        bias = self._bias(first * self.page, int(first.max()))
        return Shared(self.cache.tables(self._device(table)), bias, self._device(members), self._device(place))

    def _bias(self, tokens: np.ndarray, pages: int) -> Tensor:
        """fp32 [B, 1, pages * page]: 0 for the first `tokens` [B], -inf behind."""
        inside = np.arange(pages * self.page) < tokens[:, None]
        return self._device(np.where(inside, np.float32(0), np.float32(-np.inf)))[:, None]

    def _device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.caller.device, non_blocking=True)
