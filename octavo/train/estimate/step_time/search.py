"""Compares all meshes of a cluster: the fastest that fits a card, and why each other mesh is worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.config import Config
from octavo.parallel import Layout
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import MemoryEstimator, gb
from octavo.train.estimate.step_time.cluster import Cluster
from octavo.train.estimate.step_time.seconds import Estimate, estimate
from octavo.train.estimate.step_time.wire import Decoder, Mesh
from octavo.train.estimate.step_time.work import estimate_work
from octavo.train.setup.planning import samples_per_step
from octavo.train.setup.token_counts import Tokens

UNIT = 128  # a rank's tokens must be whole blocks of FP8 casts
TIE = 1.01  # times that differ by less count as equal; the mesh with the shortest time on the links is then better

ROW = 4096  # the largest row whose activations are counted at once


def split_long_rows(tokens: Tokens) -> Tokens:
    """Return the same tokens in rows of at most :data:`ROW`.

    A forward on fake tensors takes half a minute for a long row and many experts. The cost of attention is still
    computed for the long row.
    """
    row = next((tokens.row // n for n in range(1, tokens.row) if tokens.row % n == 0 and tokens.row // n <= ROW), 1)
    return replace(tokens, row=row, sample=tokens.sample or tokens.row)


@dataclass(frozen=True)
class MeshResult:
    """A mesh and its estimate. ``memory`` is on the rank with most; ``excess`` is the bytes that exceed the card."""

    estimate: Estimate
    memory: int
    excess: int

    @property
    def mesh(self) -> Mesh:
        return self.estimate.mesh

    def explain(self, best: MeshResult) -> str:
        """Return why the mesh ``best`` is better: this mesh does not fit, or a part takes longer."""
        if self.excess > 0:
            return f"does not fit, {gb(self.excess)} too much"
        slower = self.estimate.seconds / self.estimate.tokens / (best.estimate.seconds / best.estimate.tokens) - 1
        if slower < TIE - 1:
            slower_links = self.estimate.link_seconds > best.estimate.link_seconds
            return "as fast, with more time on the links" if slower_links else "as fast"
        seconds, reference = (_seconds_per_token(e) for e in (self.estimate, best.estimate))
        difference = {kind: size - reference.get(kind, 0.0) for kind, size in seconds.items()}
        return f"{slower:+.0%} time, {max(difference, key=lambda kind: difference[kind])}"


def search(sizes: MemoryEstimator, cluster: Cluster, decoder: Decoder) -> list[MeshResult]:
    """Return all possible meshes of the cluster's GPUs, best first; meshes that do not fit come last.

    Rows are distributed over shard x replicate ranks, and a step must have at least one row per rank. Raises TrainError
    if there is no such mesh.
    """
    results = [evaluate(sizes, cfg, cluster) for cfg in iter_meshes(sizes.cfg, cluster.ranks, decoder)]
    if not results:
        raise TrainError(
            f"no mesh of {cluster.ranks} GPUs is possible: a step has {samples_per_step(sizes.cfg)} rows "
            f"(train.global_batch), fewer than ranks, and rows of {sizes.cfg.train.seq_length} tokens cannot be split "
            "further. Raise train.global_batch or train.seq_length, or use fewer GPUs"
        )
    fastest = max((candidate.estimate.rate for candidate in results if candidate.excess <= 0), default=0.0)

    def order(candidate: MeshResult) -> tuple[bool, bool, float, float]:
        is_close = candidate.estimate.rate * TIE >= fastest
        link_seconds = candidate.estimate.link_seconds if is_close else 0.0
        return candidate.excess > 0, not is_close, link_seconds, -candidate.estimate.rate

    return sorted(results, key=order)


def evaluate(sizes: MemoryEstimator, cfg: Config, cluster: Cluster) -> MeshResult:
    """Estimate the mesh of `cfg.parallel` on the cluster."""
    layout = Layout.from_section(cluster.ranks, cfg.parallel)
    steps = max(1, -(-samples_per_step(cfg) // (layout.replicate * layout.shard * cfg.train.micro_batch)))
    work = estimate_work(sizes, cfg, steps)
    predicted = estimate(work, Mesh.from_layout(layout, cfg.parallel.ulysses, work.decoder.heads), cluster)
    memory = sizes.estimate(cfg, cluster.ranks).total
    return MeshResult(predicted, memory, memory - cluster.memory.usable)


def iter_meshes(cfg: Config, ranks: int, decoder: Decoder) -> Iterator[Config]:
    """Yield the configuration with each possible mesh of this many ranks."""
    for context in _divisors(ranks):
        if context > 1 and (not cfg.data.packing or cfg.train.seq_length % (UNIT * context)):
            continue
        for replicate in _divisors(ranks // context):
            data = ranks // context
            if data * cfg.train.micro_batch > samples_per_step(cfg):
                continue
            for expert in _divisors(ranks // replicate):
                if expert > 1 and (not decoder.experts or decoder.experts % (ranks // replicate)):
                    continue  # the ranks of a replica split the experts evenly
                axes = {"replicate": replicate, "shard": data // replicate, "context": context, "expert": expert}
                section = cfg.parallel.model_copy(update={**axes, "ulysses": "auto"})
                yield cfg.model_copy(update={"parallel": section})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _seconds_per_token(predicted: Estimate) -> dict[str, float]:
    """Return the seconds per token of each part of a step; waiting is attributed to the longest exchange."""
    return {kind: share * predicted.seconds / predicted.tokens for kind, share in predicted.shares.items()}
