"""Which format an export gets, on the shapes of a real small model: 576, 192 and 1536, vocabulary 49152, tied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig

from octavo import fp8, models
from octavo.checkpoint import CheckpointError, verify
from octavo.checkpoint.checksums import MARKER
from octavo.checkpoint.export import formats
from octavo.checkpoint.export.layout import ExportModel, choose_layers, plan_layout
from octavo.cli.main import main
from octavo.models.tiny import tiny
from octavo.train import TrainError
from octavo.train.artifacts import export_model
from tests.checkpoint.export_models import stock, write

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of SmolLM2-135M's shapes, with random weights."""
    folder = tmp_path_factory.mktemp("small") / "model"
    tiny.write("llama", folder, size="mini")
    config = LlamaConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 576, 1536, 2
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 9, 3, 64
    config.vocab_size, config.tie_word_embeddings = 49152, True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "block"
    export_model(small, out, "fp8-block", device="cpu")
    return out


def test_unfused_layers_with_ragged_rows_are_written_in_blocks(small, exported):
    """down_proj has 576 outputs and 1536 inputs; all others have 576 inputs."""
    plan = plan_layout(small, "fp8-block")
    assert set(plan.matrices) == {f"model.layers.{n}.mlp.down_proj.weight" for n in range(2)} and plan.layers == (2, 14)
    q = plan.quantization
    assert (q.method, q.kind, q.block) == ("compressed-tensors", "block", (128, 128))
    named = {name for name in q.skipped if name.startswith("model.")}
    assert named == {name for name in plan.skipped if name != "lm_head"} and len(named) == 12
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {*named, "lm_head"}
    note = json.loads((exported / MARKER).read_text())
    assert note["layers"] == {"fp8": 2, "of": 14} and note["quant_method"] == "compressed-tensors"
    names = note["names_in_bf16"]["576 inputs, not a multiple of 128"]
    assert names[0] == "model.layers.*.self_attn.q_proj" and len(names) == 6


def test_transformers_octavo_and_verify_read_ragged_blocks(small, exported):
    weight = models.load(small).get_parameter(DOWN).detach()
    wanted = fp8.freeze_weight(weight, "block").dequantize()
    theirs = stock(exported, quantization_config=CompressedTensorsConfig(dequantize=True)).float()
    assert torch.equal(theirs.get_parameter(DOWN), wanted)
    assert torch.equal(models.load(exported).get_parameter(DOWN).dequantize(), wanted)
    found = verify(exported, against=small)
    assert found.ok and not found.warnings and [one.verdict for one in found.verdicts] == ["ok"] * 3


