"""Cost of a step before it runs: FLOPs, bytes on the wire by exchange, and on a cluster the time they take."""

from octavo.train.estimate.step_time.cluster import GPUS, Cluster, Speeds
from octavo.train.estimate.step_time.search import Found, evaluate, search
from octavo.train.estimate.step_time.seconds import Estimate, estimate
from octavo.train.estimate.step_time.wire import CARRIED, Decoder, Group, Mesh, Rows, by_collective, total
from octavo.train.estimate.step_time.work import Work, work_of

__all__ = [
    "CARRIED", "GPUS", "Cluster", "Decoder", "Estimate", "Found", "Group", "Mesh", "Rows", "Speeds", "Work",
    "by_collective", "estimate", "evaluate", "search", "total", "work_of",
]  # fmt: skip
