"""Stopping and going on: the losses after it are those of a run that nobody stopped, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from octavo import checkpoint, fp8, train
from octavo.checkpoint.run_state import files
from octavo.config import Config, load_config, override
from octavo.data import DataError
from octavo.fp8.arithmetic import moments
from octavo.models import ModelError
from octavo.train.run_dir.run_dir import read_rows, settings
from octavo.train.setup import phase

from .. import ranks
from .conftest import STEPS, Rows, at

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")


def steps_of(directory: Path) -> list[int]:
    return [row["step"] for row in read_rows(directory / "metrics.jsonl")]


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("recipe", ["off", "blockwise", pytest.param("delayed", marks=pytest.mark.long)])
def test_sigterm_saves_and_leaves_and_auto_goes_on_bit_for_bit(make, recipe: str):
    whole = train.run(make(f"fp8.recipe={recipe}", dir="whole"))
    cfg = make(f"fp8.recipe={recipe}", dir="stopped")
    first = train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert (first.status, first.steps, first.exit_code) == ("stopped", 3, 143)
    assert not (first.dir / "result.json").exists()
    second = train.run(override(cfg, ["run.resume=auto"]))
    assert second.status == "finished"
    assert second.losses() == whole.losses()
    assert second.eval == whole.eval
    assert steps_of(second.dir) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("evals", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_signal_in_the_last_step_leaves_no_run_finished_without_its_evaluation(make, evals: bool):
    over = ("train.steps=3", *([] if evals else ["data.eval=[]"]))
    whole = train.run(make(*over, dir="whole"))
    cfg = make(*over, "run.log_every=5")
    first = train.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    first = train.run(override(cfg, ["run.resume=auto"]), callbacks=[at(3, signal.SIGTERM)])
    assert first.status == "finished", "a signal after the last evaluation is too late"
    stopped = make(*over, "run.log_every=1", dir="last")
    first = train.run(stopped, callbacks=[at(2, signal.SIGTERM)])
    assert first.status == ("stopped" if evals else "finished")
    second = train.run(override(stopped, ["run.resume=auto"]))
    assert (second.status, second.steps) == ("finished", 3)
    assert second.eval == whole.eval
    assert second.losses() == whole.losses()


def test_an_evaluation_that_fails_costs_no_step(make, monkeypatch: pytest.MonkeyPatch):
    """As by a held-out row, or a reward that hangs."""
    whole = train.run(make("train.steps=2", "train.warmup=1", dir="whole"))
    cfg = make("train.steps=2", "train.warmup=1")

    def fails(*given: Any, **more: Any) -> None:
        raise DataError("held.json, row 1: is no conversation")

    with monkeypatch.context() as planted, pytest.raises(DataError, match="row 1"):
        planted.setattr("octavo.train.setup.phase.evaluate", fails)
        train.run(cfg)
    directory = Path(cfg.run.dir)
    assert checkpoint.steps(directory / "checkpoints") == [2] and steps_of(directory) == [1, 2]
    result = train.run(override(cfg, ["run.resume=auto"]))
    assert (result.status, result.eval) == ("finished", whole.eval)


def test_last_row_before_a_stop_is_always_written(make):
    """The stop step's row, the evaluation that was due with it, and the last health figures."""
    over = ("run.log_every=100", "run.eval_every=3", "run.health_every=2", "train.steps=5")
    cfg = make(*over)
    first = train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    assert first.steps == 3 and first.health
    second = train.run(override(cfg, ["run.resume=auto"]), callbacks=[at(4, signal.SIGTERM)])
    row = next(row for row in read_rows(first.dir / "metrics.jsonl") if row["step"] == 3)
    assert {"loss", "lr", "tokens", "eval"} <= row.keys()
    assert second.status == "stopped" and second.health


