"""What a run proves and measures of itself: GEMMs against the plan, FP8 health, memory by kind, load of experts."""

from __future__ import annotations

from octavo import fp8
from octavo.train import rundir
from octavo.train.callback import Callback, Run, Step
from octavo.train.metrics import finite
from octavo.train.result import RunResult
from octavo.train.step import Batches, Observe


class Proof(Callback):
    """Counts the GEMMs of the first step that reaches a component and holds them against the plan. A mismatch stops the
    run; proof.json says which."""

    def begin(self, run: Run) -> None:
        self.proof = fp8.Proof(run.job.plan)

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe:
        reached = {component for component, n in run.job.stepper.forwards(batches).items() if n}
        return Observe(gemms=number == run.first or bool(self.proof.pending & reached))

    def after_step(self, run: Run, step: Step) -> None:
        if step.result.counts is None:
            return
        try:
            self.proof.observe(step.result.counts, run.job.stepper.forwards(step.batches))
        finally:
            if run.world.is_main:
                rundir.write_json(run.directory / "proof.json", finite(self.proof.report()))

    def end(self, run: Run, result: RunResult) -> None:
        if self.proof.pending:
            run.say(f"no step reached {', '.join(sorted(self.proof.pending))}: its FP8 is planned, not proven")


class Figures(Callback):
    """Asks for health every `run.health_every` steps, for memory at the first step and beside health, for the load of
    experts wherever a row is written; and puts what came of it into the row."""

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe:
        every = run.cfg.run.health_every
        health = run.fp8 and every > 0 and (number % every == 0 or number == run.cfg.train.steps)
        memory = number == run.first or (every > 1 and number % every == 1)
        return Observe(health=health, memory=memory, experts=run.logs(number))

    def after_step(self, run: Run, step: Step) -> None:
        result, base = step.result, run.job.base
        if result.memory is not None:
            step.row["memory"] = run.memory = result.memory
            if base is not None and base.taken["weights"]:
                step.row["base"] = base.taken
        if result.health is not None:
            step.row["health"] = result.health.table()
            run.job.progress.health = result.health.summary()
        if result.zeroed is not None:
            step.row["zeroed_v"] = result.zeroed
