"""Models read by Octavo: in high precision as in transformers, or quantized to FP8 during loading."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import fp8, models
from octavo.base.model_families import tiny_families, trained_families
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_weights
from octavo.models.structure.skeleton import read_config, skeleton
from octavo.models.weights import streaming
from octavo.models.weights.assembly import assemble, prepare
from octavo.models.weights.shards import open_weights
from tests.models.conftest import MANY, batch
from tests.models.fp8_folders import CHANNEL, edit_config, edit_weights, refused, same

KINDS = tuple(FROZEN)
CASES = [(family, kind) for family in tiny_families() for kind in KINDS if kind == "row" or family in MANY]


def streamed(folder: Path, dtype=torch.float32):
    """Load a high-precision folder with Octavo's reader, which `load` uses only for FP8."""
    shards, _ = open_weights(folder, False)
    build = partial(skeleton, read_config(folder), dtype, None)
    with shards:
        cpu = torch.device("cpu")
        return assemble(folder, prepare(folder, build, shards, None, {}, dtype, cpu, True, print), cpu, print, None)


# high precision


@pytest.mark.parametrize(
    ("family", "dtype"), [*((f, torch.float32) for f in tiny_families()), *((f, torch.bfloat16) for f in MANY)]
)
def test_streaming_equals_transformers(checkpoint, family, dtype, monkeypatch):
    monkeypatch.setattr(streaming, "_CHUNK", 1 << 13)  # many chunks, as large matrices have
    local, stock = streamed(checkpoint(family), dtype), models.load(checkpoint(family), dtype)
    assert type(local) is type(stock) and not local.training
    for get in ("named_parameters", "named_buffers"):
        for (name, a), (other, b) in zip(getattr(local, get)(), getattr(stock, get)(), strict=True):
            assert name == other and a.dtype == b.dtype and torch.equal(a, b), name
            assert a.requires_grad == b.requires_grad and not a.is_meta
    assert local.config.to_dict() == stock.config.to_dict()
    assert local.config._attn_implementation == stock.config._attn_implementation
    assert local.generation_config.to_dict() == stock.generation_config.to_dict()
    assert str(local._weight_conversions) == str(stock._weight_conversions)
    tied = local.lm_head.weight is local.get_input_embeddings().weight
    assert tied == (stock.lm_head.weight is stock.get_input_embeddings().weight)


def test_published_experts_are_transposed(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint("qwen3_vl_moe"), tmp_path / "m"))
    stock = models.load(folder, load_in_fp8="row")
    turned = "mlp.experts.gate_up_proj"

    def turn(weights):
        for name in list(weights):
            if name.endswith(turned):
                weights[name] = weights[name].mT.contiguous()

    edit_weights(folder, turn)
    actual = models.load(folder, load_in_fp8="row")
    for (name, a), (_, b) in zip(frozen_weights(stock), frozen_weights(actual), strict=True):
        assert same(codes_of_frozen(a).data, codes_of_frozen(b).data), name
    assert all(
        torch.equal(a, b) for a, b in zip(streamed(folder).parameters(), models.load(folder).parameters(), strict=True)
    )


