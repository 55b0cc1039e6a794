"""Conversations split at their questions: every answer is learned once with its reasoning; length, order and
reports."""

import json
from itertools import islice

import numpy as np
import pytest
import torch

from octavo.config import load_config_text, override
from octavo.data import (
    IGNORE,
    BadSample,
    DataError,
    count_epoch_rows,
    eval_set,
    prepare_datasets,
    train_loader,
)
from octavo.data.rows.conversations import Text, Turn
from octavo.data.tasks.splitting import find_questions, split
from octavo.train.forward import evaluation
from tests.data.test_thinking import CALL, ENDED, TOOL, TURNS, WITHIN, as_messages, block, learned, row

USER, SAID, TOLD, SYSTEM = (Turn(role, (Text("x"),)) for role in ("user", "assistant", "tool", "system"))
CONTEXT = Turn("assistant", (Text("x"),), learned=False)
CALLED = Turn("assistant", (), ({"function": CALL},))


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ([USER, SAID], [(2, 0)]),
        ([SYSTEM, USER, SAID, USER, SAID], [(3, 0), (5, 1)]),
        ([USER, USER, SAID, SAID, USER, USER, SAID], [(4, 0), (7, 2)]),
        ([USER, CALLED, TOLD, SAID, USER, CALLED, TOLD, CALLED, TOLD, SAID], [(4, 0), (10, 2)]),
        ([USER, SAID, SYSTEM, USER, SAID, USER], [(2, 0), (5, 1)]),  # the last question has no answer
        ([USER, CALLED, TOLD, USER, SAID, TOLD], [(2, 0), (5, 1)]),
        ([USER, CONTEXT, USER, SAID, CONTEXT, USER, CONTEXT], [(5, 1)]),
        ([USER], []),
    ],
)
def test_find_questions_returns_ends_and_context(turns, found):
    assert find_questions(turns) == found


THREE = [(f"r{n}", f"a{n}") for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("template", "answers", "opened"),
    [("qwen3_5", THREE, False), ("qwen3", THREE, True), ("qwen3_6", THREE, False),
     ("qwen3_vl", [*WITHIN, block(3)], True)],
)  # fmt: skip
def test_split_rows_train_on_every_answer_once(folder, encoder, template, answers, opened):
    text_encoder, rows = encoder(template), split(folder.read([row("b1"), row(*answers), row("b2", "b3")]))
    assert len(rows) == 6 and [rows.place(n) for n in range(6)] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    for n in range(3):
        sample = text_encoder.encode(rows[n + 1])
        assert learned(text_encoder, sample) == [block(n + 1, opened) + ENDED]
        assert (sample.row, sample.lost, sample.notes, len(sample.answers)) == (1, 0, [], n + 1)
        text = text_encoder.tokenizer.decode(sample.input_ids)
        assert f"a{n}" in text + "a0" and f"q{n + 2}" not in text  # all previous turns, and none after
        assert (f"r{n}" in text) == (template == "qwen3_vl" and n > 0)
    assert [learned(text_encoder, text_encoder.encode(rows[n])) for n in (0, 4, 5)] == [
        [f"b{n}{ENDED}"] for n in (1, 2, 3)
    ]
    with pytest.raises(IndexError):
        rows[6]


def test_split_works_if_earlier_answers_end_differently(folder, encoder):
    """As in gpt-oss: a row of two answers cannot be learned as a whole, but each of its questions can."""
    other = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}"
        "{% if m.role == 'assistant' and not loop.last %}<|end|>{% else %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text_encoder, source = encoder(other), folder.read([row("a1", "a2")])
    with pytest.raises(BadSample, match="or set data.split_turns: true"):
        text_encoder.encode(source[0])
    assert [learned(text_encoder, text_encoder.encode(split(source)[n])) for n in (0, 1)] == [
        [f"a1{ENDED}"],
        [f"a2{ENDED}"],
    ]


