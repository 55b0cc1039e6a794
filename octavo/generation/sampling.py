"""From logits to a token, its log-probability and the entropy: one function, and the random numbers that it takes. And
what ends a completion: a token, or a text.

A token's random number is a word of Philox at the counter

    (prompt number, sample, position, step + 1)        key: seed

so that it is the same whatever else is in the batch, in any slot, on any rank and after a resume. The token is the
first whose cumulative probability, summed in fp64 in the vocabulary's order, exceeds that number: one number a token
rather than one for each word of the vocabulary.
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

_ELEMENTS = 1 << 25
"""Logits that are looked at at once: 128 MiB in fp32, and about six times that for all that is made of them."""

_ALMOST_NEVER = -1e4
"""What stands for log 0 where it is multiplied by a probability of 0."""
_SPARE = 8
"""Tokens looked at beyond the bytes of the longest text: special tokens hold none."""


def uniforms(
    sampling: Sampling, numbers: Sequence[int], samples: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """The random numbers of all positions of sequences: float64 [sequences, max_new_tokens], in [0, 1)."""
    count = (len(numbers), sampling.max_new_tokens)
    prompt, sample = (torch.tensor(x, dtype=torch.int64)[:, None].expand(count).to(device) for x in (numbers, samples))
    position = torch.arange(count[1], device=device)[None].expand(count)
    step = torch.full(count, sampling.step + 1, dtype=torch.int64, device=device)
    first, second, *_ = random_blocks((prompt, sample, position, step), sampling.seed)
    return (first * 65536 + (second >> 16)).double() / 2.0**48


def choose(logits: Tensor, sampling: Sampling, u: Tensor, invariant: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The next tokens of B sequences: (tokens int64 [B], log-probabilities fp32 [B], entropies fp32 [B]).

    logits [B, V] · u [B] float64, a random number each (greedy choice looks at none) · invariant: log-probabilities and
    entropies by the function that trains, bit for bit. A log-probability is NaN where the logits are no numbers.
    """
    if invariant:
        tokens = choose(logits, sampling, u)[0]
        logps, entropies = fp8.log_probs(logits, tokens, temperature=sampling.temperature or 1.0, entropy=True)
        return tokens, logps, entropies
    rows = max(1, _ELEMENTS // logits.shape[1])
    parts = [_choose(x, sampling, r) for x, r in zip(logits.split(rows), u.split(rows), strict=True)]
    tokens, logps, entropies = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return tokens, logps, entropies


def _choose(logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    greedy = sampling.temperature == 0
    logps = torch.log_softmax(logits if greedy or sampling.temperature == 1 else logits / sampling.temperature, dim=-1)
    p = logps.exp()
    never = _indices(sampling.never, logits.shape[1], logits.device)
    if greedy:
        tokens = logits.index_fill(-1, never, -torch.inf).argmax(-1)
    else:
        left = _without(logps, never) if len(never) else p
        cumulative = kept(left, sampling).double().cumsum(-1)
        aim = u[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, aim, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return tokens, logps.gather(1, tokens[:, None])[:, 0], -(p * logps.clamp_min(_ALMOST_NEVER)).sum(-1)


@lru_cache(maxsize=8)
def _indices(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    """Those that have a logit: places of images may have none (NVILA). Kept, because numbers that come from the host
    cannot be in a CUDA graph."""
    return torch.tensor([token for token in tokens if token < vocabulary], dtype=torch.int64, device=device)


def _without(logps: Tensor, never: Tensor) -> Tensor:
    """What is left of the probabilities, as shares of the largest that is left: it must not drown beside what is never
    chosen, which at a low temperature may be all there is."""
    left = logps.index_fill(-1, never, -torch.inf)
    return left.sub_(left.amax(-1, keepdim=True)).exp_()


def bytes_to_choose(count: int, vocabulary: int, dtype: torch.dtype, sampling: Sampling) -> int:
    """The most bytes that :func:`choose` makes beside logits [count, vocabulary] of `dtype`: fp32 logits,
    log-probabilities and probabilities, and in fp64 the latter and their sums. Top-p sorts what is left of them: in
    order, their places, and in fp64 their sums, those without each one itself, and which are beyond."""
    rows = min(count, max(1, _ELEMENTS // vocabulary))
    numbers = (0 if dtype == torch.float32 else 4) + 4 + 4
    if sampling.temperature == 0:
        return rows * vocabulary * (numbers + 8)
    numbers += 4 * bool(sampling.never)
    more = 4 * (0 < sampling.top_k < vocabulary) + 4 + 8 + 8 + 8 + 1 if sampling.top_p < 1 else 8 + 8
    return rows * vocabulary * (numbers + more)


def kept(p: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] with those set to zero that top-k, then top-p, then min-p leave out; not normalised."""
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
class Stops:
    """`ids`: tokens that end a completion · `texts`: those that end it when they appear · `tokenizer`: decodes."""

    ids: np.ndarray
    texts: tuple[str, ...]
    tokenizer: Any

    @classmethod
    def of(cls, model: PreTrainedModel, processor: Any, texts: tuple[str, ...]) -> Stops:
        """The tokens of the model's generation settings (or the tokenizer's end), and the one by which the chat
        template of `processor`, a processor or a tokenizer, ends answers (`stop_tokens.stop_ids`)."""
        ids = stop_tokens.stop_ids(getattr(model, "generation_config", None), processor)
        return cls(np.array(ids, dtype=np.int64), tuple(texts), getattr(processor, "tokenizer", processor))

    def by_token(self, tokens: np.ndarray) -> np.ndarray:
        """bool [B]: which tokens [B] end their completion."""
        return np.isin(tokens, self.ids)

    @cached_property
    def reach(self) -> int:
        """Tokens at the end of a completion that are looked at for a text: a token is a byte at least."""
        return max((len(text.encode()) for text in self.texts), default=0) + _SPARE

    def by_text(self, tokens: Sequence[int]) -> bool:
        """Whether the last tokens of a completion, `reach` of them or all, hold one of the texts."""
        tail = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(text in tail for text in self.texts)
