"""`rl.stale: 1`: completions that are one step old when they are trained on.

The completions of step n + 1 are generated before step n's update, with the weights at the start of step n. Generation
and update could therefore run in parallel on different devices; here they run one after the other. The trainer's
log-probabilities are computed right after generation, with the weights that generated the completions, and the
objective's ratio is relative to them.

Pending completions are stored in the checkpoint as tensors and JSON. Their prompts are re-read by their indices in
the data stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.base import safe_read
from octavo.data.tasks.prompts import PromptSample
from octavo.generation import Completion
from octavo.parallel import World
from octavo.rl.rollout.experience import Rollout
from octavo.train import TrainError

_PREFIX = "pending"
_PARTS = {"tokens": np.int64, "logps": np.float32, "entropy": np.float32, "old": np.float32}  # per-token arrays
_SCHEMA = {
    "numbers!": [safe_read.COUNT], "lengths!": [safe_read.COUNT], "reasons!": [safe_read.TEXT],
    "scores!": [safe_read.TEXT], "weights!": safe_read.COUNT, "figures!": {...: safe_read.FINITE},
}  # fmt: skip


@dataclass
class VersionedRollout:
    """A rollout of this rank's prompts, its metrics reduced over all ranks, and the version of the weights that
    generated it: the number of the last step before it, 0 for the initial weights."""

    rollout: Rollout
    figures: dict[str, Any]
    weights_version: int

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """Return the state for a checkpoint, by tensor name."""
        rollout, name = self.rollout, f"{_PREFIX}.{rank}."
        assert rollout.old is not None
        metadata = {
            "numbers": [prompt.number for prompt in rollout.prompts], "lengths": rollout.lengths.tolist(),
            "reasons": [c.reason for c in rollout.completions], "scores": list(rollout.scores),
            "weights": self.weights_version, "figures": self.figures,
        }  # fmt: skip
        out = {"about": np.frombuffer(json.dumps(metadata).encode(), dtype=np.uint8)}
        if rollout.completions:
            each = {part: [getattr(c, part) for c in rollout.completions] for part in _PARTS if part != "old"}
            out |= {part: np.concatenate(parts) for part, parts in (each | {"old": rollout.old}).items()}
            out |= {"rewards": rollout.rewards, "judged": np.stack([*rollout.scores.values()])}
        return {name + part: torch.from_numpy(array.copy()) for part, array in out.items()}


def restore_pending(
    extra: Mapping[str, Tensor],
    read_prompt: Callable[[int], PromptSample],
    decode: Callable[[np.ndarray], str],
    world: World,
) -> VersionedRollout | None:
    """Return this rank's pending completions from a checkpoint, or None if there are none.

    `read_prompt` reads a prompt by its index in the data stream. With an unchanged number of ranks each rank takes its
    own part; otherwise the prompts are redistributed in their order.

    Raises TrainError for a damaged checkpoint.
    """
    ranks = [f"{_PREFIX}.{rank}." for rank in range(len(extra)) if f"{_PREFIX}.{rank}.about" in extra]
    if not ranks:
        return None
    try:
        if len(ranks) == world.size:
            return _read(extra, ranks[world.rank], read_prompt, decode)
        parts = [_read(extra, name, read_prompt, decode) for name in ranks]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        cause = safe_read.first_line(error)
        raise TrainError(f"the pending completions of the checkpoint are damaged ({cause})") from error
    merged = parts[0].rollout
    for part in parts[1:]:
        merged = merged.concatenate(part.rollout)
    order = sorted(range(len(merged.prompts)), key=lambda p: merged.prompts[p].number)
    first, last = (len(order) * rank // world.size for rank in (world.rank, world.rank + 1))
    return replace(parts[0], rollout=merged.of(order[first:last]))


def _read(
    extra: Mapping[str, Tensor],
    name: str,
    read_prompt: Callable[[int], PromptSample],
    decode: Callable[[np.ndarray], str],
) -> VersionedRollout:
    metadata = json.loads(extra[f"{name}about"].numpy().tobytes())
    safe_read.check_schema(metadata, _SCHEMA, "the pending completions of the checkpoint", TrainError)
    prompts = [replace(read_prompt(number), number=number) for number in metadata["numbers"]]
    lengths, group = metadata["lengths"], len(metadata["lengths"]) // max(len(prompts), 1)
    if not lengths:
        no_scores = {reward: np.zeros(0) for reward in metadata["scores"]}
        empty = Rollout([], [], [], np.zeros(0), no_scores, old=[])
        return VersionedRollout(empty, metadata["figures"], metadata["weights"])
    ends = np.cumsum(lengths)[:-1]
    parts = {part: np.split(extra[name + part].numpy().astype(kind), ends) for part, kind in _PARTS.items()}
    completions = [
        Completion(n // group, n % group, parts["tokens"][n], parts["logps"][n], parts["entropy"][n], reason)
        for n, reason in enumerate(metadata["reasons"])
    ]
    scores = dict(zip(metadata["scores"], extra[f"{name}judged"].numpy(), strict=True))
    texts = [decode(c.tokens) for c in completions]
    rewards = extra[f"{name}rewards"].numpy()
    rollout = Rollout(prompts, completions, texts, rewards, scores, old=parts["old"])
    return VersionedRollout(rollout, metadata["figures"], metadata["weights"])
