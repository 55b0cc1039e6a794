"""The digits set: images of four handwritten digits, and conversations that ask for each digit by its place.

    README.md        the data set card
    settings.json    the arguments of `write`
    train.json       LLaVA rows: id, image, conversations
    test.json
    images/train/00000.png ...   16 x 16 grey PNG: four 8 x 8 digits, first and second above third and fourth
    train_prompts.json           a row for each question about a training image, with the earlier turns
    train_captions.json          each training image with its digits, for pretraining
    test_captions.json
    train_text.json  the same handwriting for text-only models: one digit per row, drawn in characters
    test_text.json

The handwriting is the 1797 samples of UCI that scikit-learn has as `load_digits`, in uci_digits/. Every fifth sample is
used only in test images, so that no handwriting of a test image appears in training.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from octavo.base import atomic_write, target_folder
from octavo.base.safe_read import Unreadable, read_json
from octavo.data.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

PLACES = ("First?", "Second?", "Third?", "Fourth?")
SIDE = 8
WHITE = 16  # grey values are counts from 0 to 16
HANDWRITING = Path(__file__).with_name("uci_digits") / "digits.npz"
INK = " .+#"  # four shades, for the rows that draw a digit in characters
LAYOUT = 5  # incremented when the same settings give other files

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
    """The paths of the set: `directory` (also the folder of its images), `train` and `test` JSON files."""

    directory: Path
    train: Path
    test: Path


def write(
    directory: str | Path, train: int = 4000, test: int = 500, seed: int = 0, console: Console | None = None
) -> Digits:
    """Write the digits set into a new directory and return its paths.

    The files are written to a temporary folder that is renamed at the end, so a directory is complete or absent. One
    that already contains the set with the same settings is accepted; other content raises `DataError`. `console`: for
    the progress bar.
    """
    if train < 1 or test < 1:
        raise DataError(f"train={train}, test={test}: each needs at least one image")
    if seed < 0:
        raise DataError(f"seed={seed}: it must not be negative")
    directory = Path(directory)
    paths = Digits(directory, directory / "train.json", directory / "test.json")
    settings = {"layout": LAYOUT, "train": train, "test": test, "seed": seed}
    if not target_folder.is_free(directory):
        kinds = ("", "_text", "_captions", "_prompts")
        check_existing(directory, settings, "images", "png", kinds)
        return paths
    with atomic_write.new_folder(directory, DataError, replace=False) as new_folder:
        _write(new_folder, settings, console)
        atomic_write.sync_tree(new_folder)
    return paths


def check_existing(directory: Path, settings: dict[str, int], folder: str, ending: str, kinds: tuple[str, ...]) -> None:
    """Raise `DataError` unless the directory has these settings, all media files (`ending`, in `folder`) and the row
    files of `kinds`."""
    fix = "choose another directory, or remove this one"
    try:
        existing = read_json(directory / "settings.json")
    except Unreadable as cause:
        raise DataError(f"{directory} exists and is not a digits set; {fix}") from cause
    if existing != settings:
        changed_keys = [key for key in settings if existing.get(key) != settings[key]]
        changed = "; ".join(f"{key}: {existing.get(key)} there, {settings[key]} asked" for key in changed_keys)
        raise DataError(f"{directory} contains a digits set with different settings ({changed}); {fix}")
    for part in ("train", "test"):
        files = len(list((directory / folder / part).glob(f"*.{ending}")))
        expected = [kind for kind in kinds if part == "train" or kind != "_prompts"]
        has_all_files = all((directory / f"{part}{kind}.json").is_file() for kind in expected)
        if files != settings[part] or not has_all_files:
            raise DataError(f"{directory} is not complete ({files} of {settings[part]} {part} {folder}); remove it")


def load_handwriting() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return (all samples [1797, 8, 8] uint8, their digits [1797] int64, train and test -> indices of samples). Raises
    DataError if the file, which is part of Octavo, is missing or damaged."""
    levels, labels = samples()
    greys = np.rint(levels * (255 / WHITE)).astype(np.uint8)
    held_out = np.arange(len(greys)) % 5 == 4
    return greys, labels.astype(np.int64), {"train": np.flatnonzero(~held_out), "test": np.flatnonzero(held_out)}


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Return (levels [1797, 8, 8] uint8, 0 to 16; labels [1797] uint8), in scikit-learn's order. Raises DataError."""
    try:
        with np.load(HANDWRITING, allow_pickle=False) as file:
            return file["levels"], file["labels"]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as cause:
        raise DataError(f"{HANDWRITING}, a file of Octavo, cannot be read ({cause}); install Octavo again") from cause


