"""Saved activations: codes of any activation, and inputs that the backward recomputes."""

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.arithmetic import cast
from octavo.fp8.blocks import attention_output, grouped_attention
from octavo.fp8.dense import inputs, sources
from octavo.fp8.dense.inputs import Recomputable, drop_entries
from octavo.fp8.dense.sources import SPEC
from octavo.fp8.memory.accounting import count_saved
from octavo.fp8.planning import unfuse


@pytest.mark.parametrize("k", [1, 16, 72, 80, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_e4m3_1x128_pow2(k, dtype):
    x = (torch.randn(2, 3, k) * 2.0 ** torch.randint(-9, 6, (2, 3, 1))).to(dtype)
    q, want = sources.encode_activation(x), cast.quantize(x.reshape(6, k), SPEC)
    assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8)) and torch.equal(q.scale, want.scale)
    y = sources.decode_activation(q, dtype)
    assert y.dtype == dtype and torch.equal(y, cast.dequantize(want).to(dtype))


def test_bad_and_extreme_values():
    x = torch.ones(3, 200)
    x[0, 5], x[1, 150], x[2, 0] = float("nan"), float("-inf"), 3e38
    y = sources.decode_activation(sources.encode_activation(x), torch.bfloat16)
    assert y[0, :128].isnan().all() and (y[0, 128:] == 1).all()
    assert (y[1, :128] == 1).all() and y[1, 128:].isnan().all()
    assert y[2, 0] > 2e38 and y[2, 128:].eq(1).all()
    big = torch.tensor([[65504.0, float("nan")], [65504.0, 1.0]]).half()
    y = sources.decode_activation(sources.encode_activation(big), torch.float16)
    assert y[0].isnan().all() and y[1, 0] == 65504  # the code stands for 65536, which fp16 lacks


def layer(recipe="blockwise", **policy):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(96, 64))
    return fp8.apply(module, fp8.plan(module, fp8.Policy(recipe=recipe, **policy)))[0]


def run(module, x, again=None, lowered=False, grad=True):
    """Return (output, gradients, saved tensors) of a layer, with or without a source of its input."""
    drop_entries()
    x = x.detach().clone().requires_grad_(grad)
    module.zero_grad(set_to_none=True)
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=lowered),
    ):
        if again is None:
            y = module(x)
        else:
            with inputs.with_recomputable(x, again):
                y = module(x)
    (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    saved = [t for t in saved if t is not module.weight]
    return [y.detach(), x.grad, module.weight.grad, module.bias.grad], saved


CASES = [
    ("blockwise", {}), ("rowwise", {}), ("tensorwise", {}), ("mxfp8", {}), ("delayed", {}),
    ("blockwise", {"wgrad": "bf16"}), ("blockwise", {"fwd": "bf16"}), ("delayed", {"fwd": "bf16"}),
    ("blockwise", {"dgrad": "bf16"}),
]  # fmt: skip


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(("recipe", "policy"), CASES)
def test_recomputed_input_gives_same_gradients(recipe, policy, lowered):
    x = torch.randn(3, 7, 96)
    half = Recomputable((x.half(),), lambda t: t.float())  # a source that keeps something else than x
    x, layers = x.half().float(), [layer(recipe, **policy) for _ in range(2)]
    for module in layers:
        run(module, 7 * x, None, lowered)  # a history whose scale is not that of x
    (want, codes), (got, saved) = (run(m, x, again, lowered) for m, again in zip(layers, (None, half), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert [t.shape for t in saved if t.dtype == torch.float16] == [x.shape]
    other = [t for t in saved if t.dtype != torch.float16]
    assert sum(t.numel() for t in other) == (1 if recipe == "delayed" else 0)  # the scale of a history
    assert sum(t.numel() for t in codes) >= x.numel()


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_frozen_weight_uses_no_source(recipe):
    module = layer(recipe)
    module.weight.requires_grad_(False)
    x = torch.randn(5, 96)
    (_, saved), again = run(module, x, Recomputable((x,), lambda t: t)), []
    assert not any(t.shape == x.shape for t in saved) and not again


def test_source_belongs_to_tensor_itself():
    x, y = torch.randn(4, 96), torch.randn(4, 96)
    source = Recomputable((x,), lambda t: t)
    with inputs.with_recomputable(x, source):
        assert (
            inputs.get_recomputable(x) is source
            and inputs.get_recomputable(y) is None
            and inputs.get_recomputable(x.view(4, 96)) is None
        )
        with inputs.with_recomputable(y, source):
            assert inputs.get_recomputable(y) is source and inputs.get_recomputable(x) is None
        assert inputs.get_recomputable(x) is source
        x.add_(1)
        assert inputs.get_recomputable(x) is None
    assert inputs.get_recomputable(y) is None


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "delayed"])
def test_health_and_counts_are_unchanged(recipe):
    x, figures = torch.randn(9, 96), []
    for again in (None, Recomputable((x,), lambda t: t)):
        module = layer(recipe)
        with fp8.count_gemms() as counts, fp8.health() as h:
            run(module, x, again)
        figures.append((dict(counts.calls), dict(counts.expected), h.table()))
    assert figures[0] == figures[1] and "dw_cosine" in figures[0][2]["0"] and "x_wgrad" in figures[0][2]["0"]


# --- the output layer of attention ------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Heads of 32, by sdpa or by matrix products."""

    def __init__(self, k=128, flash=True):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(k, k))
        self.flash = flash

    def forward(self, x):
        q, k, v = (m(x).view(*x.shape[:-1], -1, 32).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))
        if self.flash:
            y = nn.functional.scaled_dot_product_attention(2 * q, 2 * k, v)
        else:
            y = (2 * q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).contiguous().view(x.shape))


