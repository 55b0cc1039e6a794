"""The adapted linear layer: its results, the tensors saved for the backward, and how often x is quantized."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import Tensor, nn

from octavo import adapters, fp8
from octavo.adapters import AdapterError
from octavo.adapters.lowrank import low_rank, low_rank_traced
from octavo.fp8.memory.accounting import SavedBytes, count_saved
from tests.adapters.conftest import lora

QKV = ("q_proj", "k_proj", "v_proj")
M, K = 64, 256


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(K, K), nn.Linear(K, 128)
        self.v_proj = nn.Linear(K, 128)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x * 1.5)


def build(
    kind: str | None = "block", recipe: str | None = "blockwise", dtype=torch.bfloat16, store="fp32", **more
) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    if kind is not None:
        for layer in model.attn.children():
            layer.weight = fp8.freeze_weight(layer.weight, kind)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe))
    adapters.attach(model, None, lora(targets=QKV, dtype=store, **more))
    for name, parameter in adapters.adapter_parameters(model):
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def x_of(dtype=torch.bfloat16) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def counted(model: Model, x: Tensor, autocast: bool = False) -> SavedBytes:
    with count_saved(model, [("attn", model.attn)]) as k, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    del y
    return k.report()


BASES = [("block", "blockwise"), ("row", "rowwise"), ("tensor", "tensorwise"), ("block", None), (None, None)]


@pytest.mark.parametrize(("kind", "recipe"), BASES)
def test_x_is_saved_once_for_q_k_v_and_not_for_the_base(kind, recipe) -> None:
    model, x = build(kind, recipe), x_of()
    h = 3 * M * 4 * 2  # A x of rank 4, in BF16
    assert counted(model, x).total == M * K * 2 + h


@pytest.mark.parametrize(("kind", "recipe"), BASES[:4])
def test_autocast_copy_is_saved_once(kind, recipe) -> None:
    model, x = build(kind, recipe, torch.float32), x_of(torch.float32)
    rows = [r for r in counted(model, x, autocast=True).rows if r.kind == "activation" and r.shape[0] == M]
    assert sum(r.bytes for r in rows) == M * K * 2 + 3 * M * 4 * 2


def test_dropout_saves_one_byte_per_element() -> None:
    model, x = build(dropout=0.5), x_of()
    assert counted(model, x).total == M * K * 2 + 3 * M * 4 * 2 + 3 * M * K


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_is_quantized_once_for_q_k_and_v(dropout: float, autocast: bool, casts) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model, x = build(dtype=dtype, dropout=dropout), x_of(dtype)
    casts.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(x)
    assert casts == [(M, K)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", ["fp32", "bf16"])
def test_values_and_gradients_match_the_formula(dtype, store: str) -> None:
    """y + s B (A x) in float64; BF16 may err as its own rounding does."""
    model, x = build(None, None, dtype, store=store), x_of(dtype)
    layer = model.attn.q_proj
    wide = [t.detach().double().requires_grad_() for t in (x, *_factors(layer))]
    y = layer(x)
    base = torch.nn.functional.linear(wide[0], layer.weight.double(), layer.bias.double())
    exact = base + layer.scaling["default"] * wide[0] @ wide[1].T @ wide[2].T
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    grads = torch.autograd.grad(y, [x, *_factors(layer)], dy)
    expected = torch.autograd.grad(exact, wide, dy.double())
    assert y.dtype is dtype
    for ours, theirs in zip([y, *grads], [exact, *expected], strict=True):
        error = float((ours.double() - theirs).detach().norm() / theirs.detach().norm())
        assert error <= 4 * torch.finfo(torch.bfloat16 if store == "bf16" else dtype).eps


def _factors(layer) -> tuple[Tensor, Tensor]:
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def test_dropout_applies_only_to_a_and_masks_the_gradient() -> None:
    a, b = torch.randn(2, 6, dtype=torch.double), torch.randn(3, 2, dtype=torch.double)
    x, y = torch.randn(4, 6, dtype=torch.double), torch.randn(4, 3, dtype=torch.double)
    for tensor in (a, b, x, y):
        tensor.requires_grad_()

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(1)
        return low_rank(*tensors, 0.5, 0.25, object())

    assert torch.autograd.gradcheck(run, (y, x, a, b))
    torch.manual_seed(1)
    mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.75)
    dropped = x * mask / 0.75
    assert torch.allclose(run(y, x, a, b), y + 0.5 * dropped @ a.T @ b.T)


def test_empty_and_single_row_inputs() -> None:
    model = build()
    for shape in [(0, K), (2, 0, K), (K,), (1, 3, K)]:
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        y = model.attn.q_proj(x)
        assert y.shape == (*shape[:-1], K)
        y.float().sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape


def test_eval_has_no_dropout_and_disabled_adapter_equals_base() -> None:
    model, x = build(dropout=0.5), x_of()
    stock = copy.deepcopy(model)
    layer = stock.attn.q_proj.base_layer
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    with adapters.disable_adapters(model):
        assert torch.equal(model.attn.q_proj(x), layer(x))
        assert all(p.requires_grad for _, p in adapters.adapter_parameters(model))
    assert not torch.equal(model.attn.q_proj(x), layer(x))
    with pytest.raises(AdapterError, match="no adapters"), adapters.disable_adapters(Model()):
        pass


def test_recomputable_input_is_not_saved_for_the_adapter() -> None:
    """Activations in FP8: h, the input of down_proj, is made again from the codes of gate and up."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    totals, grads = [], []
    for activations in ("bf16", "fp8"):
        torch.manual_seed(0)
        mlp = Qwen3MLP(Qwen3Config(hidden_size=128, intermediate_size=256)).to(torch.bfloat16)
        holder = nn.ModuleDict({"mlp": mlp})
        for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            layer.weight = fp8.freeze_weight(layer.weight, "block")
        fp8.apply(holder, fp8.plan(holder, fp8.Policy(recipe="blockwise", activations=activations)))
        adapters.attach(holder, None, lora(targets=["down_proj"]))
        nn.init.normal_(mlp.down_proj.lora_B["default"].weight, std=0.1)
        x = torch.randn(M, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).requires_grad_()
        with count_saved(holder, [("mlp", mlp)]) as k:
            y = mlp(x)
        totals.append(k.report().by_module)
        y.float().square().sum().backward()
        grads.append(mlp.down_proj.lora_A["default"].weight.grad)
    assert sum(totals[1].values()) < sum(totals[0].values())
    h = M * 256 * 2
    assert not any(n >= h for name, n in totals[1].items() if name.startswith("mlp.down_proj"))
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 0.1


