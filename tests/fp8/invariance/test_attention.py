"""Attention in fixed tiles: SDPA's values and gradients, and the same bits in any company."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import fp8
from octavo.fp8.invariance.attention import attention


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(tokens: int, keys: int | None = None, heads: int = 6, kv: int = 2, size: int = 24, batch: int = 3, **more):
    keys = tokens if keys is None else keys
    return (
        random(batch, heads, tokens, size, seed=0, **more),
        random(batch, kv, keys, size, seed=1, **more),
        random(batch, kv, keys, size + 8, seed=2, **more),
    )


def visible(tokens: int, lengths: list[int], left: bool, window: int | None = None) -> Tensor:
    """[B, 1, T, T]: causal inside each sequence, which stands at one side of its row."""
    place = torch.arange(tokens)
    own = torch.stack([(place >= tokens - n) if left else (place < n) for n in lengths])
    mask = place[:, None] >= place[None]
    if window is not None:
        mask = mask & (place[None] > place[:, None] - window)
    return (mask & own[:, None, :] & own[:, :, None])[:, None]


CALLS = {
    "all": {},
    "causal": {"is_causal": True},
    "padded": {"mask": visible(200, [200, 150, 3], left=False)},
    "padded left": {"mask": visible(200, [200, 150, 3], left=True)},
    "window": {"mask": visible(200, [200, 150, 3], left=False, window=20)},
    "added": {"mask": random(3, 6, 200, 200, seed=4)},
    "scale": {"is_causal": True, "scale": 0.3},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_match_sdpa(call: str, dtype: torch.dtype) -> None:
    """Against float64; twice the error of torch's own attention in the dtype, and 1e-5 where that is exact."""
    options = CALLS[call]
    given = [x.requires_grad_() for x in inputs(200, dtype=dtype)]
    mask = options.get("mask")
    seen = torch.ones(3, 200, dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        seen = mask[:, 0].any(-1)
    dy = random(3, 6, 200, 32, seed=3, dtype=dtype) * seen[:, None, :, None]

    def stock(*qkv: Tensor) -> Tensor:
        rest = {name: value for name, value in options.items() if name != "mask"}
        other = mask.to(qkv[0].dtype) if mask is not None and mask.dtype != torch.bool else mask
        q, *kv = qkv
        return F.scaled_dot_product_attention(q, *(x.repeat_interleave(3, 1) for x in kv), other, **rest)

    def outcome(function, qkv) -> list[Tensor]:
        y = function(*qkv)
        return [y * seen[:, None, :, None], *torch.autograd.grad(y, qkv, dy.to(y.dtype))]

    exact = outcome(stock, [x.detach().double().requires_grad_() for x in given])
    theirs = outcome(stock, given)
    ours = outcome(lambda *qkv: attention(*qkv, **options), given)
    for best, there, here in zip(exact, theirs, ours, strict=True):
        allowed = max(2 * float((there - best).nan_to_num().abs().max()), 1e-5)
        assert here.dtype == dtype and float((here - best.nan_to_num()).abs().max()) <= allowed


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_applies_to_inputs_only(inside: bool) -> None:
    given = [x.requires_grad_() for x in inputs(40)]
    dy = random(3, 6, 40, 32, seed=3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(*given, is_causal=True)
        if inside:
            ours.backward(dy)
    if not inside:
        ours.backward(dy)
    lowered = [x.detach().bfloat16().requires_grad_() for x in given]
    wanted = attention(*lowered, is_causal=True)
    wanted.backward(dy)
    assert torch.equal(ours, wanted)
    assert all(torch.equal(one.grad.bfloat16(), other.grad) for one, other in zip(given, lowered, strict=True))


def test_query_without_visible_keys_gives_zero() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(5))
    y = attention(q, k, v, positions=torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2], [-1] * 5]))
    assert not y[1, :, :2].any() and not y[2].any() and y[0].any()
    assert all(torch.isfinite(d).all() and not d[2].any() for d in torch.autograd.grad(y.sum(), (q, k, v)))


