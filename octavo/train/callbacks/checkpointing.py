"""The callback that saves checkpoints, and the trained weights that a finished run writes for other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo import checkpoint as checkpoints
from octavo.config import Config
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.forward import critic
from octavo.train.run_dir import run_dir
from octavo.train.setup import frozen_base
from octavo.train.setup.job import Job
from octavo.train.setup.resolve_config import random_init

MIN_INTERVAL = 50  # minimum number of steps between checkpoints by default


class CheckpointCallback(Callback):
    """Saves a checkpoint every `run.save_every` steps, after the last step, on a signal, and at `run.milestones`, which
    are never deleted.

    Weights are known to be good once a step that started from them was applied. Until then no earlier checkpoint is
    deleted (`run.keep`), and a checkpoint that is due after a skipped step is written after the next applied step. No
    checkpoint is deleted while an asynchronous one is being written (`run.save: async`).
    """

    def begin(self, run: Run) -> None:
        self.reported: set[str] = set()
        self.due, self.newest = False, run.step  # so that the extra checkpoint of a stopped session is pruned

    def end_step(self, run: Run, step: Step) -> None:
        run.wait_for_save(block=False)
        if step.number in run.cfg.run.milestones:
            run.save(run_dir.MILESTONES)
        every, last = save_interval(run.cfg), run.stopping or step.number == run.cfg.train.total_steps
        self.due |= bool(every) and step.number % every == 0
        if step.result.applied and self.newest < step.number and not run.saving:
            self._prune(run)
        if last or (self.due and step.result.applied):
            run.save()
            self.due = False

    def saved(self, run: Run, checkpoint: Path) -> None:
        self.newest = int(checkpoint.name.rpartition("_")[2])

    def end(self, run: Run, result: RunResult) -> None:
        if result.status == "finished":
            self._prune(run)

    def _prune(self, run: Run) -> None:
        """Delete checkpoints beyond `run.keep`, once after each new one."""
        if self.newest:
            folder, newest, keep = run.directory / run_dir.CHECKPOINTS, self.newest, run.cfg.run.keep
            self.newest = 0
            for problem in run.world.run_on_main(lambda: checkpoints.prune(folder, newest, keep)):
                if problem not in self.reported:
                    run.say(f"note: {problem}")
                self.reported.add(problem)


def save_interval(cfg: Config) -> int:
    """Return the number of steps between checkpoints: `run.save_every`, where 0 saves only at the end. The default is a
    tenth of the run, and at least :data:`MIN_INTERVAL`."""
    every = cfg.run.save_every
    return max(MIN_INTERVAL, -(-cfg.train.total_steps // 10)) if every is None else every


def write_outputs(job: Job, log: Callable[[str], None] = lambda text: None) -> Mapping[str, Any] | None:
    """Check that the frozen base has not changed, then write hf/ or adapter/ (`run.hf`). Returns the record of the base
    for the result, or None if no weight is frozen. `log` is called with notes for the user. Collective call."""
    job.world.set_phase("the end, writing the trained weights")
    base_record = None if job.base is None else _check_base(job, job.base)
    if job.cfg.run.hf:
        _write_adapter(job) if job.cfg.lora is not None else _write_hf(job, log)
    return base_record


def _check_base(job: Job, frozen: frozen_base.FrozenBase) -> Mapping[str, Any]:
    """Compare the frozen weights with their state before training, and write base.json. Returns the record of the base
    for the result."""
    changed = frozen.find_changed_weight(job.model, job.world)
    record = {"weights": len(frozen.fingerprint), "unchanged": changed is None, "fp8": dict(frozen.code_sizes)}
    if job.world.is_main:
        document = {**record, "changed": changed, "sha256": frozen.fingerprint}
        run_dir.write_json(job.directory / frozen_base.FILE, document)
    if changed is not None:
        raise TrainError(
            f"the frozen base has changed during training: {changed} was written to. The fingerprints of the base are "
            f"in {job.directory / frozen_base.FILE}. No adapter is written, because it would not fit the original "
            "base. Look for code that writes to the model's parameters (a hook, a callback)"
        )
    return record


def _write_adapter(job: Job) -> None:
    """Write adapter/, the trained adapters as a PEFT folder. They are gathered from all ranks; the main rank writes."""
    from octavo import adapters

    state = adapters.adapter_state(job.model)
    job.world.run_on_main(
        lambda: str(adapters.save(job.model, job.directory / "adapter", job.cfg.model.path, state, job.cfg.run.encrypt))
    )


def _write_hf(job: Job, log: Callable[[str], None]) -> None:
    """Write hf/, the trained weights as a Hugging Face folder, on all ranks."""
    checkpoints.save_hf(
        job.model, job.cfg.model.path, job.directory / "hf", job.world,
        skip=critic.is_critic_parameter, encrypt=job.cfg.run.encrypt, loaded=random_init(job.cfg) is None, log=log,
    )  # fmt: skip
