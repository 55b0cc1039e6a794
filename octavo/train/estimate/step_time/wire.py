"""Computes the bytes that a rank receives in one micro-batch, by kind of exchange, from shapes and the mesh.

The bytes of each collective are in :mod:`octavo.parallel.wire`. Let R = replicate, F = shard x
context (the ranks that share a replica), P = context, U = ulysses, C = P / U, E = expert, T the tokens of a pack shared
by P ranks, and b the bytes of an element. For one micro-batch on one rank:

============= ================================================================ =====================================
gather        weights, of a group of n = F ranks (experts F / E)               (n - 1) x shard, again in backward
reduce        gradients, the same groups                                       (n - 1) x shard
sum           shards of gradients, over R copies                               2 (R - 1) / R x shard
ulysses       q, k, v in and o out; per layer, and backward                   4 (Hq + Hk') D b T / P (U - 1) / U
keys          k and v whole, gathered in the forward                           2 Hk' D b T / U (C - 1) / C
keys_grad     their gradients, reduced in fp32                                 8 Hk' D T / U (C - 1) / C
features      images' features to the ranks of their tokens, and back          2 I / P w b (P - 1) / P
dispatch      rows to their experts, and the gradients of their results        k T / P (E - 1) / E x two rows
combine       results to their tokens, and the gradients of the rows           k T / P (E - 1) / E x two rows
counts        the number of rows from each rank, int64, per layer              8 x experts (E - 1) / E
============= ================================================================ =====================================

Hk' is the number of key heads after they are repeated for U. There are I image tokens with w = d (1 + deepstack)
features each. A row has d elements of b bytes. `dispatch`, `combine` and `features` are expected values, assuming
that tokens choose all experts equally often and images are at random positions. The others are exact
(`tests/train/step_time/test_counted.py` counts them in runs).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.parallel import Layout, ulysses_size
from octavo.parallel.wire import all_reduce_bytes

# kind of exchange -> its collective
COLLECTIVES = {
    "gather": "all_gather", "reduce": "reduce_scatter", "sum": "all_reduce", "ulysses": "all_to_all",
    "keys": "all_gather", "keys_grad": "reduce_scatter", "features": "all_to_all", "dispatch": "all_to_all",
    "combine": "all_to_all", "counts": "all_to_all",
}  # fmt: skip


@dataclass(frozen=True)
class Mesh:
    """A layout and its number of context ranks that exchange heads; the other context ranks gather keys."""

    layout: Layout
    ulysses: int = 1

    @classmethod
    def from_layout(cls, layout: Layout, ulysses: int | str, heads: int) -> Mesh:
        """Return the mesh with `parallel.ulysses`, for a decoder with this many query heads."""
        return cls(layout, ulysses_size(layout.context, ulysses, heads))

    @property
    def gathering_ranks(self) -> int:
        """The number of ranks among which keys and values are gathered."""
        return self.layout.context // self.ulysses

    def __str__(self) -> str:
        axes = self.layout
        sizes = {"replicate": axes.replicate, "shard": axes.shard, "context": axes.context, "expert": axes.expert}
        return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "shard")


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers together.

    ``ranks`` is the number of ranks that share them. ``gathered`` is the bytes that one rank sends, and ``reduced`` the
    bytes of its shard of the gradients. ``regathered`` is True if they are gathered again in backward.
    """

    name: str
    ranks: int
    gathered: int
    reduced: int
    regathered: bool


@dataclass(frozen=True)
class CodedLayers:
    """The number of layers that send a tensor as FP8 codes (`train.exchange: fp8`), and their bytes per value."""

    layers: int = 0
    width: float = 0.0

    def __call__(self, layers: int, width: int) -> float:
        """Return the bytes of one value summed over all layers; layers without codes send `width` bytes."""
        return self.layers * self.width + (layers - self.layers) * width


