"""Changes a run's plan between its steps: rules with spans of steps, and measurements of GEMMs (`fp8.adapt`)."""

from __future__ import annotations

import json
import os

from octavo import fp8
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.run_dir import run_dir
from octavo.train.step.step import Batches


class Spans(Callback):
    """Switches to each step's plan. Rows of metrics have its share of linear FLOPs in FP8."""

    def begin(self, run: Run) -> None:
        if run.world.is_main:
            run_dir.update_plan(run.directory, run.job.plan)

    def before_step(self, run: Run, number: int, batches: Batches) -> None:
        plan = run.job.course.at(number)
        if plan is not run.job.plan:
            changed = turn(run, plan)
            run.say(f"step {number}: rules switch {changed} layers; {100 * plan.share:.1f} % of linear FLOPs in FP8")

    def after_step(self, run: Run, step: Step) -> None:
        step.row["fp8_share"] = run.job.plan.share


class Adapting(Callback):
    """Measures the GEMMs of every `adapt.every`-th step, and changes their precision accordingly. adapt.jsonl has a
    line for each decision. No decision follows from a skipped step, which measured overflown values, or from a step
    without loss tokens, whose gradients are zeros."""

    def before_step(self, run: Run, number: int, batches: Batches) -> None:
        run.job.stepper.judge = run.job.course.judge(number)

    def after_step(self, run: Run, step: Step) -> None:
        judge, run.job.stepper.judge = run.job.stepper.judge, None
        if judge is None or not step.result.applied or not step.result.loss_tokens:
            return
        run.world.set_phase(f"step {step.number}, deciding on the precision of its GEMMs")
        course = run.job.course
        decisions = course.decide(step.number, judge, run.world)
        for decision in decisions:
            run.say(f"step {step.number}: {decision}")
        if decisions and run.world.is_main:
            with (run.directory / run_dir.ADAPT).open("a") as file:
                file.write("".join(json.dumps(decision.to_json()) + "\n" for decision in decisions))
                file.flush()
                os.fsync(file.fileno())
        plan = course.at(step.number)
        if plan is not run.job.plan:
            turn(run, plan)


def turn(run: Run, plan: fp8.Plan) -> int:
    """Let the model compute by another plan from here on; how many layers changed."""
    changed = fp8.switch_plan(run.model, run.job.plan, plan)
    run.job.plan = plan
    if run.world.is_main:
        run_dir.update_plan(run.directory, plan)
    return len(changed)
