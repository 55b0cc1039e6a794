"""NVILA from its tiny checkpoints: twenty steps in FP8, what is written read back, and answers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from octavo import models, train
from octavo.checkpoint.verify import verify
from octavo.models.tiny import tiny
from octavo.train.artifacts import merge_model
from tests.models.conftest import batch, conversation, some_image
from tests.models.published import as_published
from tests.models.three_folders import split


def tensors(folder) -> dict[str, torch.Tensor]:
    """Those of all files, named after the folder inside too."""
    found = {}
    for file in sorted(folder.rglob("*.safetensors")):
        place = file.relative_to(folder).parent
        with safe_open(file, "pt") as opened:
            found |= {str(place / name): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def unread(name: str) -> bool:
    return "encoder.layers.2." in name or "post_layernorm" in name


@pytest.mark.long
@pytest.mark.parametrize(("family", "parts"), [("nvila_lite", False), ("nvila_lite", True), ("nvila", False)])
def test_twenty_steps(make, tmp_path, family: str, parts: bool) -> None:
    folder = tiny.write(family, tmp_path / "one", size="mini")
    weights = load_file(folder / "model.safetensors")
    drawn = {name: torch.randn_like(value).bfloat16().float() for name, value in weights.items() if unread(name)}
    save_file(weights | drawn, folder / "model.safetensors", {"format": "pt"})
    if parts:
        folder = split(folder, tmp_path / "three")
    cfg = make(f"model.path={folder}", "train.steps=20", "run.hf=true", "fp8.activations=fp8", "data.max_pixels=1536")
    train.run(cfg)
    run = tmp_path / "run"
    proof = json.loads((run / "proof.json").read_text())
    assert proof["share"] == 1.0 and not proof["missing"] and not proof["unused"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0] / 2
    before, after = tensors(folder), tensors(run / "hf")
    assert list(before) == list(after)
    kept = [name for name in before if unread(name)]
    assert len(kept) == len(drawn) == 18 and all(torch.equal(before[name].float(), after[name]) for name in kept)
    mine, processor = models.load(run / "hf"), models.load_processor(run / "hf")
    inputs = batch(processor, image=True)
    if not parts:
        stock = AutoModelForImageTextToText.from_pretrained(run / "hf")
        with torch.no_grad():
            assert torch.equal(mine(**inputs).logits, stock(**inputs).logits)
    assert isinstance(models.generate(mine, processor, conversation(True)[:1], [some_image()], 4), str)


@pytest.mark.long
@pytest.mark.parametrize("family", ["nvila", "llavaonevision1_5"])
def test_an_adapter_is_merged_into_one_folder(make, tmp_path, family: str) -> None:
    """Over folders as they are published: NVILA's three, whose run would have no model to serve else, and one that
    names code of its authors."""
    tiny.write(family, tmp_path / "one", size="mini")
    if family == "nvila":
        more = {"image_aspect_ratio": "dynamic_s2", "s2_scales": "16,32"}
        base = split(tmp_path / "one", tmp_path / "base", more)
    else:
        base = as_published(tmp_path / "one", tmp_path / "base")
    cfg = make(f"model.path={base}", "train.steps=3", "train.lr=0.05", "train.warmup=0", "data.eval=[]",
               "lora={rank: 4, targets: [foundation, image_encoder, image_projector]}")  # fmt: skip
    run = train.run(cfg).dir
    merged = merge_model(run, tmp_path / "merged").exported.directory
    assert verify(merged).ok and not any(file.is_dir() for file in merged.iterdir())
    ours, processor, _ = train.load_run(run, recipe="off")
    inputs = batch(models.load_processor(merged), image=True)
    assert torch.equal(inputs["input_ids"], batch(processor, image=True)["input_ids"])
    with torch.no_grad():
        wanted, found, before = (m(**inputs).logits for m in (ours, models.load(merged), models.load(base)))
    scale = (wanted - before).norm()
    assert scale > 0.1 * before.norm() and (found - wanted).norm() < 0.02 * scale
