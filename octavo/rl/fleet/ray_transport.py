"""Replicas as Ray actors, on this machine or on the nodes of a cluster.

Ray gives their processes, places them on nodes, and keeps one copy of each object (weights, prompts with their images)
in the shared memory of a node, whatever the number of replicas there. A replica whose process ends is started again by
Ray, without weights. Ray repeats no call by itself: a repeated call would run on such a replica.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from octavo.base import accelerator
from octavo.base.wording import count_noun
from octavo.config.sections.rl import EngineSection
from octavo.generation import Completion, GenerationError
from octavo.generation.engines import Manifest, ReplicaLostError
from octavo.rl.fleet.replica import Replica, ReplicaSettings, Work

ADDRESS = "RAY_ADDRESS"
LOCAL = "127.0.0.1"
_SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_KEY_FILE")
"""Ends of names of environment variables that the processes of a cluster do not get."""
_PLACING_S = 30.0
"""Least seconds for placing replicas on nodes that have enough CPUs."""
_CONNECT_S = 5.0
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray keeps 127.0.0.1 as the address of a cluster and listens there only; it would use the address of a
network interface, and listen on all."""
_STORE_BYTES = 256 << 20
"""Least shared memory of an own cluster."""


def _ray() -> ModuleType:
    """Return the module, which is imported only where it is needed: that takes seconds."""
    return import_module("ray")


