"""Seconds of a step on a cluster: computation, exchanges on the critical path, and exchanges that overlap with it.

The gathers and reductions of FSDP2 and the sums over replicas overlap with computation, so only the time beyond it is
waited for. Exchanges between two layers (`ulysses`, `keys`, `features`, `dispatch`, `combine`, `counts`) are fully on
the critical path. For the forward and the backward of a micro-batch separately::

    compute   FLOPs of each kind / (peak x fraction reached) + passes x bytes of hidden states / memory bandwidth
    exposed   the sum of the exchanges on the critical path
    waited    max(0, beside - compute - exposed), where beside is the overlapping exchange

A group of ranks that are `stride` apart has m members in a node. A gather within a node uses NVLink. Across nodes, each
node's m network links carry the data of the other nodes, which takes S (1 - 1 / nodes) / (m x network) for S gathered
bytes. In an all-to-all each rank sends over its own link. The slower of the two times counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.train.estimate.step_time import wire
from octavo.train.estimate.step_time.cluster import Cluster
from octavo.train.estimate.step_time.wire import CARRIED, Group, Mesh
from octavo.train.estimate.step_time.work import Work

BESIDE = ("gather", "reduce", "sum")


class Ring(NamedTuple):
    """A group of ranks: how many they are, and how far apart."""

    size: int
    stride: int


@dataclass(frozen=True)
class Estimate:
    """The times of a micro-batch on one rank, in seconds.

    ``computing`` is by kind of operation, ``exposed`` by exchange on the critical path, and ``beside`` by overlapping
    exchange, of which ``waited`` is not hidden. ``update`` is the micro-batch's part of the step's update. ``bytes``
    is by kind of exchange. ``tokens`` counts the tokens of this rank.
    """

    mesh: Mesh
    computing: Mapping[str, float]
    exposed: Mapping[str, float]
    beside: Mapping[str, float]
    waited: float
    update: float
    bytes: Mapping[str, int]
    tokens: float

    @property
    def seconds(self) -> float:
        return sum(self.computing.values()) + sum(self.exposed.values()) + self.waited + self.update

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds

    @property
    def sending(self) -> float:
        """Seconds of a micro-batch during which links are in use, whether hidden or not."""
        return sum(self.exposed.values()) + sum(self.beside.values())

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of the time: computation, update, and each exchange that is not hidden."""
        parts = {"compute": sum(self.computing.values()), "update": self.update, **self.exposed}
        if self.waited:
            parts[max(self.beside, key=lambda kind: self.beside[kind])] = self.waited
        return {kind: size / self.seconds for kind, size in parts.items() if size > 0}

    @property
    def bound(self) -> str:
        """Describe in words what limits the step."""
        shares = self.shares
        first = max(shares, key=lambda kind: shares[kind])
        wire_share = {kind: share for kind, share in shares.items() if kind in CARRIED and share >= 0.01}
        rest = [f"{kind} {share:.0%}" for kind, share in sorted(wire_share.items(), key=lambda of: -of[1])]
        return ", ".join([f"{first} {shares[first]:.0%}", *(r for r in rest if not r.startswith(f"{first} "))])


def estimate(work: Work, mesh: Mesh, cluster: Cluster) -> Estimate:
    """Estimate a micro-batch of this work on the given mesh."""
    axes, sharers = mesh.layout, mesh.layout.context
    groups = work.groups(axes)
    moved = wire.total(groups, work.decoder, work.rows, mesh, work.twice)
    rings = rings_of(mesh)
    exposed = {kind: _carried(kind, size, rings[kind], cluster) for kind, size in moved.items() if kind not in BESIDE}
    computing = compute(work, cluster, sharers)
    ahead = {kind: size / 3 for kind, size in computing.items()}
    first = _beside(groups, mesh, cluster, backward=False, twice=work.twice)
    second = _beside(groups, mesh, cluster, backward=True, twice=work.twice)
    shown, some = sum(exposed.values()) / 2, sum(ahead.values())
    waited = max(0.0, sum(first.values()) - some - shown)
    waited += max(0.0, sum(second.values()) - (sum(computing.values()) - some) - shown)
    beside = {kind: first.get(kind, 0.0) + second.get(kind, 0.0) for kind in BESIDE}
    update = work.updated(axes) / cluster.hbm
    return Estimate(mesh, computing, exposed, beside, waited, update, moved, work.rows.tokens / sharers)


def compute(work: Work, cluster: Cluster, sharers: int = 1) -> dict[str, float]:
    """Seconds of each kind of operation on one of the ranks that share a micro-batch."""
    speeds = cluster.speeds
    rates = {
        "bf16": cluster.bf16 * speeds.bf16, "fp8": cluster.fp8 * speeds.fp8,
        "experts_bf16": cluster.bf16 * speeds.bf16 * speeds.experts,
        "experts_fp8": cluster.fp8 * speeds.fp8 * speeds.experts,
        "attention": cluster.bf16 * speeds.attention,
    }  # fmt: skip
    seconds = {kind: size / sharers / rates[kind] for kind, size in work.computed.items()}
    passes = (speeds.compiled if work.compiled else speeds.eager) * (1 + work.rows.again / 3)
    seconds["memory"] = passes * work.elements * work.rows.width / sharers / cluster.hbm
    return seconds


def rings_of(mesh: Mesh) -> dict[str, Ring]:
    """The group of ranks of every exchange, except FSDP2's, whose groups contain that themselves."""
    axes = mesh.layout
    experts = Ring(axes.expert, 1)
    return {
        "sum": Ring(axes.replicate, axes.sharded), "ulysses": Ring(mesh.ulysses, 1),
        "keys": Ring(mesh.gathering, mesh.ulysses), "keys_grad": Ring(mesh.gathering, mesh.ulysses),
        "features": Ring(axes.context, 1), "dispatch": experts, "combine": experts, "counts": experts,
    }  # fmt: skip


def _beside(groups: tuple[Group, ...], mesh: Mesh, cluster: Cluster, backward: bool, twice: bool) -> dict[str, float]:
    """Seconds of FSDP2's exchanges in the forward or in the backward."""
    axes, out = mesh.layout, dict.fromkeys(BESIDE, 0.0)
    runs = 2 if twice else 1
    for group in groups:
        ring = Ring(group.ranks, axes.sharded // group.ranks)
        gathers = (group.again * runs + (twice and not group.name)) if backward else 1
        out["gather"] += _carried("gather", (group.ranks - 1) * group.gathered * gathers, ring, cluster)
        if backward:
            out["reduce"] += _carried("reduce", (group.ranks - 1) * group.reduced * runs, ring, cluster)
            size = wire.all_reduce_bytes(group.reduced, axes.replicate) * runs
            out["sum"] += _carried("sum", size, Ring(axes.replicate, axes.sharded), cluster)
    return out


def _carried(kind: str, size: float, ring: Ring, cluster: Cluster) -> float:
    """Seconds that it takes for this many bytes to reach each rank of a group."""
    if ring.size == 1 or not size:
        return 0.0
    inside = min(ring.size, max(1, cluster.per_node // ring.stride))
    nodes = -(-ring.size // inside)
    if CARRIED[kind] == "all_to_all":
        near, far = size * (inside - 1) / (ring.size - 1), size * (ring.size - inside) / (ring.size - 1)
        apart = far / cluster.network
    else:
        near = size if inside > 1 else 0.0
        apart = size * ring.size / (ring.size - 1) * (1 - 1 / nodes) / (inside * cluster.network)
    return max(near / cluster.nvlink, apart) / cluster.speeds.links
