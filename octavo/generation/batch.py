"""One call of the engine, as a loop of two actions:

    refill    assign the next samples to free slots; new prompts run through the model, several in one row
    step      generate one token per sequence; finished sequences free their slots

Ranks that share a model run the same actions; a rank without work runs a forward of one unused token.
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
from octavo.generation.decode_cuda_graph import CudaGraphDecoder
from octavo.generation.decode_torch import TorchDecoder
from octavo.generation.errors import GenerationError
from octavo.generation.kv_cache import Cache, Pool, count_pages
from octavo.generation.request import Completion, Prompt, Sampling
from octavo.generation.sampling import StopConditions, uniforms
from octavo.generation.slots import Group, Slots

PREFILL = 2048
"""Maximum number of tokens of one prefill, with each prompt padded to the longest, unless one prompt is longer. Enough
to fill a GPU, and few enough for activations to stay in the caches of a CPU."""


class Batch:
    """The state of one call. `done` grows with each :meth:`advance`."""

    def __init__(
        self, caller: Caller, cache: Cache, slots: int, prompts: Sequence[Prompt], sampling: Sampling, group: int,
        stops: StopConditions, forced: Tensor | None = None, log: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.caller, self.cache, self.sampling, self.stops = caller, cache, sampling, stops
        self.forced = forced  # int64 [T]: used instead of sampled tokens
        longest = max((len(prompt.input_ids) for prompt in prompts), default=0)
        self.slots = Slots(slots, sampling.max_new_tokens, longest, cache.page, caller.device)
        self.page, self.pool = cache.page, Pool(slots * self.slots.run, cache.pages)
        self.next_tokens: Callable[[np.ndarray], Tensor] = (
            TorchDecoder(caller, cache, self.slots, sampling, forced)
            if cache.kernels is None or caller.invariant
            else CudaGraphDecoder(caller, cache, self.slots, sampling, forced, log)
        )
        self.waiting = [Group(index, prompt, group) for index, prompt in enumerate(prompts)][::-1]
        self.current: Group | None = None  # a prompt that has run and has waiting samples
        self.done: list[Completion] = []

    def advance(self) -> bool:
        """Refill slots and run a step. Returns False once every rank is done."""
        # Refill only when an eighth of the slots is free: prompts are cheaper in larger prefills.
        can_refill = len(self.slots.active) * 8 <= len(self.slots) * 7
        starts = self._select_groups() if can_refill else []
        assert starts or len(self.slots.active) or not (self.current or self.waiting), "a single sequence does not fit"
        while self.caller.any_rank(bool(starts)):
            self._start_groups(starts)
            starts = self._select_groups() if can_refill else []
        active = self.slots.active
        if not self.caller.any_rank(bool(len(active) or self.current or self.waiting)):
            return False
        if self.caller.any_rank(bool(len(active))):
            self._step(active) if len(active) else self.caller.run_dummy_forward()
        return True

    # Refilling slots

    def _select_groups(self) -> list[tuple[Group, int]]:
        """Return the next groups in order, with the number of samples of each for which slots and prompt pages are
        free."""
        free_pages, free_slots, new, longest = self.pool.free, len(self.slots.free), 0, 0
        starts: list[tuple[Group, int]] = []
        while free_slots and (group := self.current or (self.waiting[-1] if self.waiting else None)):
            if group is not self.current:
                new, longest = new + 1, max(longest, group.tokens)
                free_pages -= count_pages(group.tokens, self.page)
                if free_pages < 0 or (new > 1 and new * longest > PREFILL):  # attention pads to the longest
                    break
                self.waiting.pop()
            count = min(free_slots, group.samples - group.started)
            starts.append((group, count))
            free_slots -= count
            self.current = group if group.started + count < group.samples else None
        return starts

    def _start_groups(self, starts: list[tuple[Group, int]]) -> None:
        """Run new prompts and start samples. If ranks share the model, every rank runs a forward."""
        new = [group for group, _ in starts if not group.started]
        if self.caller.any_rank(bool(new)):
            self._prefill(new) if new else self.caller.run_dummy_forward()
        if starts:
            self._assign_samples(starts)

    def _prefill(self, groups: list[Group]) -> None:
        """Run prompts through the model: write their keys and values to pages, and keep the logits after each."""
        caller, where, positions = self.caller, [], []
        for group in groups:
            prompt = group.prompt
            group.pages = self.pool.take(count_pages(group.tokens, self.page))
            where.append(self._cache_rows(np.array(group.pages), np.arange(group.tokens)))
            kinds, grid = (
                None if x is None else torch.from_numpy(x) for x in (prompt.mm_token_type_ids, prompt.image_grid_thw)
            )
            ids = torch.from_numpy(prompt.input_ids)
            prompt_positions, group.next_position = models.prompt_positions(
                caller.model, caller.family, ids, kinds, grid
            )
            positions.append(prompt_positions)
        lengths = [group.tokens for group in groups]
        tokens = self._device(np.concatenate([group.prompt.input_ids for group in groups]))
        ends = self._device(np.cumsum(lengths) - 1)
        attention = Prefill(self.cache, self.cache.places(self._device(np.concatenate(where))), lengths)
        at = torch.cat(positions, dim=1).to(caller.device)
        logits = caller.forward(tokens, at, attention, ends, **self._images(groups))
        for group, row in zip(groups, logits, strict=True):
            group.logits = row

    def _images(self, groups: list[Group]) -> dict[str, Tensor]:
        """Return the image inputs of prompts that are concatenated in one row."""
        prompts, inputs = [group.prompt for group in groups], {}
        for name in ("pixel_values", "image_grid_thw"):
            if parts := [x for prompt in prompts if (x := getattr(prompt, name)) is not None]:
                inputs[name] = self._device(concatenate(parts))
        inputs |= {name: self._device(x) for name, x in concatenate_inputs([prompt.more for prompt in prompts]).items()}
        for name in {name: None for prompt in prompts for name, value in prompt.more.items() if value.per == "token"}:
            kinds = [p.more[name].values if name in p.more else np.zeros_like(p.input_ids) for p in prompts]
            inputs[name] = self._device(np.concatenate(kinds))[None]
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.caller.dtype)
        return inputs

    def _assign_samples(self, starts: list[tuple[Group, int]]) -> None:
        """Assign samples to slots, and choose the first token of each."""
        groups = [group for group, count in starts for _ in range(count)]
        rows: list[Tensor] = []
        for group in groups:
            assert group.logits is not None, "its prompt has run, and not all of its samples had started"
            rows.append(group.logits)
        logits = torch.stack(rows)
        at = np.array(self.slots.free[: len(groups)], dtype=np.int64)
        samples = [self.slots.assign(slot, group) for slot, group in zip(at.tolist(), groups, strict=True)]
        self._copy_last_pages(at)
        for group, _ in starts:
            if group.started == group.samples:
                full = group.tokens // self.page
                self.pool.give(group.pages[full:])
                group.pages, group.logits = group.pages[:full], None
        slots = self._device(at)
        numbers = [group.prompt.number for group in groups]
        self.slots.uniforms[slots] = uniforms(self.sampling, numbers, samples, self.caller.device)
        index = torch.zeros_like(slots)  # the first token of each completion
        chosen = self.slots.choose(slots, index, logits, self.sampling, self.forced, self.caller.invariant)
        self._record(at, chosen)

    def _copy_last_pages(self, at: np.ndarray) -> None:
        """Copy each prompt's last, partial page to the start of its slots' runs, which will be written to."""
        pairs = [
            (group.pages[full], self.slots.pages[slot, full])
            for slot in at.tolist()
            if (group := self.slots.groups[slot]) is not None and group.tokens % self.page
            for full in (group.tokens // self.page,)
        ]
        if pairs:
            self.cache.copy(*np.array(pairs, dtype=np.int64).T.copy())

    # Decode steps

    def _step(self, active: np.ndarray) -> None:
        chosen = self.next_tokens(active)
        self.slots.cached[active] += 1
        self.slots.position[active] += 1
        self._record(active, chosen)

    def _record(self, active: np.ndarray, chosen: Tensor) -> None:
        """Record the chosen tokens (`Slots.choose`), and finish the sequences that end with them."""
        slots, tokens = self.slots, chosen.cpu().numpy()  # the only synchronization of a step
        slots.host_tokens[active, slots.generated[active]] = tokens
        slots.generated[active] += 1
        self._check_finite(active, tokens < 0)
        ended = self.stops.by_token(tokens)
        reasons = dict.fromkeys(active[ended].tolist(), "stop")
        if self.stops.texts:
            for slot in active[~ended].tolist():
                end = slots.generated[slot]
                if self.stops.by_text(slots.host_tokens[slot, max(0, end - self.stops.reach) : end].tolist()):
                    reasons[slot] = "stop_string"
        for slot in active[slots.generated[active] == self.sampling.max_new_tokens].tolist():
            reasons.setdefault(slot, "length")
        if reasons:
            self._finish(reasons)

    def _check_finite(self, active: np.ndarray, bad: np.ndarray) -> None:
        if not bad.any():
            return
        slot = active[bad.argmax()]
        group = self.slots.groups[slot]
        assert group is not None
        name = group.prompt.name or f"prompt {group.index}"
        raise GenerationError(
            f"the model returned NaN or infinity as a logit of token {self.slots.generated[slot]} after {name}, so the "
            "sampled token would be arbitrary. Use an earlier checkpoint, or compute in high precision (recipe off)."
        )

    def _finish(self, reasons: dict[int, str]) -> None:
        slots, at = self.slots, self._device(np.array(list(reasons)))
        logps, entropies = (x[at].cpu().numpy() for x in (slots.logps, slots.entropies))
        for row, (slot, reason) in enumerate(reasons.items()):
            group, length = slots.groups[slot], int(slots.generated[slot])
            assert group is not None
            tokens, logp, entropy = (x[:length].copy() for x in (slots.host_tokens[slot], logps[row], entropies[row]))
            self.done.append(Completion(group.index, int(slots.samples[slot]), tokens, logp, entropy, reason))
            slots.release(slot)
            if not group.running and group.started == group.samples:
                self.pool.give(group.pages)
        if isinstance(self.next_tokens, TorchDecoder):  # reads the runs of the first slots as one block
            last, free = slots.compact()
            if len(free):
                self.cache.copy(slots.runs[last].reshape(-1), slots.runs[free].reshape(-1))

    def _cache_rows(self, pages: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the cache rows of tokens: page number times page size plus offset."""
        return pages[tokens // self.page] * self.page + tokens % self.page

    def _device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(self.caller.device, non_blocking=True)
