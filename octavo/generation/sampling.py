"""Sampling: from logits to a token, its log-probability and the entropy; the random numbers; and stop conditions.

A token's random number is a word of Philox at the counter

    (prompt number, sample, position, step + 1)        key: seed

so it does not depend on the rest of the batch, the slot, the rank or a resume. The chosen token is the first whose
cumulative probability, summed in fp64 in the vocabulary's order, exceeds that number: this takes one random number per
token, where the Gumbel trick takes one per vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from octavo import fp8
from octavo.fp8.arithmetic import random_blocks
from octavo.generation.request import Sampling
from octavo.models.processors import stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_LOGITS = 1 << 25
"""Number of logits that are processed at once: 128 MiB in fp32, and about six times that with all intermediate
tensors."""

_LOG_ZERO = -1e4
"""Replaces log 0 = -inf in the entropy, where -inf * 0 would be NaN."""
_EXTRA_TOKENS = 8
"""Tokens searched in addition to the bytes of the longest stop text, because special tokens have no bytes."""


def uniforms(
    sampling: Sampling, numbers: Sequence[int], samples: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Return the random numbers of all positions of sequences: float64 [sequences, max_new_tokens], in [0, 1)."""
    count = (len(numbers), sampling.max_new_tokens)
    prompt, sample = (torch.tensor(x, dtype=torch.int64)[:, None].expand(count).to(device) for x in (numbers, samples))
    position = torch.arange(count[1], device=device)[None].expand(count)
    step = torch.full(count, sampling.step + 1, dtype=torch.int64, device=device)
    first, second, *_ = random_blocks((prompt, sample, position, step), sampling.seed)
    return (first * 65536 + (second >> 16)).double() / 2.0**48


def choose(logits: Tensor, sampling: Sampling, u: Tensor, invariant: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the next tokens of B sequences. Returns (tokens int64 [B], log-probabilities fp32 [B], entropies fp32
    [B]).

    logits     [B, V]
    u          [B] float64: a random number per sequence (unused by greedy sampling)
    invariant  compute log-probabilities and entropies by the same function as training, bit for bit

    A log-probability is NaN if the logits are NaN or infinite.
    """
    if invariant:
        tokens = choose(logits, sampling, u)[0]
        logps, entropies = fp8.log_probs(logits, tokens, temperature=sampling.temperature or 1.0, entropy=True)
        return tokens, logps, entropies
    rows = max(1, _MAX_LOGITS // logits.shape[1])
    parts = [_choose(x, sampling, r) for x, r in zip(logits.split(rows), u.split(rows), strict=True)]
    tokens, logps, entropies = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return tokens, logps, entropies


def _choose(logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    greedy = sampling.temperature == 0
    logps = torch.log_softmax(logits if greedy or sampling.temperature == 1 else logits / sampling.temperature, dim=-1)
    p = logps.exp()
    excluded = _indices(sampling.excluded, logits.shape[1], logits.device)
    if greedy:
        tokens = logits.index_fill(-1, excluded, -torch.inf).argmax(-1)
    else:
        allowed = _without(logps, excluded) if len(excluded) else p
        cumulative = filter_probabilities(allowed, sampling).double().cumsum(-1)
        target = u[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return tokens, logps.gather(1, tokens[:, None])[:, 0], -(p * logps.clamp_min(_LOG_ZERO)).sum(-1)


@lru_cache(maxsize=8)
def _indices(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    """Return the tokens that have a logit, as a tensor; image placeholders may have none (NVILA). Cached, because a
    CUDA graph cannot copy from the host."""
    return torch.tensor([token for token in tokens if token < vocabulary], dtype=torch.int64, device=device)


def _without(logps: Tensor, excluded: Tensor) -> Tensor:
    """Return the probabilities of all other tokens, relative to the largest of them: at a low temperature the excluded
    tokens may have all the mass, and the rest would underflow."""
    allowed = logps.index_fill(-1, excluded, -torch.inf)
    return allowed.sub_(allowed.amax(-1, keepdim=True)).exp_()


def bytes_to_choose(count: int, vocabulary: int, dtype: torch.dtype, sampling: Sampling) -> int:
    """Return the maximum number of bytes that :func:`choose` allocates for logits [count, vocabulary] of `dtype`: fp32
    logits, log-probabilities and probabilities, and fp64 probabilities and cumulative sums. Top-p also sorts: sorted
    values, their indices, and in fp64 their sums, the exclusive sums, and a mask."""
    rows = min(count, max(1, _MAX_LOGITS // vocabulary))
    numbers = (0 if dtype == torch.float32 else 4) + 4 + 4
    if sampling.temperature == 0:
        return rows * vocabulary * (numbers + 8)
    numbers += 4 * bool(sampling.excluded)
    rest = 4 * (0 < sampling.top_k < vocabulary) + 4 + 8 + 8 + 8 + 1 if sampling.top_p < 1 else 8 + 8
    return rows * vocabulary * (numbers + rest)


def filter_probabilities(p: Tensor, sampling: Sampling) -> Tensor:
    """Set probabilities [B, V] to zero that top-k, then top-p, then min-p exclude; the result is not normalized."""
    if 0 < sampling.top_k < p.shape[1]:
        p = p.masked_fill(~(p >= p.topk(sampling.top_k).values[:, -1:]), 0)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        sums = ordered.double().cumsum(-1)
        beyond = sums - ordered >= sampling.top_p * sums[:, -1:]
        p = p.masked_fill(torch.zeros_like(beyond).scatter_(1, order, beyond), 0)
    if sampling.min_p > 0:
        p = p.masked_fill(~(p >= sampling.min_p * p.amax(-1, keepdim=True)), 0)
    return p


@dataclass(frozen=True)
class StopConditions:
    """Stop conditions. `ids`: tokens that end a completion · `texts`: texts that end it · `tokenizer`: decodes
    tokens."""

    ids: np.ndarray
    texts: tuple[str, ...]
    tokenizer: Any

    @classmethod
    def of(cls, model: PreTrainedModel, processor: Any, texts: tuple[str, ...]) -> StopConditions:
        """Combine the end tokens of the model's generation settings (or the tokenizer's) and the token that ends
        answers in the chat template of `processor`, a processor or a tokenizer (`stop_tokens.stop_ids`)."""
        ids = stop_tokens.stop_ids(getattr(model, "generation_config", None), processor)
        return cls(np.array(ids, dtype=np.int64), tuple(texts), getattr(processor, "tokenizer", processor))

    def by_token(self, tokens: np.ndarray) -> np.ndarray:
        """Return bool [B]: which tokens [B] end their completion."""
        return np.isin(tokens, self.ids)

    @cached_property
    def reach(self) -> int:
        """Number of tokens at the end of a completion that are searched for a text: a token has at least one byte."""
        return max((len(text.encode()) for text in self.texts), default=0) + _EXTRA_TOKENS

    def by_text(self, tokens: Sequence[int]) -> bool:
        """Return whether the last tokens of a completion, at most `reach`, contain one of the texts."""
        tail = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(text in tail for text in self.texts)
