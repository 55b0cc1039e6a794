"""Training on several ranks: the process group, FSDP2, context parallelism and expert parallelism."""

from octavo.parallel.context import Context, make_context, ulysses_size
from octavo.parallel.errors import WorldError
from octavo.parallel.experts import check_experts
from octavo.parallel.fill import load_into_shards
from octavo.parallel.images import ImageSharding
from octavo.parallel.layout import Layout
from octavo.parallel.shard import shard
from octavo.parallel.wire import NO_CODED_EXCHANGE, CommCounter, enable_fp8_exchange, predicted_collectives
from octavo.parallel.world import COLLECTIVE_SHARE, World, setup

__all__ = [
    "NO_CODED_EXCHANGE",
    "COLLECTIVE_SHARE",
    "Context",
    "CommCounter",
    "ImageSharding",
    "Layout",
    "World",
    "WorldError",
    "predicted_collectives",
    "check_experts",
    "make_context",
    "enable_fp8_exchange",
    "load_into_shards",
    "setup",
    "shard",
    "ulysses_size",
]
