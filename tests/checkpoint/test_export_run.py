"""An export of a run contains the codes of its last forward, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from octavo import fp8, models, train
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.checksums import MARKER
from octavo.checkpoint.export import export
from octavo.checkpoint.export.layout import FORMATS, INCLUDABLE, plan_layout
from octavo.checkpoint.export.values import TrainedWeight, iter_values, regrid
from octavo.cli import export as command
from octavo.cli.main import main
from octavo.config import load_config_text
from octavo.data.builtin import digits
from octavo.fp8.weights import FROZEN, codes_of_frozen, frozen_weights
from octavo.train.artifacts import export_model
from octavo.train.errors import TrainError
from tests.checkpoint.export_models import stock, write
from tests.models.conftest import batch


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write("qwen3_vl", folder / "model")
    digits.write(folder / "digits", train=8, test=4)
    return folder


@pytest.fixture(scope="module")
def trained(place):
    """(recipe, settings) -> the directory of a run of two steps."""
    made: dict[tuple[str, ...], Path] = {}

    def get(recipe: str, *settings: str) -> Path:
        key = (recipe, *settings)
        if key not in made:
            directory = place / f"run{len(made)}"
            text = f"""
model: {{path: {place / "model"}}}
fp8: {{recipe: {recipe}}}
data: {{train: [{{path: {place / "digits/train.json"}}}]}}
train: {{steps: 2, seq_length: 128, micro_batch: 1, global_batch: 1, lr: 2e-3}}
run: {{dir: {directory}, health_every: 0, tensorboard: false, hf: false, threads: 1, save_every: 1, keep: 2}}
"""
            train.run(load_config_text(text, settings))
            made[key] = directory
        return made[key]

    return get


def multiplied_by(run: Path) -> dict[str, fp8.Quantized]:
    """The codes in the caches of a run's layers after a forward: what its GEMMs multiplied by."""
    model, processor, _ = train.load_run(run)
    with torch.no_grad():
        model(**batch(processor, image=True))
    return {
        f"{name}.weight": next(q for (_, spec), q in layer._site.codes._codes.items() if spec == layer.recipe.fwd.b)
        for name, layer in model.named_modules()
        if isinstance(layer, fp8.Linear)
    }


