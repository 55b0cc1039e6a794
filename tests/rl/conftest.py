"""Preference pairs over the handwriting of `tests/train`, and configurations of short runs of rl and preference."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.config import Config
from tests.train.conftest import bare_forward, make, place, seen, uncounted, unseen, without_images

__all__ = ["bare_forward", "make", "place", "seen", "uncounted", "unseen"]
ROLE = {"human": "user", "gpt": "assistant"}
DIGIT = "[0-9a-e]"  # an untrained model generates these often enough


def split_answer(row: dict) -> tuple[dict, str]:
    """Return a digits row without its last answer, and that answer."""
    *turns, last = row["conversations"]
    return {**row, "conversations": turns}, last["value"]


@pytest.fixture(scope="session")
def pairs(place: Path) -> Path:
    """Write digits with the right answer as chosen and another digit as rejected, and a file of the same name in
    `talk/`."""
    for folder in ("talk", "digits"):
        rows = json.loads((place / folder / "train.json").read_text())
        pair_rows = [
            {**row, "chosen": answer, "rejected": str((int(answer) + 3) % 10)}
            for row, answer in map(split_answer, rows)
        ]
        file = place / folder / "pairs.json"
        file.write_text(json.dumps(pair_rows))
    return file


@pytest.fixture(scope="session")
def labelled(pairs: Path) -> Path:
    """Write labelled answers for KTO: every second answer is right and labelled good."""
    rows = [
        {"image": row["image"], "prompt": turns, "completion": row[side], "label": side == "chosen"}
        for row, side in zip(json.loads(pairs.read_text()), itertools.cycle(("chosen", "rejected")))
        for turns in [[{"role": ROLE[t["from"]], "content": t["value"]} for t in row["conversations"]]]
    ]
    file = pairs.parent / "labelled.json"
    file.write_text(json.dumps(rows))
    return file


@pytest.fixture
def preference_config(
    make: Callable[..., Config], place: Path, pairs: Path, request: pytest.FixtureRequest
) -> Callable[..., Config]:
    """preference_config("preference={loss: orpo}", ..., dir="a") -> three steps of preferences."""
    file = place / "talk" / "pairs.json" if without_images(request) else pairs

    def build(*overrides: str, dir: str = "run") -> Config:
        base = (f"data.train=[{{path: {file}}}]", "train.phase=preference", "train.steps=3", "data.eval=[]")
        return make(*base, *overrides, dir=dir)

    return build


@pytest.fixture
def rl_config(make: Callable[..., Config]) -> Callable[..., Config]:
    """rl_config("rl.algorithm=dapo", ..., dir="a") -> three steps that reward answers with a digit in them."""

    def build(*overrides: str, dir: str = "run") -> Config:
        rl = f"rl={{prompts: 4, group: 4, max_new_tokens: 4, rewards: [{{reward: regex, pattern: '{DIGIT}'}}]}}"
        base = ("train.phase=rl", "train.steps=3", "train.micro_batch=8", "train.global_batch=8", "data.eval=[]", rl)
        return make(*base, *overrides, dir=dir)

    return build
