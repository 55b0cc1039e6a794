"""A reference that is asked once: its numbers are a copy's, they outlive a kill, and those of others are not taken."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from safetensors.numpy import load_file

from octavo import rl
from octavo.config import Config, ConfigError, override
from octavo.models.tiny import tiny
from octavo.rl.phases import reference_cache
from octavo.train import TrainError
from tests.rl.test_preference_phase import LORA, rows_of
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("bare_forward", "unseen")

Make = Callable[..., Config]
DISK = "preference={reference: disk}"


def numbers(cfg: Config) -> list[dict]:
    """What the rows say of pairs."""
    return [{name: row[name] for name in row if name == "loss" or "/" in name} for row in rows_of(cfg)]


class Asked:
    """Counts micro-batches that the first weights are asked about, and stops a run at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop, ask = 0, 0, reference_cache._entries
        monkeypatch.setattr(reference_cache, "EVERY", 0.0)

        def asked(*given):
            self.count += 1
            if self.count == self.stop:
                raise KeyboardInterrupt
            return ask(*given)

        monkeypatch.setattr(reference_cache, "_entries", asked)


@pytest.mark.parametrize(
    "over", [(), pytest.param((*LORA, "train.logits=full"), marks=pytest.mark.long)], ids=["full", "lora"]
)
def test_what_is_kept_is_what_a_copy_says_to_the_bit_though_it_was_killed(
    preferring: Make, monkeypatch: pytest.MonkeyPatch, over: tuple[str, ...]
):
    """Each pair stands beside the same others as in training; a kill costs no more than was not written."""
    live, disk = preferring(*over, "train.lr=1e-2", dir="live"), preferring(*over, "train.lr=1e-2", DISK, dir="disk")
    rl.run(live)
    asked = Asked(monkeypatch)
    asked.stop = 4
    with pytest.raises(KeyboardInterrupt):
        rl.run(disk)
    asked.count, asked.stop = 0, 0
    result = rl.run(override(disk, ["run.resume=auto"]))
    assert asked.count == 4, "of six micro-batches, the two of the first step were written"
    assert numbers(disk) == numbers(live) and numbers(disk)[0]["rewards/margins"] == 0
    assert result.memory["reference"] == 0
    tables = load_file(result.dir / reference_cache.FILE)
    assert np.isfinite(tables["sums.0"]).all(axis=1).sum() == 12, "3 steps of 4 pairs"


@pytest.mark.usefixtures("seen")
@pytest.mark.long
def test_later_epochs_are_as_near_as_products_of_other_shapes(preferring: Make, pairs: Path):
    """Four micro-batches of three of ten pairs: the second epoch has other neighbours, and padding of other lengths."""
    over = ("train.micro_batch=3", "train.global_batch=6", "train.steps=4", "fp8.recipe=off")
    few = (f"data.train=[{{path: {pairs}, max_samples: 10}}]", *over)
    live, disk = preferring(*few, dir="live"), preferring(*few, DISK, dir="disk")
    rl.run(live)
    rl.run(disk)
    for one, two in zip(numbers(live), numbers(disk), strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-4)


@pytest.mark.usefixtures("seen")
def test_a_pair_that_is_always_alone_has_the_same_number_in_every_epoch(preferring: Make, pairs: Path):
    over = ("train.micro_batch=1", "train.global_batch=2", "train.steps=3")
    few = (f"data.train=[{{path: {pairs}, max_samples: 2}}]", *over)
    live, disk = preferring(*few, dir="live"), preferring(*few, DISK, dir="disk")
    rl.run(live)
    rl.run(disk)
    assert numbers(live) == numbers(disk)


