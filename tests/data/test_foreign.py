"""Keys, placeholders and JSON texts of other frameworks that would change the training data are rejected by name."""

import json

import pytest

from octavo.data import BadSample

USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PART = [{"begin_offset": 0, "end_offset": 1, "train": False}]


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss_mask", 0), ("loss_mask", [0, 1]), ("loss_scale", 0.0), ("loss_scale", 0.5), ("loss_weight", 2),
     ("training", False), ("train_detail", PART), ("mask", True), ("mask", 0), ("masked", True)],
)  # fmt: skip
def test_keys_that_mask_assistant_turns_are_rejected(folder, key, value):
    message = rf"row 0: turn 2, of the assistant, has the {key} .*, which is not supported: .*\"weight\": 0"
    gpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", key: value}]
    for row, kind, format in (
        ({"messages": [USER, {**SAID, key: value}]}, "conversations", "messages"),
        ({"conversations": gpt}, "conversations", "sharegpt"),
        ({"prompt": "q", "chosen": [{**SAID, key: value}], "rejected": "b"}, "pairs", "auto"),
        ({"messages": [USER, {**SAID, key: value}], "label": True}, "labelled", "auto"),
    ):
        with pytest.raises(BadSample, match=message):
            folder.read([row], "rows.jsonl", kind, format=format)[0]
    with pytest.raises(BadSample, match=rf"has the {key} "):
        folder.read([{"prompt": "q", "completion": [{**SAID, key: value}]}], "rows.jsonl")[0]


@pytest.mark.parametrize(
    ("asks", "answers"),
    [({"loss_mask": 0}, {"loss_mask": 1}), ({"training": False}, {"training": True}), ({}, {"loss_scale": 1.0}),
     ({"masked": True}, {"masked": False}), ({"train_detail": []}, {"train_detail": None}), ({"train": False}, {})],
)  # fmt: skip
def test_keys_that_agree_with_the_default_are_accepted(folder, asks, answers):
    found = folder.read([{"messages": [USER | asks, SAID | answers], "mask": "User"}], "rows.jsonl")[0]
    assert [turn.learned for turn in found.turns if turn.role == "assistant"] == [True]


@pytest.mark.parametrize("extra", ({"loss_mask": 1}, {"training": True}, {"masked": False}, {"train": True}))
def test_keys_that_train_on_other_roles_are_rejected(folder, extra):
    with pytest.raises(BadSample, match=rf"turn 1, of the user, has the {next(iter(extra))} .*only turns of an assist"):
        folder.read([{"messages": [USER | extra, SAID]}], "rows.jsonl")[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [({"loss_mask": [0, 1]}, "has the loss_mask"), ({"mask": "Assistant"}, "has the mask 'Assistant'"),
     ({"mask": [1, 0]}, "has the mask"), ({"objects": {"ref": ["a"], "bbox": [[1, 2]]}}, "has objects .ref, bbox")],
)  # fmt: skip
def test_mask_keys_of_rows_are_rejected(folder, more, message):
    alpaca = {"instruction": "q", "output": "a"}
    for row in ({"messages": [USER, SAID]}, {"prompt": "q", "answer": "a"}, alpaca):
        with pytest.raises(BadSample, match=rf"row 0: {message}"):
            folder.read([row | more], "rows.jsonl")[0]
    with pytest.raises(BadSample, match=rf"row 0: {message}"):
        folder.read([{"prompt": "q", "chosen": "a", "rejected": "b"} | more], "rows.jsonl", "pairs")[0]
    found = folder.read([{"prompt": "q", "answer": "a"} | more], "rows.jsonl", "prompts")[0]  # a reward may use them
    assert more.items() <= found.columns.items()


def test_mask_files_and_other_objects_are_accepted(folder):
    row = {"messages": [USER, SAID], "mask": "masks/7.png", "objects": ["a car"], "loss_scale": None}
    assert folder.read([row], "rows.jsonl")[0].turns[-1].text == "a"


