"""One call of the engine, as a loop of two moves.

    refill    free slots get the next samples; prompts that are new run through the model, several in one row
    step      one token of every sequence: a forward, a choice, and those that ended leave their slots

Ranks that share a model make the same moves, with a forward of nothing where one has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo import models
from octavo.data.encoding.sample import concatenate, concatenate_inputs
from octavo.generation.attention import Prefill
from octavo.generation.caller import Caller
from octavo.generation.decode_cuda_graph import Replayed
from octavo.generation.decode_torch import Gathered
from octavo.generation.errors import GenerationError
from octavo.generation.kv_cache import Cache, Pool, pages_of
from octavo.generation.request import Completion, Prompt, Sampling
from octavo.generation.sampling import Stops, uniforms
from octavo.generation.slots import Group, Slots

PREFILL = 2048
"""Tokens of prompts that run through the model at once, each padded to the longest, unless one prompt is longer: enough
for a GPU, and what they make stays in a CPU's caches."""


class Batch:
    """Prompts on their way to completions. `done` grows with each :meth:`work`."""

    def __init__(
        self, caller: Caller, cache: Cache, slots: int, prompts: Sequence[Prompt], sampling: Sampling, group: int,
        stops: Stops, given: Tensor | None = None, say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.caller, self.cache, self.sampling, self.stops = caller, cache, sampling, stops
        self.given = given  # int64 [T]: tokens that are taken whatever the model would choose
        longest = max((len(prompt.input_ids) for prompt in prompts), default=0)
        self.slots = Slots(slots, sampling.max_new_tokens, longest, cache.page, caller.device)
        self.page, self.pool = cache.page, Pool(slots * self.slots.run, cache.pages)
        self.next_tokens: Callable[[np.ndarray], Tensor] = (
            Gathered(caller, cache, self.slots, sampling, given)
            if cache.kernels is None or caller.invariant
            else Replayed(caller, cache, self.slots, sampling, given, say)
        )
        self.waiting = [Group(index, prompt, group) for index, prompt in enumerate(prompts)][::-1]
        self.open: Group | None = None  # its prompt has run, and samples of it wait for slots or pages
        self.done: list[Completion] = []

    def work(self) -> bool:
        """Refill and make a step; False when all is done, on every rank."""
        few = len(self.slots.active) * 8 <= len(self.slots) * 7  # slots to fill: prompts run better together
        starts = self._next() if few else []
        assert starts or len(self.slots.active) or not (self.open or self.waiting), "a sequence has no room alone"
        while self.caller.anyone(bool(starts)):
            self._begin(starts)
            starts = self._next() if few else []
        active = self.slots.active
        if not self.caller.anyone(bool(len(active) or self.open or self.waiting)):
            return False
        if self.caller.anyone(bool(len(active))):
            self._step(active) if len(active) else self.caller.idle()
        return True

    # who comes next

    def _next(self) -> list[tuple[Group, int]]:
        """Groups in order, and how many samples of each there are slots for, and pages for their prompts."""
        room, left, new, longest = self.pool.free, len(self.slots.free), 0, 0
        starts: list[tuple[Group, int]] = []
        while left and (group := self.open or (self.waiting[-1] if self.waiting else None)):
            if group is not self.open:
                new, longest = new + 1, max(longest, group.tokens)
                room -= pages_of(group.tokens, self.page)
                if room < 0 or (new > 1 and new * longest > PREFILL):  # as attention pads them
                    break
                self.waiting.pop()
            count = min(left, group.samples - group.started)
            starts.append((group, count))
            left -= count
            self.open = group if group.started + count < group.samples else None
        return starts

    def _begin(self, starts: list[tuple[Group, int]]) -> None:
        """Run the prompts that are new, and start samples. On ranks that share the model, a forward on each."""
        new = [group for group, _ in starts if not group.started]
        if self.caller.anyone(bool(new)):
            self._prefill(new) if new else self.caller.idle()
        if starts:
            self._start(starts)

    def _prefill(self, groups: list[Group]) -> None:
        """Run prompts through the model: their keys and values into pages, the logits after each kept."""
        caller, where, positions = self.caller, [], []
        for group in groups:
            prompt = group.prompt
            group.pages = self.pool.take(pages_of(group.tokens, self.page))
            where.append(self._place(np.array(group.pages), np.arange(group.tokens)))
            kinds, grid = (
                None if x is None else torch.from_numpy(x) for x in (prompt.mm_token_type_ids, prompt.image_grid_thw)
            )
            ids = torch.from_numpy(prompt.input_ids)
            found, group.next_position = models.positions(caller.model, caller.family, ids, kinds, grid)
            positions.append(found)
        lengths = [group.tokens for group in groups]
        tokens = self._device(np.concatenate([group.prompt.input_ids for group in groups]))
        ends = self._device(np.cumsum(lengths) - 1)
        attention = Prefill(self.cache, self.cache.places(self._device(np.concatenate(where))), lengths)
        at = torch.cat(positions, dim=1).to(caller.device)
        logits = caller.forward(tokens, at, attention, ends, **self._images(groups))
        for group, row in zip(groups, logits, strict=True):
            group.logits = row

    def _images(self, groups: list[Group]) -> dict[str, Tensor]:
        """What the model takes of the images of prompts in one row."""
        prompts, found = [group.prompt for group in groups], {}
        for name in ("pixel_values", "image_grid_thw"):
            if parts := [x for prompt in prompts if (x := getattr(prompt, name)) is not None]:
                found[name] = self._device(concatenate(parts))
        found |= {name: self._device(x) for name, x in concatenate_inputs([prompt.more for prompt in prompts]).items()}
        for name in {name: None for prompt in prompts for name, one in prompt.more.items() if one.per == "token"}:
            kinds = [p.more[name].values if name in p.more else np.zeros_like(p.input_ids) for p in prompts]
            found[name] = self._device(np.concatenate(kinds))[None]
        if "pixel_values" in found:
            found["pixel_values"] = found["pixel_values"].to(self.caller.dtype)
        return found

    def _start(self, starts: list[tuple[Group, int]]) -> None:
        """Put samples into slots, and choose the first token of each."""
        who = [group for group, count in starts for _ in range(count)]
        rows: list[Tensor] = []
        for group in who:
            assert group.logits is not None, "its prompt has run, and not all of its samples had started"
            rows.append(group.logits)
        logits = torch.stack(rows)
        at = np.array(self.slots.free[: len(who)], dtype=np.int64)
        samples = [self.slots.enter(slot, group) for slot, group in zip(at.tolist(), who, strict=True)]
        self._copy_last_pages(at)
        for group, _ in starts:
            if group.started == group.samples:
                full = group.tokens // self.page
                self.pool.give(group.pages[full:])
                group.pages, group.logits = group.pages[:full], None
        slots = self._device(at)
        numbers = [group.prompt.number for group in who]
        self.slots.uniforms[slots] = uniforms(self.sampling, numbers, samples, self.caller.device)
        made = torch.zeros_like(slots)
        chosen = self.slots.choose(slots, made, logits, self.sampling, self.given, self.caller.invariant)
        self._judge(at, chosen)

    def _copy_last_pages(self, at: np.ndarray) -> None:
        """Begin the runs of slots with what their prompts have beyond full pages."""
        pairs = [
            (group.pages[full], self.slots.pages[slot, full])
            for slot in at.tolist()
            if (group := self.slots.groups[slot]) is not None and group.tokens % self.page
            for full in (group.tokens // self.page,)
        ]
        if pairs:
            self.cache.copy(*np.array(pairs, dtype=np.int64).T.copy())

    # a token of each

    def _step(self, active: np.ndarray) -> None:
        chosen = self.next_tokens(active)
        self.slots.held[active] += 1
        self.slots.position[active] += 1
        self._judge(active, chosen)

    def _judge(self, active: np.ndarray, chosen: Tensor) -> None:
        """Look at the tokens that sequences got (`Slots.choose`); those that end leave."""
        slots, tokens = self.slots, chosen.cpu().numpy()  # the one wait for the device in a step
        slots.told[active, slots.made[active]] = tokens
        slots.made[active] += 1
        self._refuse_nan(active, tokens < 0)
        ended = self.stops.by_token(tokens)
        reasons = dict.fromkeys(active[ended].tolist(), "stop")
        if self.stops.texts:
            for slot in active[~ended].tolist():
                made = slots.made[slot]
                if self.stops.by_text(slots.told[slot, max(0, made - self.stops.reach) : made].tolist()):
                    reasons[slot] = "stop_string"
        for slot in active[slots.made[active] == self.sampling.max_new_tokens].tolist():
            reasons.setdefault(slot, "length")
        if reasons:
            self._finish(reasons)

    def _refuse_nan(self, active: np.ndarray, bad: np.ndarray) -> None:
        if not bad.any():
            return
        slot = active[bad.argmax()]
        group = self.slots.groups[slot]
        assert group is not None
        who = group.prompt.name or f"prompt {group.index}"
        raise GenerationError(
            f"the model gives NaN or infinity as the score of token {self.slots.made[slot]} after {who}: it computes "
            "no numbers, and would answer with any token. Take an earlier checkpoint, or compute in high precision "
            "(recipe off)."
        )

    def _finish(self, reasons: dict[int, str]) -> None:
        slots, at = self.slots, self._device(np.array(list(reasons)))
        logps, entropies = (x[at].cpu().numpy() for x in (slots.logps, slots.entropies))
        for row, (slot, reason) in enumerate(reasons.items()):
            group, length = slots.groups[slot], int(slots.made[slot])
            assert group is not None
            tokens, logp, entropy = (x[:length].copy() for x in (slots.told[slot], logps[row], entropies[row]))
            self.done.append(Completion(group.index, int(slots.samples[slot]), tokens, logp, entropy, reason))
            slots.leave(slot)
            if not group.running and group.started == group.samples:
                self.pool.give(group.pages)
        if isinstance(self.next_tokens, Gathered):  # it looks at the first slots alone
            last, free = slots.close_up()
            if len(free):
                self.cache.copy(slots.runs[last].reshape(-1), slots.runs[free].reshape(-1))

    def _place(self, pages: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Where in the cache tokens of a sequence stand."""
        return pages[tokens // self.page] * self.page + tokens % self.page

    def _device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.caller.device, non_blocking=True)
