"""Estimates the seconds of a step on a cluster: computation, exchanges on the critical path, and overlapping exchanges.

The gathers and reductions of FSDP2 and the sums over replicas overlap with computation, so only their excess over it
counts. Exchanges between two layers (`ulysses`, `keys`, `features`, `dispatch`, `combine`, `counts`) are fully on
the critical path. For the forward and the backward of a micro-batch separately::

    compute   FLOPs of each kind / (peak x fraction reached) + passes x bytes of hidden states / memory bandwidth
    exposed   the sum of the exchanges on the critical path
    waited    max(0, overlapping - compute - exposed), where overlapping is the time of the overlapping exchanges

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
from octavo.train.estimate.step_time.wire import COLLECTIVES, Group, Mesh
from octavo.train.estimate.step_time.work import Work

OVERLAPPING = ("gather", "reduce", "sum")


class Ring(NamedTuple):
    """A group of ranks: their number, and the distance between neighbours."""

    size: int
    stride: int


@dataclass(frozen=True)
class Estimate:
    """The times of a micro-batch on one rank, in seconds.

    ``computing`` is by kind of operation, ``exposed`` by exchange on the critical path, and ``overlapping`` by
    overlapping exchange, of which ``waited`` is not hidden. ``update`` is the micro-batch's part of the step's update.
    ``bytes`` is by kind of exchange. ``tokens`` is the number of tokens of this rank.
    """

    mesh: Mesh
    computing: Mapping[str, float]
    exposed: Mapping[str, float]
    overlapping: Mapping[str, float]
    waited: float
    update: float
    bytes: Mapping[str, int]
    tokens: float

    @property
    def seconds(self) -> float:
        return sum(self.computing.values()) + sum(self.exposed.values()) + self.waited + self.update

    @property
    def rate(self) -> float:
        """Tokens per second per GPU."""
        return self.tokens / self.seconds

    @property
    def link_seconds(self) -> float:
        """Seconds of a micro-batch during which links are in use, whether hidden or not."""
        return sum(self.exposed.values()) + sum(self.overlapping.values())

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of the time of each part: computation, update, and each exchange that is not hidden."""
        parts = {"compute": sum(self.computing.values()), "update": self.update, **self.exposed}
        if self.waited:
            parts[max(self.overlapping, key=lambda kind: self.overlapping[kind])] = self.waited
        return {kind: size / self.seconds for kind, size in parts.items() if size > 0}

    @property
    def bound(self) -> str:
        """The parts that limit the step, in words, largest first."""
        shares = self.shares
        largest = max(shares, key=lambda kind: shares[kind])
        wire_share = {kind: share for kind, share in shares.items() if kind in COLLECTIVES and share >= 0.01}
        rest = [f"{kind} {share:.0%}" for kind, share in sorted(wire_share.items(), key=lambda item: -item[1])]
        return ", ".join([f"{largest} {shares[largest]:.0%}", *(r for r in rest if not r.startswith(f"{largest} "))])


def estimate(work: Work, mesh: Mesh, cluster: Cluster) -> Estimate:
    """Estimate a micro-batch of this work on the given mesh."""
    axes, sharers = mesh.layout, mesh.layout.context
    groups = work.groups(axes)
    received = wire.total_bytes(groups, work.decoder, work.rows, mesh, work.two_backwards)
    rings = exchange_rings(mesh)
    exposed = {
        kind: _transfer_seconds(kind, size, rings[kind], cluster)
        for kind, size in received.items()
        if kind not in OVERLAPPING
    }
    computing = compute(work, cluster, sharers)
    forward_computing = {kind: size / 3 for kind, size in computing.items()}
    in_forward = _overlapping_seconds(groups, mesh, cluster, backward=False, two_backwards=work.two_backwards)
    in_backward = _overlapping_seconds(groups, mesh, cluster, backward=True, two_backwards=work.two_backwards)
    hidden_by_exposed, forward_compute = sum(exposed.values()) / 2, sum(forward_computing.values())
    waited = max(0.0, sum(in_forward.values()) - forward_compute - hidden_by_exposed)
    waited += max(0.0, sum(in_backward.values()) - (sum(computing.values()) - forward_compute) - hidden_by_exposed)
    overlapping = {kind: in_forward.get(kind, 0.0) + in_backward.get(kind, 0.0) for kind in OVERLAPPING}
    update = work.update_bytes(axes) / cluster.hbm
    return Estimate(mesh, computing, exposed, overlapping, waited, update, received, work.rows.tokens / sharers)


