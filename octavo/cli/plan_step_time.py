"""The part of `octavo plan` about several ranks: FLOPs and bytes on the wire of a step, and on a named cluster the time
they take and the mesh that is best."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli import terminal
from octavo.cli.arguments import UsageError
from octavo.train.estimate import step_time
from octavo.train.estimate.memory import gb
from octavo.train.estimate.memory.mesh import layout_of

ASSUMED = (
    "by data sheets and constants fitted to figures that others publish (docs/scale.md); no GPU of ours measured them"
)
SHOWN = 8  # meshes in the table
# How each exchange meets the computation.
WHERE = {
    "gather": "beside computing", "reduce": "beside computing", "sum": "beside computing",
    "dispatch": "waited for; expected value", "combine": "waited for; expected value",
    "features": "waited for; expected value",
}  # fmt: skip


def cluster_of(args: argparse.Namespace) -> Any:
    """The cluster that is asked for, or None; it says how many ranks there are. Raises UsageError where --ranks says
    something else."""
    if args.cluster is None:
        return None
    cluster = step_time.Cluster.parse(args.cluster)
    if args.ranks not in (1, cluster.ranks):
        raise UsageError(
            f"--ranks {args.ranks} and --cluster {args.cluster} contradict each other: that cluster has "
            f"{cluster.ranks} GPUs. Leave --ranks out"
        )
    args.ranks = cluster.ranks
    return cluster


def of(sizes: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """(work of a micro-batch, mesh) of the configuration. Raises TrainError for a mesh of another number of ranks."""
    layout = layout_of(sizes.cfg, args.ranks)
    work = step_time.work_of(sizes, sizes.cfg)
    return work, step_time.Mesh.of(layout, sizes.cfg.parallel.ulysses, work.decoder.heads)


def as_json(sizes: Any, cluster: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed, for programs: bytes and FLOPs of one micro-batch on one rank."""
    work, mesh = of(sizes, args)
    moved = step_time.total(work.groups(mesh.layout), work.decoder, work.rows, mesh, work.twice)
    sharers = mesh.layout.context
    found: dict[str, Any] = {
        "mesh": {**vars(mesh.layout), "ulysses": mesh.ulysses},
        "flops": {"model": work.model_flops / sharers, **{k: v / sharers for k, v in work.computed.items()}},
        "wire": moved,
    }
    if cluster is not None:
        best = step_time.search(sizes, cluster, work.decoder)
        own = step_time.evaluate(sizes, sizes.cfg, cluster)
        found["cluster"] = {"gpus": cluster.ranks, "own": _told(own), "meshes": [_told(f, best[0]) for f in best]}
    return found


def show(sizes: Any, cluster: Any, args: argparse.Namespace) -> None:
    """FLOPs, bytes by exchange; with a cluster what bounds the step, and the meshes side by side."""
    work, mesh = of(sizes, args)
    sharers, tokens = mesh.layout.context, work.rows.tokens
    again = sum(work.computed.values()) / work.model_flops - 1
    print()
    print(f"a micro-batch on each of {args.ranks} ranks ({mesh}): {tokens // sharers} tokens,")
    print(
        f"{work.model_flops / sharers / 1e12:.4g} TFLOP of the model ({work.model_flops / max(1, tokens) / 1e9:.4g} "
        f"GFLOP a token), {again:+.0%} that is computed again"
    )
    moved = step_time.total(work.groups(mesh.layout), work.decoder, work.rows, mesh, work.twice)
    rows = [(kind, gb(size), step_time.CARRIED[kind], WHERE.get(kind, "waited for")) for kind, size in moved.items()]
    if rows:
        terminal.show_table(("on the wire", "to each rank", "collective", ""), rows, right=(1,))
    if cluster is not None:
        _show_cluster(sizes, cluster, work)


def _show_cluster(sizes: Any, cluster: Any, work: Any) -> None:
    own, found = step_time.evaluate(sizes, sizes.cfg, cluster), step_time.search(sizes, cluster, work.decoder)
    best = found[0]
    print()
    print(
        f"{cluster.ranks} {cluster.gpu}: {own.estimate.rate:,.0f} tokens/s a GPU, {own.estimate.seconds:.3g} s a "
        f"micro-batch, {own.estimate.bound}"
    )
    print(f"({ASSUMED})")
    if best.over > 0:
        print(f"no mesh of them fits {cluster.memory.name}: {best.mesh} needs least of those below")
    some = [f for f in found[1:] if f.over <= 0][: SHOWN - 2]
    others = [f for f in found[1:] if f.over > 0][: SHOWN - len(some)]
    rows = [
        (
            str(f.mesh),
            gb(f.memory),
            f"{f.estimate.rate:,.0f}",
            f.estimate.bound,
            "the best" if f is best else f.why(best),
        )
        for f in (best, *some, *others)
    ]
    terminal.show_table(("mesh", "memory", "tokens/s a GPU", "time goes to", ""), rows, right=(1, 2))
    print(f"{len(found)} meshes were compared")


def _told(found: Any, best: Any = None) -> dict[str, Any]:
    estimate = found.estimate
    return {
        "mesh": {**vars(found.mesh.layout), "ulysses": found.mesh.ulysses},
        "memory": found.memory,
        "over": found.over,
        "seconds": estimate.seconds,
        "tokens_per_second_per_gpu": estimate.rate,
        "shares": estimate.shares,
        **({} if best is None or best is found else {"why": found.why(best)}),
    }
