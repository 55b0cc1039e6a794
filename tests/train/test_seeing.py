"""Every family that sees learns from handwriting in FP8, and stock transformers reads what it leaves."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from octavo import fp8, models, train
from octavo.base.model_families import trained_families
from octavo.models.tiny import tiny
from tests.models.conftest import batch

from .conftest import Make

STEPS = 20


class Logits(train.Callback):
    """What the trained model makes of a question about an image, in high precision."""

    def end(self, run: train.Run, result: train.RunResult) -> None:
        self.inputs = batch(models.load_processor(run.cfg.model.path), image=True)
        run.model.eval()
        with fp8.high_precision(run.model), torch.no_grad():
            self.found = run.model(**self.inputs).logits


@pytest.mark.long
@pytest.mark.parametrize("family", trained_families("images"))
def test_it_trains_and_stock_transformers_gives_its_logits(family, make: Make, tmp_path):
    tiny.write(family, tmp_path / "tiny", size="mini")
    cfg = make(
        f"model.path={tmp_path / 'tiny'}", f"train.steps={STEPS}", "train.seq_length=256", "data.eval=[]", "run.hf=true"
    )
    seen = Logits()
    result = train.run(cfg, callbacks=[seen])
    losses = list(result.losses().values())
    assert len(losses) == STEPS and sum(losses[-5:]) < 0.7 * sum(losses[:5])
    proof = json.loads((result.dir / "proof.json").read_text())
    least = 0.98 if family == "qwen3_5_moe" else 0.99  # routers, and gates of its recurrence, stay
    assert proof["share"] > least and not proof["missing"] and not proof["pending"]
    assert {"image_encoder", "foundation", "lm_head"} <= set(proof["components"])
    stock = AutoModelForImageTextToText.from_pretrained(result.dir / "hf").eval()
    with torch.no_grad():
        assert torch.equal(stock(**seen.inputs).logits, seen.found)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llava_onevision", "mistral3"])
def test_a_layer_whose_output_nobody_takes_is_told_and_stays(family, make: Make, tmp_path):
    """LLaVA's kin take what the last layer but one of the tower puts out: the last has no gradient, and no GEMM of
    its backward is missed."""
    folder = tiny.write(family, tmp_path / "tiny", size="mini")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_feature_layer": -2}))
    result = train.run(
        make(f"model.path={folder}", "train.steps=3", "train.seq_length=256", "data.eval=[]", "run.hf=true")
    )
    proof = json.loads((result.dir / "proof.json").read_text())
    assert proof["share"] > 0.99 and not proof["missing"] and not proof["pending"]
    last = ".layers.1."
    assert proof["unused"] and all(last in name for name in proof["unused"])
    before, after = (models.load(path).state_dict() for path in (folder, result.dir / "hf"))
    tower = {name for name in before if "vision_tower" in name and ".layers." in name}
    assert {name for name in tower if torch.equal(before[name], after[name])} == {n for n in tower if last in n}
