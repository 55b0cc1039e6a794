"""Ends a run early: on a signal, for a callback, after steps that are not finite or have no loss tokens."""

from __future__ import annotations

from contextlib import nullcontext

from octavo.data.skip_report import NOTED
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.step import compile
from octavo.train.step.nonfinite import first_source, refuse_weights

MAX_CONSECUTIVE = 10  # such steps in a row before the run ends


class StopOnRequest(Callback):
    """Saves and ends the run if between two steps a signal has reached any rank, or a callback wants to stop."""

    def after_step(self, run: Run, step: Step) -> None:
        run.stopping = run.stop_requested()
        step.wanted |= run.stopping  # the resumed run may add its evaluation to this row

    def end_step(self, run: Run, step: Step) -> None:
        run.stopping |= bool(run.users) and run.world.any(run.request.asked)  # requested in `evaluated` or `end_step`


class StopOnNonFinite(Callback):
    """Reports steps that were not applied, and stops the run if a weight is not finite, because no later step could be
    applied. After `MAX_CONSECUTIVE` such steps in a row (or all steps of the run) it finds the layer and stops. A run
    whose last step was not applied has not finished either, because no step has shown that its weights still work."""

    def after_step(self, run: Run, step: Step) -> None:
        result = step.result
        if result.overflow:
            scale = run.job.stepper.update.scale
            assert scale is not None
            run.say(
                f"step {step.number} skipped: gradients overflowed FP16 at a loss scale of {result.loss_scale:g}; the "
                f"next step uses {scale.value:g}"
            )
        elif not result.applied:
            run.say(
                f"step {step.number} skipped: loss {result.loss}, gradient norm {result.grad_norm}; the weights "
                "are unchanged"
            )

    def end_step(self, run: Run, step: Step) -> None:
        consecutive_skips, stepper = run.job.progress.consecutive_skips, run.job.stepper
        if consecutive_skips:
            refuse_weights(run.model, run.world, f"after step {step.number}")
        if consecutive_skips < min(MAX_CONSECUTIVE, run.cfg.train.total_steps):
            return

        def repeat() -> None:
            for batch in step.batches:
                stepper.backward(batch, 1.0)

        with compile.step(eager=True) if run.cfg.train.compile else nullcontext():  # hooks need modules
            where = first_source(run.model, repeat, run.world)
        raise TrainError(
            f"{consecutive_skips} steps in a row, up to step {step.number}, had a loss or a gradient that is not "
            f"finite: {where}. {_about_scale(run)}Lower train.lr, look at the data of these steps, or keep that layer "
            "out of FP8 with a rule (recipe: off)"
        )


def _about_scale(run: Run) -> str:
    """Advice if the run computes in FP16."""
    if (scale := run.job.stepper.update.scale) is None:
        return ""
    if not scale.moves and scale.value > 1:
        return f"Losses are multiplied by {scale.value:g} (train.loss_scale); lower it, or use dynamic. "
    why = "the loss scale is 1 already" if scale.value == 1 else "a loss scale does not change the forward"
    return f"FP16 has no values beyond 65504, and {why}: use train.precision: bf16. "


class StopWithoutLossTokens(Callback):
    """Ends a run whose steps have no loss tokens, because it trains nothing and must not count as finished. A run with
    rewards that has trained until all answers earn the same continues: it has reached its goal."""

    def begin(self, run: Run) -> None:
        self.told: set[str] = set()

    def end_step(self, run: Run, step: Step) -> None:
        report, progress = run.job.loader.report, run.job.progress
        for action in NOTED:
            if action not in self.told and (row := report.first.get(action)):
                self.told.add(action)
                why = action if run.cfg.run.encrypt else row["reason"]  # the reason may quote the row
                run.say(f"{row['file']}, row {row['row']}: {why}; it is used unchanged. All such rows are in "
                        f"{run_dir.skipped_path(run.cfg)}")  # fmt: skip
        if progress.empty == 1:
            run.say(f"step {step.number} had no loss tokens")
        enough = progress.last_loss_step > 0 and run.job.phase.exhausts
        if enough or progress.empty < min(MAX_CONSECUTIVE, run.cfg.train.total_steps):
            return
        gone = [f"{count} {what}" for what, count in report.counts.items() if what not in NOTED]
        raise TrainError(
            f"{progress.empty} steps in a row, up to step {step.number}, had no loss tokens (rows left out so "
            f"far: {', '.join(gone) or 'none'}; {run_dir.skipped_path(run.cfg)} lists them with the reason). "
            f"{run.job.phase.starved}"
        )

    def end(self, run: Run, result: RunResult) -> None:
        if left_out := run.job.loader.report.counts:
            listed = ", ".join(f"{count} {action}" for action, count in sorted(left_out.items()))
            run.say(f"rows: {listed}; see {run_dir.skipped_path(run.cfg)}")