def test_health_figures_survive_a_resume(make):
    cfg = make("run.health_every=2", "train.steps=4", "data.eval=[]")
    first = train.run(cfg, callbacks=[at(2, signal.SIGTERM)])
    (first.dir / "metrics.jsonl").write_text("")
    kept = files.read_state(first.dir / "checkpoints" / "step_3")["counters"]["health"]
    assert kept == first.health and kept["x_sqnr_min"] > 0
    again = train.run(override(cfg, ["run.resume=auto", "run.health_every=0"]))
    assert again.health == first.health


def test_moments_that_0_4_0_wrote_as_coat_go_on_and_are_told(make, monkeypatch):
    cfg = make("optimizer.states=coat", "train.steps=3", "data.eval=[]")
    cut = moments.coat_figures
    with monkeypatch.context() as patch:
        patch.setattr(moments, "coat_figures", lambda lo, hi: cut(lo, hi) - torch.tensor([0.0, 1 / 64, 0.0]))
        train.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    console = Console(record=True, width=500)
    assert train.run(override(cfg, ["run.resume=auto"]), console=console).status == "finished"
    assert "step_2: The moments are 'coat' as version 0.4.0 wrote it: " in console.export_text()


def test_sigint_stops_too_and_the_handlers_return(make):
    before = signal.getsignal(signal.SIGTERM)
    result = train.run(make("data.eval=[]"), callbacks=[at(1, signal.SIGINT)])
    assert (result.status, result.exit_code) == ("stopped", 130)
    assert signal.getsignal(signal.SIGTERM) is before


def started(work: Callable[..., Any], *given: Any) -> multiprocessing.process.BaseProcess:
    """Another process at `work(*given)`: a fork, where CUDA allows it."""
    process = multiprocessing.get_context(ranks.START).Process(target=work, args=given)
    process.start()
    return process


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(cfg: Config, moment: str) -> None:
    if moment == "mid-save":
        whole = files.publish
        files.publish = lambda directory, step: die() if step == 4 else whole(directory, step)
    train.run(cfg, callbacks=[Rows(lambda row: die() if str(row["step"]) == moment else None)])