@pytest.mark.parametrize(
    ("heads", "kv", "size", "threads"),
    [
        *((6, 2, 24, 1), (4, 4, 72, 1), (5, 1, 128, 1)),
        pytest.param(5, 1, 128, 2, marks=pytest.mark.long),
        pytest.param(6, 2, 24, 2, marks=pytest.mark.long),
        pytest.param(4, 4, 72, 2, marks=pytest.mark.long),
    ],
)
def test_query_result_is_batch_invariant(heads: int, kv: int, size: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = inputs(300, heads=heads, kv=kv, size=size)
        whole = attention(q, k, v, is_causal=True)
        right = attention(q, k, v, mask=visible(300, [300, 260, 7], left=False))
        for row, length in enumerate([300, 260, 7]):
            assert torch.equal(right[row, :, :length], whole[row, :, :length])
            shifted = [torch.cat([x[row : row + 1, :, length:], x[row : row + 1, :, :length]], 2) for x in (q, k, v)]
            left = attention(*shifted, mask=visible(300, [length], left=True))
            assert torch.equal(left[0, :, 300 - length :], whole[row, :, :length])
        for t in (0, 1, 5, 127, 128, 256, 299):
            alone = attention(
                q[1:2, :, t : t + 1], k[1:2, :, : t + 1], v[1:2, :, : t + 1], positions=torch.tensor([[t]])
            )
            assert torch.equal(alone[0, :, 0], whole[1, :, t])
            room = attention(q[:, :, t : t + 1], k, v, positions=torch.tensor([[0], [t], [299]]))
            assert torch.equal(room[1, :, 0], whole[1, :, t])
    finally:
        torch.set_num_threads(before)


def test_window_equals_its_mask() -> None:
    q, k, v = inputs(150)
    by_mask = attention(q, k, v, mask=visible(150, [150] * 3, left=False, window=9))
    positions = torch.arange(150).expand(3, 150)
    assert torch.equal(by_mask, attention(q, k, v, positions=positions, window=9))
    assert not torch.equal(by_mask, attention(q, k, v, positions=positions, window=10))


def test_sequences_start_at_any_column() -> None:
    q, k, v = inputs(1, 200)
    starts, held = torch.tensor([0, 3, 150]), torch.tensor([[9], [140], [49]])
    found = attention(q, k, v, positions=held, starts=starts)
    for row, (start, last) in enumerate(zip(starts.tolist(), held[:, 0].tolist(), strict=True)):
        own = [x[row : row + 1, :, start : start + last + 1] for x in (k, v)]
        assert torch.equal(found[row], attention(q[row : row + 1], *own, positions=held[row : row + 1])[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": 5}, "multiple of"),
        ({"is_causal": True, "positions": torch.zeros(3, 4, dtype=torch.int64)}, "is_causal"),
        ({"positions": torch.zeros(3, 5, dtype=torch.int64)}, r"\[3, 5\]"),
        ({"window": 4}, "positions"),
        ({"window": 0, "is_causal": True}, "at least 1"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "four"),
    ],
)
def test_invalid_shapes_are_rejected(options: dict, said: str) -> None:
    q, k, v = inputs(4, heads=options.pop("heads", 6))
    with pytest.raises(ValueError, match=said):
        attention(q, k, v, **options)


def test_learned_mask_is_rejected() -> None:
    with pytest.raises(fp8.InvarianceError, match="position bias"):
        attention(*inputs(4), mask=torch.zeros(1, 6, 4, 4, requires_grad=True))


def test_hidden_tile_changes_no_bit() -> None:
    """What the docstring promises, without a whole model: keys that nobody sees, before and behind."""
    q, k, v = inputs(2, 100)
    positions = torch.tensor([[98, 99]] * 3)
    wide = [F.pad(x, (0, 0, 0, 300), value=math.pi) for x in (k, v)]
    assert torch.equal(attention(q, k, v, positions=positions), attention(q, *wide, positions=positions))
