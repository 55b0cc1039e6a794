"""The trial of LoRA: what base each arm trains beside, and what the verdict and the ladder say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.config import Config, load_config_text
from octavo.report.compare import arms_of
from octavo.report.savings import base_of, ladder, without

TEXT = """
model: {{path: {path}{more}}}
data: {{train: [{{path: a.json}}]}}
train: {{steps: 10}}
lora: {lora}
"""


def config(more: str = ", load_in_fp8: block", lora: str = "{}", path: str | Path = "./m", rest: str = "") -> Config:
    return load_config_text(TEXT.format(path=path, more=more, lora=lora) + rest)


def test_high_precision_trains_the_same_adapters_beside_a_bf16_base(tmp_path: Path) -> None:
    cfg = config(lora="{rank: 4, dtype: bf16}", rest="optimizer: {master: bf16+sr}\n")
    arms = {arm.name: arm.cfg for arm in arms_of(cfg, None, tmp_path)}
    reference, fp8 = arms["high-precision"], arms["fp8-blockwise"]
    assert reference.lora is not None and reference.lora.rank == 4
    assert (reference.lora.dtype, reference.optimizer.master) == ("fp32", "fp32")
    assert reference.model.load_in_fp8.foundation is None and reference.fp8.recipe == "off"
    assert (fp8.model.load_in_fp8.foundation, fp8.fp8.recipe) == ("block", "blockwise")
    assert [base_of(c) for c in (reference, fp8)] == ["base in BF16", "base in FP8 (block)"]
    assert arms["high-precision-seed-1"].run.seed == 1


def test_the_base_in_fp8_is_a_rung_of_the_ladder() -> None:
    cfg = config(lora="{dtype: bf16}", rest="optimizer: {master: bf16+sr, states: fp8}\n")
    found = ladder(cfg)
    assert [words for words, _ in found] == [
        "FP8 without savings",
        "+ base in FP8 (block)",
        "+ optimizer states in fp8",
    ]
    assert found[0][1].model.load_in_fp8.foundation is None and found[0][1].fp8.recipe == "blockwise"
    assert found[1][1].model.load_in_fp8.foundation == "block" and found[1][1].optimizer.states == "fp32"
    assert found[2][1].optimizer.states == "fp8" and found[2][1].lora.dtype == "fp32"
    assert ladder(config(more="")) == []


def test_other_recipes_get_the_codes_that_they_multiply_by(tmp_path: Path) -> None:
    arms = {arm.name: arm.cfg for arm in arms_of(config(), ["rowwise", "delayed", "mxfp8"], tmp_path)}
    kinds = {name: cfg.model.load_in_fp8.foundation for name, cfg in arms.items() if name.startswith("fp8-")}
    assert kinds == {"fp8-rowwise": "row", "fp8-delayed": "tensor", "fp8-mxfp8": None}


def test_a_checkpoint_in_fp8_is_dequantized_for_high_precision(tmp_path: Path) -> None:
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": block}))
    cfg = config(more="", path=tmp_path)
    assert base_of(cfg) == "base in FP8 (block, as its checkpoint is)"
    plain = without(cfg)
    assert not plain.model.keep_fp8 and base_of(plain) == "base in BF16"


@pytest.mark.parametrize(("rest", "words"), [("", ""), ("fp8: {recipe: off}\n", "")])
def test_without_adapters_nothing_is_said(rest: str, words: str) -> None:
    cfg = load_config_text("model: {path: ./m}\ndata: {train: [{path: a.json}]}\ntrain: {steps: 10}\n" + rest)
    assert base_of(cfg) == words and ladder(cfg) == []
