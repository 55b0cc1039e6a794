"""Damaged rows and images: each is read correctly, or rejected by an error that names it.

`python -m tests.fuzz.test_data --cases 10000 --seed 1`
"""

from __future__ import annotations

import io
import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from octavo.config import Dataset
from octavo.data import (
    DataError,
    DocumentEncoder,
    Encoder,
    LabelledEncoder,
    Pair,
    PairEncoder,
    PromptEncoder,
    Source,
    read,
)
from octavo.data.errors import MediaProblem
from octavo.data.loaders.loader import BadRowPolicy
from octavo.data.rows.image_refs import load
from octavo.data.tasks.sources import KINDS
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, bounds, command

SECONDS, MEGABYTES, LETTERS = 5.0, 400, 3000  # limits for one case: processor time, memory, length of a message
SEQ_LENGTH = 128


def run(seed: int, cases: int, only: int | None = None) -> list[Finding]:
    """Return the findings, which depend only on the seed and `cases`."""
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = _images()
        for number, content in enumerate(images):
            (folder / f"{number}.png").write_bytes(content)
        encoders: list[Any] = _encoders(folder)
        for case in range(cases) if only is None else [only]:
            rng = random.Random(f"{seed} {case}")
            kind: Callable[..., list[str]] = _rows if rng.random() < 0.5 else _image
            label = f"case {case} of seed {seed} ({kind.__name__[1:]})"
            with bounds(label, found, 12 * SECONDS, MEGABYTES, cpu=SECONDS, forks=False):
                try:
                    wrong = kind(rng, folder, images, encoders)
                except Exception as error:  # a finding
                    wrong = [f"{type(error).__name__}: {error}"[:300]]
                found += [Finding(label, what) for what in wrong]
    return found


def _encoders(folder: Path) -> list[dict[str, Encoder]]:
    """Return encoders by kind of rows; prompts are never cut."""
    from octavo.models import load_processor
    from octavo.models.tiny import tiny

    made = []
    for family, on_long in (("qwen3_vl", "drop"), ("internvl", "cut"), ("llama", "cut")):
        processor = load_processor(tiny.write(family, folder / family, size="mini"))
        classes = {
            "conversations": Encoder,
            "prompts": PromptEncoder,
            "pairs": PairEncoder,
            "labelled": LabelledEncoder,
            "documents": DocumentEncoder,
        }
        made.append({
            kind: make(
                processor, SEQ_LENGTH, on_long="drop" if kind == "prompts" else on_long, max_image_megapixels=0.5
            )
            for kind, make in classes.items()
        })  # fmt: skip
    return made


# Rows ------------------------------------------------------------------------------------------------------------


def _valid_rows() -> list[Any]:
    chat = [{"from": "human", "value": "<image>Wie viele?"}, {"from": "gpt", "value": "Zwölf, or 12"}]
    parts = [{"type": "image", "image": "1.png"}, {"type": "text", "text": "What?"}]
    return [
        {"id": "a", "image": "0.png", "conversations": chat},
        {"id": 7, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}] * 3},
        {"images": ["0.png", "2.png"], "conversations": [{"from": "user", "value": "<image> or <image>?"}, chat[1]]},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x" * 40}]},
        {"image": "0.png", "conversations": chat, "level": 2},
        {"prompt": "How many?", "images": ["0.png", "2.png"], "answer": ["12", 12], "tests": {"a": [None]}},
        {"prompt": [{"role": "user", "content": parts}], "chosen": "x", "rejected": chat[1:]},
        {"conversations": chat[:1], "image": "0.png", "chosen": chat[1], "rejected": {"from": "gpt", "value": "Drei"}},
        {"prompt": "How many?", "completion": "Two", "label": True, "image": "0.png"},
        {"id": "d", "text": "Once upon a time, zwölf.", "url": "x"},
        {"text": "See <image> and <image>.", "images": ["0.png", "2.png"]},
        {"texts": ["A cat: ", None, "."], "images": [None, "1.png", None]},
    ]  # fmt: skip


