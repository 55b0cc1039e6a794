"""Sealed model folders match the plain model, are unsealed bit for bit, and unsupported models are rejected."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from octavo import models
from octavo.base.model_families import tiny_families
from octavo.base.seal_note import read_note
from octavo.cli.main import main
from octavo.fp8.arithmetic import quantize
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.sealing import Key, SealError, permute, seal_model, structure, unseal_model
from octavo.sealing import rules as rules_of
from octavo.sealing.check import check_structure as tried
from tests.sealing.conftest import SECRET


def turns(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


FEW = ("qwen3_moe", "qwen2_5_vl", "mistral3", "qwen3_5")
"""Fused rows, GQA, experts, a merger, an unfolded one, a recurrence."""


@pytest.mark.parametrize("family", FEW)
def test_sealed_model_matches_plain_model(checkpoint, key, family):
    assert tried(checkpoint(family), key) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("family", [f for f in tiny_families() if f not in FEW])
def test_each_trained_family_can_be_sealed(checkpoint, key, family):
    assert tried(checkpoint(family), key) < 1e-3


@pytest.mark.parametrize(("family", "part", "asked"), [
    ("mpt", "attn_config", "qk_ln"), ("mpt", "attn_config", "qk_gn"), ("internvl", "vision_config", "use_qk_norm"),
])  # fmt: skip
def test_query_and_key_norms_are_permuted(checkpoint, key, tmp_path, family, part, asked):
    """Of whole queries they move as heads do; of single heads they stay."""
    shutil.copytree(checkpoint(family), source := tmp_path / "plain")
    config = models.read_config(source)
    section = getattr(config, part)
    section.update({asked: True}) if isinstance(section, dict) else setattr(section, asked, True)
    models.random_model(config, "cpu", torch.float32).save_pretrained(source)
    seal_model(source, tmp_path / "twin", key)  # which tries what it made
    unseal_model(tmp_path / "twin", tmp_path / "back", key)
    plain, back = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "back"))
    assert all(torch.equal(plain[name], back[name]) for name in plain)
    found = structure.read_structure(models.empty(source))
    ends = ("blocks.0.attn.q_ln.weight", "encoder.layer.0.attention.q_norm.weight")
    layout = next(layout for name, layout in found.layouts.items() if name.endswith(ends))
    values = torch.arange(config.get_text_config().hidden_size)[: 16 if asked == "qk_gn" else None]
    assert torch.equal(permute.seal_tensor(values, layout, found.draw(key)), values) == (asked == "qk_gn")


@pytest.mark.parametrize("family", ["qwen3_moe", "internvl"])
def test_round_trip_is_bit_exact(checkpoint, key, tmp_path, family):
    source, twin, back = checkpoint(family), tmp_path / "twin", tmp_path / "back"
    steps: list[tuple[int, int]] = []
    done = seal_model(source, twin, key, progress=lambda *at: steps.append(at))
    assert steps[-1] == (done.bytes, done.bytes) and 1 < len(steps) <= done.tensors
    unseal_model(twin, back, key, like=source)
    plain, sealed, found = (load_file(folder / "model.safetensors") for folder in (source, twin, back))
    assert found.keys() == plain.keys() == sealed.keys()
    assert all(torch.equal(plain[name], found[name]) and plain[name].dtype == found[name].dtype for name in plain)
    large = [name for name, tensor in plain.items() if tensor.dim() == 2 and min(tensor.shape) > 32]
    assert large and not any(torch.equal(plain[name], sealed[name]) for name in large)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((back / name).read_text()) == json.loads((source / name).read_text())
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    note = read_note(twin)
    assert note is not None and note.key == key.fingerprint and not (back / "sealed.json").exists()
    texts = b"".join(file.read_bytes() for file in twin.iterdir())
    for form in (SECRET, SECRET.hex().encode(), b"assistant", b"top left"):
        assert form not in texts
    models.load_processor(twin)

    other = Key(SECRET[::-1])
    with pytest.raises(SealError, match=f"{key.fingerprint}.*{other.fingerprint}"):
        unseal_model(twin, tmp_path / "wrong", other)
    with pytest.raises(SealError, match="sealed already"):
        seal_model(twin, tmp_path / "twice", key)
    with pytest.raises(SealError, match="not sealed"):
        unseal_model(source, tmp_path / "nothing", key)
    with pytest.raises(SealError, match="nothing is overwritten"):
        seal_model(source, twin, key)
    with pytest.raises(SealError, match="which must not change"):
        seal_model(source, source / "twin", key)
    assert not (tmp_path / "wrong").exists() and not (tmp_path / "twice").exists()


def test_unsupported_model_is_reported(checkpoint, key, tmp_path, monkeypatch):
    small = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    latent = DeepseekV3Config(**small, vocab_size=64, intermediate_size=64, n_routed_experts=4, first_k_dense_replace=9)
    with pytest.raises(SealError, match=r"self_attn\.(q_a|kv_a)_\w+"):
        structure.read_structure(models.empty(latent))

    wrong = [(p, "@mlp, -" if axes == "@mlp, own" else axes) for p, axes in rules_of.RULES]
    monkeypatch.setattr(rules_of, "RULES", wrong)
    with pytest.raises(SealError, match="differs from the plain one"):
        seal_model(checkpoint("qwen3"), tmp_path / "twin", key)
    assert not (tmp_path / "twin").exists()


@pytest.mark.parametrize(("family", "width"), [("qwen3_moe", 256), ("qwen3_vl_moe", 192)])
def test_fp8_codes_move_with_their_scales(checkpoint, key, tmp_path, family, width):
    """A sealed folder in FP8 is the export of a sealed one, byte for byte, and comes back as it was; the experts of the
    second stay in BF16, and lie the other way round than transformers saves them."""
    shutil.copytree(checkpoint(family), source := tmp_path / "values")
    config = models.read_config(source)
    config.get_text_config().hidden_size, config.get_text_config().moe_intermediate_size = 384, width  # several blocks
    if family == "qwen3_vl_moe":
        config.vision_config.out_hidden_size = 384
    models.random_model(config, "cpu", torch.float32).save_pretrained(source)
    plain, twin, values, export, back = (tmp_path / n for n in ("plain", "twin", "values-twin", "export", "back"))
    assert main(["export", str(source), str(plain), "--format", "fp8-block"]) == 0
    seal_model(plain, twin, key)
    seal_model(source, values, key)
    assert main(["export", str(values), str(export), "--format", "fp8-block"]) == 0
    unseal_model(twin, back, key, like=plain)

    def bits(folder):
        return {name: (t.dtype, t.view(torch.uint8)) for name, t in load_file(folder / "model.safetensors").items()}

    for one, other in ((twin, export), (back, plain)):
        here, there = bits(one), bits(other)
        assert here.keys() == there.keys()
        for name, (dtype, raw) in here.items():
            assert dtype == there[name][0] and torch.equal(raw, there[name][1]), name
    codes = {name: raw for name, (dtype, raw) in bits(plain).items() if dtype is torch.float8_e4m3fn}
    assert any(".experts." in n for n in codes) == (width == 256) and not any(
        torch.equal(bits(twin)[n][1], raw) for n, raw in codes.items()
    )
    assert json.loads((back / "config.json").read_text()) == json.loads((plain / "config.json").read_text())


def test_codes_that_cannot_move_with_their_scales_are_reported(checkpoint, key, tmp_path):
    """Of an output projection in blocks: tokens change places freely. Scales of one byte are not written."""
    source = tmp_path / "fp8"
    shutil.copytree(checkpoint("qwen3_moe"), source)
    config = models.read_config(source)
    config.tie_word_embeddings = False
    models.random_model(config, "cpu", torch.float32).save_pretrained(source)
    state = load_file(source / "model.safetensors")
    head = quantize(state["lm_head.weight"], CastSpec("e4m3", (128, 128), "fp32"))
    save_file(
        state | {"lm_head.weight": head.data, "lm_head.weight_scale_inv": head.scale}, source / "model.safetensors"
    )
    raw = json.loads((source / "config.json").read_text())
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for more, words in (
        ({}, r"lm_head\.weight is in FP8, but tokens .*load_in_fp8"),
        ({"scale_fmt": "ue8m0"}, "one byte"),
    ):
        (source / "config.json").write_text(json.dumps(raw | {"quantization_config": block | more}))
        with pytest.raises(SealError, match=words):
            seal_model(source, tmp_path / "twin", key)
    save_file(state | {"lm_head.weight": head.data}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(raw | {"quantization_config": block}))
    with pytest.raises(SealError, match=r"has no lm_head\.weight_scale_inv"):
        seal_model(source, tmp_path / "twin", key)


def test_large_models_are_not_checked(checkpoint, key):
    assert tried(checkpoint("qwen3"), key, largest=1000) is None
