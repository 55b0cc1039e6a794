"""Rows processed in one call equal rows processed alone, bit for bit, and errors affect only their row."""

import copy
import os
from dataclasses import fields

import numpy as np
import pytest

from octavo.data import BadSample, Document, DocumentEncoder, Encoder
from octavo.data.encoding import processor_calls as module
from octavo.data.encoding.processor_calls import ProcessorCalls, ProcessorRequest, run_together
from octavo.data.errors import DataError
from tests.data.test_encode import FAMILIES, rows

NAME = "TOKENIZERS_PARALLELISM"


@pytest.fixture
def source(folder):
    (folder.path / "broken.png").write_bytes(b"no")
    raw_rows = [rows(folder).rows[row] for row in range(3)]
    return folder.read(
        [
            *raw_rows,
            folder.llava("<image>", "x", image="broken.png"),
            folder.llava("<image>?", "y", image=folder.image("long.png", (4000, 4))),  # Qwen's processor rejects it
            folder.llava("<image>Third?", "z", image=folder.image("big.png", (48, 40), (1, 2, 3))),
            folder.llava("Nothing", "to see"),
            folder.llava("spells <|image_pad|> <img>", "x"),
        ],
        "together.json",
    )


def results_equal(one, other):
    if isinstance(one, DataError):
        return type(one) is type(other) and str(one) == str(other)
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one) if field.name != "extra"]
    further = [{name: (per, x.tolist()) for name, (per, x) in sample.extra.items()} for sample in (one, other)]
    alike = all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)
    return alike and further[0] == further[1]


def encode_alone(encoder, row):
    try:
        return encoder.encode(row)
    except DataError as bad:
        return bad


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("open_pixels", [module.OPEN_PIXELS, 600])
def test_rows_processed_together_equal_single_rows(source, models, monkeypatch, family, open_pixels):
    monkeypatch.setattr(module, "OPEN_PIXELS", open_pixels)
    encoder = Encoder(models(family), 512)
    all_rows = [source[row] for row in (*range(len(source)), 0)]
    encoded = encoder.encode_all(all_rows)
    assert len(encoded) == 9 and all(map(results_equal, encoded, [encode_alone(encoder, row) for row in all_rows]))
    bad = [row for row, result in enumerate(encoded) if isinstance(result, BadSample)]
    assert bad == {"internvl": [3, 7], "nvila_lite": [3]}.get(
        family, [3, 4, 7]
    )  # the text of row 7 contains marks of other families


def test_processor_is_called_once(source, models, monkeypatch):
    calls = []
    call = ProcessorCalls._call
    monkeypatch.setattr(ProcessorCalls, "_call", lambda self, rows: calls.append(len(rows)) or call(self, rows))
    Encoder(models("qwen3_vl"), 512).encode_all([source[row] for row in (0, 1, 2, 5, 6, 0)])
    assert calls == [4, 2]  # those with images, those without
    Encoder(models("qwen3"), 512).encode_all([source[row] for row in (2, 6, 2)])
    assert calls == [4, 2, 3]


def test_small_batches_start_no_tokenizer_threads(source, models, monkeypatch):
    seen = []
    call = ProcessorCalls._call
    monkeypatch.setattr(ProcessorCalls, "_call", lambda *args: seen.append(os.environ[NAME]) or call(*args))
    for setting, expected in ((None, "false"), ("true", "true")):
        monkeypatch.delenv(NAME, raising=False) if setting is None else monkeypatch.setenv(NAME, setting)
        Encoder(models("qwen3"), 512).encode_all([source[2]])
        assert (seen.pop(), os.environ.get(NAME)) == (expected, setting)


def test_images_are_never_assigned_to_another_row(folder, models):
    """A template may write one image twice and omit another, so that the total number still matches."""
    processor = copy.copy(models("qwen3_vl"))
    processor.chat_template = processor.chat_template.replace(
        "{% for message", "{% if messages[0].content[-1].text == 'twice' %}<|image_pad|>{% endif %}{% for message", 1
    ).replace("== 'image' or", "== 'image' and messages[0].content[-1].text != 'none' or", 1)
    colours = {"twice": (255, 0, 0), "none": (0, 255, 0), "once": (0, 0, 255)}
    listed = [
        folder.llava(f"<image>{word}", "x", image=folder.image(f"{word}.png", color=colour))
        for word, colour in colours.items()
    ]
    source, encoder = folder.read(listed), Encoder(processor, 512)
    encoded = encoder.encode_all([source[row] for row in range(3)])
    assert [isinstance(found, BadSample) for found in encoded] == [True, True, False]
    assert "the chat template writes 2 placeholders for 1 image" in str(encoded[0])
    assert results_equal(encoded[2], encoder.encode(source[2]))


def test_documents(folder, models):
    image = folder.image("wide.png", (32, 16))
    rows = [{"text": "plain"}, {"text": "seen: <image>!", "images": [image]}, {"image": image, "text": "caption"}]
    source = folder.read(rows, kind="documents")
    encoder = DocumentEncoder(models("qwen3_vl"), 512)
    documents = [source[row] for row in range(3)]
    assert all(isinstance(row, Document) for row in documents)
    encoded = encoder.encode_all(documents)
    assert len(encoded) == 3 and all(map(results_equal, encoded, map(encoder.encode, documents)))


def test_outputs_are_returned_to_their_requests():
    def row(number):
        first = yield ProcessorRequest(f"{number}")
        if number == 2:
            raise DataError("of two")
        try:
            second = yield ProcessorRequest(f"{number}{first}")
        except ValueError as cause:
            return str(cause)
        return first, second

    def answer(wanted):
        calls.append([one.text for one in wanted])
        return [ValueError("refused") if one.text == "1a" else "a" for one in wanted]

    calls = []
    found = run_together([row(number) for number in range(4)], answer)
    assert calls == [["0", "1", "2", "3"], ["0a", "1a", "3a"]]
    assert [*found[:2], found[3]] == [("a", "a"), "refused", ("a", "a")] and str(found[2]) == "of two"
    with pytest.raises(ZeroDivisionError):  # not an error of the row
        run_together([(1 / 0 for _ in [0])], answer)
