"""The cost of a step before it runs: FLOPs, bytes sent by each exchange, and the time that they take on a cluster."""

from octavo.train.estimate.step_time.cluster import GPUS, Cluster, Speeds
from octavo.train.estimate.step_time.search import Found, evaluate, search
from octavo.train.estimate.step_time.seconds import Estimate, estimate
from octavo.train.estimate.step_time.wire import CARRIED, Decoder, Group, Mesh, Rows, by_collective, total
from octavo.train.estimate.step_time.work import Work, work_of

__all__ = [
    "CARRIED", "GPUS", "Cluster", "Decoder", "Estimate", "Found", "Group", "Mesh", "Rows", "Speeds", "Work",
    "by_collective", "estimate", "evaluate", "search", "total", "work_of",
]  # fmt: skip
