"""Packing: the plan is a pure function, streams do not depend on ranks and workers, and samples are separate."""

from __future__ import annotations

import os
import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from octavo.data import BadSample, DataError, DocumentEncoder, Encoder, Mixture, PackLoader, collate_pack
from octavo.data.batching.packing import assign_to_ranks, pack, pack_cost, padding_share
from octavo.data.encoding.sample import Sample
from octavo.data.loaders import token_counts
from octavo.data.rows.image_refs import load, size

LENGTHS = st.lists(st.integers(1, 64), max_size=60)


@given(LENGTHS)
def test_every_sample_is_in_one_pack_and_packs_fit(lengths):
    packs = pack(lengths, 64)
    assert sorted(chain(*packs)) == list(range(len(lengths)))
    sizes = [sum(lengths[n] for n in one) for one in packs]
    assert all(0 < size <= 64 for size in sizes) and all(list(one) == sorted(one) for one in packs)
    assert sum(size <= 32 for size in sizes) <= 1  # otherwise two packs would have been one
    assert packs == pack(list(lengths), 64)
    assert padding_share(packs, lengths, 64) == pytest.approx(1 - sum(sizes) / (64 * len(packs)) if packs else 0)


def reference_pack(lengths: list[int], capacity: int) -> list[tuple[int, ...]]:
    """Reference implementation of best-fit decreasing, which scans every pack."""
    packs: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        rooms = [(capacity - sum(lengths[n] for n in one), k) for k, one in enumerate(packs)]
        fitting = [found for found in rooms if found[0] >= lengths[number]]
        if fitting:
            packs[min(fitting)[1]].append(number)
        else:
            packs.append([number])
    return [tuple(sorted(one)) for one in packs]


@given(LENGTHS)
def test_pack_is_best_fit_decreasing(lengths):
    assert pack(lengths, 64) == reference_pack(lengths, 64)


def test_lengths_over_capacity_are_rejected():
    for bad in (0, 65):
        with pytest.raises(ValueError, match=rf"sample 1 has {bad} tokens; packs of 64"):
            pack([3, bad], 64)


@given(st.lists(st.integers(0, 10**9), max_size=24), st.integers(1, 4))
def test_packs_are_distributed_evenly(costs, ranks):
    dealt = assign_to_ranks(costs, ranks)
    assert sorted(chain(*dealt)) == list(range(len(costs))) and len(dealt) == ranks
    assert max(map(len, dealt)) == -(-len(costs) // ranks)
    assert dealt == assign_to_ranks(costs, ranks)


def test_most_expensive_packs_go_to_different_ranks():
    assert assign_to_ranks([9, 8, 2, 1], 2) == [(0, 3), (1, 2)]
    assert assign_to_ranks([9, 8, 2], 2) == [(0,), (1, 2)]
    assert pack_cost([8]) > pack_cost([4, 4])


# --- one pack -------------------------------------------------------------------------------------------------------


def sample(*ids: int, images: int = 0) -> Sample:
    tokens = np.array(ids)
    pixels = np.full((images, 3), ids[0], np.float32) if images else None
    return Sample(tokens, tokens.copy(), None, pixels, None, images, row=ids[0])


def test_pack_has_no_mask_and_no_label_at_sample_starts():
    batch = collate_pack([sample(1, 2, 3), sample(4, images=2), sample(5, 6)], 9, 300)
    assert batch["input_ids"].shape == (1, 128) and "attention_mask" not in batch
    assert batch["input_ids"][0, :8].tolist() == [1, 2, 3, 4, 5, 6, 9, 9]
    assert batch["labels"][0, :8].tolist() == [-100, 2, 3, -100, -100, 6, -100, -100]
    found = batch["boundaries"]
    assert (found.edges, found.samples, found.tokens, found.length) == ((0, 3, 4, 6, 128), 3, 6, 128)
    assert batch["meta"].lengths == (3, 1, 2) and batch["meta"].images == (0, 2, 0)
    assert batch["pixel_values"][:, 0].tolist() == [4, 4]


def test_packs_are_padded_to_128_or_capacity():
    whole = collate_pack([sample(*range(1, 8))], 0, 7)
    assert whole["boundaries"].edges == (0, 7)
    assert collate_pack([sample(*range(1, 8))], 0, 100)["boundaries"].edges == (0, 7, 100)
    empty = collate_pack([], 3, 100)
    assert empty["boundaries"].edges == (0, 2) and empty["meta"].tokens == 0
    assert (empty["labels"] == -100).all() and (empty["input_ids"] == 3).all()
    with pytest.raises(ValueError, match=r"\[3, 2\] tokens do not fit into a pack of 4"):
        collate_pack([sample(1, 2, 3), sample(4, 5)], 0, 4)


# --- counting -------------------------------------------------------------------------------------------------------


def write_rows(folder, count=40, images=True):
    """Make rows with texts of all lengths; every third row has one or two images."""
    draw = random.Random(0)
    for n in range(5):
        folder.image(f"{n}.png", (8 + 8 * n, 24))
    rows = []
    for n in range(count):
        question, answer = ("why " * draw.randint(1, 9), "so " * draw.randint(1, 9))
        shown = [f"{draw.randint(0, 4)}.png" for _ in range(draw.randint(1, 2))] if images and n % 3 == 0 else []
        more = {"image": shown if len(shown) > 1 else shown[0]} if shown else {}
        rows.append(folder.llava("<image>" * len(shown) + question, answer, **more))
    return rows


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "internvl", "nvila_lite", "qwen3", "llama"])
def test_token_counts_equal_encoded_lengths(folder, models, family):
    encoder = Encoder(models(family), 400)
    source = folder.read(write_rows(folder, 20, images=encoder.multimodal))
    rows = [source[n] for n in range(20)]
    lengths = [len(sample.input_ids) for sample in encoder.encode_all(rows)]
    assert token_counts.count_tokens(encoder, rows) == lengths
    short = Encoder(encoder.processor, sorted(lengths)[10])
    reasoning_notes = [isinstance(sample, DataError) for sample in short.encode_all(rows)]
    assert any(reasoning_notes) and [count == 0 for count in token_counts.count_tokens(short, rows)] == reasoning_notes
    cut = Encoder(encoder.processor, sorted(lengths)[10], on_long="cut")
    for count, sample in zip(token_counts.count_tokens(cut, rows), cut.encode_all(rows), strict=True):
        assert isinstance(sample, DataError) or len(sample.input_ids) <= count <= cut.seq_length


