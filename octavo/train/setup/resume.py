"""Resumes a run from its plan and a checkpoint, and saves both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from octavo import checkpoint, fp8, models, parallel
from octavo.checkpoint import compat
from octavo.checkpoint.run_state.files import read_state
from octavo.fp8.optim import old_coat_note
from octavo.fp8.planning import Schedule, document
from octavo.fp8.proof import Prediction
from octavo.train.errors import TrainError
from octavo.train.forward import critic
from octavo.train.run_dir import run_dir
from octavo.train.setup import frozen_base
from octavo.train.setup.job import Job
from octavo.train.step.step import Stepper

_SCALING = "scaling."


def saved_plan(world: parallel.World, start: run_dir.Start) -> Path | None:
    """Return the plan file of the resumed run, or None for a new run. Collective call.

    If a checkpoint was copied without plan.json, the plan in the checkpoint is written as the plan.json of this run.
    """
    if start.checkpoint is None or start.forked:
        return None
    checkpointed = start.checkpoint.resolve()
    plan_file = checkpointed.parent.parent / run_dir.PLAN

    def find() -> str:
        if plan_file.exists():
            return str(plan_file)
        plan = read_state(checkpointed)["counters"].get("plan")
        if plan is None:
            raise TrainError(
                f"the plan of the run that saved {start.checkpoint} is neither in that checkpoint nor in {plan_file}. "
                "Copy the run's plan.json there, next to its checkpoints folder"
            )
        run_dir.write_json(start.directory / run_dir.PLAN, plan)
        return str(start.directory.resolve() / run_dir.PLAN)

    return Path(world.run_on_main(find))


def write_plan(
    directory: Path,
    saved: Path | None,
    family: str,
    plans: Schedule,
    plan: fp8.Plan,
    notes: tuple[str, ...],
    prediction: Prediction | None,
) -> None:
    """Write the run's plan.json, unless the run resumes with a complete plan.json in its directory.

    A plan from a checkpoint is incomplete, because a checkpoint keeps less than `write_plan` writes. A plan of version
    0.4.0 in which several layers run as one GEMM is rewritten, because they now run separate GEMMs. A plan up to 0.5.0
    gets the casts of its recipes, which it has continued with: a later version may have others.
    """
    file = directory / run_dir.PLAN
    written = (run_dir.read_json(file) or {}) if saved == file.resolve() else {}
    if "rows" not in written or compat.has_sibling_gemms(written):
        run_dir.write_plan(directory, family, plans, plan, notes, prediction)
    elif "casts" not in written:
        run_dir.write_json(file, {**written, "casts": plan.policy.casts.to_json()})


def resume(
    stepper: Stepper, start: run_dir.Start, log: Callable[[str], None], frozen: frozen_base.FrozenBase | None = None
) -> run_dir.Progress:
    """Load the checkpoint that the run starts from, if any.

    A resumed run loads model, optimizer, amax histories and random generators, and its frozen base must match the
    checkpoint. A run with `start_from` loads only the weights.
    """
    if start.checkpoint is None:
        if start.initial_weights is not None:
            _load_initial_weights(stepper, Path(start.initial_weights["path"]), frozen, log)
        return run_dir.Progress()
    world = stepper.world
    if frozen is not None and frozen.fingerprint and not start.forked:  # a fork may store its base in FP8
        before = read_state(start.checkpoint)["counters"].get("base", {})
        frozen_base.check_same_base(before, frozen.fingerprint, start.checkpoint, stepper.cfg.model.path)
    restored = checkpoint.load(start.checkpoint, model=stepper.model, optimizer=stepper.optimizer, world=world)
    if note := old_coat_note(stepper.optimizer):
        log(f"note: {start.checkpoint}: {note}")
    if not start.forked:  # a fork starts new amax histories
        fp8.load_scaling_state(stepper.model, scaling_of(restored.extra))
    if stepper.update.scale is not None and (scale := restored.counters.get("loss_scale")):
        stepper.update.scale.load(scale, start.checkpoint)
    checkpoint.rng.restore(restored.extra, world.rank)
    stepper.load_state(restored.extra)
    before = (restored.ranks, restored.counters["threads"])
    now = (world.size, torch.get_num_threads())
    if before != now:
        log(
            f"saved by {before[0]} rank(s) of {before[1]} thread(s), continued on {now[0]} of {now[1]}: sums are "
            "computed in a different order, so losses agree closely but not bit for bit"
        )
    return run_dir.Progress.from_counters(restored.counters)


def _load_initial_weights(
    stepper: Stepper, path: Path, frozen: frozen_base.FrozenBase | None, log: Callable[[str], None]
) -> None:
    """Load the weights of a checkpoint, including the critic's if both runs have one. Collective call."""
    cfg, before = stepper.cfg, read_state(path)["counters"]
    if frozen is not None and frozen.fingerprint and before.get("base"):
        saved = (before.get("settings") or {}).get("model") or {}
        now = cfg.model_dump(mode="json")["model"]
        if any(saved.get(key) != now[key] for key in ("load_in_fp8", "keep_fp8")):
            log(f"note: the base of {path} was stored in a different precision, so it was not compared")
        else:
            frozen_base.check_same_base(before["base"], frozen.fingerprint, path, cfg.model.path)
    read = checkpoint.load_weights(
        path,
        model=stepper.model,
        optimizer=stepper.optimizer,
        world=stepper.world,
        may_be_missing=critic.is_critic_parameter,
    )  # fmt: skip
    log(f"starts with the weights of {path} (step {read['step']}); optimizer, schedule, randomness and data start over")


def scaling_of(extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the amax histories among a checkpoint's extra tensors."""
    return {name.removeprefix(_SCALING): t for name, t in extra.items() if name.startswith(_SCALING)}


def save(job: Job, folder: str = run_dir.CHECKPOINTS) -> Path | None:
    """Write the run's state after `job.progress.step` steps into a folder of the run. Collective call.

    Without `run.save_states`, only the weights and their amax histories are written. Returns the checkpoint, or None if
    `job.background`, which must be idle, writes a copy of the state later.
    """
    with_states = job.cfg.run.save_states
    extra = checkpoint.rng.collect(job.world.rank) | job.stepper.state() if with_states else {}
    if job.world.is_main:  # equal on all ranks after each step's reduction
        extra |= {_SCALING + name: tensor for name, tensor in fp8.scaling_state(job.model).items()}
    snapshot = checkpoint.take_snapshot(
        job.progress.step,
        model=job.model,
        optimizer=job.stepper.optimizer,
        extra=extra,
        counters={
            **job.progress.counters(job.cfg, job.files),
            "threads": torch.get_num_threads(),
            "plan": document(job.precision_schedule.schedule.main, spans=job.precision_schedule.schedule.spans),
            **({} if job.precision_schedule.adapt is None else {"adapt": job.precision_schedule.to_json()}),
            **({} if job.base is None else {"base": job.base.fingerprint}),
            **({} if job.attention is None else {"attention": job.attention}),
            **({} if job.initial_weights is None else {"start_from": dict(job.initial_weights)}),
            "pixels": models.image_backend(job.processor),
            **({} if (scale := job.stepper.update.scale) is None else {"loss_scale": scale.state()}),
        },
        world=job.world,
        trained_only=job.cfg.lora is not None,
        weights_only=not with_states,
    )
    if job.background is None:
        encrypt = job.cfg.run.encrypt
        # `CheckpointCallback` deletes old checkpoints, so keep=None.
        return checkpoint.write(job.directory / folder, snapshot, job.world, keep=None, encrypt=encrypt)
    job.background.begin(job.directory / folder, snapshot)
    return None
