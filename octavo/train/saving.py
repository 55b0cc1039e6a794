"""What a run leaves behind: checkpoints on the way, and at its end the trained weights for others to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo import fp8, models, parallel
from octavo.train import base, rundir
from octavo.train.build import Job
from octavo.train.callback import Callback, Run, Step
from octavo.train.errors import TrainError


class Saving(Callback):
    """A checkpoint every `run.save_every` steps, after the last one, and before a signal's end."""

    def end_step(self, run: Run, step: Step) -> None:
        every = run.cfg.run.save_every
        if run.stopping or step.number == run.cfg.train.steps or (every and step.number % every == 0):
            run.save()


def deliver(job: Job) -> Mapping[str, Any] | None:
    """Hold the frozen base against what it was, then write hf/ or adapter/ (`run.hf`); what the result says of the
    base. A collective."""
    job.world.at("the end, writing what the run leaves behind")
    held = None if job.base is None else _hold_the_base(job, job.base)
    if job.cfg.run.hf:
        _write_adapter(job) if job.cfg.lora is not None else _write_hf(job)
    return held


def _hold_the_base(job: Job, frozen: base.Base) -> Mapping[str, Any]:
    """The frozen weights after training against those before: base.json, and what of it the result says."""
    changed = frozen.changed(job.model, job.world)
    about = {"weights": len(frozen.whole), "unchanged": changed is None, "fp8": dict(frozen.taken)}
    if job.world.is_main:
        rundir.write_json(job.directory / base.FILE, {**about, "changed": changed, "sha256": frozen.whole})
    if changed is not None:
        raise TrainError(
            f"the base is not what it was when training began: {changed} was written to, and frozen weights never "
            f"are. {job.directory / base.FILE} has its fingerprints; no adapter is written, because it would "
            "belong to no base. Look for code that writes to the model's parameters (a hook, a callback)"
        )
    return about


def _write_adapter(job: Job) -> None:
    """adapter/: the trained adapters as PEFT's folder. Gathered from all ranks, written by the main one."""
    from octavo import adapters

    state = adapters.adapter_state(job.model)
    job.world.from_main(
        lambda: str(adapters.save(job.model, job.directory / "adapter", base=job.cfg.model.path, state=state))
    )


def _write_hf(job: Job) -> None:
    """hf/: the trained weights as a Hugging Face folder. Gathered from all ranks, written by the main one."""
    weights = parallel.full_state_dict(job.model, job.world) if job.world.size > 1 else None
    if weights is None and job.base is not None:  # a component is frozen in FP8: its values, as it computed
        found = job.model.state_dict().items()
        weights = {name: w.dequantize() if fp8.is_frozen(w) else w for name, w in found}
    job.world.from_main(
        lambda: str(models.save_hf(job.model, job.cfg.model.path, job.directory / "hf", state_dict=weights))
    )
