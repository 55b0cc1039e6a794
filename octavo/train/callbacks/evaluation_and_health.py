"""Callbacks that check and measure a run: GEMMs against the plan, FP8 health, memory, expert load, evaluation."""

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
from octavo.train.forward.massive_activations import InputStatistics, InputWatch, describe_massive, find_massive
from octavo.train.run_dir import run_dir
from octavo.train.step.nonfinite import check_weights_finite
from octavo.train.step.step import Batches, Observe

ANSWERS = "answers.jsonl"
MAX_CHARS = 600


class Proof(Callback):
    """Counts the GEMMs of the first step that reaches a component and compares them with the plan. Repeats this for
    each new plan. A mismatch stops the run and is recorded in proof.json. A phase's additional proof in that file is
    updated at checkpoints."""

    def begin(self, run: Run) -> None:
        self.stepped = False
        schedule, self.phase_proof = run.job.precision_schedule, run.job.phase.proof(run.job.stepper)
        parts = schedule.schedule.parts if schedule.varies else ()
        self.proof = PlanProof(schedule.plan_at(run.first), run.world.layout.expert, parts, run.first)
        before = run_dir.read_json(run.directory / run_dir.PROOF) or {} if schedule.varies and run.step else {}
        safe_read.check_schema(
            before, {"spans": [{"steps!": [safe_read.COUNT]}]}, run.directory / run_dir.PROOF, TrainError
        )
        # The span that contains the checkpoint ends there, because later GEMMs are counted again.
        self.earlier_spans = [
            {**span, "steps": [first, min(last or run.step, run.step)]}
            for span in before.get("spans", ())
            for first, last in (span["steps"],)
            if first < run.first
        ]

    def before_step(self, run: Run, number: int, batches: Batches) -> Observe:
        self.stepped = True
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
        # A resumed run without a further step has proven its plan before, or has said that it did not.
        if self.proof.pending and self.stepped:
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
    """Requests FP8 health figures every `run.health_every` steps, memory in the first step and after each health step,
    and expert load for each logged row, and adds them to the row."""

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


class MassiveActivations(Callback):
    """Reads the first input of each FP8 layer in step 1 of a run, and reports massive activations in a line and in the
    row of that step."""

    def __init__(self) -> None:
        self.watch: InputWatch | None = None

    def before_step(self, run: Run, number: int, batches: Batches) -> None:
        if number == 1:
            self.watch = InputWatch(run.job.stepper.model, run.job.plan)

    def after_step(self, run: Run, step: Step) -> None:
        if self.watch is None:
            return
        watch, self.watch = self.watch, None
        watch.remove()
        run.world.set_phase("step 1, gathering figures of its inputs")
        statistics: dict[str, InputStatistics] = {}
        for figures in run.world.gather_objects({name: one.to_json() for name, one in watch.statistics().items()}):
            for name, row in figures.items():
                one = InputStatistics(row["amax"], row["rms"], row["subnormal"])
                if name not in statistics or one.under_one_scale > statistics[name].under_one_scale:
                    statistics[name] = one
        if massive := find_massive(statistics):
            step.row["massive_activations"] = {name: one.to_json() for name, one in massive.items()}
            run.say(f"note: {describe_massive(massive, run.job.plan)}")


class AnswersLog:
    """Appends the first answers of each evaluation to answers.jsonl. Lines of later steps than `step`, from which the
    run resumes, are dropped. With `encrypt` the file is answers.jsonl.aes, with encrypted lines.

    {"step", "file", "row", "prompt", "wanted", "said", "right" or null, "reward" or null}; texts have at most
    :data:`MAX_CHARS` characters, prompts their last ones.
    """

    def __init__(self, directory: Path, tokenizer: Any, step: int, encrypt: bool = False) -> None:
        self.file, self.tokenizer = directory / (ANSWERS + SUFFIX * encrypt), tokenizer
        run_dir.truncate_metrics(self.file, step)

    def write(self, step: int, answers: Sequence[Answer]) -> None:
        rows = (
            {
                "step": step, "file": answer.file, "row": answer.row, "prompt": self._text(answer.before)[-MAX_CHARS:],
                "wanted": self._text(answer.wanted)[:MAX_CHARS], "said": self._text(answer.said)[:MAX_CHARS],
                "right": answer.right, "reward": answer.reward,
            }
            for answer in answers
        )  # fmt: skip
        run_dir.append_lines(self.file, (json.dumps(row) + "\n" for row in rows))

    def _text(self, answer: Sequence[int] | str) -> str:
        """Return the text of tokens, with " | " instead of control tokens. A text is returned unchanged."""
        if isinstance(answer, str):
            return answer
        control = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        parts = (list(part) for special, part in itertools.groupby(answer, control.__contains__) if not special)
        lines = (str(self.tokenizer.decode(part)).strip() for part in parts)
        return " | ".join(line for line in lines if line)


class Evaluation(Callback):
    """Evaluates every `run.eval_every` steps and after the last step. An evaluation that is due when the run stops is
    done when it is resumed."""

    def begin(self, run: Run) -> None:
        has_row = run.row.get("step") == run.step
        is_evaluated = has_row and "eval" in run.row
        if run.world.is_main and run.job.evalset is not None:
            self.answers = AnswersLog(
                run.directory, run.job.processor.tokenizer, run.step - (not is_evaluated), run.cfg.run.encrypt
            )
        if not run.step or not is_due(run, run.step) or not run.world.any(run.world.is_main and not is_evaluated):
            return
        run.row = {**(run.row if has_row else {"step": run.step}), "eval": self._evaluate(run)}
        run.drop_last_row()
        if run.log is not None:
            run.log.write(run.row)

    def after_step(self, run: Run, step: Step) -> None:
        if is_due(run, step.number) and not run.stopping:
            try:
                step.row["eval"] = self._evaluate(run)
            except ValueError:  # an error of held-out rows, answers or rewards must not lose the step
                if (
                    run.world.size == 1 and step.result.applied
                ):  # saving is a collective call, which other ranks would miss
                    self._save_step(run, step)
                raise

    def _save_step(self, run: Run, step: Step) -> None:
        if run.log is not None:
            run.log.write(step.row)
        run.row = step.row
        run.save()
        run.wait_for_save()
        run.say(
            f"step {step.number} is saved: octavo eval, generate and export can read it, and run.resume=auto repeats "
            "the evaluation"
        )

    def _evaluate(self, run: Run) -> Mapping[str, Any]:
        assert run.job.evalset is not None
        run.world.set_phase(f"step {run.step}, evaluating")
        check_weights_finite(run.model, run.world, f"after step {run.step}")
        shown: list[Answer] = []
        run.eval = run.job.phase.evaluate(run.job.stepper, run.job.evalset, shown)
        run.eval_step = run.step
        if run.world.is_main and shown:
            self.answers.write(run.step, shown)
        run.notify("evaluated", run.eval)
        return run.eval


def is_due(run: Run, number: int) -> bool:
    """True if an evaluation follows step `number`."""
    every = run.cfg.run.eval_every
    return run.job.evalset is not None and (number == run.cfg.train.total_steps or (every > 0 and number % every == 0))
