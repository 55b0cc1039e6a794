"""One optimizer step: forward and backward of the micro-batches, clipping, finiteness check, update.

:mod:`octavo.fp8.dense.linear` describes what a linear layer does in a step.
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
from octavo.fp8.proof import CorruptionChecker
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward import losses
from octavo.train.forward.forward import Forward
from octavo.train.forward.routing import ExpertLoad
from octavo.train.step import compile
from octavo.train.step.cuda_graphs import CudaGraphs
from octavo.train.step.memory_report import Memory
from octavo.train.step.optimizer import count_zeroed
from octavo.train.step.update import AfterBackward, Loss, Update, set_lr

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batches = Sequence[dict[str, Any]]
VISION = ("image_encoder", "image_projector")
AUDIO = ("audio_encoder", "audio_projector")


@dataclass(frozen=True)
class Observe:
    """Observations to make in a step: GEMMs for the proof, FP8 health figures, memory by kind, expert load."""

    gemms: bool = False
    health: bool = False
    memory: bool = False
    experts: bool = False


@dataclass(frozen=True)
class StepResult:
    """The result of a step. It is the same on every rank, except for `counts`, `health` and `memory`.

    loss         cross-entropy, including label smoothing and z-loss if configured
    grad_norm    gradient norm before clipping
    tokens       tokens of the global batch, without padding
    loss_tokens  tokens of the global batch that contribute to the loss
    applied      False if the loss or the gradient norm was not finite, so the weights are unchanged
    counts, health, memory  values of this rank, or None if not requested
    aux_loss     load-balancing loss before it is multiplied by its coefficient, or None if not computed
    experts      expert load over all ranks, or None if not requested
    zeroed       number of second moments that the step rounded to zero, or None if health was not requested
    extra_metrics
                 further entries of the metrics row, such as the share of `padding` in packs
    loss_scale   loss scale of this step, or None without loss scaling
    overflow     True if the step was not applied because gradients overflowed FP16; the next loss scale is smaller
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
    extra_metrics: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None
    overflow: bool = False


