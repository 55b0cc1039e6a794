"""Preferences in the layouts of TRL, LLaMA-Factory and messages; only answers after the shared prompt have labels."""

import json
from types import SimpleNamespace

import pytest
import torch

from octavo.config import Dataset
from octavo.data import (
    BadSample,
    DataError,
    Encoder,
    LabelledEncoder,
    LongSample,
    PairEncoder,
    pair_loader,
    pair_set,
    read,
)
from octavo.data.tasks.sources import detect_preference_kind

USER = {"role": "user", "content": "Which?"}
LEFT, RIGHT = {"role": "assistant", "content": "Left."}, {"role": "assistant", "content": "Right."}


def pairs(folder, rows, kind="pairs", **more):
    path = folder.json(rows)
    dataset = Dataset(path=str(path), **more)
    return read(dataset, kind)


def describe(conversation):
    return [(turn.role, turn.text, len(turn.parts)) for turn in conversation.turns]


ONE = {
    "trl, explicit": {"prompt": "Which?", "chosen": "Left.", "rejected": "Right."},
    "trl, explicit turns": {"prompt": [USER], "chosen": [LEFT], "rejected": [RIGHT]},
    "trl, implicit": {"chosen": [USER, LEFT], "rejected": [USER, RIGHT]},
    "ultrafeedback": {"prompt": "Which?", "chosen": [USER, LEFT], "rejected": [USER, RIGHT], "messages": [USER, LEFT]},
    "llama-factory": {"conversations": [{"from": "human", "value": "Which?"}],
                      "chosen": {"from": "gpt", "value": "Left."}, "rejected": {"from": "gpt", "value": "Right."}},
    "llama-factory, alpaca": {"instruction": "Which?", "input": "", "chosen": "Left.", "rejected": "Right."},
    "messages": {"messages": [USER], "chosen": LEFT, "rejected": RIGHT},
    "parts": {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Which?"}]}], "rejected": [RIGHT],
              "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "Left."}]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_all_layouts_of_a_pair_are_equal(folder, name):
    row = pairs(folder, [ONE[name]])[0]
    assert describe(row.chosen) == [("user", "Which?", 1), ("assistant", "Left.", 1)] and row.context_answers == 0
    assert describe(row.rejected) == [("user", "Which?", 1), ("assistant", "Right.", 1)]


def test_system_key_becomes_the_first_turn(folder):
    """LLaMA-Factory's `system` key next to turns, in pairs, labelled rows, prompts and SFT rows."""
    system_key = {"system": "Be brief."}
    turns = {"conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Left."}]}
    expected = [("system", "Be brief.", 1), ("user", "Which?", 1), ("assistant", "Left.", 1)]
    for name in ONE:
        row = pairs(folder, [ONE[name] | system_key])[0]
        assert describe(row.chosen) == expected and describe(row.rejected)[0] == expected[0]
    for row in (turns, {"messages": [USER, LEFT]}, ONE["trl, explicit"] | {"completion": "Left."}):
        assert describe(pairs(folder, [row | system_key | {"label": True}], "labelled")[0].conversation) == expected
        assert describe(pairs(folder, [row | system_key], "conversations")[0]) == expected
        prompt = pairs(folder, [row | system_key], "prompts")[0]
        assert describe(prompt.conversation) == expected[:2] and "system" not in prompt.columns
    again = {"messages": [{"role": "system", "content": "Be brief."}, USER, LEFT]}
    assert describe(pairs(folder, [again | system_key], "conversations")[0]) == expected
    for row in ({**again, "system": "Be long."}, {**turns, "system": ["Be brief."]}, {**turns, "system": 0}):
        with pytest.raises(BadSample, match=r"rows\.json, row 0: (has the system 'Be long\.', but a|'system' is )"):
            pairs(folder, [row], "conversations")[0]