@pytest.mark.parametrize("text", ("Find <ref-object>", "<bbox><bbox>", "click(start_box='<bbox>')"))
def test_foreign_placeholders_are_rejected(folder, text):
    for row, kind in (
        ({"messages": [USER, {**SAID, "content": text}]}, "conversations"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": text}]}, SAID]}, "prompts"),
        ({"prompt": text, "chosen": "a", "rejected": "b"}, "pairs"),
    ):
        with pytest.raises(BadSample, match="writes <(bbox|ref-object)> in its text, a placeholder that is not repla"):
            folder.read([row], "rows.jsonl", kind)[0]
    tagged = {"messages": [USER, {**SAID, "content": "<bbox>1, 2</bbox>"}]}
    assert folder.read([tagged], "rows.jsonl")[0].turns[-1].text == "<bbox>1, 2</bbox>"


def test_json_text_in_place_of_parts_or_turns_is_rejected(folder):
    parts, turns = json.dumps([{"type": "text", "text": "q"}]), json.dumps([SAID])
    for row, message in (
        ({"messages": [{**USER, "content": parts}, SAID]}, "the content of turn 1 is a list of parts written as JSON"),
        ({"conversations": [{"from": "human", "value": parts}, {"from": "gpt", "value": "a"}]}, "the value of turn 1"),
        ({"prompt": parts, "answer": "a"}, "the content of turn 1 is a list of parts"),
        ({"prompt": turns, "answer": "a"}, "has turns written as JSON text"),
    ):
        with pytest.raises(BadSample, match=message):
            folder.read([row], "rows.jsonl")[0]
    with pytest.raises(BadSample, match="has turns written as JSON text"):
        folder.read([{"prompt": "q", "chosen": turns, "rejected": "b"}], "rows.jsonl", "pairs")[0]
    meant = {**SAID, "content": [{"type": "text", "text": parts}]}
    assert folder.read([{"messages": [USER, meant]}], "rows.jsonl")[0].turns[-1].text == parts
    for text in ('[{"name": "Ada"}]', "[1, 2]", '[{"type": "cat"}', "[{}]", turns):
        assert folder.read([{"messages": [USER, {**SAID, "content": text}]}], "rows.jsonl")[0].turns[-1].text == text


def test_completion_with_weight_zero_is_rejected(folder):
    row = {"prompt": "q", "completion": [{**SAID, "weight": 0}]}
    with pytest.raises(BadSample, match=r"has a completion that is context \(weight 0\)"):
        folder.read([row], "rows.jsonl")[0]
    assert folder.read([row], "rows.jsonl", "prompts")[0].answer == "a"


@pytest.mark.parametrize(
    ("role", "key", "value"),
    [("assistant", "loss_mask", 0), ("assistant", "train", False), ("assistant", "weight", 0),
     ("assistant", "loss", 0.5), ("user", "train", True), ("user", "loss_mask", 1)],
)  # fmt: skip
def test_parts_with_mask_keys_are_rejected(folder, role, key, value):
    part = {"type": "text", "text": "b"}
    turns = [{"role": r, "content": [part, part | ({key: value} if r == role else {})]} for r in ("user", "assistant")]
    with pytest.raises(
        BadSample, match=rf"of the {role}, has a part with the {key} .*parts of a turn cannot be chosen"
    ):
        folder.read([{"messages": turns}], "rows.jsonl")[0]


def test_parts_with_default_mask_keys_are_accepted(folder):
    asks = {"type": "text", "text": "q", "train": False, "loss_mask": 0, "weight": None}
    says = {"type": "text", "text": "a", "train": True, "weight": 1, "loss_mask": None}
    row = {"messages": [{"role": "user", "content": [asks]}, {"role": "assistant", "content": [says]}]}
    assert folder.read([row], "rows.jsonl")[0].turns[-1].text == "a"


def test_template_variables_in_rows_are_rejected(folder):
    row = {"messages": [USER, SAID], "chat_template_kwargs": {"enable_thinking": False}}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "chat_template_kwargs": {"enable_thinking": False}}
    for one, kind in ((row, "conversations"), (row, "prompts"), (pair, "pairs")):
        with pytest.raises(BadSample, match=r"row 0: has the chat_template_kwargs .*data.template_args"):
            folder.read([one], "rows.jsonl", kind)[0]
    assert folder.read([row | {"chat_template_kwargs": {"enable_thinking": None}}], "rows.jsonl")[0].turns
