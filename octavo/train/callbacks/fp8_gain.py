"""The gain window: the speed of FP8 in this run, compared with high precision.

Once, after warm-up, the micro-batches of a finished step run again, forward and backward, in FP8 and with the same
layers in high precision, alternately and in both orders. Gradients are discarded and nothing is updated: weights,
optimizer state, data position, amax histories and random generators are restored, so the losses of the run are
bit-identical with and without the window. Each pass casts the weights again, as each step does.

The optimizer step, clipping and data loading are not timed; they are the same in both. The window needs the memory of a
step in high precision; a run of one process without that memory continues without the measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from octavo import checkpoint, fp8
from octavo.base import accelerator
from octavo.base.safe_read import replace_nonfinite
from octavo.fp8.observe import uncounted
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.step.step import Batches, Stepper

WARMUP_STEPS = 2  # steps of a session before the gain window
Clock = Callable[[], float]


@dataclass(frozen=True)
class Gain:
    """The result of the measurement.

    fp8_s, high_s  median seconds of a step's forwards and backwards in FP8 and in high precision, on the slowest rank
    gain           high_s / fp8_s - 1: 0.25 means 1.25 times as fast; negative if FP8 is slower
    steps          number of timed steps in each precision
    step           step after which it was measured
    tokens         tokens of a timed step on this rank
    """

    fp8_s: float
    high_s: float
    gain: float
    steps: int
    step: int
    tokens: int

    def sentence(self, emulated: bool = False) -> str:
        """Return the result as a sentence, or as a warning if FP8 is slower. `emulated`: FP8 runs without a GPU."""
        figures = (
            f"forward and backward took {1e3 * self.fp8_s:.4g} ms in FP8 and {1e3 * self.high_s:.4g} ms in high "
            f"precision (gain {100 * self.gain:+.1f} %, {self.steps} steps of each)"
        )
        if self.gain > 0:
            return figures
        if emulated:
            return (
                f"warning: FP8 is slower here: {figures}. Without a GPU it is emulated, to check a run and not for "
                "speed: this says nothing about a GPU"
            )
        return (
            f"warning: FP8 is slower here: {figures}. Let recipe: auto plan by measurement (octavo plan FILE --measure "
            "shows why), raise train.micro_batch, or use recipe: off"
        )


class SpeedupMeasurement(Callback):
    """Measures once in a run (`run.gain_steps`), after the warm-up of a session. The result is written to gain.json and
    to the step's row; if the measurement fails, gain.json has the reason. A run that stops in the window repeats the
    measurement after it is resumed."""

    def begin(self, run: Run) -> None:
        if run.cfg.run.gain_steps and not run.job.precision_schedule.schedule.parts:
            run.say("run.gain_steps: nothing of this run is in FP8, so there is no gain to measure")

    def after_step(self, run: Run, step: Step) -> None:
        last = min(run.first + WARMUP_STEPS, run.cfg.train.total_steps)  # a later step if FP8 starts later
        self.due = bool(run.cfg.run.gain_steps) and run.gain is None and run.fp8 and step.number >= last
        step.wanted |= self.due

    def end_step(self, run: Run, step: Step) -> None:
        if not self.due or run.stopping:
            return
        self._measure(run, step)  # last, so that its failure does not affect the step
        if run.stop_requested():
            run.stopping = True
            run.save()

    def _measure(self, run: Run, step: Step) -> None:
        steps = run.cfg.run.gain_steps
        run.say(
            f"gain window: running the micro-batches of step {step.number} again, {steps} times in FP8 and {steps} "
            "times in high precision, after one warm-up; the run is not affected (run.gain_steps)"
        )
        try:
            measured = measure(run.job.stepper, step.batches, steps, step.number, run.stop_requested)
            row: dict[str, Any] = asdict(measured)
            message = measured.sentence(emulated=not accelerator.is_gpu(run.world.device))
        except SpeedupMeasurementStopped:
            run.say("left the gain window because the run is stopping; it is repeated when the run continues")
            return
        except SpeedupMeasurementOutOfMemory as error:
            row = {"failed": str(error), "step": step.number}
            message = f"warning: {error}; the run continues without the measurement"
        run.say(message)
        run.gain = row
        if run.world.is_main:
            run_dir.write_json(run.directory / run_dir.GAIN, replace_nonfinite(row))
        if "failed" not in row:
            run.row = {**run.row, "gain": row}
            if run.log is not None:
                run.log.amend(run.row, "gain")


class SpeedupMeasurementOutOfMemory(Exception):
    """The gain window ran out of memory; the message has the precision."""


class SpeedupMeasurementStopped(Exception):
    """A stop was requested during the gain window."""


def measure(
    stepper: Stepper,
    batches: Batches,
    steps: int,
    step: int,
    stop: Callable[[], bool] = lambda: False,
    clock: Clock = time.perf_counter,
) -> Gain:
    """Time `steps` steps in each precision on `batches` of this rank, and restore the state of the run. Collective
    call.

    `stop` is called before each pass, on all ranks, and ends the window if it returns True. `clock` is for tests.

    Raises Left on `stop`, and NoRoom if memory runs out in a run of one process. With several ranks it is a TrainError,
    because the other ranks still wait in the collectives of the backward.
    """
    world = stepper.world
    generators = checkpoint.rng.collect(world.rank)
    histories = fp8.scaling_state(stepper.model)
    times: dict[str, list[float]] = {"fp8": [], "high": []}
    out_of_memory = ""
    try:
        for turn in range(-1, steps):  # turn -1 is the warm-up of both
            for kind in ("fp8", "high") if turn % 2 else ("high", "fp8"):
                if stop():
                    raise SpeedupMeasurementStopped
                seconds = _time_step(stepper, batches, kind == "high", clock)
                if turn >= 0:
                    times[kind].append(seconds)
    except torch.OutOfMemoryError as error:
        precision = {"fp8": "FP8", "high": "high precision"}[kind]
        out_of_memory = f"the gain window ran out of memory in {precision} ({str(error).strip().splitlines()[0]})"
        if world.size > 1:
            raise TrainError(
                f"{out_of_memory}. Resume with run.resume=auto run.gain_steps=0, or lower micro_batch"
            ) from error
    finally:
        stepper.optimizer.zero_grad(set_to_none=True)
        if histories:
            fp8.load_scaling_state(stepper.model, histories)
        fp8.invalidate(stepper.model)
        checkpoint.rng.restore(generators, world.rank)
    if out_of_memory:  # raised outside the except block, after the frames that hold an incomplete graph are freed
        accelerator.empty_cache(world.device)
        raise SpeedupMeasurementOutOfMemory(out_of_memory)
    medians = torch.tensor([statistics.median(times["fp8"]), statistics.median(times["high"])], dtype=torch.float64)
    low, high = world.all_reduce_max(medians).tolist()
    tokens = sum(batch["meta"].tokens for batch in batches)
    return Gain(low, high, high / low - 1, steps, step, tokens)


def _time_step(stepper: Stepper, batches: Batches, high: bool, clock: Clock) -> float:
    """Return the seconds of one step's forwards and backwards."""
    device = stepper.world.device
    fp8.invalidate(stepper.model)
    accelerator.synchronize(device)
    began = clock()
    with uncounted(), fp8.high_precision(stepper.model) if high else nullcontext():
        _run_step(stepper, batches)
    accelerator.synchronize(device)
    seconds = clock() - began
    stepper.optimizer.zero_grad(set_to_none=True)
    return seconds


def _run_step(stepper: Stepper, batches: Batches) -> None:
    tokens = max(sum(batch["meta"].tokens for batch in batches), 1)
    for batch in batches:
        stepper.backward(batch, 1.0, batch["meta"].tokens / tokens)
