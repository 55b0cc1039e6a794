"""Adapters of experts: PEFT's files and configuration, computed on rows, over high precision and over FP8 codes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError
from octavo.fp8.metrics import cosine
from octavo.fp8.moe import Experts
from tests.fp8.moe.expert_modules import FAMILIES, E, H, I, made, routed

R = 4
BOTH = ("gate_up_proj", "down_proj")


class Block(nn.Module):
    """What PEFT wraps: a module that holds experts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.experts = inner

    def forward(self, x, index, share):
        return self.experts(x, index, share)


def config(names=BOTH, **changes):
    return LoraConfig(
        r=R, lora_alpha=8, target_modules=[], target_parameters=[f"experts.{n}" for n in names], **changes
    )


def filled(block, seed=3):
    """B is not zero, as after some training."""
    g = torch.Generator().manual_seed(seed)
    for name, p in block.named_parameters():
        if "lora_" in name:
            p.data.copy_(torch.randn(p.shape, generator=g) * 0.2)
    return block


def adapted(block, names=BOTH, **changes):
    inject_adapter_in_model(config(names, **changes), block)
    assert experts.replace_forwards(block) == 1
    return filled(block)


def stock(block, names=BOTH, **changes):
    return filled(get_peft_model(block, config(names, **changes)).base_model.model)


def lora(block):
    return {name: p for name, p in block.named_parameters() if "lora_" in name}


