"""The digits set: its content, disjoint handwriting of the splits, and protection of existing files."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from octavo.data import DataError, Encoder
from octavo.data.builtin import digits


@pytest.fixture(scope="module")
def digit_set(tmp_path_factory):
    return digits.write(tmp_path_factory.mktemp("digits") / "set", train=30, test=10, seed=4)


def quarters(path):
    image = np.asarray(Image.open(path))
    assert image.shape == (16, 16)
    return [image[r : r + 8, c : c + 8] for r in (0, 8) for c in (0, 8)]


def test_handwriting_equals_scikit_learn():
    levels, labels = digits.samples()
    bunch = load_digits()
    assert levels.dtype == labels.dtype == np.uint8 and levels.shape == (1797, 8, 8)
    assert (levels == bunch.images).all() and (labels == bunch.target).all()
    greys, answers, pools = digits.load_handwriting()
    assert (greys == np.rint(bunch.images * (255 / 16)).astype(np.uint8)).all() and (answers == bunch.target).all()
    assert sorted([*pools["train"], *pools["test"]]) == [*range(1797)]
    notice = digits.HANDWRITING.with_name("NOTICE.txt").read_text()
    assert "CC BY 4.0" in notice and "Alpaydin" in notice and "10.24432/C50P49" in notice


@pytest.mark.parametrize("damage", (lambda raw: raw[:-9], lambda raw: b"", lambda raw: raw[:3000] + b"x" + raw[3001:]))
def test_damaged_handwriting_file_is_named(tmp_path, monkeypatch, damage):
    file = tmp_path / "digits.npz"
    file.write_bytes(damage(digits.HANDWRITING.read_bytes()))
    monkeypatch.setattr(digits, "HANDWRITING", file)
    with pytest.raises(DataError, match=r"digits\.npz, a file of Octavo, cannot be read \(.*\); install Octavo again"):
        digits.write(tmp_path / "set", train=1, test=1)
    assert not (tmp_path / "set").exists()


def test_digits_are_in_reading_order_with_disjoint_splits(digit_set):
    bunch = load_digits()
    known = {np.rint(image * (255 / 16)).astype(np.uint8).tobytes(): n for n, image in enumerate(bunch.images)}
    for file, count, remainders in ((digit_set.train, 30, {0, 1, 2, 3}), (digit_set.test, 10, {4})):
        rows = json.loads(file.read_text())
        assert len(rows) == count
        for row in rows:
            samples = [known[quarter.tobytes()] for quarter in quarters(digit_set.directory / row["image"])]
            assert {n % 5 for n in samples} <= remainders
            answers = [turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"]
            assert answers == [str(bunch.target[n]) for n in samples]
    questions = [turn["value"] for turn in rows[0]["conversations"] if turn["from"] == "human"]
    assert questions == ["<image>First?", "Second?", "Third?", "Fourth?"]


def test_prompts_ask_one_question_each(digit_set):
    rows, prompts = (json.loads((digit_set.directory / f"train{kind}.json").read_text()) for kind in ("", "_prompts"))
    assert len(prompts) == 4 * len(rows)
    third = prompts[4 + 2]
    turns = rows[1]["conversations"]
    assert third["images"] == [rows[1]["image"]] and third["answer"] == turns[5]["value"]
    assert [turn["content"] for turn in third["prompt"]] == [turn["value"] for turn in turns[:5]]
    assert third["prompt"][0]["role"] == third["prompt"][-1]["role"] == "user"


def test_captions_contain_the_digits(digit_set):
    for file in (digit_set.train, digit_set.test):
        rows = json.loads(file.read_text())
        captions = json.loads(file.with_name(f"{file.stem}_captions.json").read_text())
        assert [caption["image"] for caption in captions] == [row["image"] for row in rows]
        answers = [[turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"] for row in rows]
        assert [caption["text"].split() for caption in captions] == answers


def test_rows_are_short(folder, models, digit_set):
    for family in ("qwen3_vl", "qwen2_5_vl", "internvl"):
        encoder = Encoder(models(family), 40)
        sample = encoder.encode(folder.read(digit_set.train)[0])
        assert len(sample.input_ids) <= 40 and len(sample.answers) == 4
        assert (sample.input_ids == encoder.processor.image_token_id).sum() == 4  # the image is not rescaled
        assert all(end - start == 2 for start, end in sample.answers)  # the digit and the end of the turn


def test_equal_settings_give_equal_files(digit_set, tmp_path):
    again = digits.write(tmp_path / "again", train=30, test=10, seed=4)
    for file in sorted(digit_set.directory.rglob("*.*")):
        assert file.read_bytes() == (again.directory / file.relative_to(digit_set.directory)).read_bytes()
    before = digit_set.train.stat().st_mtime_ns
    assert (
        digits.write(digit_set.directory, train=30, test=10, seed=4) == digit_set
        and digit_set.train.stat().st_mtime_ns == before
    )
    other = digits.write(tmp_path / "other", train=30, test=10, seed=5)
    assert other.train.read_text() != digit_set.train.read_text()
    assert not list(tmp_path.glob(".*"))  # no temporary file is left


def test_card_names_its_source(digit_set):
    card = (digit_set.directory / "README.md").read_text()
    assert "UCI ML" in card and "load_digits" in card and "1438 and 359 different handwritten samples" in card


def test_existing_files_are_not_overwritten(digit_set, tmp_path):
    with pytest.raises(
        DataError, match=r"different settings \(train: 30 there, 31 asked; seed: 4 there, 0 asked\); choose"
    ):
        digits.write(digit_set.directory, train=31, test=10)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="exists and is not a digits set; choose another directory"):
        digits.write(tmp_path, train=3, test=1)
    with pytest.raises(DataError, match="is not a digits set"):
        digits.write(tmp_path / "notes.txt", train=3, test=1)
    torn = digits.write(tmp_path / "torn", train=3, test=1)
    (torn.directory / "images" / "train" / "00001.png").unlink()
    with pytest.raises(DataError, match=r"is not complete \(2 of 3 train images\); remove it"):
        digits.write(torn.directory, train=3, test=1)


def test_empty_directory_is_accepted_and_bad_arguments_rejected(tmp_path):
    (tmp_path / "empty").mkdir()
    assert digits.write(tmp_path / "empty", train=2, test=1).train.is_file()
    with pytest.raises(DataError, match="train=0, test=1: each needs at least one image"):
        digits.write(tmp_path / "x", train=0, test=1)
    with pytest.raises(DataError, match="seed=-1"):
        digits.write(tmp_path / "x", train=1, test=1, seed=-1)


def test_failure_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "_row", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        digits.write(tmp_path / "x", train=2, test=1)
    assert not list(tmp_path.iterdir())


def test_text_rows_use_the_same_split(tmp_path):
    found = digits.write(tmp_path / "d", train=2, test=2)
    train = json.loads((found.directory / "train_text.json").read_text())
    test = json.loads((found.directory / "test_text.json").read_text())
    assert (len(train), len(test)) == (1438, 359)
    drawing, question = train[0]["conversations"][0]["value"].rsplit("\n", 1)
    assert question == "Which digit?" and [len(line) for line in drawing.split("\n")] == [8] * 8
    assert set(drawing) <= set(digits.INK + "\n") and "image" not in train[0]
    assert not {r["conversations"][0]["value"] for r in train} & {r["conversations"][0]["value"] for r in test}
