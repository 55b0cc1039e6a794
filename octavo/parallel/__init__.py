"""Training on several ranks: the process group, FSDP2, context parallelism and expert parallelism."""

from octavo.parallel.context import Context, context_of, ulysses_of
from octavo.parallel.errors import WorldError
from octavo.parallel.experts import check_experts
from octavo.parallel.fill import fill
from octavo.parallel.images import Images
from octavo.parallel.layout import Layout
from octavo.parallel.shard import shard
from octavo.parallel.wire import SENDS_NO_CODES, Counted, by_collective, send_codes
from octavo.parallel.world import WAITS, World, setup

__all__ = [
    "SENDS_NO_CODES",
    "WAITS",
    "Context",
    "Counted",
    "Images",
    "Layout",
    "World",
    "WorldError",
    "by_collective",
    "check_experts",
    "context_of",
    "fill",
    "send_codes",
    "setup",
    "shard",
    "ulysses_of",
]
