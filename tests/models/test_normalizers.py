"""Tokenizers whose normalizer or decoder multiplies texts are rejected before they process a text."""

import base64
import json
import shutil
import struct

import pytest

from octavo import models
from octavo.config import Dataset
from octavo.data import BadSample, Encoder, LongSample, read

GOOD = [
    {"type": "NFKC"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"String": "\n"}, "content": "<|newline|>"},
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "``"}, "content": '"'}] * 9},
    {"type": "Prepend", "prepend": "▁"},
]
DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TABLE = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"a\0" + b"b" * 100_000 + b"\0").decode()
BAD = [
    ({"type": "Replace", "pattern": {"String": "xyz"}, "content": "ab " * 100_000}, "up to 100,000 times as long"),
    ({"type": "Sequence", "normalizers": [{"type": "NFC"}, *[DOUBLED] * 30]}, "up to 128 times as long.*Step 8"),
    ({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLED] * 7}]}, "up to 128 times"),
    ({"type": "Replace", "pattern": {"String": ""}, "content": "a" * 80}, "up to 81 times as long"),
    ({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 64}, "up to 65 times as long"),
    ({"type": "Prepend", "prepend": "a" * 100_000}, "100,000 characters longer; the limit is 65,536"),
    ({"type": "Precompiled", "precompiled_charsmap": TABLE}, "up to 1,562 times as long"),
]


@pytest.fixture
def folder(checkpoint, tmp_path):
    """`folder(key=part)`: a model whose tokenizer.json has these parts."""
    shutil.copytree(checkpoint("llama"), tmp_path / "m")

    def write(**parts):
        file = tmp_path / "m" / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))
        return tmp_path / "m"

    return write


@pytest.mark.parametrize("normalizer", GOOD, ids=lambda part: part["type"])
def test_published_normalizers_are_accepted(folder, normalizer):
    models.load_processor(folder(normalizer=normalizer))


@pytest.mark.parametrize(("normalizer", "said"), BAD)
def test_a_normalizer_that_multiplies(folder, normalizer, said):
    with pytest.raises(models.ModelError, match=rf"m/tokenizer\.json: its normalizer makes a text .*{said}"):
        models.load_processor(folder(normalizer=normalizer))


def test_decoder_that_multiplies_text_is_rejected(folder):
    decoders = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}] * 2
    with pytest.raises(models.ModelError, match="its decoder makes a text up to 81 times as long"):
        models.load_tokenizer(folder(decoder={"type": "Sequence", "decoders": decoders}))


def _row(tmp_path, text="q"):
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}))
    return read(Dataset(path=str(tmp_path / "rows.jsonl")))[0]


def test_rows_that_are_too_long_are_not_tokenized(folder, tmp_path):
    """A template adds long text: it is not tokenized, unless the row is to be truncated."""
    where = folder()
    much = "{% if messages|length == 2 %}{{ 'pad ' * 20000 }}{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + much + "</s>{% endfor %}"
    (where / "chat_template.jinja").write_text(template)
    encoder = Encoder(models.load_processor(where), 16)
    tokenizer, encoder.tokenizer = encoder.tokenizer, None
    encoder.calls.tokenizer = None
    with pytest.raises(
        LongSample, match=r"row 0: is over 16 tokens long \(\d+ characters with its template\), seq_leng"
    ):
        encoder.encode(_row(tmp_path))
    assert len(tokenizer("pad " * 20000)["input_ids"]) > 16


def test_tokenizer_panic_is_an_error_of_its_row(folder, tmp_path):
    """Rust panics are not Exceptions; other BaseExceptions, such as an interrupt, propagate."""
    encoder = Encoder(models.load_processor(folder()), 64)

    def raising(error):
        def call(texts):
            raise error

        return call

    encoder.calls.tokens = raising(type("PanicException", (BaseException,), {})("called `Option::unwrap()`"))
    with pytest.raises(BadSample, match=r"row 0: the processor rejects it: PanicException: called `Option"):
        encoder.encode(_row(tmp_path))
    encoder.calls.tokens = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        encoder.encode(_row(tmp_path))