def written(out: Path) -> dict[str, torch.Tensor]:
    with safe_open(out / "model.safetensors", "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("format", "recipe"), [("fp8-block", "blockwise"), ("fp8-dynamic", "rowwise")])
def test_run_in_the_same_blocks_keeps_its_codes(trained, tmp_path, format, recipe):
    run = trained(recipe)
    done = export_model(run, tmp_path / "out", format, device="cpu")
    plan = plan_layout(tmp_path / "out", format)
    assert done.total("kept") == len(plan.matrices) == 14 and done.total("cast") == done.total("refit") == 0
    codes, files = multiplied_by(run), written(tmp_path / "out")
    suffix = "_scale_inv" if format == "fp8-block" else "_scale"
    for name in plan.matrices:
        assert torch.equal(files[name].view(torch.uint8), codes[name].data.view(torch.uint8)), name
        assert torch.equal(files[name + suffix], codes[name].scale), name
    # the vision tower trained in FP8 and is not asked for: its parameters in BF16, and that is said
    assert done.opened["image_encoder"] > 0 and any("--include image_encoder" in line for line in done.sentences())
    both = export_model(run, tmp_path / "both", format, include=["image_encoder"], device="cpu")
    assert both.total("kept") > 14
    # of the tower, what has 320 inputs or outputs cannot be in blocks that every loader reads
    assert both.opened.get("image_encoder", 0) == (4 if format == "fp8-block" else 0) < done.opened["image_encoder"]
    assert not any("--include image_encoder" in line for line in both.sentences())


@pytest.mark.long
def test_run_with_fp8_parameters_keeps_its_codes(trained, tmp_path):
    run = trained("blockwise", "fp8.param=true")
    done = export_model(run, tmp_path / "out", "fp8-block", device="cpu")
    assert done.total("kept") == 14
    model, _, _ = train.load_run(run)
    files = written(tmp_path / "out")
    for name, value in iter_values(model):
        if name in plan_layout(tmp_path / "out", "fp8-block").matrices:
            assert isinstance(value, TrainedWeight)
            assert torch.equal(files[name].view(torch.uint8), value.codes.data.view(torch.uint8))


def test_tensorwise_run_shares_the_largest_scale(trained, tmp_path):
    """o and down keep their codes, and of q, k, v and of gate, up the one with the largest scale does; the others are
    cast from the parameter with that scale, not from their codes."""
    run = trained("tensorwise")
    done = export_model(run, tmp_path / "out", "fp8-tensor", device="cpu")
    assert done.total("kept") >= 8 and done.total("kept") + done.total("refit") == 14 and done.total("recast") == 0
    codes, files = multiplied_by(run), written(tmp_path / "out")
    model, _, _ = train.load_run(run)
    for layer in (0, 1):
        stem = f"model.language_model.layers.{layer}"
        for group in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
            names = [f"{stem}.{part}.weight" for part in group]
            shared = max(float(codes[name].scale) for name in names)
            for name in names:
                assert files[f"{name}_scale"].tolist() == [shared]
                want = (model.get_parameter(name) / shared).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert torch.equal(files[name].view(torch.uint8), want.view(torch.uint8))
                if float(codes[name].scale) == shared:
                    assert torch.equal(files[name].view(torch.uint8), codes[name].data.view(torch.uint8))
        for name in (f"{stem}.self_attn.o_proj.weight", f"{stem}.mlp.down_proj.weight"):
            assert torch.equal(files[name].view(torch.uint8), codes[name].data.view(torch.uint8))


def test_run_in_other_blocks_is_cast_from_parameters(trained, tmp_path):
    run = trained("rowwise")
    done = export_model(run, tmp_path / "out", "fp8-block", device="cpu")
    assert done.total("refit") == 14 and done.total("kept") == 0
    assert any("cast from the parameters" in line and "relative error up to" in line for line in done.sentences())
    model, _, _ = train.load_run(run, recipe="off")
    files = written(tmp_path / "out")
    for name in plan_layout(tmp_path / "out", "fp8-block").matrices:
        q = codes_of_frozen(fp8.freeze_weight(model.get_parameter(name), "block"))
        assert torch.equal(files[name].view(torch.uint8), q.data.view(torch.uint8))
        assert torch.equal(files[f"{name}_scale_inv"], q.scale)


def test_earlier_step_is_exported_in_bf16(trained, tmp_path):
    run = trained("blockwise")
    export_model(run, tmp_path / "first", "bf16", step=1, device="cpu")
    export_model(run, tmp_path / "last", "bf16", device="cpu")
    for step, out in ((1, "first"), (2, "last")):
        model, _, _ = train.load_run(run, step=step, recipe="off")
        again = stock(tmp_path / out, torch.bfloat16).state_dict()
        assert all(torch.equal(again[name], t.bfloat16()) for name, t in model.state_dict().items())
    with pytest.raises(TrainError, match="no checkpoint of step 7"):
        export_model(run, tmp_path / "none", "bf16", step=7)
    assert not (tmp_path / "none").exists()


def test_bf16_run_is_exported_to_fp8(trained, tmp_path):
    done = export_model(trained("off"), tmp_path / "out", "fp8-dynamic", device="cpu")
    assert done.total("cast") == 14 and done.total("kept") == 0


# Folders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_vl_moe", pytest.param("qwen2_5_vl", marks=pytest.mark.long)])
def test_fp8_folder_is_exported_byte_for_byte(tmp_path, family):
    folder = write(family, tmp_path / "model")
    for format in FORMATS:
        first = export_model(folder, tmp_path / format, format, device="cpu")
        again = export_model(tmp_path / format, tmp_path / f"{format}-again", format, device="cpu")
        assert again.total("kept") == first.total("cast")
        for name in (*again.files, "config.json"):
            assert (tmp_path / format / name).read_bytes() == (tmp_path / f"{format}-again" / name).read_bytes(), name


def test_fp8_folder_in_another_format_is_recast_and_reported(tmp_path):
    folder = write("qwen3_moe", tmp_path / "model")
    export_model(folder, tmp_path / "row", "fp8-dynamic", device="cpu")
    messages: list[str] = []
    done = export_model(tmp_path / "row", tmp_path / "block", "fp8-block", device="cpu", log=messages.append)
    assert done.total("recast") == 32 and any("rounded twice" in line for line in messages)
    model = models.load(tmp_path / "row", keep_fp8=False)
    files = written(tmp_path / "block")
    name = "model.layers.1.self_attn.o_proj.weight"
    q = codes_of_frozen(fp8.freeze_weight(model.get_parameter(name), "block"))
    assert torch.equal(files[name].view(torch.uint8), q.data.view(torch.uint8))
    # back to BF16: the values of the codes
    done = export_model(tmp_path / "row", tmp_path / "bf16", "bf16", device="cpu")
    assert sum(done.opened.values()) == 12  # 8 layers, and the experts of 2 in two parameters each
    again = stock(tmp_path / "bf16", torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], t.bfloat16()) for name, t in model.state_dict().items())


def test_octavo_loads_its_export_with_the_same_codes(tmp_path):
    for family in ("qwen3_moe", "internvl"):
        folder = write(family, tmp_path / family)
        model = models.load(folder)
        for format in ("fp8-block", "fp8-dynamic"):
            out = tmp_path / f"{family}-{format}"
            export(iter_values(model), folder, out, format)
            plan = plan_layout(folder, format)
            loaded = dict(frozen_weights(models.load(out)))
            assert set(loaded) == set(plan.matrices)
            for name, weight in loaded.items():
                q = codes_of_frozen(fp8.freeze_weight(model.get_parameter(name), plan.kind))
                assert torch.equal(codes_of_frozen(weight).data.view(torch.uint8), q.data.view(torch.uint8))


