"""A run that is dead never looks alive: weights that are not finite, and steps that were skipped to the end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import checkpoint, models, train
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.run_state import files
from octavo.config import Config, load_config, override
from octavo.parallel import World
from octavo.train import artifacts
from octavo.train.run_dir import run_dir
from octavo.train.setup import build, resume
from octavo.train.step.update import AfterBackward

from .. import ranks

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")

NORM = "model.layers.1.input_layernorm.weight"
SHORT = ("fp8.recipe=off", "data.eval=[]", "train.warmup=0", "run.hf=true")


class Writes(train.Callback):
    """Stands for an update that leaves `value` in one weight, after step `step` (of the element `at`)."""

    def __init__(self, step: int, value: float, weight: str = NORM, at: int = 0) -> None:
        self.step, self.value, self.weight, self.at = step, value, weight, at

    def after_step(self, run: train.Run, step: train.Step) -> None:
        if step.number == self.step:
            with torch.no_grad():
                run.model.get_parameter(self.weight).view(-1)[self.at] = self.value


def steps_in(cfg: Config) -> list[int]:
    return checkpoint.steps(Path(cfg.run.dir) / "checkpoints")


def nothing_delivered(cfg: Config) -> bool:
    return not any((Path(cfg.run.dir) / name).exists() for name in ("result.json", "hf"))


@pytest.mark.parametrize(("step", "value"), [(3, float("nan")), (4, float("-inf")), (6, float("nan"))])
def test_a_weight_that_is_not_finite_ends_the_run_at_whatever_step(make, step: int, value: float):
    """With a checkpoint at every step that is due (4), at one that is not (3), and at the last (6)."""
    cfg = make(*SHORT, "run.save_every=2", "run.keep=1")
    says = {3: "step 4 the weight {} itself", 4: "step 4 {} holds NaN", 6: "step 6 {} holds NaN"}[step].format(NORM)
    with pytest.raises((train.TrainError, CheckpointError), match=f"after {says}"):
        train.run(cfg, callbacks=[Writes(step, value)])
    good = {3: 2, 4: 2, 6: 4}[step]
    assert max(steps_in(cfg)) == good and len(steps_in(cfg)) <= 2 and nothing_delivered(cfg)
    again = train.run(override(cfg, ["run.resume=auto"]))
    assert again.status == "finished" and steps_in(cfg) == [6], "what was good is gone on from"


def test_an_evaluation_refuses_such_weights_too(make):
    """A weight that no held-out row reaches: the loss would look sound."""
    table, unused = "model.embed_tokens.weight", -1
    with pytest.raises(train.TrainError, match=f"after step 2 the weight {table} itself"):
        train.run(make("fp8.recipe=off", "run.eval_every=2"), callbacks=[Writes(2, float("nan"), table, unused)])


def test_states_of_the_optimizer_are_looked_at_as_weights_are(make):
    class Spoils(train.Callback):
        def end_step(self, run: train.Run, step: train.Step) -> None:
            if step.number == 2:
                state = run.job.stepper.optimizer.state[run.model.get_parameter(NORM)]
                state["exp_avg_scale"].fill_(float("nan"))

    cfg = make(*SHORT, "train.steps=2", "optimizer.states=fp8")
    with pytest.raises(CheckpointError, match=f"after step 2 the optimizer's exp_avg_scale of {NORM} holds NaN"):
        train.run(cfg, callbacks=[Spoils()])
    assert not steps_in(cfg)


def test_keep_never_deletes_the_checkpoint_before_the_one_that_proves_dead(make):
    """Weights that are finite and overflow in every forward: the checkpoint of step 4 is of no use, 3 is."""
    cfg = make(*SHORT, "train.steps=30", "run.save_every=1", "run.keep=1")
    head = "model.layers.1.mlp.down_proj.weight"

    class Grows(train.Callback):
        def after_step(self, run: train.Run, step: train.Step) -> None:
            if step.number == 4:
                torch.nn.init.constant_(run.model.get_parameter(head), 3e38)

    with pytest.raises(train.TrainError, match="10 steps in a row, up to step 14"):
        train.run(cfg, callbacks=[Grows()])
    assert steps_in(cfg) == [3, 4] and nothing_delivered(cfg)


def test_a_run_whose_last_steps_were_skipped_has_not_finished(make, monkeypatch: pytest.MonkeyPatch):
    cfg, clip, seen = make(*SHORT, "run.save_every=4"), AfterBackward._unscale_and_clip, []

    def overflows(self: AfterBackward) -> torch.Tensor:
        seen.append(clip(self))
        return seen[-1] * (float("inf") if len(seen) > 4 else 1)

    with monkeypatch.context() as patched:
        patched.setattr(AfterBackward, "_unscale_and_clip", overflows)
        with pytest.raises(train.TrainError, match="the last 2 of 6 steps were skipped"):
            train.run(cfg)
    assert steps_in(cfg) == [4, 6] and nothing_delivered(cfg), "the weights of the last applied step are kept"
    with pytest.raises(train.TrainError, match="the last 2 of 6 steps were skipped"):
        train.run(override(cfg, ["run.resume=auto"]))
    rows = {"status": "finished", "steps": 6, "final": {"step": 6, "skipped": True}}
    run_dir.write_json(Path(cfg.run.dir) / "result.json", rows)  # as version 0.4.0 left it
    with pytest.raises(train.TrainError, match="the last 2 of 6 steps were skipped"):
        train.run(override(cfg, ["run.resume=auto"]))
    assert nothing_delivered(cfg)


# What version 0.4.0 left ----------------------------------------------------------------------------------------------


def poison(path: Path, cfg: Config, what: str = "model") -> None:
    """Make a checkpoint one of 0.4.0 with a NaN in it: written as then, without a word about its values."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("octavo.checkpoint.run_state.state.fp8.find_nonfinite", lambda named: [], raising=False)
        start = run_dir.Start(path.parent / "aside", path, 0, 0, {})
        start.directory.mkdir()
        job = build.build(override(cfg, [f"run.resume={path}"]), World(), start)
        with torch.no_grad():
            parameter = job.model.get_parameter(NORM)
            (parameter if what == "model" else job.stepper.optimizer.state[parameter]["exp_avg"])[0] = float("nan")
        made = resume.save(job)
    shutil.rmtree(path)
    made.rename(path)
    shutil.rmtree(start.directory)
    state = {k: v for k, v in files.read_state(path).items() if k not in ("finite", "format")}
    files.write_state(path, {"format": files.FORMAT, **state})


