"""What a path holds: runs, folders and adapters are told apart and opened alike; everything else gets a sentence."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from octavo import adapters, fp8, models, train
from octavo.checkpoint.export import export
from octavo.checkpoint.export.values import iter_values
from octavo.fp8.metrics import calc_diff
from octavo.fp8.weights import codes_of_frozen, frozen_weights
from octavo.train import TrainError, artifacts
from octavo.train.artifacts import load_target

LORA = ("model.load_in_fp8=row", "lora={rank: 2}", "fp8.recipe=rowwise", "run.hf=true")


@pytest.fixture(scope="session")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `full/` (a run of all weights), `lora/` (adapters over row codes), `fp8/` (the model in blocks)."""
    from octavo.config import load_config_text

    home = tmp_path_factory.mktemp("runs")
    for name, overrides in (("full", ()), ("lora", LORA)):
        text = f"""
model: {{path: {place / "tiny"}}}
data:
  train: [{{path: {place / "digits/train.json"}}}]
  eval: [{{path: {place / "digits/test.json"}}}]
train: {{steps: 2, seq_length: 128, micro_batch: 2, global_batch: 2, lr: 2e-2}}
run: {{dir: {home / name}, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
        train.run(load_config_text(text, overrides))
    export(iter_values(models.load(place / "tiny")), place / "tiny", home / "fp8", "fp8-block")
    return home


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12).reshape(1, 12), use_cache=False).logits.float()


def test_inspect_target_identifies_each_kind(runs, place):
    full, lora = artifacts.inspect_target(runs / "full"), artifacts.inspect_target(runs / "lora")
    assert (full.kind, full.lora, full.kinds) == ("run", False, {})
    assert (lora.kind, lora.lora, lora.kinds) == ("run", True, {"foundation": "row"})
    plain, coded = artifacts.inspect_target(place / "tiny"), artifacts.inspect_target(runs / "fp8")
    assert (plain.kind, plain.quantization) == ("folder", None)
    assert (coded.kind, str(coded.quantization)) == ("folder", "fp8 block 128x128")
    worn = artifacts.inspect_target(runs / "lora" / "adapter")
    assert (worn.kind, worn.lora, worn.base.resolve()) == ("adapter", True, (place / "tiny").resolve())
    assert "trained on rowwise codes of its base: --load-in-fp8 rowwise uses them again" in worn.notes[0]
    assert artifacts.inspect_target(runs / "lora" / "adapter", runs / "fp8").base == runs / "fp8"
    assert artifacts.inspect_target(runs / "lora", runs / "fp8").moved


def test_a_lora_run_opens_with_the_codes_that_it_trained_over(runs):
    model, _, notes = artifacts.inspect_target(runs / "lora").open()
    assert {codes_of_frozen(w).spec.block for _, w in frozen_weights(model)} == {(1, -1)}
    assert any(
        float(p.detach().abs().max()) > 0 for n, p in adapters.adapter_parameters(model) if "lora_B" in n
    )  # trained
    assert notes[0] == "step 2" and "rowwise on" in notes[1] and "frozen codes" in notes[1]
    with fp8.count_gemms() as counts:
        logits(model)
    assert counts.total(fp8=True) > 0


def test_the_adapter_folder_computes_as_its_run(runs):
    run, _, _ = artifacts.inspect_target(runs / "lora").open()
    worn, _, notes = artifacts.inspect_target(runs / "lora/adapter").open(load_in_fp8="row", dtype=torch.bfloat16)
    assert torch.equal(logits(run), logits(worn))
    assert "frozen codes" in notes[-1]
    other, _, _ = artifacts.inspect_target(runs / "lora/adapter").open(dtype=torch.bfloat16)
    assert not list(frozen_weights(other))  # the base as its folder has it
    assert calc_diff(logits(run), logits(other)) < 1e-2


def test_codes_are_multiplied_as_they_are_or_dequantized(runs):
    found = artifacts.inspect_target(runs / "fp8")
    kernels, _, (note,) = found.open(backend="reference")
    assert "blockwise on reference" in note
    same, _, _ = found.open(recipe="off")
    assert fp8.fingerprint(same) == fp8.fingerprint(kernels) != {}
    values, _, _ = found.open(load_in_fp8="off")
    assert not list(frozen_weights(values))
    assert torch.equal(logits(same), logits(values))  # the reference is the dequantized model
    assert 0 < calc_diff(logits(kernels), logits(values)) < 1e-2
    with fp8.count_gemms() as counts:
        logits(same)
    assert counts.total(fp8=True) == 0


def test_only_the_layers_with_codes_run_in_fp8(runs):
    """Layers that an export left in high precision stay there under the fitting recipe."""
    model = models.load(runs / "fp8")
    family = models.describe(model.config)
    policy = load_target.make_fitting_policy(model, family)
    assert policy is not None and policy.recipe == "off"
    plan = fp8.plan(model, policy, family.components)
    coded = {name.removesuffix(".weight") for name, _ in frozen_weights(model)}
    assert {row.name for row in plan.rows if row.fp8} == coded
    assert load_target.make_fitting_policy(models.load(runs / "full/../fp8", keep_fp8=False), family) is None


def test_a_full_run_takes_another_recipe_and_no_other_base(runs):
    found = artifacts.inspect_target(runs / "full")
    assert "blockwise on" in found.open(step=2).notes[1]
    assert found.open(recipe="off").notes == ("step 2", "high precision")
    with pytest.raises(TrainError, match="load_in_fp8 quantizes a frozen base, but .*full trained all weights"):
        found.open(load_in_fp8="row")
    with pytest.raises(TrainError, match="a base was given .* trained all weights: only adapters have a base"):
        artifacts.inspect_target(runs / "full", runs / "fp8")
    with pytest.raises(TrainError, match="has no checkpoint of step 9; there are 2"):
        found.open(step=9)


def test_a_base_that_changed_since_is_refused(runs, tmp_path, place):
    shutil.copytree(place / "tiny", tmp_path / "base")
    shutil.copytree(runs / "lora", tmp_path / "run")
    text = (tmp_path / "run/config.yaml").read_text().replace(str(place / "tiny"), str(tmp_path / "base"))
    (tmp_path / "run/config.yaml").write_text(text)
    artifacts.inspect_target(tmp_path / "run").open()
    file = tmp_path / "base/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 64
    file.write_bytes(data)
    with pytest.raises(TrainError, match="is not the one with which .* was trained"):
        artifacts.inspect_target(tmp_path / "run").open()


def test_both_bases_are_compared(runs):
    found = artifacts.inspect_target(runs / "lora")
    result = artifacts.compare_bases(found)
    assert [row["base"] for row in result["bases"]] == ["fp8", "fp8, dequantized", "high precision"]
    assert result["bases"][0]["fp8_gemms"] > 0 == result["bases"][1]["fp8_gemms"] == result["bases"][2]["fp8_gemms"]
    first, last = result["bases"][0], result["bases"][2]
    assert result["gap"]["loss"] == first["loss"] - last["loss"] and abs(result["gap"]["loss"]) < 0.1
    assert 0.01 < result["weights"]["relative"] < 0.05 and 25 < result["weights"]["sqnr_db"] < 40
    assert artifacts.evaluate_target(found)["loss"] == first["loss"]
    assert math.isfinite(artifacts.compare_bases(found, recipe="off")["gap"]["exact_match"])


def test_compare_bases_rejects_targets_with_one_base(runs, place):
    with pytest.raises(TrainError, match="has no adapters, so there are no two bases to compare"):
        artifacts.compare_bases(artifacts.inspect_target(runs / "full"))
    with pytest.raises(TrainError, match="has FP8 codes .* and no high-precision weights"):
        artifacts.compare_bases(artifacts.inspect_target(runs / "lora", runs / "fp8"))
    outside = runs / "worn"
    if not outside.exists():
        shutil.copytree(runs / "lora/adapter", outside)
    cfg = load_target.read_run_config(runs / "lora")
    with pytest.raises(TrainError, match="was not trained on an FP8 base, and none is requested"):
        artifacts.compare_bases(artifacts.inspect_target(outside, place / "tiny"), cfg)
    assert artifacts.compare_bases(
        artifacts.inspect_target(outside, place / "tiny"), cfg, load_in_fp8="block", recipe="off"
    )["gap"]


def test_a_folder_is_evaluated_on_the_data_of_a_configuration(runs, place):
    found, cfg = artifacts.inspect_target(runs / "fp8"), load_target.read_run_config(runs / "full")
    with pytest.raises(TrainError, match="has no held-out data: give a configuration"):
        artifacts.evaluate_target(found)
    done: list[tuple[int, int]] = []
    result = artifacts.evaluate_target(found, cfg, progress=lambda n, total: done.append((n, total)))
    assert "step" not in result and result["questions"] > 0 and result["fp8_gemms"] > 0
    assert done[-1][0] == done[-1][1] == len(done)


@pytest.mark.parametrize(
    "files, words",
    [
        ({}, "it is empty"),
        (
            {"notes.txt": ""},
            r"it has no config.yaml, config.json is missing, and so is adapter_config.json. It holds no",
        ),
        ({"model.safetensors": ""}, "there are weights, but it has no config.yaml"),
        ({".metadata": "", "__0_0.distcp": ""}, "but a DCP checkpoint .*octavo convert dcp_to_hf"),
        ({".metadata": "", "state.json": ""}, "but a checkpoint of the run .* --step 7"),
        ({"adapter_config.json": "{}", "adapter_model.bin": ""}, "only adapter_model.bin: a pickle can run code"),
        ({"adapter_config.json": "{}"}, "it is not a complete PEFT adapter"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "Qwen/Q"}', "adapter_model.safetensors": ""},
            "its adapter_config.json names 'Qwen/Q', which is not .*--base FOLDER",
        ),
        (
            {"adapter_config.json": "{}", "config.json": "{}", "model.safetensors": ""},
            "holds a model .* and an adapter .* so it is ambiguous",
        ),
        ({"adapter_config.json": "no", "adapter_model.safetensors": ""}, "is not JSON"),
        ({"config.json": "{"}, "is not JSON"),
        ({"config.json": json.dumps({"quantization_config": {"quant_method": "awq"}})}, "quant_method 'awq'"),
    ],
)
def test_unknown_folders_have_a_specific_error(tmp_path, files, words):
    folder = tmp_path / "run" / "checkpoints" / "step_7"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises((TrainError, models.ModelError), match=words):
        artifacts.inspect_target(folder)


def test_paths_that_are_no_folders(tmp_path, runs):
    (tmp_path / "run.yaml").write_text("")
    (tmp_path / "model.safetensors").write_text("")
    for path, words in (
        ("run.yaml", "is a configuration; name its run directory"),
        ("model.safetensors", "is a file; name the folder"),
        ("nowhere", "there is no folder"),
    ):
        with pytest.raises(TrainError, match=words):
            artifacts.inspect_target(tmp_path / path)
    with pytest.raises(TrainError, match="Octavo only reads local folders: download the model first"):
        artifacts.inspect_target("Qwen/Qwen3-VL-8B-Instruct")
    with pytest.raises(TrainError, match="folder of a run's checkpoints; name the run"):
        artifacts.inspect_target(runs / "full/checkpoints")
    with pytest.raises(TrainError, match="is not a complete Hugging Face folder. Name a local"):
        artifacts.inspect_target(runs / "lora", tmp_path)
    with pytest.raises(TrainError, match="is a whole model: only adapters have a base"):
        artifacts.inspect_target(runs / "fp8", tmp_path)
