"""Later versions read what version 0.5.0 wrote, and resume it to the same losses: a run, a checkpoint, an adapter, an
export.

The files are in ``tests/made_by_0_5_0``; its README.md says how each was made. They are never changed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.losses import platform
from octavo import adapters, checkpoint, fp8, models, train
from octavo.config import load_config

FILES = Path(__file__).parent / "made_by_0_5_0"
RESULTS = json.loads((FILES / "results.json").read_text(encoding="utf-8"))
# The losses are compared to the bit on the platform that made them; elsewhere other kernels round differently.
TOLERANCE = 0.0 if platform() == RESULTS["platform"] else 1e-3

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="the runs name their files by /proc")


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files as the working folder: the runs name their files relative to it."""
    folder = tmp_path / "made"
    shutil.copytree(FILES, folder)
    monkeypatch.chdir(folder)
    return folder


def expected_losses(run: str) -> object:
    losses = {int(step): float.fromhex(loss) for step, loss in RESULTS[run].items()}
    return pytest.approx(losses, abs=TOLERANCE, rel=0.0)


def test_a_stopped_run_resumes_to_the_same_losses(copy: Path) -> None:
    """Packed rows, delayed scaling and FP8 optimizer states come from the checkpoint."""
    result = train.run(load_config("runs/stopped/config.yaml", ["run.resume=auto"]))
    assert result.status == "finished" and result.losses() == expected_losses("stopped")


def test_a_lora_run_resumes_from_an_earlier_checkpoint(copy: Path) -> None:
    result = train.run(load_config("runs/lora/config.yaml", ["run.resume=runs/lora/checkpoints/step_4"]))
    assert result.status == "finished" and result.losses() == expected_losses("lora")
    figures = train.evaluate_run("runs/lora", log=lambda text: None)
    assert figures == {**RESULTS["lora_eval"], "loss": pytest.approx(RESULTS["lora_eval"]["loss"], abs=TOLERANCE)}


def test_an_adapter_verifies_and_loads() -> None:
    assert checkpoint.verify(FILES / "runs" / "lora" / "adapter", against=FILES / "model").ok
    model = models.load(FILES / "model")
    assert set(adapters.load(model, FILES / "runs" / "lora" / "adapter")) == {"model.layers.0.mlp.up_proj"}


def test_the_plan_of_a_run_loads() -> None:
    model = models.load(FILES / "model", dtype=torch.float32)
    plan = fp8.load_plan(FILES / "runs" / "stopped" / "plan.json", model)
    assert {row.recipe.name for row in plan.rows if row.fp8} == {"blockwise", "delayed"}
    assert {row.recipe.wgrad.b.block for row in plan.rows if row.fp8} == {(128, 1), (-1, -1)}, "as in that version"


def test_an_export_verifies_and_loads() -> None:
    verified = checkpoint.verify(FILES / "export")
    assert verified.ok and verified.fp8 == 7, [finding.text for finding in verified.findings]
    model = models.load(FILES / "export")
    assert torch.isfinite(model(input_ids=torch.arange(32)[None]).logits).all()
