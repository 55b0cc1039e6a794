"""Pretraining: a model from config.json alone on plain text, and one that sees on captions and documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octavo import data, models, train
from octavo.config import ConfigError
from octavo.train import artifacts
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup.resolve_config import resolve_steps
from tests.train.test_ranks import losses, on_ranks

pytestmark = pytest.mark.usefixtures("bare_forward")

TEXT = [f"{n} green bottles hanging on the wall, and if {n - 1} should fall ...\n" * 4 for n in range(2, 40)]


@pytest.fixture
def pretrain(make, place, tmp_path, monkeypatch):
    """make() for phase pretrain: a model folder without weights, and plain text of 38 documents, 8 held out."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    for part, rows in (("train", TEXT[:30]), ("test", TEXT[30:])):
        lines = (json.dumps({"text": text, "source": f"{part}-{n}"}) for n, text in enumerate(rows))
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    for name in ("text", "tiny"):
        shutil.copytree(place / name, tmp_path / name, ignore=lambda _, names: [n for n in names if "safetensors" in n])

    def build(*overrides, model="text", dir="run"):
        sets = (("train", "train.jsonl"), ("eval", "test.jsonl"))
        data = [f"data.{part}=[{{path: {tmp_path / name}}}]" for part, name in sets]
        settings = (
            "train.phase=pretrain",
            f"model.path={tmp_path / model}",
            "model.init=random",
            "train.seq_length=48",
        )
        return make(*settings, *data, *overrides, dir=dir)

    return build


def test_an_epoch_of_joined_documents_is_all_their_tokens_once(pretrain):
    cfg = pretrain("train.epochs=2", "train.steps=null", "train.warmup=0")
    counted = resolve_steps(cfg)
    samples = len(data.train_loader(counted, models.load_processor(cfg.model.path)).mixture.sources[0])
    assert samples > 60 and counted.train.steps == -(-2 * samples // cfg.train.global_batch)  # 30 documents


def test_text_from_nothing_learns_goes_on_to_the_bit_and_is_a_model(pretrain, tmp_path):
    cfg = pretrain("run.save_every=3", "run.keep=9", "run.hf=true", "train.lr=1e-2")
    result = train.run(cfg)
    rows = read_rows(Path(cfg.run.dir) / "metrics.jsonl")
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"] and all(row["tokens"] == 4 * 48 for row in rows)
    assert all(row["loss_tokens"] == 4 * 47 for row in rows)
    assert result.eval["loss"] < rows[0]["loss"] and result.eval["questions"] == 0 and "exact_match" not in result.eval
    resumed = train.run(pretrain(f"run.resume={cfg.run.dir}/checkpoints/step_3", "train.lr=1e-2", dir="after"))
    assert list(resumed.losses().values()) == losses(cfg)[3:]
    assert models.load(Path(cfg.run.dir) / "hf").config.model_type == "qwen3"
    # the run is a model though its base has no weights, and is judged as it was
    pieces: list = []
    found = artifacts.evaluate_target(artifacts.inspect_target(cfg.run.dir), pieces=pieces)
    assert found["loss"] == pytest.approx(result.eval["loss"], rel=1e-6) and found["questions"] == 0
    assert sum(piece["tokens"] for piece in pieces) == found["tokens"]
    apart = artifacts.evaluate_target(
        artifacts.inspect_target(cfg.run.dir), pretrain("data.join=false", "train.seq_length=512")
    )
    assert apart["tokens"] > found["tokens"] and 0.5 < apart["loss"] / found["loss"] < 2


def test_captions_documents_and_talk_side_by_side(pretrain, place, tmp_path):
    digits = json.loads((place / "digits" / "train.json").read_text())
    image = place / "digits"
    captions = [{"image": row["image"], "text": f"Digits {n}."} for n, row in enumerate(digits[:8])]
    mixed = [{"texts": ["First: ", None, " then ", None], "images": [None, a["image"], None, b["image"]]}
             for a, b in zip(digits[::2], digits[1::2], strict=True)]  # fmt: skip
    for name, rows in (("captions", captions), ("mixed", mixed), ("talk", digits)):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    sets = [f"{{path: {tmp_path / name}.json, images: {image}}}" for name in ("captions", "mixed", "talk")]
    data = f"data.train=[{', '.join(sets)}, {{path: {tmp_path / 'train.jsonl'}}}]"
    cfg = pretrain(data, f"data.eval=[{sets[0]}, {sets[2]}]", "train.seq_length=128", "train.steps=4", model="tiny")
    result = train.run(cfg)
    first, *_, last = losses(cfg)
    assert last < first and result.eval["questions"] == 4 * len(digits) and "exact_match" in result.eval


def test_what_random_weights_cannot_be_beside_is_refused(pretrain):
    wrong = {
        "lora={}": r"model.init: adapters need a trained base",
        "model.freeze=[lm_head]": r"model.init: frozen parts would keep their random weights",
        "train.phase=preference": r"model.init: phase preference needs a trained model",
        "model.init=checkpoint model.init_std=0.1": r"model.init_std: has no effect on the weights of a checkpoint",
        "train.phase=sft data.join=false": r"data.join: phase sft does not join rows",
    }
    for settings, found in wrong.items():
        with pytest.raises(ConfigError, match=found):
            pretrain(*settings.split())
    with pytest.raises(ConfigError, match="frozen codes of random weights would never be trained"):
        pretrain("model.load_in_fp8=rowwise", "lora={}")


@pytest.mark.long
def test_two_ranks_begin_with_the_weights_of_one(pretrain):
    one, two = pretrain(dir="one"), pretrain(dir="two")
    train.run(one)
    on_ranks(two)
    assert losses(two)[0] == pytest.approx(losses(one)[0], rel=1e-6)
    assert losses(two) == pytest.approx(losses(one), rel=3e-3)