def test_pairs_with_long_prompts_and_images(folder):
    image = folder.image()
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"chosen": [system, USER, LEFT, USER, LEFT], "rejected": [system, USER, LEFT, USER, RIGHT], "images": [image]},
        {"prompt": [dict(USER, content="<image>"), LEFT, USER], "chosen": "a", "rejected": [RIGHT], "image": image},
        {"instruction": "a", "input": "b", "system": "c", "chosen": "d", "rejected": "e"},
        {"chosen": [USER, LEFT, USER, LEFT], "rejected": [USER, RIGHT, {"role": "user", "content": "Sure?"}, RIGHT]},
    ]  # fmt: skip
    first, second, third, fourth = (pairs(folder, rows)[n] for n in range(4))
    assert (
        first.context_answers == 1
        and describe(first.chosen)[1] == ("user", "Which?", 2)
        and len(first.rejected.images) == 1
    )
    assert (
        second.context_answers == 1
        and describe(second.rejected)[0] == ("user", "", 1)
        and len(second.rejected.images) == 1
    )
    assert [turn[:2] for turn in describe(third.chosen)] == [("system", "c"), ("user", "a\nb"), ("assistant", "d")]
    assert fourth.context_answers == 0 and len(fourth.rejected.turns) == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, r"has the keys \['chosen', 'prompt'\]; expected 'prompt' or turns in"),
        ([], r"has \[\]; expected"),
        ({"chosen": "a b", "rejected": "a c"}, r"has answers and no prompt \(the keys"),
        ({"prompt": "a", "messages": [USER], "chosen": "b", "rejected": "c"}, "has both 'prompt' and 'messages'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has the same answer as chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "turn 2 is an assistant turn without text"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, r"has the keys \['prompt', 'rejected'\]; expected"),
        ({"prompt": "a", "chosen": 1.5, "rejected": "b"}, "turn 2 is 1.5"),
        ({"prompt": "a", "chosen": [], "rejected": "b"}, "has no assistant turn"),
        ({"chosen": [USER, LEFT], "rejected": [dict(USER, content="x"), LEFT]}, r"share 0 turn\(s\) and continue with"),
        ({"chosen": [USER, LEFT], "rejected": [USER, LEFT, USER, RIGHT]}, "share 2 turn.* with nothing and user"),
        ({"prompt": "a", "chosen": USER, "rejected": LEFT}, "has no assistant turn, so there is nothing"),
        ({"prompt": "a <image>", "chosen": "b", "rejected": "c"}, "names no image"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["../a.png"]}, "is outside the image folder"),
        ({side: [{"role": "user", "content": [{"type": "image", "image": f"{side}.png"}]}, answer]
          for side, answer in (("chosen", LEFT), ("rejected", RIGHT))},
         "has the image 'chosen.png' in the prompt of chosen and 'rejected.png' in the prompt of rejected"),
        ({"instruction": ["a"], "chosen": "b", "rejected": "c"}, r"'instruction' is \['a'\]; expected text"),
    ],
)  # fmt: skip
def test_bad_pairs_are_rejected(folder, row, reason):
    with pytest.raises(BadSample, match=rf"rows\.json, row 1: .*{reason}"):
        pairs(folder, [ONE["messages"], row])[1]


def test_format_of_preferences_is_rejected(folder):
    with pytest.raises(DataError, match="format is llava, but preferences are detected by their keys; remove it"):
        pairs(folder, [ONE["messages"]], format="llava")


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "qwen3"])
def test_labels_equal_sft_labels_after_the_prompt(folder, models, family):
    """Tokens equal those of any conversation, and only the differing answers are learned."""
    vision = family != "qwen3"
    prompt = [{"role": "user", "content": "<image>" * vision + "Which?"}, LEFT, USER]
    row = {"prompt": prompt, "chosen": [LEFT], "rejected": "Right.", **({"images": [folder.image()]} if vision else {})}
    pair = PairEncoder(models(family), 200).encode(pairs(folder, [row])[0])
    for sample, answer in ((pair.chosen, LEFT), (pair.rejected, RIGHT)):
        sft = {"messages": [*prompt, answer], **({"images": row["images"]} if vision else {})}
        whole = Encoder(models(family), 200).encode(folder.read([sft], "sft.json")[0])
        assert sample.input_ids.tolist() == whole.input_ids.tolist() and sample.answers == ((0, 0), *whole.answers[1:])
        start, end = whole.answers[1]
        assert sample.labels[start:end].tolist() == whole.labels[start:end].tolist()
        assert (sample.labels[:start] == -100).all() and (sample.labels[end:] == -100).all()
    assert pair.nbytes == pair.chosen.nbytes + pair.rejected.nbytes and (pair.row, pair.id) == (0, None)


