"""`rl.stale: 1`: completions that wait for one step.

The completions of step n + 1 are generated before step n's update, with the weights that step n begins with. Generation
and update could run at the same time on different devices with the same numbers; here they run one after the other. The
completions are one version of the weights old, so the trainer's log-probabilities are computed right after generation,
with the weights that wrote them, and the objective's ratio is relative to those.

Waiting completions are stored in the checkpoint as tensors and JSON; their prompts are read again by their numbers in
the stream.
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

_NAME = "pending"
_PARTS = {"tokens": np.int64, "logps": np.float32, "entropy": np.float32, "old": np.float32}  # of each token
_FORM = {
    "numbers!": [safe_read.COUNT], "lengths!": [safe_read.COUNT], "reasons!": [safe_read.TEXT],
    "scores!": [safe_read.TEXT], "weights!": safe_read.COUNT, "figures!": {...: safe_read.FINITE},
}  # fmt: skip


@dataclass
class Written:
    """The data that a step learns from: the rollout of this rank's prompts, figures over all ranks, and `weights`, the
    step after whose update the weights wrote it."""

    rollout: Rollout
    figures: dict[str, Any]
    weights: int

    def tensors(self, rank: int) -> dict[str, Tensor]:
        """The state for a checkpoint: name -> tensor."""
        rollout, name = self.rollout, f"{_NAME}.{rank}."
        assert rollout.old is not None
        about = {
            "numbers": [prompt.number for prompt in rollout.prompts], "lengths": rollout.lengths.tolist(),
            "reasons": [c.reason for c in rollout.completions], "scores": list(rollout.scores),
            "weights": self.weights, "figures": self.figures,
        }  # fmt: skip
        out = {"about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}
        if rollout.completions:
            each = {part: [getattr(c, part) for c in rollout.completions] for part in _PARTS if part != "old"}
            out |= {part: np.concatenate(parts) for part, parts in (each | {"old": rollout.old}).items()}
            out |= {"rewards": rollout.rewards, "judged": np.stack([*rollout.scores.values()])}
        return {name + part: torch.from_numpy(array.copy()) for part, array in out.items()}


def restore_pending(
    extra: Mapping[str, Tensor],
    row: Callable[[int], PromptSample],
    decode: Callable[[np.ndarray], str],
    world: World,
) -> Written | None:
    """The waiting completions of this rank in a checkpoint; None without any. `row`: reads a prompt by its number. On
    the number of ranks that wrote them each rank takes back its part; on another number the prompts are distributed
    again, in their order.

    Raises TrainError for a damaged checkpoint.
    """
    ranks = [f"{_NAME}.{rank}." for rank in range(len(extra)) if f"{_NAME}.{rank}.about" in extra]
    if not ranks:
        return None
    try:
        if len(ranks) == world.size:
            return _read(extra, ranks[world.rank], row, decode)
        parts = [_read(extra, name, row, decode) for name in ranks]
    except (KeyError, ValueError, TypeError, IndexError) as error:
        cause = safe_read.first_line(error)
        raise TrainError(f"the checkpoint's completions that wait for their step are damaged ({cause})") from error
    whole = parts[0].rollout
    for part in parts[1:]:
        whole = whole.and_then(part.rollout)
    order = sorted(range(len(whole.prompts)), key=lambda p: whole.prompts[p].number)
    first, last = (len(order) * rank // world.size for rank in (world.rank, world.rank + 1))
    return replace(parts[0], rollout=whole.of(order[first:last]))


def _read(
    extra: Mapping[str, Tensor], name: str, row: Callable[[int], PromptSample], decode: Callable[[np.ndarray], str]
) -> Written:
    about = json.loads(extra[f"{name}about"].numpy().tobytes())
    safe_read.check_schema(about, _FORM, "the completions that wait in the checkpoint", TrainError)
    prompts = [replace(row(number), number=number) for number in about["numbers"]]
    lengths, group = about["lengths"], len(about["lengths"]) // max(len(prompts), 1)
    if not lengths:
        nothing = {reward: np.zeros(0) for reward in about["scores"]}
        return Written(Rollout([], [], [], np.zeros(0), nothing, old=[]), about["figures"], about["weights"])
    ends = np.cumsum(lengths)[:-1]
    parts = {part: np.split(extra[name + part].numpy().astype(kind), ends) for part, kind in _PARTS.items()}
    completions = [
        Completion(n // group, n % group, parts["tokens"][n], parts["logps"][n], parts["entropy"][n], reason)
        for n, reason in enumerate(about["reasons"])
    ]
    scores = dict(zip(about["scores"], extra[f"{name}judged"].numpy(), strict=True))
    texts = [decode(c.tokens) for c in completions]
    rewards = extra[f"{name}rewards"].numpy()
    rollout = Rollout(prompts, completions, texts, rewards, scores, old=parts["old"])
    return Written(rollout, about["figures"], about["weights"])