@dataclass(frozen=True)
class Decoder:
    """The properties of a decoder that its exchanges depend on.

    ``layers`` have attention, and ``sparse`` layers have ``experts``, of which a token uses ``choices``. ``features``
    is the number of elements of an image token, including deepstack's. Attention ``outputs``, the ``rows``
    sent to experts, and the ``gradients`` of their results may be sent as codes.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    sparse: int = 0
    experts: int = 0
    choices: int = 0
    features: int = 0
    outputs: CodedLayers = CodedLayers()
    rows: CodedLayers = CodedLayers()
    gradients: CodedLayers = CodedLayers()


@dataclass(frozen=True)
class Rows:
    """A micro-batch of the ranks that share it.

    Of its ``tokens``, ``images`` are image tokens. ``width`` is the bytes of an element in the computing dtype.
    ``recomputed_attention`` and ``recomputed_experts`` are the numbers of forwards within backward: 1 if attention or
    experts are recomputed.
    """

    tokens: int
    images: int = 0
    width: int = 2
    recomputed_attention: int = 0
    recomputed_experts: int = 0


def fsdp_bytes(groups: Iterable[Group], copies: int, two_backwards: bool = False) -> dict[str, int]:
    """Return the bytes of FSDP2's exchanges: gather, reduce and sum.

    With ``two_backwards``, backward runs twice and gathers all groups again (`optimizer.update: backward` with
    `train.clip`).
    """
    received, backwards = {"gather": 0, "reduce": 0, "sum": 0}, 2 if two_backwards else 1
    for group in groups:
        gathers = 1 + group.regathered + (two_backwards and (group.regathered or not group.name))
        received["gather"] += (group.ranks - 1) * group.gathered * gathers
        received["reduce"] += (group.ranks - 1) * group.reduced * backwards
        received["sum"] += all_reduce_bytes(group.reduced, copies) * backwards
    return received


def context_bytes(decoder: Decoder, rows: Rows, mesh: Mesh) -> dict[str, int]:
    """Return the bytes that the ranks that share a row exchange."""
    ranks, heads, gathering_ranks = mesh.layout.context, mesh.ulysses, mesh.gathering_ranks
    local_tokens, passes = rows.tokens // ranks, 2 + rows.recomputed_attention
    repeated = math.lcm(decoder.kv_heads, heads)
    exchanged = (decoder.heads + 2 * repeated) * decoder.layers * rows.width * passes  # q, k, v, and their gradients
    outputs = decoder.outputs(decoder.layers, rows.width) * (passes - 1) + decoder.layers * rows.width
    swapped = (exchanged + decoder.heads * outputs) * decoder.head_dim * local_tokens * (heads - 1) / heads
    # the elements of k and v that a rank contributes to the gather
    shard = 2 * repeated // heads * decoder.head_dim * (local_tokens * heads)
    features = decoder.features * rows.width * (rows.images // ranks) * (ranks - 1) // ranks
    return {
        "ulysses": int(swapped),
        "keys": decoder.layers * (passes - 1) * (gathering_ranks - 1) * shard * rows.width,
        "keys_grad": decoder.layers * (gathering_ranks - 1) * shard * 4,
        "features": 2 * features,
    }


def expert_bytes(decoder: Decoder, rows: Rows, mesh: Mesh) -> dict[str, int]:
    """Return the bytes that the ranks that share experts exchange."""
    ranks, forwards = mesh.layout.expert, 1 + rows.recomputed_experts
    sent = decoder.choices * (rows.tokens // mesh.layout.context) * (ranks - 1) / ranks
    combined = int(decoder.sparse * sent * decoder.hidden * rows.width * (forwards + 1))
    dispatched, returned = (layers(decoder.sparse, rows.width) for layers in (decoder.rows, decoder.gradients))
    received = int(sent * decoder.hidden * (dispatched * forwards + returned))
    counts = decoder.sparse * forwards * 8 * decoder.experts * (ranks - 1) // ranks
    return {"dispatch": received, "combine": combined, "counts": counts}


def total_bytes(
    groups: Iterable[Group], decoder: Decoder, rows: Rows, mesh: Mesh, two_backwards: bool = False
) -> dict[str, int]:  # fmt: skip
    """Return the bytes that a rank receives in a micro-batch, by kind; kinds of 0 bytes are left out."""
    received = fsdp_bytes(groups, mesh.layout.replicate, two_backwards)
    received |= context_bytes(decoder, rows, mesh) | expert_bytes(decoder, rows, mesh)
    return {kind: size for kind, size in received.items() if size}


def by_collective(kinds: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each collective, as :class:`octavo.parallel.CommCounter` counts them."""
    out: dict[str, int] = {}
    for kind, size in kinds.items():
        out[COLLECTIVES[kind]] = out.get(COLLECTIVES[kind], 0) + size
    return out