def test_long_pairs_are_dropped_or_cut(folder, models):
    row = pairs(folder, [{"prompt": "a", "chosen": "long " * 40 + "b", "rejected": "long " * 40 + "c"}])[0]
    with pytest.raises(LongSample, match="row 0: is .* tokens long, seq_length is 40"):
        PairEncoder(models("qwen3"), 40).encode(row)
    with pytest.raises(LongSample, match="row 0: chosen and rejected are the same 40 tokens; seq_length is 40"):
        PairEncoder(models("qwen3"), 40, on_long="cut").encode(row)
    with pytest.raises(DataError, match="train_on_prompt is true, but preferences compare answers"):
        PairEncoder(models("qwen3"), 40, train_on_prompt=True)


def test_answers_with_equal_tokens_are_rejected(folder, models, monkeypatch):
    """Many templates strip the text of a turn."""
    tokenizer, expression = models("qwen3").tokenizer, "message['content'] }}"
    monkeypatch.setattr(
        tokenizer, "chat_template", tokenizer.chat_template.replace(expression, "message['content'].strip() }}")
    )
    row = pairs(folder, [{"prompt": "a", "chosen": "b", "rejected": " b"}])[0]
    match = r"row 0: chosen and rejected are the same \d+ tokens: the chat template"
    with pytest.raises(BadSample, match=match) as seen:
        PairEncoder(models("qwen3"), 40, on_long="cut").encode(row)
    assert not isinstance(seen.value, LongSample)


def config(folder, rows, **data):
    dataset = Dataset(path=str(folder.json(rows)))
    more = {"on_long": "drop", "train_on_prompt": False, "system": None, "max_image_megapixels": 100.0,
            "video": None, "workers": 0,
            "on_bad_sample": "skip", "mask_empty_think": True, "mask_reasoning": False, "train": [dataset],
            "eval": [dataset], **data}  # fmt: skip
    return SimpleNamespace(
        data=SimpleNamespace(**{"cache": None, "sealed": False, **more}), run=SimpleNamespace(seed=1, timeout=60.0),
        train=SimpleNamespace(seq_length=64, micro_batch=2, global_batch=4),
    )  # fmt: skip


def words(processor, batch, row):
    has_label = batch["labels"][row] != -100
    return processor.tokenizer.decode(batch["input_ids"][row][has_label]).split("<")[0]


def test_batches_are_chosen_before_rejected(folder, models):
    processor, image = models("qwen3_vl"), folder.image(size=(32, 32))
    rows = [{"prompt": f"{n}?", "chosen": f"c{n}", "rejected": f"r{n} is worse", "images": [image]} for n in range(8)]
    rows[5] = {"prompt": "a", "chosen": "b", "rejected": "b"}
    cfg = config(folder, rows)
    whole = [next(stream) for stream in [pair_loader(cfg, processor)] for _ in range(4)]
    for batches in whole:
        assert len(batches) == 2
        for batch in batches:
            count = len(batch["input_ids"]) // 2
            assert batch["meta"].rows[:count] == batch["meta"].rows[count:]
            for place, row in enumerate(batch["meta"].rows[:count]):
                assert words(processor, batch, place) == f"c{row}"
                assert words(processor, batch, count + place) == f"r{row} is worse"
            assert len(batch["image_grid_thw"]) == 2 * count
    seen = [row for step in whole for batch in step for row in batch["meta"].rows]
    assert sorted(set(seen)) == [0, 1, 2, 3, 4, 6, 7]
    rest = next(pair_loader(cfg, processor, start_row=12))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(rest, whole[3], strict=True))
    ranks = [next(pair_loader(cfg, processor, rank=rank, world=2)) for rank in (0, 1)]
    assert [batch["meta"].rows for (batch,) in ranks] == [batch["meta"].rows for batch in whole[0]]
    eval_batches = list(pair_set(cfg, processor))
    assert [batch["meta"].rows for batch in eval_batches] == [(0, 1) * 2, (2, 3) * 2, (4, 4), (6, 7) * 2]
    assert pair_set(config(folder, rows, eval=[]), processor) is None


