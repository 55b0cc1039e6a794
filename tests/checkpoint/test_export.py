"""Stock transformers reads exports with the exact values of Octavo's casts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, CompressedTensorsConfig, conversion_mapping

from octavo import fp8, models
from octavo.checkpoint import CheckpointError, verify
from octavo.checkpoint.checksums import MARKER
from octavo.checkpoint.export import export
from octavo.checkpoint.export.layout import FORMATS, INCLUDABLE, plan_layout
from octavo.checkpoint.export.names import fused_group
from octavo.checkpoint.export.values import iter_values
from octavo.fp8.weights import codes_of_frozen
from octavo.models.folder.quantization import matches_exactly, matches_pattern, matches_target
from tests.checkpoint.export_models import stock, write
from tests.models.conftest import batch

FAMILIES = ["qwen3", "qwen3_moe", "llama", "qwen3_vl", "qwen2_5_vl", "internvl", "qwen3_vl_moe", "llavaonevision1_5"]
FAMILIES += ["nvila_lite", "qwen2_audio"]
FP8 = [name for name in FORMATS if name != "bf16"]
# Nearly every family and every format by default, all pairs among the long tests.
# llama has qwen3's layers without norms, and qwen3_vl what qwen3 and qwen3_vl_moe have between them.
IN_BLOCKS = [family for family in FAMILIES if family not in ("llama", "qwen3_vl")]
SHORT = {(f, "fp8-block") for f in IN_BLOCKS} | {("qwen3", f) for f in FP8} | {
    ("qwen3_moe", "fp8-tensor"), ("qwen3_vl_moe", "fp8-dynamic"), ("internvl", "fp8-tensor"),
}  # fmt: skip
PAIRS = [
    pytest.param(family, format, marks=() if (family, format) in SHORT else pytest.mark.long)
    for family in FAMILIES
    for format in FP8
]


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = write(family, tmp_path_factory.mktemp("export") / family)
        return made[family]

    return get


def expected(model, plan) -> dict[str, torch.Tensor]:
    """What the files should stand for, by casts of whole parameters: nothing of what wrote them is used."""
    shared: dict[str, list[torch.Tensor]] = {}
    state = {name: t for name, t in model.state_dict().items() if name not in plan.names.tied}
    for name, matrices in plan.matrices.items():
        for m in matrices:
            w = state[name] if m.slot is None else state[name][m.slot]
            shared.setdefault(m.shares, []).append(w.abs().max())
    out = {}
    for name, t in state.items():
        if name not in plan.matrices:
            out[name] = t.bfloat16().float()
        elif plan.kind == "tensor":
            each = [(m, t if m.slot is None else t[m.slot, m.rows[0] : m.rows[1]]) for m in plan.matrices[name]]
            amaxes = [torch.stack(shared[m.shares]).max() for m, _ in each]
            values = [divided(w, amax / 448 if amax else amax + 1) for (_, w), amax in zip(each, amaxes, strict=True)]
            if each[0][0].slot is None:
                out[name] = values[0]
            else:
                count = t.shape[0]
                out[name] = torch.stack([torch.cat(values[e::count]) for e in range(count)])
        else:
            out[name] = fp8.freeze_weight(t, plan.kind).dequantize()
    return out


def divided(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def logits(model, folder: Path) -> torch.Tensor:
    inputs = batch(models.load_processor(folder), image=hasattr(model.config, "vision_config"))
    with torch.no_grad():
        return model(**inputs).logits


def read(folder: Path, name: str) -> torch.Tensor:
    file = folder / "model.safetensors"
    if not file.exists():
        file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def load_in_transformers(out: Path, format: str, family: str):
    """Stock transformers on the CPU, weights dequantized to fp32 (what is not FP8 it leaves in BF16; then fp32 too)."""
    if family != "qwen3_vl_moe":
        return _dequantized(out, format)
    # Its experts one by one, as vLLM and SGLang want them in FP8: transformers 5.23 has rules for Qwen3-MoE's, none
    # for this family's, whose names differ in nothing else. Lent to it here.
    known = conversion_mapping.get_checkpoint_conversion_mapping("qwen3_vl_moe")
    lent = conversion_mapping.get_checkpoint_conversion_mapping("qwen2_moe")
    conversion_mapping.register_checkpoint_conversion_mapping("qwen3_vl_moe", lent, overwrite=True)
    try:
        return _dequantized(out, format)
    finally:
        conversion_mapping.register_checkpoint_conversion_mapping("qwen3_vl_moe", known, overwrite=True)
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard("qwen3_vl_moe")


def _dequantized(out: Path, format: str):
    if format == "fp8-block":  # by itself, where there is no GPU
        return stock(out).float()
    return stock(out, quantization_config=CompressedTensorsConfig(dequantize=True)).float()


@pytest.mark.parametrize(("family", "format"), PAIRS)
def test_transformers_reads_an_fp8_export_bit_for_bit(source, tmp_path, family, format):
    """Logits in fp32 equal those of the model with Octavo's dequantized weights, bit for bit."""
    folder = source(family)
    model = models.load(folder)
    include = [name for name in INCLUDABLE if name in models.describe(model).components]
    done = export(iter_values(model), folder, tmp_path / "out", format, include=include)
    plan = plan_layout(folder, format, include)
    assert done.total("cast") == sum(map(len, plan.matrices.values())) > 10
    model.load_state_dict(expected(model, plan), strict=False)
    read_back = load_in_transformers(tmp_path / "out", format, family)
    state = read_back.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    assert torch.equal(logits(model, folder), logits(read_back, tmp_path / "out"))
    same = AutoTokenizer.from_pretrained(tmp_path / "out")("first? 3")["input_ids"]
    assert same == AutoTokenizer.from_pretrained(folder)("first? 3")["input_ids"]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl", "internvl", "qwen3_vl_moe"])
