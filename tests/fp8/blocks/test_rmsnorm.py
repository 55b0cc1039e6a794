"""RMSNorms that compute codes for the next layers: equal codes, reuse, gradients, and modules that are not replaced."""

import copy
import pickle
import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from octavo import fp8
from octavo.fp8.arithmetic.cast import quantize
from octavo.fp8.blocks import gated_mlp, rmsnorm
from octavo.fp8.dense import inputs
from octavo.fp8.dense.swap import unswap
from octavo.fp8.kernels import registry
from octavo.fp8.metrics import calc_diff
from octavo.models.tiny.configs import tiny_config
from tests.fp8.remembered import held_bytes

QKV = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    def __init__(self, k, **kwargs):
        super().__init__()
        for name in QKV:
            setattr(self, name, nn.Linear(k, 128, **kwargs))

    def forward(self, x):
        return self.q_proj(x).sin() + self.k_proj(x) * self.v_proj(x)


class Block(nn.Module):
    """A norm before attention, as in a decoder."""

    def __init__(self, k=96, norm=Qwen3RMSNorm, **kwargs):
        super().__init__()
        self.input_layernorm = norm(k).to(**kwargs)
        self.self_attn = Attention(k, **kwargs)
        with torch.no_grad():
            for p in self.input_layernorm.parameters():
                p.copy_(torch.randn(p.shape) + 1)

    def forward(self, x):
        return self.self_attn(self.input_layernorm(x))


def pair(recipe="blockwise", seed=0, policy=None, **kwargs):
    """Return a block with FP8 layers, and a copy whose norm computes codes."""
    torch.manual_seed(seed)
    block = Block(**kwargs)
    plain = fp8.apply(block, fp8.plan(block, fp8.Policy(recipe=recipe, **(policy or {}))))
    twin = copy.deepcopy(plain)
    assert rmsnorm.convert(twin) == (("input_layernorm", None),)
    return plain, twin


def casts(monkeypatch, rows):
    """The separate casts of inputs with this number of rows."""
    backend, recorded = registry.get("reference"), []
    for name in ("quantize", "quantize_both"):
        own = getattr(backend, name)

        def spy(x, *args, own=own, name=name):
            if x.shape[0] == rows:
                recorded.append(name)
            return own(x, *args)

        monkeypatch.setattr(backend, name, spy)
    return recorded


