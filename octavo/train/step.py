"""One optimizer step: micro-batches forward and backward, clip, check, update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo import fp8, models
from octavo.config import Config
from octavo.parallel import World
from octavo.train import compiled, losses
from octavo.train.forward import Forward
from octavo.train.memory import Kept
from octavo.train.optim import set_lr, trained
from octavo.train.routing import ExpertLoad

Batches = Sequence[dict[str, Any]]
VISION = ("image_encoder", "image_projector")


@dataclass(frozen=True)
class Look:
    """What to observe during a step: GEMMs for the proof, FP8 health figures, memory by kind, load of experts."""

    gemms: bool = False
    health: bool = False
    memory: bool = False
    experts: bool = False


@dataclass(frozen=True)
class StepResult:
    """What one step gave, the same on every rank. `applied` is False where loss or gradient norm were not finite and
    the weights stayed; `tokens` counts all tokens of the global batch without padding, `loss_tokens` those with a loss.
    `counts`, `health` and `memory` are this rank's own, where they were asked for; `experts` is the load of all ranks.
    `loss` is the cross-entropy alone, `aux_loss` the load-balancing loss before its factor (None: not computed)."""

    loss: float
    grad_norm: float
    tokens: int
    loss_tokens: int
    applied: bool
    counts: fp8.GemmCounts | None = None
    health: fp8.Health | None = None
    memory: Mapping[str, int] | None = None
    aux_loss: float | None = None
    experts: Mapping[str, Any] | None = None


@dataclass
class Stepper:
    """Everything a step touches. `run` is the step. `balance` multiplies the routers' loss (0: there is none)."""

    cfg: Config
    model: nn.Module
    family: models.Family
    optimizer: torch.optim.Optimizer
    world: World
    forward: Forward
    balance: float = 0.0
    load: ExpertLoad | None = None

    def run(self, batches: Batches, lr: float, look: Look) -> StepResult:
        """Train on one global batch, of which `batches` are this rank's micro-batches."""
        kept = Kept(self.model, self.family) if look.memory else None
        load = self.load if look.experts else None
        if load:
            load.begin(self.world.device)
        histories = fp8.scaling_state(self.model)  # empty unless a recipe is delayed
        set_lr(self.optimizer, lr)
        counted = compiled.step(self.cfg.train.compile, eager=look.gemms or look.health)
        with counted, _maybe(fp8.count_gemms, look.gemms) as counts, _maybe(fp8.health, look.health) as health:
            totals = self._totals(batches)
            both = torch.zeros(2, dtype=torch.float32, device=self.world.device)
            for batch in batches:
                share = batch["meta"].tokens / max(float(totals[1]), 1.0)
                both += self.backward(batch, float(totals[0]), share, kept)
        both = self.world.sum(both)
        norm = self._clip()
        applied = bool(both.isfinite().all() & norm.isfinite())
        if applied:
            self.optimizer.step()
        elif histories:  # a step that is not applied leaves no trace, and cached codes follow the scales
            fp8.load_scaling_state(self.model, histories)
            fp8.invalidate(self.model)
        memory = kept.report(self.optimizer) if kept else None
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.size > 1:
            fp8.reduce_scaling_state(self.model)
        loss, aux = both.tolist()
        return StepResult(
            loss, float(norm), int(totals[1]), int(totals[2]), applied, counts, health, memory,
            aux if self.balance else None, load.end(self.world) if load else None,
        )  # fmt: skip

    def backward(
        self, batch: dict[str, Any], denominator: float, share: float = 1.0, kept: Kept | None = None
    ) -> Tensor:
        """Forward and backward of one micro-batch, which has `share` of the step's tokens.

        Its parts of the step's two losses, detached: cross-entropy, and load balancing before its factor.
        """
        if self.load:
            self.load.batch(batch, self.world.device)
        labels = batch["labels"]
        # Only positions that some row predicts at need logits: with a vocabulary of 150 000 they are the largest
        # tensor of the step.
        keep = (losses.targets(labels) != losses.IGNORE).any(dim=0).nonzero().flatten()
        keep = keep if len(keep) else torch.zeros(1, dtype=torch.int64)
        weight = losses.weights(labels, self.cfg.train.loss, denominator)[:, keep].to(self.world.device)
        with kept.forward() if kept else _nothing():
            if self.balance:
                logits, aux = self.forward.balanced(batch, keep)
                aux = aux.float() * share
            else:
                logits, aux = self.forward(batch, keep), None
            target = losses.targets(labels)[:, keep].to(self.world.device)
            loss = (losses.cross_entropy(logits, target) * weight).sum()
            total = loss if aux is None else loss + self.balance * aux
        total.backward()
        return torch.stack([loss, torch.zeros_like(loss) if aux is None else aux]).detach()

    def _totals(self, batches: Batches) -> Tensor:
        """[denominator, tokens, loss tokens], each summed over ranks: one collective before the first backward."""
        labels = [batch["labels"] for batch in batches]
        metas = [batch["meta"] for batch in batches]
        mine = [
            losses.count(labels, self.cfg.train.loss),
            sum(meta.tokens for meta in metas),
            sum(sum(meta.loss_tokens) for meta in metas),
        ]
        return self.world.sum(torch.tensor(mine, dtype=torch.float64))

    def _clip(self) -> Tensor:
        """The gradient norm over all ranks; the gradients are scaled down to `train.clip` (0: left as they are)."""
        limit = self.cfg.train.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(list(trained(self.model)), limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def forwards(self, batches: Batches) -> dict[str, int]:
        """Component -> how many of this rank's micro-batches reach it: those of vision, the ones with an image."""
        pictured = sum(batch["meta"].has_image for batch in batches)
        return {c: pictured if c in VISION else len(batches) for c in self.family.components}


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


@contextmanager
def _maybe(make: Any, wanted: bool) -> Iterator[Any]:
    if not wanted:
        yield None
        return
    with make() as made:
        yield made
