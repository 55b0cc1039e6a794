"""Completions of prompts by the very modules that train, in batches that go on while others come and leave.

Nothing of the model is copied or cast again: the forward is the model's own, with whatever layers it has; its decoder's
attention is handed over to the engine, which keeps keys and values in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.fp8 import kernels
from octavo.generation.batch import Batch
from octavo.generation.caller import Caller, Context
from octavo.generation.errors import GenerationError
from octavo.generation.kv_cache import KINDS, PAGE, Cache, pages_needed
from octavo.generation.memory import Shape, most_that_fit
from octavo.generation.request import Completion, Prompt, Sampling
from octavo.generation.sampling import Stops

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Generates with a model as it stands.

    processor  the model's, or its tokenizer: completions end also with the token by which its chat template ends
               answers, where the model's generation settings do not name that one
    slots      sequences at a time
    kv         "bf16": keys and values in the dtype that the model computes in; "fp8": E4M3, a scale for each token and
               head
    page       tokens of a page
    pages      pages of the cache (None: as many as the slots can need in the call at hand)
    invariant  inside `fp8.batch_invariant`: what a sequence gets depends on it alone, so that log-probabilities are bit
               for bit those of a training step inside it
    say        gets, once each, why a GPU decodes without the kernels for it, or without CUDA graphs

    The cache is kept from call to call until :meth:`release`; `bytes` says what the last call held, by kind. Raises
    GenerationError for a model whose attention cannot be handed over.
    """

    def __init__(
        self, model: PreTrainedModel, processor: Any, context: Context | None = None, *, slots: int, kv: str = "bf16",
        page: int = PAGE, pages: int | None = None, invariant: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        if slots < 1 or page < 1 or (pages is not None and pages < 1) or kv not in KINDS:
            raise GenerationError(
                f"an engine of slots={slots}, page={page}, pages={pages}, kv={kv!r} cannot be: at least 1 of each, "
                f"and kv is {' or '.join(KINDS)}."
            )
        if invariant and kv != "bf16":
            raise GenerationError(
                f"kv is {kv!r}, and an invariant engine reads the very keys and values that training does. Keep "
                "them as they are computed (kv: bf16), or leave invariant out."
            )
        self.caller = Caller(model, context or Context(), invariant)
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self.slots, self.kv, self.page, self.pages = slots, kv, page, pages
        self.cache: Cache | None = None
        self.bytes: dict[str, int] = {}
        self._to, self._said = say, set[str]()
        self._stops: dict[tuple[str, ...], Stops] = {}

    @property
    def in_place(self) -> bool:
        """Whether kernels read pages where they lie."""
        return not self.caller.invariant and kernels.why_not_paged(self.caller.device) is None

    def release(self) -> None:
        """Give the pages back, and all else that is kept between calls."""
        self.cache, self.bytes = None, {}

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Completion]:  # fmt: skip
        """`group` completions of each prompt, ordered by (prompt, sample). `progress` gets (completions, of how many).
        Where ranks share the model's parameters, a collective: each brings its own prompts, or none.

        Raises GenerationError for a prompt that the model or the cache has no room for, for an image that the model
        has no eyes for, and where the model computes no numbers.
        """
        if group < 1:
            raise GenerationError(f"group is {group}; at least 1 completion of each prompt is made.")
        for number, prompt in enumerate(prompts):
            self._check(number, prompt, sampling, group)
        if sampling.stop not in self._stops:  # which asks the chat template how it ends answers
            self._stops[sampling.stop] = Stops.of(self.caller.model, self.processor, sampling.stop)
        return self._run(prompts, sampling, group, self._stops[sampling.stop], progress)

    @torch.no_grad()
    def replay(self, prompt: Prompt | None, tokens: np.ndarray) -> None:
        """Run a prompt and the tokens [T] that followed it through the model in the way of :meth:`generate`, for
        whoever watches its modules. Where ranks share the model's parameters, a collective: None has no prompt."""
        sampling = Sampling(max(len(tokens), 1), temperature=0.0)
        given = torch.from_numpy(tokens).to(self.caller.device)
        nothing_ends = Stops(np.zeros(0, dtype=np.int64), (), self.tokenizer)
        self._run([] if prompt is None else [prompt], sampling, 1, nothing_ends, given=given)

    def _run(
        self, prompts: Sequence[Prompt], sampling: Sampling, group: int, stops: Stops,
        progress: Callable[[int, int], None] = lambda done, total: None, given: Tensor | None = None,
    ) -> list[Completion]:  # fmt: skip
        total = len(prompts) * group
        slots = min(self.slots, max(total, 1))
        longest = max((len(prompt.input_ids) for prompt in prompts), default=1)
        shape = Shape(slots, longest, sampling.max_new_tokens, group, self.page, given=self.pages)
        slots = most_that_fit(slots, lambda count: replace(shape, sequences=count).takes <= shape.pages) or 1
        cache = self._cache(replace(shape, sequences=slots).pages)
        batch = Batch(self.caller, cache, slots, prompts, sampling, group, stops, given, self._say)
        self.bytes = {"cache": cache.nbytes, "slots": batch.slots.nbytes}
        with self.caller.generating():
            while batch.work():
                progress(len(batch.done), total)
        return sorted(batch.done, key=lambda c: (c.prompt, c.sample))

    def _cache(self, pages: int) -> Cache:
        """The cache, made anew where it is too small or the model has moved."""
        held, caller = self.cache, self.caller
        if held is None or held.pages < pages or held.codes.device != caller.device:
            self.cache = held = None  # first, so that there are never two
            self.cache = Cache(caller.shape, pages, self.page, self.kv, caller.dtype, caller.device)
        assert self.cache is not None
        if accelerator.has_own_memory(caller.device) and (why := kernels.why_not_paged(caller.device)):
            self._say(f"generation: torch gathers keys and values for each token: {why}")
        return self.cache

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._to(text)

    def _check(self, number: int, prompt: Prompt, sampling: Sampling, group: int) -> None:
        count, new, shape = len(prompt.input_ids), sampling.max_new_tokens, self.caller.shape
        who = prompt.name or f"prompt {number}"
        if prompt.images and not self.caller.family.has_vision:
            raise GenerationError(
                f"{who} holds {prompt.images} images, and {type(self.caller.model).__name__} is text-only. "
                "Leave the images out, or take a vision-language model."
            )
        if count + new > shape.context:
            raise GenerationError(
                f"{who} has {count} tokens and may get {new} more, and the model's context is "
                f"{shape.context} tokens (max_position_embeddings). Shorten the prompt, or lower max_new_tokens."
            )
        place = self.caller.family.image_token_id  # which may lie outside the table: no row of it is looked up
        if outside := sorted({int(i) for i in prompt.input_ids if not 0 <= i < shape.vocabulary and i != place}):
            raise GenerationError(
                f"{who} holds the token {outside[0]}, and the model's vocabulary has {shape.vocabulary}. "
                "Take the tokenizer that belongs to the model."
            )
        need = pages_needed(count, new, self.page)
        if self.pages is not None and need > self.pages:
            raise GenerationError(
                f"the key-value cache has {self.pages} pages of {self.page} tokens, and one sequence of "
                f"{who} may need {need} ({count} tokens and {new} new ones). Give it more pages, lower "
                "max_new_tokens, or keep the cache in FP8 (kv: fp8), which takes half the bytes or less."
            )
