"""Builds batches from a configuration and runs a model on them."""

import pytest
import torch

from octavo.config import load_config_text, override
from octavo.data import collate, eval_set, train_loader
from octavo.data.builtin import digits

YAML = """
model: {{path: {model}}}
data:
  train: [{{path: {folder}/set/train.json}}, {{path: {folder}/text.json, weight: 2, max_samples: 4}}]
  eval: [{{path: {folder}/set/test.json}}]
  system: Be short.
train: {{steps: 2, global_batch: 8, micro_batch: 4, seq_length: 64}}
run: {{seed: 3}}
"""


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl"])
def test_model_accepts_batches_of_a_configuration(folder, models, tmp_path, family):
    from octavo.models import load
    from octavo.models.tiny import tiny

    model = load(tiny.write(family, tmp_path / "model", size="mini"))
    digits.write(folder.path / "set", train=6, test=3)
    folder.json([folder.llava("No image?", "none") for _ in range(9)], "text.json")
    cfg = load_config_text(YAML.format(model=tmp_path / "model", folder=folder.path))
    stream = train_loader(cfg, models(family), report_path=tmp_path / "skipped.jsonl")
    assert stream.mixture.sizes == (6, 4) and stream.mixture.draws == [4, 6]
    mixed = False
    for batches in (next(stream), [collate([], stream.encoder.pad_id)]):
        for batch in batches:
            meta = batch.pop("meta")
            mixed |= meta.has_image and 0 in meta.images
            with torch.no_grad():
                logits = model(**batch).logits
            assert logits.shape[:2] == batch["input_ids"].shape and torch.isfinite(logits).all()
    assert mixed  # rows with and without images in one batch
    held_out = eval_set(cfg, models(family))
    assert [batch["meta"].rows for batch in held_out] == [(0, 1, 2)]
    assert eval_set(override(cfg, ["data.eval=[]"]), models(family)) is None


def test_padding_does_not_change_logits_of_a_row(folder, models, tmp_path):
    """The logits of a row are equal with and without a longer row in the batch, for text and images."""
    from octavo.data import Encoder
    from octavo.models import load
    from octavo.models.tiny import tiny

    model = load(tiny.write("qwen3_vl", tmp_path / "model", size="mini")).eval()
    encoder = Encoder(models("qwen3_vl"), 64)
    long = encoder.encode(folder.read([folder.llava("<image>First?", "7", "Second?", "8", image=folder.image())])[0])
    short = encoder.encode(folder.read([folder.llava("q", "a")])[0])
    with torch.no_grad():
        both = model(**{k: v for k, v in collate([short, long], encoder.pad_id).items() if k != "meta"}).logits
        for row, sample in enumerate((short, long)):
            alone = model(**{k: v for k, v in collate([sample], encoder.pad_id).items() if k != "meta"}).logits[0]
            torch.testing.assert_close(both[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)
