"""Checks and measurements of a run: GEMMs against the plan, FP8 health, memory by kind, expert load, evaluation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.base.encryption import SUFFIX
from octavo.fp8.proof import Proof as PlanProof
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.callbacks.result import RunResult
from octavo.train.errors import TrainError
from octavo.train.forward.evaluation import Answer
from octavo.train.run_dir import run_dir
from octavo.train.step.nonfinite import refuse_weights
from octavo.train.step.step import Batches, Observe

ANSWERS = "answers.jsonl"
MAX_CHARS = 600


class Proof(Callback):
    """Counts the GEMMs of the first step that reaches a component and compares them with the plan, and again for each
    new plan. A mismatch stops the run; proof.json names it. A phase's own proof in it is as of the last checkpoint."""

    def begin(self, run: Run) -> None:
        schedule, self.phase_proof = run.job.precision_schedule, run.job.phase.proof(run.job.stepper)
        parts = schedule.schedule.parts if schedule.varies else ()
        self.proof = PlanProof(schedule.plan_at(run.first), run.world.layout.expert, parts, run.first)
        before = run_dir.read_json(run.directory / run_dir.PROOF) or {} if schedule.varies and run.step else {}
        safe_read.check_schema(
            before, {"spans": [{"steps!": [safe_read.COUNT]}]}, run.directory / run_dir.PROOF, TrainError
        )
        # The span of the checkpoint ends with it, because the GEMMs from here on are counted again.
        self.earlier_spans = [
            {**span, "steps": [first, min(last or run.step, run.step)]}
            for span in before.get("spans", ())
            for first, last in (span["steps"],)
            if first < run.first
        ]

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe:
        if run.job.plan is not self.proof.plan:
            self.proof.switch_plan(run.job.plan, number)
        reached = {component for component, n in run.job.stepper.count_forwards(batches).items() if n}
        return Observe(gemms=number == run.first or bool(self.proof.pending & reached))

    def after_step(self, run: Run, step: Step) -> None:
        if step.result.counts is None:
            return
        try:
            self.proof.observe(step.result.counts, run.job.stepper.count_forwards(step.batches))
        finally:
            self._write(run)

    def saved(self, run: Run, checkpoint: Path) -> None:
        self.phase_proof = run.job.phase.proof(run.job.stepper)
        if self.phase_proof:
            self._write(run)

    def end(self, run: Run, result: RunResult) -> None:
        if self.proof.pending:
            run.say(f"no step reached {', '.join(sorted(self.proof.pending))}: its FP8 is planned, not proven")

    def _write(self, run: Run) -> None:
        if run.world.is_main:
            report = self.proof.report()
            if self.earlier_spans or "spans" in report:
                report["spans"] = [*self.earlier_spans, *self.proof.spans]
            run_dir.write_json(
                run.directory / run_dir.PROOF, safe_read.replace_nonfinite({**report, **self.phase_proof})
            )


class HealthMetrics(Callback):
    """Requests health figures every `run.health_every` steps, memory at the first step and after each health step, and
    expert load for each logged row; adds them to the row."""

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe:
        every = run.cfg.run.health_every
        health = run.fp8 and every > 0 and (number % every == 0 or number == run.cfg.train.total_steps)
        memory = number == run.first or (every > 1 and number % every == 1)
        return Observe(health=health, memory=memory, experts=run.logs(number))

    def after_step(self, run: Run, step: Step) -> None:
        result, base = step.result, run.job.base
        if result.memory is not None:
            step.row["memory"] = run.memory = result.memory
            if base is not None and base.code_sizes["weights"]:
                step.row["base"] = base.code_sizes
        if result.health is not None:
            step.row["health"] = result.health.table()
            run.job.progress.health = result.health.summary()
        if result.zeroed is not None:
            step.row["zeroed_v"] = result.zeroed


class AnswersLog:
    """Appends the first answers of each evaluation to answers.jsonl; lines after `step`, from which the run continues,
    are dropped. With `encrypt` the file is answers.jsonl.aes, with encrypted lines.

    {"step", "file", "row", "prompt", "wanted", "said", "right" or null, "reward" or null}; texts have at most
    :data:`MAX_CHARS` characters, prompts their last ones.
    """

    def __init__(self, directory: Path, tokenizer: Any, step: int, encrypt: bool = False) -> None:
        self.file, self.tokenizer = directory / (ANSWERS + SUFFIX * encrypt), tokenizer
        run_dir.truncate_metrics(self.file, step)

    def write(self, step: int, answers: Sequence[Answer]) -> None:
        rows = (
            {
                "step": step, "file": one.file, "row": one.row, "prompt": self._text(one.before)[-MAX_CHARS:],
                "wanted": self._text(one.wanted)[:MAX_CHARS], "said": self._text(one.said)[:MAX_CHARS],
                "right": one.right, "reward": one.reward,
            }
            for one in answers
        )  # fmt: skip
        run_dir.append_lines(self.file, (json.dumps(row) + "\n" for row in rows))

    def _text(self, said: Sequence[int] | str) -> str:
        """The text of tokens, with " | " in place of control tokens; a text unchanged."""
        if isinstance(said, str):
            return said
        control = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        parts = (list(part) for special, part in itertools.groupby(said, control.__contains__) if not special)
        lines = (str(self.tokenizer.decode(part)).strip() for part in parts)
        return " | ".join(line for line in lines if line)


class Evaluation(Callback):
    """Evaluates every `run.eval_every` steps and after the last one. An evaluation that is due when the run stops is
    done on resume."""

    def begin(self, run: Run) -> None:
        done = run.row.get("step") == run.step
        seen = done and "eval" in run.row
        if run.world.is_main and run.job.evalset is not None:
            self.answers = AnswersLog(
                run.directory, run.job.processor.tokenizer, run.step - (not seen), run.cfg.run.encrypt
            )
        if not run.step or not due(run, run.step) or not run.world.any(run.world.is_main and not seen):
            return
        run.row = {**(run.row if done else {"step": run.step}), "eval": self._evaluate(run)}
        run.drop_last_row()
        if run.log is not None:
            run.log.write(run.row)

    def after_step(self, run: Run, step: Step) -> None:
        if due(run, step.number) and not run.stopping:
            try:
                step.row["eval"] = self._evaluate(run)
            except ValueError:  # an error of held-out rows, answers or rewards must not lose the step
                if run.world.size == 1 and step.result.applied:  # a collective, which the others would miss
                    self._rescue(run, step)
                raise

    def _rescue(self, run: Run, step: Step) -> None:
        if run.log is not None:
            run.log.write(step.row)
        run.row = step.row
        run.save()
        run.settle()
        run.say(
            f"step {step.number} is saved: octavo eval, generate and export can read it, and run.resume=auto repeats "
            "the evaluation"
        )

    def _evaluate(self, run: Run) -> Mapping[str, Any]:
        assert run.job.evalset is not None
        run.world.set_phase(f"step {run.step}, evaluating")
        refuse_weights(run.model, run.world, f"after step {run.step}")
        shown: list[Answer] = []
        run.eval = run.job.phase.evaluate(run.job.stepper, run.job.evalset, shown)
        if run.world.is_main and shown:
            self.answers.write(run.step, shown)
        run.notify("evaluated", run.eval)
        return run.eval


def due(run: Run, number: int) -> bool:
    """Whether an evaluation follows a step."""
    every = run.cfg.run.eval_every
    return run.job.evalset is not None and (number == run.cfg.train.total_steps or (every > 0 and number % every == 0))
