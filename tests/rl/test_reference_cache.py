"""`preference.reference: disk`: stored figures equal those of a copy, survive a kill, and are not shared between
runs."""

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
from tests.rl.test_preference_phase import LORA, read_metrics
from tests.train.conftest import at

pytestmark = pytest.mark.usefixtures("bare_forward", "unseen")

Make = Callable[..., Config]
DISK = "preference={reference: disk}"


def pair_figures(cfg: Config) -> list[dict]:
    """Return the figures of pairs in metrics.jsonl."""
    return [{name: row[name] for name in row if name == "loss" or "/" in name} for row in read_metrics(cfg)]


class ReferenceCalls:
    """Counts the micro-batches that the reference computes, and interrupts a run at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.stop, compute = 0, 0, reference_cache._compute_entries
        monkeypatch.setattr(reference_cache, "WRITE_INTERVAL_S", 0.0)

        def count_and_compute(*args):
            self.count += 1
            if self.count == self.stop:
                raise KeyboardInterrupt
            return compute(*args)

        monkeypatch.setattr(reference_cache, "_compute_entries", count_and_compute)


@pytest.mark.parametrize(
    "overrides", [(), pytest.param((*LORA, "train.logits=full"), marks=pytest.mark.long)], ids=["full", "lora"]
)
def test_stored_reference_equals_a_copy_bit_for_bit_after_a_kill(
    preference_config: Make, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
):
    """Each pair is in the same batch as in training; a kill loses only the figures that were not written yet."""
    live, disk = (
        preference_config(*overrides, "train.lr=1e-2", dir="live"),
        preference_config(*overrides, "train.lr=1e-2", DISK, dir="disk"),
    )
    rl.run(live)
    calls = ReferenceCalls(monkeypatch)
    calls.stop = 4
    with pytest.raises(KeyboardInterrupt):
        rl.run(disk)
    calls.count, calls.stop = 0, 0
    result = rl.run(override(disk, ["run.resume=auto"]))
    assert calls.count == 4, "of six micro-batches, the disk_figures of the first step were written"
    assert pair_figures(disk) == pair_figures(live) and pair_figures(disk)[0]["rewards/margins"] == 0
    assert result.memory["reference"] == 0
    tables = load_file(result.dir / reference_cache.REFERENCE)
    assert np.isfinite(tables["sums.0"]).all(axis=1).sum() == 12, "3 steps of 4 pairs"


@pytest.mark.usefixtures("seen")
@pytest.mark.long
def test_later_epochs_differ_only_by_rounding(preference_config: Make, pairs: Path):
    """In the second epoch, pairs are in batches with other pairs and other padding."""
    overrides = ("train.micro_batch=3", "train.global_batch=6", "train.steps=4", "fp8.recipe=off")
    few = (f"data.train=[{{path: {pairs}, max_samples: 10}}]", *overrides)
    live, disk = preference_config(*few, dir="live"), preference_config(*few, DISK, dir="disk")
    rl.run(live)
    rl.run(disk)
    for live_figures, disk_figures in zip(pair_figures(live), pair_figures(disk), strict=True):
        assert disk_figures == pytest.approx(live_figures, rel=1e-4, abs=1e-4)


@pytest.mark.usefixtures("seen")
def test_pairs_in_separate_micro_batches_have_equal_figures_in_every_epoch(preference_config: Make, pairs: Path):
    overrides = ("train.micro_batch=1", "train.global_batch=2", "train.steps=3")
    few = (f"data.train=[{{path: {pairs}, max_samples: 2}}]", *overrides)
    live, disk = preference_config(*few, dir="live"), preference_config(*few, DISK, dir="disk")
    rl.run(live)
    rl.run(disk)
    assert pair_figures(live) == pair_figures(disk)


@pytest.mark.long
def test_resume_recomputes_the_reference_only_if_the_file_is_missing(
    preference_config: Make, monkeypatch: pytest.MonkeyPatch
):
    calls, cfg = ReferenceCalls(monkeypatch), preference_config(DISK, "train.lr=1e-2")
    uninterrupted = rl.run(preference_config(DISK, "train.lr=1e-2", dir="uninterrupted"))
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    shutil.copytree(cfg.run.dir, copied := Path(cfg.run.dir).with_name("copied"))
    (copied / reference_cache.REFERENCE).unlink()
    calls.count = 0
    assert rl.run(override(cfg, ["run.resume=auto"])).losses() == uninterrupted.losses() and calls.count == 0
    again = override(cfg, ["run.resume=auto", f"run.dir={copied}"])
    assert rl.run(again).losses() == uninterrupted.losses() and calls.count == 6, "computed by the initial weights"


@pytest.mark.long
@pytest.mark.parametrize("what", ["settings", "weights", "the same"])
def test_figures_of_another_run_are_not_used(
    preference_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    """A run that was killed before its first step leaves a directory in which a different run may start."""
    calls, model = ReferenceCalls(monkeypatch), tmp_path / "model"
    tiny.write("qwen3_vl", model, size="mini")
    cfg = preference_config(DISK, f"model.path={model}", "train.steps=2", "train.warmup=0")
    calls.stop = 3
    with pytest.raises(KeyboardInterrupt):
        rl.run(cfg)
    calls.count, calls.stop = 0, 0
    if what == "settings":
        cfg = override(cfg, ["train.lr=1e-3"])
    elif what == "weights":
        shutil.rmtree(model)
        tiny.write("qwen3_vl", model, size="mini", seed=1)
    rl.run(override(cfg, ["run.resume=auto"]))
    assert calls.count == (2 if what == "the same" else 4) and pair_figures(cfg)[0]["rewards/margins"] == 0


@pytest.mark.usefixtures("seen")
def test_changed_image_is_named(preference_config: Make, place: Path, pairs: Path, tmp_path: Path):
    """Image files are not part of the fingerprint, and the number of tokens is unchanged."""
    shutil.copytree(place / "digits" / "images", tmp_path / "images")
    cfg = preference_config(
        DISK, f"data.train=[{{path: {pairs}, images: {tmp_path}}}]", "train.steps=4", "fp8.recipe=off"
    )
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    for file in (tmp_path / "images").rglob("*.png"):
        ImageOps.invert(Image.open(file).convert("RGB")).save(file)
    with pytest.raises(TrainError, match=r"pairs\.json, row \d+: had other tokens or images when reference\.safetens"):
        rl.run(override(cfg, ["run.resume=auto"]))


@pytest.mark.long
def test_changed_rows_and_damaged_files_are_named(preference_config: Make, monkeypatch: pytest.MonkeyPatch):
    cfg = preference_config(DISK)
    rl.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file, again = Path(cfg.run.dir) / reference_cache.REFERENCE, override(cfg, ["run.resume=auto"])
    tables, uninterrupted = load_file(file), file.read_bytes()
    table = reference_cache.StoredReference(file, [])
    about = json.loads(tables["about"].tobytes())
    table.sums, table.checksums = {about["files"][0]: tables["sums.0"]}, {about["files"][0]: tables["prints.0"] + 1}
    table.write(about["key"], about["done"], about["total"], 1)
    with pytest.raises(
        TrainError, match=r"pairs\.json, row \d+: had other tokens or images when reference\.safetensors"
    ):
        rl.run(again)
    file.write_bytes(uninterrupted[: len(uninterrupted) // 2])
    with pytest.raises(TrainError, match=r"reference\.safetensors is damaged .*; delete it: it is computed again"):
        rl.run(again)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["preference={loss: kto, reference: disk}"], "kto also needs answers to other prompts of a step"),
        (["preference={loss: orpo, reference: disk}"], "orpo has none"),
        (
            ["train.phase=rl", "train.global_batch=2", "rl={rewards: [exact_match], reference: disk}"],
            "completions are new in every step, so the reference cannot be computed before the first",
        ),
    ],
)
def test_disk_is_rejected_if_the_reference_cannot_be_precomputed(
    preference_config: Make, overrides: list[str], expected: str
):
    with pytest.raises(ConfigError, match=expected):
        preference_config(*overrides)


def test_plan_reports_that_it_takes_no_memory(preference_config: Make):
    cfg = preference_config(DISK)
    assert rl.reference_kind(cfg) == "disk" and "kept on disk, no memory" in rl.describe_step(cfg)[1]
