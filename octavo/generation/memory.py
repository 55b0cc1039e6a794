"""How many bytes generation takes, before a model exists: by its configuration, exactly as the engine allocates.

    cache       layers * 2 * heads * tokens in pages * (dim * bytes of a number [+ 4 for a scale, with kv="fp8"])
    slots       of each sequence a token, a random number, a log-probability and an entropy for each new token
    workspace   the most that a decode step makes beside the model's own activations: either one layer's keys and values
                in fp32 with the scores over them (where a GPU's kernels read pages in place: what these leave of each
                chunk of tokens), or the logits and what is made of them to choose
    prefill     what prompts make that run through the model at once, inside one layer; an estimate

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
from octavo.generation.kv_cache import PAGE, pages_of, run_of
from octavo.generation.request import Sampling
from octavo.generation.sampling import bytes_to_choose

_OF_A_NEW_TOKEN = 8 + 8 + 4 + 4


@dataclass(frozen=True)
class Shape:
    """Sequences at a time, and how they share: prompts of at most `prompt` tokens, each with `group` samples of at most
    `new` tokens; `page` tokens a page; `patches` of images in each prompt; `given`: the pages there are (None: as many
    as it takes)."""

    sequences: int
    prompt: int
    new: int
    group: int = 1
    page: int = PAGE
    patches: int = 0
    given: int | None = None

    @property
    def groups(self) -> int:
        """Prompts under way at a time: those that fill the slots, and as many whose last samples are not done."""
        return min(self.sequences, 2 * -(-self.sequences // self.group))

    @property
    def pages(self) -> int:
        """What the engine takes: what it is given, else what it takes."""
        return self.takes if self.given is None else self.given

    @property
    def takes(self) -> int:
        """A run for each sequence, full pages of prompts once, and the last ones of those that run through the model
        together, until their samples have copied them."""
        return self.sequences * run_of(self.new, self.page) + self.groups * (self.prompt // self.page) + self.together

    @property
    def together(self) -> int:
        """Prompts that run through the model at once: those that fill the slots, up to `PREFILL` tokens of them."""
        return min(-(-self.sequences // self.group), max(1, PREFILL // self.prompt))


@dataclass(frozen=True)
class Bytes:
    """Of generation beside the model: what is held (`cache`, `slots`), and the most that a decode step or the prompts
    add."""

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
    """Bytes of a cache of so many pages."""
    number = shape.dim + 4 if kv == "fp8" else shape.dim * dtype.itemsize
    return shape.layers * 2 * shape.heads * pages * page * number


def bytes_of_token(config: Any, kv: str = "bf16", dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that a token takes in the cache."""
    return cache_bytes(models.cache_shape(config), 1, 1, kv, dtype)


def predict(
    config: Any, shape: Shape, kv: str = "bf16", dtype: torch.dtype = torch.bfloat16, sampling: Sampling | None = None,
    in_place: bool = False,
) -> Bytes:  # fmt: skip
    """The bytes of generation with the model of a configuration that computes in `dtype`; `in_place`: on a GPU, whose
    kernels read pages where they lie."""
    model = models.cache_shape(config)
    attention = _in_place(model, shape, dtype) if in_place else _attention(model, shape, kv, dtype)
    return Bytes(
        cache_bytes(model, shape.pages, shape.page, kv, dtype),
        shape.sequences * shape.new * _OF_A_NEW_TOKEN,
        max(attention, _choice(model, shape, dtype, sampling or Sampling(shape.new))),
        _prefill(config, model, shape, dtype),
    )


def sequences_that_fit(
    budget: int, config: Any, prompt: int, sampling: Sampling, group: int = 1, page: int = PAGE, kv: str = "bf16",
    dtype: torch.dtype = torch.bfloat16, patches: int = 0, most: int = 1 << 31, pages: int | None = None,
    in_place: bool = False,
) -> int:  # fmt: skip
    """The most sequences at a time, up to `most`, whose generation takes at most `budget` bytes, in a cache of `pages`
    (None: of as many as they take); 0 where none does."""

    def fits(count: int) -> bool:
        shape = Shape(count, prompt, sampling.max_new_tokens, group, page, patches, pages)
        found = predict(config, shape, kv, dtype, sampling, in_place)
        return (count == 1 or shape.takes <= shape.pages) and found.total <= budget

    return most_that_fit(most, fits)


def most_that_fit(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, as every smaller one does; 0 where none does."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def _attention(model: models.CacheShape, shape: Shape, kv: str, dtype: torch.dtype) -> int:
    """One layer's prompts as they are gathered, they and what followed them in fp32, and the scores before and after
    they are joined."""
    prompts, own = shape.groups * pages_of(shape.prompt, shape.page) * shape.page, shape.sequences * (shape.new - 1)
    fp32 = 2 * model.heads * (own + prompts) * model.dim * 4
    kept = model.dim + 4 if kv == "fp8" else 0 if dtype == torch.float32 else model.dim * dtype.itemsize
    scores = model.queries * shape.sequences * (shape.prompt + shape.new - 1) * 4
    return fp32 + max(2 * model.heads * prompts * kept, 2 * scores)


def _in_place(model: models.CacheShape, shape: Shape, dtype: torch.dtype) -> int:
    """What one layer's kernels give, and leave of chunks, where there are several, in fp32: a sum, and two numbers."""
    chunks = -(-(shape.prompt + shape.new) // kernels.PAGED_CHUNK)
    left = chunks * (model.dim + 2) * 4 if chunks > 1 else 0
    return shape.sequences * model.queries * (model.dim * dtype.itemsize + left)


def _prefill(config: Any, model: models.CacheShape, shape: Shape, dtype: torch.dtype) -> int:
    """Prompts together: the larger of what a layer of the decoder and one of the tower make of them (the embeddings,
    which the model's forward holds on to, the residual and its norm, cosines and sines; and gate, up and their product,
    or queries, keys and values with what attention gives), images' patches as they come, and the logits behind each
    prompt."""
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
    return shape.together * dtype.itemsize * (max(decoder, tower) + pixels + model.vocabulary)


def _choice(model: models.CacheShape, shape: Shape, dtype: torch.dtype, sampling: Sampling) -> int:
    logits = shape.sequences * model.vocabulary * dtype.itemsize
    return logits + bytes_to_choose(shape.sequences, model.vocabulary, dtype, sampling)