def test_collate_of_no_pairs_is_two_masked_rows(folder, models):
    rows = [{"prompt": "long " * 90, "chosen": "b", "rejected": "c"}, ONE["messages"]]
    cfg = config(folder, rows)
    cfg.train.micro_batch = 1
    batches = next(pair_loader(cfg, models("qwen3")))
    empty = [batch for batch in batches if not batch["meta"].samples]
    assert len(empty) == 2 and empty[0]["input_ids"].shape == (2, 2) and (empty[0]["labels"] == -100).all()


LABELLED = [
    {"prompt": "Which?", "completion": "Left.", "label": True},
    {"prompt": [USER], "completion": [RIGHT], "label": False},
    {"completion": [USER, LEFT], "label": True},
    {"messages": [USER, RIGHT, USER, LEFT], "kto_tag": False},
    {"conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "Left."}], "label": True},
    {"instruction": "Which?", "input": "", "output": "Left.", "system": "", "kto_tag": False},
]


def test_labelled_rows(folder):
    found = [pairs(folder, LABELLED, "labelled")[n] for n in range(6)]
    assert [row.label for row in found] == [True, False, True, False, True, False]
    assert [row.context_answers for row in found] == [0, 0, 0, 1, 0, 0]
    assert describe(found[5].conversation) == [("user", "Which?", 1), ("assistant", "Left.", 1)]
    assert all(row.conversation.turns[-1].role == "assistant" for row in found)


def test_pair_prompt_may_be_only_an_image(folder):
    row = {"instruction": "", "image": folder.image(), "chosen": "a", "rejected": "b"}
    assert len(pairs(folder, [row])[0].chosen.images) == 1
    with pytest.raises(BadSample, match="so there is no question"):
        pairs(folder, [{**row, "image": None}])[0]


def test_labels_in_csv_are_parsed(folder):
    path = folder.path / "rows.csv"
    path.write_text("prompt,completion,label\na,b,true\nc,d,False\ne,f,1\ng,h, 0\ni,j,maybe\n")
    found = read(Dataset(path=str(path)), "labelled")
    assert [found[n].label for n in range(4)] == [True, False, True, False]
    assert detect_preference_kind(Dataset(path=str(path))) == "labelled"
    with pytest.raises(BadSample, match="row 4: has the label 'maybe'; expected 'label', true or false"):
        found[4]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, r"has the keys \['completion', 'prompt'\]; expected 'label', true"),
        ({"prompt": "a", "completion": "b", "label": 1}, "has the label 1; expected 'label', true or false"),
        ({"completion": "b", "label": True}, "has answers and no prompt"),
        ({"messages": [USER, LEFT, USER], "label": True}, "ends with a turn of the user"),
        ({"prompt": "a", "label": True}, "has no assistant turn"),
        ({"prompt": "a", "completion": "see <image>", "image": "a.png", "label": True}, "has an image in the answer"),
        ("a", "has 'a'; expected 'label'"),
    ],
)  # fmt: skip
def test_bad_labelled_rows_are_rejected(folder, row, reason):
    with pytest.raises(BadSample, match=rf"row 1: .*{reason}"):
        pairs(folder, [LABELLED[0], row], "labelled")[1]


