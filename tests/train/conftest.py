"""A mini Qwen3-VL and a small digits set, written once, and configurations over them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import train
from octavo.config import Config, load_config_text
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from octavo.train.step.memory_report import Memory

STEPS = 6


class Rows(train.Callback):
    """Calls a function with each row, once it was handed to metrics.jsonl."""

    def __init__(self, work: Callable[[dict[str, Any]], Any]) -> None:
        self.work = work

    def end_step(self, run: train.Run, step: train.Step) -> None:
        self.work(step.row)


def at(step: int, number: int) -> Rows:
    """A callback that sends this process a signal once `step` is written."""
    return Rows(lambda row: os.kill(os.getpid(), number) if row["step"] == step else None)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny/` (mini Qwen3-VL), `text/` (mini Qwen3), `digits/`, and `talk/`, these without their images;
    read only."""
    folder = tmp_path_factory.mktemp("train")
    tiny.write("qwen3_vl", folder / "tiny", size="mini")
    tiny.write("qwen3", folder / "text", size="mini")
    digits.write(folder / "digits", train=48, test=4)
    (folder / "talk").mkdir()
    for name in ("train.json", "test.json"):
        rows = json.loads((folder / "digits" / name).read_text())
        for number, row in enumerate(rows):
            del row["image"]
            row["conversations"][0]["value"] = f"{number}: First?"
        (folder / "talk" / name).write_text(json.dumps(rows))
    return folder


@pytest.fixture
def bare_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """For runs that are about other things. The first step counts no saved bytes, which costs more than the step: these
    forward as those of test_run.py and test_memory.py do, which count."""
    monkeypatch.setattr(Memory, "forward", lambda self: nullcontext())


@pytest.fixture
def uncounted(bare_forward: None) -> None:
    """For files of such runs. `make` gives steps of the same four rows in one micro-batch, too: several are those of
    test_run.py and test_step.py."""


@pytest.fixture
def unseen() -> None:
    """For runs that are about other things than images: `make` takes the text model and its rows, in half the time."""


@pytest.fixture
def seen() -> None:
    """For those among them that are about images all the same."""


Make = Callable[..., Config]


def without_images(request: pytest.FixtureRequest) -> bool:
    return "unseen" in request.fixturenames and "seen" not in request.fixturenames


@pytest.fixture
def make(place: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """make("train.lr=1e-2", ..., dir="a") -> a configuration of six short steps in tmp_path/a."""
    micro = 4 if "uncounted" in request.fixturenames else 2
    model, rows = (place / "text", place / "talk") if without_images(request) else (place / "tiny", place / "digits")

    def build(*overrides: str, dir: str = "run") -> Config:
        text = f"""
model: {{path: {model}}}
fp8: {{recipe: blockwise}}
data:
  train: [{{path: {rows / "train.json"}}}]
  eval: [{{path: {rows / "test.json"}}}]
train: {{steps: {STEPS}, seq_length: 128, micro_batch: {micro}, global_batch: 4, lr: 2e-3, warmup: 2}}
run: {{dir: {tmp_path / dir}, health_every: 0, tensorboard: false, hf: false, threads: 1}}
"""
        return load_config_text(text, overrides)

    return build


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile without generating code, which takes most of the time and rounds otherwise, and list the graphs."""
    from torch._dynamo.backends.debugging import aot_eager

    made = []

    def count(graph: Any, inputs: Any, **options: Any) -> Any:
        made.append(graph)
        return aot_eager(graph, inputs, **options)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    return made
