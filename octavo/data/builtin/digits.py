"""The digits set: four real handwritten digits an image, and a conversation that asks for each by its place.

    README.md        the data set card
    settings.json    what was asked for
    train.json       LLaVA rows: id, image, conversations
    test.json
    images/train/00000.png ...   16 x 16 grey PNG: four 8 x 8 digits, first and second above third and fourth
    train_prompts.json           the training images once for each question, with those before it and their answers
    train_captions.json          each training image with its digits, for pretraining
    test_captions.json
    train_text.json  the same handwriting for models without eyes: one digit a row, drawn in characters
    test_text.json

The digits are the 1797 of UCI that scikit-learn has as `load_digits`, in uci_digits/. Every fifth sample is kept for
the test images, so that no handwriting in a test image was ever seen in training.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from octavo.base import atomic_write, target_folder
from octavo.base.safe_read import Unreadable, read_json
from octavo.data.errors import DataError

PLACES = ("First?", "Second?", "Third?", "Fourth?")
SIDE = 8
WHITE = 16  # grey values are counts of 0 to 16
HANDWRITING = Path(__file__).with_name("uci_digits") / "digits.npz"
INK = " .+#"  # four shades, for the rows that draw a digit in characters
LAYOUT = 5  # rises when the same settings give other files

CARD = """# Octavo digits

{train} training and {test} test images of 16 x 16 grey pixels, each with four handwritten digits and a conversation
that asks for each by its place: first and second above third and fourth. LLaVA format (`train.json`, `test.json`).

```json
{example}
```

`train_prompts.json` asks each question of a training image by itself, for reinforcement learning: `prompt` (the turns
up to it), `images`, `answer`.

`train_captions.json` and `test_captions.json` are the images with their digits in reading order, as captions:
`image`, `text`.

`train_text.json` and `test_text.json` hold the same samples for text-only models: one digit a row, drawn as 8 lines of
8 characters, and the question which digit it is.

