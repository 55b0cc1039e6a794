"""Replicas of Ray: what a run writes does not depend on which of them are killed, and secrets stay with the trainer.

One cluster serves all tests of this file. More kills, also of the trainer: python -m benchmarks.fleet_kills."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fleet_kills import processes, replicas
from octavo import rl
from octavo.config.sections.rl import EngineSection
from octavo.generation import GenerationError
from octavo.rl.fleet import ray_transport
from octavo.rl.fleet.ray_transport import RayTransport, environment_of_cluster
from octavo.rl.fleet.replica import ReplicaSettings
from tests.rl.test_fleet import RAY, bits, events

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("uncounted", "unseen")]


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
def test_errors_name_what_a_cluster_lacks_and_what_a_replica_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineSection(name="ray", replicas=9, timeout=1)
    monkeypatch.setattr(ray_transport, "_PLACING_S", 1.0)
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


@pytest.mark.parametrize(
    ("address", "node_address", "message"),
    [
        ("127.0.0.1:1", None, "RAY_ADDRESS is 127.0.0.1:1, where no cluster answers"),
        ("somewhere", None, "RAY_ADDRESS is somewhere, where no cluster answers"),
        ("ray://127.0.0.1:10001", None, "not Ray Client"),
        ("", "8.8.8.8", "rl.engine.node_address is 8.8.8.8, which is not an address of this machine"),
    ],
)
def test_addresses_are_tried_first(
    monkeypatch: pytest.MonkeyPatch, address: str, node_address: str | None, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(GenerationError, match=message):
        ray_transport.check_addresses(EngineSection(name="ray", node_address=node_address))


def test_run_with_its_own_cluster_listens_locally_and_saves_on_sigterm(place: Path, tmp_path: Path) -> None:
    """As a user starts it: Ray would listen on all interfaces, and end the process without a checkpoint."""
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(48)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    settings = (
        f"model={{path: {place / 'text'}}}", f"data={{train: [{{path: {tmp_path / 'rows.json'}}}]}}",
        "train={phase: rl, steps: 5000, warmup: 1, micro_batch: 16, seq_length: 64, lr: 1e-3}",
        f"run.dir={tmp_path}/run",
        "rl={prompts: 4, group: 4, max_new_tokens: 4, rewards: [exact_match], engine: {name: ray}}",
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text("{}")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "train", str(tmp_path / "run.yaml"), *settings],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    listening = sockets_of(processes(process.pid)) if process.poll() is None else {"ended"}
    process.terminate()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143 and "saved" in output, output
    assert listening == {"127.0.0.1"}


def sockets_of(pids: list[int]) -> set[str]:
    """The IPv4 and IPv6 addresses at which processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                words = bytes.fromhex(fields[1].partition(":")[0])
                ordered = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                address = ipaddress.ip_address(ordered)
                addresses.add(str(getattr(address, "ipv4_mapped", None) or address))
    return addresses
