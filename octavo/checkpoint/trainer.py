"""What an FP8 model needs of a trainer that is not ours: a callback for Hugging Face's Trainer and TRL's.

    from octavo.checkpoint.trainer import Fp8Callback

    trainer = Trainer(model, args, train_dataset=rows)      # or SFTTrainer, DPOTrainer, GRPOTrainer
    trainer.add_callback(Fp8Callback(trainer))
    trainer.train(resume_from_checkpoint=True)

Under ``delayed`` the scales of a cast come from amax histories, which are in no state dict: a Trainer that resumes
begins with empty ones, takes other scales and trains another model. The callback puts them into ``trainer_state.json``
of every checkpoint, with all else of it or not at all, and takes them out again. fp32 values are exact in JSON.

Histories are local to a rank; after each step every rank gets the largest, as in :mod:`octavo.train.step.step`, so that
one checkpoint serves all. A loop of one's own (Accelerate's) does the same with :func:`octavo.fp8.scaling_state`,
:func:`octavo.fp8.load_scaling_state` and :func:`octavo.fp8.delayed.reduce_scaling_state`.

Layers keep the FP8 codes of their weight from one optimizer step to the next. A callback that writes weights through
``.data`` in between (their moving average for an evaluation, and back; a merge) leaves former codes in use. Fp8Callback
holds a sample of each weight against its codes after evaluations, and before the optimizer step in the first
:data:`FIRST` steps, in every :data:`EVERY`-th and after an evaluation or a checkpoint: what differs ends the training
with the layer's name.
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
from octavo.fp8.weights import stale_codes, stale_sentence

FIRST, EVERY = 2, 20


class Fp8Callback(TrainerCallback, ExportableState):
    """Amax histories of delayed scaling in a Trainer's checkpoints, a word on the reference model that it holds, and a
    look at the codes of weights that may have been written past the layers (RuntimeError names the layer).

    trainer  whose ``ref_model`` is looked at (:func:`octavo.fp8.proof.reference_note`); None: no reference is
    say      gets sentences for people, as training begins
    """

    def __init__(self, trainer: Any = None, say: Callable[[str], None] = warnings.warn) -> None:
        self._trainer, self._say = trainer, say
        self._model: nn.Module | None = None
        self._checks = 0  # steps in which codes were looked at
        self._exchanged = False  # weights may have been, since the last look

    def state(self) -> dict[str, object]:
        """What the Trainer writes down with a checkpoint."""
        histories = {} if self._model is None else fp8.scaling_state(self._model)
        return {"args": {}, "attributes": {"histories": {name: rows.tolist() for name, rows in histories.items()}}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model has its weights and the checkpoint's state is read. Raises ValueError for histories of another
        model or recipe."""
        model = self._model = kwargs["model"]
        reference = getattr(self._trainer, "ref_model", None)
        note = None if reference is None else reference_note(model, reference)
        if note is not None:
            self._say(note)
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("histories")
        if state.global_step and saved is not None:
            fp8.load_scaling_state(
                model, {name: torch.tensor(rows, dtype=torch.float32) for name, rows in saved.items()}
            )
        elif state.global_step and fp8.scaling_state(model):
            self._say(
                f"the checkpoint of step {state.global_step} was written without Fp8Callback and holds no amax "
                "histories: the first steps scale by the current amax instead of the delayed one, so this run is not "
                "bit for bit the one that was interrupted. From here on they are saved"
            )
        state.stateful_callbacks[type(self).__name__] = self.state()  # the Trainer asks for it when it saves

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises RuntimeError for codes of a former weight: see the module's docstring."""
        if self._checks < FIRST or self._exchanged or state.global_step % EVERY == 0:
            self._look_at_codes(kwargs["model"], state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """As on_pre_optimizer_step; and the next one looks again."""
        self._look_at_codes(kwargs["model"], state)
        self._exchanged = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The next step looks at the codes."""
        self._exchanged = True

    def _look_at_codes(self, model: nn.Module, state: TrainerState) -> None:
        self._checks, self._exchanged = self._checks + 1, False
        reference = getattr(self._trainer, "ref_model", None)
        for whose, one in (("", model), ("reference model: ", reference)):
            stale = stale_codes(one, draw=state.global_step) if isinstance(one, nn.Module) else []
            if stale:
                raise RuntimeError(f"step {state.global_step}: {whose}{stale_sentence(stale)}")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            reduce_scaling_state(kwargs["model"])
