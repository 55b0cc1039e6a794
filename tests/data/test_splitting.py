"""Conversations split at their questions: every answer learned with its reasoning, once; length, order and lists."""

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
    made, rows = encoder(template), split(folder.read([row("b1"), row(*answers), row("b2", "b3")]))
    assert len(rows) == 6 and [rows.place(n) for n in range(6)] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    for n in range(3):
        sample = made.encode(rows[n + 1])
        assert learned(made, sample) == [block(n + 1, opened) + ENDED]
        assert (sample.row, sample.lost, sample.notes, len(sample.answers)) == (1, 0, [], n + 1)
        text = made.tokenizer.decode(sample.input_ids)
        assert f"a{n}" in text + "a0" and f"q{n + 2}" not in text  # all that was said before, and nothing after
        assert (f"r{n}" in text) == (template == "qwen3_vl" and n > 0)
    assert [learned(made, made.encode(rows[n])) for n in (0, 4, 5)] == [[f"b{n}{ENDED}"] for n in (1, 2, 3)]
    with pytest.raises(IndexError):
        rows[6]


def test_split_works_if_earlier_answers_end_differently(folder, encoder):
    """As gpt-oss's: no row of two answers can be learned whole, and each of its questions can."""
    other = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}"
        "{% if m.role == 'assistant' and not loop.last %}<|end|>{% else %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made, source = encoder(other), folder.read([row("a1", "a2")])
    with pytest.raises(BadSample, match="or set data.split_turns: true"):
        made.encode(source[0])
    assert [learned(made, made.encode(split(source)[n])) for n in (0, 1)] == [[f"a1{ENDED}"], [f"a2{ENDED}"]]


def test_calls_system_and_images_stay_with_their_question(folder, encoder):
    """ShareGPT and messages alike; of images those that were seen, of answers those behind the last question."""
    images = [folder.image(name) for name in ("a.png", "b.png", "c.png", "d.png")]
    turns = [*TURNS[:-2], ("human", {"value": "<image>And this?"}), ("gpt", {"value": "No.", "reasoning": "Red."})]
    made = encoder("qwen3_5")
    rows = {"conversations": [{"from": who, **turn} for who, turn in turns], "messages": [*as_messages(turns)]}
    rows["messages"][-1]["reasoning"] = "Red."
    for key, spoken in rows.items():
        found = split(folder.read([{key: spoken, "tools": [TOOL], "images": images}], f"{key}.json"))
        assert len(found) == 2 and [len(found[n].images) for n in (0, 1)] == [3, 4]
        first, second = (made.encode(found[n]) for n in (0, 1))
        assert [text.partition("\n")[0] for text in learned(made, first)] == ["I look.", "Both blue."]
        assert learned(made, second) == [f"Red.\n</think>\n\nNo.{ENDED}"] and second.answers[:2] == ((0, 0), (0, 0))
        assert (first.images, second.images) == (3, 4)
        for sample in (first, second):
            assert "Be brief." in made.tokenizer.decode(sample.input_ids)
        assert len(made.encode(found[0]).pixel_values) * 4 == len(second.pixel_values) * 3


def test_unanswered_question_is_left_out(folder, encoder):
    asked = {"messages": [*row(("r1", "a1"))["messages"], {"role": "user", "content": "q2"}]}
    made, rows = encoder("qwen3_5"), split(folder.read([asked]))
    assert len(rows) == 1 and learned(made, made.encode(rows[0])) == [f"r1\n</think>\n\na1{ENDED}"]


def test_sounds_stay_with_their_question(folder):
    for name in ("a.wav", "b.wav"):
        (folder.path / name).write_bytes(b"nobody listens")
    rows = split(folder.read([folder.llava("<audio>q1", "a1", "<audio>q2", "a2", audio=["a.wav", "b.wav"])]))
    assert [[path.name for path in rows[n].sounds] for n in (0, 1)] == [["a.wav"], ["a.wav", "b.wav"]]


