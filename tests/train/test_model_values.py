"""Model folders that load and compute something else than they say: refused by all commands alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import models
from octavo.checkpoint import verify
from octavo.cli.main import main
from octavo.config import Config, to_yaml
from octavo.models import ModelError

pytestmark = pytest.mark.usefixtures("unseen", "uncounted")
WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "text", tmp_path / "model"))


def edit(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def integers(folder: Path) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    held[WEIGHT] = (held[WEIGHT] * 1000).round().to(torch.int32)
    save_file(held, file, metadata={"format": "pt"})


def refusals(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """Command -> what it said on its error stream, of those that ended with 1."""
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(make(f"model.path={folder}", "train.steps=1", "train.warmup=0", "data.eval=[]")))
    commands = {
        "plan": [file],
        "train": [file],
        "generate": [folder, "--prompt", "a"],
        "export": [folder, tmp_path / "served", "--format", "fp8-dynamic"],
        "verify": [folder],
    }
    said = {}
    for command, arguments in commands.items():
        code = main([command, *map(str, arguments)])
        captured = capsys.readouterr()
        if code == 1:
            said[command] = captured.out + captured.err
    assert not (tmp_path / "served").exists()
    return said


ALL = {"plan", "train", "generate", "export", "verify"}


def test_integer_weights_are_refused_by_all_commands(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    integers(folder)
    said = refusals(folder, make, tmp_path, capsys)
    assert set(said) == ALL and all(WEIGHT in text for text in said.values())
    with pytest.raises(ModelError, match=f"{WEIGHT} .*is torch.int32"):
        models.load(folder, torch.bfloat16)
    for read in (lambda: models.load(folder, load_in_fp8="row"), lambda: next(models.iter_weights(folder))):
        with pytest.raises(ModelError, match="is torch.int32"):
            read()


def test_integers_that_models_do_hold_are_read(folder: Path) -> None:
    file = folder / "model.safetensors"
    position = {"model.position_ids": torch.arange(4)}
    save_file(load_file(file) | position, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="position_ids"):  # no buffer of this family, so not for its dtype
        models.load(folder)
    models.check_no_integers(folder, models.empty(folder))
    (folder / "model.safetensors").write_bytes(b"cut")  # whoever reads weights says so
    models.check_no_integers(folder, models.empty(folder))
    (folder / "model.safetensors").unlink()
    models.check_no_integers(folder, models.empty(folder))


def test_a_window_below_zero_is_refused_by_all_commands(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, sliding_window=-3)
    said = refusals(folder, make, tmp_path, capsys)
    assert set(said) == ALL
    assert all("gives sliding_window=-3; it must be above 0" in " ".join(text.split()) for text in said.values())


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": -10000.0}, "rope_theta=-10000.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta=-1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor=-2.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0.0}}}, "rope_theta=0.0"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0, 0.0]}}, "long_factor=0.0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ({"text_config": {"sliding_window": -1}}, "sliding_window=-1"),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor=0"),
        ({"rope_parameters": {"partial_rotary_factor": 3.0}}, "partial_rotary_factor=3.0"),
        ({"rope_parameters": {"mrope_section": [-1, 8, 8]}}, "mrope_section=-1"),
        ({"query_pre_attn_scalar": -4}, "query_pre_attn_scalar=-4"),
        ({"num_experts_per_tok": 9, "num_experts": 8}, "num_experts_per_tok=9"),
        ({"text_config": {"moe_k": 9, "moe_num_experts": 8}}, "moe_k=9"),
    ],
)
def test_numbers_that_mean_nothing_are_named(folder: Path, keys: dict[str, Any], named: str) -> None:
    edit(folder, **keys)
    with pytest.raises(ModelError, match=f"config.json gives {named}; it must be"):
        models.empty(folder)
    assert any(named in finding.text for finding in verify(folder, quick=True).failures)


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": None, "use_sliding_window": False},
        {"rope_theta": 10000},
        {"attention_dropout": 0.0, "rms_norm_eps": 1e-5},
        {"logits_factor": -1.0},
        {"num_experts_per_tok": 8, "num_experts": 0},
    ],
)
def test_ordinary_numbers_are_taken(folder: Path, keys: dict[str, Any]) -> None:
    edit(folder, **keys)
    models.empty(folder)


@pytest.mark.parametrize("key", ["image_token_id", "video_token_id"])
def test_a_token_for_images_that_config_json_leaves_out_is_held_against_the_tokenizer(
    place: Path, tmp_path: Path, key: str
) -> None:
    folder = Path(shutil.copytree(place / "tiny", tmp_path / "model"))
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    number = raw.pop(key)
    file.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=f"has no {key}; the default of the model's class is 1516.*has {number}:"):
        models.load_processor(folder)
    assert any(f"has no {key}" in finding.text for finding in verify(folder, quick=True).failures)
    file.write_text(json.dumps({**raw, key: number + 1}))
    with pytest.raises(ModelError, match=f"{key} is {number + 1} in config.json but {number} in tokenizer_config.json"):
        models.load_processor(folder)
    file.write_text(json.dumps({**raw, key: number}))
    models.load_processor(folder)
