"""The trial of LoRA: what base each run trains beside, and what the verdict and the ablation say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_runs import GOOD_PROOF, losses, write_run

from octavo.config import Config, load_config_text
from octavo.report.evidence.run_reader import read
from octavo.report.evidence.trial_spec import Run
from octavo.report.trial.judge import _health_checks, high_precision_dtype
from octavo.report.trial.memory_savings import ablation, describe_lora_base, without_savings
from octavo.report.trial.runs import make_runs

TEXT = """
model: {{path: {path}{more}}}
data: {{train: [{{path: a.json}}]}}
train: {{steps: 10}}
lora: {lora}
"""


def config(more: str = ", load_in_fp8: block", lora: str = "{}", path: str | Path = "./m", rest: str = "") -> Config:
    return load_config_text(TEXT.format(path=path, more=more, lora=lora) + rest)


def test_high_precision_trains_the_same_adapters_on_a_bf16_base(tmp_path: Path) -> None:
    cfg = config(lora="{rank: 4, dtype: bf16}", rest="optimizer: {master: bf16+sr}\n")
    trial = make_runs(cfg, None, tmp_path)
    record = read(write_run(tmp_path / "run", losses(50)))
    assert {high_precision_dtype(run, record) for run in trial} == {"bf16"}  # also on a CPU
    runs = {run.name: run.cfg for run in trial}
    reference, fp8 = runs["high-precision"], runs["fp8-blockwise"]
    assert reference.lora is not None and reference.lora.rank == 4
    assert (reference.lora.dtype, reference.optimizer.master) == ("fp32", "fp32")
    assert reference.model.load_in_fp8.foundation is None and reference.fp8.recipe == "off"
    assert (fp8.model.load_in_fp8.foundation, fp8.fp8.recipe) == ("blockwise", "blockwise")
    assert [describe_lora_base(c) for c in (reference, fp8)] == ["base in BF16", "base in FP8 (blockwise)"]
    assert runs["high-precision-seed-1"].run.seed == 1


def test_fp8_base_is_a_setting_of_the_ablation() -> None:
    cfg = config(lora="{dtype: bf16}", rest="optimizer: {master: bf16+sr, states: fp8}\n")
    found = ablation(cfg)
    assert [words for words, _ in found] == [
        "FP8 without savings",
        "+ base in FP8 (blockwise)",
        "+ optimizer states in fp8",
    ]
    assert found[0][1].model.load_in_fp8.foundation is None and found[0][1].fp8.recipe == "blockwise"
    assert found[1][1].model.load_in_fp8.foundation == "blockwise" and found[1][1].optimizer.states == "fp32"
    assert found[2][1].optimizer.states == "fp8" and found[2][1].lora.dtype == "fp32"
    assert ablation(config(more="")) == []


def test_each_recipe_quantizes_the_base_to_its_codes(tmp_path: Path) -> None:
    runs = {run.name: run.cfg for run in make_runs(config(), ["rowwise", "delayed", "mxfp8"], tmp_path)}
    kinds = {name: cfg.model.load_in_fp8.foundation for name, cfg in runs.items() if name.startswith("fp8-")}
    assert kinds == {"fp8-rowwise": "rowwise", "fp8-delayed": "tensorwise", "fp8-mxfp8": None}


def test_fp8_checkpoint_is_dequantized_for_high_precision(tmp_path: Path) -> None:
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": block}))
    cfg = config(more="", path=tmp_path)
    assert describe_lora_base(cfg) == "base in FP8 (blockwise, as in its checkpoint)"
    plain = without_savings(cfg)
    assert not plain.model.keep_fp8 and describe_lora_base(plain) == "base in BF16"


@pytest.mark.parametrize(("rest", "words"), [("", ""), ("fp8: {recipe: off}\n", "")])
def test_full_training_has_no_base_description(rest: str, words: str) -> None:
    cfg = load_config_text("model: {path: ./m}\ndata: {train: [{path: a.json}]}\ntrain: {steps: 10}\n" + rest)
    assert describe_lora_base(cfg) == words and ablation(cfg) == []


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_layers_have_no_weight_gradient_checks(tmp_path: Path, frozen: bool) -> None:
    """Neither a run of LoRA nor one whose only FP8 layers are frozen lacks a figure; one that trains them does."""
    recipe = {"name": "blockwise", "format": "e4m3", "fwd": "fp8", "dgrad": "fp8", "wgrad": "fp8"}
    row = {"name": "layers.0.q_proj", "component": "foundation", "kind": "linear", "shape": [8, 8], "recipe": recipe}
    high = {**row, "name": "layers.1.q_proj", "recipe": None, "frozen": False}
    operand = {"sqnr": 31.0, "underflow": 0.0, "saturation": 0.0}
    seen = {"layers.0.q_proj": {"x": operand, "w": operand, "dy": operand, "nan_codes": 0}}
    planned = {"rows": [{**row, "frozen": frozen}, high]}
    record = read(write_run(tmp_path / "run", losses(50), tables={25: seen}, plan_json=planned, proof=GOOD_PROOF))
    run = Run("fp8", "FP8 blockwise", "fp8", config())
    checks = {check.name: check for check in _health_checks(run, record)}
    for name in ("dw_cosine", "underflow_wgrad") if frozen else ():
        assert checks[name].status == "pass" and checks[name].shown == "none"
        assert checks[name].sentence == "no weight gradients: every FP8 layer is frozen"
    if not frozen:
        assert checks["dw_cosine"].status == "warn" and "no health figures" in checks["dw_cosine"].sentence
    assert checks["sqnr_e4m3"].status == "pass"
