"""Joined documents: every token once, in the order of the seed, from a cache file that is written once."""

import json
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.base.env_vars import cache_home
from octavo.config import Dataset
from octavo.data import BadSample, DataError, DocumentEncoder, Loader, Mixture, train_loader
from octavo.data.loaders.rows_from_config import document_rows
from octavo.data.storage import remote
from octavo.data.tasks import concat
from octavo.data.tasks.concat import is_plain_text, join

WORDS = ["one", "two two", "three three three", "fünf 五\n" * 9, "x", "seven " * 30]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(folder, *rows, name="rows.jsonl", **more):
    return folder.read([{"text": row} if isinstance(row, str) else row for row in rows], name, "documents", **more)


def stream(samples):
    return np.concatenate([samples[i].input_ids for i in range(len(samples))]).tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_samples_cover_every_token_once(folder, models, family):
    source, tokenizer = read(folder, *WORDS), models(family).tokenizer
    single = [[*tokenizer(words)["input_ids"], tokenizer.eos_token_id] for words in WORDS]
    in_order = sum(single, [])
    for length in (2, 7, len(in_order) - 1, len(in_order), 10_000):
        encoder = DocumentEncoder(models(family), length)
        held_out = join(source, encoder, "error", None)
        whole = len(in_order) // length * length
        rest = len(in_order) - whole
        expected = in_order[: whole if rest == 1 else None]  # a single token has no label
        assert stream(held_out) == expected and len(held_out) == -(-len(expected) // length)
        sizes = [len(held_out[i].input_ids) for i in range(len(held_out))]
        assert set(sizes[:-1]) <= {length} and sizes[-1] in (length, rest)
        assert encoder.encode(held_out[0]).labels.tolist() == [-100, *in_order[1:length]]
    mixed, again, other = (stream(join(source, DocumentEncoder(models(family), 5), "error", n)) for n in (1, 1, 2))
    assert mixed == again and mixed != other and sorted(mixed) == sorted(other)
    at = [i + 1 for i, token in enumerate(mixed) if token == tokenizer.eos_token_id]
    assert sorted(mixed[a:b] for a, b in zip([0, *at], at, strict=False)) == sorted(single)
    with pytest.raises(IndexError, match="has .* samples of 5 tokens; 999 was requested"):
        join(source, DocumentEncoder(models(family), 5), "error", 1)[999]
    with pytest.raises(DataError, match="seq_length is 1, but joined documents need 2"):
        join(source, DocumentEncoder(models(family), 1), "error", 1)


def test_documents_are_tokenized_once(folder, models, cache_folder, monkeypatch):
    source, log_lines, calls = read(folder, *WORDS), [], []
    plain = DocumentEncoder.tokenize
    monkeypatch.setattr(DocumentEncoder, "tokenize", lambda self, texts: calls.append(len(texts)) or plain(self, texts))
    monkeypatch.setattr(concat, "CHARS_PER_CALL", 30)

    def tokenize(length=7, family="qwen3", **more):
        encoder = DocumentEncoder(models(family), length)
        documents = folder.read(source.rows.path, kind="documents", **more)
        return stream(join(documents, encoder, "error", None, log=log_lines.append))

    first = tokenize()
    assert calls == [4, 2] and "rows.jsonl (447 B) is converted to tokens, once" in log_lines[0] and len(log_lines) == 1
    assert len(list(cache_folder.glob("*.tokens"))) == 1
    assert tokenize() == first and tokenize(length=11) == first and len(calls) == 2  # for any seq_length
    assert tokenize(max_samples=3) == first[: len(tokenize(max_samples=3))] and len(calls) == 3
    tokenize(family="llama")
    assert len(calls) == 5
    folder.json([{"text": "another"}], "rows.jsonl")
    assert len(tokenize()) < 20 and len(calls) == 6
    assert not list(cache_folder.glob(".*"))


def test_file_that_changes_during_tokenization_is_rejected(folder, models, cache_folder, monkeypatch):
    source = read(folder, *WORDS)
    plain = DocumentEncoder.tokenize

    def slow(self, texts):
        with open(source.rows.path, "a") as file:
            file.write('{"text": "late"}\n')
        return plain(self, texts)

    monkeypatch.setattr(DocumentEncoder, "tokenize", slow)
    with pytest.raises(DataError, match=r"rows.jsonl changed while it was read; start again when it is complete"):
        join(source, DocumentEncoder(models("qwen3"), 8), "error", None)
    assert not list(cache_folder.glob("*.tokens")) and not list(cache_folder.glob(".*"))
    with pytest.raises(DataError, match="changed while it was read; start again"):
        os.truncate(source.rows.path, 10)
        join(source, DocumentEncoder(models("qwen3"), 8), "error", None)
    assert not list(cache_folder.glob("*.tokens")) and not list(cache_folder.glob(".*"))


def test_damaged_cache_file_is_named(folder, models, cache_folder):
    source, encoder = read(folder, *WORDS), DocumentEncoder(models("qwen3"), 8)
    join(source, encoder, "error", None)
    (file,) = cache_folder.glob("*.tokens")
    whole = file.read_bytes()
    for damaged in (b"", whole[:10], whole[:-1], whole[:-16] + b"\xff" * 16, whole[:-16] + b"\0" * 16, whole[100:]):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{file.name}, a file of the data cache, is damaged .*; remove it"):
            join(source, encoder, "error", None)
    file.write_bytes(b"\xff" * 8 + whole[8:])  # tokens outside the vocabulary
    with pytest.raises(DataError, match=rf"{file.name}.* is damaged \(sample 0 has the token 65535, .*; remove it"):
        join(source, encoder, "error", None)[0]
    file.unlink()
    assert len(join(source, encoder, "error", None))


def test_bad_rows_are_reported_with_and_without_cache(folder, models):
    image = folder.image("a.png")
    rows = ["good", {"text": 7, "id": "seven"}, {"text": "a <|im_end|> b"}, {"text": "see", "image": image}, "also"]
    encoder = DocumentEncoder(models("qwen3_vl"), 8)
    fresh = folder.json([rows[0], rows[1]], "two.jsonl")
    with pytest.raises(BadSample, match=r"two.jsonl, row 0: is 'good'; expected an object"):
        join(folder.read(fresh, kind="documents", format="text"), encoder, "error", None)
    source = read(folder, *rows)
    joined = join(source, encoder, "skip", None)
    records = [(record["row"], record["id"], record["action"]) for record in joined.records]
    assert records == [(1, "seven", "skipped"), (2, None, "with control tokens"), (3, None, "skipped")]
    assert "set data.join: false" in joined.records[2]["reason"]
    assert [ids.count(encoder.end_id) for ids in (stream(joined),)] == [
        4
    ]  # three documents, and one end token in a text
    assert join(source, encoder, "skip", None).records == joined.records
    with pytest.raises(BadSample, match=r"row 1 \(id seven\): 'text' is 7; expected a text"):
        join(source, encoder, "error", None)
    empty = read(folder, {"text": ""}, {"text": "a <|image_pad|>"}, name="bad.jsonl", format="text")
    with pytest.raises(DataError, match=r"all 2 rows were left out; the last one \(row 1\) because it its"):
        join(empty, encoder, "skip", None)


def test_only_plain_text_is_joined(folder):
    image = folder.image("a.png")
    assert is_plain_text(read(folder, *WORDS))
    assert is_plain_text(read(folder, "a", {"text": 7}, {"text": "b", "images": None}))
    assert not is_plain_text(read(folder, "a", {"text": "b", "image": image}))
    assert not is_plain_text(read(folder, folder.llava("Hi", "Ho")))


def config(path, report, **more):
    dataset = Dataset(path=str(path))
    data = {"train": [dataset], "eval": [], "on_long": "drop", "train_on_prompt": True, "system": None, "workers": 0,
            "max_image_megapixels": 100.0, "video": None, "sealed": False, "on_bad_sample": "skip", "join": True,
            "mask_empty_think": True, "mask_reasoning": False, **more}  # fmt: skip
    train = SimpleNamespace(phase="pretrain", seq_length=6, micro_batch=2, global_batch=4)
    return SimpleNamespace(
        model=SimpleNamespace(path=str(path.parent / "plain")),
        lora=None,
        data=SimpleNamespace(**{"cache": None, "packing": False, **data}),
        train=train,
        run=SimpleNamespace(seed=3, timeout=60.0),
    )


def batches(loader, steps):
    try:
        return [batch["input_ids"].tolist() for _ in range(steps) for batch in next(loader)]
    finally:
        loader.close()


def test_resume_is_exact_for_any_ranks_and_workers(folder, models, tmp_path):
    path = folder.json([{"text": words} for words in (*WORDS, " ")], "rows.jsonl")
    cfg, report = config(path, tmp_path / "skipped.jsonl"), tmp_path / "skipped.jsonl"
    whole = batches(train_loader(cfg, models("qwen3"), report_path=report), 9)
    assert len(whole) == 18 and all(len(row) == 6 for batch in whole for row in batch)
    (listed,) = [json.loads(line) for line in report.read_text().splitlines()]
    assert (listed["row"], listed["action"]) == (6, "skipped") and listed["file"].endswith("rows.jsonl")
    assert batches(train_loader(cfg, models("qwen3"), start_row=12), 6) == whole[6:]
    by_workers = config(path, report, workers=2)
    assert batches(train_loader(by_workers, models("qwen3")), 9) == whole
    ranks = [batches(train_loader(cfg, models("qwen3"), rank=r, world=2), 9) for r in (0, 1)]
    assert [batch for pair in zip(*ranks, strict=True) for batch in pair] == whole
    apart = batches(train_loader(config(path, report, join=False), models("qwen3")), 1)
    assert apart != whole[:2]


def test_pickle_of_joined_documents_is_small(folder, models):
    source = read(folder, *(["long " * 1000] * 50))
    whole = join(source, DocumentEncoder(models("qwen3"), 64), "error", 5)
    sent = pickle.dumps(Loader(Mixture([whole]), SimpleNamespace(pad_id=0), 1, 1).mixture)
    assert len(sent) < 10_000
    assert stream(pickle.loads(sent).sources[0]) == stream(whole)


def test_unwritable_cache_folder_is_named(folder, models, monkeypatch, cache_folder):
    cache_folder.write_text("in the way")
    with pytest.raises(DataError, match=r"cannot keep rows.jsonl as tokens: .*Name a folder"):
        join(read(folder, *WORDS), DocumentEncoder(models("qwen3"), 8), "error", None)
    assert cache_home() == cache_folder


def test_changed_documents_at_url_are_joined_again(folder, models):
    path = folder.json([{"text": f"Once {n}."} for n in range(9)], "text.jsonl")
    cfg = SimpleNamespace(
        data=SimpleNamespace(join=True, cache=str(folder.path / "cache"), on_bad_sample="error"),
        train=SimpleNamespace(phase="pretrain"),
    )
    encoder = DocumentEncoder(models("qwen3"), 16)

    def tokens():
        remote.list_files.cache_clear()
        return document_rows(cfg, Dataset(path=f"file://{path}"), encoder, None)

    first = tokens()
    assert isinstance(first, concat.JoinedDocuments) and tokens().file == first.file
    path.write_text(path.read_text().replace("Once", "Twice"))
    assert tokens().file != first.file