def test_document_counts_include_the_end_token(folder, models):
    encoder = DocumentEncoder(models("qwen3_vl"), 200)
    image = folder.image("a.png", (40, 24))
    rows = [{"text": "one two"}, {"text": "it ends<|im_end|>"}, {"text": "<image> is <image>", "images": [image] * 2}]
    source = folder.read(rows, kind="documents")
    documents = [source[n] for n in range(3)]
    assert token_counts.count_tokens(encoder, documents) == [
        len(sample.input_ids) for sample in encoder.encode_all(documents)
    ]


def test_rotated_image_is_counted_upright(folder, models):
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a.jpg", "a.png"):
        Image.new("RGB", (16, 72)).save(folder.path / name, exif=exif)
    source = folder.read([folder.llava("<image>q", "a", image=name) for name in ("a.jpg", "a.png")])
    encoder = Encoder(models("internvl"), 400)
    rows = [source[0], source[1]]
    assert size(rows[0].images[0]) == size(rows[1].images[0]) == load(rows[0].images[0]).size == (72, 16)
    assert token_counts.count_tokens(encoder, rows) == [len(sample.input_ids) for sample in encoder.encode_all(rows)]


def test_unusable_rows_count_zero_tokens(folder, models):
    (folder.path / "broken.png").write_bytes(b"no image")
    source = folder.read([folder.llava("<image>q", "a", image="broken.png"), folder.llava("q <|image_pad|>", "a")])
    assert token_counts.count_tokens(Encoder(models("qwen3_vl"), 99), [source[0], source[1]]) == [0, 0]


# --- the stream -----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(folder):
    return folder.read(write_rows(folder))


@pytest.fixture
def encoder(models):
    return Encoder(models("qwen3_vl"), 64)


def stream(source, encoder, folder=None, **options):
    options = {"window": 16, "global_batch": 2, **options}
    known = [token_counts.open_counts(source, encoder, folder, "")]
    return PackLoader(Mixture([source], seed=3), encoder, known, **options)


def take(loader, count):
    try:
        return [next(loader) for _ in range(count)]
    finally:
        loader.close()


