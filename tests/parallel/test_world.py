"""A single process has no group; several read torchrun's environment, exchange JSON and detect a dead peer."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from octavo.base import accelerator
from octavo.config.sections.train import ParallelSection
from octavo.parallel import Layout, World, WorldError, setup
from tests import ranks


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_has_no_group_and_every_helper_is_the_identity():
    world = setup()
    assert (world.rank, world.size, world.mesh, world.is_main) == (0, 1, None, True)
    assert not dist.is_initialized()
    given = torch.tensor([1.0, 2.0])
    summed = world.sum(given)
    assert torch.equal(summed, given) and summed is not given
    assert torch.equal(world.all_reduce_max(given), given)
    assert world.any(True) and not world.any(False)
    assert world.gather_objects({"a": [1, None]}) == [{"a": [1, None]}]
    assert world.run_on_main(lambda: 3) == 3
    world.barrier()
    world.close()


def test_world_size_one_under_torchrun_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert setup().mesh is None and not dist.is_initialized()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set; it must be a number. Start the run with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "one"}, "RANK is 'one'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "contradict each other"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "contradict each other"),
    ],
)
def test_an_environment_that_contradicts_itself_is_an_error(monkeypatch, env, words):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match=words):
        setup()


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    monkeypatch.setattr(accelerator, "detect", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="local rank 1 needs a separate accelerator, but this machine has 1"):
        setup()


def test_threads_must_be_positive():
    with pytest.raises(WorldError, match="threads is 0"):
        setup(threads=0)


def test_objects_that_are_not_json_are_rejected():
    with pytest.raises(TypeError):
        World().gather_objects(object())


def _exchange(world: World) -> dict:
    message = ""
    try:
        world.run_on_main(lambda: 1 / 0)
    except (ZeroDivisionError, WorldError) as error:
        message = f"{type(error).__name__}: {error}"
    given = torch.tensor([1.0 + world.rank])
    answer = {
        "sum": world.sum(given).item(),
        "input": given.item(),
        "max": world.all_reduce_max(torch.tensor(10 * world.rank)).item(),
        "any": [world.any(world.rank == 1), world.any(False)],
        "objects": world.gather_objects({"rank": world.rank, "long": "ü" * 300 * world.rank}),
        "empty": world.gather_objects(None),
        "main": world.run_on_main(lambda: os.getpid()),
        "pid": os.getpid(),
        "message": message,
        "mesh": list(world.mesh.shape),
    }
    world.barrier()
    return answer


def test_axes_that_do_not_match_number_of_ranks_are_rejected(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(WorldError, match="replicate: 2 and shard: auto, 1 / 2, but there are 1 ranks. Start"):
        setup(section=ParallelSection(replicate=2))
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(WorldError, match="replicate: 2 and shard: 2, but there are 6 ranks"):
        setup(section=ParallelSection(replicate=2, shard=2))
    with pytest.raises(WorldError, match="replicate: 1 and shard: auto, 6 / 1 / 4, context: 4, but there are 6 ranks"):
        setup(section=ParallelSection(context=4))
    with pytest.raises(WorldError, match="expert is 4, which does not divide the 6 ranks of shard x context"):
        setup(section=ParallelSection(context=3, expert=4))
    assert not dist.is_initialized()


def test_ranks_of_a_context_are_consecutive_and_share_a_batch_part():
    layout = Layout.from_section(24, ParallelSection(replicate=2, context=3, expert=4))
    assert (layout.shard, layout.sharded, layout.axes) == (4, 12, {"replicate": 2, "shard": 12})
    worlds = [World(rank, 24, layout=layout) for rank in (0, 2, 3, 23)]
    assert [(world.data_rank, world.context_rank) for world in worlds] == [(0, 0), (0, 2), (1, 0), (7, 2)]
    assert {world.data_size for world in worlds} == {8}


def test_two_ranks_sum_gather_and_raise_together():
    first, second = ranks.run(_exchange, 2)
    for answer in (first, second):
        assert (answer["sum"], answer["max"], answer["any"]) == (3.0, 10, [True, False])
        assert answer["objects"] == [{"rank": 0, "long": ""}, {"rank": 1, "long": "ü" * 300}]
        assert answer["empty"] == [None, None]
        assert answer["main"] == first["pid"]
        assert answer["mesh"] == [2]
    assert (first["input"], second["input"]) == (1.0, 2.0)  # the input is left alone
    assert first["message"] == "ZeroDivisionError: division by zero"
    assert second["message"] == "WorldError: rank 0 failed, and rank 1 with it: ZeroDivisionError: division by zero"


def _exit(world: World) -> None:
    os._exit(3)


def _sleep(world: World) -> None:
    world.set_phase("step 7, loading its batch")
    time.sleep(60)


def _stop(world: World) -> None:
    world.set_phase("step 7, loading its batch")
    time.sleep(0.5)  # for a beat that says so
    os.kill(os.getpid(), signal.SIGSTOP)


def _survive(rank: int, fails: int, port: int, failure: Callable[[World], None], seconds: float, file: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    world = setup(threads=1, timeout=seconds)
    world.barrier()
    if rank == fails:
        failure(world)
    world.set_phase("step 7, loading its batch")
    world.set_phase("step 7, forward and backward")
    try:
        world.barrier()
    except WorldError as error:
        file.write_text(str(error))
    os._exit(0)


FAILURES = [  # of rank r: how, the timeout, what the other one says
    (1, _exit, 600.0, "rank 1 has died or is stopped; it was last seen at the start"),  # noticed at once
    (1, _sleep, 6.0, r"rank 1 has not got past step 7, loading its batch \(parallel/test_world.py:\d+, _sleep"),
    (1, _stop, 6.0, r"rank 1 has died or is stopped; it was last seen at step 7, loading its batch \(.*, _stop"),
    (0, _stop, 6.0, "rank 0, which holds the store of the rendezvous, no longer answers"),
]


def test_missing_rank_is_named_by_waiting_rank(tmp_path):
    """Runs without torchrun, which would end the survivor too early. All cases run at once because they wait."""
    context, pairs = multiprocessing.get_context(ranks.START), []
    for number, (fails, failure, seconds, _) in enumerate(FAILURES):
        port, file = ranks.free_port(), tmp_path / str(number)
        given = [(rank, fails, port, failure, seconds, file) for rank in (0, 1)]
        pairs.append([context.Process(target=_survive, args=args) for args in given])
        for process in pairs[-1]:
            process.start()
    try:
        for (fails, _, seconds, words), pair, number in zip(FAILURES, pairs, itertools.count()):
            pair[1 - fails].join(60)
            assert pair[1 - fails].exitcode == 0
            text = (tmp_path / str(number)).read_text()
            where = f"rank {1 - fails} of 2 at step 7, forward and backward"
            start = rf"a collective failed on {where} \(run.timeout: {seconds:g} s"
            assert re.match(rf"{start}\): {words}", text), text
    finally:
        for process in itertools.chain(*pairs):
            process.kill()
            process.join()


def test_waiting_for_missing_ranks_prints_a_message(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(
        WorldError, match="rank 1 of 2 could not reach the others at 127.0.0.1:None.*torchrun.* -m octavo train FILE"
    ):
        setup()
