"""Writes the images of examples/smollm2_vl.yaml: handwritten digits, and the photographs that scikit-learn has.

python examples/smollm2/make_images.py build/smollm2-images

train.json        1,437 digits and 2 photographs, each of which is repeated in 20 rows; LLaVA rows
test.json         360 digits of which none is in train.json (every fifth sample of UCI's set)
photographs.json  the 2 photographs again: they are shown, not scored, because the model has seen them
images/           PNG files; digits of 8 x 8 pixels, photographs of 64 x 64
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

QUESTION = "What is this?"
PHOTOGRAPHS = {"china.jpg": "temple", "flower.jpg": "flower"}
_REPEATS = 20
_SIDE = 64


def _row(image: str, question: str, answer: str) -> dict[str, object]:
    turns = [{"from": "human", "value": f"<image>{question}"}, {"from": "gpt", "value": answer}]
    return {"id": Path(image).stem, "image": image, "conversations": turns}


def main(folder: Path) -> None:
    try:
        from sklearn.datasets import load_digits, load_sample_images
    except ImportError as error:
        raise SystemExit("scikit-learn has the images: pip install scikit-learn") from error
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    rows: dict[str, list[dict[str, object]]] = {"train": [], "test": [], "photographs": []}
    for number, (levels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        name = f"images/digit-{number:04d}.png"
        Image.fromarray((levels * 255 / 16).round().astype("uint8")).save(folder / name)
        rows["train" if number % 5 else "test"].append(_row(name, QUESTION, str(digit)))
    samples = load_sample_images()
    for file, pixels in zip(samples.filenames, samples.images, strict=True):
        name = f"images/{Path(file).stem}.png"
        Image.fromarray(pixels).resize((_SIDE, _SIDE)).save(folder / name)
        rows["photographs"].append(_row(name, QUESTION, PHOTOGRAPHS[Path(file).name]))
    rows["train"] += rows["photographs"] * _REPEATS
    for part, listed in rows.items():
        (folder / f"{part}.json").write_text(json.dumps(listed) + "\n", encoding="utf-8")
        print(f"{len(listed)} rows: {folder / part}.json")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name a folder for the images: python examples/smollm2/make_images.py build/smollm2-images")
    try:
        main(Path(sys.argv[1]))
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from error
