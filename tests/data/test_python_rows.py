"""Rows of a program: read as the rows of a file with the same content, never changed, and bound by a digest."""

from __future__ import annotations

import copy
import datetime
import json
import pickle
import re
from collections.abc import Callable
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image, ImageDraw

from octavo.config import Dataset, load_config
from octavo.data import BadSample, DataError, read
from octavo.data.loaders.rows_from_config import conversation_rows
from octavo.data.rows import image_refs
from octavo.data.rows.image_refs import InlineImage
from octavo.data.storage import python_rows
from octavo.data.storage.python_rows import check_rows, digest_of, hold, make_rows

PATH = "python:train_data"
TURNS = [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "Seven"}]


def picture(mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    image = Image.new("L", size, 200)
    ImageDraw.Draw(image).line((0, 0, *size), fill=10, width=2)
    return image.convert("RGB").convert(mode) if mode not in ("I", "I;16", "F") else image.convert(mode)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def pixels(row: Any) -> np.ndarray:
    """Return the pixels of the only image of a parsed row, as the encoder decodes it."""
    (image,) = row.images
    return np.asarray(image_refs.load(image))


def opened(rows: Any, **settings: Any) -> Any:
    with hold([make_rows(rows, PATH)]):
        return read(Dataset(path=PATH, **settings))


def digest(rows: Any) -> str:
    with hold([make_rows(rows, PATH)]):
        result = digest_of(PATH)
        assert result is digest_of(PATH)
        return result.sha256


LAYOUTS: dict[str, list[Any]] = {
    "conversations": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
    "messages": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
    "list": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]],
    "alpaca": [{"instruction": "a", "output": "b", "input": None}],
    "prompts": [{"prompt": "a", "answer": "b", "level": 3, "unit": None}],
    "documents": [{"text": "a long time ago", "n": 1.5}],
    "pairs": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "labelled": [{"prompt": "a", "completion": "b", "label": True}],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_from_a_file(layout: str, tmp_path: Path) -> None:
    kind = layout if layout in ("prompts", "documents", "pairs", "labelled") else "conversations"
    rows, file = LAYOUTS[layout] * 3, tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    from_file = read(Dataset(path=str(file), max_samples=2), kind)
    with hold([make_rows(rows, PATH)]):
        source = read(Dataset(path=PATH, max_samples=2), kind)
        assert len(source) == len(from_file) == 2 and source.format == from_file.format
        assert [source.raw(n) for n in range(2)] == [from_file.raw(n) for n in range(2)]
        assert repr(source[1]).replace(PATH, str(file)) == repr(from_file[1])
        assert source.columns() == from_file.columns()


def test_columns_are_renamed_and_missing_ones_are_named() -> None:
    rows = [{"question": "a", "solution": "b"}]
    columns = {"prompt": "question", "answer": "solution"}
    assert opened(rows, columns=columns).raw(0) == {"prompt": "a", "answer": "b"}
    with pytest.raises(DataError, match="python:train_data: columns names prompt: q, but none of its first 1 rows"):
        opened(rows, columns={"prompt": "q"})


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16", "F", "CMYK", "YCbCr", "La", "RGBa"])
def test_images_of_every_mode_are_read_as_files(mode: str) -> None:
    base = picture("LA" if mode == "La" else "RGBA" if mode == "RGBa" else mode)
    image = base.convert(mode)
    stored = image if mode in ("1", "L", "LA", "P", "RGBA") else base if mode in ("La", "RGBa") else base.convert("RGB")
    if mode in ("I", "I;16"):  # 16 bits; 8-bit values would be nearly black
        stored = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
        image = stored.convert(mode)
    file = InlineImage(saved(stored, "PNG"))
    row = opened([{"image": image, "conversations": TURNS}])[0]
    assert (pixels(row) == np.asarray(image_refs.load(file))).all()


