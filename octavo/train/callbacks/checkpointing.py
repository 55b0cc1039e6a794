"""What a run leaves behind: checkpoints on the way, and at its end the trained weights for others to load."""

from __future__ import annotations

from collections.abc import Mapping
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
from octavo.train.setup.resolve_config import total_steps

LEAST = 50  # steps between checkpoints where nobody says how many


class Saving(Callback):
    """A checkpoint every `run.save_every` steps, after the last one, and before a signal's end; and those of
    `run.milestones`, which stay.

    Weights are good when a step from them was applied: until then none of the checkpoints before goes (`run.keep`), and
    one that is due after a step that was skipped waits for the next that is not. While one is written beside the steps
    (`run.save: async`), none goes either.
    """

    def begin(self, run: Run) -> None:
        self.reported: set[str] = set()
        self.due, self.newest = False, run.step  # of the checkpoints: a stopped session may have left one too many

    def end_step(self, run: Run, step: Step) -> None:
        run.settle(wait=False)
        if step.number in run.cfg.run.milestones:
            run.save(run_dir.MILESTONES)
        every, last = interval(run.cfg), run.stopping or step.number == run.total_steps
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
        """Delete what `run.keep` says, once for each checkpoint."""
        if self.newest:
            folder, newest, keep = run.directory / run_dir.CHECKPOINTS, self.newest, run.cfg.run.keep
            self.newest = 0
            for problem in run.world.from_main(lambda: checkpoints.prune(folder, newest, keep)):
                if problem not in self.reported:
                    run.say(f"note: {problem}")
                self.reported.add(problem)


def interval(cfg: Config) -> int:
    """Steps between checkpoints (0: none on the way): as asked, else a tenth of the run and at least :data:`LEAST`."""
    every = cfg.run.save_every
    return max(LEAST, -(-total_steps(cfg) // 10)) if every is None else every


def deliver(job: Job) -> Mapping[str, Any] | None:
    """Hold the frozen base against what it was, then write hf/ or adapter/ (`run.hf`); what the result says of the
    base. A collective."""
    job.world.at("the end, writing what the run leaves behind")
    held = None if job.base is None else _hold_the_base(job, job.base)
    if job.cfg.run.hf:
        _write_adapter(job) if job.cfg.lora is not None else _write_hf(job)
    return held


def _hold_the_base(job: Job, frozen: frozen_base.Base) -> Mapping[str, Any]:
    """The frozen weights after training against those before: base.json, and what of it the result says."""
    changed = frozen.changed(job.model, job.world)
    about = {"weights": len(frozen.whole), "unchanged": changed is None, "fp8": dict(frozen.taken)}
    if job.world.is_main:
        run_dir.write_json(job.directory / frozen_base.FILE, {**about, "changed": changed, "sha256": frozen.whole})
    if changed is not None:
        raise TrainError(
            f"the base is not what it was when training began: {changed} was written to, and frozen weights never "
            f"are. {job.directory / frozen_base.FILE} has its fingerprints; no adapter is written, because it would "
            "belong to no frozen_base. Look for code that writes to the model's parameters (a hook, a callback)"
        )
    return about


def _write_adapter(job: Job) -> None:
    """adapter/: the trained adapters as PEFT's folder. Gathered from all ranks, written by the main one."""
    from octavo import adapters

    state = adapters.adapter_state(job.model)
    job.world.from_main(
        lambda: str(adapters.save(job.model, job.directory / "adapter", job.cfg.model.path, state, job.cfg.run.encrypt))
    )


def _write_hf(job: Job) -> None:
    """hf/: the trained weights as a Hugging Face folder, written by all ranks."""
    checkpoints.save_hf(
        job.model, job.cfg.model.path, job.directory / "hf", job.world, skip=critic.owns, encrypt=job.cfg.run.encrypt
    )