FORMATS = ("llava", "llava", "sharegpt", "messages", "llava", "prompt", "auto", "auto", "auto", *("text",) * 3)
TAKEN_FOR = ("conversations",) * 4 + ("prompts",) * 2 + ("pairs",) * 2 + ("labelled",) + ("documents",) * 3
WORDS = ("\\ud800", "x\\udfff", "\\u0000", "<|im_end|>", "<|image_pad|>", "<img>", "</s>", "<image>", "\\u202e", "")
ANYWHERE: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: f'"{rng.choice(WORDS)}"',
    lambda rng: rng.choice(("", "-")) + "7" * rng.choice((300, 301, 5000)),
    lambda rng: "[" * (deep := rng.choice((50, 70, 900, 1100, 50_000))) + "]" * deep,
    lambda rng: '{"":' * (deep := rng.choice((50, 70, 900, 1100, 50_000))) + "0" + "}" * deep,
    lambda rng: json.dumps(["0.png"] * rng.choice((3, 10_000))),
    lambda rng: rng.choice(("1e999", "NaN", "-Infinity", "tru", "'a'", '"\x01"', "\ufeff{}")),
)
TEXTS = ("value", "content", "text", "id", "image", "prompt", "answer", "chosen")
# (the keys whose values it replaces, what by)
SPECIAL: tuple[tuple[tuple[str, ...], Callable[[random.Random], str]], ...] = (
    (TEXTS, lambda rng: json.dumps("word " * rng.choice((100, 4_000_000)))),
    (TEXTS, lambda rng: f'"a {rng.choice(WORDS)} b"'),
    (("conversations",), lambda rng: json.dumps(
        [{"from": role, "value": "x"} for role in ("human", "gpt")] * rng.choice((10, 1000, 20_000))
    )),
)  # fmt: skip


def _damaged(rng: random.Random, row: Any) -> bytes:
    """Return a damaged row, as valid or invalid JSON."""
    text = json.dumps(row, ensure_ascii=rng.random() < 0.5)
    kind = rng.randrange(4)
    if kind == 0:
        return mutate.damage(rng, text.encode())
    if kind == 1:
        return mutate.damage_json(rng, text).encode()
    row = json.loads(text)
    keys, special = rng.choice(SPECIAL) if kind == 2 else ((), rng.choice(ANYWHERE))
    there = mutate.places(row)
    holder, key = rng.choice([place for place in there if place[1] in keys] or there)
    holder[key] = "PLACE"
    return json.dumps(row).replace('"PLACE"', special(rng), 1).encode()


def _rows(rng: random.Random, folder: Path, images: list[bytes], encoders: list[dict[str, Encoder]]) -> list[str]:
    """Write one damaged row between two valid ones, in a list or in lines."""
    which = rng.randrange(len(FORMATS))
    good = _valid_rows()[which]
    damaged = _damaged(rng, good)
    lines = rng.random() < 0.6
    parts = [json.dumps(good).encode(), damaged, json.dumps(good).encode()]
    file = folder / rng.choice(("r.jsonl", "r.json") if lines else ("r.json",))
    file.write_bytes(b"\n".join(parts) if lines else b"[" + b",\n".join(parts) + b"]")
    try:
        source = read(Dataset(path=str(file), format=rng.choice(("auto", FORMATS[which]))), TAKEN_FOR[which])
    except DataError as refused:
        # A list is one value; lines are separate values, and the suffix says which.
        allowed = not lines or file.suffix == ".json" or "ambiguous" in str(refused)
        return _said(refused, file) + ([] if allowed else [f"one line refuses the file: {refused}"])
    return _check_rows(source, rng.choice(encoders)[source.kind], folder, len(parts) == len(source), good)


def _check_rows(source: Source, encoder: Encoder, folder: Path, alone: bool, good: Any) -> list[str]:
    judge, wrong = BadRowPolicy((source,), "skip", folder / "skipped.jsonl"), []
    made: list[Any] = []
    for row in range(len(source)):
        try:
            sample: Any = encoder.encode(source[row])
            for one in _samples(sample):
                if not (
                    0 < len(one.input_ids) <= SEQ_LENGTH and (one.labels != -100).any() == (source.kind != "prompts")
                ):
                    wrong.append(f"row {row} became {len(one.input_ids)} tokens")
        except DataError as refused:
            sample = refused
            wrong += _said(refused, Path(source.name), row)
        made.append(sample)
        try:
            judge.admit((0, row), sample)
        except DataError as refused:
            wrong += [] if "rows were left out" in str(refused) else [f"ends the run: {refused}"]
    for row in (0, 2) if alone else ():
        wrong += (
            [] if _same(made[row], good, source, encoder) else [f"row {row} is another beside a bad one: {made[row]}"]
        )
    (folder / "skipped.jsonl").unlink(missing_ok=True)
    return wrong


