"""Attention within the samples of a packed row, through transformers' registries and without a mask.

transformers calls the registered mask function once in each forward for the mask of all layers. In a packed forward it
returns :class:`Segments`, the edges of the samples, and every layer's attention receives them as an argument. A block
that is recomputed in backward therefore uses the segments of its own micro-batch, however many forwards ran since.
Vision towers request no causal mask and are not affected.

Attention is causal and runs sample by sample: on CUDA in 16 bits by one call of torch's ``varlen_attn`` (flash
attention), otherwise by one call per sample; with the kernel ``flex`` by one call of flex attention with a block mask.

Several ranks may share a row, each with a part of its tokens: then a :class:`RowShare` gathers queries, keys and
values, and the queries of a span attend to all earlier tokens of their sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function

from octavo.base import accelerator
from octavo.models.attention import alibi
from octavo.models.errors import ModelError

MAX_HEAD_DIM = 256  # the largest head dimension that flash attention supports
PACKING_FIX = "Set data.packing: false"


class RowShare(Protocol):
    """This rank's share of a row (`parallel.Context`)."""

    def local_slice(self, length: int) -> slice:
        """Return this rank's tokens of a row of `length` tokens."""

    def query_range(self, length: int) -> tuple[int, int]:
        """Return [first, last) of the tokens whose queries this rank computes."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        layer: object = None,
    ) -> Tensor:  # fmt: skip
        """Compute attention of this rank's tokens in a layer; ``attention`` is called with the queries of this rank and
        the keys and values of the full row."""


class Span(NamedTuple):
    """Queries of one sample, the tokens [first, last) of the row; the sample begins at `start`."""

    start: int
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Segments:
    """The samples of a row: sample i is the tokens [edges[i], edges[i + 1]). ``spans``: the queries of each sample that
    are computed on this rank; ``cu_queries`` and ``cu_keys``: the ends of these queries and of the keys that they see,
    int32 [spans + 1] on the device; ``longest``: the maximum numbers of queries and of keys in a span."""

    edges: tuple[int, ...]
    spans: tuple[Span, ...]
    cu_queries: Tensor
    cu_keys: Tensor
    longest: tuple[int, int]
    share: RowShare | None = None
    biases: dict[tuple[int, int, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def from_edges(
        cls, edges: Sequence[int], device: torch.device | str = "cpu", share: RowShare | None = None
    ) -> Segments:
        """Return the segments of a row of samples with ``edges``, from 0 to T."""
        first, last = (0, edges[-1]) if share is None else share.query_range(edges[-1])
        inside = ((a, b) for a, b in pairwise(edges) if a < last and b > first)
        spans = tuple(Span(a, max(a, first), min(b, last)) for a, b in inside)
        queries, keys = [span.last - span.first for span in spans], [span.last - span.start for span in spans]
        cu_queries, cu_keys = (torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys))
        cu_queries = cu_queries.to(device)
        cu_keys = cu_queries if keys == queries else cu_keys.to(device)
        return cls(tuple(edges), spans, cu_queries, cu_keys, (max(queries), max(keys)), share)

    @cached_property
    def blocks(self) -> BlockMask:
        """The mask over blocks of 128 queries and keys of these spans, for flex attention."""
        begin = self.spans[0].start
        device = self.cu_queries.device
        counts = [span.last - span.first for span in self.spans]
        # The first key that each query sees, and the last one: itself.
        first = torch.tensor([span.start - begin for span in self.spans]).repeat_interleave(torch.tensor(counts))
        last = torch.arange(sum(counts)) + (self.spans[0].first - begin)
        first, last = first.to(device), last.to(device)

        def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (first[query] <= key) & (key <= last[query])

        keys = self.spans[-1].last - begin
        return create_block_mask(is_visible, None, None, len(last), keys, device=str(device))

    def bias(self, slopes: Tensor, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
        """Return ALiBi's bias [1, H, queries, keys] of a sample whose last keys are the queries; cached, because all
        layers and all samples of that length share it."""
        shape = (queries, keys, dtype)
        if shape not in self.biases:
            self.biases[shape] = alibi.causal(slopes, keys - queries, queries, keys, dtype)
        return self.biases[shape]

    @property
    def tokens(self) -> int:
        """Tokens of the row that this rank has."""
        if self.share is None:
            return self.edges[-1]
        part = self.share.local_slice(self.edges[-1])
        return int(part.stop - part.start)


@dataclass
class PackedForward:
    """A running packed forward: its segments, and the modules whose attention received them."""

    segments: Segments
    seen: set[int] = field(default_factory=set)


current_forward: ContextVar[PackedForward | None] = ContextVar("packed forward", default=None)


def make_mask(**options: Any) -> Tensor | Segments | None:
    """Return torch's mask or, for the decoder in a packed forward, its segments. This is the mask function of every
    attention that Octavo registers. `options`: the arguments of transformers' mask functions."""
    running = current_forward.get()
    is_encoder = options["mask_function"] is bidirectional_mask_function
    if running is None or is_encoder or options["q_length"] != running.segments.tokens:
        mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**options)
        return mask
    if options.get("local_size"):
        raise ModelError(
            f"packed rows do not support layers with a window ({options['local_size']} tokens). {PACKING_FIX}"
        )
    if options["kv_length"] != options["q_length"]:
        raise ModelError("packed rows do not support a key-value cache. Call the model with use_cache=False")
    return running.segments


