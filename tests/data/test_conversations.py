"""Parses the conversation formats, detected or configured, and rejects every kind of bad row."""

import pickle

import pytest

from octavo.data import BadSample, DataError, ImageRef, Text, parse


def parts(source, row=0):
    return [(turn.role, turn.parts) for turn in source[row].turns]


def test_llava(folder):
    image = folder.image("pics/a.png")
    rows = [
        folder.llava("<image>\nWhat?", "A cat", image=image),
        folder.llava("No image", "Right"),
        folder.llava("<image> and <image>", "Two", image=[image, image]),
    ]
    source = folder.read(rows)
    assert source.format == "llava" and len(source) == 3
    assert parts(source) == [("user", (ImageRef(0), Text("\nWhat?"))), ("assistant", (Text("A cat"),))]
    assert source[0].images == (folder.path / image,) and source[0].id == "r" and source[0].row == 0
    assert source[1].images == ()
    assert parts(source, 2)[0] == ("user", (ImageRef(0), Text(" and "), ImageRef(1)))


def test_sharegpt(folder):
    image = folder.image()
    row = {
        "conversations": [
            {"from": "system", "value": "Be short"},
            {"from": "user", "value": "<image>What?"},
            {"from": "assistant", "value": "A cat"},
        ],
        "images": [image],
    }
    source = folder.read([row])
    assert source.format == "sharegpt"
    assert [turn.role for turn in source[0].turns] == ["system", "user", "assistant"]
    assert len(source[0].images) == 1
    other = {"messages": row["conversations"], "images": [image]}
    assert folder.read([other]).format == "sharegpt" and folder.read([other])[0].turns == source[0].turns
    assert folder.read([{**row, "system": "Be short"}])[0].turns == source[0].turns
    with pytest.raises(BadSample, match="has the system 'Be long', but a system turn has 'Be short'; keep one"):
        folder.read([{**row, "system": "Be long"}], "two.json")[0]


def test_messages(folder):
    image = folder.image()
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "<image>?"}]},
        {"role": "assistant", "content": "A cat"},
    ]
    for rows, name in (
        ([{"messages": messages}], "a.json"),
        ([messages], "b.json"),
        ([{"messages": messages}] * 2, "c.jsonl"),
    ):
        source = folder.read(rows, name)
        assert source.format == "messages"
        # If images are parts, <image> is plain text.
        assert parts(source)[0] == ("user", (ImageRef(0), Text("<image>?")))
        assert len(source[0].images) == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "file://a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
    ],
)
def test_image_names_are_read_from_every_layout(folder, part):
    folder.image("a.png")
    messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "x"}]
    assert folder.read([{"messages": messages}])[0].images == (folder.path / "a.png",)


def test_messages_with_an_image_list(folder):
    image = folder.image()
    written = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "x"}]
    parted = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, written[1]]
    source = folder.read([{"messages": written, "images": [image]}, {"messages": parted, "images": [image]}])
    assert source[0].turns == source[1].turns and source[0].images == source[1].images
    with pytest.raises(BadSample, match="has 1 image part without a file or with null, and no list of images; write"):
        folder.read([{"messages": parted}])[0]


def test_placeholder_in_messages_requires_image_list(folder):
    messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(BadSample, match="writes <image> in its text, but names no image; list it under 'images'"):
        folder.read([{"messages": messages}])[0]


def test_max_samples_takes_the_first_rows(folder):
    source = folder.read([folder.llava(str(n), "a") for n in range(5)], max_samples=2)
    assert len(source) == 2 and source[1].turns[0].text == "1"
    with pytest.raises(IndexError, match="has 2 rows; row 2 was requested"):
        source[2]


def test_images_are_relative_to_configured_folder(folder):
    folder.image("elsewhere/deep/a.png")
    rows = [folder.llava("<image>", "x", image="deep/a.png")]
    assert len(folder.read(rows, images=str(folder.path / "elsewhere"))[0].images) == 1
    with pytest.raises(DataError, match="no such folder; check `images` of .*rows.json"):
        folder.read(rows, images=str(folder.path / "nowhere"))


