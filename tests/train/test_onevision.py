"""LLaVA-OneVision-1.5 from a folder as it is published to a trained model: in FP8, proven, written, read and asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from octavo import train
from octavo.cli.main import main
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from tests.models.conftest import batch
from tests.models.published import as_published

STEPS = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ as published, digits/."""
    folder = tmp_path_factory.mktemp("onevision")
    as_published(tiny.write("llavaonevision1_5", folder / "tiny", size="mini"), folder / "model")
    digits.write(folder / "digits", train=48, test=8)
    return folder


@pytest.mark.long
def test_twenty_steps_in_fp8(make, place: Path, capsys):
    cfg = make(f"model.path={place / 'model'}", f"train.steps={STEPS}", "run.hf=true", "data.packing=true",
               "train.micro_batch=1", "train.global_batch=2", "fp8.activations=fp8", "optimizer.states=fp8",
    )  # fmt: skip
    result = train.run(cfg)
    losses = list(result.losses().values())
    assert (result.status, len(losses)) == ("finished", STEPS)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    proof = json.loads((result.dir / "proof.json").read_text())
    assert not proof["missing"] and not proof["pending"]
    assert all(proof["shares"][part] == 1.0 for part in ("foundation", "image_encoder", "image_projector"))

    hf = result.dir / "hf"
    assert not list(hf.glob("*.py")) and "auto_map" not in json.loads((hf / "config.json").read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "model", hf))
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and still == {"visual.class_embedding", "visual.class_pos_emb"}
    ours, processor, _ = train.load_run(result.dir, recipe="off")
    inputs = batch(processor, image=True)
    with torch.no_grad():
        stock = AutoModelForImageTextToText.from_pretrained(hf)(**inputs).logits
        assert torch.equal(ours(**inputs).logits, stock)

    image = str(next((place / "digits").rglob("*.png")))
    for source in (result.dir, hf):
        capsys.readouterr()
        ask = ["--prompt", "first?", "--image", image, "--max-new-tokens", "3", "--json"]
        assert main(["generate", str(source), *ask]) == 0
        assert json.loads(capsys.readouterr().out)


def test_a_recipe_for_each_component(make, place: Path):
    cfg = make(f"model.path={place / 'model'}", "train.steps=2", "train.warmup=0", "data.eval=[]",
               "fp8={recipe: rowwise, image_encoder: {recipe: tensorwise}, image_projector: {recipe: off}}",
    )  # fmt: skip
    proof = json.loads((train.run(cfg).dir / "proof.json").read_text())
    assert proof["shares"] == {"foundation": 1.0, "image_encoder": 1.0, "image_projector": 0.0}
    assert not proof["missing"]