@dataclass
class Stepper:
    """Runs training steps; :meth:`run` is one step.

    aux_loss_coef  coefficient of the routers' load-balancing loss; 0 disables it
    expert_load    counts tokens per expert, or None if the model has no experts
    head           computes losses instead of logits, or None if the model does not allow it
    uses_delayed_scaling
                   True if layers may have amax histories
    cuda_graphs    captures and replays micro-batches (`train.cuda_graphs`), or None
    step_number    number of the current step
    recipe_trials  tries recipes on the GEMMs of this step, for `fp8.adapt`
    corruption_checker
                   recomputes GEMMs of this step (`run.check_every`), or None
    on_progress    called with the name of each part of a step that has several long parts
    """

    cfg: Config
    model: PreTrainedModel
    family: models.Family
    update: Update
    world: World
    forward: Forward
    aux_loss_coef: float = 0.0
    expert_load: ExpertLoad | None = None
    head: ChunkedHead | None = None
    uses_delayed_scaling: bool = True
    cuda_graphs: CudaGraphs | None = None
    step_number: int = 0
    recipe_trials: RecipeTrials | None = None
    corruption_checker: CorruptionChecker | None = None
    on_progress: Callable[[str], None] = lambda part: None

    @classmethod
    def from_stepper(cls, base: Stepper, **extra_fields: Any) -> Self:
        """Return a stepper of this class with the fields of `base` and the fields that this class adds."""
        return cls(**{spec.name: getattr(base, spec.name) for spec in fields(base)}, **extra_fields)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.update.optimizer

    def run(self, batches: Batches, lr: float, observe: Observe) -> StepResult:
        """Train on one global batch, of which `batches` are this rank's micro-batches."""
        memory = Memory(self.model, self.family) if observe.memory else None
        checker = self.corruption_checker
        expert_load = self.expert_load if observe.experts else None
        observed = observe.gemms or observe.health or memory or expert_load
        graphs = None if observed else self.cuda_graphs  # observers cannot see inside a CUDA graph
        if expert_load:
            expert_load.begin(self.world.device)
        histories = fp8.scaling_state(self.model) if self.uses_delayed_scaling else {}
        set_lr(self.optimizer, lr)
        with (
            compile.step(eager=observe.gemms or observe.health) if self.cfg.train.compile else nullcontext(),
            fp8.count_gemms() if observe.gemms else nullcontext() as counts,
            fp8.health() if observe.health else nullcontext() as health,
            self.recipe_trials.attach() if self.recipe_trials else nullcontext(),
            checker.attach() if checker and checker.gemms else nullcontext(),
        ):
            totals = self.totals(batches)
            denominator, tokens = float(totals[0]), max(float(totals[1]), 1.0)
            with count_zeroed(self.optimizer) if observe.health else nullcontext() as zeroed:
                for batch in batches:  # gradients accumulate, or update their weight when they are ready
                    if graphs and self._replay_graph(graphs, batch, denominator):
                        continue
                    share = batch["meta"].tokens / tokens
                    for loss in self.iter_losses(batch, denominator, share, memory):
                        self.update.backward(loss)
                        del loss  # with the parts of its graph that backward does not free
                if checker:
                    checker.check_weight_codes(self.model)
                outcome = self.update.step()  # norm, finiteness check, clipping, update
        if not outcome.applied and histories:
            # Roll back the amax histories of the skipped step, and drop the weights quantized with them.
            fp8.load_scaling_state(self.model, histories)
            fp8.invalidate(self.model)
        memory_bytes = memory.report(self.optimizer) if memory else None
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.size > 1:
            reduce_scaling_state(self.model)
        loss, aux = outcome.parts.tolist()
        scale, overflow = self._update_loss_scale(outcome.applied, math.isfinite(loss + aux))
        padding = {"padding": 1 - float(totals[1]) / float(totals[3])} if self.cfg.data.packing else {}
        return StepResult(
            loss, float(outcome.norm), int(totals[1]), int(totals[2]), outcome.applied, counts, health, memory_bytes,
            aux if self.aux_loss_coef else None, expert_load.end(self.world) if expert_load else None,
            int(sum(zeroed)) if zeroed else None, padding, scale, overflow,
        )  # fmt: skip

    def _replay_graph(self, graphs: CudaGraphs, batch: dict[str, Any], denominator: float) -> bool:
        """Replay the micro-batch as a CUDA graph. Returns False if it must run eagerly."""
        scale = self.update.scale
        parts = graphs.run(batch, *self.loss_positions(batch, denominator), None if scale is None else scale.value)
        if parts is None:
            return False
        assert isinstance(self.update, AfterBackward), (
            "updates in backward with CUDA graphs are rejected by config validation"
        )
        self.update.add(parts)
        return True

    def _update_loss_scale(self, applied: bool, finite: bool) -> tuple[float | None, bool]:
        """Update the loss scale for the next step. Returns (loss scale of this step, True if gradients overflowed)."""
        if (scale := self.update.scale) is None:
            return None, False
        before, overflow = scale.value, scale.record_step(applied, finite)
        if scale.value != before:  # delayed scaling uses amaxes of earlier steps
            scale_gradient_histories(self.model, scale.value / before)
        return before, overflow

    def iter_losses(
        self, batch: dict[str, Any], denominator: float, share: float, memory: Memory | None
    ) -> Iterator[Loss]:
        """Yield the losses of one micro-batch. The caller runs the backward of each before it takes the next, so only
        one autograd graph exists at a time."""
        yield self.compute_loss(batch, denominator, share, memory)

    def compute_loss(
        self, batch: dict[str, Any], denominator: float, share: float = 1.0, memory: Memory | None = None
    ) -> Loss:
        """Return the loss of one micro-batch, which holds the fraction ``share`` of the step's tokens."""
        if self.expert_load:
            self.expert_load.batch(batch, self.world.device, self.forward.part(batch))
        keep, target, weight = self.loss_positions(batch, denominator)
        weight = weight.to(self.world.device)
        with memory.forward() if memory else nullcontext():
            return self.loss_at_positions(batch, keep, target, weight, share)

    def loss_positions(self, batch: dict[str, Any], denominator: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return (positions [P] among this rank's tokens, targets [B, P], loss weights [B, P]), in host memory.

        Only positions that have a target in some row need logits; with a vocabulary of 150,000 the logits are the
        largest tensor of the step. Ranks that share a row each return the targets of their own tokens, including the
        target of their last token, which is the first token of the next rank.
        """
        labels, part = batch["labels"], self.forward.part(batch)
        target = losses.targets(labels)
        keep = (target != losses.IGNORE).any(dim=0)[part].nonzero().flatten()
        keep = keep if len(keep) else torch.zeros(1, dtype=torch.int64)
        weight = losses.weights(labels, self.cfg.train.loss, denominator, edges_of(batch))
        return keep, target[:, part][:, keep], weight[:, part][:, keep]

    def loss_at_positions(
        self, batch: dict[str, Any], keep: Tensor, target: Tensor, weight: Tensor, share: float = 1.0
    ) -> Loss:
        """Return the loss at the positions that :meth:`loss_positions` returned; ``weight`` is on the device."""
        token_losses, aux = self._token_losses(batch, keep, target)
        loss = (token_losses * weight).sum()
        aux = None if aux is None else aux.float() * share
        total = loss if aux is None else loss + self.aux_loss_coef * aux
        return Loss(total, torch.stack([loss, torch.zeros_like(loss) if aux is None else aux]).detach())

    def _token_losses(self, batch: dict[str, Any], keep: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (cross-entropy per token [B, P] at the positions `keep`, load-balancing loss or None).

        `target` [B, P] is in host memory, so the head finds ignored tokens without a device synchronization.
        """
        smoothing, z_loss = self.cfg.train.label_smoothing, self.cfg.train.z_loss
        head = self.head.losses(target, label_smoothing=smoothing, z_loss=z_loss) if self.head else nullcontext()
        with head as chunked:
            if self.aux_loss_coef:
                output, aux = self.forward.balanced(batch, keep)
            else:
                output, aux = self.forward(batch, keep), None
            if chunked is None:
                on_device = target.to(self.world.device)
                return losses.cross_entropy(output, on_device, label_smoothing=smoothing, z_loss=z_loss), aux
            return chunked.checked_losses(output), aux

    def backward(self, batch: dict[str, Any], denominator: float, share: float = 1.0) -> None:
        """Run forward and backward of one micro-batch outside a step; gradients stay in `.grad`."""
        self.update.free()
        scale, total = self.update.scale, self.compute_loss(batch, denominator, share).total
        (total if scale is None else total * scale.value).backward()

    def totals(self, batches: Batches) -> Tensor:
        """Return [loss denominator, tokens, loss tokens, token slots in packs (padding included)], summed over ranks;
        ranks that share rows count once. One collective, before the first backward. Raises TrainError if ranks planned
        different packs."""
        labels = [batch["labels"] for batch in batches]
        metas = [batch["meta"] for batch in batches]
        tokens, loss_tokens = sum(meta.tokens for meta in metas), sum(sum(meta.loss_tokens) for meta in metas)
        packs = [edges_of(batch) for batch in batches]
        token_slots = sum(
            edges[-1] for edges, meta in zip(packs, metas, strict=True) if edges is not None and meta.rows
        )
        packing_checksum = batches[0]["boundaries"].packing_checksum if "boundaries" in batches[0] else 0
        counts = [losses.count(labels, self.cfg.train.loss, packs), tokens, loss_tokens, token_slots]
        # Ranks that share rows see the same tokens, so only the first of them counts.
        is_first_context_rank = self.world.context_rank == 0
        local_counts = [*(count if is_first_context_rank else 0 for count in counts), packing_checksum]
        *sums, checksums = self.world.sum(torch.tensor(local_counts, dtype=torch.float64)).split([1, 1, 1, 1, 1])
        if float(checksums) != packing_checksum * self.world.size:
            raise TrainError(
                f"ranks disagree on the packs of the same rows (this is rank {self.world.rank}): their data, or the "
                "token counts in their data caches, differ. Empty data.cache on every machine and start again"
            )
        return torch.cat(sums)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to checkpoint in addition to model and optimizer. Per-rank tensors have the rank in their
        name."""
        return {}

    def load_state(self, extra: Mapping[str, Tensor]) -> None:
        """Restore the tensors of :meth:`state` from `extra`, which also has tensors of other ranks and other parts."""

    def count_forwards(self, batches: Batches) -> dict[str, int]:
        """Return, by component, how many of this rank's micro-batches run it: vision runs for micro-batches with an
        image on this rank, audio for those with audio."""
        with_image = sum(self.forward.has_images_here(batch) for batch in batches)
        with_audio = sum(batch["meta"].has_audio for batch in batches)
        reached = dict.fromkeys(VISION, with_image) | dict.fromkeys(AUDIO, with_audio)
        return {component: reached.get(component, len(batches)) for component in self.family.components}


def edges_of(batch: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the boundaries of a pack's samples, or None if the batch is not a pack."""
    boundaries = batch.get("boundaries")
    return None if boundaries is None else boundaries.edges