def rows(step):
    return [batch["meta"].rows for batch in step]


def batches_equal(one, other):
    assert one["meta"] == other["meta"] and one["boundaries"] == other["boundaries"] and one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one if key not in ("meta", "boundaries"))


def test_packs_have_every_row_once_per_round(source, encoder):
    loader = stream(source, encoder, window=40)
    packs = list(loader.packs(0))
    assert sorted(chain(*(one.rows for one in packs))) == list(range(40))
    steps = take(loader, len(packs) // 2)
    seen = [row for step in steps for one in rows(step) for row in one]
    assert len(seen) == len(set(seen)) and loader.rows == sum(len(one.rows) for one in packs[: 2 * len(steps)])
    assert max(batch["boundaries"].tokens for step in steps for batch in step) <= 64


@pytest.mark.parametrize("window", [16, 1000])  # an epoch of 40 rows has three windows, or one of no more rows
def test_counted_packs_of_epochs_equal_the_stream(source, encoder, window):
    usable = [n for n, count in enumerate(token_counts.count_tokens(encoder, [source[n] for n in range(40)])) if count]
    assert 20 < len(usable) < 40  # the others are too long
    counted = []
    for workers, rank in ((0, 0), (2, 1)):
        loader = stream(source, encoder, window=window, workers=workers, rank=rank, world=2)
        counted.append([loader.count(epochs) for epochs in (0.01, 0.4, 1, 2.7, 3)])
        loader.close()
    assert counted[0] == counted[1] == sorted(counted[0]) and counted[0][0] == 1
    packs_per_epoch, three = counted[0][2], counted[0][4]
    steps = take(stream(source, encoder, window=window), -(-three // 2))
    packs = [pack for step in steps for pack in rows(step)][:three]
    assert sorted(chain(*packs[:packs_per_epoch])) == usable and sorted(chain(*packs)) == sorted(usable * 3)


def test_pack_stream_resumes_for_any_ranks_and_workers(source, encoder, tmp_path):
    whole = take(stream(source, encoder), 12)
    for first, workers, world in ((5, 0, 1), (3, 2, 1), (7, 0, 2), (4, 1, 2), (3, 1, 3)):
        begun = stream(source, encoder, tmp_path)
        take(begun, first)
        ranks = [
            take(
                stream(
                    source,
                    encoder,
                    tmp_path,
                    pack_position=begun.pack_position,
                    workers=workers,
                    rank=rank,
                    world=world,
                ),
                4,
            )
            for rank in range(world)
        ]
        for number in range(4):
            found = [batch for rank in ranks for batch in rank[number] if batch["meta"].rows]  # no company
            assert len({len(rank[number]) for rank in ranks}) == 1
            wanted = sorted(whole[first + number], key=lambda batch: batch["meta"].rows)
            ordered = sorted(found, key=lambda batch: batch["meta"].rows)
            assert all(batches_equal(*both) for both in zip(ordered, wanted, strict=True))


def test_closed_stream_resumes(source, encoder):
    whole = take(stream(source, encoder), 9)
    loader = stream(source, encoder)
    again = take(loader, 4) + take(loader, 5)
    assert [rows(step) for step in again] == [rows(step) for step in whole]


def test_bad_row_changes_no_other_pack(folder, models, tmp_path):
    raw = write_rows(folder)
    encoder = Encoder(models("qwen3_vl"), 64)
    whole = take(stream(folder.read(raw), encoder), 10)
    data = (folder.path / "2.png").read_bytes()
    (folder.path / "2.png").write_bytes(data[:-30])  # a header with its size, and half of the pixels
    report = tmp_path / "skipped.jsonl"
    found = take(stream(folder.read(raw), encoder, on_bad="skip", report_path=report), 10)
    broken = {n for n, row in enumerate(raw) if "2.png" in np.atleast_1d(row.get("image", ()))}
    assert broken and [[tuple(r for r in one if r not in broken) for one in rows(step)] for step in whole] == [
        rows(step) for step in found
    ]
    assert "cannot be decoded" in report.read_text()
    with pytest.raises(BadSample, match="cannot be decoded"):
        take(stream(folder.read(raw), encoder), 10)


def test_repaired_row_does_not_change_packs_of_a_resumed_run(folder, models, tmp_path):
    raw, file = write_rows(folder), folder.path / "2.png"
    data = file.read_bytes()
    file.unlink()
    cache, source = tmp_path / "cache", folder.read(raw)
    encoder = Encoder(models("qwen3_vl"), 64)
    whole = take(stream(source, encoder, cache, on_bad="skip", window=40), 10)
    begun = stream(source, encoder, cache, on_bad="skip", window=40)
    take(begun, 3)
    assert begun.pack_position[1]
    file.write_bytes(data)
    again = take(stream(source, encoder, cache, pack_position=begun.pack_position, on_bad="skip", window=40), 5)
    assert [rows(step) for step in again] == [rows(step) for step in whole[3:8]]
    with pytest.raises(DataError, match="of the order are packed differently from when this checkpoint"):
        take(
            stream(source, encoder, tmp_path / "another", pack_position=begun.pack_position, on_bad="skip", window=40),
            1,
        )


def test_left_out_rows_are_listed_by_the_rank_of_their_pack(folder, models, tmp_path):
    raw = write_rows(folder, 20, images=False)
    raw[7] = folder.llava("long " * 90, "a")
    report = tmp_path / "skipped.jsonl"
    loader = stream(folder.read(raw), Encoder(models("qwen3"), 128), window=20, report_path=report)
    steps = take(loader, len(loader.packs(0)) // 2)
    assert loader.report.counts == {"dropped": 1} and report.read_text().count("\n") == 1
    assert 7 not in [row for step in steps for one in rows(step) for row in one]
    every = [folder.llava("long " * 90, str(n)) for n in range(3)]
    with pytest.raises(DataError, match="all 3 rows were left out"):
        take(stream(folder.read(every, "long.json"), Encoder(models("qwen3"), 64), window=2), 3)


def test_tokens_are_counted_once(source, models, tmp_path, monkeypatch):
    encoder, counted = Encoder(models("qwen3_vl"), 128), []
    count = token_counts.count_tokens

    def noted(encoder, rows):
        counted.extend(row.row for row in rows)
        return count(encoder, rows)

    monkeypatch.setattr(token_counts, "count_tokens", noted)
    before = take(stream(source, encoder, tmp_path, window=40), 3)
    assert sorted(counted) == list(range(40))
    other = take(stream(source, encoder, tmp_path, window=25), 3)  # another plan of the same rows
    assert sorted(counted) == list(range(40)) and rows(other[0]) != rows(before[0])
    take(stream(source, Encoder(encoder.processor, 127), tmp_path), 1)  # other lengths: another file
    assert len(counted) >= 40 + 16
    file = max(tmp_path.glob("*.counts"), key=os.path.getmtime)
    file.chmod(0o400)
    take(stream(source, Encoder(encoder.processor, 127), tmp_path), 8)  # a file that takes no more


def test_row_longer_than_planned_is_left_out(folder, models, tmp_path):
    raw = [folder.llava("<image>q", "a", image="0.png")] + write_rows(folder, 9, images=False)
    folder.image("0.png", (16, 16))
    encoder = Encoder(models("qwen3_vl"), 128)
    source = folder.read(raw)
    take(stream(source, encoder, tmp_path, window=10), 1)
    folder.image("0.png", (64, 64))
    with pytest.raises(BadSample, match=r"row 0 .*has \d+ tokens, and \d+ were counted when packs were planned"):
        take(stream(source, encoder, tmp_path, window=10), 4)


def test_damaged_count_file_is_detected_or_harmless(source, models, tmp_path):
    encoder = Encoder(models("qwen3_vl"), 128)
    whole = take(stream(source, encoder, tmp_path), 4)
    [file] = tmp_path.glob("*.counts")
    np.array([-5, 2**30] * 20, "<i4").tofile(file)
    assert [rows(step) for step in take(stream(source, encoder, tmp_path), 4)] == [rows(step) for step in whole]
    file.write_bytes(bytes(7))
    with pytest.raises(DataError, match=r"\.counts, a file of the data cache, is damaged \(7 bytes, 160 were"):
        stream(source, encoder, tmp_path)


def test_invalid_arguments_are_rejected(source, encoder):
    with pytest.raises(DataError, match=r"global_batch 0; give each step 1 or more packs"):
        stream(source, encoder, global_batch=0)
    with pytest.raises(DataError, match="rank 2 of 2"):
        stream(source, encoder, rank=2, world=2)