**Source.** The digits are the 1797 samples of `sklearn.datasets.load_digits`, the test part of the UCI ML *Optical
Recognition of Handwritten Digits* data set (E. Alpaydin, C. Kaynak, 1998; CC BY 4.0; https://doi.org/10.24432/C50P49):
8 x 8 pixels with 17 grey levels, here scaled to 0..255. No sample was drawn or generated.

**Split.** Samples 4, 9, 14 ... (every fifth) appear in test images only, the others in training images only:
{train_samples} and {test_samples} different handwritten samples. Combinations are drawn with seed {seed}.

Written by `octavo digits`.
"""


@dataclass(frozen=True)
class Digits:
    """Where the set lies: `directory` (also the folder of its images), `train` and `test` JSON files."""

    directory: Path
    train: Path
    test: Path


def write(directory: str | Path, train: int = 4000, test: int = 500, seed: int = 0, console: Any = None) -> Digits:
    """Write the digits set into a new directory and return its paths.

    The files are written aside and renamed at the end, so a directory is whole or absent. One that already holds the
    set with the same settings is accepted as it is; anything else there raises `DataError`. `console`: a rich
    console for the progress bar.
    """
    if train < 1 or test < 1:
        raise DataError(f"train={train}, test={test}: each needs at least one image")
    if seed < 0:
        raise DataError(f"seed={seed}: it must not be negative")
    directory = Path(directory)
    found = Digits(directory, directory / "train.json", directory / "test.json")
    settings = {"layout": LAYOUT, "train": train, "test": test, "seed": seed}
    if not target_folder.is_free(directory):
        kinds = ("", "_text", "_captions", "_prompts")
        check_existing(directory, settings, "images", "png", kinds)
        return found
    with atomic_write.folder(directory, DataError, replace=False) as made:
        _write(made, settings, console)
        atomic_write.sync_tree(made)
    return found


def check_existing(directory: Path, settings: dict[str, int], folder: str, ending: str, kinds: tuple[str, ...]) -> None:
    """The directory holds exactly what was asked for, or is refused: files of an `ending` in `folder`, and rows of
    `kinds`."""
    fix = "choose another directory, or remove this one"
    try:
        there = read_json(directory / "settings.json")
    except Unreadable as cause:
        raise DataError(f"{directory} exists and is not a digits set; {fix}") from cause
    if there != settings:
        differ = [key for key in settings if there.get(key) != settings[key]]
        changed = "; ".join(f"{key}: {there.get(key)} there, {settings[key]} asked" for key in differ)
        raise DataError(f"{directory} holds a digits set with other settings ({changed}); {fix}")
    for part in ("train", "test"):
        files = len(list((directory / folder / part).glob(f"*.{ending}")))
        own = [kind for kind in kinds if part == "train" or kind != "_prompts"]
        whole = all((directory / f"{part}{kind}.json").is_file() for kind in own)
        if files != settings[part] or not whole:
            raise DataError(f"{directory} is not complete ({files} of {settings[part]} {part} {folder}); remove it")


def handwriting() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(all samples [1797, 8, 8] uint8; which digits they are [1797] int64; train and test -> numbers of samples).
    Raises DataError where the file that is part of Octavo is missing or damaged."""
    levels, labels = samples()
    greys = np.rint(levels * (255 / WHITE)).astype(np.uint8)
    held_out = np.arange(len(greys)) % 5 == 4
    return greys, labels.astype(np.int64), {"train": np.flatnonzero(~held_out), "test": np.flatnonzero(held_out)}


def samples() -> tuple[np.ndarray, np.ndarray]:
    """(levels [1797, 8, 8] uint8, 0 to 16; labels [1797] uint8), in scikit-learn's order. Raises DataError."""
    try:
        with np.load(HANDWRITING, allow_pickle=False) as file:
            return file["levels"], file["labels"]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as cause:
        raise DataError(f"{HANDWRITING}, a file of Octavo, cannot be read ({cause}); install Octavo again") from cause


def _write(directory: Path, settings: dict[str, int], console: Any) -> None:
    from rich.progress import Progress

    greys, labels, pools = handwriting()
    with Progress(console=console, transient=True) as progress:
        for number, (part, pool) in enumerate(pools.items()):
            (directory / "images" / part).mkdir(parents=True)
            words = np.random.PCG64(np.random.SeedSequence([settings["seed"], number])).random_raw(settings[part] * 4)
            picks = pool[(words % len(pool)).astype(np.int64)].reshape(-1, 4)
            rows = []
            for index, four in enumerate(progress.track(picks, description=f"digits, {part}")):
                name = f"images/{part}/{index:05d}.png"
                Image.fromarray(_grid(greys[four])).save(directory / name)
                rows.append(_row(f"{part}-{index:05d}", name, labels[four], four))
            (directory / f"{part}.json").write_text(rows_as_json(rows))
            captions = [{"id": row["id"], "image": row["image"], "text": _caption(row)} for row in rows]
            (directory / f"{part}_captions.json").write_text(rows_as_json(captions))
            if part == "train":
                asked = [prompt for row in rows for prompt in _prompts(row)]
                (directory / "train_prompts.json").write_text(rows_as_json(asked))
            drawn = [_text_row(f"{part}-text-{i:05d}", np.rint(greys[i] * (WHITE / 255)), labels[i]) for i in pool]
            (directory / f"{part}_text.json").write_text(rows_as_json(drawn))
    sizes = {f"{part}_samples": len(pool) for part, pool in pools.items()}
    card = CARD.format(**settings, **sizes, example=json.dumps(rows[0], indent=1))
    (directory / "README.md").write_text(card)
    (directory / "settings.json").write_text(json.dumps(settings) + "\n")


def _grid(four: np.ndarray) -> np.ndarray:
    """[4, 8, 8] to [16, 16]: reading order."""
    return four.reshape(2, 2, SIDE, SIDE).swapaxes(1, 2).reshape(2 * SIDE, 2 * SIDE)


def _row(identity: str, image: str, digits: np.ndarray, samples: np.ndarray) -> dict[str, Any]:
    """``samples``: which handwriting each answer is about; trials count answers about one as hanging together."""
    turns: list[dict[str, str]] = []
    for place, digit in zip(PLACES, digits, strict=True):
        asked = place if turns else "<image>" + place
        turns += [{"from": "human", "value": asked}, {"from": "gpt", "value": str(digit)}]
    return {"id": identity, "image": image, "source": samples.tolist(), "conversations": turns}


def _caption(row: dict[str, Any]) -> str:
    """A row's answers as one caption."""
    return " ".join(turn["value"] for turn in row["conversations"] if turn["from"] == "gpt")


def _prompts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's questions one by one."""
    turns = [
        {"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
        for turn in row["conversations"]
    ]
    return [
        {"id": f"{row['id']}-{place}", "prompt": turns[: 2 * place + 1], "images": [row["image"]],
         "answer": turns[2 * place + 1]["content"]}
        for place in range(len(PLACES))
    ]  # fmt: skip


def _text_row(identity: str, grey: np.ndarray, digit: int) -> dict[str, Any]:
    """One handwritten sample, [8, 8] grey values of 0 to 16, as a row of text."""
    shades = np.minimum(grey * len(INK) / (WHITE + 1), len(INK) - 1).astype(int)
    drawing = "\n".join("".join(INK[shade] for shade in line) for line in shades)
    asked = {"from": "human", "value": f"{drawing}\nWhich digit?"}
    return {"id": identity, "conversations": [asked, {"from": "gpt", "value": str(digit)}]}


def rows_as_json(rows: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
