"""Several processes on one job: the world they form and FSDP2 over it."""

from octavo.parallel.fill import fill
from octavo.parallel.shard import shard
from octavo.parallel.world import WAITS, World, WorldError, axes, setup

__all__ = ["WAITS", "World", "WorldError", "axes", "fill", "setup", "shard"]
