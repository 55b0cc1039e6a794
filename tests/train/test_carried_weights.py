"""Tensors that the model does not load are in hf/, exports and merges of runs of every kind."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo import rl, train
from octavo.config import Config
from octavo.models import ModelError
from octavo.train.artifacts import export_model, merge_model
from octavo.train.errors import TrainError
from tests.checkpoint import surplus

pytestmark = pytest.mark.usefixtures("unseen", "uncounted")
ONE = ("train.steps=1", "train.warmup=0", "data.eval=[]", "fp8.recipe=off")
MORE = {
    "mtp.fc.weight": torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "score.weight": torch.ones(1, 4, dtype=torch.float16),
}
SENTENCE = "2 tensors that the model does not load (mtp.fc.weight, score.weight) were copied unchanged"
Make = Callable[..., Config]


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Path:
    return surplus.copy(place / "text", tmp_path / "model", MORE)


def test_hf_and_export_of_a_resumed_run_have_them(folder: Path, make: Make, tmp_path: Path) -> None:
    more = (f"model.path={folder}", *ONE)
    train.run(make(*more, "train.steps=2", "run.milestones=[1]", dir="first"))
    checkpoint = tmp_path / "first" / "milestones" / "step_1"
    console = Console(file=io.StringIO(), width=300)
    resumed = make(*more, "train.steps=2", f"run.resume={checkpoint}", "run.hf=true", dir="resumed")
    done = train.run(resumed, console=console)
    assert console.file.getvalue().count(SENTENCE) == 1  # type: ignore[attr-defined]
    assert surplus.same(done.dir / "hf", MORE)
    export_model(done.dir, tmp_path / "served", "bf16")
    assert surplus.same(tmp_path / "served", MORE)
    shutil.move(folder, tmp_path / "elsewhere")
    with pytest.raises((TrainError, ModelError), match=str(folder)):
        export_model(done.dir, tmp_path / "again", "bf16")
    assert not (tmp_path / "again").exists()


def test_merged_adapter_has_them(folder: Path, make: Make, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    done = train.run(make(f"model.path={folder}", *ONE, "lora={rank: 2}"))
    merged = merge_model(done.dir, tmp_path / "merged")
    assert surplus.same(tmp_path / "merged", MORE) and SENTENCE in merged.sentences()


def test_preference_run_has_them(folder: Path, make: Make, tmp_path: Path) -> None:
    rows = [{"prompt": "a?", "chosen": "yes", "rejected": "no"}] * 4
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = (f"data.train=[{{path: {tmp_path / 'pairs.jsonl'}}}]", "train.phase=preference", "preference={loss: orpo}")
    assert surplus.same(rl.run(make(f"model.path={folder}", *ONE, *pairs, "run.hf=true")).dir / "hf", MORE)


def test_run_from_random_weights_has_none(folder: Path, make: Make, tmp_path: Path) -> None:
    done = train.run(make(f"model.path={folder}", *ONE, "model.init=random", "train.phase=pretrain", "run.hf=true"))
    messages: list[str] = []
    export_model(done.dir, tmp_path / "served", "fp8-dynamic", log=messages.append)
    assert any("are left out: training began with random weights" in message for message in messages)
    assert not set(MORE) & surplus.weights(tmp_path / "served").keys()
    assert not set(MORE) & surplus.weights(done.dir / "hf").keys()
    assert surplus.KEY not in json.loads((done.dir / "hf" / "config.json").read_text())