def attention(flash=True, dtype=torch.bfloat16, **policy):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(flash=flash)).to(dtype)
    return fp8.apply(model, fp8.plan(model, fp8.Policy(**policy)))


def gradients(model, x, lowered=False):
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def bytes_saved(model, x, lowered=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered), count_saved(model, [("0", model[0])]) as k:
        y = model(x.clone().requires_grad_())
    rows = [r for r in k.report().rows if r.kind == "activation"]
    del y
    return rows


@pytest.mark.parametrize("lowered", [False, True])
def test_attention_output_layer_saves_reference(lowered):
    dtype = torch.float32 if lowered else torch.bfloat16
    x = torch.randn(2, 64, 128).to(dtype)
    plain, twin = (attention(dtype=dtype, activations=a, fuse="off") for a in ("bf16", "fp8"))
    assert all(torch.equal(a, b) for a, b in zip(*(gradients(m, x, lowered) for m in (plain, twin)), strict=True))
    sizes = [sum(r.bytes for r in bytes_saved(m, x, lowered)) for m in (plain, twin)]
    codes = x.numel() + 4  # one block of 128x128
    assert sizes[0] - sizes[1] == codes


def test_copied_attention_output_is_saved_as_codes():
    x = torch.randn(2, 64, 128).bfloat16()
    plain, twin = (attention(flash=False, activations=a, fuse="off") for a in ("bf16", "fp8"))
    rows = [bytes_saved(m, x) for m in (plain, twin)]
    assert sum(r.bytes for r in rows[0]) == sum(r.bytes for r in rows[1])
    y = torch.randn(2, 64, 4, 32, requires_grad=True).transpose(1, 2)
    out = nn.functional.scaled_dot_product_attention(y, y, y)
    shared = attention_output.is_saved_by_attention
    assert shared(out) and shared(out.transpose(1, 2).reshape(2, 64, 128)) and not shared(out * 1) and not shared(y)
    assert not shared(out.reshape(2, 4, 32, 64).reshape(-1))  # a copy
    assert not shared(out.clone()) and not shared(torch.cat([out, out])) and not shared(out.detach())
    out.grad_fn.metadata["keeps_output"] = False
    assert not shared(out.transpose(1, 2))


def test_unfuse_removes_source():
    model = attention(activations="fp8")
    assert "_recompute_input" in model[0].o_proj.__dict__
    unfuse(model)
    assert "_recompute_input" not in model[0].o_proj.__dict__


def test_v_does_not_keep_q_and_k_alive():
    """As in vision towers with a fused projection, whose q and k are rotated before attention."""
    sizes = []
    for turn in (lambda t: 2 * t, lambda t: t):
        x = torch.randn(1, 64, 3 * 128, dtype=torch.bfloat16, requires_grad=True)

        def attend(attention, x=x, turn=turn):
            q, key, v = (2 * x).view(1, 64, 3, 4, 32).permute(2, 0, 3, 1, 4)
            return attention(turn(q), turn(key), v)

        with count_saved(nn.Identity()) as k:
            y = attend(grouped_attention)
        assert torch.equal(y, attend(nn.functional.scaled_dot_product_attention))
        sizes.append(sum(r.bytes for r in k.report().rows if r.kind == "activation" and r.dtype == torch.bfloat16))
    one = 64 * 128 * 2
    assert sizes == [4 * one, 4 * one]  # q, k, v and the output; or the buffer of all three and the output
