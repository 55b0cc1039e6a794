"""Held-out figures against what the model answers when it generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from octavo import data, models, train
from octavo.train.forward.losses import IGNORE


@pytest.fixture(scope="module")
def learned(place: Path, tmp_path_factory: pytest.TempPathFactory):
    """A model that has seen its eight conversations so often that it gets some of them right."""
    from octavo.config import load_config

    rows = f"{{path: {place / 'digits/train.json'}, max_samples: 8}}"
    cfg = load_config(None, [
        f"model.path={place / 'tiny'}", f"data.train=[{rows}]", f"data.eval=[{rows}]", "fp8.recipe=off",
        "train.steps=40", "train.seq_length=128", "train.micro_batch=8", "train.global_batch=8", "train.lr=5e-3",
        f"run.dir={tmp_path_factory.mktemp('learned') / 'run'}", "run.tensorboard=false", "run.hf=false",
        "run.threads=1",
    ])  # fmt: skip
    result = train.run(cfg)
    model, processor, cfg = train.load_run(result.dir)
    return cfg, result, model, processor


def test_exact_match_is_the_greedy_answer(learned, place: Path):
    """First questions alone: with later ones, teacher forcing shows the true earlier answers."""
    cfg, _, model, processor = learned
    evalset = data.eval_set(cfg, processor, micro_batch=1)
    right = []
    for batch in evalset:
        with torch.no_grad():
            logits = model(**{k: v for k, v in batch.items() if k not in ("meta", "labels")}, use_cache=False).logits
        start, end = batch["meta"].answers[0][0]
        right.append(torch.equal(logits[0, start - 1 : end - 1].argmax(-1), batch["input_ids"][0, start:end]))
    rows = [evalset.sources[0][row] for row in range(8)]
    for row, forced in zip(rows, right, strict=True):
        question, answer = row.turns[0].text, row.turns[1].text
        with Image.open(row.images[0]) as image:
            asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
            generated = models.generate(model, processor, asked, [image.copy()], max_new_tokens=4)
        assert (generated == answer) is forced
    assert any(right)


def test_loss_is_the_mean_over_loss_tokens(learned):
    cfg, result, model, processor = learned
    total, count = 0.0, 0
    for batch in data.eval_set(cfg, processor, micro_batch=3):
        with torch.no_grad():
            logits = model(**{k: v for k, v in batch.items() if k not in ("meta", "labels")}, use_cache=False).logits
        logs = logits.double().log_softmax(-1)
        for b, t in (batch["labels"] != IGNORE).nonzero().tolist():
            total -= float(logs[b, t - 1, batch["labels"][b, t]])
            count += 1
    found = train.evaluate(model, data.eval_set(cfg, processor))
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert (found["tokens"], found["questions"]) == (count, 32)
    assert result.eval["exact_match"] == found["exact_match"] > 0


def test_the_batch_size_changes_no_figure_and_the_mode_returns(learned):
    cfg, _, model, processor = learned
    model.train()
    one, eight = (train.evaluate(model, data.eval_set(cfg, processor, micro_batch=n)) for n in (1, 8))
    assert model.training
    model.eval()
    assert one["exact_match"] == eight["exact_match"]
    assert one["loss"] == pytest.approx(eight["loss"], rel=1e-5)


def test_a_run_without_held_out_data_says_so(make):
    result = train.run(make("data.eval=[]", "train.steps=1", "train.warmup=0"))
    assert result.eval is None
    with pytest.raises(train.TrainError, match="has no held-out data; give a configuration"):
        train.evaluate_run(result.dir)