@pytest.mark.parametrize("how", ["full", "selective"])
def test_activation_checkpointing_gives_the_same_gradients(how: str, folder) -> None:
    from octavo import models
    from tests.adapters.conftest import inputs, quantized

    found = []
    for recompute in ("none", how):
        model = models.load(folder("qwen3"), dtype=torch.float32).train()
        family = models.describe(model)
        quantized(model, "block", "blockwise")
        adapters.attach(model, family, lora(targets=("foundation",), dropout=0.25))
        fp8.activation_checkpointing(family.layers(model), recompute)
        batch = inputs(model, family)
        torch.manual_seed(7)
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for _, p in adapters.adapter_parameters(model))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("dora", [False, True])
def test_compiled_block_matches_eager(dora: bool) -> None:
    model, x = build(dora=dora), x_of()
    y = model(x)
    y.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in adapters.adapter_parameters(model)}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    z = compiled(x.detach().clone().requires_grad_())
    z.float().square().mean().backward()
    assert torch.allclose(z.float(), y.float(), rtol=2e-2, atol=2e-2)
    for name, parameter in adapters.adapter_parameters(model):
        assert float((parameter.grad - grads[name]).norm()) <= 2e-2 * float(grads[name].norm()) + 1e-12


def test_traced_formula_matches_autograd_function() -> None:
    y, x, a, b = torch.randn(5, 8), torch.randn(5, 16), torch.randn(2, 16), torch.randn(8, 2)
    assert torch.equal(low_rank(y, x, a, b, 0.5, 0.0, None), low_rank_traced(y, x, a, b, 0.5, 0.0))


def test_merge_into_codes_is_rejected() -> None:
    model = build()
    with pytest.raises(AdapterError, match="octavo merge"):
        model.attn.q_proj.merge()
    stock = build(None, None, torch.float32)
    x = x_of(torch.float32)
    y = stock(x)
    for layer in adapters.adapted_layers(stock).values():
        layer.merge()
    assert torch.allclose(stock(x), y, atol=1e-5)


def test_x_is_quantized_once_over_trained_codes(casts) -> None:
    """A BF16 base computed in FP8: its codes are cast, and read through the adapters."""
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    fp8.apply(model, fp8.plan(model, "blockwise"))
    adapters.attach(model, None, lora(targets=QKV))
    y = model(x_of())
    assert casts.count((M, K)) == 1
    y.float().square().sum().backward()
    assert all(p.grad is not None for _, p in adapters.adapter_parameters(model))


def test_wrapped_layers_are_peft_layers() -> None:
    model = build()
    assert all(isinstance(layer, peft.tuners.lora.layer.LoraLayer) for layer in adapters.adapted_layers(model).values())
