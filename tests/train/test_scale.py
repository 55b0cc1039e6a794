"""The example of several ranks whole: packs that ranks share and experts dealt to them, against one process."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import threading
import time
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.train.run_dir.run_dir import read_rows
from tests import ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "scale.yaml"
STEPS = 4
ALONE = ("parallel.context=1", "parallel.expert=1")
TOLERANCE = 3e-3  # what losses of FP8 differ by, once gradients that were added in another order flip a code


def rows(run: Path) -> list[dict]:
    return read_rows(run / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.usefixtures("uncounted", "no_pages")
def test_the_example_trains_as_one_process_does_and_goes_on_after_kill_9(tmp_path: Path, monkeypatch):
    """Killed on four ranks after a checkpoint, and continued on two and in one process, each from a copy."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples" / "tiny").mkdir(parents=True)
    file = shutil.copy(EXAMPLE, tmp_path / "examples" / "tiny")
    assert main(["tiny", "qwen3_vl_moe", "build/tiny/qwen3_vl_moe"]) == main(["digits", "build/digits"]) == 0

    def words(run: str, *more: str) -> list[str]:
        shorter = (f"train.steps={STEPS}", "train.warmup=1", "run.save_every=2", "run.health_every=0", f"run.dir={run}",
                   "data.eval.0.max_samples=8")  # fmt: skip
        return ["train", str(file), *shorter, *more]

    def on(size: int, run: str, *more: str) -> list[float]:
        if size == 1:
            assert main(words(run, *ALONE, *more)) == 0
        else:
            codes, _, errors = ranks.commands(words(run, *more), size)
            assert codes == [0] * size, errors
        done = tmp_path / run
        proof = json.loads((done / "proof.json").read_text())
        assert not proof["pending"] and proof["share"] > 0 and (done / "hf" / "config.json").is_file()
        assert [row["step"] for row in rows(done)] == list(range(1, STEPS + 1))
        return [row["loss"] for row in rows(done)]

    alone, four = on(1, "alone"), on(4, "four")
    assert four[0] == pytest.approx(alone[0], rel=1e-6)
    assert four == pytest.approx(alone, rel=TOLERANCE) and four[-1] < four[0]

    def kill() -> None:
        until = time.monotonic() + 120
        while not list(tmp_path.glob("killed/checkpoints/step_2")) and time.monotonic() < until:
            time.sleep(0.02)
        for process in multiprocessing.active_children():
            process.kill()

    watcher = threading.Thread(target=kill)
    watcher.start()
    codes, _, _ = ranks.commands(words("killed"), 4)
    watcher.join()
    assert -9 in codes and len(rows(tmp_path / "killed")) < STEPS
    shutil.copytree(tmp_path / "killed", tmp_path / "one")
    for size, run in ((2, "killed"), (1, "one")):
        assert on(size, run, "run.resume=auto") == pytest.approx(alone, rel=TOLERANCE)
