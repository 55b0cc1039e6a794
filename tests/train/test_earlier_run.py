"""Files of a run without a checkpoint move to previous_N/; nothing else is moved, and nothing is overwritten."""

import fcntl
import json
from pathlib import Path

import pytest

from octavo import parallel, train
from octavo.config import Config, load_config_text, to_yaml
from octavo.train.run_dir import earlier_run, run_dir
from octavo.train.run_dir.run_lock import RunLock

FILES = ("environment.json", "plan.json", "answers.jsonl.aes", "nccl_trace_rank_3")


def config(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m/config.json").write_text("{}")
    (tmp_path / "r.jsonl").write_text("")
    text = f"""
model: {{path: {tmp_path}/m}}
data: {{train: [{{path: {tmp_path}/r.jsonl}}]}}
train: {{phase: sft, steps: 2, seq_length: 16, global_batch: 2}}
run: {{dir: {tmp_path}/run, resume: auto}}
"""
    return load_config_text(text, overrides)


def enter(cfg: Config) -> list[str]:
    """Enter the run directory as a start does, and return the lines that it prints."""
    lines: list[str] = []
    with RunLock() as lock:
        start = run_dir.enter(cfg, parallel.World(), lines.append, lock)
    assert start.step == 0 and start.checkpoint is None
    return lines


def write_failed_run(cfg: Config, rows: int = 1) -> Path:
    """Write the files of a run that ended after `rows` steps, without a checkpoint."""
    folder = Path(cfg.run.dir)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    for name in FILES:
        (folder / name).write_text("{}")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard/events").write_text("x")
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n + 1}) + "\n" for n in range(rows)))
    return folder


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("rows", [0, 1])
def test_files_of_a_run_without_a_checkpoint_make_room(tmp_path: Path, rows: int):
    folder = write_failed_run(config(tmp_path), rows)
    (folder / "log.txt").write_text("redirected")
    (folder / "checkpoints/.step_1.tmp").mkdir(parents=True)
    [line] = enter(config(tmp_path, "train.seq_length=64"))
    assert line.startswith(f"{folder} contains a run without a checkpoint: its {6 + rows} files moved to previous_1/")
    assert names(folder) == {"config.yaml", "log.txt", "checkpoints", "previous_1", ".lock"}
    assert not names(folder / "checkpoints")
    assert names(folder / "previous_1") == {"config.yaml", "tensorboard", *FILES, *(["metrics.jsonl"] * rows)}
    assert "seq_length: 16" in (folder / "previous_1/config.yaml").read_text()
    assert "seq_length: 64" in (folder / "config.yaml").read_text()
    # Killed at once: only the configuration is left, which is known by its defaults.
    assert "its 1 file moved to previous_2/" in enter(config(tmp_path, "train.seq_length=8"))[0]
    assert "seq_length: 64" in (folder / "previous_2/config.yaml").read_text()


def test_a_move_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_failed_run(config(tmp_path))

    def fails(self: Path, target: Path) -> Path:
        if self.name == "metrics.jsonl":
            raise OSError(28, "No space left on device", str(self))
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(train.TrainError, match=r"cannot be moved to previous_N/ \(No space left.*another run.dir"):
        enter(config(tmp_path))
    monkeypatch.undo()
    enter(config(tmp_path))
    moved = names(folder / "previous_1") | names(folder / "previous_2")
    assert moved == {"config.yaml", "metrics.jsonl", "tensorboard", *FILES}


def test_never_keeps_metrics_and_takes_a_run_that_failed_before_them(tmp_path: Path):
    never = config(tmp_path, "run.resume=never")
    folder = write_failed_run(never)
    before = names(folder)
    with pytest.raises(train.TrainError, match="a run without a checkpoint yet, .*run.resume=auto it makes room"):
        enter(never)
    assert names(folder) == before
    (folder / "metrics.jsonl").unlink()
    enter(never)
    assert names(folder / "previous_1") == before - {"metrics.jsonl"}


@pytest.mark.parametrize(
    "binding", ["checkpoints/step_1", "milestones/step_1", "checkpoints/.step_1.old", "result.json"]
)
def test_a_checkpoint_or_a_result_binds_the_directory(tmp_path: Path, binding: str):
    folder = write_failed_run(config(tmp_path))
    (folder / binding).mkdir(parents=True)
    with pytest.raises(train.TrainError, match="train.seq_length was 16, is now 64"):
        enter(config(tmp_path, "train.seq_length=64"))
    assert not (folder / "previous_1").exists()


def test_a_live_lock_is_refused_and_nothing_moves(tmp_path: Path):
    folder = write_failed_run(config(tmp_path))
    before = names(folder)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(train.TrainError, match="is in use by another process"):
            enter(config(tmp_path))
    assert names(folder) == before | {".lock"}


