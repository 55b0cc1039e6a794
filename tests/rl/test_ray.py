"""Replicas of Ray: what a run writes does not depend on which of them are killed, and secrets stay with the trainer.

One cluster serves all tests of this file. More kills, also of the trainer: python -m benchmarks.fleet_kills."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fleet_kills import replicas
from octavo import rl
from octavo.config.sections.rl import EngineSection
from octavo.generation import GenerationError
from octavo.rl.fleet.ray_transport import RayTransport, environment_of_cluster
from octavo.rl.fleet.replica import ReplicaSettings
from tests.rl.test_fleet import RAY, bits, events

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.race_is_a_bug, pytest.mark.usefixtures("uncounted", "unseen")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with environment_of_cluster(has_gpus=False):
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
            logging_level="ERROR", _node_ip_address="127.0.0.1",
        )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_replicas_killed_in_a_chunk_and_in_an_update_change_no_bit(rl_config, monkeypatch: pytest.MonkeyPatch) -> None:
    over = ("fp8.recipe=blockwise", RAY, "rl.engine.timeout=600", "rl.show=16")
    quiet, killed = rl_config(*over, dir="quiet"), rl_config(*over, dir="killed")
    rl.run(quiet)
    assert not [row for row in events(quiet) if "event" in row]
    call, calls = RayTransport.call, {"update": 0, "generate": 0}

    def call_and_kill(transport: RayTransport, replica: int, method: str, *arguments: object) -> object:
        handle = call(transport, replica, method, *arguments)
        calls[method] += 1
        if (method, calls[method]) in (("generate", 2), ("update", 4)):
            while not (running := replicas(os.getpid())):
                time.sleep(0.05)
            os.kill(running[-1], signal.SIGKILL)
        return handle

    monkeypatch.setattr(RayTransport, "call", call_and_kill)
    rl.run(killed)
    assert bits(killed) == bits(quiet)
    assert [row for row in events(killed) if "event" in row]


@pytest.mark.usefixtures("cluster")
def test_errors_name_what_a_cluster_lacks_and_what_a_replica_misses(tmp_path: Path) -> None:
    engine = EngineSection(name="ray", replicas=9, timeout=1)
    with pytest.raises(
        GenerationError, match="9 replicas with .*CPU.* each could not be placed in 1 s; the cluster has"
    ):
        RayTransport(ReplicaSettings("", "", 1), engine, 0).start()
    transport = RayTransport(ReplicaSettings("model: {path: nowhere}", "", 1), EngineSection(name="ray", replicas=1), 0)
    transport.start()
    handle = transport.call(0, "generate", 0, None)
    while not transport.wait([handle], 1):
        pass
    with pytest.raises(GenerationError, match="a replica could not be built: .*"):
        transport.result(handle)
    transport.close()


def test_processes_of_a_cluster_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("OCTAVO_KEY", "OCTAVO_KEY_FILE", "WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    with environment_of_cluster(has_gpus=False):
        assert not {*secrets} & os.environ.keys() and os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert all(os.environ[name] == "secret" for name in secrets)
