"""Generation with the training modules, by continuous batching: sequences join and leave between steps.

No weight is copied or cast again: the forward is the model's own. Only the decoder's attention is replaced by the
engine's, which keeps keys and values in pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from octavo.base import accelerator
from octavo.base.wording import count_noun
from octavo.fp8 import kernels
from octavo.generation.batch import Batch
from octavo.generation.caller import Caller, Context
from octavo.generation.errors import GenerationError
from octavo.generation.kv_cache import KINDS, PAGE, Cache, pages_needed
from octavo.generation.memory import Shape, most_that_fit
from octavo.generation.request import Completion, Prompt, Sampling
from octavo.generation.sampling import StopConditions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine:
    """Generates with a model.

    processor  the model's processor or tokenizer: completions also end with the token that ends answers in its chat
               template, even if the model's generation settings do not name it
    slots      maximum number of concurrent sequences
    kv         "bf16": keys and values in the model's compute dtype; "fp8": E4M3 with a scale per token and head
    page       number of tokens per page
    pages      number of pages of the cache, or None for as many as the slots can need in a call
    invariant  compute inside `fp8.batch_invariant`: a sequence's result does not depend on the rest of the batch, so
               log-probabilities equal the ones that an invariant training step computes bit for bit
    log        called once with each reason why a GPU decodes without Octavo's kernels or without CUDA graphs

    The cache is kept between calls until :meth:`release`; `bytes` is the memory of the last call by kind. Raises
    GenerationError for a model whose attention cannot be replaced.
    """

    def __init__(
        self, model: PreTrainedModel, processor: Any, context: Context | None = None, *, slots: int, kv: str = "bf16",
        page: int = PAGE, pages: int | None = None, invariant: bool = False,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        if slots < 1 or page < 1 or (pages is not None and pages < 1) or kv not in KINDS:
            raise GenerationError(
                f"invalid engine settings slots={slots}, page={page}, pages={pages}, kv={kv!r}: slots, page and pages "
                f"must be at least 1, and kv must be {' or '.join(KINDS)}."
            )
        if invariant and kv != "bf16":
            raise GenerationError(
                f"kv is {kv!r}, but an invariant engine must read the same keys and values as training. Use kv: bf16, "
                "or remove invariant."
            )
        self.caller = Caller(model, context or Context(), invariant)
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self.slots, self.kv, self.page, self.pages = slots, kv, page, pages
        self.cache: Cache | None = None
        self.bytes: dict[str, int] = {}
        self._log, self._logged = log, set[str]()
        self._stops: dict[tuple[str, ...], StopConditions] = {}

    @property
    def reads_pages_in_place(self) -> bool:
        """Return whether kernels read pages in place."""
        return not self.caller.invariant and kernels.why_not_paged(self.caller.device) is None

    def release(self) -> None:
        """Free the cache and everything else that is kept between calls."""
        self.cache, self.bytes = None, {}

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Completion]:  # fmt: skip
        """`group` completions of each prompt, ordered by (prompt, sample). `progress` gets (finished, total).
        A collective if ranks share the model's parameters: each rank passes its own prompts, or none.

        Raises GenerationError for a prompt that exceeds the model's context or the cache, for images passed to a
        text-only model, and for NaN or infinite logits.
        """
        if group < 1:
            raise GenerationError(f"group is {group}; it must be at least 1 completion per prompt.")
        for number, prompt in enumerate(prompts):
            self._check(number, prompt, sampling, group)
        if sampling.stop not in self._stops:  # cached because it renders the chat template
            self._stops[sampling.stop] = StopConditions.of(self.caller.model, self.processor, sampling.stop)
        return self._run(prompts, sampling, group, self._stops[sampling.stop], progress)

    @torch.no_grad()
    def replay(self, prompt: Prompt | None, tokens: np.ndarray) -> None:
        """Run a prompt and its completion's tokens [T] through the model exactly as :meth:`generate` did, so that
        hooks on its modules can record the computed values. A collective if ranks share the model's parameters; None:
        this rank has no prompt."""
        sampling = Sampling(max(len(tokens), 1), temperature=0.0)
        forced = torch.from_numpy(tokens).to(self.caller.device)
        no_stops = StopConditions(np.zeros(0, dtype=np.int64), (), self.tokenizer)
        self._run([] if prompt is None else [prompt], sampling, 1, no_stops, forced=forced)

    def _run(
        self, prompts: Sequence[Prompt], sampling: Sampling, group: int, stops: StopConditions,
        progress: Callable[[int, int], None] = lambda done, total: None, forced: Tensor | None = None,
    ) -> list[Completion]:  # fmt: skip
        total = len(prompts) * group
        slots = min(self.slots, max(total, 1))
        longest = max((len(prompt.input_ids) for prompt in prompts), default=1)
        shape = Shape(slots, longest, sampling.max_new_tokens, group, self.page, limit=self.pages)
        slots = most_that_fit(slots, lambda count: replace(shape, sequences=count).needed_pages <= shape.pages) or 1
        cache = self._cache(replace(shape, sequences=slots).pages)
        batch = Batch(self.caller, cache, slots, prompts, sampling, group, stops, forced, self._log_once)
        self.bytes = {"cache": cache.nbytes, "slots": batch.slots.nbytes}
        with self.caller.generating():
            while batch.advance():
                progress(len(batch.done), total)
        return sorted(batch.done, key=lambda c: (c.prompt, c.sample))

    def _cache(self, pages: int) -> Cache:
        """Return the cache, allocated again if it is too small or the model has moved to another device."""
        cache, caller = self.cache, self.caller
        if cache is None or cache.pages < pages or cache.codes.device != caller.device:
            self.cache = cache = None  # freed first, so that two never exist
            self.cache = Cache(caller.shape, pages, self.page, self.kv, caller.dtype, caller.device)
        assert self.cache is not None
        if accelerator.has_own_memory(caller.device) and (why := kernels.why_not_paged(caller.device)):
            self._log_once(
                f"generation: paged-attention kernels are off, so torch gathers keys and values for each token: {why}"
            )
        return self.cache

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)

    def _check(self, number: int, prompt: Prompt, sampling: Sampling, group: int) -> None:
        count, new, shape = len(prompt.input_ids), sampling.max_new_tokens, self.caller.shape
        name = prompt.name or f"prompt {number}"
        if prompt.images and not self.caller.family.has_vision:
            raise GenerationError(
                f"{name} has {count_noun(prompt.images, 'image')}, but {type(self.caller.model).__name__} is "
                "text-only. Remove images, or use a vision-language model."
            )
        if count + new > shape.context:
            raise GenerationError(
                f"{name} has {count} tokens and may get {new} more, but the model's context is "
                f"{shape.context} tokens (max_position_embeddings). Shorten the prompt, or lower max_new_tokens."
            )
        # The image token may be outside the embedding table, because its embedding is not used.
        image_token = self.caller.family.image_token_id
        if outside := sorted({int(i) for i in prompt.input_ids if not 0 <= i < shape.vocabulary and i != image_token}):
            raise GenerationError(
                f"{name} contains the token {outside[0]}, but the model's vocabulary has {shape.vocabulary} tokens. "
                "Use the tokenizer that belongs to the model."
            )
        need = pages_needed(count, new, self.page)
        if self.pages is not None and need > self.pages:
            raise GenerationError(
                f"the key-value cache has {self.pages} pages of {self.page} tokens, but one sequence of "
                f"{name} may need {need} ({count} tokens and {new} new ones). Increase pages, lower "
                "max_new_tokens, or keep the cache in FP8 (kv: fp8), which takes about half the bytes."
            )