STRAYS = ("checkpoints/.DS_Store", "checkpoints/notes.txt", "checkpoints/step_1", "milestones/.gitkeep")


@pytest.mark.parametrize("overrides", [(), ("train.seq_length=64",)])
def test_other_entries_between_checkpoints_do_not_bind(tmp_path: Path, overrides: tuple[str, ...]):
    folder = write_failed_run(config(tmp_path), rows=2)
    metrics = (folder / "metrics.jsonl").read_bytes()
    for stray in STRAYS:  # step_1 is a file here, and a checkpoint is a folder
        (folder / stray).parent.mkdir(exist_ok=True)
        (folder / stray).write_text("x")
    (folder / "milestones/step_2").symlink_to(tmp_path)
    [line] = enter(config(tmp_path, *overrides))
    assert "moved to previous_1/" in line
    assert (folder / "previous_1/metrics.jsonl").read_bytes() == metrics
    assert all((folder / stray).is_file() for stray in STRAYS)


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", [None, ".config.yaml.tmp", "nccl_trace_rank_0"])
def test_a_run_that_was_killed_before_its_configuration_starts_again(tmp_path: Path, resume: str, name: str | None):
    cfg = config(tmp_path, f"run.resume={resume}")
    folder = Path(cfg.run.dir)
    folder.mkdir()
    for written in {".lock", name} - {None}:
        (folder / str(written)).write_text("")
    enter(cfg)
    assert (folder / "config.yaml").read_text() == to_yaml(cfg)


@pytest.mark.parametrize("file", sorted(Path(__file__).parents[1].glob("made_by_*/runs/*/config.yaml")), ids=str)
def test_configurations_of_earlier_versions_are_known(tmp_path: Path, file: Path):
    for name in ("config.yaml", "metrics.jsonl", "hf"):
        (tmp_path / name).write_text(file.read_text() + "# a note\n")
    earlier_run.check_written_by_run(tmp_path, ["config.yaml", "hf", "metrics.jsonl"])


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("lr: 1\n", ("metrics.jsonl", "wandb/run", "hf/model.safetensors", "adapter/a")),
        ("name: prod\n", ("environment.json", "hf/model.safetensors")),
        ("name: prod\n", ("result.json", "checkpoints/step_2/a")),
        ("model: {}\nfp8: {}\nlora:\ndata: {}\ntrain: {}\noptimizer: {}\nrun: mine\n", ("metrics.jsonl",)),
        ("- a list\n", ("metrics.jsonl",)),
        (None, ("hf/model.safetensors", "plan.json")),  # a copy of a run's configuration
        (None, ("wandb/run",)),
    ],
)
def test_names_of_a_run_do_not_make_one(tmp_path: Path, resume: str, text: str | None, entries: tuple[str, ...]):
    cfg = config(tmp_path, f"run.resume={resume}")
    folder = Path(cfg.run.dir)
    for entry in entries:
        (folder / entry).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry).write_text("mine")
    (folder / "config.yaml").write_text(to_yaml(cfg) if text is None else text)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reason = "is there without environment.json" if text is None else "config.yaml is not one that a run wrote"
    with pytest.raises(train.TrainError, match=f"contains no Octavo run.*{reason}"):
        enter(cfg)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("text", ["learning_rate: 1", "model: {path: ./m}\n", "own", "\x00"])
def test_a_directory_that_no_run_wrote_is_never_taken(tmp_path: Path, resume: str, text: str):
    cfg = config(tmp_path, f"run.resume={resume}")
    folder = Path(cfg.run.dir)
    folder.mkdir()
    if text == "own":  # a user's file of an Octavo run, with data next to it
        text = f"model: {{path: {tmp_path}/m}}\ndata: {{train: [{{path: {tmp_path}/r.jsonl}}]}}\n"
        text += "train: {phase: sft, steps: 1, seq_length: 8, global_batch: 1}\n"
    (folder / "config.yaml").write_text(text)
    (folder / "plan.json").write_text("mine")
    with pytest.raises(train.TrainError, match=r"contains no Octavo run.*config.yaml is not one that a run wrote"):
        enter(cfg)
    assert names(folder) == {"config.yaml", "plan.json"}
    assert (folder / "config.yaml").read_text() == text and (folder / "plan.json").read_text() == "mine"


def test_every_name_of_a_run_directory_is_known():
    """The docstring of `run_dir` lists what a run writes."""
    table = run_dir.__doc__.split("\n\n")[1].splitlines()
    listed = {line.split("  ")[0] for line in table if not line.startswith(" ")} - {"checkpoints/", "milestones/"}
    assert len(listed) > 10
    unknown = {name for name in listed if not earlier_run.is_written_by_run(name.rstrip("/"))}
    assert unknown == {"previous_N/", "stages/", ".lock"}
