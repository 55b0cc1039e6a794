"""Requests and results of the engine: value objects that are checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from octavo.data.encoding.sample import Input
from octavo.generation.errors import GenerationError

WORD = 1 << 32


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and stop conditions.

    max_new_tokens  maximum number of tokens of a completion, including the stop token
    temperature     divides the logits (at least 1e-6); 0 selects the most likely token
    top_k           keep the k most likely tokens and ties with the k-th (0: all)
    top_p           then keep the smallest set of tokens with this total probability
    min_p           then keep tokens with at least this fraction of the highest probability
    stop            texts that end a completion when they appear in it
    excluded        tokens that are not sampled, such as image placeholders; log-probabilities are over all tokens
    seed, step      determine a token's random number, with the prompt's number, the sample and the position
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    step: int = 0
    excluded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        valid_temperature = not self.temperature or 1e-6 <= self.temperature < math.inf  # else logits overflow
        problems = [
            f"{name}={value!r} ({rule})"
            for name, value, rule, is_valid in (
                ("max_new_tokens", self.max_new_tokens, "at least 1", self.max_new_tokens >= 1),
                ("temperature", self.temperature, "0, or at least 1e-6", valid_temperature),
                ("top_p", self.top_p, "above 0, at most 1", 0 < self.top_p <= 1),
                ("top_k", self.top_k, "0 or more", self.top_k >= 0),
                ("min_p", self.min_p, "0 to 1", 0 <= self.min_p <= 1),
                (
                    "stop",
                    self.stop,
                    "texts of at least one character",
                    not isinstance(self.stop, str) and all(self.stop),
                ),
                ("seed", self.seed, "0 to 2^64 - 1", 0 <= self.seed < WORD**2),
                ("step", self.step, "0 to 2^32 - 2", 0 <= self.step < WORD - 1),
            )
            if not is_valid
        ]
        if problems:
            raise GenerationError(f"sampling got {', '.join(problems)}. Use values in these ranges.")


@dataclass(frozen=True)
class Prompt:
    """A prompt of P tokens, with the image inputs of `octavo.data.Sample`.

    input_ids          [P] int64
    number             its identity for randomness, e.g. the row's position in the data stream
    pixel_values       float32 or None
    image_grid_thw     [images, 3] int64 or None
    mm_token_type_ids  [P] int64 or None
    images             the number of images
    name               its name in errors, such as file and row (default: its index in the list)
    more               further tensors, by name
    """

    input_ids: np.ndarray
    number: int = 0
    pixel_values: np.ndarray | None = None
    image_grid_thw: np.ndarray | None = None
    mm_token_type_ids: np.ndarray | None = None
    images: int = 0
    name: str = ""
    more: Mapping[str, Input] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.input_ids.ndim != 1 or not len(self.input_ids):
            raise GenerationError(
                f"the tokens of a prompt have the shape {self.input_ids.shape}; they must be [P] with P >= 1."
            )
        if not 0 <= self.number < WORD:
            raise GenerationError(f"the number of a prompt is {self.number}; it must be 0 to 2^32 - 1.")
        if bool(self.images) != (self.pixel_values is not None):
            pixels = "pixels" if self.pixel_values is not None else "no pixels"
            raise GenerationError(f"a prompt has images={self.images}, but {pixels}.")


@dataclass(frozen=True)
class Completion:
    """A completion of T tokens.

    prompt   index of the prompt in the call's list
    sample   0 to group - 1
    tokens   [T] int64, the stop token included
    logps    [T] fp32: log-probability of each token over the full vocabulary at the sampling temperature (greedy: at
             1), before top-k, top-p and min-p
    entropy  [T] fp32, nats, of that distribution
    reason   "stop" (a token that ends answers), "stop_string" or "length"
    """

    prompt: int
    sample: int
    tokens: np.ndarray
    logps: np.ndarray
    entropy: np.ndarray
    reason: str