def killed(cfg: Config, moment: str) -> None:
    """Run `cfg` in a process that dies by SIGKILL in the midst of saving step 4, or after writing a step's row."""
    process = started(run_and_die, cfg, moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.long
def test_run_resumes_after_kill_9_during_a_save_or_step(make):
    whole = train.run(make("run.save_every=2", dir="whole"))
    for moment in ("mid-save", "1", "2", "3", "6"):
        cfg = make("run.save_every=2", dir=moment)
        killed(cfg, moment)
        directory = Path(cfg.run.dir)
        if moment == "mid-save":
            assert [p.name for p in (directory / "checkpoints").iterdir() if not p.name.startswith(".")] == ["step_2"]
            assert steps_of(directory) == [1, 2, 3, 4]
        resumed = train.run(override(cfg, ["run.resume=auto"]))
        assert resumed.losses() == whole.losses()
        assert steps_of(directory) == list(range(1, STEPS + 1))
        assert resumed.eval == whole.eval


@pytest.mark.long
def test_run_resumes_after_kill_9_at_random_times(make):
    """A run that is killed again and again by the clock, until it ends: its losses are those of one left alone."""
    over = ("train.steps=40", "run.save_every=3", "run.tensorboard=true")
    whole = train.run(make(*over, dir="whole"))
    cfg = make(*over, "run.resume=auto", dir="killed")
    deaths = 0
    for attempt in range(60):
        # Shorter at first than any machine takes, then longer: one that dies while it loads makes no progress.
        process = started(train.run, cfg)
        process.join(0.5 + 0.2 * attempt)
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        deaths += 1
    assert deaths > 0
    assert {r["step"]: r["loss"] for r in read_rows(Path(cfg.run.dir) / "metrics.jsonl")} == whole.losses()


def test_a_directory_with_a_run_is_refused_by_default(make):
    train.run(make("data.eval=[]", "train.steps=1", "train.warmup=0"))
    with pytest.raises(train.TrainError, match="contains a run with checkpoints up to step 1.*run.resume=auto"):
        train.run(make("data.eval=[]", "train.steps=1", "train.warmup=0"))


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_run_that_failed_before_its_first_step_begins_with_corrected_settings(make, resume: str):
    over = ("data.eval=[]", "train.steps=1", "train.warmup=0", f"run.resume={resume}")
    with pytest.raises(fp8.PlanError, match="layerz"):
        train.run(make(*over, 'fp8.rules=[{match: "**.layerz.0.**", recipe: off}]'))
    with pytest.raises(ModelError, match="nowhere is not a folder"):
        train.run(make(*over, "model.path=nowhere"))
    done = train.run(make(*over))
    assert done.status == "finished" and load_config(done.dir / "config.yaml").fp8.rules == ()
    with pytest.raises(train.TrainError, match="nothing is overwritten|different settings: model.path"):
        train.run(make(*over, "model.path=nowhere"))


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_directory_with_something_else_is_refused(make, tmp_path: Path, resume: str):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(train.TrainError, match=r"not empty \(thesis.txt\).*nothing is overwritten"):
        train.run(make(f"run.resume={resume}"))
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years of work"


def test_auto_begins_where_there_is_nothing_and_says_when_all_is_done(make, tmp_path: Path):
    cfg = make("run.resume=auto", "data.eval=[]", "train.steps=2", "train.warmup=0")
    first = train.run(cfg)
    written = (first.dir / "metrics.jsonl").read_bytes()
    console = Console(record=True, width=200)
    second = train.run(cfg, console=console)
    assert "has finished already (2 steps); nothing to do" in console.export_text()
    assert (second.status, second.steps, second.exit_code) == ("finished", 2, 0)
    assert second.final == first.final
    assert (first.dir / "metrics.jsonl").read_bytes() == written


@pytest.mark.parametrize("part", ["model", "data"])
def test_inputs_of_a_finished_run_may_be_deleted_but_not_changed(make, place: Path, tmp_path: Path, part: str):
    shutil.copytree(place / "text", tmp_path / "model")
    shutil.copy(place / "talk" / "train.json", tmp_path / "rows.json")
    paths = (f"model.path={tmp_path}/model", f"data.train=[{{path: {tmp_path}/rows.json}}]")
    cfg = make("run.resume=auto", "data.eval=[]", "train.steps=1", "train.warmup=0", *paths)
    first = train.run(cfg)
    file = tmp_path / {"model": "model/tokenizer_config.json", "data": "rows.json"}[part]
    rows = file.read_text()
    file.write_text(rows + " ")
    how = {"model": r"tokenizer_config.json has changed", "data": r"rows.json had \d+ bytes, has \d+ now"}[part]
    with pytest.raises(train.TrainError, match=rf"step_1 was made with.*{how}"):
        train.run(cfg)
    file.unlink()
    assert train.run(cfg).final == first.final


def test_changed_settings_are_named_and_refused_but_run_settings_may_change(make):
    over = ("data.eval=[]", "train.steps=4")
    train.run(make(*over), callbacks=[at(1, signal.SIGTERM)])
    changed = make(*over, "run.resume=auto", "train.lr=1e-3", "fp8.recipe=rowwise", "run.seed=7")
    with pytest.raises(train.TrainError) as refused:
        train.run(changed)
    message = str(refused.value)
    for part in ("train.lr was 0.002, is now 0.001", "fp8.recipe was 'blockwise', is now 'rowwise'", "run.seed was 0"):
        assert part in message
    result = train.run(make(*over, "run.resume=auto", "run.log_every=2", "run.keep=1", "data.workers=1"))
    assert result.status == "finished"


def test_what_a_template_is_given_and_what_of_thinking_is_learned_are_kept(make):
    found = {json.dumps(settings(make(*over))["data"]) for over in (
        (), ("data.template_args={enable_thinking: false}",), ("data.mask_reasoning=true",),
        ("data.mask_empty_think=false",), ("data.split_turns=true",),
    )}  # fmt: skip
    assert len(found) == 5


def test_a_run_that_outgrew_its_card_goes_on_with_less_saved_to_the_same_bits(make):
    over = ("data.eval=[]", "train.steps=4", "fp8.activations=fp8")
    whole = train.run(make(*over, dir="whole"))
    train.run(make(*over), callbacks=[at(1, signal.SIGTERM)])
    for how in ("selective", "full"):
        result = train.run(make(*over, "run.resume=auto", f"train.recompute={how}"), callbacks=[at(3, signal.SIGTERM)])
    assert result.losses() == whole.losses()
    compiled = make(*over[:2], "train.compile=true"), make(*over[:2], "train.compile=true", "train.recompute=full")
    assert settings(compiled[0]) != settings(compiled[1]), "the sums of another graph are others"


def test_changed_thread_count_is_reported(make, monkeypatch):
    over = ("data.eval=[]", "train.steps=4")
    train.run(make(*over), callbacks=[at(1, signal.SIGTERM)])
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    console = Console(record=True, width=300)
    train.run(make(*over, "run.resume=auto"), console=console)
    assert "saved by 1 rank(s) of 1 thread(s), continued on 1 of 3" in console.export_text()


@pytest.mark.parametrize(
    ("before", "now", "told"), [("torchvision", "pil", "install"), (None, "torchvision", "remove")]
)
def test_changed_image_library_is_reported(make, monkeypatch, before, now, told):
    """0.4.0 said nothing, and had Pillow's."""
    over = ("data.eval=[]", "train.steps=3")
    monkeypatch.setattr("octavo.models.image_backend", lambda processor: before)
    if before is None:
        take = checkpoint.take_snapshot

        def former(*given: Any, counters: dict[str, Any], **more: Any) -> checkpoint.Snapshot:
            del counters["pixels"]
            return take(*given, counters=counters, **more)

        monkeypatch.setattr(checkpoint, "take_snapshot", former)
    first = train.run(make(*over), callbacks=[at(1, signal.SIGTERM)])
    assert json.loads((first.dir / "environment.json").read_text())["pixels"] == before
    monkeypatch.setattr("octavo.models.image_backend", lambda processor: now)
    console = Console(record=True, width=300)
    train.run(make(*over, "run.resume=auto"), console=console)
    previous = before or "pil"
    note = (
        f"note: images were resized with {previous} before, and are resized with {now} now, so pixels differ slightly"
    )
    assert f"{note}; {told} torchvision to restore {previous}" in console.export_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("why", ["checkpoint", "settings", "base", "phase"])
def test_a_resume_that_is_refused_changes_nothing_in_the_run(make, place: Path, tmp_path: Path, monkeypatch, why: str):
    """By its checkpoint, its settings, the weights of another base, and at the very end of assembly."""
    shutil.copytree(place / "text", tmp_path / "text")
    over = (f"model.path={tmp_path / 'text'}", f"data.train=[{{path: {place / 'talk' / 'train.json'}}}]",
            "data.eval=[]", "train.steps=3", "lora={rank: 2}")  # fmt: skip
    first = train.run(make(*over), callbacks=[at(1, signal.SIGTERM)])
    if why == "checkpoint":
        next((first.dir / "checkpoints" / "step_2").glob("*.distcp")).write_bytes(b"")
    elif why == "base":
        file = tmp_path / "text" / "model.safetensors"
        raw = file.read_bytes()
        file.write_bytes(raw[:-64] + bytes(64))
    elif why == "phase":
        monkeypatch.setattr(phase.Phase, "begin", lambda *_: (_ for _ in ()).throw(train.TrainError("not so")))
    monkeypatch.setattr("octavo.base.environment.describe", lambda: {"another": "machine"})
    before = contents(first.dir)
    with pytest.raises((train.TrainError, checkpoint.CheckpointError)):
        train.run(make(*over, "run.resume=auto", *(["train.lr=0.5"] if why == "settings" else [])))
    assert contents(first.dir) == before


def test_copies_and_links_among_checkpoints_are_named_and_the_run_goes_on(make, tmp_path: Path):
    cfg = make("data.eval=[]", "run.save_every=1", "run.keep=1")
    first = train.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    folder = first.dir / "checkpoints"
    for name in ("step_003", "step_2 (copy)", "step_5"):
        shutil.copytree(folder / "step_2", folder / name)
    (folder / "step_4").write_text("a file")
    shutil.copytree(folder / "step_2", tmp_path / "disk")
    (folder / "step_98").symlink_to(tmp_path / "disk")
    console = Console(record=True, width=400)
    assert train.run(override(cfg, ["run.resume=auto"]), console=console).status == "finished"
    said = console.export_text()
    assert "continuing after step 2" in said and said.count("contains entries that the run did not write") == 1
    for name in ("step_003 (", "step_2 (copy) (", "step_5 (of step 2)", "step_4 (not a folder)", "step_98 (a link)"):
        assert name in said
    there = {path.name for path in folder.iterdir()}
    assert there == {"step_003", "step_2 (copy)", "step_5.other", "step_4.other", "step_98", f"step_{STEPS}"}
    assert (tmp_path / "disk" / "state.json").is_file()


def test_a_named_checkpoint_continues_in_place_or_elsewhere(make, tmp_path: Path):
    over = ("run.save_every=2", "run.keep=9")
    whole = train.run(make(*over))
    checkpoint = whole.dir / "checkpoints" / "step_2"
    elsewhere = train.run(make(*over, f"run.resume={checkpoint}", dir="elsewhere"))
    assert elsewhere.losses() == {s: x for s, x in whole.losses().items() if s > 2}
    before = whole.losses()
    in_place = train.run(make(*over, f"run.resume={checkpoint}"))
    assert in_place.losses() == before
    assert steps_of(whole.dir) == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_run_that_went_back_and_was_killed_does_not_return_to_its_former_end(make):
    over = ("run.save_every=2", "run.keep=9", "data.eval=[]")
    whole = train.run(make(*over, dir="killed"))
    back = make(*over, f"run.resume={whole.dir / 'checkpoints' / 'step_2'}", dir="killed")
    killed(back, "3")
    assert steps_of(whole.dir) == [1, 2, 3]
    assert [p.name for p in (whole.dir / "checkpoints").iterdir()] == ["step_2"]
    assert not (whole.dir / "result.json").exists()
    console = Console(record=True, width=200)
    again = train.run(make(*over, "run.resume=auto", dir="killed"), console=console)
    assert "continuing after step 2 of" in console.export_text()
    assert sorted(again.losses()) == list(range(1, STEPS + 1))


def test_going_back_to_a_checkpoint_that_cannot_be_read_costs_nothing(make):
    over = ("run.save_every=2", "run.keep=9", "data.eval=[]")
    whole = train.run(make(*over))
    before = whole.losses()
    victim = whole.dir / "checkpoints" / "step_2"
    next(victim.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(RuntimeError, match="step_2"):
        train.run(make(*over, f"run.resume={victim}"))
    assert whole.losses() == before and (whole.dir / "result.json").exists()
    assert (whole.dir / "checkpoints" / f"step_{STEPS}").is_dir()


@pytest.mark.usefixtures("seen")
def test_changed_data_is_noticed_by_a_resume(make, place: Path, tmp_path: Path):
    text = (place / "digits/train.json").read_text()
    file = tmp_path / "rows.json"
    file.write_text(text)
    cfg = make(f"data.train=[{{path: {file}, images: {place / 'digits'}}}]", "data.eval=[]", "train.steps=4")
    train.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    file.write_text(text.replace("0", "1", 1))
    with pytest.raises(train.TrainError, match=r"step_2 was made with different data: .*rows\.json had \d+ bytes"):
        train.run(override(cfg, ["run.resume=auto"]))
    file.write_text(text)
    os.utime(file, (0, 0))
    assert train.run(override(cfg, ["run.resume=auto"])).status == "finished"


def test_a_changed_model_folder_is_noticed_by_a_resume_and_by_whoever_opens_the_run(make, place: Path, tmp_path: Path):
    """Each file that decides what the model is given, changed, gone or new; generation settings decide nothing."""
    folder = tmp_path / "model"
    shutil.copytree(place / "tiny", folder)
    cfg = make(f"model.path={folder}", "data.eval=[]", "train.steps=3")
    train.run(cfg, callbacks=[at(1, signal.SIGTERM)])
    again = override(cfg, ["run.resume=auto"])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "preprocessor_config.json", "processor_config.json"):  # fmt: skip
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + b"\n")  # the same JSON: what a file means is for its readers
        with pytest.raises(train.TrainError, match=f"the folder that .*step_2 was made with: {name} has changed"):
            train.run(again)
        (folder / name).write_bytes(before)
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "video_preprocessor_config.json").rename(folder / "gone")
    both = "(?=.*special_tokens_map.json is new)(?=.*video_preprocessor_config.json is missing)"
    with pytest.raises(train.TrainError, match=both):
        train.run(again)
    with pytest.raises(train.TrainError, match=both):
        train.load_run(cfg.run.dir)
    (folder / "special_tokens_map.json").unlink()
    (folder / "gone").rename(folder / "video_preprocessor_config.json")
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    assert train.run(again).status == "finished"


