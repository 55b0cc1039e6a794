"""The digits set as videos: clips that show handwritten digits one after the other, and the question which they are.

    README.md        the data set card
    settings.json    the arguments of `write`
    train.json       LLaVA rows: id, video, conversations
    test.json
    videos/train/00000.mp4 ...   16 x 16 grey pixels at 8 frames a second; each digit is shown for `hold` frames

It uses the handwriting of :mod:`octavo.data.builtin.digits` with the same split: no handwriting of a test clip appears
in training. Clips are lossless H.264 (4:4:4, within 1 of 255), so that the same settings and the same PyAV give the
same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.base import atomic_write, target_folder
from octavo.data.builtin.digits import SIDE, Digits, check_existing, load_handwriting, rows_as_json
from octavo.data.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console

QUESTION = "Which digits appear, in order?"
RATE = 8  # frames a second
SCALE = 2  # each pixel of the handwriting is SCALE x SCALE pixels of the clip
MAX_DIGITS = 64  # digits in a clip
LAYOUT = 1  # incremented when the same settings give other files

CARD = """# Octavo digits, as videos

{train} training and {test} test clips of 16 x 16 grey pixels, each of {digits} handwritten digits that appear one after
the other, {hold} frames each at 8 frames a second, and the question which they are. LLaVA format (`train.json`,
`test.json`).

```json
{example}
```

A model that takes {taken:g} frames a second sees each digit {seen:g} time(s).

**Source.** The 1797 samples of `sklearn.datasets.load_digits`, the test part of the UCI ML *Optical Recognition of
Handwritten Digits* data set (E. Alpaydin, C. Kaynak, 1998; CC BY 4.0; https://doi.org/10.24432/C50P49): 8 x 8 pixels
with 17 grey levels, here scaled to 0..255, each pixel drawn as 2 x 2.

**Split.** Samples 4, 9, 14 ... (every fifth) appear in test clips only, the others in training clips only. Combinations
are drawn with seed {seed}.

Written by `octavo digits --video`.
"""


def write(
    directory: str | Path, train: int = 4000, test: int = 500, seed: int = 0, digits: int = 3, hold: int = 4,
    console: Console | None = None,
) -> Digits:  # fmt: skip
    """Write the set into a new directory and return its paths, as `octavo.data.builtin.digits.write` does.

    digits   number of digits in each clip
    hold     frames for which each is shown

    Raises DataError for arguments out of range, for a directory with other content, and if PyAV is not installed.
    """
    sizes = {"train": train, "test": test, "digits": digits, "hold": hold}
    if wrong := [f"{name}={value}" for name, value in sizes.items() if value < 1]:
        raise DataError(f"{wrong[0]}: it must be at least 1")
    if digits > MAX_DIGITS or hold > RATE * 60:
        raise DataError(f"digits={digits}, hold={hold}: {MAX_DIGITS} digits of {RATE * 60} frames are the limit")
    if seed < 0:
        raise DataError(f"seed={seed}: it must not be negative")
    directory = Path(directory)
    paths = Digits(directory, directory / "train.json", directory / "test.json")
    settings = {"layout": LAYOUT, "video": True, **sizes, "seed": seed}
    if not target_folder.is_free(directory):
        check_existing(directory, settings, "videos", "mp4", ("",))
        return paths
    with atomic_write.new_folder(directory, DataError, replace=False) as new_folder:
        _write(new_folder, settings, console)
        atomic_write.sync_tree(new_folder)
    return paths


def _write(directory: Path, settings: dict[str, int], console: Console | None) -> None:
    from rich.progress import Progress

    greys, labels, pools = load_handwriting()
    digits, hold = settings["digits"], settings["hold"]
    rows: list[dict[str, object]] = []
    with Progress(console=console, transient=True) as progress:
        for number, (part, pool) in enumerate(pools.items()):
            (directory / "videos" / part).mkdir(parents=True)
            draws = np.random.PCG64(np.random.SeedSequence([settings["seed"], number, digits]))
            words = draws.random_raw(settings[part] * digits)
            picks = pool[(words % len(pool)).astype(np.int64)].reshape(-1, digits)
            rows = []
            for index, chosen in enumerate(progress.track(picks, description=f"clips, {part}")):
                name = f"videos/{part}/{index:05d}.mp4"
                encode(directory / name, np.repeat(greys[chosen], hold, axis=0))
                rows.append(_row(f"{part}-{index:05d}", name, labels[chosen], chosen))
            (directory / f"{part}.json").write_text(rows_as_json(rows))
    facts = {"example": json.dumps(rows[0], indent=1), "taken": RATE / hold * 2, "seen": 2}
    (directory / "README.md").write_text(CARD.format(**settings, **facts))
    (directory / "settings.json").write_text(json.dumps(settings) + "\n")


def _row(identity: str, video: str, digits: np.ndarray, samples: np.ndarray) -> dict[str, object]:
    """Return a LLaVA row; ``samples``: the numbers of the handwritten samples in the clip."""
    turns = [
        {"from": "human", "value": f"<video>{QUESTION}"},
        {"from": "gpt", "value": " ".join(map(str, digits))},
    ]
    return {"id": identity, "video": video, "source": " ".join(map(str, samples)), "conversations": turns}


def encode(path: Path, frames: np.ndarray, codec: str = "libx264") -> None:
    """Write grey frames [T, 8, 8] as a video, each pixel twice as large. Raises DataError where PyAV is missing."""
    try:
        import av
    except ImportError as cause:
        raise DataError(f"PyAV writes videos, and cannot be imported ({cause}); pip install 'octavo[video]'") from cause
    side = SIDE * SCALE
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=RATE)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv444p"
        stream.codec_context.thread_count = 1
        stream.options = {"qp": "0"} if codec == "libx264" else {"lossless": "1"}
        for frame in frames.repeat(SCALE, axis=1).repeat(SCALE, axis=2):
            image = av.VideoFrame.from_ndarray(np.repeat(frame[..., None], 3, axis=2), format="rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode())
