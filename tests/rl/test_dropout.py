"""Dropout is off wherever log-probabilities are compared: a policy that equals its reference has a margin of 0."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, PhimoeConfig

from octavo import adapters, models, rl
from octavo.config import Config, LoraSection
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.setup.model_setup import assemble_model

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")
Make = Callable[..., Config]


@pytest.fixture
def dropout_config(preference_config: Make, place: Path, tmp_path: Path) -> Make:
    """dropout_config("train.steps=1"): preferences of a text model with an attention dropout of 0.5."""
    folder = tmp_path / "dropout"
    shutil.copytree(place / "text", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    return lambda *overrides, dir="run": preference_config(
        f"model.path={folder}", "fp8.recipe=off", "train.warmup=0", *overrides, dir=dir
    )


def first_row(cfg: Config) -> dict:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")[0]


def notes_of(cfg: Config) -> str:
    """Return the notes about dropout that the run wrote with its plan."""
    notes = json.loads((Path(cfg.run.dir) / "plan.json").read_text())["notes"]
    return " ".join(note for note in notes if "dropout" in note)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        pytest.param((), ["attention_dropout 0.5 ("], id="config.json"),
        pytest.param(("lora={rank: 4, dropout: 0.25}",), ["attention_dropout 0.5", "lora.dropout 0.25"], id="adapters"),
    ],
)
def test_dpo_with_dropout_starts_with_margin_zero_and_notes_disabled_dropout(
    dropout_config: Make, overrides: tuple, named: list[str]
):
    cfg = dropout_config("train.steps=1", *overrides)
    rl.run(cfg)
    row = first_row(cfg)
    assert row["rewards/chosen"] == row["rewards/rejected"] == 0 and row["loss"] == pytest.approx(math.log(2))
    assert all(word in notes_of(cfg) for word in [*named, "train.phase: preference"])
    stored = json.loads((Path(cfg.model.path) / "config.json").read_text())
    assert stored["attention_dropout"] == 0.5, "the model folder must not change"


def test_kto_with_dropout_starts_with_margin_zero(dropout_config: Make, labelled: Path, tmp_path: Path):
    rows = [{name: row[name] for name in ("completion", "label")} for row in json.loads(labelled.read_text())]
    file = tmp_path / "labelled.json"
    file.write_text(json.dumps([{**row, "prompt": "Which digit?"} for row in rows]))
    cfg = dropout_config("preference={loss: kto}", f"data.train=[{{path: {file}}}]", "train.steps=1")
    rl.run(cfg)
    assert first_row(cfg)["kl"] == 0 == first_row(cfg)["rewards/margins"]


def test_trainer_and_rollout_agree_with_dropout(rl_config: Make, dropout_config: Make, tmp_path: Path):
    """The gap between rollout and trainer is rounding, also with a critic on a second adapter."""
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(48)]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    folder = dropout_config().model.path
    overrides = (f"model.path={folder}", f"data.train=[{{path: {tmp_path / 'talk.json'}}}]", "fp8.recipe=off")
    cfg = rl_config(*overrides, "train.steps=1", "train.warmup=0", "rl.algorithm=ppo", "lora={rank: 4, dropout: 0.25}",
                      "train.precision=fp32")  # fmt: skip
    rl.run(cfg)
    assert first_row(cfg)["logp_gap_max"] < 1e-4 and "lora.dropout 0.25" in notes_of(cfg)


def test_sft_keeps_dropout(make: Make, dropout_config: Make, place: Path):
    cfg = make(f"model.path={dropout_config().model.path}", f"data.train=[{{path: {place / 'talk' / 'train.json'}}}]",
               "lora={rank: 4, dropout: 0.25}", "fp8.recipe=off")  # fmt: skip
    plan, family, notes = planning.plan_for(cfg)
    model, _, _ = assemble_model(cfg, torch.device("cpu"), plan, family)
    drops = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert set(drops) == {0.25} and model.model.layers[0].self_attn.attention_dropout == 0.5
    assert not any("dropout is off" in note for note in notes)


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
MOE = {**SMALL, "intermediate_size": 16, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
GPT2 = {"vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        pytest.param(
            GPT2Config(**GPT2, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3),
            {"drop 0.1 (1 module)", "attn_dropout 0.2 (2 modules)", "resid_dropout 0.3 (2 modules)"},
            id="embeddings and residuals",
        ),
        pytest.param(
            MixtralConfig(**MOE, router_jitter_noise=0.4, attention_dropout=0.2),
            {"jitter_noise 0.4 (2 modules)", "attention_dropout 0.2 (2 modules)"},
            id="routers of experts",
        ),
    ],
)
def test_forwards_are_equal_after_dropout_is_switched_off(config, named: set[str]):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(12)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits), "dropout must have an effect"
    words = models.disable_dropout(model)
    assert named <= {*words}, words
    assert torch.equal(model(ids).logits, model(ids).logits) and torch.equal(
        model(ids).logits, model.eval()(ids).logits
    )
    assert models.disable_dropout(model) == words == models.disabled_dropout(model), "a second call keeps the record"


def test_dropout_of_towers_and_adapters_is_switched_off(place: Path):
    model = models.load(place / "tiny", dtype=torch.float32)
    tower = model.model.visual.blocks[0].attn
    tower.attention_dropout = 0.3
    model.config.text_config.layerdrop = 0.2
    family = models.describe(model)
    adapters.attach(model, family, LoraSection(rank=2, dropout=0.25))
    words = " ".join(models.disable_dropout(model))
    assert "attention_dropout 0.3 (1 module)" in words and "lora_dropout 0.25 (" in words
    assert tower.attention_dropout == 0 == model.config.text_config.layerdrop


def test_random_routing_is_rejected():
    config = PhimoeConfig(**MOE, router_jitter_noise=0.01)
    with pytest.raises(
        models.ModelError, match="Phimoe.* samples the expert of each token in training, .*Use train.phase: sft"
    ):
        models.disable_dropout(AutoModelForCausalLM.from_config(config))
