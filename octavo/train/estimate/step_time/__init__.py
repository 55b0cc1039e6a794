"""Estimates the cost of a step before it runs: FLOPs, bytes of each exchange, and their time on a cluster."""

from octavo.train.estimate.step_time.cluster import GPUS, Cluster, Speeds
from octavo.train.estimate.step_time.search import MeshResult, evaluate, search
from octavo.train.estimate.step_time.seconds import Estimate, estimate
from octavo.train.estimate.step_time.wire import COLLECTIVES, Decoder, Group, Mesh, Rows, by_collective, total_bytes
from octavo.train.estimate.step_time.work import Work, estimate_work

__all__ = [
    "COLLECTIVES", "GPUS", "Cluster", "Decoder", "Estimate", "MeshResult", "Group", "Mesh", "Rows", "Speeds", "Work",
    "by_collective", "estimate", "evaluate", "search", "total_bytes", "estimate_work",
]  # fmt: skip