def attend(
    segments: Segments, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float,
    attend_sample: Callable[[Tensor, Tensor, Tensor], Tensor], allow_varlen: bool = True, layer: object = None,
    attend_row: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention within each sample: q [1, H, T, D], k and v [1, H_kv, T, D] -> [1, T, H, D]; for a shared row
    only the tokens of this rank.

    ``attend_sample`` computes one sample, as [1, H, t, D]; it may receive only the last queries of the sample.
    ``allow_varlen``: whether flash attention may compute all samples in one call. ``attend_row``: computes all samples
    instead, as [1, T, H, D]. Raises ModelError if the segments have a different number of tokens.
    """
    running = current_forward.get()
    # The caller later checks that every layer called this: a layer that ignored the segments would mix samples.
    if running is not None and running.segments is segments:
        running.seen.add(id(layer))
    if q.shape[0] != 1 or not q.shape[2] == k.shape[2] == segments.tokens:
        raise ModelError(
            f"a packed row of {segments.tokens} tokens was passed to attention with {q.shape[0]} rows, {q.shape[2]} "
            f"queries and {k.shape[2]} keys: a cache, or a batch of several rows. Call the model on one pack with "
            "use_cache=False"
        )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin, first, _ = segments.spans[0]
        last = segments.spans[-1].last
        if attend_row is not None:
            return attend_row(q, k[:, :, begin:last], v[:, :, begin:last])
        if allow_varlen and supports_varlen(q, v, dropout):
            ends, keys = (segments.cu_queries, segments.longest[0]), (segments.cu_keys, segments.longest[1])
            return varlen(q, k[:, :, begin:last], v[:, :, begin:last], *ends, scale, True, keys)[None]
        parts = [
            attend_sample(q[:, :, a - first : b - first], k[:, :, s:b], v[:, :, s:b]) for s, a, b in segments.spans
        ]
        return torch.cat([part.transpose(1, 2) for part in parts], 1)

    if segments.share is None:
        return attention(q, k, v)
    return segments.share.attend(q, k, v, attention, layer)


def supports_varlen(q: Tensor, v: Tensor, dropout: float = 0.0) -> bool:
    """Return whether torch's ``varlen_attn`` supports these inputs."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    fits = q.shape[-1] == v.shape[-1] <= MAX_HEAD_DIM and q.shape[-1] % 8 == 0
    return accelerator.is_gpu(q.device) and half and not dropout and fits


def attend_images(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """Compute attention within each image of a row: q, k, v [1, H, T, D] -> [1, T, H, D]; `edges`: the ends of the
    images, int32 [images + 1] on the device. On CUDA in 16 bits it does not synchronize with the device."""
    if supports_varlen(q, v, dropout):
        return varlen(q, k, v, edges, longest, scale, causal=False)[None]
    parts = [
        F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], dropout_p=dropout, scale=scale)
        for a, b in pairwise(edges.tolist())
    ]
    return torch.cat([part.transpose(1, 2) for part in parts], 1)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor, longest: int, scale: float | None, causal: bool,
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention [T, H, D] of q [1, H, T, D] over k and v [1, H_kv, S, D] by torch's ``varlen_attn``. ``keys``:
    the ends of the keys of each span of queries and their maximum number, or None if they equal the ends of the
    queries. The last query of a span attends to all of its keys."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    known = inspect.signature(varlen_attn).parameters  # which differ between versions of torch
    groups = q.shape[1] // k.shape[1]
    windowed = "window_size" in known
    options: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)} if windowed else {"is_causal": causal}
    if groups > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    key_edges, longest_keys = keys or (edges, longest)
    return cast(Tensor, varlen_attn(q, k, v, edges, key_edges, longest, longest_keys, **options))
