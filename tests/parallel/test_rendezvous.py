"""Rendezvous in a store that earlier ranks have written to, and NCCL's flight recorder."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from octavo.parallel import WorldError, nccl_flight_recorder
from octavo.parallel import rendezvous as meetings
from octavo.parallel.rendezvous import compare_facts, describe_differences, meet


def _all_meet(store: dist.Store, size: int) -> list[str]:
    """Send each rank's number to the next; return the received ones."""
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


def test_restarted_ranks_do_not_meet_earlier_ranks() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    assert _all_meet(store, 3) == ["2", "0", "1"]
    store.set("knock/1", "of one that died before it was answered")
    assert _all_meet(store, 2) == ["1", "0"]
    assert _all_meet(store, 3) == ["2", "0", "1"]


def test_missing_ranks_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"these ranks did not appear within 0.1 s: 1, 2"):
        meet(dist.HashStore(), 0, 3, 0.1)


def _in_threads(ranks: dict[int, Callable[[], object]]) -> dict[int, object]:
    """Return what each rank returned or raised."""
    ends: dict[int, object] = {}

    def run(rank: int, work: Callable[[], object]) -> None:
        try:
            ends[rank] = work()
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=item) for item in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({0: 2, 1: 3}, id="a rank for more, and the others never come"),
        pytest.param({0: 3, 1: 2}, id="a rank for fewer"),
        pytest.param({0: 2, 1: 3, 2: 3}, id="one that rank 0 does not know"),
        pytest.param({0: 4, 1: 4, 2: 3, 3: 4}, id="one of four"),
    ],
)
def test_wrong_world_size_ends_all_ranks(sizes: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if len(sizes) == max(sizes.values()):
        monkeypatch.setattr(meetings, "LINGER_SECONDS", 60)  # all come, however slowly
    else:
        monkeypatch.setattr(meetings, "LINGER_SECONDS", 0.1)  # one never does
    store = dist.HashStore()
    store.set("knock/1", "of a former start")
    ends = _in_threads({rank: partial(meet, store, rank, size, 60) for rank, size in sizes.items()})
    (other,) = {size for size in sizes.values() if size != sizes[0]}
    wrong = [rank for rank, size in sizes.items() if size == other]
    for rank in {0, *wrong}:
        assert isinstance(ends[rank], WorldError), ends[rank]
        assert f"WORLD_SIZE is {sizes[0]} on rank" in str(ends[rank]) and f" {other} on rank" in str(ends[rank])


def test_extra_rank_of_a_running_job_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third rank is started with size three after a run of two has begun. A run without heartbeats is ignored."""
    monkeypatch.setattr(meetings, "HEARTBEAT_SECONDS", 0.05)
    store = dist.HashStore()
    store.set("start", json.dumps({"name": "former", "size": 2}))
    store.set("former/heartbeat_0", "the last beat")
    with pytest.raises(RuntimeError, match="rank 0 has not answered within 0.3 s"):
        meet(store, 2, 3, 0.3)
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(0.01):
            store.set("former/heartbeat_0", str(number := number + 1))

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(WorldError, match="WORLD_SIZE is 2 on rank 0 and 3 on rank 2"):
            meet(store, 2, 3, 60)
    finally:
        ended.set()
        beating.join()


def test_ranks_agree_or_all_get_the_key_and_both_values() -> None:
    facts = {0: {"a": "1", "b": "2"}, 1: {"a": "1", "b": "3"}, 2: {"a": "1", "b": "2", "c": "4"}}
    store = dist.HashStore()
    ends = _in_threads({rank: partial(compare_facts, store, rank, 3, own, 60) for rank, own in facts.items()})
    words = {describe_differences(actual) for actual in ends.values()}
    assert words == {"b is 2 on ranks 0, 2 and 3 on rank 1; c is absent on ranks 0, 1 and 4 on rank 2"}
    again = _in_threads(
        {rank: partial(compare_facts, dist.PrefixStore("b", store), rank, 3, facts[0], 60) for rank in facts}
    )
    assert all(not actual for actual in again.values())


def test_long_lists_of_differences_and_ranks_are_shortened() -> None:
    ten = {"1": range(20), "2": [20]}
    words = describe_differences([(f"key {number}", ten) for number in range(9)])
    assert words.startswith("key 0 is 1 on ranks 0, 1, 2, 3, 4, 5, 6, 7, ... and 2 on rank 20; key 1")
    assert words.endswith("; and 5 more")


def test_flight_recorder_sets_both_variable_names_and_writes_a_file(tmp_path: Path, monkeypatch) -> None:
    for name in (
        *nccl_flight_recorder._SIZE_VARIABLES,
        *nccl_flight_recorder._FILE_VARIABLES,
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
    ):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    assert nccl_flight_recorder.save(1) is None
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    nccl_flight_recorder.enable(tmp_path)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    file = nccl_flight_recorder.save(1)
    assert file == tmp_path / "nccl_trace_rank_1" and file.stat().st_size
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "gone" / "x"))
    assert nccl_flight_recorder.save(1) is None
