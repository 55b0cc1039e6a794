"""One optimizer step: micro-batches forward and backward, clip, check, update.

For what a linear layer does in a step, see :mod:`octavo.fp8.dense.linear`.
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
from octavo.fp8.adapting import RecipeTrials
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
    """What to observe in a step: GEMMs for the proof, FP8 health figures, memory by kind, expert load."""

    gemms: bool = False
    health: bool = False
    memory: bool = False
    experts: bool = False


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank except where noted.

    loss         cross-entropy, including label smoothing and z-loss if configured
    grad_norm    before clipping
    tokens       of the global batch, without padding
    loss_tokens  those with a loss
    applied      False if loss or gradient norm were not finite, so the weights are unchanged
    counts, health, memory  of this rank, if observed
    aux_loss     load-balancing loss before its factor (None: not computed)
    experts      expert load over all ranks, if observed
    zeroed       second moments that the step rounded to zero, if health was observed
    figures      further figures for the row, such as the share of `padding` in packs
    loss_scale   factor of the losses (None: without)
    overflow     not applied because gradients overflowed FP16; the next step has a smaller loss scale
    """

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
    """The state of training steps. :meth:`run` is a step.

    balance  factor of the routers' load-balancing loss (0: without)
    head     computes losses in place of logits, if the model allows it
    delayed  whether layers may have amax histories
    number   of the current step
    judge    tries recipes on the GEMMs of this step, for `fp8.adapt`
    check    recomputes GEMMs of this step (`run.check_every`)
    doing    gets the name of the current part of a step with several long parts
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
    judge: RecipeTrials | None = None
    check: Check | None = None
    doing: Callable[[str], None] = lambda what: None

    @classmethod
    def of(cls, plain: Stepper, **own_fields: Any) -> Self:
        """The stepper of a phase: the fields of `plain`, and the fields that this class adds."""
        return cls(**{one.name: getattr(plain, one.name) for one in fields(plain)}, **own_fields)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    def run(self, batches: Batches, lr: float, observe: Observe) -> StepResult:
        """Train on one global batch, of which `batches` are this rank's micro-batches."""
        memory = Memory(self.model, self.family) if observe.memory else None
        load = self.load if observe.experts else None
        graphs = (
            None if observe.gemms or observe.health or memory or load else self.graphs
        )  # observers cannot see inside a graph
        if load:
            load.begin(self.world.device)
        histories = fp8.scaling_state(self.model) if self.delayed else {}
        set_lr(self.optimizer, lr)
        with (
            compile.step(eager=observe.gemms or observe.health) if self.cfg.train.compile else nullcontext(),
            fp8.count_gemms() if observe.gemms else nullcontext() as counts,
            fp8.health() if observe.health else nullcontext() as health,
            self.judge.attach() if self.judge else nullcontext(),
            self.check.attach() if self.check and self.check.sites else nullcontext(),
        ):
            totals = self.totals(batches)
            denominator, tokens = float(totals[0]), max(float(totals[1]), 1.0)
            with counting_zeroed(self.optimizer) if observe.health else nullcontext() as zeroed:
                for batch in batches:  # gradients accumulate, or each weight is updated at once
                    if graphs and self._replayed(graphs, batch, denominator):
                        continue
                    share = batch["meta"].tokens / tokens
                    for loss in self.losses(batch, denominator, share, memory):
                        self.update.backward(loss)
                        del loss  # with the parts of its graph that backward does not free
                if self.check:
                    self.check.check_weight_codes(self.model)
                done = self.update.step()  # norm, finiteness check, clipping, update
        if not done.applied and histories:  # undo a skipped step's amaxes, and the codes cast with them
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
        """Replay a micro-batch as a CUDA graph. Returns False if it must run eagerly."""
        scale = self.update.scale
        parts = graphs.run(batch, *self.judged(batch, denominator), None if scale is None else scale.value)
        if parts is None:
            return False
        assert isinstance(self.update, AfterBackward), "graphs with updates in backward are refused by the rules"
        self.update.add(parts)
        return True

    def _rescale(self, applied: bool, finite: bool) -> tuple[float | None, bool]:
        """(the factor of this step's losses, whether gradients overflowed); updates the factor for the next step."""
        if (scale := self.update.scale) is None:
            return None, False
        before, overflow = scale.value, scale.after(applied, finite)
        if scale.value != before:  # delayed scaling uses amaxes of earlier steps
            scale_gradient_histories(self.model, scale.value / before)
        return before, overflow

    def losses(self, batch: dict[str, Any], denominator: float, share: float, memory: Memory | None) -> Iterator[Loss]:
        """The losses of one micro-batch, one graph after the other; the backward of each runs before the next is
        computed."""
        yield self.loss(batch, denominator, share, memory)

    def loss(self, batch: dict[str, Any], denominator: float, share: float = 1.0, memory: Memory | None = None) -> Loss:
        """The forward of one micro-batch; ``share``: its share of the step's tokens."""
        if self.load:
            self.load.batch(batch, self.world.device, self.forward.part(batch))
        keep, target, weight = self.judged(batch, denominator)
        weight = weight.to(self.world.device)
        with memory.forward() if memory else nullcontext():
            return self.loss_at(batch, keep, target, weight, share)

    def judged(self, batch: dict[str, Any], denominator: float) -> tuple[Tensor, Tensor, Tensor]:
        """(positions [P] among this rank's tokens, targets [B, P], weights of their losses [B, P]), in host memory.

        Only positions with a target in some row need logits, which are the largest tensor of the step with a vocabulary
        of 150 000. Where ranks share a row, each has the targets of its own tokens, including the token after its last.
        """
        labels, part = batch["labels"], self.forward.part(batch)
        target = losses.targets(labels)
        keep = (target != losses.IGNORE).any(dim=0)[part].nonzero().flatten()
        keep = keep if len(keep) else torch.zeros(1, dtype=torch.int64)
        weight = losses.weights(labels, self.cfg.train.loss, denominator, edges_of(batch))
        return keep, target[:, part][:, keep], weight[:, part][:, keep]

    def loss_at(self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, share: float = 1.0) -> Loss:
        """The same, with the results of :meth:`judged`; ``weight`` is on the device."""
        each, aux = self._losses(batch, keep, target)
        loss = (each * weight).sum()
        aux = None if aux is None else aux.float() * share
        total = loss if aux is None else loss + self.balance * aux
        return Loss(total, torch.stack([loss, torch.zeros_like(loss) if aux is None else aux]).detach())

    def _losses(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """(cross-entropy per token [B, P] at the positions `keep`, load-balancing loss or None).

        `target` [B, P] is in host memory, where the head finds ignored tokens without synchronizing with the device.
        """
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
        """Forward and backward of one micro-batch outside a step; gradients stay in `.grad`."""
        self.update.free()
        scale, total = self.update.scale, self.loss(batch, denominator, share).total
        (total if scale is None else total * scale.value).backward()

    def totals(self, batches: Batches) -> Tensor:
        """[denominator, tokens, loss tokens, places of packs], summed over ranks; ranks that share rows count once. One
        collective before the first backward. Raises TrainError if ranks have planned different packs."""
        labels = [batch["labels"] for batch in batches]
        metas = [batch["meta"] for batch in batches]
        tokens, judged = sum(meta.tokens for meta in metas), sum(sum(meta.loss_tokens) for meta in metas)
        packs = [edges_of(batch) for batch in batches]
        places = sum(edges[-1] for edges, meta in zip(packs, metas, strict=True) if edges is not None and meta.rows)
        plan = batches[0]["boundaries"].plan if "boundaries" in batches[0] else 0
        # Ranks that share rows see the same tokens, so only the first of them counts.
        weight = int(self.world.context_rank == 0)
        counts = [losses.count(labels, self.cfg.train.loss, packs), tokens, judged, places]
        local = [*(weight * count for count in counts), plan]
        *sums, plans = self.world.sum(torch.tensor(local, dtype=torch.float64)).split([1, 1, 1, 1, 1])
        if float(plans) != plan * self.world.size:
            raise TrainError(
                f"rank {self.world.rank} and others have planned different packs of the same rows: their data, or the "
                "token counts in their data caches, differ. Empty data.cache on every machine and start again"
            )
        return torch.cat(sums)

    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint besides model and optimizer; names of a rank's own tensors contain the rank."""
        return {}

    def resumed(self, extra: Mapping[str, Tensor]) -> None:
        """Restore the extra tensors of a checkpoint, which include those of all ranks and of other parts."""

    def forwards(self, batches: Batches) -> dict[str, int]:
        """Component -> how many of this rank's micro-batches reach it: for vision those with an image on this rank, for
        audio those with a sound."""
        with_image = sum(self.forward.sees(batch) for batch in batches)
        with_sound = sum(batch["meta"].has_sound for batch in batches)
        reached = dict.fromkeys(VISION, with_image) | dict.fromkeys(SOUND, with_sound)
        return {c: reached.get(c, len(batches)) for c in self.family.components}


def edges_of(batch: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The boundaries of a pack's samples; None for a batch that is not a pack."""
    boundaries = batch.get("boundaries")
    return None if boundaries is None else boundaries.edges
