"""Grouped attention against torch's attention on repeated heads: equal output, close gradients, less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from octavo.fp8.blocks import attention
from octavo.fp8.blocks.attention import grouped_attention
from octavo.fp8.memory.accounting import count_saved

B, T, H, KV, D = 2, 37, 6, 2, 24
MASKS = ("none", "causal", "shared boolean", "own boolean", "added")


def make_inputs(
    kind: str, dtype: torch.dtype = torch.bfloat16, kv: int = KV
) -> tuple[list[Tensor], Tensor | None, bool]:
    torch.manual_seed(0)
    # As a layer makes them: rows first, then seen as heads.
    qkv = [torch.randn(B, T, heads, D).to(dtype).transpose(1, 2) for heads in (H, kv, kv)]
    mask = {
        "shared boolean": torch.ones(1, 1, T, T, dtype=torch.bool).tril(),
        "own boolean": (torch.rand(B, 1, T, T) > 0.3) | torch.eye(T, dtype=torch.bool),
        "added": torch.randn(B, 1, T, T).to(dtype),
    }.get(kind)
    return qkv, mask, kind == "causal"


def stock(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **kwargs) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, **kwargs)


def gradients(function, qkv, *args, **kwargs) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = function(*leaves, *args, **kwargs)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def error(a: Tensor, exact: Tensor) -> float:
    return float((a.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [1, KV, H])
def test_matches_attention_on_repeated_heads(kind, dtype, kv):
    qkv, mask, causal = make_inputs(kind, dtype, kv)
    actual = gradients(grouped_attention, qkv, mask, is_causal=causal)
    expected = gradients(stock, qkv, mask, is_causal=causal)
    assert torch.equal(actual[0], expected[0]) and actual[0].stride() == expected[0].stride()
    assert torch.equal(actual[1], expected[1])
    wide = mask.double() if kind == "added" else mask
    exact = gradients(stock, [x.double() for x in qkv], wide, is_causal=causal)
    # The gradient of the output is drawn in another dtype there, so exactness is asked of fp32 alone.
    for a, b, c in zip(actual[2:], expected[2:], exact[2:], strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        if dtype == torch.float32:
            assert error(a, c) <= 2 * error(b, c) + 1e-7
        else:
            assert error(a, b.double()) < 2 * torch.finfo(dtype).eps


def test_head_gradients_are_summed_in_fp32():
    qkv, mask, _ = make_inputs("shared boolean", kv=1)
    actual = gradients(grouped_attention, qkv, mask)
    wide = gradients(stock, [x.float() for x in qkv], mask)
    expected = gradients(stock, qkv, mask)
    for a, b, c in zip(actual[2:], expected[2:], wide[2:], strict=True):
        assert error(a, c.double()) <= 1.1 * error(b, c.double())


def keeps(function, kind: str) -> dict[torch.dtype, int]:
    qkv, mask, causal = make_inputs(kind)
    leaves = [x.requires_grad_() for x in qkv]
    with count_saved(nn.Identity()) as k:
        out = function(*(x * 1 for x in leaves), mask, is_causal=causal)
    by_dtype = k.report().by_dtype
    del out
    return by_dtype


@pytest.mark.parametrize("kind", MASKS)
def test_k_v_and_mask_are_saved_without_copies(kind):
    bf16 = 2 * B * T * D * (H + 2 * KV + H)  # q, k, v, output
    assert keeps(grouped_attention, kind) == {torch.bfloat16: bf16, torch.float32: 4 * B * H * T}
    copies = 2 * B * T * D * 2 * (H - KV)
    boolean = {"shared boolean": 2 * T * T, "own boolean": 2 * B * T * T}.get(kind, 0)
    assert keeps(stock, kind)[torch.bfloat16] == bf16 + copies + boolean


def test_autocast_matches_torch():
    qkv, mask, _ = make_inputs("added", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = gradients(grouped_attention, qkv, mask), gradients(stock, qkv, mask)
    assert actual[0].dtype == torch.bfloat16 and torch.equal(actual[0], expected[0])
    assert all(a.dtype == torch.float32 for a in actual[1:])
    assert torch.equal(actual[1], expected[1])


def test_custom_scale_and_unequal_lengths():
    qkv, _, _ = make_inputs("none")
    qkv = [qkv[0][:, :, :5], *qkv[1:]]
    actual, expected = (gradients(f, qkv, None, scale=0.3) for f in (grouped_attention, stock))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_dropout_is_recomputed_with_same_mask():
    qkv, mask, _ = make_inputs("shared boolean", torch.float32)
    torch.manual_seed(7)
    actual = gradients(grouped_attention, qkv, mask, dropout=0.5)
    torch.manual_seed(7)
    expected = gradients(stock, qkv, mask, dropout=0.5)
    assert all(torch.equal(a, b) for a, b in zip(actual[:2], expected[:2], strict=True))
    assert torch.allclose(actual[2], expected[2], atol=1e-5) and torch.allclose(actual[3], expected[3], atol=1e-5)
    assert not torch.equal(actual[0], gradients(stock, qkv, mask)[0])


def test_unsupported_head_sizes_are_recomputed():
    qkv, mask, _ = make_inputs("shared boolean", torch.float32)
    wider = torch.randn(B, KV, T, D + 8)
    actual, expected = (gradients(f, [*qkv[:2], wider], mask) for f in (grouped_attention, stock))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])

    def forward(q, k, v, mask, is_causal):
        return grouped_attention(q, k, torch.cat((v, v), -1), mask)

    saved_bytes = keeps(forward, "shared boolean")
    assert sum(saved_bytes.values()) < 2 * B * H * T * T * 2 + 2 * B * T * D * (2 * H + 4 * KV) + 1


def test_trained_mask_gets_gradient():
    qkv, mask, _ = make_inputs("added", torch.float32)
    grads = []
    for function in (grouped_attention, stock):
        bias = mask.clone().requires_grad_()
        function(*(x.clone().requires_grad_() for x in qkv), bias).square().sum().backward()
        grads.append(bias.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("inside", [False, True])
def test_two_backwards_and_checkpointing(inside):
    qkv, mask, _ = make_inputs("own boolean")
    leaves = [x.clone().requires_grad_() for x in qkv]
    if inside:
        out = checkpoint(grouped_attention, *leaves, mask, use_reentrant=False)
    else:
        out = grouped_attention(*leaves, mask)
    out.float().sum().backward(retain_graph=True)
    once = [x.grad.clone() for x in leaves]
    out.float().sum().backward()
    assert all(torch.equal(x.grad, 2 * y) for x, y in zip(leaves, once, strict=True))


def test_fake_tensors_select_same_path():
    with FakeTensorMode():
        assert keeps(grouped_attention, "shared boolean") == {
            torch.bfloat16: 2 * B * T * D * (2 * H + 2 * KV), torch.float32: 4 * B * H * T,
        }  # fmt: skip


def test_no_recomputation_without_gradients(monkeypatch):
    qkv, mask, _ = make_inputs("own boolean")
    monkeypatch.setattr(attention, "_CpuFlash", None)
    with torch.no_grad():
        assert torch.equal(grouped_attention(*qkv, mask), stock(*qkv, mask))
    assert torch.equal(grouped_attention(*qkv, mask), stock(*qkv, mask))


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "causal", "word"),
    [
        ((1, 4, 3, 8), (1, 3, 3, 8), (1, 3, 3, 8), None, False, "multiple of H_kv"),
        ((1, 4, 3, 8), (1, 2, 3, 16), (1, 2, 3, 16), None, False, "multiple of H_kv"),
        ((4, 3, 8), (2, 3, 8), (2, 3, 8), None, False, "dimension 1"),
        ((1, 4, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), (3, 3), True, "cannot be combined with is_causal"),
    ],
)
def test_invalid_arguments_are_rejected(q, k, v, mask, causal, word):
    mask = None if mask is None else torch.ones(mask, dtype=torch.bool)
    with pytest.raises(ValueError, match=word):
        grouped_attention(torch.ones(q), torch.ones(k), torch.ones(v), mask, is_causal=causal)