@pytest.mark.long
def test_a_run_that_goes_on_asks_nobody_unless_the_file_is_gone(preferring: Make, monkeypatch: pytest.MonkeyPatch):
    asked, cfg = Asked(monkeypatch), preferring(DISK, "train.lr=1e-2")
    whole = rl.run(preferring(DISK, "train.lr=1e-2", dir="whole"))
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    shutil.copytree(cfg.run.dir, gone := Path(cfg.run.dir).with_name("gone"))
    (gone / reference_cache.FILE).unlink()
    asked.count = 0
    assert rl.run(override(cfg, ["run.resume=auto"])).losses() == whole.losses() and asked.count == 0
    again = override(cfg, ["run.resume=auto", f"run.dir={gone}"])
    assert rl.run(again).losses() == whole.losses() and asked.count == 6, "by the model that it began with"


@pytest.mark.long
@pytest.mark.parametrize("what", ["settings", "weights", "the same"])
def test_numbers_of_another_run_are_not_taken(
    preferring: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """A run that was killed before its first step leaves a directory in which another may begin."""
    asked, model = Asked(monkeypatch), tmp_path / "model"
    tiny.write("qwen3_vl", model, size="mini")
    cfg = preferring(DISK, f"model.path={model}", "train.steps=2", "train.warmup=0")
    asked.stop = 3
    with pytest.raises(KeyboardInterrupt):
        rl.run(cfg)
    asked.count, asked.stop = 0, 0
    if what == "settings":
        cfg = override(cfg, ["train.lr=1e-3"])
    elif what == "weights":
        shutil.rmtree(model)
        tiny.write("qwen3_vl", model, size="mini", seed=1)
    rl.run(override(cfg, ["run.resume=auto"]))
    assert asked.count == (2 if what == "the same" else 4) and numbers(cfg)[0]["rewards/margins"] == 0


@pytest.mark.usefixtures("seen")
def test_an_image_that_is_another_is_named(preferring: Make, place: Path, pairs: Path, tmp_path: Path):
    """Its file is no part of what a resume compares, and its tokens are as many."""
    shutil.copytree(place / "digits" / "images", tmp_path / "images")
    cfg = preferring(DISK, f"data.train=[{{path: {pairs}, images: {tmp_path}}}]", "train.steps=4", "fp8.recipe=off")
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    for file in (tmp_path / "images").rglob("*.png"):
        ImageOps.invert(Image.open(file).convert("RGB")).save(file)
    with pytest.raises(TrainError, match=r"pairs\.json, row \d+: had other tokens or images when reference\.safetens"):
        rl.run(override(cfg, ["run.resume=auto"]))


@pytest.mark.long
def test_rows_and_files_that_are_not_what_they_were_are_named(preferring: Make, monkeypatch: pytest.MonkeyPatch):
    cfg = preferring(DISK)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file, again = Path(cfg.run.dir) / reference_cache.FILE, override(cfg, ["run.resume=auto"])
    tables, whole = load_file(file), file.read_bytes()
    table = reference_cache.StoredReference(file, [])
    about = json.loads(tables["about"].tobytes())
    table.sums, table.prints = {about["files"][0]: tables["sums.0"]}, {about["files"][0]: tables["prints.0"] + 1}
    table.write(about["key"], about["done"], about["total"], 1)
    with pytest.raises(
        TrainError, match=r"pairs\.json, row \d+: had other tokens or images when reference\.safetensors"
    ):
        rl.run(again)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainError, match=r"reference\.safetensors is damaged .*; delete it: it is computed again"):
        rl.run(again)


@pytest.mark.parametrize(
    ("over", "found"),
    [
        (["preference={loss: kto, reference: disk}"], "kto also needs answers to other prompts of a step"),
        (["preference={loss: orpo, reference: disk}"], "orpo has none"),
        (
            ["train.phase=rl", "train.global_batch=2", "rl={rewards: [exact_match], reference: disk}"],
            "completions are new in every step, so the reference cannot be computed before the first",
        ),
    ],
)
def test_where_nothing_can_be_computed_before_it_is_refused(preferring: Make, over: list[str], found: str):
    with pytest.raises(ConfigError, match=found):
        preferring(*over)


def test_the_plan_says_that_it_takes_no_memory(preferring: Make):
    cfg = preferring(DISK)
    assert rl.reference_kind(cfg) == "disk" and "kept on disk, no memory" in rl.describe_step(cfg)[1]