def test_images_in_every_form_give_the_same_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exif = Image.Exif()
    exif[image_refs.ORIENTATION] = 6
    raw = saved(picture(), "JPEG", exif=exif)
    Path("a.jpg").write_bytes(raw)
    decoded = Image.open("a.jpg")
    decoded.load()
    forms = [
        "a.jpg", Path("a.jpg"), tmp_path / "a.jpg", raw, bytearray(raw), {"bytes": raw, "path": None},
        Image.open("a.jpg"), Image.open(BytesIO(raw)), decoded,
    ]  # fmt: skip
    source = opened([{"image": form, "conversations": TURNS} for form in forms])
    expected = np.asarray(image_refs.load(tmp_path / "a.jpg"))
    assert expected.shape == (6, 4, 3)  # rotated
    for number in range(len(forms)):
        assert (pixels(source[number]) == expected).all(), forms[number]
    again = pickle.loads(pickle.dumps(source))  # as workers get it where they are not forks
    assert (pixels(again[0]) == expected).all()


def test_images_that_were_not_decoded_stay_so() -> None:
    image = Image.open(BytesIO(saved(picture(), "JPEG")))
    row = {"image": image, "conversations": TURNS}
    assert digest([row]) and opened([row])[0].images
    assert image.tile  # decoded pixels of all images would fill the memory


def test_values_of_python_are_read_as_json_and_not_changed() -> None:
    row = {
        "prompt": np.str_("a"), "answer": "b", "n": np.int64(3), "x": np.float32(0.5), "ok": np.bool_(True),
        "day": datetime.date(2026, 1, 2), "price": Decimal("1.50"), "pair": (1, 2), "deep": {"a": [{"b": None}]},
    }  # fmt: skip
    before = copy.deepcopy(row)
    raw = opened([row]).raw(0)
    assert raw == {
        "prompt": "a", "answer": "b", "n": 3, "x": 0.5, "ok": True, "day": "2026-01-02", "price": "1.50",
        "pair": [1, 2], "deep": {"a": [{"b": None}]},
    }  # fmt: skip
    assert type(raw["n"]) is int and type(raw["ok"]) is bool and type(raw["prompt"]) is str
    raw["deep"]["a"].append(1)
    assert row == before


def cyclic() -> list[Any]:
    row: list[Any] = []
    row.append(row)
    return row


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "its key 'x' is <object object at .*object\\); use text, numbers"),
        ({1, 2}, r"its key 'x' is {1, 2} \(set\)"),
        (np.zeros((2, 2)), r"\(ndarray\); use .tolist\(\), or PIL.Image.fromarray"),
        ({"y": {4: 5}}, r"it has the key 4 \(int\); keys must be text"),
        (cyclic(), "it is nested too deeply, or contains itself"),
        (Image.new("I", (2, 2), -5), "it has an image with the values -5 to -5; scale them"),
        (Image.open(BytesIO(saved(picture(size=(64, 64)), "PNG")[:90])), None),
    ],
)
def test_bad_row_is_named_by_its_index(value: Any, reason: str | None) -> None:
    good = {"prompt": "a", "answer": "b"}
    rows = make_rows([good] * 17 + [{**good, "x": value}], PATH)
    if reason is None:  # a file that is cut off: found when it is decoded, as on a disk
        assert rows[17]["x"]["bytes"]
        return
    with pytest.raises(BadSample, match=rf"^train_data\[17\]: .*{reason}") as error:
        rows[17]
    assert rows[16] == good and error.value.row == 17
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)
    assert digest([{**good, "x": value}]) != digest([good])


def test_wrong_layout_of_a_row_is_named_by_its_index() -> None:
    source = opened([{"conversations": TURNS, "image": "a.png"}, {"conversations": [{"from": "robot", "value": 3}]}])
    with pytest.raises(BadSample, match=r"^train_data\[1\]: "):
        source[1]
    with pytest.raises(DataError, match=r"^python:train_data: no row looks like a conversation"):
        opened([{"a": 1}])


