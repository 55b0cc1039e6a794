"""A reward model out of a folder, in high precision and in FP8, against transformers' own."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from octavo import fp8
from octavo.models import ModelError, tiny
from octavo.rl.rewards import RewardError, Rewards, changed

ASKED = [[{"role": "user", "content": "What is this?"}], [{"role": "user", "content": "And now, at some length?"}]]


def write(language_model, folder, labels=1):
    config = AutoConfig.from_pretrained(language_model)
    config.num_labels = labels
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.mul_(50)  # what a random head says differs by thousandths
    model.save_pretrained(folder)
    for file in language_model.glob("*"):
        if file.name.startswith("tokenizer") or file.suffix == ".jinja":
            shutil.copy(file, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """reward_model: one number a text; two: two of them; words: a model that writes; pictures: one that sees."""
    path = tmp_path_factory.mktemp("models")
    tiny.write("qwen3", path / "words", size="mini")
    write(path / "words", path / "reward_model")
    write(path / "words", path / "two", labels=2)
    return path


def test_scores_are_transformers_own(folder):
    completions = ["A digit.", "7", "nothing of the kind at all"]
    columns = {"messages": [ASKED[0], ASKED[1], ASKED[0]], "prompt": ["?"] * 3}
    with Rewards([{"reward": "reward_model", "weight": 2.0, "batch": 2}], folder) as rewards:
        table = rewards.score(completions, columns)
        tokenizer = rewards._ask["reward_model"].processor.tokenizer
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model").eval()
    for row, completion in enumerate(completions):
        turns = [*columns["messages"][row], {"role": "assistant", "content": completion}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            wanted = model(input_ids=ids).logits.item()
        assert table.each["reward_model"][row] == pytest.approx(wanted, rel=1e-5)
        assert table.totals[row] == pytest.approx(2 * wanted, rel=1e-5)
    with Rewards(["reward_model"], folder) as rewards:  # a prompt that is a text is the user's
        said = rewards.score(["7"], {"prompt": [ASKED[0][0]["content"]]}).totals
        assert said == pytest.approx(rewards.score(["7"], {"messages": [ASKED[0]]}).totals)


def test_in_fp8(folder):
    """Its linear layers are codes and multiply as such: near the scores in high precision, and not they."""
    completions, columns = ["A digit.", "7"], {"messages": ASKED}
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


def test_rows_that_it_cannot_judge(folder):
    columns = {"messages": [ASKED[0], None, ASKED[1], ASKED[0]], "images": [["a.png"], [], [], []]}
    with Rewards(["reward_model"], folder, on_bad="zero") as rewards:
        table = rewards.score(["a", "b", "c", "long " * 5000], columns)
        assert [(row, reason.split(",")[0]) for row, _, reason in table.bad[:2]] == [
            (0, "has images"), (1, "has no column 'messages' and none named 'prompt'")
        ]  # fmt: skip
        assert [row for row, *_ in table.bad] == [0, 1, 3] and "and the reward model takes" in table.bad[2][2]
        assert table.totals[2] != 0 and (table.totals[[0, 1, 3]] == 0).all()
        with torch.no_grad():
            rewards._ask["reward_model"].model.score.weight.fill_(float("nan"))
        assert rewards.score(["c"], {"messages": ASKED[:1]}).bad == [(0, "reward_model", "returned nan")]


def test_folders_that_are_no_reward_models(folder):
    with pytest.raises(RewardError, match="words holds Qwen3ForCausalLM with num_labels 2, and a reward model is a"):
        Rewards(["words"], folder)
    with pytest.raises(RewardError, match="two holds Qwen3ForSequenceClassification with num_labels 2, and a reward"):
        Rewards(["two"], folder)
    with pytest.raises(RewardError, match="has the batch 0; expected a whole number from 1"):
        Rewards([{"reward": "reward_model", "batch": 0}], folder)
    with pytest.raises(
        RewardError, match="the argument 'pattern', which it does not take; it takes name, weight, load_in"
    ):
        Rewards([{"reward": "reward_model", "pattern": "a"}], folder)
    with pytest.raises(ModelError, match="load_in_fp8 asks for 'int4' in foundation"):
        Rewards([{"reward": "reward_model", "load_in_fp8": "int4"}], folder)
    config = json.loads((folder / "words" / "config.json").read_text())
    (folder / "hollow").mkdir(exist_ok=True)
    kind = {"num_labels": 1, "architectures": ["Qwen3ForSequenceClassification"]}
    (folder / "hollow" / "config.json").write_text(json.dumps({**config, **kind}))
    shutil.copy(folder / "words" / "model.safetensors", folder / "hollow")
    with pytest.raises(ModelError, match=r"1 missing in the folder .*score\.weight"):
        Rewards(["hollow"], folder)


def test_another_training_is_another_reward(folder, tmp_path):
    shutil.copytree(folder / "reward_model", tmp_path / "reward_model")
    with Rewards(["reward_model"], tmp_path) as rewards:
        before = rewards.digest()
    weights = tmp_path / "reward_model" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    with Rewards(["reward_model"], tmp_path) as rewards:
        assert changed(before, rewards.digest()) == (
            "the reward 'reward_model' is another: its file or folder has another content"
        )