def test_transformers_reads_a_bf16_export(source, tmp_path, family):
    folder = source(family)
    model = models.load(folder)
    export(iter_values(model), folder, tmp_path / "out", "bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    read_back = stock(tmp_path / "out", torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(read_back.state_dict()[name], value.bfloat16()), name


def test_stacked_bf16_experts_have_published_layout(source, tmp_path):
    """vLLM and SGLang turn Qwen3-VL-MoE's round without looking; transformers looks at the shape."""
    folder = source("qwen3_vl_moe")
    export(iter_values(models.load(folder)), folder, tmp_path / "out", "bf16")
    stem = "model.language_model.layers.0.mlp.experts"
    assert read(tmp_path / "out", f"{stem}.down_proj").shape == (4, 128, 256)  # [E, I, H]
    # gate and up together are square here (2 * 128 = 256), which no shape can tell: as transformers saves it
    transposed = plan_layout(folder, "bf16").names.written_transposed
    assert transposed == {f"model.language_model.layers.{i}.mlp.experts.down_proj" for i in (0, 1)}


def test_block_export_has_the_config_that_loaders_read(source, tmp_path):
    folder = source("qwen2_5_vl")
    export(iter_values(models.load(folder)), folder, tmp_path / "out", "fp8-block")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    skipped = block.pop("modules_to_not_convert")
    assert block == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    assert {"lm_head", "visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv", "visual.merger.mlp.0"} <= set(
        skipped
    )
    name = "model.layers.0.self_attn.q_proj"  # on disk; model.language_model.layers in memory
    assert read(tmp_path / "out", f"{name}.weight").dtype == torch.float8_e4m3fn
    scale = read(tmp_path / "out", f"{name}.weight_scale_inv")
    assert scale.dtype == torch.float32 and scale.shape == (2, 2)
    for taken in (name, "model.language_model.layers.0.self_attn.q_proj"):
        assert not matches_exactly(taken, skipped) and not matches_pattern(taken, skipped)


def test_compressed_tensors_export_ignores_by_name(source, tmp_path):
    folder = source("qwen3_vl")
    for format, strategy, shape in (("fp8-dynamic", "channel", (256, 1)), ("fp8-tensor", "tensor", (1,))):
        export(iter_values(models.load(folder)), folder, tmp_path / format, format)
        block = json.loads((tmp_path / format / "config.json").read_text())["quantization_config"]
        assert (block["quant_method"], block["format"]) == ("compressed-tensors", "float-quantized")
        group = block["config_groups"]["group_0"]
        assert group["weights"]["strategy"] == strategy and group["input_activations"]["strategy"] == "token"
        assert matches_target("model.visual.blocks.0.mlp.linear_fc1", block["ignore"])
        assert matches_target("lm_head", block["ignore"])
        name = "model.language_model.layers.0.self_attn.q_proj.weight_scale"
        assert read(tmp_path / format, name).shape == shape


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl"])
def test_tensor_export_shares_scales_in_fused_layers(source, tmp_path, family):
    folder = source(family)
    include = ["image_encoder"] if models.describe(models.empty(folder)).has_vision else []
    export(iter_values(models.load(folder)), folder, tmp_path / "out", "fp8-tensor", include=include)
    groups: dict[str, set[float]] = {}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if name.endswith(".weight_scale")]  # noqa: SIM118
        for name in names:
            group = fused_group(name.removesuffix(".weight_scale")) or name
            groups.setdefault(group, set()).add(float(tensors.get_tensor(name)))
    assert all(len(scales) == 1 for scales in groups.values())
    assert len({next(iter(s)) for s in groups.values()}) > len(groups) // 2  # each group its own


