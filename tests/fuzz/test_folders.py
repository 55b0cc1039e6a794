"""Damaged model folders, adapters and run directories are read correctly, or rejected by an error that names the file.

    python -m tests.fuzz.test_folders --cases 10000 --seed 1

One file of a valid folder is damaged (bytes, a field of its JSON, or replaced), and all readers of such folders read
it: `verify`, loading a model, its processor, an adapter, a report. `verify` must report what `models.load` rejects.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from octavo import adapters, checkpoint, models
from octavo.config import LoraSection
from octavo.report.evidence import run_reader
from tests.checkpoint import folders
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, command, outcome
from tests.report.synthetic_runs import write_run


class Kind(NamedTuple):
    """A valid folder, and a function that reads it."""

    folder: Path
    reads: tuple[Callable[[Path], object], ...]


def build(place: Path) -> list[Kind]:
    """Write one valid folder of each kind."""
    tiny = folders.tokenizers(place / "tiny")
    plain = folders.write("plain", place / "plain", tiny, "qwen3_tied", shards=1)
    codes = folders.write("fp8-block", place / "fp8", tiny, "qwen3")
    for folder in (plain, codes, tiny):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.7}))
    model = models.load(plain)
    lora = LoraSection(rank=2, alpha=4)
    adapters.attach(model, models.describe(model.config), lora, seed=0)
    adapters.save(model, place / "adapter", plain)
    health = {1: {"a": {"x": {"sqnr": 30.0, "underflow": 0.0, "saturation": 0.0}, "nan_codes": 0, "dw_cosine": 0.9}}}
    run = write_run(place / "run", np.linspace(3, 2, 4), tables=health)

    def attach(folder: Path) -> object:
        return adapters.load(models.load(plain), folder)

    load = (models.load, models.load_processor)
    return [
        Kind(plain, load),
        Kind(codes, load),
        Kind(tiny, load),
        Kind(place / "adapter", (attach,)),
        Kind(run, (run_reader.read,)),
    ]


def damage(rng: random.Random, folder: Path) -> str:
    """Damage one file; returns a description."""

    def fields(file: Path, raw: bytes, how: float) -> str | None:
        if how < 0.6 and file.suffix == ".json":
            mutate.write(file, mutate.damage_json(rng, raw.decode()).encode())
            return "a strange value"
        if file.suffix == ".safetensors" and how < 0.8:
            length = struct.unpack("<Q", raw[:8])[0]
            header = raw[8 : 8 + length]
            if how < 0.5:
                header = mutate.damage_json(rng, header.decode()).encode()
                mutate.write(file, len(header).to_bytes(8, "little") + header + raw[8 + length :])
            else:
                mutate.write(file, mutate.damage(rng, raw[: 8 + length]) + raw[8 + length :])
            return "its header"
        if file.name == "metrics.jsonl" and how < 0.6:
            lines = raw.decode().splitlines()
            at = rng.randrange(len(lines))
            lines[at] = mutate.damage_json(rng, lines[at])
            mutate.write(file, "\n".join([*lines, ""]).encode())
            return "a strange value"
        return None

    return mutate.damage_file(rng, folder, fields)


def run(seed: int, cases: int) -> list[Finding]:
    rng = random.Random(seed)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as place:
        kinds = build(Path(place))
        folder = Path(place) / "case"
        for number in range(cases):
            kind = rng.choice(kinds)
            mutate.copy_tree(kind.folder, folder)
            case = f"case {number} of seed {seed}, {kind.folder.name}/{damage(rng, folder)}"
            read = rng.choice(kind.reads)
            refused = outcome(lambda: read(folder), folder, case, found)  # noqa: B023
            if kind.folder.name == "run" or not (refused or rng.random() < 0.3):
                continue
            verified: list[checkpoint.VerifyResult] = []
            outcome(lambda: verified.append(checkpoint.verify(folder)), folder, f"{case}, verify", found)  # noqa: B023
            # an adapter is verified for PEFT, which accepts some that Octavo does not support
            if refused and verified and verified[0].ok and kind.folder.name != "adapter":
                found.append(Finding(case, f"verify finds nothing, and it was refused: {refused}"))
    return found


@pytest.mark.long
def test_damaged_folders_are_read_correctly_or_rejected() -> None:
    assert run(seed=13, cases=200) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=0)
