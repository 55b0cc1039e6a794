"""Damaged checkpoints of runs are read correctly or rejected with the file's name; `latest` then finds the previous.

    python -m tests.fuzz.test_checkpoints --cases 10000 --seed 1

One file of the newest checkpoint is damaged: bytes, a field of state.json (with a corrected checksum in half of the
cases, as after an edit by hand), or the pickle of `.metadata`, or the file is replaced by something else. A checkpoint
that loads must equal the saved state; `latest` must find an undamaged checkpoint.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from octavo import checkpoint
from octavo.checkpoint.run_state import files
from octavo.train.run_dir.run_dir import Progress
from tests.checkpoint.models import One, fresh, load, same, save, snapshot, trained
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, command, outcome


def damage(rng: random.Random, folder: Path) -> str:
    """Damage one file of a checkpoint. Returns a description of the damage."""

    def fields(file: Path, raw: bytes, how: float) -> str | None:
        if file.name != files.STATE or how >= 0.8:
            return None
        document = mutate.strange(rng, json.loads(raw))
        if how < 0.5 and isinstance(document, dict):
            document.pop("crc32", None)
            file.unlink()
            files.write_checksummed_json(file, document)
            return "a strange value, sealed"
        mutate.write(file, json.dumps(document).encode())
        return "a strange value"

    return mutate.damage_file(rng, folder, fields)


def run(seed: int, cases: int) -> list[Finding]:
    rng = random.Random(seed)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good, folder = Path(place) / "good", Path(place) / "case"
        for step in (1, 2):
            model, optimizer = trained(step)
            save(good, step, model, optimizer, extra={"amax": torch.ones(2)}, rows=4, tokens=9, seconds=1.5)
        saved = snapshot(model, optimizer)
        for number in range(cases):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good / "step_1", folder / "step_1")
            mutate.copy_tree(good / "step_2", folder / "step_2")
            case = f"case {number} of seed {seed}, {damage(rng, folder / 'step_2')}"
            model, optimizer = fresh()

            def read(model=model, optimizer=optimizer) -> None:
                got = load(folder / "step_2", model, optimizer)
                Progress.from_counters(got.counters)

            refused = outcome(read, folder, case, found)
            if refused is None and "sealed" not in case and not same(snapshot(model, optimizer), saved):
                found.append(Finding(case, "the loaded state differs from the saved state"))
            if refused is not None and number % 4 == 0:
                newest: list[Path | None] = []
                outcome(lambda: newest.append(checkpoint.latest(folder, One())), folder, f"{case}, latest", found)  # noqa: B023
                if newest and newest[0] != folder / "step_1" and "sealed" not in case:
                    found.append(Finding(case, f"latest returned {newest[0]} instead of step_1: {refused}"))
    return found


@pytest.mark.long
def test_damaged_checkpoints_are_read_correctly_or_rejected() -> None:
    assert run(seed=13, cases=200) == []


if __name__ == "__main__":
    command(run, cases=10_000, seed=0)