class RayActor:
    """A replica in the process of an actor."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.replica = Replica(settings)

    def update(self, version: int, manifest: Manifest, pieces: dict[str, object]) -> str:
        """See :meth:`Replica.update`; `pieces` are references to objects, which are read in shared memory."""
        ray = _ray()
        arrays = ray.get([*pieces.values()])
        return self.replica.update(version, manifest, dict(zip(pieces, arrays, strict=True)))

    def generate(self, version: int, work: Work) -> tuple[int, list[Completion]]:
        """See :meth:`Replica.generate`."""
        return self.replica.generate(version, work)


class RayTransport:
    """Starts actors, and calls them; see :class:`octavo.generation.engines.Transport`.

    weight_bytes  of one version of the weights, for the shared memory of an own cluster
    """

    is_concurrent = True

    def __init__(self, settings: ReplicaSettings, engine: EngineSection, weight_bytes: int) -> None:
        self.settings, self.engine, self.weight_bytes = settings, engine, weight_bytes
        self._actors: list[object] = []
        self._group: object = None
        self._has_begun_ray = False

    def start(self) -> int:
        """Connect to the cluster of `RAY_ADDRESS`, or start one for this run, and start the actors. Raises
        GenerationError if no cluster is reached, or it has too few CPUs or GPUs."""
        self._begin_ray()
        ray, scheduling = _ray(), import_module("ray.util.scheduling_strategies")
        engine, needs = self.engine, {"CPU": float(self.engine.cpus)}
        if engine.gpus:
            needs["GPU"] = engine.gpus
        self._group = group = ray.util.placement_group([needs] * engine.replicas, strategy="SPREAD")
        if not group.wait(max(engine.timeout, _PLACING_S)):
            have = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            self.close()
            raise GenerationError(
                f"{count_noun(engine.replicas, 'replica')} with {needs} each could not be placed in "
                f"{max(engine.timeout, _PLACING_S):g} s; the cluster has {have}. Lower rl.engine.replicas, or add "
                "nodes."
            )
        actor = ray.remote(num_cpus=engine.cpus, num_gpus=engine.gpus, max_restarts=-1, max_task_retries=0)(RayActor)
        for index in range(engine.replicas):
            place = scheduling.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            self._actors.append(actor.options(scheduling_strategy=place).remote(self.settings))
        return engine.replicas

    def _begin_ray(self) -> None:
        address = os.environ.get(ADDRESS)
        is_local = not address and self.engine.node_address is None
        with environment_of_cluster(bool(self.engine.gpus), is_local):
            self._connect(address, is_local)

    def _connect(self, address: str | None, is_local: bool) -> None:
        ray = _ray()
        if ray.is_initialized():  # by the program that runs the training
            return
        # Ray reads the variable when it is imported, which the program may have done before.
        import_module("ray._private.ray_constants").__dict__["ENABLE_RAY_CLUSTER"] = not is_local
        options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        if not address:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "num_cpus": self.engine.replicas * self.engine.cpus,
                "object_store_memory": max(_STORE_BYTES, 3 * self.weight_bytes),
                "_node_ip_address": self.engine.node_address or LOCAL,
            }
        with _keep_signal_handlers():
            try:
                ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or options["_node_ip_address"]
                raise GenerationError(f"Ray does not answer or start at {where}: {error}") from error
        self._has_begun_ray = True
        if is_local and (host := ray.nodes()[0]["NodeManagerAddress"]) != LOCAL:
            self.close()
            raise GenerationError(
                f"Ray listens on {host}, where other machines may reach it. "
                "Set rl.engine.node_address to an address of a private network."
            )

    def send(self, name: str, piece: object) -> object:
        """See :meth:`octavo.generation.engines.Transport.send`."""
        ray = _ray()
        return ray.put(piece)

    def call(self, replica: int, method: str, *arguments: object) -> object:
        """See :meth:`octavo.generation.engines.Transport.call`."""
        return getattr(self._actors[replica], method).remote(*arguments)

    def wait(self, handles: Iterable[object], seconds: float) -> list[object]:
        """See :meth:`octavo.generation.engines.Transport.wait`."""
        ray = _ray()
        if not (waiting := [*handles]):
            time.sleep(seconds)
            return []
        done, others = ray.wait(waiting, timeout=seconds, fetch_local=False)
        if done and others:  # whichever else has ended
            done += ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[0]
        return list(done)

    def result(self, handle: object) -> object:
        """See :meth:`octavo.generation.engines.Transport.result`. Raises GenerationError for a replica that could not
        be built, which Ray does not start again."""
        ray = _ray()
        try:
            return ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, GenerationError):
                raise cause from error
            if isinstance(cause, ray.exceptions.RayError):  # an object was lost with its node
                raise ReplicaLostError(_first_line(cause)) from error
            raise GenerationError(f"a replica failed: {type(cause).__name__}: {cause}") from error
        except ray.exceptions.RayError as error:
            text = str(error)
            if "creation task" in text and "died because of an error" in text:
                raise GenerationError(f"a replica could not be built: {text.strip().splitlines()[-1]}") from error
            raise ReplicaLostError(_first_line(error)) from error

    def restart(self, replica: int) -> None:
        """See :meth:`octavo.generation.engines.Transport.restart`."""
        ray = _ray()
        ray.kill(self._actors[replica], no_restart=False)

    def now(self) -> float:
        """See :meth:`octavo.generation.engines.Transport.now`."""
        return time.monotonic()

    def describe(self, replica: int) -> str:
        """See :meth:`octavo.generation.engines.Transport.describe`."""
        return f"replica {replica + 1} of {self.engine.replicas}"

    def close(self) -> None:
        """End the actors, and the cluster if this run started it."""
        ray = _ray()
        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None
        if self._has_begun_ray:
            ray.shutdown()


def check_addresses(engine: EngineSection) -> None:
    """Raise GenerationError if no cluster answers at `RAY_ADDRESS`, or `node_address` is not this machine's: Ray itself
    would try for minutes."""
    address = os.environ.get(ADDRESS, "")
    if address.startswith("ray://"):
        raise GenerationError(
            f"{ADDRESS} is {address}: replicas need a node of the cluster, not Ray Client. Use HOST:PORT."
        )
    host, _, port = address.rpartition(":")
    if address and address != "auto":
        try:
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise GenerationError(
                f"{ADDRESS} is {address}, where no cluster answers ({error}). Unset or correct it."
            ) from error
    elif engine.node_address is not None:
        try:
            with socket.socket() as probe:
                probe.bind((engine.node_address, 0))
        except OSError as error:
            raise GenerationError(
                f"rl.engine.node_address is {engine.node_address}, which is not an address of this machine ({error})."
            ) from error


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the handlers of signals afterwards: Ray replaces them by ones that end the process without a checkpoint,
    in Python and below it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it is not Python's
                signal.signal(number, handler)


@contextmanager
def environment_of_cluster(has_gpus: bool, is_local: bool = True) -> Iterator[None]:
    """Within this context processes that are started do not get secrets, nor the trainer's accelerator, and send no
    usage statistics; if `is_local`, they listen on 127.0.0.1."""
    changes: dict[str, str | None] = {
        name: None for name in os.environ if name.upper().endswith(_SECRETS) or name.upper().startswith("OCTAVO_KEY")
    }
    changes["RAY_USAGE_STATS_ENABLED"] = "0"
    if is_local:
        changes[_ONE_MACHINE] = "0"
    if has_gpus:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(_other_devices())
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _other_devices() -> list[str]:
    """Return the GPUs of this machine, as `CUDA_VISIBLE_DEVICES` lists them, without the one that trains."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = accelerator.device_count()
    devices = [name for name in listed.split(",") if name] if listed is not None else [str(n) for n in range(count)]
    here = int(os.environ.get("LOCAL_RANK", "0"))
    return [name for index, name in enumerate(devices) if index != here]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
