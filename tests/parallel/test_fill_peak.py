"""Memory and bytes read of a rank that loads its shard of a generated model of one billion parameters."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from octavo import models
from octavo.fp8.weights import frozen_bytes, is_frozen
from octavo.fp8.weights.shards import local_of
from octavo.models.tiny import tiny
from octavo.parallel import World, load_into_shards, shard
from tests import ranks
from tests.models.test_load_peak import written

KINDS: dict[str, dict[str, Any]] = {"values": {}, "blocks": {"load_in_fp8": "block"}}


def _filled(folder: str, how: dict[str, Any], world: World) -> tuple[nn.Module, int, int]:
    """Return (model, bytes read, bytes of the largest tensor on disk)."""
    unread = models.load_deferred(folder, torch.bfloat16, **how)
    shard(unread.model, models.describe(unread.model), world)
    _, read = load_into_shards(unread.model, unread, world)
    return unread.model, read, max(entry.nbytes for entry in unread.prepared.stream.shards.stored.values())


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _held(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers on this rank."""
    here = [local_of(p) for p in model.parameters()]
    size = sum(p.nbytes for p in here if not is_frozen(p)) + sum(b.nbytes for b in model.buffers())
    return size + frozen_bytes(model)


def measure(world: World, small: str, folder: str, how: dict[str, Any]) -> dict[str, int]:
    """Measure loading on this rank, after a small model has been loaded as a warm-up."""
    _filled(small, how, world)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = {key: _status(key) for key in ("VmHWM", "RssAnon")}
    anonymous, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            anonymous.append(_status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    model, read, largest = _filled(folder, how, world)
    done.set()
    watcher.join()
    return {
        "peak": max(_status("VmHWM") - before["VmHWM"], max(anonymous) - before["RssAnon"]),
        "shard": _held(model),
        "largest": largest,
        "read": read,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("billion")
    small = tiny.write("qwen3", place / "small", size="mini")
    return str(small), str(written(place / "bf16", small, False))


@pytest.mark.long
@pytest.mark.rare
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel's counts of memory are Linux's")
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_holds_its_shard_and_at_most_one_tensor(folders: tuple[str, str], kind: str):
    for actual in ranks.run(measure, 2, *folders, KINDS[kind]):
        print(f"{kind}: " + ", ".join(f"{key} {value / 1e6:.1f}e6" for key, value in actual.items()))
        assert actual["parameters"] > 0.99e9
        assert actual["peak"] <= 1.1 * actual["shard"] + actual["largest"]
        assert actual["read"] <= 1.01 * actual["parameters"]  # BF16, halved; blocks of 128 rows end at borders here