def _write(directory: Path, settings: dict[str, int], console: Console | None) -> None:
    from rich.progress import Progress

    greys, labels, pools = load_handwriting()
    # Picks come from raw PCG64 words, whose stream NumPy keeps stable: the same seed gives the same files everywhere.
    with Progress(console=console, transient=True) as progress:
        for number, (part, pool) in enumerate(pools.items()):
            (directory / "images" / part).mkdir(parents=True)
            words = np.random.PCG64(np.random.SeedSequence([settings["seed"], number])).random_raw(settings[part] * 4)
            picks = pool[(words % len(pool)).astype(np.int64)].reshape(-1, 4)
            rows = []
            for index, chosen in enumerate(progress.track(picks, description=f"digits, {part}")):
                name = f"images/{part}/{index:05d}.png"
                Image.fromarray(_grid(greys[chosen])).save(directory / name)
                rows.append(_row(f"{part}-{index:05d}", name, labels[chosen], chosen))
            (directory / f"{part}.json").write_text(rows_as_json(rows))
            captions = [{"id": row["id"], "image": row["image"], "text": _caption(row)} for row in rows]
            (directory / f"{part}_captions.json").write_text(rows_as_json(captions))
            if part == "train":
                prompts = [prompt for row in rows for prompt in _prompts(row)]
                (directory / "train_prompts.json").write_text(rows_as_json(prompts))
            text_rows = [_text_row(f"{part}-text-{i:05d}", np.rint(greys[i] * (WHITE / 255)), labels[i]) for i in pool]
            (directory / f"{part}_text.json").write_text(rows_as_json(text_rows))
    sizes = {f"{part}_samples": len(pool) for part, pool in pools.items()}
    card = CARD.format(**settings, **sizes, example=json.dumps(rows[0], indent=1))
    (directory / "README.md").write_text(card)
    (directory / "settings.json").write_text(json.dumps(settings) + "\n")


def _grid(digits: np.ndarray) -> np.ndarray:
    """Four digits [4, 8, 8] as one image [16, 16], in reading order."""
    return digits.reshape(2, 2, SIDE, SIDE).swapaxes(1, 2).reshape(2 * SIDE, 2 * SIDE)


def _row(identity: str, image: str, digits: np.ndarray, samples: np.ndarray) -> dict[str, Any]:
    """Return a LLaVA row; ``samples``: the sample number of each answer, by which trials group dependent answers."""
    turns: list[dict[str, str]] = []
    for place, digit in zip(PLACES, digits, strict=True):
        question = place if turns else "<image>" + place
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": str(digit)}]
    return {"id": identity, "image": image, "source": samples.tolist(), "conversations": turns}


def _caption(row: dict[str, Any]) -> str:
    """Return the answers of a row as one caption."""
    return " ".join(turn["value"] for turn in row["conversations"] if turn["from"] == "gpt")


def _prompts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a prompt row for each question of a row."""
    turns = [
        {"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
        for turn in row["conversations"]
    ]
    return [
        {"id": f"{row['id']}-{place}", "prompt": turns[: 2 * place + 1], "images": [row["image"]],
         "answer": turns[2 * place + 1]["content"]}
        for place in range(len(PLACES))
    ]  # fmt: skip


def _text_row(identity: str, grey: np.ndarray, digit: int) -> dict[str, object]:
    """One handwritten sample, [8, 8] grey values from 0 to 16, as a row of text."""
    shades = np.minimum(grey * len(INK) / (WHITE + 1), len(INK) - 1).astype(int)
    drawing = "\n".join("".join(INK[shade] for shade in line) for line in shades)
    question = {"from": "human", "value": f"{drawing}\nWhich digit?"}
    return {"id": identity, "conversations": [question, {"from": "gpt", "value": str(digit)}]}


def rows_as_json(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as a JSON list with one row per line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
