"""Whether a family's loss depends on the version of transformers: two Pythons, the same torch, the same folders.

    python -m tests.family_losses write FOLDER     mini checkpoints of all families, and their losses here
    python -m tests.family_losses compare FOLDER   the losses of the same folders in this Python, to the bit

`make test-oldest` writes with the newest version that Octavo is tested with and compares in the oldest. The losses are
those of rows with text, images and videos, read, encoded and batched by Octavo, as training does it; in fp32. What is
known to differ is in `DIFFERS`, with its reason; one that differs no longer is a failure too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from octavo import models
from octavo.base.model_families import tiny_families
from octavo.config import Dataset
from octavo.data import Encoder, collate, read
from octavo.models.tiny import tiny

_OF_CLASS = (
    "later versions take the family's tokenizer class whatever tokenizer_config.json names; that class splits words "
    "by its own rule, not by the one in the mini checkpoint's tokenizer.json"
)
DIFFERS: dict[str, str] = {"qwen3_5 batches": _OF_CLASS, "qwen3_5_moe batches": _OF_CLASS}
"""family (what it takes), "family batches" or "family text" -> why that is another one in the oldest version."""


def write_rows(folder: Path) -> None:
    """Rows of text, of images of several sizes, and of a video as a folder of frames, in files by what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, size, color in (
        ("a", (16, 16), (200, 30, 60)),
        ("b", (40, 24), (20, 180, 90)),
        ("c", (70, 20), (9, 9, 250)),
    ):
        Image.new("RGB", size, color).save(folder / f"{name}.png")
    (folder / "frames").mkdir(exist_ok=True)
    for number in range(6):
        Image.new("RGB", (16, 24), (40 * number, 255 - 40 * number, 99)).save(folder / "frames" / f"{number}.png")

    def row(question: str, answer: str, **more: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": turns, **more}

    files = {
        "text": [row("Which digit?", "a 3, I think"), row("And that one, which is longer?", "7")],
        "images": [
            row("<image>Which?", "3", images=["a.png"]),
            row("<image>a<image>b", "4 5", images=["b.png", "c.png"]),
        ],
        "videos": [row("<video>Which?", "3", videos=["frames"], fps=5)],
    }
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


def batches(folder: Path, rows: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What the rows hold -> a batch of them as the model at `folder` takes it, labels included; only what it takes."""
    processor = models.load_processor(folder)
    takes = ["text"]
    if getattr(processor, "image_token", None):
        takes.append("images")
    if getattr(processor, "videos", None) is not None:
        takes.append("videos")
    encoder = Encoder(processor, 512)
    of_all = {}
    for what in takes:
        source = read(Dataset.model_construct(path=str(rows / f"{what}.json")), "conversations")
        batch = collate(encoder.encode_all([source[number] for number in range(len(source))]), 0)
        of_all[what] = {name: value.contiguous() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return of_all


def loss(model: Any, batch: dict[str, torch.Tensor]) -> str:
    """All bits of the loss of a batch."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if "video_grid_thw" in inputs:
        vision = model.config.vision_config
        as_images = models.as_images(inputs, vision.spatial_merge_size, model.config.image_token_id)
        inputs = {**as_images, "position_ids": models.batch_positions(model, inputs)}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()).item().hex()


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def write(folder: Path, families: tuple[str, ...] = tiny_families()) -> None:
    write_rows(folder / "rows")
    record: dict[str, Any] = {**versions(), "losses": {}}
    for family in families:
        tiny.write(family, folder / family, size="mini")
        model = models.load(folder / family).eval()
        record["losses"][family] = {}
        for what, batch in batches(folder / family, folder / "rows").items():
            save_file(batch, folder / f"{family}.{what}.safetensors")
            record["losses"][family][what] = loss(model, batch)
    (folder / "losses.json").write_text(json.dumps(record, indent=1))


def compare(folder: Path, differs: dict[str, str] | None = None) -> list[str]:
    """A sentence for each batch or loss that is another one here without a reason, and for each reason without a
    difference. Losses are those of the batches that were written, so that one difference does not hide another."""
    differs = DIFFERS if differs is None else differs
    record = json.loads((folder / "losses.json").read_text())
    if record["torch"] != torch.__version__:
        return [f"the losses are of torch {record['torch']}, and this is {torch.__version__}: nothing is compared"]
    there, wrong, unused = f"with transformers {record['transformers']}", [], set(differs)

    def differ(name: str, sentence: str) -> None:
        unused.discard(name)
        if name not in differs:
            wrong.append(f"{name}: {sentence}")

    for family, expected in record["losses"].items():
        here = batches(folder / family, folder / "rows")
        model = models.load(folder / family).eval()
        if here.keys() != expected.keys():
            differ(family, f"takes {', '.join(here)} here, {', '.join(expected)} {there}")
        for what in expected:
            batch = load_file(folder / f"{family}.{what}.safetensors")
            own = here.get(what, {})
            if other := sorted(
                name for name in own.keys() | batch.keys()
                if name not in own or name not in batch or not torch.equal(own[name], batch[name])
            ):  # fmt: skip
                differ(f"{family} batches", f"{', '.join(other)} of {what} differ from those {there}")
            if (of_batch := loss(model, batch)) != expected[what]:
                a, b = float.fromhex(of_batch), float.fromhex(expected[what])
                differ(f"{family} {what}", f"the loss is {a!r} here, {b!r} {there}")
    return wrong + [f"{name}: nothing differs, and DIFFERS says so ({differs[name]})" for name in sorted(unused)]


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    if len(words) != 2 or words[0] not in ("write", "compare"):
        print(__doc__)
        return 2
    folder = Path(words[1])
    if words[0] == "write":
        write(folder)
        return 0
    wrong = compare(folder)
    for sentence in wrong:
        print(sentence)
    count = sum(len(of) for of in json.loads((folder / "losses.json").read_text())["losses"].values())
    print(f"transformers {transformers.__version__}: {count} losses compared, {len(wrong)} wrong, {len(DIFFERS)} known")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
