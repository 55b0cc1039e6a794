"""``run.check_every``: recomputes GEMMs in some steps, to find a device that silently computes wrong results.

These steps also compare the FP8 codes of weights with a sample of the weights. So does the first step after an
evaluation or a checkpoint, because weights may then have been replaced by their moving average and restored. A write
through ``.data`` leaves the codes of the previous weight in use (:func:`octavo.fp8.weights.stale_codes`).

Each rank checks its own device, with the same GEMMs in the same steps. Each check adds a line to checks.jsonl with the
compared GEMMs and, for each difference, the rank, host, device, layer, GEMM and both values. Lines are never removed: a
step that is repeated after a fault has a second line.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.base import environment
from octavo.fp8.proof import CorruptionChecker, check_size, fp8_gemms, select_gemms
from octavo.fp8.weights import stale_codes_message
from octavo.train.callbacks.callback import Callback, Run, Step
from octavo.train.errors import TrainError
from octavo.train.run_dir import run_dir
from octavo.train.step.step import Batches

MAX_NAMED = 3  # the maximum number of faults described in a message


class CorruptionCheck(Callback):
    """Checks every `run.check_every`-th step.

    A fault stops the run on all ranks before the step is logged or saved. The rows of checked steps contain the number
    of recomputed GEMMs of all ranks (`checked`).
    """

    def begin(self, run: Run) -> None:
        self.last_clean_step = 0
        self.weights_may_differ = True  # True if weights may have been swapped since the last step
        every, count = run.cfg.run.check_every, len(fp8_gemms(run.job.plan))
        size = check_size(count)
        run.say(
            f"every {every} steps {size} of {count} FP8 GEMMs are recomputed, all of them within "
            f"{every * -(-count // max(size, 1))} steps (run.check_every)"
        )

    def before_step(self, run: Run, number: int, batches: Batches) -> None:
        every, seed = run.cfg.run.check_every, run.cfg.run.seed
        if number % every == 0:
            chosen = select_gemms(fp8_gemms(run.job.plan), seed, number // every - 1)
            run.job.stepper.corruption_checker = CorruptionChecker(chosen, draw=number)
        elif self.weights_may_differ:
            run.job.stepper.corruption_checker = CorruptionChecker((), draw=number)
        self.weights_may_differ = False

    def evaluated(self, run: Run, figures: Mapping[str, Any]) -> None:
        self.weights_may_differ = True

    def saved(self, run: Run, checkpoint: Path) -> None:
        self.weights_may_differ = True

    def after_step(self, run: Run, step: Step) -> None:
        checker, run.job.stepper.corruption_checker = run.job.stepper.corruption_checker, None
        if checker is None:
            return
        run.world.set_phase(f"step {step.number}, gathering what its check found")
        counts = asdict(checker.done)
        local_result = {"done": counts, "faults": _located_faults(run, checker), "stale": checker.stale}
        by_rank = run.world.gather_objects(local_result)
        done = {key: sum(result["done"][key] for result in by_rank) for key in counts}
        faults = [fault for result in by_rank for fault in result["faults"]]
        stale = list(dict.fromkeys(name for result in by_rank for name in result["stale"]))
        if checker.gemms:
            step.row["checked"] = done["products"]
        if run.world.is_main and (checker.gemms or stale):
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            gemms = [list(gemm) for gemm in checker.gemms]
            line: dict[str, object] = {"step": step.number, "time": now, "sites": gemms, **done, "faults": faults}
            _append(run, line | ({"stale": stale} if stale else {}))
        if faults:
            raise TrainError(_fault_message(step.number, faults, self.last_clean_step))
        if stale:
            raise TrainError(f"step {step.number}: {stale_codes_message(stale)} The step is not saved")
        if checker.gemms:
            self.last_clean_step = step.number


def _located_faults(run: Run, checker: CorruptionChecker) -> list[dict[str, Any]]:
    """Return the faults of this rank, with its host and device."""
    if not checker.faults:
        return []
    where = {"rank": run.world.rank, "host": platform.node(), "device": environment.describe_device(run.world.device)}
    return [{**where, **fault.to_json()} for fault in checker.faults]


def _append(run: Run, line: Mapping[str, object]) -> None:
    with (run.directory / run_dir.CHECKS).open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _fault_message(number: int, faults: Sequence[dict[str, Any]], last_clean_step: int) -> str:
    devices = list(dict.fromkeys(f"rank {f['rank']} on {f['host']}, {f['device']}" for f in faults))
    messages = "; ".join(f"rank {fault['rank']}: {fault['said']}" for fault in faults[:MAX_NAMED])
    rest = f"; {len(faults) - MAX_NAMED} more are in {run_dir.CHECKS}" if len(faults) > MAX_NAMED else ""
    since = "it was the first check of this session"
    if last_clean_step:
        since = f"the last check without a fault was at step {last_clean_step}"
    return (
        f"step {number} computed wrongly on {' and '.join(devices)}. {messages}{rest}. The step is not saved "
        f"({since}). Remove that device, or run octavo doctor on it first, and continue with run.resume=auto, or from "
        "an older checkpoint with run.resume=PATH if the newest may be affected"
    )
