"""The gain window: what FP8 brings in this run, measured beside high precision.

Once, when the run is warm, the micro-batches of a step that is already done are run again, forward and backward, in
FP8 and with the same layers in high precision, by turns and in both orders. Gradients are thrown away and no update is
made: weights, optimizer state, data position, amax histories and random generators are as before, so that the losses
of the run are the same bits with the window and without. Codes of weights are cast anew in each pass, as in each step.

Not in it: the optimizer's step, clipping and data, which are the same in both. It needs the memory of a step in high
precision; a run of one process that has not got it goes on without the figure.
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
from octavo.base.safe_read import finite
from octavo.fp8.observe import uncounted
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.step.step import Batches, Stepper

WARM = 2  # steps of a session before the window
Clock = Callable[[], float]


@dataclass(frozen=True)
class Gain:
    """`fp8_s` and `high_s`: median seconds of a step's forwards and backwards in FP8 and in high precision, the
    slowest rank's. `gain`: by how much FP8 is faster, 0.25 for 1.25 times as fast, negative where it lost. `steps` of
    each were timed, after step `step`, each of `tokens` tokens on this rank."""

    fp8_s: float
    high_s: float
    gain: float
    steps: int
    step: int
    tokens: int

    def sentence(self, emulated: bool = False) -> str:
        """The outcome for people; a warning where FP8 lost, and without a GPU that it is emulated there."""
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


class GainWindow(Callback):
    """Takes the window once in a run (`run.gain_steps`), when a session is warm; gain.json keeps it, or why there is
    nothing to keep, and the step's row gets it too. A run that is asked to stop takes one when it goes on."""

    def begin(self, run: Run) -> None:
        if run.cfg.run.gain_steps and not run.job.course.schedule.parts:
            run.say("run.gain_steps: nothing of this run is in FP8, so there is no gain to measure")

    def after_step(self, run: Run, step: Step) -> None:
        last = min(run.first + WARM, run.total_steps)  # or where the session ends; later, if FP8 begins later
        self.due = bool(run.cfg.run.gain_steps) and run.gain is None and run.fp8 and step.number >= last
        step.wanted |= self.due

    def end_step(self, run: Run, step: Step) -> None:
        if not self.due or run.stopping:
            return
        self._measure(run, step)  # last, so that whatever becomes of it costs nothing of the step
        if run.asked_to_stop():
            run.stopping = True
            run.save()

    def _measure(self, run: Run, step: Step) -> None:
        steps = run.cfg.run.gain_steps
        run.say(
            f"gain window: the micro-batches of step {step.number} again, {steps} times in FP8 and {steps} times in "
            "high precision, after a turn to warm up; nothing of the run changes (run.gain_steps)"
        )
        try:
            measured = measure(run.job.stepper, step.batches, steps, step.number, run.asked_to_stop)
            row: dict[str, Any] = asdict(measured)
            message = measured.sentence(emulated=not accelerator.is_gpu(run.world.device))
        except Left:
            run.say("left the gain window, as the run was asked to stop; it is taken when the run goes on")
            return
        except NoRoom as error:
            row = {"failed": str(error), "step": step.number}
            message = f"warning: {error}; the run goes on without the figure"
        run.say(message)
        run.gain = row
        if run.world.is_main:
            run_dir.write_json(run.directory / run_dir.GAIN, finite(row))
        if "failed" not in row:
            run.row = {**run.row, "gain": row}
            if run.log is not None:
                run.log.amend(run.row, "gain")


class NoRoom(Exception):
    """The window ran out of memory; says where."""


class Left(Exception):
    """The run was asked to stop inside the window."""


def measure(
    stepper: Stepper,
    batches: Batches,
    steps: int,
    step: int,
    stop: Callable[[], bool] = lambda: False,
    clock: Clock = time.perf_counter,
) -> Gain:
    """Time `steps` steps each on `batches` of this rank. A collective; nothing of the run is changed.

    `stop` is asked before each pass, on all ranks alike, and ends the window. `clock` is a stand-in for tests.

    Raises Left where `stop` said so, NoRoom where memory runs out in a run of one process. TrainError among several,
    since a rank cannot leave the collectives of a backward alone.
    """
    world = stepper.world
    generators = checkpoint.rng.collect(world.rank)
    histories = fp8.scaling_state(stepper.model)
    times: dict[str, list[float]] = {"fp8": [], "high": []}
    full = ""
    try:
        for turn in range(-1, steps):  # the first turn warms both up
            for kind in ("fp8", "high") if turn % 2 else ("high", "fp8"):
                if stop():
                    raise Left
                spent = _once(stepper, batches, kind == "high", clock)
                if turn >= 0:
                    times[kind].append(spent)
    except torch.OutOfMemoryError as error:
        named = {"fp8": "FP8", "high": "high precision"}[kind]
        full = f"the gain window ran out of memory in {named} ({str(error).strip().splitlines()[0]})"
        if world.size > 1:
            raise TrainError(f"{full}. Continue with run.resume=auto run.gain_steps=0, or lower micro_batch") from error
    finally:
        stepper.optimizer.zero_grad(set_to_none=True)
        if histories:
            fp8.load_scaling_state(stepper.model, histories)
        fp8.invalidate(stepper.model)
        checkpoint.rng.restore(generators, world.rank)
    if full:  # raised here, where the error and with it the frames that hold a half-done graph are gone
        accelerator.empty_cache(world.device)
        raise NoRoom(full)
    mine = torch.tensor([statistics.median(times["fp8"]), statistics.median(times["high"])], dtype=torch.float64)
    low, high = world.all_reduce_max(mine).tolist()
    tokens = sum(batch["meta"].tokens for batch in batches)
    return Gain(low, high, high / low - 1, steps, step, tokens)


def _once(stepper: Stepper, batches: Batches, high: bool, clock: Clock) -> float:
    """Seconds of one step's forwards and backwards."""
    device = stepper.world.device
    fp8.invalidate(stepper.model)
    accelerator.synchronize(device)
    began = clock()
    with uncounted(), fp8.high_precision(stepper.model) if high else nullcontext():
        _run(stepper, batches)
    accelerator.synchronize(device)
    spent = clock() - began
    stepper.optimizer.zero_grad(set_to_none=True)
    return spent


def _run(stepper: Stepper, batches: Batches) -> None:
    tokens = max(sum(batch["meta"].tokens for batch in batches), 1)
    for batch in batches:
        stepper.backward(batch, 1.0, batch["meta"].tokens / tokens)