def quantized(block, recipe="blockwise", kind="block", **kwargs):
    """FP8 experts over frozen codes."""
    inner = block.experts
    for name in BOTH:
        turned = bool(getattr(inner, "is_transposed", False))
        inner._parameters[name] = fp8.freeze_weight(inner._parameters[name].data, kind, transposed=turned)
    fp8.apply(block, fp8.plan(block, fp8.Policy(recipe=recipe, **kwargs)))
    return block


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", [BOTH, BOTH[:1], BOTH[1:]], ids="+".join)
def test_high_precision_experts_match_peft(family, names):
    ours, theirs = adapted(Block(FAMILIES[family]()), names), stock(Block(FAMILIES[family]()), names)
    assert [(n, p.shape) for n, p in lora(ours).items()] == [(n, p.shape) for n, p in lora(theirs).items()]
    a, b = routed(), routed()
    y, z = ours(*a), theirs(*b)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    z.backward(dy)
    torch.testing.assert_close(a[0].grad, b[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a[2].grad, b[2].grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(lora(ours).items(), lora(theirs).values(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_match_peft_delta(family):
    block = stock(Block(FAMILIES[family]()), use_rslora=True)
    for name, wrapper in experts.wrappers(block.experts).items():
        down, up = experts.factors(wrapper, "default")
        delta = wrapper.scaling["default"] * up @ down
        if getattr(wrapper.get_base_layer(), "is_transposed", False):
            delta = delta.mT
        torch.testing.assert_close(delta, wrapper.get_delta_weight("default"), msg=name)
        assert wrapper.scaling["default"] == 8 / R**0.5


def test_layout_of_older_peft_is_read():
    """PEFT before 0.19: A [r E, N], B [K, r E], delta = einsum("o r e, e r i -> e i o")."""
    n, k = 5, 7
    a, b = torch.randn(R * E, n), torch.randn(k, R * E)
    made = SimpleNamespace(
        lora_A={"default": SimpleNamespace(weight=a)},
        lora_B={"default": SimpleNamespace(weight=b)},
        num_experts=E,
        get_base_layer=lambda: SimpleNamespace(is_transposed=False),
    )
    down, up = experts.factors(made, "default")
    want = torch.einsum("o r e, e r i -> e i o", b.reshape(k, R, E), a.reshape(E, R, n))
    assert up.shape == (E, n, R) and down.shape == (E, R, k)
    torch.testing.assert_close(up @ down, want)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("recipe", "kind"), [("blockwise", "block"), ("rowwise", "row"), ("delayed", "tensor")])
def test_frozen_codes_equal_dequantized_base_with_adapter(family, recipe, kind):
    """Grouped and one by one. The base alone in FP8 differs from its dequantized self by as much."""
    ours = adapted(quantized(Block(FAMILIES[family]()), recipe, kind))
    assert isinstance(ours.experts.get_base_layer(), Experts)
    codes = fp8.fingerprint(ours)
    high = Block(FAMILIES[family]())
    for name in BOTH:
        high.experts._parameters[name].data = getattr(ours.experts.get_base_layer(), name).dequantize().clone()
    plain, high = copy.deepcopy(high), adapted(high)
    a, b = routed(40), routed(40)
    y, z = ours(*a), high(*b)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    z.backward(dy)
    assert cosine(y, z) > 0.995 and cosine(y, plain(*b)) < 0.98
    for (name, p), q in zip(lora(ours).items(), lora(high).values(), strict=True):
        assert cosine(p.grad, q.grad) > 0.98, name
    assert fp8.fingerprint(ours) == codes
    assert all(p.grad is None for n, p in ours.named_parameters() if "lora_" not in n)


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", None])
def test_experts_without_tokens_get_zero_gradients(recipe):
    block = Block(FAMILIES["qwen3_moe"]())
    block = adapted(block if recipe is None else quantized(block, recipe, "tensor" if recipe == "delayed" else "block"))
    block(*routed(used=3)).sum().backward()
    for wrapper in experts.wrappers(block.experts).values():
        a, b = wrapper.lora_A["default"].weight.grad, wrapper.lora_B["default"].weight.grad
        a, b = a.view(E, R, -1), b.view(b.shape[0], R, E)
        assert not a[3:].any() and not b[..., 3:].any() and a[:3].any() and b[..., :3].any()


def test_no_tokens_give_zero_gradients():
    block = adapted(quantized(Block(FAMILIES["qwen3_moe"]())))
    y = block(torch.zeros(0, H), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, H) and all(p.grad is not None and not p.grad.any() for p in lora(block).values())


def test_base_runs_the_same_gemms():
    """fwd and dgrad of each expert, once; no wgrad; and the adapters are counted nowhere."""
    plain, block = quantized(Block(FAMILIES["qwen3_moe"]())), adapted(quantized(Block(FAMILIES["qwen3_moe"]())))
    seen = []
    for one in (plain, block):
        with fp8.count_gemms() as counts:
            one(*routed()).sum().backward()
        seen.append(dict(counts))
    assert seen[0] == seen[1] and {gemm for _, gemm, _ in seen[0]} == {"fwd", "dgrad"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_experts_give_the_same_gradients(reentrant):
    ways = []
    for recomputed in (False, True):
        block = adapted(quantized(Block(FAMILIES["qwen3_moe"]())))
        given = routed()
        if recomputed:
            y = torch.utils.checkpoint.checkpoint(block, *given, use_reentrant=reentrant)
        else:
            y = block(*given)
        y.square().sum().backward()
        ways.append([y, given[0].grad, given[2].grad, *(p.grad for p in lora(block).values())])
    assert all(torch.equal(a, b) for a, b in zip(*ways, strict=True))


def saved_bytes(run):
    """Bytes that a forward keeps, each storage once."""
    found = {}

    def pack(t):
        if t.device.type != "meta" and not isinstance(t, nn.Parameter) and type(t) is torch.Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return out, sum(found.values())


def test_gate_up_saves_tokens_instead_of_routed_rows():
    block = adapted(quantized(Block(FAMILIES["qwen3_moe"]())), BOTH[:1])
    given = routed(tokens=512, top_k=4)
    hidden = given[0] * 1.0
    _, plain = saved_bytes(lambda: quantized(Block(FAMILIES["qwen3_moe"]()))(hidden, *given[1:]))
    _, more = saved_bytes(lambda: block(hidden, *given[1:]))
    rows = 128 * (E + (4 * 512 - E) // 128)
    low = rows * R * 4  # s x A^T
    assert more - plain < low + 512 * H * 4 + rows * 8 + 2 * E * R * (H + 2 * I) * 4 < rows * H * 4


def test_fp8_activations_are_used_by_the_adapter():
    """The input of down_proj is made again from the codes of gate and up, bit for bit what the forward multiplied."""
    made = []
    for saves in (True, False):
        block = adapted(quantized(Block(FAMILIES["qwen3_moe"]()), **({"activations": "fp8"} if saves else {})))
        given = routed(tokens=256)
        out, bytes_ = saved_bytes(lambda b=block, g=given: b(*g))
        out.square().sum().backward()
        made.append((bytes_, out, [p.grad for p in lora(block).values()]))
    assert made[0][0] < made[1][0]
    assert cosine(made[0][1], made[1][1]) > 0.995
    assert all(cosine(a, b) > 0.98 for a, b in zip(made[0][2], made[1][2], strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_in_mixed_precision(frozen):
    """Under autocast rows and products are BF16, factors and their gradients stay as they are kept (fp32)."""
    block = Block(FAMILIES["qwen3_moe"]())
    block = adapted(quantized(block) if frozen else block)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(*routed())
    y.sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in lora(block).values())
    high = adapted(Block(FAMILIES["qwen3_moe"]()))(*routed())
    assert cosine(y, high) > 0.99


def test_disabled_and_merged_adapters_add_nothing():
    block, given = adapted(Block(FAMILIES["qwen3_moe"]())), routed()
    plain = Block(FAMILIES["qwen3_moe"]())(*given)
    with_adapter = block(*given)
    for wrapper in experts.wrappers(block.experts).values():
        wrapper.enable_adapters(False)
    assert torch.equal(block(*given), plain)
    for wrapper in experts.wrappers(block.experts).values():
        wrapper.enable_adapters(True)
        wrapper.merge()
    torch.testing.assert_close(block(*given), with_adapter, rtol=1e-4, atol=1e-5)


def test_copy_and_repeated_replacement_compute_the_same():
    block, given = adapted(Block(FAMILIES["qwen3_moe"]())), routed()
    again = copy.deepcopy(block)
    assert experts.replace_forwards(again) == 1 and torch.equal(again(*given), block(*given))


def test_stock_experts_with_frozen_codes_use_their_values():
    """Loaded with codes and no plan: nothing is FP8 but what the weights are made of."""
    block = Block(FAMILIES["qwen3_moe"]())
    high = Block(FAMILIES["qwen3_moe"]())
    for name in BOTH:
        weight = fp8.freeze_weight(block.experts._parameters[name].data, "block")
        block.experts._parameters[name] = weight
        high.experts._parameters[name].data = weight.dequantize().clone()
    a, b = routed(), routed()
    y, z = adapted(block)(*a), adapted(high)(*b)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    z.sum().backward()
    torch.testing.assert_close(a[0].grad, b[0].grad, rtol=1e-4, atol=1e-4)


def test_expert_parameters_have_stock_names():
    block = Block(FAMILIES["qwen3_moe"]())
    before = experts.expert_parameters(block)
    assert list(before) == ["experts.gate_up_proj", "experts.down_proj"]
    assert list(experts.expert_parameters(adapted(block))) == list(before)


def test_names_do_not_depend_on_loading_order():
    for family, make in FAMILIES.items():
        block = Block(make())
        want = {n: p.shape for n, p in lora(stock(Block(make()))).items()}
        held = block.experts._parameters
        for name in reversed(list(held)):
            held[name] = held.pop(name)
        experts.sort_parameters(block)
        assert {n: p.shape for n, p in lora(adapted(block)).items()} == want, family


@pytest.mark.parametrize("asked", [{"dropout": 0.1}, {"dora": True}])
def test_settings_that_peft_rejects_are_rejected(asked):
    from octavo.config import LoraSection

    with pytest.raises(AdapterError, match=f"lora.{next(iter(asked))}=.*exclude experts"):
        experts.check_settings(["model.layers.0.mlp.experts.down_proj"], LoraSection(**asked))
    experts.check_settings([], LoraSection(**asked))
    experts.check_settings(["model.layers.0.mlp.experts.down_proj"], LoraSection())


def test_parameter_outside_experts_is_rejected():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ParameterDict({"gate_up_proj": torch.zeros(2, 4, 4)})

    block = Odd()
    inject_adapter_in_model(config(BOTH[:1]), block)
    with pytest.raises(AdapterError, match="gate_up_proj cannot be adapted as a parameter"):
        experts.replace_forwards(block)


def test_experts_of_unknown_structure_are_rejected():
    from transformers import Llama4TextConfig

    block = Block(made(Llama4TextExperts, Llama4TextConfig(hidden_size=H, intermediate_size=I, num_local_experts=E)))
    inject_adapter_in_model(config(), block)
    with pytest.raises(AdapterError, match="cannot have adapters: experts called with"):
        experts.replace_forwards(block)
