"""Algorithms and preference losses by name, with the default settings of their papers and of TRL. Other code reads
these records and never compares names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from octavo.rl.objectives import policy_losses
from octavo.rl.objectives.kto import kto
from octavo.rl.objectives.metrics import Figures
from octavo.rl.objectives.pairwise import DPO_LOSSES, PairCounts, Pairs, dpo, orpo, simpo
from octavo.rl.objectives.penalties import Kl
from octavo.rl.objectives.policy_losses import Batch, Clip, Counts, Terms


@dataclass(frozen=True)
class Values:
    """Settings of a critic: ``gamma`` and ``lam`` of :func:`octavo.rl.objectives.gae.gae`, ``clip`` of its loss (0:
    none) and the ``weight`` of its loss relative to the policy's, where both train the same layers."""

    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2
    weight: float = 0.1


@dataclass(frozen=True)
class Algorithm:
    """An objective and its default settings.

    normalisation  what the loss is a mean over
    advantage      a name in :data:`octavo.rl.objectives.advantages.ADVANTAGES`, or ``gae``, which needs a critic
    values         settings of the critic
    beta           weight of the KL from the reference; 0: no reference
    kl_in          where the KL is counted
    equal_groups   whether groups of equal rewards stay in the batch
    overlong       the last share of max_new_tokens in which length is penalized; 0: none
    """

    name: str
    paper: str
    objective: Callable[[Batch, Clip, Counts], Terms]
    clip: Clip
    normalisation: Literal["token", "sequence", "room", "microbatch"]
    advantage: Literal["group", "group_unscaled", "batch", "leave_one_out", "gae"] = "group"
    kl: Kl = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    beta: float = 0.0
    equal_groups: bool = True
    overlong: float = 0.0
    values: Values | None = None


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("grpo", "arXiv 2402.03300", policy_losses.grpo, Clip(0.2, 0.2), "sequence"),
        Algorithm("dr_grpo", "arXiv 2503.20783", policy_losses.dr_grpo, Clip(0.2, 0.2), "room", "group_unscaled"),
        Algorithm(
            "dapo", "arXiv 2503.14476", policy_losses.dapo, Clip(0.2, 0.28), "token", equal_groups=False, overlong=0.2
        ),
        Algorithm("bnpo", "TRL, loss_type bnpo", policy_losses.bnpo, Clip(0.2, 0.2), "microbatch"),
        Algorithm("gspo", "arXiv 2507.18071", policy_losses.gspo, Clip(3e-4, 4e-4), "sequence"),
        Algorithm("cispo", "arXiv 2506.13585", policy_losses.cispo, Clip(None, 4.0), "token"),
        Algorithm(
            "rloo",
            "arXiv 2402.14740",
            policy_losses.rloo,
            Clip(0.2, 0.2),
            "sequence",
            "leave_one_out",
            "k1",
            "reward",
            0.05,
        ),
        Algorithm(
            "ppo",
            "arXiv 1707.06347",
            policy_losses.ppo,
            Clip(0.2, 0.2),
            "token",
            "gae",
            "k1",
            "reward",
            0.05,
            values=Values(),
        ),
    )
}


@dataclass(frozen=True)
class Preference:
    """A preference loss: ``loss(pairs, counts, **options)``; KTO's takes answers (``paired`` is false).

    options: the names of its options with their defaults; it takes no others.
    """

    name: str
    paper: str
    loss: Callable[..., tuple[Tensor, Figures]]
    options: Mapping[str, float] = field(default_factory=dict)
    reference: bool = True
    paired: bool = True


def _dpo(name: str) -> Callable[..., tuple[Tensor, Figures]]:
    def of_name(pairs: Pairs, counts: PairCounts, **options: float) -> tuple[Tensor, Figures]:
        return dpo(pairs, counts, loss=name, **options)

    return of_name


_PAPERS = {
    "sigmoid": "arXiv 2305.18290",
    "robust": "arXiv 2403.00409",
    "hinge": "arXiv 2305.10425",
    "ipo": "arXiv 2310.12036",
    "sigmoid_norm": "arXiv 2411.15124",
}
_SMOOTH = {"sigmoid": 0.0, "robust": 0.1, "sigmoid_norm": 0.0}

PREFERENCES: dict[str, Preference] = {
    name: Preference(
        name,
        _PAPERS[name],
        _dpo(name),
        {"beta": 0.1, "sft": 0.0} | ({"label_smoothing": _SMOOTH[name]} if name in _SMOOTH else {}),
    )
    for name in DPO_LOSSES
} | {
    "orpo": Preference("orpo", "arXiv 2403.07691", orpo, {"beta": 0.1}, reference=False),
    "simpo": Preference(
        "simpo",
        "arXiv 2405.14734",
        simpo,
        {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0, "sft": 0.0},
        reference=False,
    ),
    "kto": Preference(
        "kto",
        "arXiv 2402.01306",
        kto,
        {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        paired=False,
    ),
}
