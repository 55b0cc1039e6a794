"""Creates the engine of `rl.engine` for a run: replicas, what sends them weights, and their log."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo import fp8
from octavo.base import encryption
from octavo.config import Config, to_yaml
from octavo.generation import GenerationError
from octavo.generation.engines import Event, ReplicaPool, RolloutEngine, Transport
from octavo.rl.fleet.ranked import RankedEngine
from octavo.rl.fleet.ray_transport import RayTransport, check_addresses
from octavo.rl.fleet.replica import ReplicaSettings
from octavo.rl.fleet.sender import WeightSender
from octavo.train.errors import TrainError
from octavo.train.run_dir.run_dir import PLAN
from octavo.train.setup import frozen_base
from octavo.train.step.step import Stepper

FLEET = "fleet.jsonl"
"""The file of a run directory with a line for each version of the weights that was sent, and for each lost replica."""


def has_ray() -> bool:
    """Return whether Ray is installed, without importing it."""
    return importlib.util.find_spec("ray") is not None


def check_engine(cfg: Config) -> None:
    """Raise TrainError if the engine of a run cannot be used, before the model is read."""
    if cfg.rl is None or cfg.rl.engine.name == "octavo":
        return
    if not has_ray():
        raise TrainError("rl.engine: ray needs Ray: pip install 'octavo[ray]'")
    try:
        check_addresses(cfg.rl.engine)
    except GenerationError as error:
        raise TrainError(f"rl.engine: {error}") from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and cfg.train.gather == "bf16":
        raise TrainError(
            "rl.engine: ray generates with the weights before ranks round them to BF16 (train.gather: bf16). Use "
            "train.gather: stored, or rl.engine: octavo"
        )
    if any(encryption.is_encrypted(file) for file in Path(cfg.model.path).glob("*.safetensors")):
        raise TrainError(
            f"rl.engine: ray would need the key of {cfg.model.path}, which is encrypted, in every replica, and keys do "
            "not leave the trainer's process. Use rl.engine: octavo, or octavo decrypt"
        )


@dataclass
class FleetLog:
    """Appends to fleet.jsonl: {"step", "bytes", "seconds", "completions"} for the weights after a step that were sent,
    and {"step", "event", "replica", "chunk", "reason"} for events. `completions`: by replica, since the start."""

    file: Path
    version: int = 0
    pool: ReplicaPool | None = field(default=None, repr=False)

    def record_weights(self, version: int, size: int, seconds: float) -> None:
        """Record weights that were sent, and how many completions each replica has generated so far."""
        self.version = version
        done = {} if self.pool is None else {str(replica): n for replica, n in sorted(self.pool.generated.items())}
        self._write({"step": version, "bytes": size, "seconds": round(seconds, 3), "completions": done})

    def record_event(self, event: Event) -> None:
        """Record an event."""
        fields = asdict(event)
        self._write({"step": self.version, "event": fields.pop("kind"), **fields})

    def _write(self, row: dict[str, object]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class Fleet:
    """Replicas as an engine, and what sends them the trainer's weights."""

    engine: RolloutEngine
    sender: WeightSender


def start_fleet(stepper: Stepper, directory: Path, log: Callable[[str], None]) -> Fleet:
    """Start the replicas of a run, without waiting for them. `directory`: of the run, whose plan.json they follow.
    Raises GenerationError if they cannot be started."""
    cfg = stepper.cfg
    assert cfg.rl is not None
    section = cfg.rl.engine
    # With adapters the base is frozen in the form that the run loads; without, replicas have codes where layers cast.
    casts: Mapping[str, frozen_base.FrozenCast] = {}
    if cfg.lora is None:
        plan = fp8.load_plan(directory / PLAN, stepper.model, stepper.family.components, other_machine=True)
        casts = frozen_base.frozen_casts(stepper.model, plan)
    world = stepper.world
    fleet_log = FleetLog(directory / FLEET)

    chunk = section.chunk or max(1, -(-cfg.rl.prompts // (2 * section.replicas)))
    pools: list[ReplicaPool] = []

    def start() -> None:
        transport = ray_transport(cfg, stepper, directory)
        observe = fleet_log.record_event
        pools.append(ReplicaPool(transport, chunk=chunk, timeout=section.timeout, log=log, observe=observe))

    world.run_on_main(start)
    fleet_log.pool = pools[0] if pools else None
    engine = RankedEngine(fleet_log.pool, world) if world.size > 1 else pools[0]
    after_send = fleet_log.record_weights if world.is_main else lambda version, size, seconds: None
    sender = WeightSender(engine, stepper.model, world, casts, cfg.lora is not None, after_send)
    return Fleet(engine, sender)


def ray_transport(cfg: Config, stepper: Stepper, directory: Path) -> Transport:
    """Return the transport of replicas in Ray, not started."""
    assert cfg.rl is not None
    section = cfg.rl.engine
    plan_text = (directory / PLAN).read_text(encoding="utf-8")
    settings = ReplicaSettings(to_yaml(cfg), plan_text, section.cpus, section.gpus or 1.0)
    size = sum(parameter.numel() * parameter.element_size() for parameter in stepper.model.parameters())
    return RayTransport(settings, section, size)
