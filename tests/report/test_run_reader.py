"""Run directories as values, and the damaged ones refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import GOOD_PROOF, LAYERS, health, losses, plan, write_run

from octavo.report import ReportError, read
from tests.fuzz import mutate


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(
        tmp_path / "run", losses(20), tables={1: health(cosine=0.9), 20: health(cosine=1.0)}, plan_json=plan(),
        proof=GOOD_PROOF,
    )  # fmt: skip


def test_reads_everything(run_dir: Path) -> None:
    record = read(run_dir)
    assert record.steps.tolist() == list(range(1, 21))
    assert np.array_equal(record.losses, losses(20))
    assert record.speed == 5000.0
    assert record.memory["weights"] == 4_800_000
    assert record.eval == {"loss": 0.1, "exact_match": 0.98, "questions": 800}
    assert [h.layer for h in record.health] == LAYERS
    assert record.health[0].cosine == pytest.approx(0.95)  # mean over the measured steps
    assert set(record.health[0].sqnr) == {"x", "w", "dy", "x_wgrad", "dy_wgrad"}
    assert record.health_steps == (1, 20)
    assert record.proof == GOOD_PROOF and record.plan["rows"]


def test_health_of_a_skipped_step_does_not_count(tmp_path: Path) -> None:
    tables = {1: health(), 2: health(nan_codes=4)}
    record = read(write_run(tmp_path / "run", np.array([1.0, math.nan]), tables=tables, skipped=(2,)))
    assert record.skipped == (2,)
    assert sum(h.nan_codes for h in record.health) == 0
    assert record.mean_loss == 1.0


def test_health_of_a_step_that_overflowed_fp16_does_not_count(tmp_path: Path) -> None:
    """Its dy held infinities, and the loss scale fell for it; the run has finished all the same."""
    tables = {1: health(), 2: health(nan_codes=4)}
    record = read(write_run(tmp_path / "run", np.array([1.0, 2.0]), tables=tables, overflowed=(2,)))
    assert (record.skipped, record.overflowed, record.finished) == ((), (2,), True)
    assert sum(h.nan_codes for h in record.health) == 0 and record.mean_loss == 1.5


def test_infinite_sqnr_and_missing_cosine(tmp_path: Path) -> None:
    table = {"a": {"x": {"sqnr": math.inf, "underflow": 0.0, "saturation": 0.0}, "nan_codes": 0}}
    (layer,) = read(write_run(tmp_path / "run", losses(2), tables={1: table})).health
    assert layer.sqnr == {} and layer.underflow == {"x": 0.0} and layer.cosine is None


def test_truncated_last_line_is_ignored(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    assert len(read(run_dir).steps) == 20


def field(file: str, key: str, value: object):
    """Damage: one field of a JSON file, or of the first line of metrics.jsonl."""

    def damage(directory: Path) -> None:
        first, *rest = (
            (directory / file).read_text().split("\n")
            if file.endswith("l")
            else [(directory / file).read_text() if (directory / file).exists() else "{}"]
        )
        (directory / file).write_text("\n".join([json.dumps(json.loads(first) | {key: value}), *rest]))

    return damage


def place(file: Path, what: str) -> None:
    file.touch()
    mutate.replace_file(None, file, what)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "metrics.jsonl").unlink(), r"metrics\.jsonl does not exist; is .* a run directory"),
        (lambda d: (d / "metrics.jsonl").write_text(""), "holds no training step"),
        (lambda d: (d / "metrics.jsonl").write_text('{"step": 1, "eval": {"loss": 1}}\n'), "holds no training step"),
        (lambda d: (d / "metrics.jsonl").write_text('nonsense\n{"step": 1}\n'), r"metrics\.jsonl:1 is not JSON"),
        (lambda d: (d / "metrics.jsonl").write_text('[1]\n{"step": 1}\n'), "1 contains a list; expected an object"),
        (lambda d: (d / "plan.json").write_text("{"), r"plan\.json is not JSON: .*line 1"),
        (field("metrics.jsonl", "step", "one"), r"metrics\.jsonl:1: step is \"one\"; expected a whole number"),
        (field("metrics.jsonl", "step", 10**30), r"metrics\.jsonl:1: step is 1000.*; expected a whole number"),
        (field("metrics.jsonl", "loss", []), r"metrics\.jsonl:1: loss is \[\]; expected a number"),
        (
            field("metrics.jsonl", "memory", {"weights": math.inf}),
            r"memory\.weights is Infinity; expected a finite number",
        ),
        (field("metrics.jsonl", "health", {"a": {"x": 3}}), r"health\.a\.x is 3; expected an object"),
        (field("plan.json", "rows", [{"kind": "linear"}]), r"plan\.json has no key 'rows\.0\.name'"),
        (field("proof.json", "share", "all"), r"proof\.json: share is \"all\"; expected a finite number"),
        (field("result.json", "eval", 3), r"result\.json: eval is 3; expected an object"),
        (lambda d: place(d / "metrics.jsonl", "pipe"), r"metrics\.jsonl is a named pipe"),
        (lambda d: place(d / "plan.json", "device"), r"plan\.json is a device"),
        (lambda d: place(d / "config.yaml", "socket"), r"config\.yaml is a socket"),
        (lambda d: (d / "environment.json").write_text("[" * 10**5), r"environment\.json nests brackets deeper"),
        (lambda d: (d / "proof.json").write_text("[]"), r"proof\.json contains a list; expected an object"),
    ],
)
def test_damaged_file_is_rejected(run_dir: Path, damage, message: str) -> None:
    damage(run_dir)
    with pytest.raises(ReportError, match=message):
        read(run_dir)


def test_missing_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a directory; give the run directory"):
        read(tmp_path / "nowhere")


def test_missing_optional_files_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    record = read(tmp_path)
    assert record.plan == {} and record.proof == {} and record.health == () and record.eval is None
    assert math.isnan(record.speed)
