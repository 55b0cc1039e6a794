"""Prompts and reference answers from every format; tokens end where the answer begins."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.config import Dataset
from octavo.data import BadSample, DataError, Encoder, LongSample, PromptEncoder, prompt_loader, read
from octavo.rl.rollout.rollout import reward_columns


def prompts(folder, rows, name="rows.json", kind="prompts", **more):
    path = folder.json(rows, name) if isinstance(rows, list) else rows
    dataset = Dataset(path=str(path), **more)
    return read(dataset, kind)


def test_last_answer_of_sft_rows_is_the_reference(folder):
    image = folder.image()
    llava = prompts(folder, [folder.llava("<image>\nWhat?", "One", "And now?", " Two ", image=image, level=3)])[0]
    assert llava.answer == " Two " and [turn.role for turn in llava.conversation.turns] == ["user", "assistant", "user"]
    assert llava.columns == {
        "id": "r", "level": 3, "prompt": "And now?", "images": [str(folder.path / image)], "videos": [],
        "messages": [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": "One"},
                     {"role": "user", "content": "And now?"}],
    }  # fmt: skip
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    answer_turn = [{"role": "assistant", "content": "4"}]
    assert prompts(folder, [{"messages": chat + answer_turn}])[0].answer == "4"
    assert prompts(folder, [chat + answer_turn + chat[1:]])[0].answer == "4"  # a question without an answer is left out
    # the key `answer` takes precedence, and then an unanswered conversation is not cut
    rows = prompts(
        folder,
        [{"messages": chat + answer_turn, "answer": 4.5}, {"messages": [*chat, *answer_turn, *chat], "answer": "x"}],
    )
    assert rows[0].answer == "4.5" and len(rows[0].conversation.turns) == 2
    assert rows[1].answer == "x" and len(rows[1].conversation.turns) == 5
    drawn = [{"role": "assistant", "content": "Look: <image>"}]
    behind = {"messages": [*chat, *answer_turn, {"role": "user", "content": "<image>"}], "images": [image]}
    two = prompts(folder, [{"messages": chat + drawn + chat[1:] + answer_turn, "images": [image]},
                           {"messages": chat + drawn, "images": [image]}, behind])  # fmt: skip
    assert len(two[0].conversation.images) == 1 and two[2].conversation.images == ()
    with pytest.raises(BadSample, match="row 1: has an image in its last answer, but completions are text"):
        two[1]


def test_bytes_in_reward_columns_become_text(folder, models):
    """Rewards run in a separate process, which receives columns as JSON."""
    rows = [{"prompt": "2+3?", "answer": "5", "thumb": b"abc", "more": [{"bytes": b"x", "path": "y"}]}]
    parquet.write_table(pa.Table.from_pylist(rows), folder.path / "rows.parquet")
    sample = PromptEncoder(models("qwen3"), 64).encode(prompts(folder, folder.path / "rows.parquet")[0])
    assert sample.columns["thumb"] == "<3 bytes>" and sample.columns["more"] == [{"bytes": "<1 bytes>", "path": "y"}]
    assert sample.nbytes > sample.input_ids.nbytes and json.loads(json.dumps(sample.columns)) == sample.columns


def test_eval_rows_end_with_their_answer(folder):
    image = folder.image()
    rows = [
        {"prompt": "6 x 7?", "answer": 42},
        {"prompt": "Which?", "image": image, "answer": ["seven", 7]},
        {"prompt": "Which?", "image": image},
    ]
    number, several, none = (lambda n=n: prompts(folder, rows, kind="conversations")[n] for n in range(3))
    assert [(turn.role, turn.text) for turn in number().turns] == [("user", "6 x 7?"), ("assistant", "42")]
    assert several().turns[-1].text == "seven" and len(several().images) == 1
    with pytest.raises(BadSample, match=r"row 2: has a prompt without an answer"):
        none()
    sft = [folder.llava("<image>\nWhat?", "One", "And now?", "Two", image=image)]
    assert prompts(folder, sft, kind="conversations")[0] == prompts(folder, sft, kind="conversations")[0]


def test_rows_with_a_prompt(folder):
    image, other = folder.image(), folder.image("b.png")
    parts = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    rows = [
        {"prompt": "6 x 7?", "answer": 42, "tests": {"a": [1, None]}},
        {"prompt": "Which?", "image": image, "answer": ["seven", 7]},
        {"prompt": [{"from": "human", "value": "Which?"}], "images": [image, other]},
        {"prompt": [{"role": "user", "content": parts}], "images": [image], "answer": None},
        {"prompt": [{"role": "user", "content": [parts[1]]}], "images": [image], "answer": ""},
        {"prompt": "a <image> b", "images": [image], "answer": "x"},
    ]
    for name in ("rows.json", "rows.jsonl"):
        found = [prompts(folder, rows, name)[n] for n in range(len(rows))]
        assert [row.answer for row in found] == ["42", ["seven", "7"], None, None, "", "x"]
        contents = [row.columns["messages"][0]["content"] for row in found]
        assert contents[1:4] == ["<image>Which?", "<image><image>Which?", "<image>Which?"]
        assert contents[4:] == ["<image>Which?", "a <image> b"]
        assert found[0].columns["tests"] == {"a": [1, None]} and "answer" not in found[0].columns
        assert found[1].conversation.images == (folder.path / image,)


def test_prompt_without_answer_is_used_unchanged(folder):
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    unanswered, ended = prompts(folder, [{"prompt": turns}, {"prompt": turns[:2]}])
    assert unanswered.answer is None and [turn.text for turn in unanswered.conversation.turns] == ["a", "b", "c"]
    assert ended.answer == "b" and len(ended.conversation.turns) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "answer": {"b": 1}}, r"has the answer \{'b': 1\}; expected a text, a number, or a list"),
        ({"prompt": "a", "answer": True}, "has the answer True"),
        ({"prompt": "a", "answer": []}, r"has the answer \[\]"),
        ({"prompt": 7}, "turn 1 is 7; expected"),
        ({"prompt": []}, "the conversation is empty"),
        ({"prompt": [], "images": ["a.png"]}, r"has 0 <image> placeholders? in its text and 1 image"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "the conversation begins with an assistant|begins with"),
        ({"prompt": [{"role": "system", "content": "a"}]}, "a prompt that ends with a turn of the system"),
        ({"prompt": "a", "images": ["none.png"]}, "'none.png' is missing"),
        ({"prompt": "a <image>", "answer": "b"}, "names no image"),
        ({"prompt": "a <image><image>", "images": ["a.png"]}, r"has 2 <image> placeholders? .* and 1 image"),
        ({"prompt": "a", "completions": []}, "has a key 'completions', the name of the argument of rewards"),
        ({"prompt": "a", "messages": None, "videos": ["v"]}, r"0 <video> placeholders? .* and 1 video"),
        ({"question": "a"}, "expected an object with 'prompt'"),
        ([], "expected an object with 'prompt'"),
    ],
)
def test_bad_rows_are_named(folder, row, reason):
    folder.image()
    source = prompts(folder, [{"prompt": "q", "answer": "a"}, row])
    with pytest.raises(BadSample, match=rf"rows\.json, row 1: .*({reason})"):
        source[1]


def test_mixed_file_is_read_as_prompts_if_configured(folder):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "prompt": "b", "answer": "c"},
        {"prompt": "d", "answer": 1},
    ]
    found = prompts(folder, rows, format="prompt")
    assert [(row.columns["prompt"], row.answer) for row in (found[0], found[1])] == [("b", "c"), ("d", "1")]
    with pytest.raises(BadSample, match="row 1: .*expected an object with 'prompt'"):
        prompts(folder, [rows[0], {"messages": []}], format="prompt")[1]


def test_mixed_formats_are_rejected(folder):
    with pytest.raises(DataError, match="row 0 reads as prompt, row 1 reads as sharegpt"):
        prompts(folder, [{"prompt": "q"}, folder.llava("q", "a", images=["x"])])
    with pytest.raises(DataError, match=r"no row looks like a conversation .* or prompt with answer"):
        prompts(folder, [{"question": "q"}])


@pytest.mark.parametrize(
    "learned_turn", [{"answer": "a"}, {"completion": "a"}, {"completion": [{"role": "assistant", "content": "a"}]}]
)
def test_sft_trains_on_prompts_with_answers(folder, learned_turn):
    rows = [{"prompt": [{"role": "user", "content": "q"}], **learned_turn}]
    assert [turn.text for turn in folder.read(rows)[0].turns] == ["q", "a"]
    assert prompts(folder, rows)[0].answer == "a" and "completion" not in prompts(folder, rows)[0].columns
    with pytest.raises(DataError, match="no row looks like a conversation"):
        folder.read([{"prompt": "q"}])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl", "nvila_lite", "qwen3"])
def test_prompt_tokens_match_stock_processor(folder, models, family):
    """They also equal SFT's tokens up to the answer, with equal pixels."""
    processor, vision = models(family), family != "qwen3"
    image = folder.image(size=(64, 48))
    row = folder.llava("<image>" * vision + "What is it?", "A dot.", **({"image": image} if vision else {}))
    encoder = PromptEncoder(processor, 200)
    sample = encoder.encode(prompts(folder, [row])[0])
    content = [{"type": "image"}] * vision + [{"type": "text", "text": "What is it?"}]
    messages = [{"role": "user", "content": content if vision else "What is it?"}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not vision:
        assert sample.input_ids.tolist() == processor.tokenizer(text)["input_ids"]
    whole = Encoder(processor, 200).encode(folder.read([row])[0])
    count = len(sample.input_ids)
    assert sample.input_ids.tolist() == whole.input_ids[:count].tolist() and whole.answers[0][0] == count
    assert (sample.labels == -100).all() and sample.answers == () and sample.answer == "A dot."
    if vision:
        assert np.array_equal(sample.pixel_values, whole.pixel_values) and sample.images == 1


def test_unsupported_media_are_rejected(folder, models):
    row = prompts(folder, [{"prompt": "Which?", "image": folder.image(), "answer": "x"}])[0]
    with pytest.raises(BadSample, match="row 0: has an image, but the model is text-only; use a vision-language"):
        PromptEncoder(models("qwen3"), 100).encode(row)


def test_cache_size_includes_columns(folder, models):
    small, large = prompts(folder, [{"prompt": "q", "tests": "x" * size} for size in (1, 5001)])
    encoder = PromptEncoder(models("qwen3"), 100)
    assert encoder.encode(large).nbytes == encoder.encode(small).nbytes + 5000


def test_prompt_leaves_space_for_its_answer(folder, models):
    row = prompts(folder, [{"prompt": "word " * 50, "answer": "x"}])[0]
    tokens = len(PromptEncoder(models("qwen3"), 4000).encode(row).input_ids)
    assert len(PromptEncoder(models("qwen3"), tokens + 16, reserve=16).encode(row).input_ids) == tokens
    room = rf"is {tokens} tokens long, seq_length is {tokens + 15}, 16 of it are reserved for the answer"
    with pytest.raises(LongSample, match=room):
        PromptEncoder(models("qwen3"), tokens + 15, reserve=16).encode(row)
    with pytest.raises(DataError, match=rf"{room}; raise train.seq_length or .* or set data.on_long to drop$"):
        PromptEncoder(models("qwen3"), tokens + 15, reserve=16, on_long="error").encode(row)
    with pytest.raises(DataError, match="on_long is cut, which would cut the question at the end of a prompt"):
        PromptEncoder(models("qwen3"), 100, on_long="cut")
    with pytest.raises(DataError, match="train_on_prompt is true, but only completions are learned"):
        PromptEncoder(models("qwen3"), 100, train_on_prompt=True)
    with pytest.raises(DataError, match="seq_length is 16, 16 of it are reserved .* no token is left for a prompt"):
        PromptEncoder(models("qwen3"), 16, reserve=16)


def config(folder, path, **data):
    dataset = Dataset(path=str(path))
    more = {"on_long": "drop", "train_on_prompt": False, "system": None, "max_image_megapixels": 100.0,
            "video": None, "workers": 0,
            "on_bad_sample": "error", "mask_empty_think": True, "mask_reasoning": False, "train": [dataset],
            "eval": [dataset], **data}  # fmt: skip
    return SimpleNamespace(
        data=SimpleNamespace(**{"cache": None, **more}), run=SimpleNamespace(seed=1, timeout=60.0),
        train=SimpleNamespace(seq_length=64, micro_batch=2, global_batch=4),
    )  # fmt: skip


def steps(cfg, processor, count, **more):
    stream = prompt_loader(cfg, processor, prompts=4, max_new_tokens=8, **more)
    found = [next(stream) for _ in range(count)]
    stream.close()
    return found, stream


def describe(step):
    return [(sample.number, sample.row, sample.answer) for sample in step]


def test_prompt_stream_resumes_exactly(folder, models):
    cfg = config(folder, folder.json([{"prompt": f"{n}?", "answer": n} for n in range(6)]))
    whole, stream = steps(cfg, models("qwen3"), 5)
    assert [sample.number for step in whole for sample in step] == list(range(20)) and stream.rows == 20
    assert sorted(sample.row for sample in [*whole[0], *whole[1][:2]]) == list(range(6))  # an epoch
    rest, _ = steps(cfg, models("qwen3"), 3, start_row=8)
    assert [describe(step) for step in rest] == [describe(step) for step in whole[2:]]
    ranks = [steps(cfg, models("qwen3"), 5, rank=rank, world=2)[0] for rank in (0, 1)]
    assert [describe(a) + describe(b) for a, b in zip(*ranks, strict=True)] == [describe(step) for step in whole]
    cfg.data.workers = 1
    assert [describe(step) for step in steps(cfg, models("qwen3"), 5)[0]] == [describe(step) for step in whole]


def test_prompts_are_cached_without_workers(folder, models, monkeypatch):
    """On a CPU the default is no workers, so encoded rows stay in memory for the next epoch."""
    monkeypatch.setattr("octavo.base.accelerator.detect", lambda: None)
    cfg = config(folder, folder.json([{"prompt": f"{n}?", "answer": n} for n in range(4)]), workers=None)
    stream = prompt_loader(cfg, models("qwen3"), prompts=4, max_new_tokens=8)
    assert stream.workers == 0 and stream.at(1) is stream.at(1)


def test_left_out_rows_keep_the_numbers_of_others(folder, models):
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(8)]
    rows[3] = {"prompt": "long " * 100, "answer": 1}
    rows[5] = {"prompt": "q", "answer": {}}
    path = folder.json(rows)
    whole, stream = steps(config(folder, path, on_bad_sample="skip"), models("qwen3"), 2)
    assert stream.report.counts == {"dropped": 1, "skipped": 1}
    clean, _ = steps(config(folder, folder.json([{"prompt": "q", "answer": n} for n in range(8)], "b.json")),
                     models("qwen3"), 2)  # fmt: skip
    places = {row: number for step in clean for number, row, _ in describe(step)}
    numbers = {row: number for step in whole for number, row, _ in describe(step)}
    assert numbers == {row: number for row, number in places.items() if row not in (3, 5)}
    with pytest.raises(BadSample, match="row 5"):
        steps(config(folder, path), models("qwen3"), 2)


def test_columns_of_a_group(folder, models):
    rows = [{"prompt": "a?", "answer": "1", "level": 2}, {"prompt": "b?", "kind": "x"}]
    encoder = PromptEncoder(models("qwen3"), 64)
    source = prompts(folder, rows)
    columns = reward_columns([encoder.encode(source[n]) for n in range(2)], 2)
    assert columns["answer"] == ["1", "1", None, None] and columns["prompt"] == ["a?", "a?", "b?", "b?"]
    assert columns["level"] == [2, 2, None, None] and columns["kind"] == [None, None, "x", "x"]
    assert columns["images"] == [[]] * 4 and columns["messages"][3] == [{"role": "user", "content": "b?"}]
    assert reward_columns([]) == {}
