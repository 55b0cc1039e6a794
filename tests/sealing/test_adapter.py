"""Sealed adapters compute the same as plain ones, and trained ones can be unsealed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import adapters, models
from octavo.base.seal_note import read_note
from octavo.config import LoraSection
from octavo.sealing import Key, SealError, seal_adapter, seal_model, structure, unseal_adapter

pytest.importorskip("peft")


def attached(folder: Path) -> torch.nn.Module:
    """The model with adapters of layers and of experts, B too of random values."""
    model = models.load(folder)
    adapters.attach(model, models.describe(model), LoraSection(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def test_adapters_of_layers_and_experts_are_sealed(checkpoint, key, tmp_path):
    source, twin = checkpoint("qwen3_moe"), tmp_path / "twin"
    seal_model(source, twin, key)
    shutil.copytree(twin, resealed := tmp_path / "twin-copy")
    model = attached(source)
    adapters.save(model, tmp_path / "plain", source)
    seal_adapter(tmp_path / "plain", tmp_path / "sealed", twin, key)
    sealed = models.load(twin).eval()
    adapters.load(sealed, tmp_path / "sealed")
    state = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    assert any(".experts.base_layer.lora_A" in name for name in state)

    orders = structure.read_structure(models.empty(source)).draw(key)
    vocab = torch.from_numpy(orders["vocab"])
    ids = torch.randint(0, len(vocab), (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        bare = models.load(source).eval()(input_ids=ids).logits
        here, there = model(input_ids=ids).logits, sealed(input_ids=torch.argsort(vocab)[ids]).logits
    assert float((here - bare).abs().max()) > 0.1  # the adapters say something
    torch.testing.assert_close(there, here[..., vocab], rtol=0, atol=2e-5)

    unseal_adapter(tmp_path / "sealed", tmp_path / "back", source, key)
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    adapters.load(models.load(source), tmp_path / "back")

    with pytest.raises(SealError, match="is sealed"):
        unseal_adapter(tmp_path / "sealed", tmp_path / "again", twin, key)
    with pytest.raises(SealError, match="not sealed"):
        seal_adapter(tmp_path / "plain", tmp_path / "again", source, key)
    shutil.rmtree(twin)  # it trained elsewhere: what tells the key stands with the adapter
    with pytest.raises(SealError, match="was sealed with the key"):
        unseal_adapter(tmp_path / "sealed", tmp_path / "again", source, Key(bytes(32)))
    with pytest.raises(SealError, match="not sealed"):
        unseal_adapter(tmp_path / "back", tmp_path / "again", source, key)
    with pytest.raises(SealError, match="sealed already"):
        seal_adapter(tmp_path / "sealed", tmp_path / "again", resealed, key)
    assert not (tmp_path / "again").exists()


def test_adapter_of_sealed_model_records_its_key(checkpoint, key, tmp_path):
    twin = tmp_path / "twin"
    seal_model(checkpoint("qwen3_moe"), twin, key)
    for _ in range(2):  # the second takes the place of the first
        adapters.save(attached(twin), tmp_path / "adapter", twin)
    assert read_note(tmp_path / "adapter").key == key.fingerprint