def test_same_blocks_under_method_fp8_are_refused_by_transformers(exported, tmp_path):
    """The reason for compressed-tensors: with 576 rows and 5 rows of scales transformers cannot dequantize."""
    from safetensors.torch import load_file, save_file

    config = json.loads((exported / "config.json").read_text())
    skipped = config["quantization_config"]["ignore"]
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": skipped,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(exported / "model.safetensors")
    renamed = {name.replace("weight_scale", "weight_scale_inv"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError):
        stock(tmp_path)
    assert [one.kind for one in verify(tmp_path, quick=True).warnings if "block" in one.kind] == ["block-ragged"] * 2


def test_ragged_layers_of_models_with_experts_stay_in_bf16(tmp_path):
    """They would put the experts into compressed-tensors' blocks, too, which no server was seen to read."""
    folder = write("qwen3_moe", tmp_path / "m", hidden_size=192)
    chosen = choose_layers(ExportModel.read(folder), "fp8-block")
    assert (
        not chosen.matrices and chosen.stays["model.layers.0.self_attn.o_proj"] == "192 outputs, not a multiple of 128"
    )


def test_fused_groups_with_ragged_parts_stay_in_bf16(tmp_path):
    """k and v have 192 rows: vLLM refuses them in compressed-tensors, and misplaces their scales under method fp8."""
    folder = write("qwen3", tmp_path / "m", hidden_size=384, num_attention_heads=6, num_key_value_heads=3, head_dim=64)
    plan = plan_layout(folder, "fp8-block")
    chosen = {name.split(".")[-2] for name in plan.matrices}
    assert chosen == {"o_proj", "gate_proj", "up_proj", "down_proj"} and plan.quantization.method == "fp8"
    assert plan.skipped["model.layers.0.self_attn.v_proj"] == "192 outputs, not a multiple of 128"


def test_format_follows_from_the_shapes_and_the_codes(small, tmp_path):
    choice = formats.choose_format(small)
    assert (choice.format, choice.fit.taken, choice.fit.of) == ("fp8-dynamic", 14, 14)
    assert choice.reason == ("it takes 14 of 14 linear layers, and fp8-block 2 (576 inputs, not a multiple of 128)")
    whole = write("qwen3", tmp_path / "whole")
    assert formats.choose_format(whole).format == "fp8-block"
    for kind, format in (("row", "fp8-dynamic"), ("block", "fp8-block"), ("tensor", "fp8-tensor")):
        choice = formats.choose_format(whole, codes=kind)
        assert choice.format == format and "scales of the same kind as the model's" in choice.reason
    assert formats.choose_format(small, codes="block").format == "fp8-dynamic"
    with pytest.raises(CheckpointError, match="'image_encoder' cannot be included"):
        formats.choose_format(small, ["image_encoder"])


def test_plan_counts_what_an_export_writes(small, tmp_path, capsys, monkeypatch):
    """The line has the figures of exports without --include, the JSON also those of towers."""
    tiny.write("qwen3_vl", tmp_path / "m")
    line, document = formats.describe_fits(ExportModel.read(tmp_path / "m"))
    assert line == "export: fp8-block takes 4 of 50 layers; fp8-dynamic takes 28 of 50"
    assert document["fp8-block"] == {
        "layers": 4, "of": 50, "components": {"foundation": 4, "image_encoder": 4, "image_projector": 6},
    }  # fmt: skip
    assert (
        document["fp8-tensor"] == document["fp8-dynamic"] and sum(document["fp8-tensor"]["components"].values()) == 50
    )
    for format in ("fp8-block", "fp8-dynamic", "fp8-tensor"):
        assert plan_layout(tmp_path / "m", format).layers == (document[format]["layers"], 50)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {small}}}\ndata: {{train: [{{path: none.jsonl}}]}}\ntrain: {{steps: 1, seq_length: 64}}\n"
    )
    assert main(["plan", "run.yaml"]) == 0
    assert "\nexport: fp8-block takes 2 of 14 layers; fp8-dynamic takes 14 of 14\n" in capsys.readouterr().out
    assert main(["plan", "run.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["export"]["fp8-block"]["layers"] == 2


def test_model_without_fp8_layers_is_refused(small, tmp_path, monkeypatch):
    """Names that no skip list can distinguish: the reason is in the message, bf16 is the advice, nothing is written."""
    from octavo.checkpoint.export import layout

    monkeypatch.setattr(layout, "matches_parts", lambda name, names: bool(tuple(names)))
    with pytest.raises(CheckpointError, match=r"could be written in FP8: .*SGLang would mistake it .* Choose bf16"):
        export_model(small, tmp_path / "out", "fp8", device="cpu")
    assert list(tmp_path.iterdir()) == []
    assert formats.describe_fits(ExportModel.read(small))[0].startswith("export: bf16; no layer of the language")


def test_export_command_says_which_format_and_how_many_layers(small, tmp_path, capsys):
    assert main(["export", str(small), str(tmp_path / "out"), "--format", "fp8", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("format fp8-dynamic, because it takes 14 of 14 linear layers, and fp8-block 2 (576 inputs")
    assert f"wrote {tmp_path / 'out'}: fp8-dynamic, 14 of 14 linear layers in FP8, " in out
    assert main(["export", str(small), str(tmp_path / "b"), "--format", "fp8-block", "--json", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["layers"] == {"fp8": 2, "of": 14}
    assert "fp8-block, 2 of 14 linear layers in FP8" in err and "blocks are stored by compressed-tensors" in err
    assert "12 layers in BF16: 576 inputs, not a multiple of 128: model.layers.*.self_attn.q_proj, " in err


def test_hint_for_adapters_names_a_format_that_fits(small, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(small), "peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    )
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(TrainError, match=r"octavo merge .* --format fp8$"):
        export_model(adapter, tmp_path / "out", "fp8")
    ragged = write("qwen3", tmp_path / "m", hidden_size=192, intermediate_size=320, head_dim=24)
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(ragged), "peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]})
    )
    with pytest.raises(
        CheckpointError, match="could be written as fp8-block: .*Choose fp8-dynamic, which takes 14 of 14"
    ):
        export_model(adapter, tmp_path / "out", "fp8-block")
