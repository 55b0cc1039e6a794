"""`run(cfg)`: enter the run directory, assemble the run, train step by step, and return the result.

Everything around a step is done by callbacks (:mod:`octavo.train.callbacks.callback`), built-in or user-supplied, in a
fixed order. :mod:`octavo.train.setup.build` assembles the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo import checkpoint, parallel
from octavo.base import hub
from octavo.base.safe_read import replace_nonfinite
from octavo.base.wording import count_noun
from octavo.config import Config
from octavo.models.compose.from_config import compose_model
from octavo.models.structure.fp8_twin import resolve_twin
from octavo.train.callbacks import trackers
from octavo.train.callbacks.adaptive_precision import AdaptPrecision, ApplyPrecisionSchedule
from octavo.train.callbacks.callback import Callback, Run, Step, check_callbacks
from octavo.train.callbacks.checkpointing import CheckpointCallback, write_outputs
from octavo.train.callbacks.corruption_check import CorruptionCheck
from octavo.train.callbacks.evaluation_and_health import (
    Evaluation,
    HealthMetrics,
    MassiveActivations,
    Proof,
    is_due,
)
from octavo.train.callbacks.fp8_gain import SpeedupMeasurement
from octavo.train.callbacks.garbage_collection import GarbageCollection, gc_settings
from octavo.train.callbacks.metrics import MetricsFile, MetricsLog
from octavo.train.callbacks.progress import Display
from octavo.train.callbacks.result import RunResult
from octavo.train.callbacks.signals import StopRequest
from octavo.train.callbacks.stopping import StopOnNonFinite, StopOnRequest, StopWithoutLossTokens
from octavo.train.errors import TrainError
from octavo.train.loop.out_of_memory import out_of_memory_error
from octavo.train.loop.summary import summary
from octavo.train.run_dir import encryption_rules, run_dir
from octavo.train.run_dir.rank_facts import rank_facts
from octavo.train.run_dir.run_lock import RunLock
from octavo.train.setup import build, frozen_base, planning
from octavo.train.setup.phase import SFT, Phase
from octavo.train.setup.resolve_config import resolve_from_checkpoint, resolve_recipe, resolve_steps, resolve_video
from octavo.train.step.lr_schedule import lr_at
from octavo.train.step.precision_schedule import PrecisionSchedule
from octavo.train.step.step import Batches, Observe

if TYPE_CHECKING:
    from rich.console import Console

DescribePlan = Callable[[planning.RunPlan], Iterable[str]]

# Entries of the last row that `RunResult.final` omits.
_OMIT_FROM_FINAL = (
    *("seconds", "save_seconds", "time", "eval", "health", "memory", "gain", "experts", "base"),
    "massive_activations",
)
# Rows with one of these entries are always written, regardless of run.log_every.
_ALWAYS_LOGGED = {"eval", "health", "memory", "skipped", "overflow"}


def run(
    cfg: Config,
    *,
    console: Console | None = None,
    label: str = "",
    callbacks: Iterable[Callback] = (),
    phase: Phase = SFT,
    describe_plan: DescribePlan = summary,
    watchers: Sequence[Callback] = (),
) -> RunResult:
    """Run one training job to its end, or until a signal or callback stops it.

    console        rich console for progress and messages, or None to print nothing
    label          prefix of the printed lines
    callbacks      see `octavo.train.Callback`
    phase          pretraining and SFT (the default), or a phase of the package rl
    describe_plan  returns the lines that describe the plan (`octavo.train.loop.summary`); called before any weights are
                   read, and only with a console
    watchers       callbacks that only observe, on the main rank; a watcher that fails after `begin` does not end the
                   run

    Under torchrun every rank calls this; only the main rank prints and writes files.

    Raises: TrainError and the errors of lower-level packages. An error on only one rank ends its process; torchrun then
    ends the others.
    """
    if cfg.train.stages:
        raise TrainError("a configuration with train.stages is several runs: call octavo.run or octavo.rl.run")
    user_callbacks = callbacks if isinstance(callbacks, str) or not isinstance(callbacks, Iterable) else (*callbacks,)
    if user_callbacks != () and (problems := check_callbacks(user_callbacks)):
        raise TrainError("callbacks: " + "; ".join(f"{reason}; {remedy}" for reason, remedy in problems))
    # Only rank 0 prints. Ranks are known only after parallel.setup, so the launcher's variable decides.
    display = Display(console if os.environ.get("RANK", "0") == "0" else None, label)
    cfg = hub.resolve_names(cfg, display.log)
    if cfg.model.foundation is not None:
        compose_model(cfg, display.log)
    if cfg.model.fp8_twin is not None:
        cfg = resolve_twin(cfg, display.log)
    cfg = resolve_video(resolve_recipe(cfg))
    phase.check(cfg)
    if cfg.run.trackers:
        trackers.check_installed(cfg)
    encryption_rules.check(cfg)
    try:
        with encryption_rules.redact_data_in_errors(cfg):
            cfg_with_steps = resolve_steps(cfg, display.log)
            return _run(cfg_with_steps, cfg.train.epochs, display, user_callbacks, phase, describe_plan, watchers)
    finally:
        phase.close()


def _run(
    cfg: Config, epochs: float | None, display: Display, user_callbacks: Sequence[Callback], phase: Phase,
    describe_plan: DescribePlan, watchers: Sequence[Callback],
) -> RunResult:  # fmt: skip
    fingerprints = phase.fingerprints(cfg)
    world = parallel.setup(
        cfg.run.threads,
        cfg.run.timeout,
        Path(cfg.run.dir),
        lambda: rank_facts(cfg, fingerprints, epochs),
        cfg.parallel,
    )
    _check_model_settings(cfg)
    with RunLock() as lock:
        start = run_dir.enter(cfg, world, display.log, lock, fingerprints)
        if start.result is not None:
            steps = count_noun(start.result["steps"], "step")
            display.log(f"{start.directory} has finished already ({steps}); nothing to do")
            result = RunResult(**{**start.result, "dir": start.directory})
        else:
            gc_context = gc_settings(cfg.train.gc) if cfg.train.gc is not None else nullcontext()
            with StopRequest(cfg.run.timeout) as request, gc_context:
                try:
                    result = _train(
                        _start_run(cfg, world, start, display, request, user_callbacks, phase, describe_plan, watchers)
                    )
                except (RuntimeError, MemoryError) as error:  # out of memory or a lost rank
                    if (explained := out_of_memory_error(error, world) or _lost_rank_error(error, world)) is None:
                        raise
                    raise explained from error
    world.close()
    return result


def _lost_rank_error(error: Exception, world: parallel.World) -> parallel.WorldError | None:
    return world.lost_rank_error(error) if isinstance(error, RuntimeError) else None


def _check_model_settings(cfg: Config) -> None:
    """Raise if the model does not support a setting, before the settings are saved in the run directory."""
    if cfg.train.router_aux_loss_coef or cfg.lora is not None or cfg.model.load_in_fp8.kinds:
        has_checkpoint = bool(checkpoint.steps(Path(cfg.run.dir) / run_dir.CHECKPOINTS))
        is_new = cfg.run.resume in ("never", "auto") and not has_checkpoint
        frozen_base.adapter_sizes(cfg if is_new else resolve_from_checkpoint(cfg), *planning.meta_model(cfg))


def _start_run(
    cfg: Config, world: parallel.World, start: run_dir.Start,
    display: Display, request: StopRequest, user_callbacks: Sequence[Callback], phase: Phase,
    describe_plan: DescribePlan, watchers: Sequence[Callback],
) -> Run:  # fmt: skip
    """Assemble and resume the run; read the last metrics of earlier sessions from its directory."""
    world.set_phase("startup, building the run")
    prints_plan = display.console is not None
    job = build.build(cfg, world, start, phase, display.log, describe_plan if prints_plan else lambda planned: ())
    run_dir.discard_later_files(start, world, display.log)
    # After the checkpoints, because `auto` must never resume from one without metrics.
    world.run_on_main(lambda: MetricsFile.of(start.directory).truncate(start.step))
    first = job.progress.step + 1
    if display.console is not None:
        job.stepper.on_progress = display.show_part
    log = MetricsLog(start.directory, cfg.run.tensorboard, first, phase.tensorboard) if world.is_main else None
    rows = MetricsFile.of(start.directory).read()
    evaluated = next((row for row in reversed(rows) if "eval" in row), None)
    return Run(
        job, display, request, first, log,
        row=rows[-1] if rows else {},
        eval=evaluated and evaluated["eval"], eval_step=evaluated and evaluated["step"],
        memory=next((row["memory"] for row in reversed(rows) if "memory" in row), {}),
        gain=run_dir.read_json(start.directory / run_dir.GAIN),
        user_callbacks=user_callbacks, callbacks=_ordered_callbacks(user_callbacks, job.precision_schedule, cfg),
        watchers=(*watchers, *trackers.make_trackers(cfg)) if world.is_main else (),
    )  # fmt: skip


def _ordered_callbacks(
    user_callbacks: Sequence[Callback], schedule: PrecisionSchedule, cfg: Config
) -> tuple[Callback, ...]:
    """Return all callbacks in the order in which they are called."""
    # Checks of loss and gradients precede evaluation and saving, so that bad weights are not saved. The user's
    # callbacks also precede both, so that the row is complete when it is written. The FP8 speedup measurement is
    # last, so that its failure does not affect the step.
    gemm_check = (CorruptionCheck(),) if cfg.run.check_every else ()
    gc = (GarbageCollection(),) if cfg.train.gc is not None else ()
    scheduled = (ApplyPrecisionSchedule(),) if schedule.varies else ()
    adaptive = (AdaptPrecision(),) if schedule.adapt is not None else ()
    observers = *scheduled, *gemm_check, Proof(), HealthMetrics(), MassiveActivations(), *adaptive
    stops = StopOnNonFinite(), StopWithoutLossTokens(), StopOnRequest()
    return *observers, *user_callbacks, *stops, Evaluation(), *gc, CheckpointCallback(), SpeedupMeasurement()


def _train(run: Run) -> RunResult:
    """Train, notify watchers of an error, and wait for a checkpoint that is still being written. The wait is short if a
    rank may be lost, because the write may then never complete."""
    wait_s = 0.0
    try:
        with encryption_rules.redact_data_in_errors(run.cfg):  # watchers write error messages
            return _training_loop(run)
    except Exception as error:
        may_have_lost_rank = isinstance(error, RuntimeError) and not isinstance(error, TrainError)
        wait_s = (1 - parallel.COLLECTIVE_SHARE if may_have_lost_rank else 1) * run.cfg.run.timeout
        run.notify_watchers("failed", error)
        raise
    finally:
        if run.job.background is not None:
            run.job.background.close(wait_s)


def _training_loop(run: Run) -> RunResult:
    steps = run.cfg.train.total_steps
    if run.step:
        run.say(f"continuing after step {run.step} of {steps}")
    try:
        run.notify("begin")
        run.display.begin(run.step, steps)
        while run.step < steps and not run.stopping:
            step = _step(run, run.step + 1)
            run.notify("after_step", step)
            _write(run, step)
            run.notify("end_step", step)
        run.wait_for_save()
    finally:
        run.display.end()
        run.job.loader.close()
        if run.log is not None:
            run.log.close()
    # A run stopped at the last step has finished, unless its evaluation is still due: a resumed run would do it.
    stopped = run.stopping and (run.step < steps or (is_due(run, steps) and "eval" not in run.row))
    if not stopped and (consecutive_skips := run.job.progress.consecutive_skips):
        raise TrainError(
            f"the last {consecutive_skips} of {steps} steps were skipped, because the loss or the gradient was not "
            "finite. The weights may be unusable, so the run is not marked as finished. The weights of the last "
            f"applied step are in {run_dir.CHECKPOINTS}/step_{run.step} (octavo eval, octavo export). Look at the data "
            "of these steps, lower train.lr, or keep the layer that overflows out of FP8"
        )
    result = _result(run, stopped)
    run.notify("end", result)
    return result


def _step(run: Run, step_number: int) -> Step:
    """Train one step and make its metrics row, without the entries that callbacks add."""
    job, progress, settings = run.job, run.job.progress, run.cfg.train
    began = time.perf_counter()
    run.world.set_phase(f"step {step_number}, loading its batch")
    batches = tuple(next(job.loader))
    run.world.set_phase(f"step {step_number}, forward and backward")
    observe = _observe(run, step_number, batches)
    lr = lr_at(
        step_number,
        schedule=settings.schedule,
        lr=settings.lr,
        steps=run.cfg.train.total_steps,
        warmup=settings.warmup,
        min_lr=settings.min_lr,
    )
    job.stepper.step_number = step_number
    result = job.stepper.run(batches, lr, observe)
    seconds = time.perf_counter() - began
    progress.record_step(
        step_number, job.loader.rows, job.loader.pack_position, result.tokens, seconds, result.applied,
        result.loss_tokens > 0, result.overflow,
    )  # fmt: skip
    row: dict[str, Any] = {
        "step": step_number, "loss": result.loss, "tokens": result.tokens, "loss_tokens": result.loss_tokens,
        "tokens_per_s": result.tokens / seconds, "grad_norm": result.grad_norm, "lr": lr,
        "seconds": seconds, "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }  # fmt: skip
    if not result.applied:
        row["overflow" if result.overflow else "skipped"] = True
    if result.loss_scale is not None:
        row["loss_scale"] = result.loss_scale
    if not result.loss_tokens:
        row["empty"] = True  # no target tokens, so the loss of 0 means nothing
    if result.aux_loss is not None:
        row["aux_loss"] = result.aux_loss
    return Step(step_number, batches, result, {**row, **result.extra_metrics, **(result.experts or {})})


def _observe(run: Run, step_number: int, batches: Batches) -> Observe:
    """Collect the observations that callbacks request for a step."""
    requests = [request for request in run.notify("before_step", step_number, batches) if request is not None]
    requested = [any(getattr(request, field.name) for request in requests) for field in fields(Observe)]
    if run.user_callbacks:  # they may request different observations on each rank, but observing is a collective
        requested = [run.world.any(request) for request in requested]
    observe = Observe(*requested)
    if observe.health and observe.memory:
        # Health keeps every x in high precision, which would count as activations. A run that has not
        # measured memory yet measures it first (with health_every: 1 at step 1); otherwise a later step measures it.
        observe = replace(observe, health=bool(run.memory), memory=not run.memory)
    checker = run.job.stepper.corruption_checker
    if run.memory and (
        run.job.stepper.recipe_trials is not None or (checker is not None and checker.gemms)
    ):  # both keep x too
        observe = replace(observe, memory=False)
    return observe


def _write(run: Run, step: Step) -> None:
    step.wanted = bool(step.wanted or run.logs(step.number) or _ALWAYS_LOGGED & step.row.keys())
    if step.wanted and (waited := run.pop_save_seconds()):
        step.row["save_seconds"] = waited
    if run.log is not None and step.wanted:
        run.log.write(step.row, run.job.progress.health if "health" in step.row else None)
    run.row = step.row
    run.display.step(step.row)


def _result(run: Run, stopped: bool) -> RunResult:
    base_record = None if stopped else write_outputs(run.job, run.say)
    asked = max(run.world.gather_objects(run.request.signal or 0))
    result = RunResult(
        dir=run.directory, status="stopped" if stopped else "finished", steps=run.step,
        final={key: value for key, value in run.row.items() if key not in _OMIT_FROM_FINAL},
        eval=run.eval, eval_step=run.eval_step, health=run.job.progress.health, memory=run.memory,
        gain=run.gain, base=base_record, skipped=run.job.progress.skipped,
        overflowed=run.job.progress.overflowed, seconds=run.job.progress.seconds,
        signal=asked or None if stopped else None,
        late_stop=asked if (asked or run.stopping) and not stopped else None,
    )  # fmt: skip
    if stopped:
        how = "Continue with run.resume=auto"
        if not run.cfg.run.save_states:
            how = f"Start a new run with these weights: run.start_from={run.directory}, and another run.dir"
        run.say(f"stopped after step {run.step}; saved. {how}")
    elif run.world.is_main:
        run_dir.write_json(run.directory / run_dir.RESULT, replace_nonfinite(result.to_json()))
    return result
