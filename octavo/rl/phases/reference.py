"""The reference model that the policy is compared with.

base   LoRA: the same weights with the adapters disabled; costs a forward and no memory
copy   full-parameter training: a frozen copy of the initial weights; FP8 layers keep only codes (one byte per
       parameter) and follow the same plan, so that equal weights give equal log-probabilities
disk   preferences, whose answers are fixed: log-probabilities computed before the first step
       (:mod:`octavo.rl.phases.reference_cache`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octavo import checkpoint, fp8, parallel
from octavo.config import Config
from octavo.fp8.memory import ChunkedHead, chunk_head
from octavo.fp8.observe import uncounted
from octavo.fp8.proof import reference_note
from octavo.train.forward import critic
from octavo.train.forward.forward import Forward, autocast_dtype, log_probs, model_dtype, run_towers_on_dummy_inputs
from octavo.train.setup import frozen_base
from octavo.train.step.memory_report import weight_bytes
from octavo.train.step.step import Stepper, StepResult


class HoldsMemory(Protocol):
    @property
    def bytes(self) -> int:
        """Memory in bytes that it takes in addition to the policy."""


class Reference(HoldsMemory, Protocol):
    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        """Return log-probabilities [B, P] of `target` at the positions `keep`, as `train.forward.log_probs` does,
        without a graph."""


def make_reference(kind: str, stepper: Stepper, plan_file: Path, log: Callable[[str], None]) -> Reference:
    """Create the reference of a run. `kind`: auto, base or copy. `plan_file`: the run's plan.json, which a copy
    follows.

    Raises the errors of loading a model and its plan.
    """
    cfg = stepper.cfg
    if resolve_reference(kind, cfg) == "base":
        if cfg.lora is not None and (source := cfg.lora.adapter or cfg.run.start_from):
            log(f"note: the reference is the base without adapters, not the base with the adapters of {source}")
        return BaseReference(stepper)
    return CopyReference.of(stepper, plan_file, log)


def resolve_reference(kind: str, cfg: Config) -> str:
    """Return `base`, `copy` or `disk`; resolves auto."""
    if kind != "auto":
        return kind
    return "copy" if cfg.lora is None else "base"


class BaseReference:
    """The policy with its adapters disabled; without adapters, the policy itself."""

    bytes = 0

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper

    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        from octavo import adapters

        model = self.stepper.model
        cfg = self.stepper.cfg
        no_adapters = nullcontext() if cfg.lora is None else adapters.disable_adapters(model)
        with no_adapters, batch_invariant_context(cfg, model), untracked_forward(model):
            return log_probs(self.stepper.forward, self.stepper.head, batch, keep, target, temperature)[0]


class CopyReference:
    """A frozen copy of the model."""

    def __init__(self, cfg: Config, forward: Forward, head: ChunkedHead | None) -> None:
        self.cfg, self.forward, self.head = cfg, forward, head

    @classmethod
    def of(cls, stepper: Stepper, plan_file: Path, log: Callable[[str], None]) -> CopyReference:
        """Load the weights that the run began with, on the policy's device and ranks."""
        cfg, world, family = stepper.cfg, stepper.world, stepper.family
        model = frozen_base.load_as_values(cfg, model_dtype(cfg), world.device)
        if cfg.run.start_from is not None:
            checkpoint.load_weights(
                cfg.run.start_from, model=model, optimizer=None, world=world, may_be_missing=critic.is_critic_parameter
            )
        frozen_base.freeze_copy(model, cfg, plan_file, family.components)
        forward = Forward(model, world, autocast_dtype(cfg, world.device))
        run_towers_on_dummy_inputs(model, family, forward, world)
        head = None if stepper.head is None else chunk_head(model)
        parallel.shard(model, family, world)
        if note := reference_note(stepper.model, model):
            log(f"note: {note}")
        return cls(cfg, forward, head if isinstance(head, ChunkedHead) else None)

    @property
    def model(self) -> nn.Module:
        return self.forward.model

    @property
    def bytes(self) -> int:
        return weight_bytes(self.model)

    def __call__(self, batch: dict[str, Any], keep: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        with batch_invariant_context(self.cfg, self.model), untracked_forward(self.model):
            return log_probs(self.forward, self.head, batch, keep, target, temperature)[0]


def batch_invariant_context(cfg: Config, model: nn.Module) -> AbstractContextManager[object]:
    """Return the context of a forward whose log-probabilities are compared with a rollout's; with `rl.invariant` its
    rows do not depend on each other."""
    return fp8.batch_invariant(model) if cfg.rl is not None and cfg.rl.invariant else nullcontext()


def add_reference_memory(result: StepResult, reference: HoldsMemory | None, **kinds: int) -> StepResult:
    """Add memory to the result of a step: further `kinds` (name -> bytes) and, as `reference`, the reference's memory.
    The result is unchanged if the step did not measure its memory."""
    if result.memory is None:
        return result
    held = {} if reference is None else {"reference": reference.bytes}
    return replace(result, memory={**result.memory, **kinds, **held})


@contextmanager
def untracked_forward(model: nn.Module) -> Iterator[None]:
    """Run a forward without side effects in this context: no graph, counters, health metrics, amax updates or
    dropout."""
    training = model.training
    model.train(False)
    try:
        with torch.no_grad(), uncounted():
            yield
    finally:
        model.train(training)
