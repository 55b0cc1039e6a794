"""Frozen FP8 weights move, copy and save as their codes, and refuse what would drop them."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_bytes, frozen_from_codes, frozen_weights, is_frozen

KINDS = tuple(FROZEN)


def layer(kind: str, dtype: torch.dtype = torch.bfloat16, outputs: int = 300, inputs: int = 200) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(inputs, outputs, dtype=dtype)
    made.weight = fp8.freeze_weight(made.weight, kind)
    return made


def checkpoint(kind: str, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    """As layer, with scales of a checkpoint: no powers of two."""
    made = layer(kind, dtype)
    q = codes_of_frozen(made.weight)
    spec = fp8.CastSpec("e4m3", q.spec.block, "fp32")
    made.weight = frozen_from_codes(q.data, q.scale * torch.rand_like(q.scale).add(0.5), spec, dtype)
    return made


def wipe(module: nn.Linear) -> nn.Linear:
    codes_of_frozen(module.weight).data.view(torch.uint8).zero_()
    return module


def test_invalid_codes_are_rejected() -> None:
    q = codes_of_frozen(layer("block").weight)
    with pytest.raises(ValueError, match=r"have scales of shape \[3, 2\]"):
        frozen_from_codes(q.data, q.scale.T.contiguous(), q.spec)
    with pytest.raises(ValueError, match=r"found \[3, 2\] in torch.bfloat16"):
        frozen_from_codes(q.data, q.scale.bfloat16(), q.spec)
    with pytest.raises(ValueError, match="takes codes of torch.float8_e4m3fn"):
        frozen_from_codes(q.data.view(torch.uint8), q.scale, q.spec)
    with pytest.raises(ValueError, match="Only experts are stored transposed"):
        frozen_from_codes(q.data, q.scale, q.spec, transposed=True)
    with pytest.raises(ValueError, match="Unknown kind of frozen weights 'channel'"):
        fp8.freeze_weight(torch.zeros(4, 4), "channel")
    with pytest.raises(ValueError, match="is not a frozen FP8 weight"):
        codes_of_frozen(torch.zeros(4, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_stock_layer_uses_dequantized_values(kind: str) -> None:
    made = layer(kind)
    values = made.weight.dequantize()
    assert torch.equal(values, fp8.dequantize(codes_of_frozen(made.weight), torch.bfloat16))
    x = torch.randn(5, 200, dtype=torch.bfloat16, requires_grad=True)
    y = made(x)
    y.sum().backward()
    assert torch.equal(y, nn.functional.linear(x, values, made.bias))
    assert torch.equal(x.grad, torch.ones_like(y) @ values) and made.weight.grad is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(torch.randn(3, 200)).dtype is torch.bfloat16
    assert made.weight.shape == (300, 200) and made.weight.dtype is torch.bfloat16 and not made.weight.requires_grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [layer, checkpoint])
def test_copies_have_same_codes(kind: str, make) -> None:
    made = make(kind)
    before = fp8.fingerprint(made)
    twins = [copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    for twin in twins:
        assert isinstance(twin.weight, nn.Parameter) and is_frozen(twin.weight)
        assert (
            fp8.fingerprint(twin) == before and codes_of_frozen(twin.weight).spec == codes_of_frozen(made.weight).spec
        )
        assert torch.equal(twin.weight.dequantize(), made.weight.dequantize())
        wipe(twin)  # memory of its own
    assert fp8.fingerprint(made) == before != fp8.fingerprint(twins[0])
    made.to("cpu").to(torch.bfloat16).bfloat16().to("cpu", torch.bfloat16).cpu()  # nothing to do
    assert fp8.fingerprint(made) == before
    away = copy.deepcopy(made).to("meta")
    assert is_frozen(away.weight) and codes_of_frozen(away.weight).data.is_meta


def test_tied_weights_stay_tied() -> None:
    first, second = layer("block"), layer("block")
    second.weight = first.weight
    both = copy.deepcopy(nn.ModuleList([first, second]))
    assert both[0].weight is both[1].weight and len(list(frozen_weights(both))) == 1
    fp8.dequantize_weights(both)
    assert both[0].weight is both[1].weight and not is_frozen(both[0].weight)


CONVERSIONS = {
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float32),
    "to a device, too": lambda m: m.to("cpu", torch.float16),
    "to fp8": lambda m: m.to(torch.float8_e4m3fn),
    "type": lambda m: m.type(torch.float32),
    "like": lambda m: m._apply(lambda t: t.to(torch.zeros(1))),
}


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("applied", [False, True])
def test_dtype_conversion_is_rejected(how: str, applied: bool) -> None:
    """The model goes on as it was: nothing before the frozen layer, here."""
    model = nn.Sequential(layer("block"), nn.ReLU(), nn.Linear(300, 4, dtype=torch.bfloat16))
    if applied:
        fp8.apply(model, fp8.plan(model, fp8.Policy(rules=(fp8.Rule("2", recipe="off"),))))
    x = torch.randn(3, 200, dtype=torch.bfloat16)
    before, y = fp8.fingerprint(model), model(x)
    with pytest.raises(
        RuntimeError, match=r"shape \[300, 200\].*drop its codes and scales. Call fp8.dequantize_weights\(model\)"
    ):
        CONVERSIONS[how](model)
    assert fp8.fingerprint(model) == before and torch.equal(model(x), y)
    fp8.dequantize_weights(model).float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_transformers_model_rejects_conversion() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 20}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **small)).to(torch.bfloat16)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight = fp8.freeze_weight(module.weight, "row")
    before = fp8.fingerprint(model)
    assert len(before) == 7
    model.to(torch.bfloat16).to("cpu")  # what TRL calls
    with pytest.raises(RuntimeError, match="Call fp8.dequantize_weights"):
        model.to(torch.float32)
    with pytest.raises(RuntimeError, match="Call fp8.dequantize_weights"):
        model.half()
    assert fp8.fingerprint(model) == before
    with pytest.raises(RuntimeError, match=r"A gradient was requested for a frozen FP8 weight of shape \[32, 32\]"):
        model.requires_grad_(True)


def test_writes_and_gradients_are_rejected() -> None:
    made = layer("row")
    before = fp8.fingerprint(made)
    for write in (
        lambda: made.weight.data.zero_(),
        lambda: made.weight.add_(1),
        lambda: made.weight.copy_(torch.zeros(300, 200)),
        lambda: made.weight[3:5].zero_(),
        lambda: setattr(made.weight, "data", torch.zeros(300, 200)),
        lambda: setattr(made.weight, "requires_grad", True),
        lambda: made.requires_grad_(True),
    ):
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"a frozen FP8 weight of shape .*fp8.dequantize_weights\(model\)"),
        ):
            write()
    made.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no values in memory"):
        made.weight.data_ptr()
    with pytest.raises(RuntimeError, match=r"fp8\.fp8_state_dict\(model\) .*octavo export"):
        made.weight.untyped_storage().data_ptr()  # as save_pretrained and safetensors ask it
    assert fp8.fingerprint(made) == before


def test_reading_gives_values() -> None:
    made = layer("block").weight
    values = made.dequantize()
    assert torch.equal(made + 0, values) and torch.equal(made.t() @ values, values.t() @ values)
    assert torch.equal(made[130:140].dequantize(), values[130:140])  # begins inside a block
    assert torch.equal(made[100:][20:90].dequantize(), values[120:190])  # and so does a part of a part
    assert torch.equal(made[:, 3:7], values[:, 3:7]) and torch.equal(made[5], values[5])
    assert torch.zeros_like(made).sum() == 0 and type(torch.zeros_like(made)) is torch.Tensor
    for part, own in zip(made.split(77), values.split(77), strict=True):
        assert is_frozen(part) and torch.equal(part.dequantize(), own)


@pytest.mark.parametrize("applied", [False, True])
def test_reading_in_another_dtype_gives_values_and_changes_nothing(applied: bool) -> None:
    model = nn.Sequential(layer("block"), nn.Linear(300, 300, dtype=torch.bfloat16))
    if applied:
        fp8.apply(model, fp8.plan(model))
    weight, before = model[0].weight, fp8.fingerprint(model)
    values = weight.dequantize().float()
    reads = {
        "to": weight.to(torch.float32),
        "to like": weight.to(values),
        "to a device": weight.to("cpu", torch.float32),
        "float": weight.float(),
        "type": weight.type(torch.float32),
        "data": weight.data.float(),
        "t": weight.t().float().t(),
    }
    for name, read in reads.items():
        assert type(read) is torch.Tensor and torch.equal(read, values), name
    assert torch.equal(weight.float().norm(dim=1), values.norm(dim=1)) and weight.norm().isfinite()
    assert weight.half().dtype is torch.float16 and weight.double().dtype is torch.float64
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"fp8.dequantize_weights\(model\)"):
        weight.data = weight.data.to(torch.float32)  # what kbit preparation and mixed-precision casts do
    assert fp8.fingerprint(model) == before and is_frozen(model[0].weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("applied", [False, True])
def test_state_dicts_contain_codes(kind: str, applied: bool) -> None:
    models = []
    for _ in range(2):
        model = nn.Sequential(checkpoint(kind), nn.Linear(300, 8, dtype=torch.bfloat16))
        if applied:
            recipe = {"row": "rowwise", "block": "blockwise", "tensor": "tensorwise"}[kind]
            fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, rules=(fp8.Rule("1", recipe="off"),))))
        models.append(model)
    one, other = models
    before, plain = fp8.fingerprint(one), fp8.fp8_state_dict(one)
    suffix = "_scale_inv" if kind == "block" else "_scale"
    file = io.BytesIO()
    torch.save(plain, file)  # plain tensors: no code runs when they are read
    file.seek(0)
    plain = torch.load(file, weights_only=True)
    q = codes_of_frozen(one[0].weight)
    assert plain["0.weight"].dtype is torch.float8_e4m3fn and torch.equal(plain[f"0.weight{suffix}"], q.scale)
    for load in (
        lambda: other.load_state_dict(one.state_dict()),
        lambda: fp8.load_fp8_state_dict(other, plain),
        lambda: fp8.load_fp8_state_dict(other, one.state_dict()),
    ):
        wipe(other[0])
        assert fp8.fingerprint(other) != before
        load()
        assert fp8.fingerprint(other) == before
    values = {**one.state_dict(), "0.weight": one[0].weight.dequantize()}
    with pytest.raises(RuntimeError, match=r"0.weight.*a frozen FP8 weight of shape \[300, 200\]"):
        other.load_state_dict(values)
    with pytest.raises(
        ValueError, match=r"0.weight is a frozen FP8 weight.*contains torch.bfloat16.*fp8.dequantize_weights"
    ):
        fp8.load_fp8_state_dict(other, values)
    with pytest.raises(ValueError, match="without the scales 0.weight_scale"):
        fp8.load_fp8_state_dict(other, {k: v for k, v in plain.items() if "_scale" not in k})
    with pytest.raises(ValueError, match="0.weight: Codes of shape"):
        fp8.load_fp8_state_dict(other, {**plain, f"0.weight{suffix}": torch.ones(7, 7)})
    with pytest.raises(ValueError, match=r"0.weight has shape \[300, 200\], but .* in the state dict"):
        fewer = fp8.fp8_state_dict(nn.Sequential(layer(kind, outputs=200), nn.Linear(300, 8, dtype=torch.bfloat16)))
        fp8.load_fp8_state_dict(other, fewer)
    assert fp8.fingerprint(other) == before


def test_fingerprint_covers_scales_and_shapes() -> None:
    made = layer("row")
    before = fp8.fingerprint(made)
    codes_of_frozen(made.weight).scale[3] *= 2
    assert fp8.fingerprint(made) != before
    inside = nn.ModuleDict({"q": nn.ModuleDict({"base_layer": layer("row")})})
    assert fp8.fingerprint(inside) == {"q.weight": before["weight"]}
    q = codes_of_frozen(layer("tensor").weight)
    turned = frozen_from_codes(q.data.view(200, 300), q.scale, q.spec)
    module = nn.ParameterDict({"a": frozen_from_codes(q.data, q.scale, q.spec), "b": turned})
    assert fp8.fingerprint(module)["a"] != fp8.fingerprint(module)["b"]


@pytest.mark.parametrize("kind,most", [("row", 1.003), ("block", 1.0003), ("tensor", 1.0001)])
def test_size_is_one_byte_per_parameter(kind: str, most: float) -> None:
    """A block of Qwen3-8B and one of Qwen3-30B-A3B."""
    linear = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288))
    experts = ((128, 2 * 768, 2048), (128, 2048, 768))
    model = nn.ParameterList(fp8.freeze_weight(torch.empty(s, device="meta"), kind) for s in (*linear, *experts))
    params = sum(p.numel() for p in model)
    assert params == sum(torch.Size(s).numel() for s in (*linear, *experts))
    assert params < frozen_bytes(model) <= most * params < 1.02 * params
