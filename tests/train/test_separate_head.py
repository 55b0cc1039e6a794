"""A folder whose config.json ties the head to the embeddings, with another head on disk: loaders keep both, and so does
everything that Octavo writes of it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from octavo import checkpoint, models, sealing, train
from octavo.checkpoint import verify
from octavo.config import Config
from octavo.models.folder.folder import write_config
from octavo.models.weights.iterate import stored_dtypes
from octavo.parallel import World
from octavo.train.artifacts import export_model, merge_model
from tests.checkpoint import surplus

pytestmark = pytest.mark.usefixtures("unseen", "uncounted")
ONE = ("train.steps=1", "train.warmup=0", "data.eval=[]", "fp8.recipe=off")
HEAD, EMBEDDING, TIED = "lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"
Make = Callable[..., Config]


def with_head(source: Path, target: Path, head: torch.Tensor) -> Path:
    return surplus.add(Path(shutil.copytree(source, target)), {HEAD: head}, key=None)


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Path:
    shape = surplus.weights(place / "text")[EMBEDDING].shape
    head = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return with_head(place / "text", tmp_path / "model", head)


def tied_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get(TIED)


def same_as(folder: Path, wanted: dict[str, torch.Tensor]) -> bool:
    """Whether a folder has the two tensors of another, and a config.json with which every loader reads both."""
    weights = surplus.weights(folder)
    return all(weights[n].equal(wanted[n].to(weights[n].dtype)) for n in (HEAD, EMBEDDING)) and tied_in(folder) is False


@pytest.mark.parametrize("format", ["bf16", "fp8-dynamic"])
def test_export_of_the_folder_keeps_both(folder: Path, tmp_path: Path, format: str) -> None:
    assert tied_in(folder) is True
    messages: list[str] = []
    export_model(folder, tmp_path / "out", format, log=messages.append)
    assert same_as(tmp_path / "out", surplus.weights(folder)) and verify(tmp_path / "out").ok
    assert any(f"config.json has {TIED}: false" in message for message in messages)
    assert stored_dtypes(folder).keys() >= {HEAD, EMBEDDING}
    again: list[str] = []
    export_model(tmp_path / "out", tmp_path / "again", "bf16", log=again.append)  # untied in config.json as well
    assert same_as(tmp_path / "again", surplus.weights(folder)) and not any(TIED in message for message in again)


def test_equal_head_is_tied(place: Path, tmp_path: Path) -> None:
    embedding = surplus.weights(place / "text")[EMBEDDING]
    folder = with_head(place / "text", tmp_path / "model", embedding)
    export_model(folder, tmp_path / "out", "bf16")
    assert HEAD not in surplus.weights(tmp_path / "out") and tied_in(tmp_path / "out") is True
    assert models.load(folder).config.tie_word_embeddings is True


def test_loaders_agree_and_report_it(folder: Path, tmp_path: Path) -> None:
    wanted, messages = surplus.weights(folder), []
    loaded = models.load(folder, torch.bfloat16, log=messages.append)
    assert loaded.lm_head.weight.equal(wanted[HEAD]) and loaded.config.tie_word_embeddings is False
    deferred = models.load_deferred(folder, torch.bfloat16, log=messages.append).model
    assert deferred.lm_head.weight is not deferred.model.embed_tokens.weight
    assert [message.partition(": ")[2][:20] for message in messages] == ["lm_head.weight diffe"] * 2
    loaded.tie_weights()  # as some of transformers' functions do
    assert same_as(checkpoint.save_hf(loaded, folder, tmp_path / "hf", World()), wanted)


def test_default_of_the_family_is_overwritten(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    del raw[TIED]
    (folder / "config.json").write_text(json.dumps(raw | {"text_config": {TIED: True}}))
    write_config(folder, tmp_path, torch.bfloat16, untied=True)
    assert tied_in(tmp_path) is False
    assert json.loads((tmp_path / "config.json").read_text())["text_config"] == {TIED: False}


def test_run_saves_and_exports_the_trained_head(folder: Path, make: Make, tmp_path: Path) -> None:
    more = (f"model.path={folder}", *ONE, "train.steps=2", "run.hf=true")
    console = Console(file=io.StringIO(), width=300)
    whole = train.run(make(*more, "run.milestones=[1]", dir="whole"), console=console)
    assert "lm_head.weight differs from model.embed_tokens.weight" in console.file.getvalue()  # type: ignore[attr-defined]
    trained, before = surplus.weights(whole.dir / "hf"), surplus.weights(folder)
    assert tied_in(whole.dir / "hf") is False and verify(whole.dir / "hf").ok
    assert not any(trained[name].bfloat16().equal(before[name]) for name in (HEAD, EMBEDDING))
    first = whole.dir / "milestones" / "step_1"
    resumed = train.run(make(*more, f"run.resume={first}", dir="resumed"))
    assert all(tensor.equal(trained[name]) for name, tensor in surplus.weights(resumed.dir / "hf").items())
    export_model(whole.dir, tmp_path / "served", "bf16")
    assert same_as(tmp_path / "served", trained)


def test_merged_adapter_keeps_both(folder: Path, make: Make, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    done = train.run(make(f"model.path={folder}", *ONE, "lora={rank: 2}"))
    merge_model(done.dir, tmp_path / "merged")
    assert same_as(tmp_path / "merged", surplus.weights(folder))


def test_random_weights_are_tied_as_configured(folder: Path, make: Make, tmp_path: Path) -> None:
    done = train.run(make(f"model.path={folder}", *ONE, "model.init=random", "train.phase=pretrain", "run.hf=true"))
    export_model(done.dir, tmp_path / "served", "bf16")
    for written in (done.dir / "hf", tmp_path / "served"):
        assert HEAD not in surplus.weights(written) and tied_in(written) is True


def test_sealed_folder_keeps_both(folder: Path, tmp_path: Path) -> None:
    key = sealing.Key(bytes(32))
    sealing.seal_model(folder, tmp_path / "sealed", key)
    sealing.unseal_model(tmp_path / "sealed", tmp_path / "back", key)
    back, wanted = surplus.weights(tmp_path / "back"), surplus.weights(folder)
    assert all(back[name].equal(wanted[name]) for name in (HEAD, EMBEDDING))
