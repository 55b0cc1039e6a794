"""The multi-rank output of `octavo plan`: FLOPs and communication volume, and on a named cluster the step time and the
best mesh."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli import terminal
from octavo.cli.arguments import UsageError
from octavo.train.estimate import step_time
from octavo.train.estimate.memory import gb
from octavo.train.estimate.memory.mesh import make_layout

ASSUMED = "from data sheets and constants fitted to published figures (docs/scale.md); not measured by this project"
MAX_MESHES = 8  # in the table
# exchange -> whether it overlaps with computation
OVERLAP = {
    "gather": "overlapped", "reduce": "overlapped", "sum": "overlapped",
    "dispatch": "not overlapped; expected value", "combine": "not overlapped; expected value",
    "features": "not overlapped; expected value",
}  # fmt: skip


def cluster_of(args: argparse.Namespace) -> Any:
    """Return the requested cluster, or None; sets ``args.ranks`` to its size. Raises UsageError if --ranks differs."""
    if args.cluster is None:
        return None
    cluster = step_time.Cluster.parse(args.cluster)
    if args.ranks not in (1, cluster.ranks):
        raise UsageError(
            f"--ranks {args.ranks} and --cluster {args.cluster} contradict each other: that cluster has "
            f"{cluster.ranks} GPUs. Remove --ranks"
        )
    args.ranks = cluster.ranks
    return cluster


def work_and_mesh(sizes: Any, args: argparse.Namespace) -> tuple[Any, Any]:
    """Return (work of a micro-batch, mesh) of the configuration. Raises TrainError for a mesh of a different number of
    ranks."""
    layout = make_layout(sizes.cfg, args.ranks)
    work = step_time.estimate_work(sizes, sizes.cfg)
    return work, step_time.Mesh.from_layout(layout, sizes.cfg.parallel.ulysses, work.decoder.heads)


def as_json(sizes: Any, cluster: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the content of `show` as JSON: bytes and FLOPs of one micro-batch on one rank."""
    work, mesh = work_and_mesh(sizes, args)
    moved = step_time.total_bytes(work.groups(mesh.layout), work.decoder, work.rows, mesh, work.two_backwards)
    sharers = mesh.layout.context
    report: dict[str, Any] = {
        "mesh": {**vars(mesh.layout), "ulysses": mesh.ulysses},
        "flops": {"model": work.model_flops / sharers, **{k: v / sharers for k, v in work.computed.items()}},
        "wire": moved,
    }
    if cluster is not None:
        best = step_time.search(sizes, cluster, work.decoder)
        configured = step_time.evaluate(sizes, sizes.cfg, cluster)
        report["cluster"] = {
            "gpus": cluster.ranks,
            "own": _result_json(configured),
            "meshes": [_result_json(f, best[0]) for f in best],
        }
    return report


def show(sizes: Any, cluster: Any, args: argparse.Namespace) -> None:
    """Print FLOPs and bytes by exchange; with a cluster also what bounds the step, and a table of meshes."""
    work, mesh = work_and_mesh(sizes, args)
    sharers, tokens = mesh.layout.context, work.rows.tokens
    recomputed = sum(work.computed.values()) / work.model_flops - 1
    print()
    print(f"a micro-batch on each of {args.ranks} ranks ({mesh}): {tokens // sharers} tokens,")
    print(
        f"{work.model_flops / sharers / 1e12:.4g} TFLOP of the model ({work.model_flops / max(1, tokens) / 1e9:.4g} "
        f"GFLOP per token), {recomputed:+.0%} recomputed"
    )
    moved = step_time.total_bytes(work.groups(mesh.layout), work.decoder, work.rows, mesh, work.two_backwards)
    rows = [
        (kind, gb(size), step_time.COLLECTIVES[kind], OVERLAP.get(kind, "not overlapped"))
        for kind, size in moved.items()
    ]
    if rows:
        terminal.show_table(("exchange", "bytes to each rank", "collective", ""), rows, right=(1,))
    if cluster is not None:
        _show_cluster(sizes, cluster, work)


def _show_cluster(sizes: Any, cluster: Any, work: Any) -> None:
    configured, results = step_time.evaluate(sizes, sizes.cfg, cluster), step_time.search(sizes, cluster, work.decoder)
    best = results[0]
    print()
    print(
        f"{cluster.ranks} {cluster.gpu}: {configured.estimate.rate:,.0f} tokens/s per GPU, "
        f"{configured.estimate.seconds:.3g} s per micro-batch, {configured.estimate.bound}"
    )
    print(f"({ASSUMED})")
    if best.excess > 0:
        print(f"no mesh fits {cluster.memory.name}: {best.mesh} needs the least memory")
    fitting = [f for f in results[1:] if f.excess <= 0][: MAX_MESHES - 2]
    too_large = [f for f in results[1:] if f.excess > 0][: MAX_MESHES - len(fitting)]
    rows = [
        (
            str(f.mesh),
            gb(f.memory),
            f"{f.estimate.rate:,.0f}",
            f.estimate.bound,
            "best" if f is best else f.explain(best),
        )
        for f in (best, *fitting, *too_large)
    ]
    terminal.show_table(("mesh", "memory", "tokens/s per GPU", "bound by", ""), rows, right=(1, 2))
    print(f"{len(results)} meshes were compared")


def _result_json(result: Any, best: Any = None) -> dict[str, Any]:
    estimate = result.estimate
    return {
        "mesh": {**vars(result.mesh.layout), "ulysses": result.mesh.ulysses},
        "memory": result.memory,
        "over": result.excess,
        "seconds": estimate.seconds,
        "tokens_per_second_per_gpu": estimate.rate,
        "shares": estimate.shares,
        **({} if best is None or best is result else {"why": result.explain(best)}),
    }
