"""Fp8Callback: trains FP8 models with Hugging Face's Trainer and the trainers of TRL.

    from octavo.checkpoint.trainer import Fp8Callback

    trainer = Trainer(model, args, train_dataset=rows)      # or SFTTrainer, DPOTrainer, GRPOTrainer
    trainer.add_callback(Fp8Callback(trainer))
    trainer.train(resume_from_checkpoint=True)

With ``delayed`` scaling the scales come from amax histories, which no state dict contains: without the callback a
resumed Trainer starts with empty histories and different scales, so its results differ. The callback saves them in
``trainer_state.json`` of every checkpoint and restores them. fp32 values are exact in JSON.

Histories are local to a rank; after each step every rank gets the maximum over ranks, as in
:mod:`octavo.train.step.step`, so that one checkpoint serves all ranks. A custom loop, for example with Accelerate, can
use :func:`octavo.fp8.scaling_state`, :func:`octavo.fp8.load_scaling_state` and
:func:`octavo.fp8.delayed.reduce_scaling_state`.

Layers keep the FP8 codes of their weight from one optimizer step to the next. A callback that writes weights through
``.data`` in between (swapping in a moving average for an evaluation, or a merge) leaves stale codes in use. Fp8Callback
compares a sample of each weight with its codes: after evaluations, and before the optimizer step in the first
:data:`FIRST_STEPS` steps, in every :data:`CHECK_INTERVAL`-th step and after an evaluation or a checkpoint. A difference
ends the training with an error that names the layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from octavo import fp8
from octavo.fp8.delayed import reduce_scaling_state
from octavo.fp8.proof import reference_note
from octavo.fp8.weights import stale_codes, stale_codes_message

# Each check reads a sample of every weight, so it runs in the first steps, which find most mistakes, and then rarely.
FIRST_STEPS, CHECK_INTERVAL = 2, 20


class Fp8Callback(TrainerCallback, ExportableState):
    """Saves and restores amax histories of delayed scaling in a Trainer's checkpoints, reports a reference model that
    computes in another precision than the policy, and raises RuntimeError for stale FP8 codes, naming the layer.

    trainer  its ``ref_model`` is checked (:func:`octavo.fp8.proof.reference_note`); None if there is no reference model
    log      called with messages for the user when training begins
    """

    def __init__(self, trainer: Any = None, log: Callable[[str], None] = warnings.warn) -> None:
        self._trainer, self._log = trainer, log
        self._model: nn.Module | None = None
        self._checks = 0  # number of checks of codes so far
        self._weights_may_have_changed = False  # whether a callback may have written weights since the last check

    def state(self) -> dict[str, object]:
        """Return the state that the Trainer saves with a checkpoint."""
        histories = {} if self._model is None else fp8.scaling_state(self._model)
        return {"args": {}, "attributes": {"histories": {name: rows.tolist() for name, rows in histories.items()}}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the histories, once the model and the checkpoint's state are loaded.

        Raises ValueError for histories of another model or recipe.
        """
        model = self._model = kwargs["model"]
        reference = getattr(self._trainer, "ref_model", None)
        note = None if reference is None else reference_note(model, reference)
        if note is not None:
            self._log(note)
        saved = _saved_callbacks(state).get(type(self).__name__, {}).get("attributes", {}).get("histories")
        if state.global_step and saved is not None:
            fp8.load_scaling_state(
                model, {name: torch.tensor(rows, dtype=torch.float32) for name, rows in saved.items()}
            )
        elif state.global_step and fp8.scaling_state(model):
            self._log(
                f"the checkpoint of step {state.global_step} was written without Fp8Callback and holds no amax "
                "histories: the first steps scale by the current amax instead of the delayed one, so this run is not "
                "bit for bit the interrupted one. From now on they are saved"
            )
        # When the Trainer saves, it indexes this table by the names of all its callbacks. The state of a checkpoint
        # that was written without Fp8Callback has no entry for it.
        _saved_callbacks(state)[type(self).__name__] = self.state()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the codes in some steps. Raises RuntimeError for stale codes: see the module's docstring."""
        if self._checks < FIRST_STEPS or self._weights_may_have_changed or state.global_step % CHECK_INTERVAL == 0:
            self._check_codes(kwargs["model"], state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the codes now, and again before the next optimizer step."""
        self._check_codes(kwargs["model"], state)
        self._weights_may_have_changed = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check the codes before the next optimizer step."""
        self._weights_may_have_changed = True

    def _check_codes(self, model: nn.Module, state: TrainerState) -> None:
        self._checks, self._weights_may_have_changed = self._checks + 1, False
        reference = getattr(self._trainer, "ref_model", None)
        for prefix, checked in (("", model), ("reference model: ", reference)):
            stale = stale_codes(checked, draw=state.global_step) if isinstance(checked, nn.Module) else []
            if stale:
                raise RuntimeError(f"step {state.global_step}: {prefix}{stale_codes_message(stale)}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Give every rank the largest amax histories, so that the checkpoint of one rank serves all."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            reduce_scaling_state(kwargs["model"])


def _saved_callbacks(state: TrainerState) -> dict[str, dict[str, Any]]:
    """Return the saved states of callbacks by class name.

    transformers annotates the field with the list of callbacks that its constructor takes, and stores a dictionary.
    """
    saved: object = state.stateful_callbacks
    assert isinstance(saved, dict)
    return saved
