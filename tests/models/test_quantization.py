"""The quantization block of config.json: reading, writing and errors, and each loader's rule for lists of names."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from octavo import models
from octavo.models.folder.quantization import (
    matches_exactly,
    matches_parts,
    matches_pattern,
    matches_target,
    parse,
    to_config,
)
from tests.models.fp8_folders import BLOCK, CHANNEL, CT_BLOCK, TENSOR, compressed

Q = models.Quantization


@pytest.mark.parametrize(
    ("block", "kind", "size", "activations"),
    [
        (BLOCK, "block", (128, 128), "dynamic"),
        (CHANNEL, "row", None, "dynamic"),
        (TENSOR, "tensor", None, "static"),
        (CT_BLOCK, "block", (128, 128), "dynamic"),
    ],
)
def test_published_blocks(block, kind, size, activations):
    q = parse(block)
    assert (q.method, q.kind, q.block, q.activations) == (block["quant_method"], kind, size, activations)
    assert q.skipped == tuple(block.get("ignore") or block["modules_to_not_convert"])
    assert q.scale_suffix == ("_scale_inv" if q.method == "fp8" else "_scale")


EVERY = [
    Q("fp8", "block", (128, 128), ("lm_head", "model.visual.merger")),
    Q("fp8", "block", (64, 32)),
    Q("fp8", "block", (128, 128), scale_format="ue8m0"),
    Q("compressed-tensors", "row", None, ("lm_head", "re:.*visual.*")),
    Q("compressed-tensors", "block", (128, 128)),
    Q("compressed-tensors", "tensor", None, (), ("Linear", "re:.*mlp.*"), "static"),
    Q("compressed-tensors", "tensor", activations="none"),
]


@pytest.mark.parametrize("q", EVERY, ids=str)
def test_written_config_is_read_back(q, tmp_path):
    block = to_config(q)
    assert parse(json.loads(json.dumps(block))) == q
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": block}))
    assert models.read_quantization(tmp_path) == q
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": block}}))
    assert models.read_quantization(tmp_path) == q
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": block}))
    assert models.read_quantization(tmp_path) == q
    (tmp_path / "config.json").write_text("{}")
    assert models.read_quantization(tmp_path) is None


@pytest.mark.parametrize("q", EVERY, ids=str)
def test_format_libraries_read_written_folders(q):
    block = to_config(q)
    if q.method == "fp8":
        from transformers import FineGrainedFP8Config

        stock = FineGrainedFP8Config(**block)
        assert tuple(stock.weight_block_size) == q.block and tuple(stock.modules_to_not_convert) == q.skipped
        assert stock.scale_fmt == q.scale_format
        return
    config = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(block)
    (scheme,) = config.config_groups.values()
    assert {"row": "channel"}.get(q.kind, q.kind) == scheme.weights.strategy and tuple(config.ignore) == q.skipped
    inputs = scheme.input_activations
    assert q.activations == ("none" if inputs is None else "dynamic" if inputs.dynamic else "static")


def test_llm_compressors_presets_are_read():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    kinds = {"FP8": "tensor", "FP8_DYNAMIC": "row", "FP8_BLOCK": "block"}
    for preset, kind in kinds.items():
        config = quantization.QuantizationConfig(
            config_groups={preset: ["Linear"]},
            format="float-quantized",
            quantization_status="compressed",
            ignore=["lm_head"],
        )
        q = parse(json.loads(json.dumps(config.to_dict(), default=str)))
        assert (q.kind, q.skipped, q.targets) == (kind, ("lm_head",), ("Linear",))
    for preset in ("W4A16", "NVFP4", "W8A8", "MXFP8"):
        config = quantization.QuantizationConfig(config_groups={preset: ["Linear"]}, format="float-quantized")
        with pytest.raises(models.ModelError, match="Octavo reads"):
            parse(json.loads(json.dumps({**config.to_dict(), "quantization_status": "compressed"}, default=str)))


def changed(block, path, value):
    block = json.loads(json.dumps(block))
    place = block
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return block


W = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"quant_method": "fbgemm_fp8"}, "quantized weights .quant_method 'fbgemm_fp8'.*load_in_fp8"),
        ({"quant_method": "torchao", "quant_type": {}}, "'torchao'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"load_in_8bit": True}, "quant_method None"),
        ([1], "must be a mapping, and is \\[1\\]"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            "without weight_block_size means one scale for each tensor",
        ),
        ({**BLOCK, "weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two integers"),
        ({**BLOCK, "weight_block_size": [0, 128]}, "it must be two integers"),
        ({**BLOCK, "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({**BLOCK, "fmt": "e5m2"}, "fmt is 'e5m2'; Octavo reads e4m3"),
        ({**BLOCK, "scale_fmt": "int"}, "scale_fmt is 'int'"),
        ({**BLOCK, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({**BLOCK, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ({**BLOCK, "modules_to_not_convert": "lm_head"}, "not a list of names"),
        ({**BLOCK, "modules_to_not_convert": ["(lm_head"]}, "is not a regular expression"),
        ({**CHANNEL, "quantization_status": "frozen"}, "quantization_status is 'frozen'; only 'compressed'"),
        ({**CHANNEL, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**CHANNEL, "config_groups": {}}, "config_groups is missing or empty"),
        ({**CHANNEL, "ignore": ["re:("]}, "is not a regular expression"),
        (changed(CHANNEL, ("config_groups", "group_0", "format"), "pack-quantized"), "group_0 has format 'pack-quant"),
        (changed(CHANNEL, (*W, "num_bits"), 4), "weights.num_bits is 4"),
        (changed(CHANNEL, (*W, "type"), "int"), "weights.type is 'int'"),
        (changed(CHANNEL, (*W, "symmetric"), False), "weights.symmetric is False"),
        (changed(CHANNEL, (*W, "dynamic"), True), "weights.dynamic is True"),
        (
            changed(CHANNEL, (*W, "strategy"), "group"),
            "weights.strategy is 'group'; Octavo reads channel, tensor, block",
        ),
        (changed(CT_BLOCK, (*W, "block_structure"), None), "block_structure is None"),
        (changed(CHANNEL, ("config_groups", "group_1"), TENSOR["config_groups"]["group_0"]), "in 2 ways .row, tensor"),
        (changed(CHANNEL, ("config_groups", "group_0"), 3), "group_0 is 3, not an object"),
        (changed(CHANNEL, W, None), "in 0 ways .none"),
    ],
)
def test_unsupported_quantization_is_rejected_with_fix(block, message):
    with pytest.raises(models.ModelError, match=message):
        parse(block, "config.json")


def test_block_sizes_as_words_and_missing_lists():
    assert parse(changed(CT_BLOCK, (*W, "block_structure"), "64x32")).block == (64, 32)
    assert parse({**BLOCK, "modules_to_not_convert": None}).skipped == ()
    assert parse({**BLOCK, "modules_to_not_convert": None, "ignored_layers": ["lm_head"]}).skipped == ("lm_head",)
    assert parse(compressed("channel", None)).targets == ("Linear",)


def test_unsupported_quantization_is_not_written():
    for q in (Q("fp8", "row"), Q("fp8", "tensor"), Q("compressed-tensors", "row", scale_format="ue8m0")):
        with pytest.raises(models.ModelError, match="use "):
            to_config(q)


def test_modelopt_file_without_quantization_config_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        models.ModelError, match="hf_quant_config.json describes weights quantized by NVIDIA's ModelOpt"
    ):
        models.read_quantization(tmp_path)


def test_scales_of_a_shape():
    assert Q("fp8", "block", (128, 128)).grid(129, 128) == (2, 1)
    assert Q("compressed-tensors", "row").grid(5, 7) == (5, 1)
    assert Q("compressed-tensors", "tensor").grid(5, 7) == (1, 1)


NAMES = ["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.11.mlp.gate", "visual.blocks.0.attn.qkv"]


def test_each_loader_rule():
    listed = ["lm_head", "model.layers.1", "mlp.gate"]
    assert [matches_exactly(n, listed) for n in NAMES] == [True, False, False, False]
    assert [matches_parts(n, listed) for n in NAMES] == [True, True, True, False]
    assert not matches_parts("model.layers.0.mlp.gate_up_proj", ["mlp.gate"])
    assert [matches_pattern(n, listed) for n in NAMES] == [True, True, True, False]
    assert matches_exactly("model.layers.0.mlp.experts", ["model.layers.0.mlp.experts.0.up_proj"])
    assert matches_parts("visual.blocks.0.attn.qkv", ["model.visual.blocks"])
    assert matches_pattern("model.layers.3.mlp.up_proj", [r"model\.layers\.\d+\.mlp"]) and not matches_pattern(
        "a.b", []
    )
    assert [matches_target(n, ["re:.*visual.*", "lm_head"]) for n in NAMES] == [True, False, False, True]
    assert matches_target("anything", ["Linear"]) and not matches_target("anything", ["Linear"], ("Embedding",))


def test_patterns_agree_with_transformers():
    stock = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    if not stock("model.layers.11.mlp", ["model.layers.1"]):
        pytest.skip("this version of transformers does not end a pattern at a dot yet")
    listed = [["lm_head"], ["model.layers.1"], ["mlp.gate"], ["gate"], [r"model\.layers\.\d+"], ["visual", "up_proj"]]
    for patterns in listed:
        for name in NAMES:
            assert matches_pattern(name, patterns) == (not stock(name, patterns)), (name, patterns)


def test_targets_agree_with_compressed_tensors():
    is_match = pytest.importorskip("compressed_tensors.utils").is_match
    layer = nn.Linear(2, 2)
    for targets in (["Linear"], ["re:.*mlp.*"], ["lm_head"], ["Embedding", "visual.blocks.0.attn.qkv"], ["re:mlp"]):
        for name in NAMES:
            assert matches_target(name, targets, ("Linear", "Module")) == is_match(name, layer, targets), (
                name,
                targets,
            )


def test_every_kind_has_an_octavo_cast():
    assert Q("compressed-tensors", "row").spec.block == (1, -1)
    assert Q("compressed-tensors", "tensor").spec.block == (-1, -1)
    assert Q("fp8", "block", (64, 32)).spec.block == (64, 32)
    assert torch.float8_e4m3fn is Q("fp8", "block", (64, 32)).spec.fmt.dtype
