"""Seconds of a step on a cluster: what computing takes, and what of the exchange nobody waits for.

Gathers and reductions of FSDP2, and sums over copies, run beside the computation: of them only what takes longer is
waited for. Whatever lies between two layers (`ulysses`, `keys`, `features`, `dispatch`, `combine`, `counts`) is on the
critical path, whole. So of a micro-batch, forward and backward apart::

    compute   FLOPs of each kind / (peak x share reached) + passes x bytes of hidden states / memory's speed
    exposed   the sum of what is on the critical path
    waited    max(0, beside - compute - exposed)

A group of ranks whose members stand `stride` apart has m in a node. A gather inside of nodes goes over NVLink; beyond
them each node's m links to the network carry what the other nodes have, so it takes S (1 - 1 / nodes) / (m x network)
for S gathered bytes. In an all-to-all each rank sends over its own link. The slower of both counts.
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
    """Ranks of a group: how many, and how far apart they stand."""

    size: int
    stride: int


@dataclass(frozen=True)
class Estimate:
    """Of a micro-batch on one rank. ``computing``: kind -> seconds; ``exposed``: exchange on the critical path ->
    seconds; ``beside``: exchange beside computation -> seconds, of which ``waited`` are waited for; ``update``: its
    part of the step's update. ``bytes``: kind of exchange -> bytes. ``tokens`` of this rank."""

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
        """Tokens a second and GPU."""
        return self.tokens / self.seconds

    @property
    def sending(self) -> float:
        """Seconds of a micro-batch in which links carry something, waited for or not."""
        return sum(self.exposed.values()) + sum(self.beside.values())

    @property
    def shares(self) -> dict[str, float]:
        """What takes which share of the time: compute, update, and each exchange that is waited for."""
        parts = {"compute": sum(self.computing.values()), "update": self.update, **self.exposed}
        if self.waited:
            parts[max(self.beside, key=lambda kind: self.beside[kind])] = self.waited
        return {kind: size / self.seconds for kind, size in parts.items() if size > 0}

    @property
    def bound(self) -> str:
        """In words: what bounds the step."""
        shares = self.shares
        first = max(shares, key=lambda kind: shares[kind])
        wire_share = {kind: share for kind, share in shares.items() if kind in CARRIED and share >= 0.01}
        rest = [f"{kind} {share:.0%}" for kind, share in sorted(wire_share.items(), key=lambda of: -of[1])]
        return ", ".join([f"{first} {shares[first]:.0%}", *(r for r in rest if not r.startswith(f"{first} "))])


def estimate(work: Work, mesh: Mesh, cluster: Cluster) -> Estimate:
    """A micro-batch of this work on that mesh."""
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
    """Seconds of each kind of operation, on one of the ranks that share a micro-batch."""
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
    """The group of ranks of every exchange, but those of FSDP2's groups, which say it themselves."""
    axes = mesh.layout
    experts = Ring(axes.expert, 1)
    return {
        "sum": Ring(axes.replicate, axes.sharded), "ulysses": Ring(mesh.ulysses, 1),
        "keys": Ring(mesh.gathering, mesh.ulysses), "keys_grad": Ring(mesh.gathering, mesh.ulysses),
        "features": Ring(axes.context, 1), "dispatch": experts, "combine": experts, "counts": experts,
    }  # fmt: skip


def _beside(groups: tuple[Group, ...], mesh: Mesh, cluster: Cluster, backward: bool, twice: bool) -> dict[str, float]:
    """Seconds of what FSDP2 moves in the forward, or in the backward."""
    axes, out = mesh.layout, dict.fromkeys(BESIDE, 0.0)
    runs = 2 if twice else 1
    for group in groups:
        ring = Ring(group.ranks, axes.sharded // group.ranks)
        gathers = (group.again * runs + (twice and not group.name)) if backward else 1
        out["gather"] += _carried("gather", (group.ranks - 1) * group.gathered * gathers, ring, cluster)
        if backward:
            out["reduce"] += _carried("reduce", (group.ranks - 1) * group.reduced * runs, ring, cluster)
            size = wire.reduced(group.reduced, axes.replicate) * runs
            out["sum"] += _carried("sum", size, Ring(axes.replicate, axes.sharded), cluster)
    return out


def _carried(kind: str, size: float, ring: Ring, cluster: Cluster) -> float:
    """Seconds in which so many bytes come to each rank of a group."""
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
