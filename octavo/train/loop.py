"""The job: `run(cfg)` enters the run directory, assembles, trains, proves, evaluates, saves, and says how it ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo import checkpoint, fp8, models, parallel
from octavo.config import Config
from octavo.config.rules_lora import kinds_of
from octavo.train import base as beside
from octavo.train import build as assembly
from octavo.train import compiled, gain, planning, rundir
from octavo.train.build import Job
from octavo.train.errors import TrainError
from octavo.train.evaluation import evaluate
from octavo.train.lock import Claim
from octavo.train.metrics import MetricsLog, finite
from octavo.train.nonfinite import first_source
from octavo.train.progress import Display
from octavo.train.schedule import lr_at
from octavo.train.signals import StopWish
from octavo.train.step import Batches, Look, StepResult

PATIENCE = 10  # steps in a row that are not finite before the run gives up
_APART = ("eval", "health", "memory", "gain", "experts", "base")  # of a row, what the result's `final` leaves out
Hook = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    dir      the run directory
    status   "finished", or "stopped" (a signal; saved, continue with run.resume=auto)
    steps    optimizer steps done
    final    the last row of metrics.jsonl without eval, health, memory, gain, experts and base
    eval     the last evaluation, None where there was none
    health   the last FP8 health summary (worst and median figures)
    memory   bytes by kind, as last measured
    gain     what FP8 gained over high precision, where run.gain_steps asked for it; {"failed": why, "step"} without
             the memory for it
    base     of a run beside a frozen base: how many weights it has, that they are what they were, what its FP8 codes
             take (base.json has their fingerprints)
    skipped  steps that were not applied because loss or gradient were not finite
    seconds  of training, all sessions of the run together
    signal   the signal that stopped it
    """

    dir: Path
    status: str
    steps: int
    final: Mapping[str, Any] = field(default_factory=dict)
    eval: Mapping[str, Any] | None = None
    health: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    gain: Mapping[str, Any] | None = None
    base: Mapping[str, Any] | None = None
    skipped: int = 0
    seconds: float = 0.0
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """0; 128 + the signal's number for a run that a signal stopped (143 SIGTERM, 130 SIGINT)."""
        return 0 if self.status == "finished" else 128 + (self.signal or signal.SIGTERM)

    def losses(self) -> dict[int, float]:
        """Step -> loss, as metrics.jsonl has them."""
        rows = rundir.read_rows(self.dir / rundir.METRICS)
        return {row["step"]: row["loss"] for row in rows if "loss" in row}


def run(cfg: Config, *, console: Any = None, label: str = "", hooks: Sequence[Hook] = ()) -> RunResult:
    """Run one training job to its end, or to a signal.

    console: a rich console (None: silent). label: what its lines are called. hooks: called with each row of
    metrics.jsonl, on the main rank. Under torchrun every rank calls this; only the main one prints and writes.

    Raises TrainError and the errors of the rooms below, each with its cure. What is raised on one rank alone ends that
    process; torchrun then ends the others.
    """
    cfg = beside.settled(cfg)
    world = parallel.setup(cfg.run.threads)
    display = Display(console if world.is_main else None, label, cfg.train.steps)
    if cfg.train.router_aux_loss_coef or cfg.lora is not None or kinds_of(cfg):
        # Refused before there is a run directory, which another value could not enter.
        begins = cfg.run.resume in ("never", "auto") and not checkpoint.steps(Path(cfg.run.dir) / rundir.CHECKPOINTS)
        beside.adapter_sizes(cfg if begins else beside.begun(cfg), *planning.model_of(cfg))
    with Claim() as claim:
        start = rundir.enter(cfg, world, display.say, claim)
        if start.result is not None:
            display.say(f"{start.directory} has finished already ({start.result['steps']} steps); nothing to do")
            result = _from_json(start.directory, start.result)
        else:
            with StopWish() as wish:
                result = _Loop(cfg, world, start, display, wish, hooks).run()
    world.close()
    return result