def datasets_of(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def test_dataset_is_read_as_its_list() -> None:
    rows = [{"prompt": f"{n}?", "answer": str(n), "tags": ["a"] * n} for n in range(9)]
    table = datasets_of(rows)
    for made, expected in ((table, rows), (table.select([5, 2]), [rows[5], rows[2]]), (table.shard(3, 1), rows[3:6])):
        source = opened(made)
        assert [source.raw(n) for n in range(len(source))] == expected
        assert digest(made) == digest(expected)
    assert pickle.loads(pickle.dumps(opened(table))).raw(3) == rows[3]


def test_images_of_a_dataset_keep_their_bytes() -> None:
    table = datasets_of([{"image": picture(), "conversations": TURNS}])
    assert isinstance(table.features["image"], datasets.Image)
    source = opened(table)
    assert (pixels(source[0]) == np.asarray(picture())).all()
    assert digest(table) == digest(datasets_of([{"image": picture(), "conversations": TURNS}]))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "it has no rows; expected a list of rows"),
        (datasets_of([{"a": 1}]).select([]), "it has no rows"),
        ({"a": 1}, r"found {'a': 1} \(dict\)"),
        ("rows.json", r"found 'rows.json' \(str\)"),
        (iter([]), "list_iterator"),
        (datasets.DatasetDict(train=datasets_of([{"a": 1}])), r"it has the splits 'train'; .* eval_data\['train'\]"),
        (datasets_of([{"a": 1}]).to_iterable_dataset(), "it is an IterableDataset, whose rows have no numbers"),
        (datasets_of([{"a": 1}]).with_transform(lambda batch: batch), r"it has a transform \(set_transform\)"),
    ],
)
def test_other_things_than_rows_are_refused(rows: Any, problem: str) -> None:
    why = check_rows(rows, "eval_data")
    assert why is not None
    assert re.search(problem, why)


def changes() -> list[Callable[[list[Any]], Any]]:
    return [
        lambda rows: rows.reverse(), lambda rows: rows.pop(), lambda rows: rows.append(rows[0]),
        lambda rows: rows[1].update(answer="c"), lambda rows: rows[1].update(answer=None),
        lambda rows: rows[1].update(image=picture(size=(4, 6))), lambda rows: rows[1].update(image=picture("L")),
        lambda rows: rows[0].update(tags=["ab", ""]), lambda rows: rows[0].update(n=1.0),
    ]  # fmt: skip


def test_digest_covers_every_value_and_every_pixel() -> None:
    def rows() -> list[Any]:
        return [
            {"prompt": "a", "answer": "b", "tags": ["a", "b"], "n": 1, "image": picture("L")},
            {"prompt": "c", "answer": "d", "tags": [], "n": 2, "image": picture()},
        ]

    digests = {digest(rows())}
    assert digests == {digest(rows())}
    for change in changes():
        changed = rows()
        change(changed)
        digests.add(digest(changed))
    assert len(digests) == 1 + len(changes())


def test_digest_does_not_depend_on_whether_an_image_was_decoded() -> None:
    raw = saved(picture(), "JPEG")
    fresh, decoded = Image.open(BytesIO(raw)), Image.open(BytesIO(raw))
    decoded.load()
    assert digest([{"image": fresh}]) == digest([{"image": decoded}]) != digest([{"image": raw}])


def test_rows_are_held_only_while_the_block_lasts() -> None:
    first, second = make_rows([{"a": 1}], PATH), make_rows([{"b": 1}], "python:eval_data")
    with hold([first]):
        before = digest_of(PATH)
        with hold([second]), pytest.raises(DataError):
            digest_of(PATH)
        assert python_rows.open_python_rows(PATH) is first and digest_of(PATH) is before
    for absent in (lambda: read(Dataset(path=PATH)), lambda: digest_of(PATH)):
        with pytest.raises(DataError, match="python:train_data are rows that a Python program passed to octavo.run as"):
            absent()


def test_questions_of_split_rows_are_cached_by_their_content(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role} for _ in range(3) for role in ("user", "assistant")]
    data = {"train": [{"path": PATH}], "cache": tmp_path, "split_turns": True}
    cfg = load_config({"model": {"path": "m"}, "train": {"steps": 1}, "data": data})
    for count in (3, 2):  # the same name and number of rows
        with hold([make_rows([{"messages": turns[: 2 * count]}], PATH)]):
            assert len(conversation_rows(cfg, cfg.data.train[0])) == count


def test_many_rows_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_rows, "MANY_ROWS", 1)
    messages: list[str] = []
    with hold([make_rows([{"a": 1}] * 2, PATH)]):
        for _ in range(2):
            digest_of(PATH, messages.append)
    assert messages == ["python:train_data: 2 rows are read once to compute the SHA-256 that a resume compares"]