def test_calls_system_and_images_stay_with_their_question(folder, encoder):
    """In ShareGPT and messages: a row has the images up to its question, and only answers after it are learned."""
    images = [folder.image(name) for name in ("a.png", "b.png", "c.png", "d.png")]
    turns = [*TURNS[:-2], ("human", {"value": "<image>And this?"}), ("gpt", {"value": "No.", "reasoning": "Red."})]
    text_encoder = encoder("qwen3_5")
    rows = {"conversations": [{"from": who, **turn} for who, turn in turns], "messages": [*as_messages(turns)]}
    rows["messages"][-1]["reasoning"] = "Red."
    for key, spoken in rows.items():
        found = split(folder.read([{key: spoken, "tools": [TOOL], "images": images}], f"{key}.json"))
        assert len(found) == 2 and [len(found[n].images) for n in (0, 1)] == [3, 4]
        first, second = (text_encoder.encode(found[n]) for n in (0, 1))
        assert [text.partition("\n")[0] for text in learned(text_encoder, first)] == ["I look.", "Both blue."]
        assert learned(text_encoder, second) == [f"Red.\n</think>\n\nNo.{ENDED}"] and second.answers[:2] == (
            (0, 0),
            (0, 0),
        )
        assert (first.images, second.images) == (3, 4)
        for sample in (first, second):
            assert "Be brief." in text_encoder.tokenizer.decode(sample.input_ids)
        assert len(text_encoder.encode(found[0]).pixel_values) * 4 == len(second.pixel_values) * 3


def test_unanswered_question_is_left_out(folder, encoder):
    raw = {"messages": [*row(("r1", "a1"))["messages"], {"role": "user", "content": "q2"}]}
    text_encoder, rows = encoder("qwen3_5"), split(folder.read([raw]))
    assert len(rows) == 1 and learned(text_encoder, text_encoder.encode(rows[0])) == [f"r1\n</think>\n\na1{ENDED}"]


def test_sounds_stay_with_their_question(folder):
    for name in ("a.wav", "b.wav"):
        (folder.path / name).write_bytes(b"nobody listens")
    rows = split(folder.read([folder.llava("<audio>q1", "a1", "<audio>q2", "a2", audio=["a.wav", "b.wav"])]))
    assert [[path.name for path in rows[n].sounds] for n in (0, 1)] == [["a.wav"], ["a.wav", "b.wav"]]


def test_prompt_with_answer_is_split(folder, encoder):
    raw = {"prompt": [*row(("r1", "a1"))["messages"], {"role": "user", "content": "q2"}], "answer": ["a2", "x"]}
    text_encoder, rows = encoder("qwen3_5"), split(folder.read([raw, {"prompt": "q"}]))
    assert [learned(text_encoder, text_encoder.encode(rows[n])) for n in (0, 1)] == [
        [f"r1\n</think>\n\na1{ENDED}"],
        [f"a2{ENDED}"],
    ]
    with pytest.raises(BadSample, match="a prompt without an answer"):
        rows[2]


def test_questions_are_counted_without_opening_files(folder, tmp_path):
    """A missing image does not change the counts; a row that is not a conversation counts as one bad row."""
    late = folder.llava("<image>q1", "a1", "q2", "a2", image="late.png")
    bad = folder.llava("q1", "a1", "q2", " ")
    file = folder.json([late, bad, folder.llava("q1", "a1", "q2", "a2")])
    rows = split(folder.read(file), tmp_path)
    assert [rows.place(n)[0] for n in range(len(rows))] == [0, 0, 1, 2, 2]
    for n in (0, 1, 2):
        with pytest.raises(BadSample, match="late.png" if n < 2 else "assistant turn without text"):
            rows[n]
    folder.image("late.png")
    assert rows[0].images and len(rows[1].turns) == 4
    again = split(folder.read(file, max_samples=1), tmp_path)
    assert len(again) == 2 and len(list(tmp_path.glob("*.questions"))) == 2
    np.array([0, 1, 2, 3], "<i8").tofile(rows.file)
    with pytest.raises(DataError, match=r"row 0: has 2 question\(s\), and had 1 when they were counted"):
        split(folder.read(file), tmp_path)[0]
    rows.file.write_bytes(b"1234567")
    with pytest.raises(DataError, match=r"is damaged \(7 bytes for 3 rows\); remove it"):
        split(folder.read(file), tmp_path)


def test_shards_count_questions(folder):
    (folder.path / "set").mkdir()
    for n in (1, 2, 3):
        folder.json([folder.llava(*["q", "a"] * n) for _ in range(4)], f"set/{n}.jsonl")
    rows = split(folder.read(folder.path / "set", shuffle_buffer=5))
    assert list(rows.shards) == [4, 8, 12] and len(rows) == 24 and rows.window == 5
    some = split(folder.read(folder.path / "set", shuffle_buffer=5, max_samples=6))
    assert list(some.shards) == [4, 4, 0]