def test_a_resume_path_that_is_no_checkpoint_names_one(make, tmp_path: Path):
    train.run(make("data.eval=[]", "train.steps=1", "train.warmup=0"))
    for name, says in (
        ("nowhere/step_1", "does not exist; name a checkpoint such as"),
        ("run", "is not a checkpoint: name one of its checkpoints, e.g. .*step_1"),
    ):
        with pytest.raises(train.TrainError, match=says):
            train.run(make(f"run.resume={tmp_path / name}", dir="other"))


def test_a_damaged_checkpoint_is_passed_over(make):
    cfg = make("run.save_every=2", "train.steps=5")
    whole = train.run(cfg)
    newest = whole.dir / "checkpoints" / "step_5"
    (whole.dir / "result.json").unlink()
    victim = next(newest.glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-100])
    console = Console(record=True, width=300)
    before = whole.losses()
    again = train.run(override(cfg, ["run.resume=auto"]), console=console)
    assert "step_5 is skipped" in console.export_text()
    assert again.steps == 5
    assert again.losses() == before


def test_an_evaluation_names_the_step_that_was_loaded_and_what_was_passed_over(make):
    whole = train.run(make("run.save_every=2", "train.steps=3"))
    next((whole.dir / "checkpoints" / "step_3").glob("*.distcp")).write_bytes(b"")
    messages: list[str] = []
    assert train.evaluate_run(whole.dir, log=messages.append)["step"] == 2
    assert [line for line in messages if "is skipped" in line] == messages[:1]
    assert "step_3 is skipped" in messages[0]
    with pytest.warns(UserWarning, match="step_3 is skipped"):
        train.load_run(whole.dir)


def test_files_of_a_run_that_somebody_changed_are_named(make):
    cfg = make("train.steps=1", "train.warmup=0", "data.eval=[]", "run.hf=false")
    directory = train.run(cfg).dir
    (directory / "result.json").unlink()
    rows = (directory / "metrics.jsonl").read_bytes()
    for name, text, message in (
        ("metrics.jsonl", '{"stap": 1}\n', "metrics.jsonl:1 has no key 'step'"),
        ("metrics.jsonl", "[1, 2]\n", "metrics.jsonl:1 contains a list"),
        ("metrics.jsonl", 'x\n{"step": 1}\n', r"metrics.jsonl:1 is not JSON.* delete that line"),
        ("result.json", "[]", "result.json is damaged; delete it and start again .*contains a list"),
        ("result.json", '{"status": "finished"}', r"result.json is damaged \(no number of steps\)"),
    ):
        (directory / "metrics.jsonl").write_bytes(rows)
        (directory / name).write_text(text)
        with pytest.raises(train.TrainError, match=message):
            train.run(override(cfg, ["run.resume=auto"]))
