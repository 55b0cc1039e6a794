"""The best mesh for a cluster: every possible mesh, the fastest that fits a card, and why each other one loses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.config import Config
from octavo.parallel import Layout
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import Footprints, gb
from octavo.train.estimate.step_time.cluster import Cluster
from octavo.train.estimate.step_time.seconds import Estimate, estimate
from octavo.train.estimate.step_time.wire import Decoder, Mesh
from octavo.train.estimate.step_time.work import work_of
from octavo.train.setup.planning import samples_per_step
from octavo.train.setup.token_counts import Tokens

UNIT = 128  # a rank's tokens must be whole blocks of FP8 casts
TIE = 1.01  # times that differ by less count as equal; then the mesh with the shortest time on the links wins


ROW = 4096  # tokens per row when a longer row is counted in parts


def in_short_rows(tokens: Tokens) -> Tokens:
    """Return the same tokens in rows of at most :data:`ROW`, to count what is kept for each token.

    A forward without values takes half a minute for a long row and many experts. The cost of attention is still
    computed for the long row.
    """
    row = next((tokens.row // n for n in range(1, tokens.row) if tokens.row % n == 0 and tokens.row // n <= ROW), 1)
    return replace(tokens, row=row, sample=tokens.sample or tokens.row)


@dataclass(frozen=True)
class Found:
    """A mesh and its estimate: ``memory`` on the rank that holds most, and ``over``, the bytes beyond the card."""

    estimate: Estimate
    memory: int
    over: int

    @property
    def mesh(self) -> Mesh:
        return self.estimate.mesh

    def why(self, best: Found) -> str:
        """Say why another mesh is better: what does not fit, or what takes longer."""
        if self.over > 0:
            return f"does not fit, {gb(self.over)} too much"
        slower = self.estimate.seconds / self.estimate.tokens / (best.estimate.seconds / best.estimate.tokens) - 1
        if slower < TIE - 1:
            return "as fast, and sends for longer" if self.estimate.sending > best.estimate.sending else "as fast"
        mine, other = (_each(e) for e in (self.estimate, best.estimate))
        difference = {kind: size - other.get(kind, 0.0) for kind, size in mine.items()}
        return f"{slower:+.0%} time, {max(difference, key=lambda kind: difference[kind])}"


def search(sizes: Footprints, cluster: Cluster, decoder: Decoder) -> list[Found]:
    """Return every mesh of the cluster's GPUs that this configuration can have, best first, those that do not fit last.

    Rows are distributed over shard x replicate ranks, and a step must have at least one row for each. Raises TrainError
    if there is no such mesh.
    """
    out = [evaluate(sizes, cfg, cluster) for cfg in meshes(sizes.cfg, cluster.ranks, decoder)]
    if not out:
        raise TrainError(
            f"no mesh of {cluster.ranks} GPUs: a step has {samples_per_step(sizes.cfg)} rows (train.global_batch), "
            f"fewer than ranks, and rows of {sizes.cfg.train.seq_length} tokens cannot be shared further. Raise "
            "train.global_batch or train.seq_length, or take fewer GPUs"
        )
    fastest = max((candidate.estimate.rate for candidate in out if candidate.over <= 0), default=0.0)

    def order(candidate: Found) -> tuple[bool, bool, float, float]:
        near = candidate.estimate.rate * TIE >= fastest
        return candidate.over > 0, not near, candidate.estimate.sending if near else 0.0, -candidate.estimate.rate

    return sorted(out, key=order)


def evaluate(sizes: Footprints, cfg: Config, cluster: Cluster) -> Found:
    """Return the mesh of `cfg.parallel` on the cluster."""
    layout = Layout.from_section(cluster.ranks, cfg.parallel)
    steps = max(1, -(-samples_per_step(cfg) // (layout.replicate * layout.shard * cfg.train.micro_batch)))
    work = work_of(sizes, cfg, steps)
    predicted = estimate(work, Mesh.of(layout, cfg.parallel.ulysses, work.decoder.heads), cluster)
    memory = sizes.of(cfg, cluster.ranks).total
    return Found(predicted, memory, memory - cluster.memory.usable)


def meshes(cfg: Config, ranks: int, decoder: Decoder) -> Iterator[Config]:
    """Yield the configuration with every mesh of this many ranks."""
    for context in _divisors(ranks):
        if context > 1 and (not cfg.data.packing or cfg.train.seq_length % (UNIT * context)):
            continue
        for replicate in _divisors(ranks // context):
            data = ranks // context
            if data * cfg.train.micro_batch > samples_per_step(cfg):
                continue
            for expert in _divisors(ranks // replicate):
                if expert > 1 and (not decoder.experts or decoder.experts % (ranks // replicate)):
                    continue  # each rank of a replica holds whole experts
                axes = {"replicate": replicate, "shard": data // replicate, "context": context, "expert": expert}
                section = cfg.parallel.model_copy(update={**axes, "ulysses": "auto"})
                yield cfg.model_copy(update={"parallel": section})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _each(predicted: Estimate) -> dict[str, float]:
    """Seconds per token of each part of a step; waiting is attributed to the longest exchange."""
    return {kind: share * predicted.seconds / predicted.tokens for kind, share in predicted.shares.items()}
