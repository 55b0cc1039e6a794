"""`train.stages`: the same weights as runs that start from each other, in one directory, whatever interrupts it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo import checkpoint, rl, train
from octavo.config import Config, override
from octavo.config.stages import run_configs
from octavo.models import ModelError
from octavo.report.evidence.run_reader import read
from octavo.train.run_dir.earlier_run import refuse_foreign_directory
from octavo.train.run_dir.run_dir import read_rows
from tests.rl.forks import both
from tests.train.conftest import Rows, at
from tests.train.test_resume import die, started

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

FIRST, SECOND = 3, 4
STAGES = (
    f"train.stages=[{{freeze: ['**.layers.0.**'], steps: {FIRST}, lr: 1e-3}}, {{steps: {SECOND}, warmup: 0}}]",
    "data.eval=[]",
    "run.save_every=2",
    "run.hf=true",
)


def weights(folder: Path | str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "hf" / "model.safetensors")


def assert_same_weights(one: Path | str, other: Path | str) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def steps_of(cfg: Config) -> list[tuple[int, int, int]]:
    rows = read_rows(Path(cfg.run.dir) / "metrics.jsonl")
    return [(row["stage"], row["step"], row["total_step"]) for row in rows]


ALL = [(1, step, step) for step in range(1, FIRST + 1)] + [(2, step, FIRST + step) for step in range(1, SECOND + 1)]


def test_stages_are_runs_that_start_from_each_other(make):
    cfg = make(*STAGES, dir="staged")
    console = Console(record=True, width=200)
    staged = rl.run(cfg, console=console)
    first = make(*STAGES[1:3], f"train.steps={FIRST}", "train.lr=1e-3", "model.freeze=['**.layers.0.**']", dir="first")
    before = train.run(first)
    second = train.run(
        make(*STAGES[1:], f"train.steps={SECOND}", "train.warmup=0", f"run.start_from={before.dir}", dir="second")
    )
    assert_same_weights(staged.dir, second.dir)
    assert staged.losses() == second.losses() and staged.steps == SECOND and staged.dir == Path(cfg.run.dir)
    assert steps_of(cfg) == ALL
    told = console.export_text()
    assert "stage 1 of 2: " in told and "frozen: **.layers.0.**" in told and "stage 2 of 2: " in told
    assert not (staged.dir / "stages/1/hf").exists() and not (staged.dir / "stages/1/metrics.jsonl").exists()
    # What reads a run sees its last stage, and each stage by its directory.
    assert len(read(staged.dir).losses) == SECOND and len(read(staged.dir / "stages/1").losses) == FIRST
    again = rl.run(override(cfg, ["run.resume=auto"]))
    assert (again.status, again.losses()) == ("finished", staged.losses()) and steps_of(cfg) == ALL


class At(train.Callback):
    """Sends SIGTERM after a step of a stage."""

    def __init__(self, stage: int, step: int) -> None:
        self.stage, self.step = stage, step

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if step.number == self.step and (run.directory.name == "1") == (self.stage == 1):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_continues_in_its_stage(make):
    whole = rl.run(make(*STAGES, dir="whole"))
    cfg = make(*STAGES, "run.resume=auto", dir="stopped")
    # A run stops after the step that follows: in the first stage, instead of the second, and in the second.
    for stage, step, done in ((1, 1, 2), (1, FIRST, FIRST), (2, 2, 3)):
        result = rl.run(cfg, callbacks=[At(stage, step)])
        assert (result.status, result.exit_code, result.steps) == ("stopped", 143, done)
        assert steps_of(cfg)[-1][:2] == (stage, done)
    result = rl.run(cfg)
    assert result.status == "finished" and steps_of(cfg) == ALL
    assert_same_weights(result.dir, whole.dir)


def run_and_die(cfg: Config, stage: int, step: int) -> None:
    def check(row: dict) -> None:
        if row["step"] == step and (Path(cfg.run.dir) / "config.yaml").exists() == (stage == 2):
            die()

    rl.run(cfg, callbacks=[Rows(check)])


@pytest.mark.long
@pytest.mark.parametrize(("stage", "step"), [(1, 1), (1, FIRST), (2, 1), (2, 3), (2, SECOND)])
def test_kill_9_in_any_stage_loses_nothing(make, stage, step):
    """Before the first checkpoint of a stage as well: the rows of the stage before stay."""
    whole = rl.run(make(*STAGES, dir="whole"))
    cfg = make(*STAGES, "run.resume=auto", dir="killed")
    process = started(run_and_die, cfg, stage, step)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    result = rl.run(cfg)
    assert result.status == "finished" and steps_of(cfg) == ALL
    assert_same_weights(result.dir, whole.dir)


@pytest.mark.long
def test_two_ranks_train_stages_as_one(make):
    one, two = (make(*STAGES, "train.micro_batch=2", "fp8.recipe=off", dir=name) for name in ("one", "two"))
    rl.run(one)
    assert [code for code, _ in both(two)] == [0, 0]
    assert steps_of(two) == ALL
    for first, second in zip(*(read_rows(Path(cfg.run.dir) / "metrics.jsonl") for cfg in (one, two)), strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)


def test_adapters_go_on_in_the_next_stage(make):
    lora = ("lora={rank: 4}", "train.stages=[{steps: 2}, {steps: 2, lr: 1e-4, warmup: 0}]", "train.warmup=0")
    cfg = make(*lora, "data.eval=[]", "run.hf=true")
    result = rl.run(cfg)
    assert (result.dir / "adapter/adapter_model.safetensors").is_file()
    saved = checkpoint.read_state(result.dir / "checkpoints/step_2")["counters"]["start_from"]["path"]
    assert Path(saved).parent.parent == (result.dir / "stages/1").resolve()


def test_other_directories_are_refused_before_the_first_stage(make, tmp_path):
    cfg = make(*STAGES, dir="run")
    with pytest.raises(train.TrainError, match="is several runs: call octavo.run"):
        train.run(cfg)
    plain = make("data.eval=[]", "train.steps=1", "train.warmup=0", dir="plain")
    train.run(plain)
    with pytest.raises(train.TrainError, match="contains a run without stages. Name another"):
        rl.run(make(*STAGES, dir="plain"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("mine")
    with pytest.raises(train.TrainError, match="contains no Octavo run"):
        rl.run(make(*STAGES, dir="foreign"))
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.txt"]
    (tmp_path / "other" / "stages").mkdir(parents=True)
    refuse_foreign_directory(tmp_path / "other")  # as a run that was killed at once leaves it
    (tmp_path / "other" / "stages" / "play.txt").write_text("mine")
    with pytest.raises(train.TrainError, match="contains no Octavo run"):
        rl.run(make(*STAGES, dir="other"))


def test_changed_stages_are_refused(make):
    cfg = make(*STAGES, "run.resume=auto", dir="run")
    rl.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    more = override(cfg, ["train.stages=[{steps: 3}, {steps: 2}, {steps: 2}]", "train.warmup=1"])
    with pytest.raises(train.TrainError, match="was begun with 2 stages, and train.stages has 3 now"):
        rl.run(more)
    with pytest.raises(train.TrainError, match="train.lr was 0.001, is now 0.5"):
        rl.run(override(cfg, ["train.stages.0.lr=0.5"]))
    assert rl.run(cfg).status == "finished"
    with pytest.raises(train.TrainError, match="train.lr was"):
        rl.run(override(cfg, ["train.stages.1.lr=0.5"]))


def test_one_stage_and_other_files_in_the_directory(make):
    (only,) = [make(*STAGES[1:], "train.stages=[{steps: 2, warmup: 0}]", "run.resume=auto", dir="only")]
    assert rl.run(only).steps == 2 and rl.run(only).status == "finished"
    assert steps_of(only) == [(1, 1, 1), (1, 2, 2)]
    cfg = make(*STAGES, "run.resume=auto", dir="run")
    rl.run(cfg, callbacks=[At(1, 1)])
    (Path(cfg.run.dir) / "notes.txt").write_text("mine")
    assert rl.run(cfg).status == "finished" and steps_of(cfg) == ALL


def test_a_later_stage_is_checked_before_the_first_is_trained(make):
    cfg = make(*STAGES, "train.stages.1.freeze=['**.nothing.**']", dir="run")
    with pytest.raises(ModelError, match=r"train.stages.1: .*nothing"):
        rl.run(cfg)
    assert not Path(cfg.run.dir).exists()


def test_directories_of_earlier_stages_may_be_deleted_and_moved(make, tmp_path):
    cfg = make(*STAGES, "run.resume=auto", dir="run")
    whole = rl.run(cfg)
    found = whole.losses()
    shutil.copytree(whole.dir, tmp_path / "moved")
    shutil.rmtree(whole.dir / "stages" / "1")
    assert rl.run(cfg).losses() == found and read(whole.dir).losses == pytest.approx(list(found.values()))
    assert not (whole.dir / "stages" / "1").exists()
    for one in (cfg, override(cfg, [f"run.dir={tmp_path / 'moved'}"])):
        (Path(one.run.dir) / "result.json").unlink()
        shutil.rmtree(Path(one.run.dir) / "checkpoints/step_4")
        again = rl.run(one)
        assert again.losses() == found and steps_of(one) == ALL  # total_step goes on as well
    assert_same_weights(again.dir, whole.dir)


def test_folders_named_like_stages_are_ordinary_runs(make, tmp_path):
    """The file with all stages decides, not the names of folders."""
    parent = train.run(make("data.eval=[]", "train.steps=1", "train.warmup=0", dir="mine"))
    child = train.run(make("data.eval=[]", "train.steps=1", "train.warmup=0", dir="mine/stages/1"))
    (tmp_path / "mine/stages/config.yaml").write_text("{}")
    assert len(read_rows(parent.dir / "metrics.jsonl")) == 1 == len(read_rows(child.dir / "metrics.jsonl"))


def test_steps_without_a_checkpoint_are_not_overwritten(make):
    cfg = make(*STAGES, "run.save_every=0", dir="run")
    process = started(run_and_die, cfg, 1, 2)
    process.join()
    with pytest.raises(train.TrainError, match="without a checkpoint yet, and nothing is overwritten"):
        rl.run(cfg)
    result = rl.run(override(cfg, ["run.resume=auto"]))
    assert steps_of(cfg) == ALL
    assert len(read_rows(result.dir / "stages/1/previous_1/metrics.jsonl")) == 2


def test_the_runs_are_ordinary_ones(make):
    """The directory has the configuration of the last stage."""
    from octavo.config import load_config

    cfg = make(*STAGES, "run.resume=auto", dir="run")
    result = rl.run(cfg)
    last = run_configs(cfg)[-1]
    assert load_config(result.dir / "config.yaml") == last and not last.train.stages
    assert load_config(result.dir / "stages/all_2.yaml") == cfg
    assert train.run(last).status == "finished"