def _samples(made: Any) -> list[Any]:
    return [made.chosen, made.rejected] if isinstance(made, Pair) else [made]


def _same(made: Any, good: Any, source: Source, encoder: Encoder) -> bool:
    try:
        row = KINDS[source.kind](good, source.format, file=source.name, row=0, images=source.images)
        expected = encoder.encode(row)
    except DataError as refused:
        return isinstance(made, DataError) and type(made) is type(refused)
    return not isinstance(made, DataError) and [one.input_ids.tolist() for one in _samples(made)] == [
        one.input_ids.tolist() for one in _samples(expected)
    ]


def _said(error: Exception, file: Path, row: int | None = None) -> list[str]:
    text, wrong = str(error), []
    if str(file) not in text or (row is not None and f"row {row}" not in text):
        wrong.append(f"does not name {file.name}, row {row}: {text[:200]}")
    if len(text) > LETTERS or not text.isprintable():
        wrong.append(f"a message of {len(text)} letters, or not printable: {text[:100]!r}")
    return wrong


# Images ----------------------------------------------------------------------------------------------------------


def _images() -> list[bytes]:
    """Return a small image of every format and most modes; the first three are valid PNGs."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 20, 4), dtype=np.uint8)
    colour, alpha, grey = Image.fromarray(noise[..., :3]), Image.fromarray(noise), Image.fromarray(noise[..., 0])
    deep = Image.fromarray(noise[..., :2].copy().view(np.uint16)[..., 0])
    light = Image.fromarray(noise[..., 0].astype(np.float32) / 255)
    palette = colour.quantize(16)
    palette.info["transparency"] = bytes(range(16))
    exif = colour.getexif()
    exif[0x0112] = 6
    wanted: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (colour, "PNG", {}), (grey, "PNG", {}), (alpha, "PNG", {}), (deep, "PNG", {}), (palette, "PNG", {}),
        (colour, "JPEG", {"exif": exif}), (colour, "JPEG", {"progressive": True}), (colour.convert("CMYK"), "JPEG", {}),
        (colour, "GIF", {"save_all": True, "append_images": [grey]}), (alpha, "WEBP", {"lossless": True}),
        (colour, "WEBP", {}), (colour, "BMP", {}), (palette, "BMP", {}), (colour, "PPM", {}), (light, "PPM", {}),
        (deep, "TIFF", {}), (light, "TIFF", {}), (alpha, "TIFF", {"compression": "tiff_lzw"}), (grey, "JPEG2000", {}),
        (colour, "TIFF", {"compression": "jpeg"}), (colour.convert("1"), "TIFF", {"compression": "group4"}),
        (alpha, "AVIF", {}), (palette, "TIFF", {}),
    ]  # fmt: skip
    made = []
    for image, kind, options in wanted:
        try:
            image.save(buffer := io.BytesIO(), kind, **options)
        except (KeyError, OSError):  # a Pillow built without it
            continue
        made.append(buffer.getvalue())
    return [*made, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"]


def _image(rng: random.Random, folder: Path, images: list[bytes], encoders: list[Encoder]) -> list[str]:
    """Damage an image, in its header or anywhere, sometimes by setting a number to a huge value."""
    raw = rng.choice(images)
    if rng.random() < 0.5:
        head = rng.choice((16, 32, 64, 200))
        raw = mutate.damage(rng, raw[:head]) + raw[head:]
    else:
        raw = mutate.damage(rng, raw)
    if rng.random() < 0.3 and len(raw) > 4:
        at = rng.randrange(min(len(raw) - 3, 300))
        huge = rng.choice((0, 1, 255, 65535, 0x7FFFFFFF, 0xFFFFFFFF))
        raw = raw[:at] + struct.pack(rng.choice("<>") + "I", huge) + raw[at + 4 :]
    file = folder / "damaged.png"
    file.write_bytes(raw)
    try:
        image = load(file, 0.5)
    except MediaProblem as refused:
        return _said(refused, file)
    if image.mode != "RGB" or image.width * image.height > 500_000:
        return [f"became {image}"]
    return []


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_damaged_data() -> None:
    assert run(13, 200) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=1, whole=True)
