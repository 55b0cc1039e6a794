"""Completions of prompts by the very modules that train: continuous batches over a cache of pages.

    with the decoder's attention handed over to the engine:
        while there is work:
            refill    free slots get the next samples; prompts that are new run through the model once, in one row
            step      one token of every sequence: a forward, a choice, and those that ended leave their slots

Nothing of the model is copied or cast again: the forward is the model's own, with whatever layers it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import models
from octavo.generation.attention import Attention, Decode, Prefill
from octavo.generation.errors import GenerationError
from octavo.generation.pages import KINDS, Cache, Pool, pages_of
from octavo.generation.request import Completion, Prompt, Sampling
from octavo.generation.sampling import choose, uniforms
from octavo.generation.stops import Stops

PREFILL = 8192
"""Tokens of prompts that run through the model at once, unless one prompt is longer."""


@dataclass(frozen=True)
class Context:
    """How the run calls its model.

    autocast  compute under BF16 autocast
    dtype     of pixels, without autocast (None: that of the parameters)
    images    told before each forward whether it holds an image (`train.Forward.images`)
    """

    autocast: bool = False
    dtype: torch.dtype | None = None
    images: Callable[[bool], None] = lambda has: None


@dataclass
class _Group:
    """A prompt whose samples are not all started: its pages, the logits after it and the position that comes next."""

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


@dataclass
class _Slots:
    """The sequences under way; one row a slot. Host: what is decided by. Device: what is computed with."""

    tokens: Tensor
    logps: Tensor
    entropies: Tensor
    uniforms: Tensor
    groups: list[_Group | None]
    samples: np.ndarray
    held: np.ndarray
    positions: np.ndarray
    made: np.ndarray
    table: np.ndarray
    promised: np.ndarray

    @classmethod
    def empty(cls, slots: int, most: int, pages: int, device: torch.device) -> _Slots:
        def array(*size: int) -> np.ndarray:
            return np.zeros(size, dtype=np.int64)

        def filled(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, most, dtype=dtype, device=device)

        return cls(
            filled(torch.int64), filled(torch.float32), filled(torch.float32), filled(torch.float64), [None] * slots,
            array(slots), array(slots), array(slots), array(slots), array(slots, pages), array(slots),
        )  # fmt: skip

    @property
    def active(self) -> np.ndarray:
        return np.array([i for i, group in enumerate(self.groups) if group is not None], dtype=np.int64)

    @property
    def free(self) -> list[int]:
        return [i for i, group in enumerate(self.groups) if group is None]


class Engine:
    """Generates with a model as it stands.

    slots      sequences at a time
    kv         "bf16": keys and values in the dtype that the model computes in; "fp8": E4M3, a scale for each token and
               head
    page       tokens of a page
    pages      pages of the cache (None: as many as the slots can need in the call at hand)

    Raises GenerationError for a model whose attention cannot be handed over.
    """

    def __init__(
        self, model: Any, tokenizer: Any, context: Context | None = None, *, slots: int, kv: str = "bf16",
        page: int = 16, pages: int | None = None,
    ) -> None:  # fmt: skip
        if slots < 1 or page < 1 or (pages is not None and pages < 1) or kv not in KINDS:
            raise GenerationError(
                f"an engine of slots={slots}, page={page}, pages={pages}, kv={kv!r} cannot be: at least 1 of each, "
                f"and kv is {' or '.join(KINDS)}."
            )
        if why := models.why_not_paged(model):
            raise GenerationError(f"{why}, so its keys and values cannot be kept in pages.")
        self.model, self.tokenizer, self.context = model, tokenizer, context or Context()
        self.family = models.describe(model)
        self.shape = models.cache_shape(model.config)
        self.slots, self.kv, self.page, self.pages = slots, kv, page, pages
        self.cache: Cache | None = None
        self._axes = models.axes(model, self.family)
        self._attention: Attention | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def release(self) -> None:
        """Give the pages back."""
        self.cache = None

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Completion]:  # fmt: skip
        """`group` completions of each prompt, ordered by (prompt, sample). `progress` gets (completions, of how many).

        Raises GenerationError for a prompt that the model or the cache has no room for, for an image that the model
        has no eyes for, and where the model computes no numbers.
        """
        if not prompts:
            return []
        self._check(prompts, sampling, group)
        longest = max(len(prompt.input_ids) for prompt in prompts) + sampling.max_new_tokens - 1
        width = pages_of(longest, self.page)
        slots = min(self.slots, len(prompts) * group)
        run = _Run(self, prompts, sampling, group, _Slots.empty(slots, sampling.max_new_tokens, width, self.device))
        self._make_cache(self.pages or self._enough(prompts, sampling, group, slots))
        run.pool = Pool(self.cache.pages)
        with self._model_generates():
            while run.work():
                progress(len(run.done), len(prompts) * group)
        return sorted(run.done, key=lambda c: (c.prompt, c.sample))

    def forward(
        self, ids: np.ndarray, positions: np.ndarray | Tensor, keep: Tensor | None, attention: Attention, **images: Any
    ) -> Tensor:
        """Logits [K, V] of tokens [T] in one row, at `keep` [K] (None: all)."""
        device = self.device
        tokens = torch.as_tensor(ids).to(device)[None]
        where = torch.as_tensor(positions).to(device)
        more = {} if keep is None else {"logits_to_keep": keep}
        self._attention = attention
        self.context.images(bool(images))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.context.autocast):
            out = self.model(
                input_ids=tokens, position_ids=where[:, None] if self._axes == 3 else where, use_cache=False,
                **more, **images,
            )  # fmt: skip
        return out.logits[0]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, /) -> Tensor:
        assert self._attention is not None
        return self._attention(layer, q, k, v, scale)

    @contextmanager
    def _model_generates(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with models.attention_by(self.model, self.family, self._attend):
                yield
        finally:
            self._attention = None
            self.model.train(training)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        own = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        return torch.bfloat16 if self.context.autocast else self.context.dtype or own

    def _enough(self, prompts: Sequence[Prompt], sampling: Sampling, group: int, slots: int) -> int:
        """Pages that slots never wait for."""
        longest = max(len(prompt.input_ids) for prompt in prompts)
        whole = pages_of(longest + sampling.max_new_tokens - 1, self.page)
        return slots * whole + (1 if group > 1 else 0)

    def _make_cache(self, pages: int) -> None:
        held = self.cache
        if held is None or held.dtype != self.dtype or held.codes.device != self.device or (
            held.pages != pages if self.pages else held.pages < pages
        ):  # fmt: skip
            self.cache = None  # first, so that there are never two
            self.cache = Cache(self.shape, pages, self.page, self.kv, self.dtype, self.device)

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling, group: int) -> None:
        if group < 1:
            raise GenerationError(f"group is {group}; at least 1 completion of each prompt is made.")
        for number, prompt in enumerate(prompts):
            count = len(prompt.input_ids)
            if prompt.images and not self.family.has_vision:
                raise GenerationError(
                    f"prompt {number} holds {prompt.images} images, and {type(self.model).__name__} is text-only. "
                    "Leave the images out, or take a vision-language model."
                )
            if count + sampling.max_new_tokens > self.shape.context:
                raise GenerationError(
                    f"prompt {number} has {count} tokens and may get {sampling.max_new_tokens} more, and the model's "
                    f"context is {self.shape.context} tokens (max_position_embeddings). Shorten the prompt, or lower "
                    "max_new_tokens."
                )
            # beside a sample that writes, the page of its prompt that others copy from
            need = pages_of(count + sampling.max_new_tokens - 1, self.page) + (group > 1 and count % self.page > 0)
            if self.pages is not None and need > self.pages:
                raise GenerationError(
                    f"the key-value cache has {self.pages} pages of {self.page} tokens, and one sequence of prompt "
                    f"{number} may need {need} ({count} tokens and {sampling.max_new_tokens} new ones). Give it more "
                    "pages, lower max_new_tokens, or keep the cache in FP8 (kv: fp8), which takes half the bytes."
                )


class _Run:
    """One call of `Engine.generate`."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, group: int, slots: _Slots
    ) -> None:
        self.engine, self.sampling, self.slots = engine, sampling, slots
        self.waiting = [_Group(index, prompt, group) for index, prompt in enumerate(prompts)][::-1]
        self.open: _Group | None = None  # its prompt has run, and samples of it wait for slots or pages
        self.done: list[Completion] = []
        self.pool = Pool(0)
        self.stops = Stops.of(engine.model, engine.tokenizer, sampling.stop)
        self.page = engine.page

    def work(self) -> bool:
        """Refill and make a step; False when all is done."""
        active, free = self.slots.active, self.slots.free
        if (self.waiting or self.open) and (len(free) * 8 >= len(self.slots.groups) or not len(active)):
            self._refill(free)
            active = self.slots.active
        if len(active):
            self._step(active)
        return bool(len(active) or self.waiting or self.open)

    # who comes next

    def _whole(self, group: _Group) -> int:
        return pages_of(group.tokens + self.sampling.max_new_tokens - 1, self.page)

    def _needs(self, group: _Group, last: bool) -> int:
        """Pages that a sample may take beside those that it shares: the last one writes into the prompt's own."""
        shared = pages_of(group.tokens, self.page) if last else group.tokens // self.page
        return self._whole(group) - shared

    def _refill(self, free: list[int]) -> None:
        room = self.pool.free - int(self.slots.promised.sum())
        starts: list[tuple[_Group, int]] = []
        new: list[_Group] = []
        left, tokens = len(free), 0
        while left and (self.open or self.waiting):
            fresh = self.open is None
            group = self.waiting[-1] if fresh else self.open
            assert group is not None
            if fresh:
                tokens += group.tokens
                if new and tokens > PREFILL:
                    break
                room -= pages_of(group.tokens, self.page)
            count = 0
            while left and group.started + count < group.samples:
                need = self._needs(group, group.started + count + 1 == group.samples)
                if need > room:
                    break
                room, left, count = room - need, left - 1, count + 1
            if not count:
                break
            starts.append((group, count))
            if fresh:
                new.append(self.waiting.pop())
            self.open = None if group.started + count == group.samples else group
            if self.open is not None:
                break
        if new:
            self._prefill(new)
        if starts:
            self._start(starts, free)

    def _prefill(self, groups: list[_Group]) -> None:
        engine, device = self.engine, self.engine.device
        where, positions = [], []
        for group in groups:
            prompt = group.prompt
            group.pages = self.pool.take(pages_of(group.tokens, self.page))
            place = np.arange(group.tokens)
            where.append(np.array(group.pages)[place // self.page] * self.page + place % self.page)
            grid, kinds = (
                None if x is None else torch.from_numpy(x) for x in (prompt.image_grid_thw, prompt.mm_token_type_ids)
            )
            found, group.next_position = models.positions(
                engine.model, engine.family, torch.from_numpy(prompt.input_ids), kinds, grid
            )
            positions.append(found)
        lengths = [group.tokens for group in groups]
        assert engine.cache is not None
        attention = Prefill(engine.cache, torch.from_numpy(np.concatenate(where)).to(device), lengths)
        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        ids = np.concatenate([group.prompt.input_ids for group in groups])
        logits = engine.forward(ids, torch.cat(positions, dim=1), ends, attention, **self._images(groups))
        for group, row in zip(groups, logits, strict=True):
            group.logits = row

    def _images(self, groups: list[_Group]) -> dict[str, Tensor]:
        prompts = [group.prompt for group in groups if group.prompt.images]
        named = {
            name: [x for p in prompts if (x := getattr(p, name)) is not None]
            for name in ("pixel_values", "image_grid_thw")
        }
        joined = {name: torch.from_numpy(np.concatenate(x)).to(self.engine.device) for name, x in named.items() if x}
        if "pixel_values" in joined:
            joined["pixel_values"] = joined["pixel_values"].to(self.engine.dtype)
        return joined

    def _start(self, starts: list[tuple[_Group, int]], free: list[int]) -> None:
        """Choose the first token of samples, and put them into slots with their pages."""
        who = [(group, group.started + i) for group, count in starts for i in range(count)]
        slots = free[: len(who)]
        at, device = torch.tensor(slots, device=self.engine.device), self.engine.device
        numbers = [group.prompt.number for group, _ in who]
        self.slots.uniforms[at] = uniforms(self.sampling, numbers, [sample for _, sample in who], device)
        logits = torch.stack([group.logits for group, _ in who])
        self.slots.made[slots] = 0
        source: list[int] = []
        target: list[int] = []
        for slot, (group, sample) in zip(slots, who, strict=True):
            self.slots.groups[slot] = group
            self.slots.samples[slot] = sample
            self.slots.held[slot] = group.tokens
            self.slots.positions[slot] = group.next_position
            group.started += 1
            last = group.started == group.samples
            self.slots.promised[slot] = self._needs(group, last)
            pages = list(group.pages)
            if not last:
                self.pool.share(pages)
                if group.tokens % self.page:  # it is written to next
                    self.pool.give(pages[-1:])
                    source.append(pages[-1])
                    pages[-1:] = self._take(slot)
                    target.append(pages[-1])
            else:
                group.logits = None
            self.slots.table[slot, : len(pages)] = pages
        if source:
            assert self.engine.cache is not None
            self.engine.cache.copy(source, target)
        self._choose(np.array(slots), at, logits)

    def _take(self, slot: int) -> list[int]:
        self.slots.promised[slot] -= 1
        return self.pool.take(1)

    # a token of each

    def _step(self, active: np.ndarray) -> None:
        engine, slots, page = self.engine, self.slots, self.page
        held = slots.held[active]
        for slot in active[held % page == 0]:
            slots.table[slot, slots.held[slot] // page] = self._take(slot)[0]
        pages = int(held.max()) // page + 1
        table = slots.table[active, :pages]
        where = table[np.arange(len(active)), held // page] * page + held % page
        at = torch.from_numpy(active).to(engine.device)
        bias = torch.zeros(len(active), 1, 1, pages * page, dtype=engine.dtype)
        bias.masked_fill_(torch.from_numpy(np.arange(pages * page) > held[:, None])[:, None, None], -torch.inf)
        assert engine.cache is not None
        attention = Decode(
            engine.cache, *(x.to(engine.device) for x in map(torch.from_numpy, (where, table))), bias.to(engine.device)
        )
        last = slots.tokens[at, torch.from_numpy(slots.made[active] - 1).to(engine.device)]
        positions = np.broadcast_to(slots.positions[active], (engine._axes, len(active)))
        logits = engine.forward(last, positions.copy(), None, attention)
        slots.held[active] += 1
        slots.positions[active] += 1
        self._choose(active, at, logits)

    def _choose(self, active: np.ndarray, at: Tensor, logits: Tensor) -> None:
        """The next token of sequences; those that end leave."""
        slots = self.slots
        made = torch.from_numpy(slots.made[active]).to(at.device)
        tokens, logps, entropies = choose(logits, self.sampling, slots.uniforms[at, made])
        slots.tokens[at, made], slots.logps[at, made], slots.entropies[at, made] = tokens, logps, entropies
        slots.made[active] += 1
        chosen, bad = tokens.cpu().numpy(), logps.isnan().cpu().numpy()
        if bad.any():
            slot = active[bad.argmax()]
            group = slots.groups[slot]
            assert group is not None
            raise GenerationError(
                f"the model gives NaN or infinity as the score of token {slots.made[slot]} after prompt {group.index}: "
                "it computes no numbers, and would answer with any token. Take an earlier checkpoint, or compute in "
                "high precision (recipe: off)."
            )
        ended = self.stops.by_token(chosen)
        reasons = {int(slot): "stop" for slot in active[ended]}
        if self.stops.texts:
            for slot in active[~ended]:
                if self.stops.by_text(slots.tokens[slot, : slots.made[slot]].tolist()):
                    reasons[int(slot)] = "stop_string"
        for slot in active[slots.made[active] == self.sampling.max_new_tokens]:
            reasons.setdefault(int(slot), "length")
        for slot, reason in reasons.items():
            self._finish(slot, reason)

    def _finish(self, slot: int, reason: str) -> None:
        slots, group = self.slots, self.slots.groups[slot]
        assert group is not None
        made = slots.made[slot]
        tokens, logps, entropies = (
            x[slot, :made].cpu().numpy().copy() for x in (slots.tokens, slots.logps, slots.entropies)
        )
        self.done.append(Completion(group.index, int(slots.samples[slot]), tokens, logps, entropies, reason))
        self.pool.give(slots.table[slot, : pages_of(int(slots.held[slot]), self.page)].tolist())
        slots.groups[slot] = None
        slots.promised[slot] = 0
