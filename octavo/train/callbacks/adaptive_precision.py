"""Callbacks that change the plan between steps: by rules with spans of steps, and by measurements (`fp8.adapt`)."""

from __future__ import annotations

import json
import os

from octavo import fp8
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.run_dir import run_dir
from octavo.train.step.step import Batches


class ApplyPrecisionSchedule(Callback):
    """Switches the model to the plan of each step, and adds the plan's share of linear FLOPs in FP8 to the row."""

    def begin(self, run: Run) -> None:
        if run.world.is_main:
            run_dir.update_plan(run.directory, run.job.plan)

    def before_step(self, run: Run, number: int, batches: Batches) -> None:
        plan = run.job.precision_schedule.plan_at(number)
        if plan is not run.job.plan:
            changed = switch_plan(run, plan)
            run.say(f"step {number}: rules switch {changed} layers; {100 * plan.share:.1f} % of linear FLOPs in FP8")

    def after_step(self, run: Run, step: Step) -> None:
        step.row["fp8_share"] = run.job.plan.share


class AdaptPrecision(Callback):
    """Measures the GEMMs of every `adapt.every`-th step, and changes their precision accordingly. Each decision is
    written as a line of adapt.jsonl. A skipped step, which measured overflowed values, and a step without loss tokens,
    whose gradients are zero, lead to no decision."""

    def before_step(self, run: Run, number: int, batches: Batches) -> None:
        run.job.stepper.recipe_trials = run.job.precision_schedule.recipe_trials(number)

    def after_step(self, run: Run, step: Step) -> None:
        trials, run.job.stepper.recipe_trials = run.job.stepper.recipe_trials, None
        if trials is None or not step.result.applied or not step.result.loss_tokens:
            return
        run.world.set_phase(f"step {step.number}, deciding on the precision of its GEMMs")
        schedule = run.job.precision_schedule
        decisions = schedule.decide(step.number, trials, run.world)
        for decision in decisions:
            run.say(f"step {step.number}: {decision}")
        if decisions and run.world.is_main:
            with (run.directory / run_dir.ADAPT).open("a") as file:
                file.write("".join(json.dumps(decision.to_json()) + "\n" for decision in decisions))
                file.flush()
                os.fsync(file.fileno())
        plan = schedule.plan_at(step.number)
        if plan is not run.job.plan:
            switch_plan(run, plan)


def switch_plan(run: Run, plan: fp8.Plan) -> int:
    """Switch the model to `plan` for the following steps. Returns the number of changed layers."""
    changed = fp8.switch_plan(run.model, run.job.plan, plan)
    run.job.plan = plan
    if run.world.is_main:
        run_dir.update_plan(run.directory, plan)
    return len(changed)
