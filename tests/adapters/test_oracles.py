"""Adapters are interchangeable with stock PEFT: trained on FP8 and loaded by PEFT, or the other way round."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from octavo import adapters, fp8, models
from octavo.fp8.weights import frozen_weights
from tests.adapters.conftest import FAMILIES, components, inputs, logits, lora, quantized, train


def stock_peft(path: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(models.load(path, dtype=dtype), str(adapter))


def near(ours: torch.Tensor, theirs: torch.Tensor, ulps: float = 64) -> None:
    """Equal but for sums in another order: so many roundings of the largest logit's dtype."""
    limit = ulps * torch.finfo(theirs.dtype).eps * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= limit


@pytest.mark.parametrize("name", FAMILIES)
def test_adapter_trained_on_fp8_loads_in_stock_peft(name: str, folder, tmp_path: Path) -> None:
    path = folder(name)
    model = models.load(path, dtype=torch.float32)
    family = models.describe(model)
    batch = inputs(model, family)
    before = fp8.fingerprint(quantized(model, "block", "blockwise"))
    adapters.attach(model, family, lora(targets=components(family)))
    losses = train(model, batch, lr=0.02)
    assert losses[-1] < losses[0]
    # The fingerprint has the names of adapted modules now.
    after = {key.replace("base_layer.", ""): value for key, value in fp8.fingerprint(model).items()}
    assert after == before and before
    adapters.save(model, tmp_path / "adapter", path)

    theirs = stock_peft(path, tmp_path / "adapter")
    assert not [n for n, p in theirs.named_parameters() if "lora_B" in n and not p.any()]
    ours = models.load(path, dtype=torch.float32)
    adapters.load(ours, tmp_path / "adapter")
    near(logits(ours, batch), logits(theirs, batch))
    plain = logits(models.load(path, dtype=torch.float32), batch)
    assert float((logits(ours, batch) - plain).abs().max()) > 1e-3  # it does something


@pytest.mark.parametrize("name", ["qwen3_vl", "llama"])
def test_frozen_fp8_base_equals_dequantized_base_plus_adapter(name: str, folder, tmp_path: Path) -> None:
    path = folder(name)
    model = quantized(models.load(path, dtype=torch.float32), "row")
    family = models.describe(model)
    batch = inputs(model, family)
    adapters.attach(model, family, lora(targets=components(family)))
    train(model, batch)
    adapters.save(model, tmp_path / "adapter", path)

    base = fp8.dequantize_weights(quantized(models.load(path, dtype=torch.float32), "row"))
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    near(logits(model, batch), logits(theirs, batch))
    again = quantized(models.load(path, dtype=torch.float32), "row")
    adapters.load(again, tmp_path / "adapter")
    assert torch.equal(logits(again, batch), logits(model, batch))
    stock = models.load(path, dtype=torch.float32)
    found = adapters.base_errors(model, stock)
    assert len(found.rows) == len(list(frozen_weights(model))) and 0.01 < found.relative < 0.04
    assert 28 < found.sqnr < 40 and found.worst.name in str(found)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}])
def test_peft_adapter_loads(settings: dict, folder, tmp_path: Path) -> None:
    path = folder("qwen3_vl")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "linear_fc1"], init_lora_weights=False, **settings
    )
    theirs = peft.get_peft_model(models.load(path, dtype=torch.float32), config)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ours = models.load(path, dtype=torch.float32)
    batch = inputs(ours, models.describe(ours))
    names = adapters.load(ours, tmp_path / "adapter")
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "v_proj", "linear_fc1"}
    near(logits(ours, batch), logits(theirs, batch))


def test_bf16_differences_are_within_rounding(folder, tmp_path: Path) -> None:
    """The reference is stock PEFT in fp32; ours in BF16 may err twice as much as stock PEFT in BF16."""
    path = folder("qwen3")
    model = models.load(path, dtype=torch.float32)
    family = models.describe(model)
    batch = inputs(model, family)
    adapters.attach(model, family, lora(targets=("foundation",)))
    train(model, batch)
    adapters.save(model, tmp_path / "adapter", path)
    exact = logits(stock_peft(path, tmp_path / "adapter"), batch)
    theirs = logits(stock_peft(path, tmp_path / "adapter", torch.bfloat16), batch).float()
    ours = models.load(path, dtype=torch.bfloat16)
    adapters.load(ours, tmp_path / "adapter")
    mine = logits(ours, batch).float()
    assert float((mine - exact).norm()) <= 2 * float((theirs - exact).norm())


@pytest.mark.parametrize("over", ["fp8", "stock"])
def test_dora_matches_dequantized_model(over: str, folder, tmp_path: Path) -> None:
    path = folder("qwen2_5_vl")  # its q, k, v and its tower have biases
    model = models.load(path, dtype=torch.float32)
    family = models.describe(model)
    batch = inputs(model, family)
    if over == "fp8":
        quantized(model, "block")
    plain = logits(model, batch)
    adapters.attach(model, family, lora(targets=components(family), dora=True))
    near(logits(model, batch), plain)  # magnitudes begin as the norms
    train(model.train(), batch)
    adapters.save(model, tmp_path / "adapter", path)
    base = models.load(path, dtype=torch.float32)
    if over == "fp8":
        base = fp8.dequantize_weights(quantized(base, "block"))
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    near(logits(model, batch), logits(theirs, batch))
    state = adapters.adapter_state(model)
    assert any(name.endswith("lora_magnitude_vector") for name in state)


def test_dora_gradients_match_stock_peft(folder) -> None:
    path = folder("llama")
    base = quantized(models.load(path, dtype=torch.float32), "tensor")
    family = models.describe(base)
    batch = inputs(base, family)
    adapters.attach(base, family, lora(targets=("foundation",), dora=True))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], use_dora=True)
    config.target_modules = set(adapters.adapted_layers(base))
    theirs = peft.get_peft_model(
        fp8.dequantize_weights(quantized(models.load(path, dtype=torch.float32), "tensor")), config
    )
    torch.manual_seed(0)
    state = {n: torch.randn_like(v) * 0.1 + v for n, v in adapters.adapter_state(base).items()}
    adapters.load_adapter_state(base, state)
    peft.set_peft_model_state_dict(theirs, state)
    for model in (base, theirs):
        model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.requires_grad}
    assert grads
    for name, parameter in adapters.adapter_parameters(base):
        near(parameter.grad, grads[f"base_model.model.{name}"], 4096)


def test_bf16_run_differs_only_in_its_base(folder) -> None:
    """The same layers, the same first A and B, beside FP8 and beside stock layers."""
    path = folder("qwen3_vl")
    layers = []
    for freeze in (True, False):
        model = models.load(path, dtype=torch.bfloat16)
        family = models.describe(model)
        if freeze:
            quantized(model, "block", "blockwise")
        adapters.attach(model, family, lora(targets=components(family)), seed=5)
        layers.append(adapters.adapted_layers(model))
    assert layers[0].keys() == layers[1].keys()
    for one, other in zip(layers[0].values(), layers[1].values(), strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.lora_A["default"].weight, other.lora_A["default"].weight)
        assert one.lora_A["default"].weight.dtype is torch.float32


def test_state_names_match_peft(folder) -> None:
    model = models.load(folder("qwen3_vl"), dtype=torch.float32)
    family = models.describe(model)
    adapters.attach(model, family, lora(targets=("foundation",), dora=True))
    theirs = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    ours = adapters.adapter_state(model)
    assert ours.keys() == {f"base_model.model.{name}" for name in theirs}
