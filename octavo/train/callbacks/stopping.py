"""Callbacks that end a run early: on a request, after steps that are not finite, or after steps without loss tokens."""

from __future__ import annotations

from contextlib import nullcontext

from octavo.data.errors import row_place
from octavo.data.skip_report import NOTED
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.step import compile
from octavo.train.step.nonfinite import check_weights_finite, find_first_source

MAX_CONSECUTIVE = 10  # consecutive steps without progress after which the run ends


class StopOnRequest(Callback):
    """Saves and ends the run if a signal has reached any rank, or a callback has requested a stop."""

    def after_step(self, run: Run, step: Step) -> None:
        run.stopping = run.stop_requested()
        step.wanted |= run.stopping  # the resumed run may add its evaluation to this row

    def end_step(self, run: Run, step: Step) -> None:
        run.stopping |= bool(run.user_callbacks) and run.world.any(
            run.request.asked
        )  # requested in `evaluated` or `end_step`


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
            check_weights_finite(run.model, run.world, f"after step {step.number}")
        if consecutive_skips < min(MAX_CONSECUTIVE, run.cfg.train.total_steps):
            return

        def repeat() -> None:
            for batch in step.batches:
                stepper.backward(batch, 1.0)

        with compile.step(eager=True) if run.cfg.train.compile else nullcontext():  # hooks need modules
            where = find_first_source(run.model, repeat, run.world)
        raise TrainError(
            f"{consecutive_skips} steps in a row, up to step {step.number}, had a loss or a gradient that is not "
            f"finite: {where}. {_about_scale(run)}Lower train.lr, look at the data of these steps, or keep that layer "
            "out of FP8 with a rule (recipe: off)"
        )


def _about_scale(run: Run) -> str:
    """Return advice on the loss scale, or an empty string if the run does not compute in FP16."""
    if (scale := run.job.stepper.update.scale) is None:
        return ""
    if not scale.is_dynamic and scale.value > 1:
        return f"Losses are multiplied by {scale.value:g} (train.loss_scale); lower it, or use dynamic. "
    why = "the loss scale is 1 already" if scale.value == 1 else "a loss scale does not change the forward"
    return f"FP16 has no values beyond 65504, and {why}: use train.precision: bf16. "


class StopWithoutLossTokens(Callback):
    """Ends a run whose steps have no loss tokens, because it trains nothing and must not count as finished. A run with
    rewards that has trained until all answers have equal rewards continues, because it has reached its goal."""

    def begin(self, run: Run) -> None:
        self.logged_actions: set[str] = set()

    def end_step(self, run: Run, step: Step) -> None:
        report, progress = run.job.loader.report, run.job.progress
        for action in NOTED:
            if action not in self.logged_actions and (row := report.first.get(action)):
                self.logged_actions.add(action)
                why = action if run.cfg.run.encrypt else row["reason"]  # the reason may quote the row
                run.say(f"{row_place(row['file'], row['row'])}: {why}; it is used unchanged. All such rows are in "
                        f"{run_dir.skipped_path(run.cfg)}")  # fmt: skip
        if progress.empty == 1:
            run.say(f"step {step.number} had no loss tokens")
        has_reached_goal = progress.last_loss_step > 0 and run.job.phase.can_exhaust_data
        if has_reached_goal or progress.empty < min(MAX_CONSECUTIVE, run.cfg.train.total_steps):
            return
        skipped_rows = [f"{count} {action}" for action, count in report.counts.items() if action not in NOTED]
        raise TrainError(
            f"{progress.empty} steps in a row, up to step {step.number}, had no loss tokens (rows left out so "
            f"far: {', '.join(skipped_rows) or 'none'}; {run_dir.skipped_path(run.cfg)} lists them with the reason). "
            f"{run.job.phase.no_loss_advice}"
        )

    def end(self, run: Run, result: RunResult) -> None:
        held_out = run.job.evalset
        reports = {"rows": run.job.loader.report, "held-out rows": held_out.report if held_out is not None else None}
        for rows, report in reports.items():
            if report is not None and report.counts:
                listed = ", ".join(f"{count} {action}" for action, count in sorted(report.counts.items()))
                run.say(f"{rows}: {listed}; see {run_dir.skipped_path(run.cfg)}")