ASK, ANSWER = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": []}, "the conversation is empty"),
        ({"conversations": "text"}, "conversations is 'text'; expected a list"),
        ({"conversations": [ASK]}, "has no assistant turn, so there is nothing to learn"),
        ({"conversations": [ANSWER, ASK]}, "begins with an assistant turn"),
        ({"conversations": [ASK, {"from": "gpt", "value": "  "}]}, "turn 2 is an assistant turn without text"),
        ({"conversations": [ASK, {"from": "robot", "value": "a"}]}, "turn 2 has the unknown role 'robot'; llava knows"),
        ({"conversations": [ASK, {"from": ["gpt"], "value": "a"}]}, r"unknown role \['gpt'\]"),
        ({"conversations": [ASK, {"from": "gpt"}]}, "turn 2 is .*expected {'from': ..., 'value': text}"),
        ({"conversations": [ASK, {"from": "gpt", "value": 7}]}, "turn 2 is"),
        ({"conversations": [{"from": "human", "value": "<image>"}, ANSWER]}, r"1 <image> placeholders?.*0 image"),
        ({"conversations": [ASK, ANSWER], "image": "a.png"}, r"0 <image> placeholders?.*1 image"),
        ({"conversations": [ASK, ANSWER], "image": 7}, "'image' is 7; expected a file name or a list"),
        ({"conversations": [ASK, ANSWER], "images": ["a.png"]}, "set format: sharegpt"),
        ({"conversations": [ASK, ANSWER], "image": "a", "images": ["a"]}, "has both 'image' and 'images'"),
        ({"conversations": [ASK, ANSWER], "video": "a.mp4"}, r"0 <video> placeholders?.*1 video"),
        ({"conversations": [ASK, {"from": "gpt", "value": "\ud800"}]}, r"holds half a character \(a lone .ud800\)"),
        ({"id": 1}, "a llava row has one of 'conversations'"),
        (["x"], r"is \['x'\]; expected an object with the conversation"),
    ],
)
def test_bad_llava_rows_are_rejected(folder, row, message):
    folder.image("a.png")
    source = folder.read([folder.llava("q", "a"), row], format="llava")
    with pytest.raises(BadSample, match=r"rows\.json, row 1.*: .*" + message):
        source[1]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "critic", "content": "x"}], "unknown role 'critic'; messages knows user, assistant, system, tool"),
        ([{"role": "user"}], "expected {'role': ..., 'content': ...}"),
        ([{"role": "user", "content": 3}], "content of turn 1 is 3; expected text or a list of parts"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "expected type text, image, audio or video"),
        ([{"role": "user", "content": [{"type": "video", "video": "a", "fps": 1}]}], "chosen by data.video of the"),
        ([{"role": "user", "content": [{"type": "image", "image": "a", "path": "b"}]}], "expected one path in image"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "http://x/a.png"}]}],
            "is not a local file, and Octavo does not",
        ),
        ([{"role": "user", "content": [{"type": "image", "url": "data:image/png;base64,x"}]}], "is not a local file"),
    ],
)
def test_bad_messages_rows_are_rejected(folder, messages, message):
    source = folder.read([{"messages": [*messages, {"role": "assistant", "content": "a"}]}], format="messages")
    with pytest.raises(BadSample, match=message):
        source[0]


def test_two_image_lists_in_one_row_are_rejected(folder):
    image = folder.image()
    messages = [{"role": "user", "content": [{"type": "image", "image": image}]}, {"role": "assistant", "content": "a"}]
    with pytest.raises(BadSample, match="names an image and the row has an image list too"):
        folder.read([{"messages": messages, "images": [image]}])[0]
    with pytest.raises(BadSample, match="has both 'messages' and 'conversations'"):
        folder.read([{"messages": messages, "conversations": messages}])[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"conversations": [ASK, ANSWER], "image": "a"}, {"conversations": [ASK, ANSWER], "images": ["a"]}],
            r"the format is ambiguous \(row 0 reads as llava, row 1 reads as sharegpt\); set `format`",
        ),
        (
            [{"conversations": [ASK, ANSWER]}, {"messages": [{"role": "user", "content": "x"}]}],
            r"ambiguous \(row 0 reads as llava, row 1 reads as messages\)",
        ),
        ([{"conversations": [ASK, {"role": "assistant", "content": "x"}]}], r"ambiguous \(row 0 has turns with from"),
        ([{"question": "x", "answer": "y"}], r"no row looks like a conversation .*\['answer', 'question'\]"),
        (["text"], r"no row looks like a conversation \(the first is 'text'\)"),
    ],
)
def test_ambiguous_formats_are_rejected(folder, rows, message):
    with pytest.raises(DataError, match=message):
        folder.read(rows)


def test_leading_text_rows_do_not_hide_the_format(folder):
    rows = [{"conversations": [ASK, ANSWER]}] * 3 + [{"conversations": [ASK, ANSWER], "images": ["a"]}]
    assert folder.read(rows).format == "sharegpt"
    assert folder.read(rows[:3]).format == "llava"


def test_rows_of_other_readers_are_checked(folder):
    half = {"conversations": [ASK, {"from": "gpt", "value": "\ud800"}]}
    with pytest.raises(BadSample, match="turn 2 contains a lone surrogate"):
        parse(half, "llava", file="f", row=0, images=folder.path)
    named = {
        "conversations": [{"from": "human", "value": "<image>"}, ANSWER],
        "image": "\ud800.png",
        "id": "\x1b" * 999,
    }
    with pytest.raises(BadSample, match="cannot be resolved") as bad:
        parse(named, "llava", file="f", row=0, images=folder.path)
    assert str(bad.value).isprintable() and len(str(bad.value)) < 600


def test_errors_survive_pickling(folder):
    with pytest.raises(BadSample) as bad:
        folder.read([{"id": "x7", "conversations": []}], format="llava")[0]
    copy = pickle.loads(pickle.dumps(bad.value))
    assert str(copy) == str(bad.value) and "row 0 (id x7): the conversation is empty" in str(copy)
    assert copy.record()["action"] == "skipped" and copy.record()["row"] == 0