@pytest.fixture(scope="module")
def old(place: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A finished run of six steps with checkpoints of 2, 4 and 6, of which 4 and 6 are poisoned."""
    from .conftest import make as fixture

    folder = tmp_path_factory.mktemp("old")
    make = fixture.__wrapped__(place, folder, request)
    cfg = make("fp8.recipe=off", "data.eval=[]", "run.save_every=2", "run.keep=9")
    train.run(cfg)
    for step, what in ((4, "optimizer"), (6, "model")):
        poison(folder / f"run/checkpoints/step_{step}", cfg, what)
    return folder / "run"


def taken(old: Path, tmp_path: Path) -> tuple[Path, Config]:
    shutil.copytree(old, tmp_path / "run")
    return tmp_path / "run", override(load_config(old / "config.yaml"), [f"run.dir={tmp_path / 'run'}"])


def test_auto_passes_over_poisoned_checkpoints_and_says_so(old: Path, tmp_path: Path):
    """Also where the run says that it has finished."""
    from rich.console import Console

    run, cfg = taken(old, tmp_path)
    console = Console(record=True, width=500)
    result = train.run(override(cfg, ["run.resume=auto"]), console=console)
    said = console.export_text()
    assert f"{run} has a result, but in {run}/checkpoints/step_6 {NORM} holds NaN" in said
    assert f"checkpoint step_6 is skipped: {NORM} holds NaN or infinity" in said
    assert f"checkpoint step_4 is skipped: the optimizer's exp_avg of {NORM} holds NaN" in said
    assert "continuing after step 2 of 6" in said and result.status == "finished"
    assert checkpoint.latest(run / "checkpoints", World()) == run / "checkpoints/step_6"


def test_a_poisoned_checkpoint_by_name_is_refused(old: Path, tmp_path: Path):
    run, cfg = taken(old, tmp_path)
    with pytest.raises(CheckpointError, match=rf"step_6: {NORM} holds NaN or infinity \(tensors that do: 1\)"):
        train.run(override(cfg, [f"run.resume={run}/checkpoints/step_6"]))
    for step in (4, 2):  # whole, and its weights are sound: it may be evaluated, not gone on from
        assert artifacts.inspect_target(run).open(step=step).notes[0] == f"step {step}"
    with pytest.raises(CheckpointError, match=f"step_6: {NORM} holds NaN"):
        artifacts.inspect_target(run).open(step=6)
    with pytest.raises(CheckpointError, match=f"step_6: {NORM} holds NaN"):
        artifacts.export_model(run, tmp_path / "out", "bf16", step=6)
    said: list[str] = []
    artifacts.export_model(run, tmp_path / "out", "bf16", log=said.append)
    assert [line.split(":")[0] for line in said[:3]] == [
        "checkpoint step_6 is skipped", "checkpoint step_4 is skipped", str(run)
    ]  # fmt: skip
    shutil.rmtree(run / "checkpoints/step_2")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*holds NaN.*holds NaN"):
        train.run(override(cfg, ["run.resume=auto"]))


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_folder_with_such_a_value_is_refused_wherever_it_is_read(place: Path, make, tmp_path: Path, value: float):
    folder = tmp_path / "sick"
    shutil.copytree(place / "tiny", folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.1.input_layernorm.weight"))
    tensors[name][3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    cfg = make(f"model.path={folder}")
    works: list[Any] = [
        lambda: models.load(folder),
        lambda: models.load(folder, torch.bfloat16, load_in_fp8="rowwise"),
        lambda: models.load_split(folder),
        lambda: artifacts.inspect_target(folder).open(),
        lambda: artifacts.export_model(folder, tmp_path / "out", "fp8-dynamic"),
        lambda: train.run(cfg),
    ]
    for work in works:
        with pytest.raises((models.ModelError, CheckpointError), match=f"{name}.* (in .*)?holds NaN or") as refused:
            work()
        assert file.name in str(refused.value)
    assert not (tmp_path / "out").exists() and nothing_delivered(cfg)


def test_nothing_writes_such_a_model(place: Path, tmp_path: Path):
    model = models.load(place / "text")
    model.get_parameter(NORM).data[0] = float("inf")
    with pytest.raises(models.ModelError, match=rf"{NORM} holds NaN or infinity \(1 of "):
        checkpoint.save_hf(model, place / "text", tmp_path / "out", World())
    assert not (tmp_path / "out").exists()


def test_adapters_that_are_not_finite_are_neither_written_nor_merged(make, tmp_path: Path):
    cfg = make(*SHORT, "lora.rank=2", "train.steps=2", "run.save_every=1")
    name = "model.layers.0.self_attn.q_proj.lora_B.default.weight"
    with pytest.raises(CheckpointError, match=f"after step 2 {name} holds NaN"):
        train.run(cfg, callbacks=[Writes(2, float("nan"), name)])
    assert steps_in(cfg) == [1] and not (Path(cfg.run.dir) / "adapter").exists()
    run = Path(cfg.run.dir)
    artifacts.merge_model(run, tmp_path / "merged")  # of the good one
    from octavo import adapters

    model = artifacts.inspect_target(run).open().model
    model.get_parameter(name).data.fill_(float("nan"))
    with pytest.raises(adapters.AdapterError, match="holds NaN or infinity"):
        adapters.save(model, tmp_path / "adapter", base=cfg.model.path)


# Models that are finite and dead --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("seen")
def test_a_model_that_computes_no_numbers_is_not_evaluated_and_does_not_answer(place: Path, make):
    model, cfg = models.load(place / "text"), make()
    torch.nn.init.constant_(model.get_parameter("model.layers.1.mlp.down_proj.weight"), 3e38)
    processor = models.load_processor(place / "text")
    with pytest.raises(
        models.ModelError, match=r"the score of token \d+ is NaN or infinite: the model's logits are not finite"
    ):
        models.generate(model, processor, [{"role": "user", "content": "7"}])
    vision = models.load(place / "tiny")
    torch.nn.init.constant_(vision.get_parameter("model.language_model.layers.1.mlp.down_proj.weight"), 3e38)
    from octavo import data

    held_out = data.eval_set(cfg, models.load_processor(place / "tiny"))
    with pytest.raises(train.TrainError, match="the loss over .* held-out tokens is nan"):
        train.evaluate(vision, held_out)


# Ranks ----------------------------------------------------------------------------------------------------------------


def on_two_ranks(world: World, folder: str) -> list[str]:
    """What ends a run whose weight is NaN in one rank's shard: in a step that is not saved, and in one that is."""
    said = []
    for step in (1, 2):

        class Spoils(train.Callback):
            def after_step(self, run: train.Run, at: train.Step, step: int = step) -> None:
                if at.number == step and world.rank == 1:
                    with torch.no_grad():
                        run.model.get_parameter(NORM).to_local()[0] = float("nan")

        cfg = override(load_config(f"{folder}/cfg.yaml"), [f"run.dir={folder}/{step}"])
        try:
            with pytest.MonkeyPatch.context() as patched:  # the group is this test's
                patched.setattr("octavo.train.loop.loop.parallel.setup", lambda *_, **axes: world)
                patched.setattr(World, "close", lambda self: None)
                train.run(cfg, callbacks=[Spoils()])
        except (train.TrainError, CheckpointError) as error:
            said.append(str(error))
    return said


def test_a_nan_in_one_ranks_shard_ends_all_ranks_with_one_sentence(make, tmp_path: Path):
    from octavo.config import to_yaml

    (tmp_path / "cfg.yaml").write_text(to_yaml(make(*SHORT, "train.steps=2", dir="unused")))
    first, second = ranks.run(on_two_ranks, 2, str(tmp_path))
    assert first == second and len(first) == 2
    assert first[0].startswith(f"after step 2 the weight {NORM} itself is not finite (weights that are not: 1)")
    assert first[1].startswith(f"after step 2 {NORM} holds NaN or infinity")
    assert not list(tmp_path.glob("*/checkpoints/step_*"))
