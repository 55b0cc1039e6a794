"""Predicts the bytes of generation from a model's configuration, exactly as the engine allocates them.

    cache       layers * 2 * heads * tokens in pages * (dim * bytes of a number [+ 4 for a scale, with kv="fp8"])
    slots       a token, a random number, a log-probability and an entropy for each new token of each sequence
    workspace   the most that a decode step allocates in addition to the model's activations: either one layer's keys
                and values in fp32 with the scores (with a GPU's kernels, which read pages in place: the partial result
                of each chunk of tokens), or the logits and the tensors from which a token is chosen
    prefill     activations of one layer for the prompts of a prefill; an estimate

A token of Qwen3-8B (36 layers, 8 heads of 128) is 144 KiB in BF16 and 74.25 KiB in FP8.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo import models
from octavo.fp8 import kernels
from octavo.generation.batch import PREFILL
from octavo.generation.kv_cache import PAGE, count_pages, count_run_pages
from octavo.generation.request import Sampling
from octavo.generation.sampling import bytes_to_choose

_BYTES_PER_NEW_TOKEN = 8 + 8 + 4 + 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a call.

    sequences  number of sequences at a time
    prompt     maximum number of prompt tokens
    new        maximum number of new tokens of a sample
    group      samples per prompt
    page       tokens per page
    patches    image patches per prompt
    limit      pages of the cache, or None for as many as needed
    """

    sequences: int
    prompt: int
    new: int
    group: int = 1
    page: int = PAGE
    patches: int = 0
    limit: int | None = None

    @property
    def groups(self) -> int:
        """Maximum number of active prompts: those that fill the slots, and as many whose last samples still run."""
        return min(self.sequences, 2 * -(-self.sequences // self.group))

    @property
    def pages(self) -> int:
        """Number of pages that the engine allocates: the limit, or as many as needed."""
        return self.needed_pages if self.limit is None else self.limit

    @property
    def needed_pages(self) -> int:
        """A run for each sequence, the full pages of each prompt once, and the partial last pages of the prompts of one
        prefill until their samples have copied them."""
        runs, full = self.sequences * count_run_pages(self.new, self.page), self.groups * (self.prompt // self.page)
        return runs + full + self.prefill

    @property
    def prefill(self) -> int:
        """Maximum number of prompts in one prefill: those that fill the slots, up to `PREFILL` tokens."""
        return min(-(-self.sequences // self.group), max(1, PREFILL // self.prompt))


@dataclass(frozen=True)
class Bytes:
    """Bytes of generation in addition to the model: `cache` and `slots` are held during the call, `workspace` is added
    by a decode step and `prefill` by prompts."""

    cache: int
    slots: int
    workspace: int
    prefill: int

    @property
    def held(self) -> int:
        return self.cache + self.slots

    @property
    def total(self) -> int:
        return self.held + max(self.workspace, self.prefill)


def cache_bytes(shape: models.CacheShape, pages: int, page: int, kv: str, dtype: torch.dtype) -> int:
    """Return the bytes of a cache with this number of pages."""
    number = shape.dim + 4 if kv == "fp8" else shape.dim * dtype.itemsize
    return shape.layers * 2 * shape.heads * pages * page * number


def bytes_of_token(config: Any, kv: str = "bf16", dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of one token in the cache."""
    return cache_bytes(models.cache_shape(config), 1, 1, kv, dtype)


def predict(
    config: Any, shape: Shape, kv: str = "bf16", dtype: torch.dtype = torch.bfloat16, sampling: Sampling | None = None,
    in_place: bool = False,
) -> Bytes:  # fmt: skip
    """Predict the bytes of generation with a model that computes in `dtype`. `in_place`: with kernels that read pages
    in place (on a GPU)."""
    model = models.cache_shape(config)
    attention = _in_place(model, shape, dtype) if in_place else _attention(model, shape, kv, dtype)
    return Bytes(
        cache_bytes(model, shape.pages, shape.page, kv, dtype),
        shape.sequences * shape.new * _BYTES_PER_NEW_TOKEN,
        max(attention, _choice(model, shape, dtype, sampling or Sampling(shape.new))),
        _prefill(config, model, shape, dtype),
    )


def sequences_that_fit(
    budget: int, config: Any, prompt: int, sampling: Sampling, group: int = 1, page: int = PAGE, kv: str = "bf16",
    dtype: torch.dtype = torch.bfloat16, patches: int = 0, most: int = 1 << 31, pages: int | None = None,
    in_place: bool = False,
) -> int:  # fmt: skip
    """Return the maximum number of sequences at a time, up to `most`, whose generation takes at most `budget` bytes
    with a cache of `pages` (None: as many as needed), or 0 if not even one fits."""

    def fits(count: int) -> bool:
        shape = Shape(count, prompt, sampling.max_new_tokens, group, page, patches, pages)
        predicted = predict(config, shape, kv, dtype, sampling, in_place)
        return (count == 1 or shape.needed_pages <= shape.pages) and predicted.total <= budget

    return most_that_fit(most, fits)


def most_that_fit(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, or 0 if none fits. If a number fits, so do all smaller
    ones."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def _attention(model: models.CacheShape, shape: Shape, kv: str, dtype: torch.dtype) -> int:
    """Bytes of one layer's gathered prompts, prompts and completions in fp32, and the scores before and after
    concatenation."""
    prompts = shape.groups * count_pages(shape.prompt, shape.page) * shape.page
    completions = shape.sequences * (shape.new - 1)
    fp32 = 2 * model.heads * (completions + prompts) * model.dim * 4
    stored = model.dim + 4 if kv == "fp8" else 0 if dtype == torch.float32 else model.dim * dtype.itemsize
    scores = model.queries * shape.sequences * (shape.prompt + shape.new - 1) * 4
    return fp32 + max(2 * model.heads * prompts * stored, 2 * scores)


def _in_place(model: models.CacheShape, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of one layer's output and, with several chunks, the partial result of each chunk in fp32: a sum and two
    numbers."""
    chunks = -(-(shape.prompt + shape.new) // kernels.PAGED_CHUNK)
    partial = chunks * (model.dim + 2) * 4 if chunks > 1 else 0
    return shape.sequences * model.queries * (model.dim * dtype.itemsize + partial)


def _prefill(config: Any, model: models.CacheShape, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of the prompts of a prefill: the larger of the activations of a decoder layer and a tower layer (the
    embeddings, which the forward keeps alive, the residual and its norm, cosines and sines; and gate, up and their
    product, or queries, keys, values and the attention output), the image patches, and the logits after each prompt."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    each = getattr(text, "moe_intermediate_size", None)
    inner = each * text.num_experts_per_tok if each else getattr(text, "intermediate_size", None) or text.hidden
    attention = 2 * (2 * model.queries + 2 * model.heads) * model.dim
    decoder = shape.prompt * (3 * text.hidden_size + 2 * model.dim + max(3 * inner, attention))
    tower = pixels = 0
    if vision is not None and shape.patches:
        tower = shape.patches * (2 * vision.hidden_size + max(3 * vision.intermediate_size, 8 * vision.hidden_size))
        side = vision.patch_size
        area = side**2 if isinstance(side, int) else side[0] * side[1]
        channels = getattr(vision, "in_channels", None) or vision.num_channels
        pixels = shape.patches * area * channels * getattr(vision, "temporal_patch_size", 1)
    return shape.prefill * dtype.itemsize * (max(decoder, tower) + pixels + model.vocabulary)


def _choice(model: models.CacheShape, shape: Shape, dtype: torch.dtype, sampling: Sampling) -> int:
    logits = shape.sequences * model.vocabulary * dtype.itemsize
    return logits + bytes_to_choose(shape.sequences, model.vocabulary, dtype, sampling)