def test_layers_in_bf16_are_reported_with_reason(tmp_path):
    """k has 64 outputs: q, k and v stay together. down has 320 inputs: it stays alone."""
    folder = write("qwen3", tmp_path / "m", head_dim=32, num_key_value_heads=2, intermediate_size=320)
    done = export(iter_values(models.load(folder)), folder, tmp_path / "out", "fp8-block")
    plan = plan_layout(folder, "fp8-block")
    stay = {name.removeprefix("model.layers.0.self_attn."): why for name, why in plan.skipped.items()}
    assert stay["k_proj"].startswith("64 outputs, not a multiple of 128, in a GEMM")
    assert stay["q_proj"].startswith("runs as one GEMM with k_proj, which stays")
    assert plan.skipped["model.layers.0.mlp.down_proj"] == "320 inputs, not a multiple of 128"
    assert plan.skipped["model.layers.0.mlp.gate_proj"] == "320 outputs, not a multiple of 128"  # transformers divides
    assert [name for name in plan.matrices if "layers.0" in name] == ["model.layers.0.self_attn.o_proj.weight"]
    assert sum(done.skipped.values()) == len(plan.skipped) == 13
    stock(tmp_path / "out")


def test_experts_with_ragged_sizes_stay_stacked(tmp_path):
    folder = write("qwen3_moe", tmp_path / "m", moe_intermediate_size=192)
    plan = plan_layout(folder, "fp8-block")
    assert plan.skipped["model.layers.0.mlp.experts"].startswith("192 ")
    names = {name for name, _, _ in plan.tensors()}
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert not any("experts" in name and "scale" in name for name in names)
    assert matches_exactly("model.layers.0.mlp.experts", plan.quantization.skipped)
    export(iter_values(models.load(folder)), folder, tmp_path / "out", "fp8-block")
    stock(tmp_path / "out")


def test_zero_blocks_and_layers_have_scale_one(source, tmp_path):
    folder = source("qwen3")
    model = models.load(folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:128, :128] = 0
        model.model.layers[0].self_attn.k_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    for format in FP8:
        export(iter_values(model), folder, tmp_path / format, format)
        with safe_open(tmp_path / format / "model.safetensors", "pt") as tensors:
            scales = [tensors.get_tensor(n) for n in tensors.keys() if "scale" in n]  # noqa: SIM118
        assert all(bool((torch.isfinite(s) & (s > 0)).all()) for s in scales)
        name = "model.layers.1.mlp.down_proj.weight_scale" + ("_inv" if format == "fp8-block" else "")
        assert bool((read(tmp_path / format, name) == 1).all())
        plan = plan_layout(folder, format)
        again = load_in_transformers(tmp_path / format, format, "qwen3").state_dict()
        # zeros beside q and v do not coarsen their shared scale
        want = expected(model, plan)
        assert all(torch.equal(again[name], want[name]) for name in want)


def test_shards_have_an_index_and_equal_contents(source, tmp_path):
    folder = source("qwen3_moe")
    model = models.load(folder)
    one = export(iter_values(model), folder, tmp_path / "one", "fp8-dynamic")
    many = export(iter_values(model), folder, tmp_path / "many", "fp8-dynamic", largest=300_000)
    backwards = export(reversed(list(iter_values(model))), folder, tmp_path / "back", "fp8-dynamic", largest=300_000)
    assert len(one.files) == 1 and len(many.files) > 5 and many.bytes == one.bytes
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(many.files) and index["metadata"]["total_size"] == many.bytes
    for name in index["weight_map"]:
        assert torch.equal(*(read(tmp_path / d, name).view(torch.uint8) for d in ("one", "many")))
    for name in backwards.files:  # whatever the order in which values come
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
        header = safe_open(tmp_path / "many" / name, "pt")
        assert header.metadata() == {"format": "pt"}
    stock(tmp_path / "many", quantization_config=CompressedTensorsConfig(dequantize=True))


def test_written_tensors_are_counted(source, tmp_path):
    folder = source("qwen3_vl")
    done = export(iter_values(models.load(folder)), folder, tmp_path / "out", "fp8-block")
    document = done.to_json()
    assert document == json.loads(json.dumps(document))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as tensors:
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    assert done.bytes == sum(t.nbytes for t in found.values()) == sum(k.bytes for k in done.kinds.values())
    assert document["tensors"]["fp8"] + document["tensors"]["high_precision"] == len(found)
    kind = done.kinds["model.language_model.layers.*.self_attn.o_proj.weight"]
    assert kind.count == 4 and kind.cast == 2 and 0.01 < kind.relative < 0.04 and kind.largest < 2**-4
    assert done.kinds["model.language_model.norm.weight"].relative is None
    sentences = "\n".join(done.sentences())
    assert "(--include image_encoder writes it in FP8)" in sentences and "cast from high precision" in sentences
    marker = json.loads((tmp_path / "out" / MARKER).read_text())
    assert marker["format"] == "fp8-block" and marker["directory"] == "out"


