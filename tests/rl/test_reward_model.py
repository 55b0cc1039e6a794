"""Reward models in high precision and in FP8, compared with transformers."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from octavo import fp8, rl
from octavo.models import ModelError
from octavo.models.tiny import tiny
from octavo.rl.rewards import RewardError, Rewards, changed
from tests.rl.test_rl_phase import read_metrics

QUESTIONS = [[{"role": "user", "content": "What is this?"}], [{"role": "user", "content": "And now, at some length?"}]]


def write(language_model, folder, labels=1):
    config = AutoConfig.from_pretrained(language_model)
    config.num_labels = labels
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.mul_(50)  # scores of a random head differ by thousandths
    model.save_pretrained(folder)
    for file in language_model.glob("*"):
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            shutil.copy(file, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write three models: reward_model (one label), two (two labels), and words (a language model)."""
    path = tmp_path_factory.mktemp("models")
    tiny.write("qwen3", path / "words", size="mini")
    write(path / "words", path / "reward_model")
    write(path / "words", path / "two", labels=2)
    return path


def test_scores_match_transformers(folder):
    completions = ["A digit.", "7", "nothing of the kind at all"]
    columns = {"messages": [QUESTIONS[0], QUESTIONS[1], QUESTIONS[0]], "prompt": ["?"] * 3}
    with Rewards([{"reward": "reward_model", "weight": 2.0, "batch": 2}], folder) as rewards:
        table = rewards.score(completions, columns)
        tokenizer = rewards._ask["reward_model"].processor.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model").eval()
    for row, completion in enumerate(completions):
        turns = [*columns["messages"][row], {"role": "assistant", "content": completion}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            expected = model(input_ids=ids).logits.item()
        assert table.each["reward_model"][row] == pytest.approx(expected, rel=1e-5)
        assert table.totals[row] == pytest.approx(2 * expected, rel=1e-5)
    with Rewards(["reward_model"], folder) as rewards:  # a text prompt is a user turn
        totals = rewards.score(["7"], {"prompt": [QUESTIONS[0][0]["content"]]}).totals
        assert totals == pytest.approx(rewards.score(["7"], {"messages": [QUESTIONS[0]]}).totals)


def test_fp8_scores_are_close_to_high_precision(folder):
    """Linear layers hold and multiply FP8 codes; the scores are close to those in high precision but not equal."""
    completions, columns = ["A digit.", "7"], {"messages": QUESTIONS}
    with Rewards(
        ["reward_model", {"reward": "reward_model", "load_in_fp8": "rowwise", "name": "codes"}], folder
    ) as rewards:
        table = rewards.score(completions, columns)
        model = rewards._ask["codes"].model
        before = fp8.fingerprint(model)
        with fp8.count_gemms() as counts:
            again = rewards.score(completions, columns)
    layers = {layer for layer, _, _ in counts}
    assert {f"{layer}.weight" for layer in layers - {"score"}} == set(before) and len(before) == 14
    assert fp8.fingerprint(model) == before
    assert (again.each["codes"] == table.each["codes"]).all()
    high, low = table.each["reward_model"], table.each["codes"]
    assert 0 < abs(high - low).max() < 0.25 * abs(high).max()


IMAGE_QUESTIONS = [
    [{"role": "user", "content": "<image>What is this?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>And <image> are alike?"}],
    QUESTIONS[1],
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Write three images of 32 to 64 pixels."""
    path = tmp_path_factory.mktemp("pictures")
    for n in range(3):
        noise = np.random.default_rng(n).integers(0, 256, (32, 32 + 16 * n, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path / f"{n}.png")
    return [str(path / f"{n}.png") for n in range(3)]


def write_vision_model(family, folder):
    """Write a vision-language model with a `score` head instead of its output projection."""
    tiny.write(family, folder, size="mini")
    raw, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    raw["architectures"] = [raw["architectures"][0].replace("ForConditionalGeneration", "ForSequenceClassification")]
    (folder / "config.json").write_text(json.dumps(raw | {"num_labels": 1}))
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith("lm_head")}
    width = raw["text_config"]["hidden_size"]
    stored["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(0)) * 5
    save_file(stored, folder / "model.safetensors")
    return stored["score.weight"]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "internvl"])
def test_vision_reward_model_matches_transformers(family, pictures, tmp_path):
    """Each score is the last hidden state of the last token times `score`."""
    score = write_vision_model(family, tmp_path / "sees")
    completions = ["A digit.", "<image> is a word here", ""]
    columns = {"messages": IMAGE_QUESTIONS, "images": [pictures[:1], pictures[1:], []]}
    entries = ["sees", {"reward": "sees", "name": "codes", "load_in_fp8": "rowwise", "batch": 2}]
    with Rewards(entries, tmp_path) as rewards:
        table = rewards.score(completions, columns)
        other = rewards.score(completions, columns | {"images": [pictures[2:], pictures[1:], []]})
        model, processor = rewards._ask["codes"].model, rewards._ask["sees"].processor
        with fp8.count_gemms() as counts:
            assert (rewards.score(completions, columns).each["codes"] == table.each["codes"]).all()
        codes = {name.removesuffix(".weight") for name in fp8.fingerprint(model)}
        assert codes and codes <= {layer for layer, _, _ in counts}
    stock = AutoModel.from_pretrained(tmp_path / "sees").eval()
    for row, completion in enumerate(completions):
        turns = [*IMAGE_QUESTIONS[row], {"role": "assistant", "content": completion}]
        parts = [
            {"role": turn["role"], "content": [p for n, text in enumerate(texts) for p in (
                {"type": "image"}, {"type": "text", "text": text})[not n :]]}
            for turn in turns
            for texts in [[turn["content"]] if turn["role"] == "assistant" else turn["content"].split("<image>")]
        ]  # fmt: skip
        text = processor.apply_chat_template(parts, tokenize=False)
        shown = [Image.open(file) for file in columns["images"][row]]
        inputs = processor(text=[text], images=shown or None, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            expected = (stock(**inputs).last_hidden_state[0, -1] @ score[0]).item()
        assert table.each["sees"][row] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    high, low = table.each["sees"], table.each["codes"]
    assert 0 < abs(high - low).max() < 0.25 * abs(high).max()
    assert other.each["sees"][0] != high[0] and other.each["sees"][1:] == pytest.approx(high[1:], rel=1e-5)


def test_run_uses_a_vision_reward_model(rl_config, place, tmp_path):
    """Images may be files, or bytes in the rows of a table."""
    write_vision_model("qwen3_vl", tmp_path / "sees")
    rows, metrics = json.loads((place / "digits" / "train.json").read_text())[:4], []
    for row in rows:
        row["image"] = {"bytes": (place / "digits" / row["image"]).read_bytes(), "path": "a.png"}
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for file in (f"{place / 'digits' / 'train.json'}, max_samples: 4", tmp_path / "rows.parquet"):
        train = (f"rl.rewards=['{tmp_path / 'sees'}']", f"data.train=[{{path: {file}}}]", "train.steps=1")
        rl.run(cfg := rl_config(*train, "train.warmup=0", "fp8.recipe=off", dir=str(len(metrics))))
        metrics += read_metrics(cfg)
    assert (
        metrics[0]["rewards/sees/mean"] == metrics[0]["reward"] == metrics[1]["reward"] != 0 < metrics[0]["reward_std"]
    )


def test_unusable_images_are_named(folder, pictures, tmp_path):
    write_vision_model("qwen3_vl", tmp_path / "sees")
    missing = str(tmp_path / "missing.png")
    columns = {"messages": [IMAGE_QUESTIONS[0]] * 4, "images": [pictures[:1], pictures[:2], [missing], []]}
    with Rewards(["sees"], tmp_path, on_bad="zero") as rewards:
        bad = {row: reason for row, _, reason in rewards.score(["a"] * 4, columns).bad}
    assert bad.keys() == {1, 2} and "missing.png" in bad[2]
    assert "have 1 image part for 2 images" in bad[1]
    with Rewards(["sees"], tmp_path, on_bad="zero") as rewards:
        columns = {"messages": [IMAGE_QUESTIONS[0]] * 2, "images": [pictures[:1]] * 2, "videos": [["a.mp4"], []]}
        [(row, _, reason)] = rewards.score(["a"] * 2, columns).bad
    assert row == 0 and reason.startswith("has videos, which reward models do not support")


def test_unusable_rows_are_named(folder):
    columns = {"messages": [QUESTIONS[0], None, QUESTIONS[1], QUESTIONS[0]], "images": [["a.png"], [], [], []]}
    with Rewards(["reward_model"], folder, on_bad="zero") as rewards:
        table = rewards.score(["a", "b", "c", "long " * 5000], columns)
        assert [(row, reason.split(",")[0]) for row, _, reason in table.bad[:2]] == [
            (0, "has images"), (1, "has neither a column 'messages' nor a column 'prompt'")
        ]  # fmt: skip
        assert [row for row, *_ in table.bad] == [0, 1, 3] and "but the reward model takes" in table.bad[2][2]
        assert table.totals[2] != 0 and (table.totals[[0, 1, 3]] == 0).all()
        with torch.no_grad():
            rewards._ask["reward_model"].model.score.weight.fill_(float("nan"))
        assert rewards.score(["c"], {"messages": QUESTIONS[:1]}).bad == [(0, "reward_model", "returned nan")]


def test_other_folders_are_rejected(folder):
    with pytest.raises(RewardError, match="words contains Qwen3ForCausalLM with num_labels 2, but a reward model is a"):
        Rewards(["words"], folder)
    with pytest.raises(
        RewardError, match="two contains Qwen3ForSequenceClassification with num_labels 2, but a reward"
    ):
        Rewards(["two"], folder)
    with pytest.raises(RewardError, match="has the batch 0; expected a whole number of at least 1"):
        Rewards([{"reward": "reward_model", "batch": 0}], folder)
    with pytest.raises(
        RewardError, match="the argument 'pattern', which it does not take; it takes name, weight, load_in"
    ):
        Rewards([{"reward": "reward_model", "pattern": "a"}], folder)
    with pytest.raises(ModelError, match="load_in_fp8 has 'int4' for foundation"):
        Rewards([{"reward": "reward_model", "load_in_fp8": "int4"}], folder)
    config = json.loads((folder / "words" / "config.json").read_text())
    (folder / "hollow").mkdir(exist_ok=True)
    kind = {"num_labels": 1, "architectures": ["Qwen3ForSequenceClassification"]}
    (folder / "hollow" / "config.json").write_text(json.dumps({**config, **kind}))
    shutil.copy(folder / "words" / "model.safetensors", folder / "hollow")
    with pytest.raises(ModelError, match=r"1 missing in the folder .*score\.weight"):
        Rewards(["hollow"], folder)


def test_changed_weights_change_the_digest(folder, tmp_path):
    shutil.copytree(folder / "reward_model", tmp_path / "reward_model")
    with Rewards(["reward_model"], tmp_path) as rewards:
        before = rewards.digest()
    weights = tmp_path / "reward_model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    with Rewards(["reward_model"], tmp_path) as rewards:
        assert changed(before, rewards.digest()) == (
            "the reward 'reward_model' has changed: its file, a file that it imports, or its folder has changed"
        )
