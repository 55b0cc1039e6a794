"""One optimizer step: micro-batches forward and backward, clip, check, update.

What a linear layer does in it: :mod:`octavo.fp8.dense.linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from octavo import fp8, models
from octavo.config import Config
from octavo.fp8.adapting import Judge
from octavo.fp8.delayed import reduce_scaling_state, scale_gradient_histories
from octavo.fp8.memory import ChunkedHead
from octavo.fp8.observe import Health
from octavo.fp8.proof import Check
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import losses
from octavo.train.forward.forward import Forward
from octavo.train.forward.routing import ExpertLoad
from octavo.train.step import compile
from octavo.train.step.cuda_graphs import Graphs
from octavo.train.step.memory_report import Memory
from octavo.train.step.optimizer import counting_zeroed
from octavo.train.step.update import AfterBackward, Loss, Update, set_lr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batches = Sequence[dict[str, Any]]
VISION = ("image_encoder", "image_projector")
SOUND = ("audio_encoder", "audio_projector")


@dataclass(frozen=True)
class Observe:
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
    `loss` is the cross-entropy (label smoothing and z-loss in it where they are asked for), `aux_loss` the
    load-balancing loss before its factor (None: not computed); `zeroed` counts second moments that the step rounded to
    zero. `figures`: what else is told of the step, by name, such as the share of `padding` in packs; it goes into the
    row. `loss_scale`: what losses were multiplied by (None: by nothing); `overflow`: not applied, since gradients
    overflowed FP16 at that scale, which is smaller from the next step on."""

    loss: float
    grad_norm: float
    tokens: int
    loss_tokens: int
    applied: bool
    counts: fp8.GemmCounts | None = None
    health: Health | None = None
    memory: Mapping[str, int] | None = None
    aux_loss: float | None = None
    experts: Mapping[str, Any] | None = None
    zeroed: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None
    overflow: bool = False