def test_adapter_run_is_rejected_with_a_hint_to_merge(place, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(place / "model")}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(TrainError, match=r"is an adapter on .*octavo merge .* --format fp8-block"):
        export_model(adapter, tmp_path / "out", "fp8-block")


def test_run_and_base_folder_are_not_replaced(trained, place, tmp_path):
    run = trained("off")
    for target in (run, place / "model", place):
        with pytest.raises(CheckpointError, match="that is exported"):
            export_model(run, target, "bf16")
    (tmp_path / "link").symlink_to(place / "model")
    with pytest.raises(CheckpointError, match="is the folder that is exported"):
        export_model(run, tmp_path / "link", "bf16")
    with pytest.raises(TrainError, match="step 1 chooses a checkpoint of a run"):
        export_model(place / "model", tmp_path / "out", "bf16", step=1)


# Codes in other blocks ----------------------------------------------------------------------------------------------


def test_codes_are_kept_if_each_new_block_has_one_scale():
    w = torch.randn(256, 256).repeat_interleave(1, 0)
    block = codes_of_frozen(fp8.freeze_weight(w, "block"))
    row = fp8.CastSpec("e4m3", (1, -1), "pow2")
    assert regrid(block, block.spec).data is block.data
    even = block._replace(scale=torch.tensor([[0.5, 0.5], [2.0, 2.0]]))
    kept = regrid(even, row)
    assert kept.scale.shape == (256, 1) and kept.scale.unique().tolist() == [0.5, 2.0]
    assert torch.equal(fp8.dequantize(kept), fp8.dequantize(even))
    assert regrid(block._replace(scale=torch.tensor([[0.5, 1.0], [2.0, 2.0]])), row) is None
    assert regrid(even, fp8.CastSpec("e4m3", (-1, -1), "fp32")) is None
    one = regrid(block._replace(scale=torch.full((2, 2), 0.25)), fp8.CastSpec("e4m3", (-1, -1), "fp32"))
    assert one.scale.tolist() == [[0.25]]
    ragged = codes_of_frozen(fp8.freeze_weight(torch.randn(192, 320), fp8.CastSpec("e4m3", (64, 160), "pow2")))
    same = ragged._replace(scale=torch.ones(3, 2))
    assert regrid(same, FROZEN["block"]).scale.shape == (2, 3)
    assert regrid(ragged._replace(scale=torch.tensor([[1.0, 1], [2, 2], [4, 4]])), FROZEN["block"]) is None
    assert regrid(ragged._replace(spec=fp8.CastSpec("e5m2", (64, 160), "pow2")), FROZEN["block"]) is None


# The command --------------------------------------------------------------------------------------------------------


def test_command_prints_its_outcome(place, tmp_path, capsys):
    assert ({*FORMATS, "fp8"}, INCLUDABLE) == ({*command.FORMATS}, command.INCLUDE)
    out = str(tmp_path / "out")
    arguments = ["export", str(place / "model"), out, "--format", "fp8-tensor", "--max-shard-size", "300KB"]
    assert main([*arguments, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "wrote" in captured.out and "part of the image_encoder" in captured.out and captured.err == ""
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    assert main([*arguments, "--include", "image_encoder", "image_projector", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["format"] == "fp8-tensor" and data["codes"]["cast"] == 26 and data["codes_written_in_bf16"] == {}
    kind = data["kinds"]["model.language_model.layers.*.mlp.up_proj.weight"]
    assert kind["cast"] == 2 and 0.01 < kind["relative"] < 0.04 and kind["bytes"] == 2 * (384 * 256 + 4)
    assert json.loads((tmp_path / "out" / MARKER).read_text())["codes"] == data["codes"]


def test_command_rejects_invalid_arguments(place, tmp_path, capsys):
    model, out = str(place / "model"), str(tmp_path / "out")
    for arguments, code, words in (
        ([model, out], 2, "--format"),
        ([model, out, "--format", "fp4"], 2, "'fp4' is none of bf16"),
        ([model, out, "--format", "bf16", "--max-shard-size", "many"], 2, "expected a size such as 5GB"),
        ([model, out, "--format", "bf16", "--device", "abacus"], 2, "is not a device"),
        ([model, out, "--format", "bf16", "--step", "3"], 1, "is not a run directory"),
        ([str(tmp_path / "none"), out, "--format", "bf16"], 1, "there is no folder"),
        ([model, model, "--format", "bf16"], 1, "is the folder that is exported"),
    ):
        assert main(["export", *arguments]) == code, arguments
        assert words in capsys.readouterr().err, arguments
    assert list(tmp_path.iterdir()) == []