def test_values_of_another_model_and_nonfinite_values_are_rejected(source, tmp_path):
    folder = source("qwen3")
    model = models.load(folder)
    state = dict(iter_values(model))

    def refused(values, match, format="fp8-block"):
        with pytest.raises(CheckpointError, match=match):
            export(values.items(), folder, tmp_path / "out", format)
        assert list(tmp_path.iterdir()) == []

    refused({**state, "extra": torch.ones(1)}, "extra is unknown to the model")
    refused({k: v for k, v in state.items() if k != "model.norm.weight"}, "1 parameter .* first model.norm.weight")
    refused({**state, "model.norm.weight": torch.ones(3)}, r"model.norm.weight has shape \[3\], .* \[256\]")
    for bad in (math.nan, math.inf):
        for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            broken = state[name].clone()
            broken.view(-1)[5] = bad
            for format in FORMATS:
                refused({**state, name: broken}, f"{name} holds NaN or an infinity; nothing was written", format)
    q = codes_of_frozen(fp8.freeze_weight(state["model.layers.1.mlp.up_proj.weight"], "block"))
    name = "model.layers.1.mlp.up_proj.weight"
    codes = q.data.clone()
    codes.view(torch.uint8)[3, 3] = 0xFF
    refused({**state, name: q._replace(data=codes)}, f"{name} holds a NaN code")
    refused({**state, name: q._replace(scale=q.scale * 0)}, f"{name} holds .* scale that is not finite and positive")
    huge = state["model.norm.weight"].clone()
    huge[0] = 3.4e38
    refused({**state, "model.norm.weight": huge}, "model.norm.weight has values beyond bfloat16")


def test_unknown_formats_and_components_are_rejected(source, tmp_path):
    folder = source("qwen3")
    with pytest.raises(CheckpointError, match="no format 'fp4'; there are bf16, fp8-block"):
        export([], folder, tmp_path / "out", "fp4")
    with pytest.raises(CheckpointError, match="'lm_head' cannot be included: .*image_encoder, .*audio_projector"):
        export([], folder, tmp_path / "out", "fp8-block", include=["lm_head"])
    with pytest.raises(CheckpointError, match="'image_encoder' cannot be included: a qwen3 has no such component"):
        export([], folder, tmp_path / "out", "fp8-block", include=["image_encoder"])
    ragged = write("qwen3", tmp_path / "m", hidden_size=192, intermediate_size=320, head_dim=24)
    with pytest.raises(CheckpointError, match="no layer .* could be written as fp8-block: .*Choose fp8-dynamic, which"):
        export([], ragged, tmp_path / "out", "fp8-block")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    model = models.load(folder)
    model.model.layers[0].mlp.lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="the model has adapters .*octavo merge"):
        export(iter_values(model), folder, tmp_path / "out", "bf16")


def test_audio_tower_codes_give_a_warning(source, tmp_path):
    """vLLM and SGLang run it by transformers' own modules, which multiply values; the layers of words are theirs."""
    folder = source("qwen2_audio")
    for include, verdicts in (([], ["ok"] * 3), (["audio_projector"], ["ok", "refuses", "refuses"])):
        out = tmp_path / f"out{len(include)}"
        export(iter_values(models.load(folder)), folder, out, "fp8-dynamic", include=include)
        found = verify(out, quick=True)
        assert found.ok and [one.verdict for one in found.verdicts] == verdicts
        assert [one.kind for one in found.warnings] == ["of-sound"] * len(include)
    (out / "preprocessor_config.json").write_text('{"feature_size": 80}')  # what hears is judged with the rest
    assert [one.kind for one in verify(out, quick=True).findings if one.status == "fail"] == ["companion"]


def test_transformers_config_has_the_skip_list(source, tmp_path):
    """Every layer in FP8 is converted by transformers' own rule, and no other."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    for family in FAMILIES:
        folder = source(family)
        plan = plan_layout(folder, "fp8-block")
        skipped = plan.quantization.skipped
        for m in (m for found in plan.matrices.values() for m in found):
            assert should_convert_module(m.module, skipped)
        assert plan.skipped and not any(should_convert_module(name, skipped) for name in plan.skipped)
        assert AutoConfig.from_pretrained(folder).model_type == family