CONFIG = """
model: {{path: m}}
data:
  train: [{{path: {path}/rows.json}}]
  eval: [{{path: {path}/held.json}}]
  split_turns: true
  cache: {path}/cache
train: {{steps: 2, global_batch: 3, micro_batch: 1, seq_length: 128}}
run: {{dir: {path}/run}}
"""


@pytest.fixture
def cfg(folder):
    rows = [row(*((f"r{n}{m}", f"a{n}{m}") for m in range(1 + n % 4))) for n in range(8)]
    rows[5]["messages"][1]["content"] = "long " * 200  # and so both of its questions are
    folder.json(rows)
    eval_row = {**row(("r1", "a1"), ("r2", "a2"), "a3"), "source": ["one", "two", "three"]}
    learned_words = {**row("a1"), "images": [folder.image()]}
    learned_words["messages"][0]["content"] = "<image>"
    folder.json([row("a0"), eval_row, learned_words], "held.json")
    return load_config_text(CONFIG.format(path=folder.path))


def learned_words(loader, steps, of):
    """Return the words that are learned in each micro-batch of the given number of steps."""
    return [
        [of.tokenizer.decode(batch["input_ids"][batch["labels"] != IGNORE]) for batch in step]
        for step in islice(loader, steps)
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_epoch_has_every_answer_once_and_resumes(folder, encoder, cfg, packing):
    """20 questions in 8 rows, two of them too long: packed or not, with or without workers, with or without a
    resume."""
    text_encoder = encoder("qwen3_5")
    cfg = override(cfg, ["data.packing=true", "data.window=20"]) if packing else cfg
    answers = []
    prepare_datasets(cfg, text_encoder.processor, answers.append)
    assert any("questions" in one for one in answers)
    report = folder.path / "skipped.jsonl"
    loader = train_loader(cfg, text_encoder.processor, report_path=report)
    assert count_epoch_rows(cfg, lambda: None) == 20 == sum(loader.mixture.sizes)
    whole = learned_words(loader, 9, text_encoder)
    epoch = [text for step in whole for text in step][: len(loader.packs(0)) if packing else 20]
    wanted = {f"r{n}{m}\n</think>\n\na{n}{m}" for n in range(8) for m in range(1 + n % 4)}
    wanted -= {f"r5{m}\n</think>\n\na5{m}" for m in range(2)}
    assert sorted("".join(epoch).split(ENDED)[:-1]) == sorted(wanted) and len(wanted) == 18
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted((one["row"], one["question"], one["action"]) for one in records) == [
        (5, 1, "dropped"),
        (5, 2, "dropped"),
    ]
    first = train_loader(cfg, text_encoder.processor)
    learned_words(first, 2, text_encoder)
    place = {"pack_position": first.pack_position} if packing else {"start_row": first.rows}
    assert (
        learned_words(train_loader(override(cfg, ["data.workers=1"]), text_encoder.processor, **place), 3, text_encoder)
        == whole[2:5]
    )
    parts = [train_loader(cfg, text_encoder.processor, rank=rank, world=3) for rank in range(3)]
    steps = zip(*(learned_words(part, 4, text_encoder) for part in parts), strict=True)
    ranks = [sorted(text for texts in step for text in texts) for step in steps]
    assert ranks == [sorted(step) for step in whole[:4]]


def test_eval_questions_are_numbered_by_conversation(encoder, cfg):
    """Including those that are context or dropped by a template: `source` of a row names each."""
    text_encoder = encoder("qwen3_5")
    for chosen, wanted in ((cfg, [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]),
                           (override(cfg, ["data.split_turns=false"]), [(0, 0), (1, 2), (2, 0)])):  # fmt: skip
        found = eval_set(chosen, text_encoder.processor, micro_batch=2)
        pieces: list = []
        for batch in found:
            evaluation._evaluate_batch(
                torch.zeros(*batch["input_ids"].shape, len(text_encoder.tokenizer)), batch, pieces
            )
        assert [(piece["row"], piece["answer"]) for piece in pieces] == wanted
        named = [found.origin(piece["file"], piece["row"], piece["answer"]) for piece in pieces]
        assert named[1:-1] == [("one", "two", "three")[number] for _, number in wanted[1:-1]]
        assert named[0].endswith("held.json:0") and named[-1].endswith("a.png")
        assert found.rows == (5 if chosen is cfg else 3)
