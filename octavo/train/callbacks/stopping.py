"""What ends a run early: a signal, a callback, steps that are not finite or without a token to learn from."""

from __future__ import annotations

from contextlib import nullcontext

from octavo.data.skip_report import NOTED
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.step import compile
from octavo.train.step.nonfinite import first_source, refuse_weights

PATIENCE = 10  # such steps in a row before the run gives up


class Stopping(Callback):
    """Asks between steps whether a signal reached any rank, or a callback asks: such a run saves and leaves."""

    def after_step(self, run: Run, step: Step) -> None:
        run.stopping = run.asked_to_stop()
        step.wanted |= run.stopping  # a row to continue from: its evaluation may be added later

    def end_step(self, run: Run, step: Step) -> None:
        run.stopping |= bool(run.users) and run.world.any(run.request.asked)  # in `evaluated` or `end_step`


class NotFinite(Callback):
    """Says that a step was not applied, and stops the run where a weight is not finite: no later step could be applied.
    After `PATIENCE` in a row (or all there are) it finds the layer and stops. A run whose last step was not applied has
    not finished either: whether its weights still compute, no step has shown."""

    def after_step(self, run: Run, step: Step) -> None:
        result = step.result
        if result.overflow:
            scale = run.job.stepper.update.scale
            assert scale is not None
            run.say(
                f"step {step.number} skipped: gradients overflowed FP16 at a loss scale of {result.loss_scale:g}; the "
                f"next step takes {scale.value:g}"
            )
        elif not result.applied:
            run.say(
                f"step {step.number} skipped: loss {result.loss}, gradient norm {result.grad_norm}; the "
                "weights stay as they are"
            )

    def end_step(self, run: Run, step: Step) -> None:
        in_a_row, stepper = run.job.progress.in_a_row, run.job.stepper
        if in_a_row:
            refuse_weights(run.model, run.world, f"after step {step.number}")
        if in_a_row < min(PATIENCE, run.total_steps):
            return

        def repeat() -> None:
            for batch in step.batches:
                stepper.backward(batch, 1.0)

        with compile.step(eager=True) if run.cfg.train.compile else nullcontext():  # its hooks look inside blocks
            where = first_source(run.model, repeat, run.world)
        raise TrainError(
            f"{in_a_row} steps in a row, up to step {step.number}, had a loss or a gradient that is not finite: "
            f"{where}. {_about_scale(run)}Lower train.lr, look at the data of these steps, or keep that layer out of "
            "FP8 with a rule (recipe: off)"
        )


def _about_scale(run: Run) -> str:
    """What FP16 has to do with it."""
    if (scale := run.job.stepper.update.scale) is None:
        return ""
    if not scale.moves and scale.value > 1:
        return f"Losses are multiplied by {scale.value:g} (train.loss_scale); lower it, or use dynamic. "
    why = "the loss is not scaled up any more" if scale.value == 1 else "no loss scale changes what a forward computes"
    return f"FP16 holds nothing beyond 65504, and {why}: use train.precision: bf16. "


class NothingToLearn(Callback):
    """A run whose steps hold no token with a loss trains nothing, and must not end as finished. One that has learnt by
    rewards until all answers earn the same goes on: its weights are what was asked for."""

    def begin(self, run: Run) -> None:
        self.told: set[str] = set()

    def end_step(self, run: Run, step: Step) -> None:
        report, progress = run.job.loader.report, run.job.progress
        for action in NOTED:
            if action not in self.told and (row := report.first.get(action)):
                self.told.add(action)
                why = action if run.cfg.run.encrypt else row["reason"]  # which may quote the row
                run.say(f"{row['file']}, row {row['row']}: {why}; it is trained on as it is. All such rows are in "
                        f"{run_dir.skipped(run.cfg)}")  # fmt: skip
        if progress.empty == 1:
            run.say(f"step {step.number} held no token with a loss")
        enough = progress.learnt > 0 and run.job.phase.exhausts
        if enough or progress.empty < min(PATIENCE, run.total_steps):
            return
        gone = [f"{count} {what}" for what, count in report.counts.items() if what not in NOTED]
        raise TrainError(
            f"{progress.empty} steps in a row, up to step {step.number}, held no token with a loss (rows left out so "
            f"far: {', '.join(gone) or 'none'}; {run_dir.skipped(run.cfg)} lists them with the reason). "
            f"{run.job.phase.starved}"
        )

    def end(self, run: Run, result: RunResult) -> None:
        if left_out := run.job.loader.report.counts:
            listed = ", ".join(f"{count} {action}" for action, count in sorted(left_out.items()))
            run.say(f"rows: {listed}; see {run_dir.skipped(run.cfg)}")
