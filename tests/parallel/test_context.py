"""A row on several ranks against the same row in one process: attention, whole models, and runs.

Ulysses alone (U = P) sums in no other order than one process and is held to its bits; gathered keys and values to 1e-6.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from octavo.models.attention import segments
from octavo.parallel import World, WorldError, context, make_context, ulysses_size
from tests import ranks

LENGTHS = {"one over all": (512,), "many": (37, 5, 90, 1, 123, 63, 193), "ends at a rank's": (256, 128, 127, 1)}
HEADS = {2: ((8, 2), (4, 1), (6, 3), (4, 4)), 4: ((8, 2), (4, 1), (12, 3))}


def attention(held, q, k, v):
    """Causal attention within samples, called like transformers does."""

    def one(q, k, v):
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    return segments.attend(held, q, k, v, None, 0.0, one)


def _attends(world: World, ulysses: int) -> dict:
    answer = {}
    for heads, few in HEADS[world.layout.context]:
        made = make_context(world, ulysses, heads)
        assert made is not None
        for name, lengths in LENGTHS.items():
            edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
            torch.manual_seed(0)
            whole = [torch.randn(1, n, 512, 16, requires_grad=True) for n in (heads, few, few)]
            dy = torch.randn(1, 512, heads, 16)
            wanted = attention(segments.Segments.from_edges(edges), *whole)
            wanted.backward(dy)
            part = made.local_slice(512)
            local = [x.detach()[:, :, part].clone().requires_grad_() for x in whole]
            actual = attention(segments.Segments.from_edges(edges, share=made), *local)
            actual.backward(dy[:, part])
            pairs = [
                (actual, wanted[:, part]),
                *((a.grad, b.grad[:, :, part]) for a, b in zip(local, whole, strict=True)),
            ]
            answer[f"{heads}/{few} {name}"] = [float((a - b).abs().max().detach()) for a, b in pairs]
    return answer


def _sends(world: World, ulysses: int) -> list[float]:
    """Return (bytes that this rank sends in a forward and backward of a layer, documented bytes)."""
    sent = [0.0]

    def counted(send, of):
        def call(out, x, *args, group=None):
            share = x if of == "sent" else out
            sent[0] += share.nbytes * (1 - 1 / dist.get_world_size(group))
            return send(out, x, *args, group=group)

        return call

    dist.all_to_all_single = counted(dist.all_to_all_single, "sent")
    context._all_gather = counted(context._all_gather, "got")
    context._reduce_scatter = counted(context._reduce_scatter, "sent")
    ranks, tokens, heads, few, dim, each = world.size, 512, 8, 2, 16, 2
    result = make_context(world, ulysses, heads)
    x = [torch.randn(1, n, tokens // ranks, dim, dtype=torch.bfloat16, requires_grad=True) for n in (heads, few, few)]
    attention(segments.Segments.from_edges((0, tokens), share=result), *x).float().sum().backward()
    u, c, held = ulysses, ranks // ulysses, math.lcm(few, ulysses)
    exchange = 4 * (heads + held) * dim * each * tokens / ranks * (1 - 1 / u)
    return [sent[0], exchange + 2 * held / u * dim * tokens * (each + 4) * (1 - 1 / c)]


@pytest.mark.parametrize(("size", "ulysses"), [(2, 2), (2, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_bytes_match_the_documentation(size: int, ulysses: int):
    for sent, message in ranks.run(_sends, size, ulysses, context=size):
        assert sent == message > 0


@pytest.mark.parametrize(
    ("size", "ulysses"),
    [(2, 2), (2, 1), *(pytest.param(4, u, marks=pytest.mark.long) for u in (4, 2, 1))],
    ids=lambda n: str(n),
)
def test_attention_of_shared_row_equals_one_process(size: int, ulysses: int):
    for answer in ranks.run(_attends, size, ulysses, context=size):
        for case, (out, dq, dk, dv) in answer.items():
            few = int(case.split()[0].split("/")[1])
            assert out == dq == 0 or (ulysses < size and max(out, dq) < 1e-6), (case, out, dq)
            assert dk == dv == 0 or ((ulysses < size or few % ulysses) and max(dk, dv) < 4e-6), (case, dk, dv)


def test_ulysses_divides_the_context_and_the_heads():
    assert [ulysses_size(8, "auto", heads) for heads in (32, 12, 7)] == [8, 4, 1]
    for value, heads, why in ((3, 6, "the 4 ranks of a context"), (4, 6, r"6 query heads. .*auto \(2 here\)")):
        with pytest.raises(WorldError, match=rf"ulysses is {value}, which does not divide .*{why}"):
            ulysses_size(4, value, heads)