def test_prompt_with_answer_is_split(folder, encoder):
    asked = {"prompt": [*row(("r1", "a1"))["messages"], {"role": "user", "content": "q2"}], "answer": ["a2", "x"]}
    made, rows = encoder("qwen3_5"), split(folder.read([asked, {"prompt": "q"}]))
    assert [learned(made, made.encode(rows[n])) for n in (0, 1)] == [[f"r1\n</think>\n\na1{ENDED}"], [f"a2{ENDED}"]]
    with pytest.raises(BadSample, match="a prompt and no answer"):
        rows[2]


def test_questions_are_counted_without_opening_files(folder, tmp_path):
    """An image that comes later changes no number; a row that is no conversation is one, bad, row."""
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
    held = {**row(("r1", "a1"), ("r2", "a2"), "a3"), "source": ["one", "two", "three"]}
    seen = {**row("a1"), "images": [folder.image()]}
    seen["messages"][0]["content"] = "<image>"
    folder.json([row("a0"), held, seen], "held.json")
    return load_config_text(CONFIG.format(path=folder.path))


def seen(loader, steps, of):
    """The words that each micro-batch of so many steps learns."""
    return [
        [of.tokenizer.decode(batch["input_ids"][batch["labels"] != IGNORE]) for batch in step]
        for step in islice(loader, steps)
    ]


@pytest.mark.parametrize("packing", [False, True])
def test_epoch_has_every_answer_once_and_resumes(folder, encoder, cfg, packing):
    """20 questions in 8 rows, two of them too long; packed or not, by workers or here, whole or after a stop."""
    made = encoder("qwen3_5")
    cfg = override(cfg, ["data.packing=true", "data.window=20"]) if packing else cfg
    said = []
    prepare_datasets(cfg, made.processor, said.append)
    assert any("questions" in one for one in said)
    report = folder.path / "skipped.jsonl"
    loader = train_loader(cfg, made.processor, report_path=report)
    assert count_epoch_rows(cfg, lambda: None) == 20 == sum(loader.mixture.sizes)
    whole = seen(loader, 9, made)
    epoch = [text for step in whole for text in step][: len(loader.packs(0)) if packing else 20]
    wanted = {f"r{n}{m}\n</think>\n\na{n}{m}" for n in range(8) for m in range(1 + n % 4)}
    wanted -= {f"r5{m}\n</think>\n\na5{m}" for m in range(2)}
    assert sorted("".join(epoch).split(ENDED)[:-1]) == sorted(wanted) and len(wanted) == 18
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert sorted((one["row"], one["question"], one["action"]) for one in records) == [
        (5, 1, "dropped"),
        (5, 2, "dropped"),
    ]
    first = train_loader(cfg, made.processor)
    seen(first, 2, made)
    place = {"place": first.place} if packing else {"start_row": first.rows}
    assert seen(train_loader(override(cfg, ["data.workers=1"]), made.processor, **place), 3, made) == whole[2:5]
    parts = [train_loader(cfg, made.processor, rank=rank, world=3) for rank in range(3)]
    steps = zip(*(seen(part, 4, made) for part in parts), strict=True)
    ranks = [sorted(text for own in step for text in own) for step in steps]
    assert ranks == [sorted(step) for step in whole[:4]]


def test_eval_questions_are_numbered_by_conversation(encoder, cfg):
    """Also those that are context, or that a template leaves out: `source` of a row names each."""
    made = encoder("qwen3_5")
    for chosen, wanted in ((cfg, [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]),
                           (override(cfg, ["data.split_turns=false"]), [(0, 0), (1, 2), (2, 0)])):  # fmt: skip
        found = eval_set(chosen, made.processor, micro_batch=2)
        pieces: list = []
        for batch in found:
            evaluation._policy(torch.zeros(*batch["input_ids"].shape, len(made.tokenizer)), batch, pieces)
        assert [(piece["row"], piece["answer"]) for piece in pieces] == wanted
        named = [found.origin(piece["file"], piece["row"], piece["answer"]) for piece in pieces]
        assert named[1:-1] == [("one", "two", "three")[number] for _, number in wanted[1:-1]]
        assert named[0].endswith("held.json:0") and named[-1].endswith("a.png")
        assert found.rows == (5 if chosen is cfg else 3)