def test_labelled_batches_cross_prompts_and_answers(folder, models):
    processor = models("qwen3")
    rows = [{"prompt": f"p{n} " * (n + 1), "completion": f"c{n} " * (5 - n), "label": n % 2 == 0} for n in range(4)]
    batches = next(pair_loader(config(folder, rows), processor, kind="labelled"))
    order = [row for batch in batches for row in batch["meta"].rows]
    assert sorted(order) == [0, 1, 2, 3]
    for batch in batches:
        crossed = batch["crossed"]
        assert batch["desirable"].tolist() == [row % 2 == 0 for row in batch["meta"].rows]
        for place, row in enumerate(batch["meta"].rows):
            before = order[order.index(row) - 1]
            text = processor.tokenizer.decode(crossed["input_ids"][place][crossed["attention_mask"][place] == 1])
            assert text.startswith(processor.tokenizer.decode(batch["input_ids"][place][:6])[:20]) and f"p{row}" in text
            assert f"c{before}".startswith(words(processor, crossed, place).split()[0]) and f"c{row}" not in text
            assert words(processor, batch, place).split()[0] == f"c{row}"
    longest, crossed = (max(max(b["meta"].lengths) for b in of) for of in (batches, [b["crossed"] for b in batches]))
    cfg = config(folder, rows)
    cfg.train.seq_length = crossed - 1
    cut = next(pair_loader(cfg, processor, kind="labelled"))
    assert max(max(batch["crossed"]["meta"].lengths) for batch in cut) == crossed - 1 >= longest


@pytest.mark.parametrize(
    ("out", "workers"), [((), 0), ((1,), 0), ((0, 2, 5), 1), ((1, 2, 3, 4, 5), 0), ((0, 1, 3, 4, 5, 6), 0)], ids=str
)
def test_crossed_answers_do_not_depend_on_ranks(folder, models, tmp_path, out, workers):
    """The first row of a rank gets the answer of the nearest previous row that is not left out, which another rank
    trains on. Rows that are left out are listed once."""
    rows = [{"prompt": f"p{n}", "completion": f"c{n}", "label": n % 2 == 0} for n in range(7)]
    rows = [{**row, "label": "bad"} if n in out else row for n, row in enumerate(rows)]
    cfg = config(folder, rows)
    cfg.data.workers, cfg.train.global_batch, listed = workers, 6, tmp_path / "skipped.jsonl"

    def crossed(rank, world):
        loader = pair_loader(cfg, models("qwen3"), kind="labelled", rank=rank, world=world, report_path=listed)
        for step in range(7):
            for batch in next(loader):
                theirs, meta = batch["crossed"], batch["meta"]
                for place, row in enumerate(meta.rows):
                    count = theirs["meta"].lengths[place]
                    yield step, row, *(theirs[key][place, :count].tolist() for key in ("input_ids", "labels"))
        loader.close()

    one = sorted(crossed(0, 1))
    for world in (2, 3, 4, 6):
        assert sorted(found for rank in range(world) for found in crossed(rank, world)) == one, world
    lines = [json.loads(line)["row"] for line in listed.read_text().splitlines()] if out else []
    assert sorted(lines) == [*out]


def test_single_labelled_row_has_no_crossed_labels(folder, models):
    rows = [LABELLED[0], {"prompt": "a", "completion": "b"}]
    cfg = config(folder, rows)
    cfg.train.global_batch = 2
    (batch,) = next(pair_loader(cfg, models("qwen3"), kind="labelled"))
    assert (batch["labels"] != -100).any() and not (batch["crossed"]["labels"] != -100).any()
    assert batch["desirable"].tolist() == [True]
    cfg.train.global_batch = 1
    with pytest.raises(DataError, match="global_batch is 1, but KTO compares the rows of a step with each other"):
        pair_loader(cfg, models("qwen3"), kind="labelled")
    assert LabelledEncoder(models("qwen3"), 64).encode(pairs(folder, rows, "labelled")[0]).label is True