@dataclass
class Stepper:
    """Everything a step touches. `run` is the step.

    balance  multiplies the routers' loss (0: there is none)
    head     gives losses in place of logits, where the model allows that
    delayed  layers may have amax histories
    number   of the step under way
    judge    tries recipes on its GEMMs, in a step that is a check of `fp8.adapt`
    check    computes some of them again (`run.check_every`)
    doing    gets what of the step is done now, where it has parts that take time
    """

    cfg: Config
    model: PreTrainedModel
    family: models.Family
    update: Update
    world: World
    forward: Forward
    balance: float = 0.0
    load: ExpertLoad | None = None
    head: ChunkedHead | None = None
    delayed: bool = True
    graphs: Graphs | None = None
    number: int = 0
    judge: Judge | None = None
    check: Check | None = None
    doing: Callable[[str], None] = lambda what: None

    @classmethod
    def of(cls, plain: Stepper, **own_fields: Any) -> Self:
        """The stepper of a phase: all that `plain` has, and `more`, which this class has besides."""
        return cls(**{one.name: getattr(plain, one.name) for one in fields(plain)}, **own_fields)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    def run(self, batches: Batches, lr: float, observe: Observe) -> StepResult:
        """Train on one global batch, of which `batches` are this rank's micro-batches."""
        memory = Memory(self.model, self.family) if observe.memory else None
        load = self.load if observe.experts else None
        graphs = None if observe.gemms or observe.health or memory or load else self.graphs  # nobody looks inside one
        if load:
            load.begin(self.world.device)
        histories = fp8.scaling_state(self.model) if self.delayed else {}
        set_lr(self.optimizer, lr)
        with (
            compile.step(eager=observe.gemms or observe.health) if self.cfg.train.compile else nullcontext(),
            fp8.count_gemms() if observe.gemms else nullcontext() as counts,
            fp8.health() if observe.health else nullcontext() as health,
            self.judge.attached() if self.judge else nullcontext(),
            self.check.attached() if self.check and self.check.sites else nullcontext(),
        ):
            totals = self.totals(batches)
            denominator, tokens = float(totals[0]), max(float(totals[1]), 1.0)
            with counting_zeroed(self.optimizer) if observe.health else nullcontext() as zeroed:
                for batch in batches:  # forward and backward(): gradients add up, or update each weight at once
                    if graphs and self._replayed(graphs, batch, denominator):
                        continue
                    share = batch["meta"].tokens / tokens
                    for loss in self.losses(batch, denominator, share, memory):
                        self.update.backward(loss)
                        del loss  # and what of its graph backward does not free
                if self.check:
                    self.check.look_at_codes(self.model)
                done = self.update.step()  # norm, check that all is finite, clip, update
        if not done.applied and histories:  # a step that is not applied leaves no trace; cached codes follow the scales
            fp8.load_scaling_state(self.model, histories)
            fp8.invalidate(self.model)
        kinds = memory.report(self.optimizer) if memory else None
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.size > 1:
            reduce_scaling_state(self.model)
        loss, aux = done.parts.tolist()
        scale, overflow = self._rescale(done.applied, math.isfinite(loss + aux))
        padding = {"padding": 1 - float(totals[1]) / float(totals[3])} if self.cfg.data.packing else {}
        return StepResult(
            loss, float(done.norm), int(totals[1]), int(totals[2]), done.applied, counts, health, kinds,
            aux if self.balance else None, load.end(self.world) if load else None,
            int(sum(zeroed)) if zeroed else None, padding, scale, overflow,
        )  # fmt: skip

    def _replayed(self, graphs: Graphs, batch: dict[str, Any], denominator: float) -> bool:
        """Run a micro-batch by a CUDA graph if it can be; whether it was."""
        scale = self.update.scale
        parts = graphs.run(batch, *self.judged(batch, denominator), None if scale is None else scale.value)
        if parts is None:
            return False
        assert isinstance(self.update, AfterBackward), "graphs with updates in backward are refused by the rules"
        self.update.add(parts)
        return True

    def _rescale(self, applied: bool, finite: bool) -> tuple[float | None, bool]:
        """(what losses were multiplied by, whether that was too much); the next step's may be another."""
        if (scale := self.update.scale) is None:
            return None, False
        before, overflow = scale.value, scale.after(applied, finite)
        if scale.value != before:  # delayed scaling compares gradients of steps
            scale_gradient_histories(self.model, scale.value / before)
        return before, overflow

    def losses(self, batch: dict[str, Any], denominator: float, share: float, memory: Memory | None) -> Iterator[Loss]:
        """What of one micro-batch is differentiated, one graph after the other; each has its backward before the next
        is made."""
        yield self.loss(batch, denominator, share, memory)

    def loss(self, batch: dict[str, Any], denominator: float, share: float = 1.0, memory: Memory | None = None) -> Loss:
        """The forward of one micro-batch, which has `share` of the step's tokens."""
        if self.load:
            self.load.batch(batch, self.world.device, self.forward.part(batch))
        keep, target, weight = self.judged(batch, denominator)
        weight = weight.to(self.world.device)
        with memory.forward() if memory else nullcontext():
            return self.loss_at(batch, keep, target, weight, share)

    def judged(self, batch: dict[str, Any], denominator: float) -> tuple[Tensor, Tensor, Tensor]:
        """(positions [P] among the tokens that are here, targets [B, P], weights of their losses [B, P]), in host
        memory.

        Only positions that some row predicts at need logits: with a vocabulary of 150 000 they are the largest tensor
        of the step. Where ranks share a row each judges what its own tokens predict, also the one behind its last."""
        labels, part = batch["labels"], self.forward.part(batch)
        target = losses.targets(labels)
        keep = (target != losses.IGNORE).any(dim=0)[part].nonzero().flatten()
        keep = keep if len(keep) else torch.zeros(1, dtype=torch.int64)
        weight = losses.weights(labels, self.cfg.train.loss, denominator, edges_of(batch))
        return keep, target[:, part][:, keep], weight[:, part][:, keep]

    def loss_at(self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, share: float = 1.0) -> Loss:
        """The same, given what :meth:`judged` says, ``weight`` on the device."""
        each, aux = self._losses(batch, keep, target)
        loss = (each * weight).sum()
        aux = None if aux is None else aux.float() * share
        total = loss if aux is None else loss + self.balance * aux
        return Loss(total, torch.stack([loss, torch.zeros_like(loss) if aux is None else aux]).detach())

    def _losses(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """(c_t [B, P] at the positions `keep`, the load-balancing loss if it is asked for). `target` [B, P] is in host
        memory, where the head sees which tokens it need not judge without waiting for the device."""
        smoothing, z_loss = self.cfg.train.label_smoothing, self.cfg.train.z_loss
        head = self.head.losses(target, label_smoothing=smoothing, z_loss=z_loss) if self.head else nullcontext()
        with head as by_head:
            if self.balance:
                logits, aux = self.forward.balanced(batch, keep)
            else:
                logits, aux = self.forward(batch, keep), None
            if by_head is None:
                on_device = target.to(self.world.device)
                return losses.cross_entropy(logits, on_device, label_smoothing=smoothing, z_loss=z_loss), aux
            return by_head.take(logits), aux

    def backward(self, batch: dict[str, Any], denominator: float, share: float = 1.0) -> None:
        """Forward and backward of one micro-batch outside a step: gradients stay in `.grad`."""
        self.update.free()
        scale, total = self.update.scale, self.loss(batch, denominator, share).total
        (total if scale is None else total * scale.value).backward()

    def totals(self, batches: Batches) -> Tensor:
        """[denominator, tokens, loss tokens, places of packs], each summed over ranks, those that share rows once: one
        collective before the first backward. Raises TrainError where ranks have planned other packs."""
        labels = [batch["labels"] for batch in batches]
        metas = [batch["meta"] for batch in batches]
        tokens, judged = sum(meta.tokens for meta in metas), sum(sum(meta.loss_tokens) for meta in metas)
        packs = [edges_of(batch) for batch in batches]
        places = sum(edges[-1] for edges, meta in zip(packs, metas, strict=True) if edges is not None and meta.rows)
        plan = batches[0]["boundaries"].plan if "boundaries" in batches[0] else 0
        once = self.world.context_rank == 0
        counts = [losses.count(labels, self.cfg.train.loss, packs), tokens, judged, places]
        mine = [*(once * count for count in counts), plan]
        *sums, plans = self.world.sum(torch.tensor(mine, dtype=torch.float64)).split([1, 1, 1, 1, 1])
        if float(plans) != plan * self.world.size:
            raise TrainError(
                f"rank {self.world.rank} and others have planned different packs of the same rows: their data, or the "
                "token counts in their data caches, differ. Empty data.cache on every machine and start again"
            )
        return torch.cat(sums)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps beside model and optimizer; names of what is a rank's own carry the rank."""
        return {}

    def resumed(self, extra: Mapping[str, Tensor]) -> None:
        """Gets what a checkpoint kept, that of all ranks and of others too."""

    def forwards(self, batches: Batches) -> dict[str, int]:
        """Component -> how many of this rank's micro-batches reach it: those of vision, the ones with an image here;
        those of sound, the ones with a sound."""
        with_image = sum(self.forward.sees(batch) for batch in batches)
        with_sound = sum(batch["meta"].has_sound for batch in batches)
        reached = dict.fromkeys(VISION, with_image) | dict.fromkeys(SOUND, with_sound)
        return {c: reached.get(c, len(batches)) for c in self.family.components}


def edges_of(batch: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Where the samples of a pack end; None for a batch that is no pack."""
    boundaries = batch.get("boundaries")
    return None if boundaries is None else boundaries.edges