def run(module, x, inner=lambda m, x: m(x)):
    x = x.detach().clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    with fp8.count_gemms() as counts:
        y = inner(module, x)
        (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    return (
        y.detach(),
        x.grad,
        {n: p.grad for n, p in module.named_parameters()},
        dict(counts.calls),
        dict(counts.expected),
    )


def lowered(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m(x)


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_1d", "rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast", "autocast of bf16"])
def test_layers_reuse_codes_of_norm(recipe, dtype, monkeypatch):
    """The codes equal a cast of the same y bit for bit."""
    inner = lowered if isinstance(dtype, str) else lambda m, x: m(x)
    _, twin = pair(recipe, dtype=torch.float32 if isinstance(dtype, str) else dtype)
    arguments = {"autocast of bf16": torch.bfloat16, "autocast": torch.float32}.get(dtype, dtype)
    x = torch.randn(2, 7, 96).to(arguments)
    inner(twin, x)  # weights
    recorded, results = casts(monkeypatch, 14), []
    original = inputs.Input.codes

    def spy(self, row, col):
        codes = original(self, row, col)
        results.append((self.tensor, self.matrix(), row, col, codes))
        return codes

    monkeypatch.setattr(inputs.Input, "codes", spy)
    y = inner(twin, x.requires_grad_())
    assert recorded == [] and len(results) == 3
    for given_, matrix, row, col, codes in results:
        assert given_ is results[0][0]
        for want, q in zip((row, col), codes, strict=True):
            assert (want is None) == (q is None)
            if want is not None:
                exact = quantize(matrix, want.spec)
                assert torch.equal(exact.data.view(torch.uint8), q.data.view(torch.uint8))
                assert torch.equal(exact.scale.float(), q.scale.float())
    assert results[0][2] is not None and (results[0][3] is not None or recipe == "tensorwise")
    assert y.dtype == (torch.bfloat16 if isinstance(dtype, str) else dtype)
    norm_y = twin.input_layernorm(x)
    assert norm_y.dtype == (torch.float32 if isinstance(dtype, str) else dtype)  # as Hugging Face's: fp32 weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_matches_float64(dtype):
    _, twin = pair(dtype=dtype)
    norm, x = twin.input_layernorm, (torch.randn(3, 5, 96) * 10.0 ** torch.arange(-3.0, 2.0).unsqueeze(1)).to(dtype)
    dy, exact_x = torch.randn(3, 5, 96).to(dtype), x.double().requires_grad_()
    w = norm.weight.detach().double().requires_grad_()
    exact = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + norm.variance_epsilon) * w
    exact.backward(dy.double())
    x = x.requires_grad_()
    y = norm(x)
    y.backward(dy)
    eps = torch.finfo(dtype).eps
    assert ((y.double() - exact).abs() <= (eps / 2 + 1e-6) * exact.abs() + 1e-30).all()
    # Terms may cancel: the error is that of the largest term of a row, rounded to the dtype once.
    row = exact_x.grad.abs().amax(-1, keepdim=True)
    assert ((x.grad.double() - exact_x.grad).abs() <= eps / 2 * exact_x.grad.abs() + 4e-6 * row).all()
    assert ((norm.weight.grad.double() - w.grad).abs() <= eps / 2 * w.grad.abs() + 4e-6 * w.grad.abs().max()).all()
    assert x.grad.dtype == norm.weight.grad.dtype == dtype
    first = norm.weight.grad.clone()
    norm.weight.grad = None
    norm(x).backward(dy)
    assert torch.equal(first, norm.weight.grad)


def assert_near(plain, twin, x, inner=lambda m, x: m(x), tolerance=None):
    """Compare fp32 blocks, whose norms differ only in the last bits of y."""
    a, b = run(plain, x, inner), run(twin, x, inner)
    assert a[3:] == b[3:]
    for exact, results in ((a[0], b[0]), (a[1], b[1]), *((a[2][n], b[2][n]) for n in a[2])):
        assert (exact is None) == (results is None)
        if exact is not None:
            assert results.dtype == exact.dtype
            error = (results.float() - exact.float()).abs().max()
            assert error <= (tolerance or 2**-8) * exact.float().abs().max()
            assert calc_diff(results, exact) < (tolerance or 1e-6)


def test_matches_stock_norm():
    for recipe in ("blockwise", "rowwise"):
        plain, twin = pair(recipe)
        assert_near(plain, twin, torch.randn(2, 70, 96))
        assert_near(plain, twin, torch.randn(5, 96), lowered, tolerance=0.1)
    for m in (plain, twin):
        m.input_layernorm.weight.requires_grad_(False)
    assert_near(plain, twin, torch.randn(5, 96))
    for m in (plain, twin):
        m.self_attn.requires_grad_(False)
    assert_near(plain, twin, torch.randn(5, 96))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, monkeypatch):
    plain, twin = pair()
    assert_near(plain, twin, torch.randn(5, 96), lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    part = lambda m, x: checkpoint(m.self_attn, m.input_layernorm(x), use_reentrant=reentrant)  # noqa: E731
    assert_near(plain, twin, torch.randn(5, 96), part)
    recorded = casts(monkeypatch, 5)
    run(twin, torch.randn(5, 96), lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert Counter(recorded)["quantize_both"] == 3  # dy of each layer


def test_selective_checkpointing():
    """Regions that save the outputs of some operations replay the others by counting them."""
    plain, twin = pair()
    save = [torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor]
    contexts = partial(create_selective_checkpoint_contexts, save)
    inner = lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    for _ in range(2):
        assert_near(plain, twin, torch.randn(5, 96), inner)


def test_only_required_casts_run(monkeypatch):
    _, twin = pair()
    expected, backend = [], registry.get("reference")
    original = backend.rmsnorm_quantize
    monkeypatch.setattr(backend, "rmsnorm_quantize", lambda *a: expected.append(a[3:5]) or original(*a))
    x, r = torch.randn(5, 96), fp8.recipe("blockwise")
    twin(x)
    with torch.no_grad():
        twin(x)
    with torch.inference_mode():
        twin(x)
    twin.self_attn.requires_grad_(False)
    twin(x)
    assert expected == [(r.fwd.a, r.wgrad.b), (r.fwd.a, None), (None, None), (r.fwd.a, None)]
    x = x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = twin.input_layernorm(x)
    assert [tuple(t.shape) for t in saved] == [(5, 96), (96,), (5,)]
    assert held_bytes() > 0
    del y
    assert held_bytes() == 0


def test_other_inputs_are_cast_by_layers(monkeypatch):
    plain, twin = pair()

    def edited(m, x):
        y = m.input_layernorm(x)
        with torch.no_grad():
            y.mul_(2)
        return m.self_attn(y)

    for inner in (
        edited,
        lambda m, x: m.self_attn(m.input_layernorm(x) * 2),
        lambda m, x: m.self_attn(m.input_layernorm(x)) + m.self_attn(x),
        lambda m, x: torch.cat([m.self_attn(y := m.input_layernorm(x)), m.self_attn(y)]),
    ):
        with torch.no_grad():
            a, b = inner(plain, x := torch.randn(5, 96)), inner(twin, x)
        assert (a - b).abs().max() <= 2**-8 * a.abs().max()


def test_unused_codes_are_no_longer_computed(monkeypatch):
    _, twin = pair()
    expected, backend = [], registry.get("reference")
    original = backend.rmsnorm_quantize
    monkeypatch.setattr(backend, "rmsnorm_quantize", lambda *a: expected.append(a[3]) or original(*a))
    x = torch.randn(5, 96)
    for _ in range(2):
        twin(x)
        twin.input_layernorm(x)
    twin(x)
    for _ in range(3):
        twin.input_layernorm(x)
    twin(x)
    assert [w is not None for w in expected] == [True] * 7 + [False] * 2


def test_copy_pickle_unswap_high_precision_and_compile():
    plain, twin = pair()
    x = torch.randn(5, 96)
    assert isinstance(twin.input_layernorm, Qwen3RMSNorm) and list(twin.state_dict()) == list(plain.state_dict())
    for created in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert_near(plain, created, x)
        assert created.input_layernorm._feeds[0] is created.self_attn.q_proj is not twin.self_attn.q_proj
    with fp8.high_precision(plain), fp8.high_precision(twin):
        assert torch.equal(plain(x), twin(x))
    assert torch.equal(
        torch.compile(twin.input_layernorm, backend="eager", fullgraph=True)(x), plain.input_layernorm(x)
    )
    assert torch.equal(twin.input_layernorm(x.double()), plain.input_layernorm(x.double()))
    assert twin.input_layernorm(x[:0]).shape == (0, 96)
    unswap(twin.input_layernorm)
    assert type(twin.input_layernorm) is Qwen3RMSNorm and torch.equal(twin(x), plain(x))


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp(mesh_of_one, reshard):
    plain, twin = pair()
    fully_shard(twin, mesh=mesh_of_one, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (plain, twin)]
    losses: list[list[float]] = [[], []]
    for seed in range(3):
        for m, optimizer, out in zip((plain, twin), optimizers, losses, strict=True):
            loss = m(torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert twin.input_layernorm._taken and not twin.input_layernorm._misses


class Biased(Qwen3RMSNorm):
    def __init__(self, k):
        super().__init__(k)
        self.bias = nn.Parameter(torch.zeros(k))


class Outside(Qwen3RMSNorm):
    """Adds eps outside of the square root."""

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


@pytest.mark.parametrize(
    ("norm", "policy", "reason"),
    [
        (Gemma2RMSNorm, {}, r"off by .*1 \+ weight"),
        (lambda k: nn.LayerNorm(k, bias=False), {}, "is not x / rms"),
        (nn.LayerNorm, {}, "LayerNorm has weight, bias; an RMSNorm has only a weight"),
        (Biased, {}, "has weight, bias"),
        (Outside, {}, "is not x / rms"),
        (lambda k: nn.RMSNorm(k), {}, "has no float attribute"),
        (Qwen3RMSNorm, {"recipe": "delayed"}, "history"),
        (Qwen3RMSNorm, {"rules": [fp8.Rule("**.k_proj", recipe="rowwise")]}, "different casts"),
        (Qwen3RMSNorm, {"fwd": "bf16", "wgrad": "bf16"}, "cast nothing"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unsupported_norms_give_reason(norm, policy, reason, dtype):
    block = Block(norm=norm, dtype=dtype)
    fp8.apply(block, fp8.plan(block, fp8.Policy(**{"recipe": "blockwise", **policy})))
    kind = type(block.input_layernorm)
    ((_, why),) = rmsnorm.convert(block)
    assert why is not None and re.search(reason, why), why
    assert type(block.input_layernorm) is kind


def test_other_norms():
    block = Block(norm=lambda k: nn.RMSNorm(k, eps=1e-5))
    block.input_layernorm.register_forward_hook(lambda *_: pytest.fail("a trial is no call"))
    fp8.apply(block, fp8.plan(block, "blockwise"))
    assert (
        rmsnorm.convert(block) == (("input_layernorm", None),) and rmsnorm.convert(block)[0][1] == "it is already fused"
    )
    post = nn.ModuleDict({"post_attention_layernorm": Qwen3RMSNorm(96), "post_feedforward_layernorm": Qwen3RMSNorm(96)})
    post["mlp"] = nn.ModuleDict({"gate_proj": nn.Linear(96, 96), "up_proj": nn.Linear(96, 96)})
    assert rmsnorm.convert(fp8.apply(post, fp8.plan(post, "blockwise"))) == ()


def test_model_on_meta():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    fp8.apply(model, fp8.plan(model, "blockwise"))
    assert {why for _, why in (*rmsnorm.convert(model), *gated_mlp.convert(model))} == {None}


def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    from octavo.fp8.kernels.triton_kernels.launch import launches

    x = torch.randn(6, 32)
    _, twin = pair(k=32, policy={"backend": "triton"})
    _, reference = pair(k=32)
    with launches() as recorded:
        a = run(twin, x, lowered)
    assert recorded["rmsnorm_tile"] == 1
    b = run(reference, x, lowered)
    for results, exact in ((a[0], b[0]), (a[1], b[1]), *((a[2][n], b[2][n]) for n in a[2])):
        assert (results - exact).abs().max() <= 2**-5 * exact.abs().max()


@pytest.mark.parametrize("wide", [False, True])
def test_autocast_output_codes_in_triton(wide):
    """Whole rows and tiles: y in one dtype, codes of y in autocast's dtype."""
    pytest.importorskip("triton")
    x, w, r = (torch.randn(5, 40) * 3).bfloat16(), torch.randn(40), fp8.recipe("blockwise")
    row, col = r.fwd.a, r.wgrad.b if wide else None
    arguments = (x.float(), w, 1e-6, row, col, torch.float32, torch.bfloat16), (x, w, 1e-6, row, col, torch.float32)
    for args in arguments:
        y, _, *codes = registry.get("triton").rmsnorm_quantize(*args)
        exact = registry.get("reference").rmsnorm_quantize(*args)[0]
        assert y.dtype == torch.float32 and (y - exact).abs().max() <= 1e-6 * exact.abs().max()
        low = y.to(args[6] if len(args) > 6 else y.dtype)
        for q, spec in zip(codes, (row, col), strict=True):
            if spec is not None:
                assert torch.equal(q.data.view(torch.uint8), quantize(low, spec).data.view(torch.uint8))
                assert torch.equal(q.scale, quantize(low, spec).scale)