class _Loop:
    """The state of a run in progress."""

    def __init__(
        self,
        cfg: Config,
        world: parallel.World,
        start: rundir.Start,
        display: Display,
        wish: StopWish,
        hooks: Sequence[Hook],
    ) -> None:
        self.cfg, self.world, self.display, self.wish, self.hooks = cfg, world, display, wish, hooks
        self.job: Job = assembly.build(cfg, world, start, display.say)
        rundir.settle(start, world)
        self.first = self.job.progress.step + 1
        self.proof = fp8.Proof(self.job.plan)
        self.empty = 0  # steps in a row without a token that has a loss
        self.log = MetricsLog(start.directory, cfg.run.tensorboard, self.first) if world.is_main else None
        rows = rundir.read_rows(start.directory / rundir.METRICS)
        self.last: dict[str, Any] = rows[-1] if rows else {}
        self.eval: Mapping[str, Any] | None = next((r["eval"] for r in reversed(rows) if "eval" in r), None)
        self.memory: Mapping[str, int] = next((r["memory"] for r in reversed(rows) if "memory" in r), {})
        self.health: Mapping[str, float] = self.job.progress.health
        self.gain = rundir.read_json(start.directory / rundir.GAIN)
        self.fp8 = any(row.fp8 for row in self.job.plan.rows)

    def run(self) -> RunResult:
        steps, progress = self.cfg.train.steps, self.job.progress
        if progress.step:
            self.display.say(f"continuing after step {progress.step} of {steps}")
        if self.cfg.run.gain_steps and not self.fp8:
            self.display.say("run.gain_steps: nothing of this run is in FP8, so there is no gain to measure")
        self._catch_up()
        self.display.begin(progress.step)
        stopped = False
        try:
            while progress.step < steps and not stopped:
                # Stopped at the last step: finished, unless its evaluation is still due (`_catch_up` makes it).
                stopped = self._one(progress.step + 1) and (progress.step < steps or self._eval_due(steps))
        finally:
            self.display.end()
            self.job.loader.close()
            if self.log is not None:
                self.log.close()
        return self._conclude(stopped)

    def _one(self, step: int) -> bool:
        """Train one step and write what is due; True if the run was asked to stop."""
        cfg, job, progress = self.cfg, self.job, self.job.progress
        began = time.perf_counter()
        batches = next(job.loader)
        look = self._look(step, batches)
        settings = cfg.train
        lr = lr_at(step, schedule=settings.schedule, lr=settings.lr, steps=settings.steps, warmup=settings.warmup,
                   min_lr=settings.min_lr)  # fmt: skip
        result = job.stepper.run(batches, lr, look)
        seconds = time.perf_counter() - began
        progress.step, progress.rows = step, job.loader.rows
        progress.tokens += result.tokens
        progress.seconds += seconds
        self._prove(result, batches)
        self._count(result)
        row: dict[str, Any] = {
            "step": step, "loss": result.loss, "tokens": result.tokens, "loss_tokens": result.loss_tokens,
            "tokens_per_s": result.tokens / seconds, "grad_norm": result.grad_norm, "lr": lr,
        }  # fmt: skip
        if not result.applied:
            row["skipped"] = True
        if not result.loss_tokens:
            row["empty"] = True  # its loss of 0 is that of no token
        if result.aux_loss is not None:
            row["aux_loss"] = result.aux_loss
        if result.experts is not None:
            row |= result.experts
        if result.memory is not None:
            row["memory"] = self.memory = result.memory
            if job.base is not None and job.base.taken["weights"]:
                row["base"] = job.base.taken
        if result.health is not None:
            row["health"] = result.health.table()
            self.health = progress.health = result.health.summary()
        if result.zeroed is not None:
            row["zeroed_v"] = result.zeroed
        stop = self._asked_to_stop()
        window = gain.due(cfg.run.gain_steps, step, self.first, settings.steps, self.gain, self.fp8)
        if self._eval_due(step) and not stop:
            row["eval"] = self._evaluate()
        self._write(row, step, stop or window)
        self._give_up(batches)
        self._refuse_nothing(result)
        save = stop or step == settings.steps or (cfg.run.save_every and step % cfg.run.save_every == 0)
        if save:
            self._save()
        if window and not stop:  # last, so that whatever becomes of it costs nothing of the step
            self._measure_gain(batches, step)
            if self._asked_to_stop():
                stop = True
                if not save:
                    self._save()
        return stop

    def _asked_to_stop(self) -> bool:
        """Whether a signal reached any rank. A collective."""
        return self.world.any(self.wish.signal is not None)

    def _save(self) -> None:
        if self.log is not None:
            self.log.sync()
        assembly.save(self.job)

    def _look(self, step: int, batches: Batches) -> Look:
        every = self.cfg.run.health_every
        reached = {c for c, n in self.job.stepper.forwards(batches).items() if n}
        health = self.fp8 and every > 0 and (step % every == 0 or step == self.cfg.train.steps)
        memory = step == self.first or (every > 1 and step % every == 1)
        if health and memory:
            # Health keeps every x in high precision, which would count as activations. A run without a memory figure
            # takes that one first (with health_every: 1, at step 1), any other has time for it at a later step.
            health, memory = bool(self.memory), not self.memory
        gemms = step == self.first or bool(self.proof.pending & reached)
        return Look(gemms=gemms, health=health, memory=memory, experts=self._logged(step))

    def _prove(self, result: StepResult, batches: Batches) -> None:
        """Check the counted GEMMs against the plan; a mismatch stops the run, and proof.json says which."""
        if result.counts is None:
            return
        try:
            self.proof.observe(result.counts, self.job.stepper.forwards(batches))
        finally:
            if self.world.is_main:
                rundir.write_json(self.job.directory / "proof.json", finite(self.proof.report()))

    def _count(self, result: StepResult) -> None:
        """Count and tell a step that was not applied."""
        progress = self.job.progress
        if result.applied:
            progress.in_a_row = 0
            return
        progress.skipped += 1
        progress.in_a_row += 1
        self.display.say(
            f"step {progress.step} skipped: loss {result.loss}, gradient norm {result.grad_norm}; the weights stay as "
            "they are"
        )

    def _give_up(self, batches: Batches) -> None:
        """After `PATIENCE` steps in a row that were not applied (or all there are), find the layer and stop."""
        progress, stepper = self.job.progress, self.job.stepper
        if progress.in_a_row < min(PATIENCE, self.cfg.train.steps):
            return
        with compiled.step(self.cfg.train.compile, eager=True):  # its hooks look inside blocks
            where = first_source(self.job.model, lambda: [stepper.backward(batch, 1.0) for batch in batches])
        raise TrainError(
            f"{progress.in_a_row} steps in a row, up to step {progress.step}, had a loss or a gradient that is not "
            f"finite: {where}. Lower train.lr, look at the data of these steps, or keep that layer out of FP8 with a "
            "rule (recipe: off)"
        )

    def _refuse_nothing(self, result: StepResult) -> None:
        """A run whose steps hold no token with a loss trains nothing, and must not end as finished."""
        progress = self.job.progress
        self.empty = 0 if result.loss_tokens else self.empty + 1
        if self.empty == 1:
            self.display.say(f"step {progress.step} held no token with a loss")
        if self.empty < min(PATIENCE, self.cfg.train.steps):
            return
        left_out = ", ".join(f"{count} {what}" for what, count in self.job.loader.report.counts.items()) or "none"
        raise TrainError(
            f"{self.empty} steps in a row, up to step {progress.step}, held no token with a loss (rows left out so "
            f"far: {left_out}; {self.job.directory / 'skipped.jsonl'} lists them with the reason). Raise "
            "train.seq_length, lower data.max_pixels or data.min_pixels, or mend the rows"
        )

    def _measure_gain(self, batches: Batches, step: int) -> None:
        """Time this step's batches in FP8 and in high precision; nothing of the run changes. gain.json keeps it, or
        why there is nothing to keep; the step's row gets it too. A run that is asked to stop leaves the window, and
        takes one when it goes on."""
        steps = self.cfg.run.gain_steps
        self.display.say(
            f"gain window: the micro-batches of step {step} again, {steps} times in FP8 and {steps} times in high "
            "precision, after a turn to warm up; nothing of the run changes (run.gain_steps)"
        )
        try:
            found = gain.measure(self.job.stepper, batches, steps, step, self._asked_to_stop)
            row, told = found.row(), found.sentence(self.world.device.type == "cpu")
        except gain.Left:
            self.display.say("left the gain window, as the run was asked to stop; it is taken when the run goes on")
            return
        except gain.NoRoom as error:
            row, told = {"failed": str(error), "step": step}, f"warning: {error}; the run goes on without the figure"
        self.display.say(told)
        self.gain = row
        if self.world.is_main:
            rundir.write_json(self.job.directory / rundir.GAIN, finite(row))
        if "failed" not in row:
            self.last = {**self.last, "gain": row}
            if self.log is not None:
                self.log.amend(self.last, "gain")

    def _eval_due(self, step: int) -> bool:
        every = self.cfg.run.eval_every
        return self.job.evalset is not None and (step == self.cfg.train.steps or (every > 0 and step % every == 0))

    def _evaluate(self) -> Mapping[str, Any]:
        assert self.job.evalset is not None
        self.eval = evaluate(self.job.model, self.job.evalset, self.job.stepper.forward, self.world)
        return self.eval

    def _catch_up(self) -> None:
        """Evaluate after the step of the checkpoint where that was due and a signal or a kill came before."""
        step = self.job.progress.step
        seen = self.last.get("step") == step and "eval" in self.last
        if not step or not self._eval_due(step) or not self.world.any(self.world.is_main and not seen):
            return
        row = {**(self.last if self.last.get("step") == step else {"step": step}), "eval": self._evaluate()}
        if self.log is not None:
            self.log.close()
            rundir.truncate_metrics(self.job.directory / rundir.METRICS, step - 1)
            self.log = MetricsLog(self.job.directory, self.cfg.run.tensorboard, self.first)
            self.log.write(row)
        self.last = row

    def _write(self, row: dict[str, Any], step: int, stop: bool) -> None:
        # The row of a step that the run stops at is one to continue from: its evaluation may be added later.
        wanted = stop or self._logged(step)
        if self.log is not None and (wanted or {"eval", "health", "memory", "skipped"} & row.keys()):
            self.log.write(row, self.health if "health" in row else None)
            for hook in self.hooks:
                hook(row)
        self.last = row
        self.display.step(row)

    def _logged(self, step: int) -> bool:
        """Whether the step's row is written in any case."""
        return step % self.cfg.run.log_every == 0 or step in (self.first, self.cfg.train.steps)

    def _conclude(self, stopped: bool) -> RunResult:
        job, progress = self.job, self.job.progress
        base = None if stopped or job.base is None else self._hold_the_base(job.base)
        if not stopped and self.cfg.run.hf:
            self._write_adapter() if self.cfg.lora is not None else self._write_hf()
        result = RunResult(
            dir=job.directory,
            status="stopped" if stopped else "finished",
            steps=progress.step,
            final={k: v for k, v in self.last.items() if k not in _APART},
            eval=self.eval,
            health=self.health,
            memory=self.memory,
            gain=self.gain,
            base=base,
            skipped=progress.skipped,
            seconds=progress.seconds,
            signal=self.wish.signal if stopped else None,
        )
        if stopped:
            self.display.say(f"stopped after step {progress.step}; saved. Continue with run.resume=auto")
        elif self.world.is_main:
            rundir.write_json(job.directory / rundir.RESULT, finite({**asdict(result), "dir": str(job.directory)}))
        if self.proof.pending:
            self.display.say(f"no step reached {', '.join(sorted(self.proof.pending))}: its FP8 is planned, not proven")
        left_out = job.loader.report.counts
        if left_out:
            listed = ", ".join(f"{count} {action}" for action, count in sorted(left_out.items()))
            self.display.say(f"rows: {listed}; see {job.directory / 'skipped.jsonl'}")
        return result

    def _hold_the_base(self, base: beside.Base) -> Mapping[str, Any]:
        """The frozen weights after training against those before: base.json, and what of it the result says."""
        job = self.job
        changed = base.changed(job.model, self.world)
        said = {"weights": len(base.whole), "unchanged": changed is None, "fp8": dict(base.taken)}
        if self.world.is_main:
            rundir.write_json(job.directory / beside.FILE, {**said, "changed": changed, "sha256": base.whole})
        if changed is not None:
            raise TrainError(
                f"the base is not what it was when training began: {changed} was written to, and frozen weights never "
                f"are. {job.directory / beside.FILE} has its fingerprints; no adapter is written, because it would "
                "belong to no base. Look for code that writes to the model's parameters (a hook, a callback)"
            )
        return said

    def _write_adapter(self) -> None:
        """adapter/: the trained adapters as PEFT's folder. Gathered from all ranks, written by the main one."""
        from octavo import adapters

        job, state = self.job, adapters.adapter_state(self.job.model)
        self.world.from_main(
            lambda: str(adapters.save(job.model, job.directory / "adapter", base=self.cfg.model.path, state=state))
        )

    def _write_hf(self) -> None:
        """hf/: the trained weights as a Hugging Face folder. Gathered from all ranks, written by the main one."""
        job, world = self.job, self.world
        weights = parallel.full_state_dict(job.model, world) if world.size > 1 else None
        if weights is None and job.base is not None:  # a component is frozen in FP8: its values, as it computed
            found = job.model.state_dict().items()
            weights = {name: w.dequantize() if fp8.is_frozen(w) else w for name, w in found}
        world.from_main(
            lambda: str(models.save_hf(job.model, self.cfg.model.path, job.directory / "hf", state_dict=weights))
        )


def _from_json(directory: Path, found: Mapping[str, Any]) -> RunResult:
    return RunResult(**{**found, "dir": directory})
