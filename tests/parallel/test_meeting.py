"""Ranks meet in a store that former ranks have written to, and NCCL's flight recorder has its place."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from octavo.parallel import flight
from octavo.parallel.meeting import meet


def _all_meet(store: dist.Store, size: int) -> list[str]:
    """Each rank says its number to the next; what each heard."""
    heard = [""] * size

    def rank(number: int) -> None:
        met = meet(store, number, size, 10)
        met.set(f"from {number}", str(number))
        heard[number] = met.get(f"from {(number - 1) % size}").decode()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_ranks_that_are_started_again_do_not_meet_their_forerunners() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    assert _all_meet(store, 3) == ["2", "0", "1"]
    store.set("knock/1", "of one that died before it was answered")
    assert _all_meet(store, 2) == ["1", "0"]
    assert _all_meet(store, 3) == ["2", "0", "1"]


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"after 0.1 s these ranks had not come: 1, 2"):
        meet(dist.HashStore(), 0, 3, 0.1)


def test_the_flight_recorder_is_told_by_both_sets_of_names_and_writes_a_file(tmp_path: Path, monkeypatch) -> None:
    for name in (*flight._SIZE, *flight._PLACE, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    assert flight.save(1) is None
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    flight.record(tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    file = flight.save(1)
    assert file == tmp_path / "nccl_trace_rank_1" and file.stat().st_size
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "gone" / "x"))
    assert flight.save(1) is None