def compute(work: Work, cluster: Cluster, sharers: int = 1) -> dict[str, float]:
    """Return the seconds of each kind of operation on one of the ranks that share a micro-batch."""
    speeds = cluster.speeds
    rates = {
        "bf16": cluster.bf16 * speeds.bf16, "fp8": cluster.fp8 * speeds.fp8,
        "experts_bf16": cluster.bf16 * speeds.bf16 * speeds.experts,
        "experts_fp8": cluster.fp8 * speeds.fp8 * speeds.experts,
        "attention": cluster.bf16 * speeds.attention,
    }  # fmt: skip
    seconds = {kind: size / sharers / rates[kind] for kind, size in work.computed.items()}
    passes = (speeds.compiled if work.compiled else speeds.eager) * (1 + work.rows.recomputed_attention / 3)
    seconds["memory"] = passes * work.elements * work.rows.width / sharers / cluster.hbm
    return seconds


def exchange_rings(mesh: Mesh) -> dict[str, Ring]:
    """Return the group of ranks of every exchange except FSDP2's, whose groups have their own."""
    axes = mesh.layout
    experts = Ring(axes.expert, 1)
    return {
        "sum": Ring(axes.replicate, axes.sharded), "ulysses": Ring(mesh.ulysses, 1),
        "keys": Ring(mesh.gathering_ranks, mesh.ulysses), "keys_grad": Ring(mesh.gathering_ranks, mesh.ulysses),
        "features": Ring(axes.context, 1), "dispatch": experts, "combine": experts, "counts": experts,
    }  # fmt: skip


def _overlapping_seconds(
    groups: tuple[Group, ...], mesh: Mesh, cluster: Cluster, backward: bool, two_backwards: bool
) -> dict[str, float]:
    """Return the seconds of FSDP2's exchanges in the forward or in the backward."""
    axes, out = mesh.layout, dict.fromkeys(OVERLAPPING, 0.0)
    runs = 2 if two_backwards else 1
    for group in groups:
        ring = Ring(group.ranks, axes.sharded // group.ranks)
        gathers = (group.regathered * runs + (two_backwards and not group.name)) if backward else 1
        out["gather"] += _transfer_seconds("gather", (group.ranks - 1) * group.gathered * gathers, ring, cluster)
        if backward:
            out["reduce"] += _transfer_seconds("reduce", (group.ranks - 1) * group.reduced * runs, ring, cluster)
            size = wire.all_reduce_bytes(group.reduced, axes.replicate) * runs
            out["sum"] += _transfer_seconds("sum", size, Ring(axes.replicate, axes.sharded), cluster)
    return out


def _transfer_seconds(kind: str, size: float, ring: Ring, cluster: Cluster) -> float:
    """Return the seconds in which each rank of a group receives this many bytes."""
    if ring.size == 1 or not size:
        return 0.0
    members = min(ring.size, max(1, cluster.per_node // ring.stride))
    nodes = -(-ring.size // members)
    if COLLECTIVES[kind] == "all_to_all":
        within_node, across_nodes = (
            size * (members - 1) / (ring.size - 1),
            size * (ring.size - members) / (ring.size - 1),
        )
        network_seconds = across_nodes / cluster.network
    else:
        within_node = size if members > 1 else 0.0
        network_seconds = size * ring.size / (ring.size - 1) * (1 - 1 / nodes) / (members * cluster.network)
    return max(within_node / cluster.nvlink, network_seconds) / cluster.speeds.links