# quantized on the way in


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_codes_are_those_of_the_values_on_disk(checkpoint, family, kind, monkeypatch):
    monkeypatch.setattr(streaming, "_CHUNK", 1 << 13)
    stock = models.load(checkpoint(family))  # fp32, as on disk
    of = "audio" if family in trained_families("sound") else "image"
    parts = ["foundation", f"{of}_encoder", *([f"{of}_projector"] if family != "gemma3" else [])]  # whose is no layer
    options = dict.fromkeys(parts, kind) if family in trained_families("images") + trained_families("sound") else kind
    seen = []
    model = models.load(
        checkpoint(family), torch.bfloat16, load_in_fp8=options, progress=lambda *n: seen.append(n), log=pytest.fail
    )
    values = dict(stock.named_parameters())
    rows = fp8.describe_layers(model, models.describe(model).components)
    wanted = {r.name if r.kind == "experts" else f"{r.name}.weight" for r in rows if r.kind in ("linear", "experts")}
    frozen = dict(frozen_weights(model))
    assert set(frozen) == wanted
    for name, weight in frozen.items():
        q = codes_of_frozen(weight)
        transposed = bool(getattr(stock.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
        expected = codes_of_frozen(fp8.freeze_weight(values[name].detach(), kind, transposed=transposed))
        assert same(q.data, expected.data) and torch.equal(q.scale, expected.scale) and q.spec == expected.spec, name
        assert weight.dtype == torch.bfloat16 and not weight.requires_grad and weight.shape == values[name].shape
    for name, parameter in model.named_parameters():
        if name not in frozen:
            assert torch.equal(parameter, values[name].to(parameter.dtype)), name
            assert parameter.requires_grad == values[name].requires_grad, name  # tables of sinusoids stay
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_high_precision_modules_are_not_quantized(checkpoint, family):
    model = models.load(checkpoint(family), load_in_fp8="block")
    frozen = [name for name, _ in frozen_weights(model)]
    assert frozen and not [n for n in frozen if re.search("visual|embed|lm_head|norm|mlp.gate.weight|patch", n)]


def test_a_quantized_model_computes_and_trains_around_its_weights(checkpoint):
    model = models.load(checkpoint("qwen3_vl"), load_in_fp8={"foundation": "row", "image_projector": None})
    inputs = batch(models.load_processor(checkpoint("qwen3_vl")), image=True)
    frozen = {name: weight.dequantize() for name, weight in frozen_weights(model)}
    thawed = models.load(checkpoint("qwen3_vl"))
    thawed.load_state_dict(frozen, strict=False)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, thawed(**inputs).logits)
    model(**inputs).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("llama", "rows", "has 'rows' for foundation; it must be rowwise, blockwise, tensorwise"),
        (
            "llama",
            7,
            "load_in_fp8 is 7; it must be rowwise, blockwise, tensorwise, or a mapping from components to these",
        ),
        ("llama", {"lm_head": "row"}, "names 'lm_head'; the components are image_encoder, .*, foundation"),
        ("llama", {"image_encoder": "row"}, "names image_encoder, but .* has no linear layers there.*foundation"),
    ],
)
def test_invalid_load_in_fp8_is_rejected(checkpoint, family, asked, message):
    refused(checkpoint(family), message, load_in_fp8=asked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_nonfinite_weight_is_rejected(checkpoint, tmp_path, kind, bad, name):
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "m"))
    edit_weights(folder, lambda weights: weights[name].view(-1)[7:8].fill_(bad))
    refused(folder, rf"{name} \(model.safetensors\) holds NaN or infinity", load_in_fp8=kind)


def test_rule_that_only_transformers_can_run(checkpoint, tmp_path, monkeypatch):
    """q, k and v fused on disk: the rule splits full tensors, so it applies to values but not to codes."""
    from transformers.core_model_loading import Chunk, WeightConverter

    from octavo.models.weights import name_mapping

    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "m"))
    stock = models.load(folder, load_in_fp8="row")

    def fuse(weights):
        for name in [n for n in weights if n.endswith("mlp.gate_proj.weight")]:
            stem = name.removesuffix("gate_proj.weight")
            weights[stem + "fused.weight"] = torch.cat([weights.pop(name), weights.pop(stem + "up_proj.weight")])

    edit_weights(folder, fuse)
    rule = WeightConverter("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[Chunk(0)])
    monkeypatch.setattr(name_mapping, "get_model_conversion_mapping", lambda model: [rule])
    actual = models.load(folder, load_in_fp8="row")
    for (name, a), (other, b) in zip(frozen_weights(stock), frozen_weights(actual), strict=True):
        assert name == other and same(codes_of_frozen(a).data, codes_of_frozen(b).data)
    plain = models.load(checkpoint("llama"))
    assert all(torch.equal(a, b) for a, b in zip(streamed(folder).parameters(), plain.parameters(), strict=True))

    def freeze(weights):
        for name in [n for n in weights if re.search("fused|_proj", n)]:
            value = weights[name]
            weights[name] = value.to(torch.float8_e4m3fn)
            weights[name + "_scale"] = torch.full((value.shape[0], 1), 0.5)

    edit_weights(folder, freeze)
    edit_config(folder, quantization_config=CHANNEL)
    refused(folder, "fused.weight .* has FP8 codes, but its tensor becomes .*gate_proj.weight by Chunk")
    high = models.load(folder, keep_fp8=False)
    gate = load_file(folder / "model.safetensors")["model.layers.0.mlp.fused.weight"].float().chunk(2)[0] * 0.5
    assert torch.equal(high.model.layers[0].mlp.gate_proj.weight, gate)
