"""How many bytes generation takes, before a model exists: by its configuration, exactly as the engine allocates.

    cache       layers * 2 * heads * tokens in pages * (dim * bytes of a number [+ 4 for a scale, with kv="fp8"])
    slots       of each sequence a token, a random number, a log-probability and an entropy for each new token
    workspace   the most that a decode step makes beside the model's own activations: either one layer's keys and values
                in fp32 with the scores over them, or the logits and what is made of them to choose

A token of Qwen3-8B (36 layers, 8 heads of 128) is 144 KiB in BF16 and 74.25 KiB in FP8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from octavo import models
from octavo.generation.pages import PAGE, pages_of
from octavo.generation.request import Sampling
from octavo.generation.sampling import bytes_to_choose

_OF_A_NEW_TOKEN = 8 + 8 + 4 + 4


@dataclass(frozen=True)
class Shape:
    """Sequences at a time, and how they share: prompts of at most `prompt` tokens, each with `group` samples of at most
    `new` tokens; `page` tokens a page."""

    sequences: int
    prompt: int
    new: int
    group: int = 1
    page: int = PAGE

    @property
    def whole(self) -> int:
        """Pages of one sequence; the last token is chosen and not looked back at."""
        return pages_of(self.prompt + self.new - 1, self.page)

    @property
    def groups(self) -> int:
        """Prompts under way at a time: those that fill the slots, and as many whose last samples are not done."""
        return min(self.sequences, 2 * -(-self.sequences // self.group))

    @property
    def own(self) -> int:
        """Pages that a sample does not share."""
        return self.whole - (self.prompt // self.page if self.group > 1 else 0)

    @property
    def pages(self) -> int:
        """What the engine takes where it is not told: full pages of prompts once, the others for each sample, and the
        page that samples yet to start will copy."""
        shared = self.groups * (self.prompt // self.page) if self.group > 1 else 0
        return shared + self.sequences * self.own + (self.group > 1)


@dataclass(frozen=True)
class Bytes:
    """Of generation beside the model: what is held (`cache`, `slots`) and the most that a decode step adds."""

    cache: int
    slots: int
    workspace: int

    @property
    def total(self) -> int:
        return self.cache + self.slots + self.workspace


def cache_bytes(shape: models.CacheShape, pages: int, page: int, kv: str, dtype: torch.dtype) -> int:
    """Bytes of a cache of so many pages."""
    number = shape.dim + 4 if kv == "fp8" else shape.dim * dtype.itemsize
    return shape.layers * 2 * shape.heads * pages * page * number


def predict(
    config: Any, shape: Shape, kv: str = "bf16", dtype: torch.dtype = torch.bfloat16, sampling: Sampling | None = None
) -> Bytes:
    """The bytes of generation with the model of a configuration that computes in `dtype`."""
    model = models.cache_shape(config)
    return Bytes(
        cache_bytes(model, shape.pages, shape.page, kv, dtype),
        shape.sequences * shape.new * _OF_A_NEW_TOKEN,
        max(_attention(model, shape, kv, dtype), _choice(model, shape, dtype, sampling or Sampling(shape.new))),
    )


def sequences_that_fit(
    budget: int, config: Any, prompt: int, new: int, group: int = 1, page: int = PAGE, kv: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
) -> int:  # fmt: skip
    """The most sequences at a time whose generation takes at most `budget` bytes; 0 where none does."""
    low, high = 0, 1

    def fits(count: int) -> bool:
        return predict(config, Shape(count, prompt, new, group, page), kv, dtype).total <= budget

    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _attention(model: models.CacheShape, shape: Shape, kv: str, dtype: torch.dtype) -> int:
    """One layer's pages as they are gathered and in fp32, and the scores before and after they are joined."""
    own = shape.sequences * shape.own * shape.page
    shared = shape.groups * (shape.prompt // shape.page) * shape.page if shape.group > 1 else 0
    fp32 = 2 * model.heads * (own + shared) * model.dim * 4
    kept = model.dim + 4 if kv == "fp8" else 0 if dtype == torch.float32 else model.dim * dtype.itemsize
    scores = model.queries * shape.sequences * (shape.prompt + shape.new) * 4
    return fp32 + max(2 * model.heads * max(own, shared) * kept, 2 * scores)


def _choice(model: models.CacheShape, shape: Shape, dtype: torch.dtype, sampling: Sampling) -> int:
    logits = shape.sequences * model.vocabulary * dtype.itemsize
    return logits + bytes_to_choose(shape.sequences, model.vocabulary, dtype, sampling)
