"""`run.start_from`: find and check the checkpoint whose weights a new run starts with.

Model and adapters come from this checkpoint; optimizer, schedule, random state and data position are new, so the two
runs may differ in every setting that does not change the meaning of the weights. Checkpoints of the new run record it,
because preference training compares with the first weights, also after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo import checkpoint
from octavo.checkpoint.run_state.files import fingerprint, read_state
from octavo.config import Config
from octavo.parallel import World
from octavo.train.errors import TrainError

FOLDER = "checkpoints"  # of a run directory
ADAPTER = ("rank", "alpha", "rslora", "dora")  # keys of `lora` that determine the meaning of an adapter's weights


def find_initial_weights(named: Path, cfg: Config, world: World, log: Callable[[str], None]) -> Path:
    """Return the checkpoint that `run.start_from` names. For a run directory it is the newest good one. Collective
    call.

    Raises TrainError if there is none, or if its adapters differ from the section `lora`.
    """
    path = named
    if not (named / "state.json").is_file():
        folder = named / FOLDER if (named / FOLDER).is_dir() else named
        newest = checkpoint.latest(folder, world, log) if folder.is_dir() else None
        if newest is None:
            problem = "there is no such folder" if not named.is_dir() else "it is not a checkpoint and contains none"
            raise TrainError(
                f"run.start_from {named}: {problem}. Name a checkpoint such as runs/first/checkpoints/step_200, or the "
                "directory of a run, which means its newest"
            )
        path = newest
    path = path.resolve()
    _check_same_adapter(read_state(path), cfg, path)
    return path


def _check_same_adapter(document: Mapping[str, Any], cfg: Config, path: Path) -> None:
    """Raise TrainError if the adapters of a checkpoint differ from the run's."""
    saved = (document["counters"].get("settings") or {}).get("lora")
    if not saved or cfg.lora is None:  # other differences show in the names of the weights
        return
    current = cfg.lora.model_dump(mode="json")
    if differ := [
        f"lora.{key} was {saved.get(key)!r}, is {current[key]!r}" for key in ADAPTER if saved.get(key) != current[key]
    ]:
        raise TrainError(f"the adapters of {path} mean other weights here: {'; '.join(differ)}. Set them as they were")


def make_note(path: Path) -> dict[str, Any]:
    """Return the record of the checkpoint that a run started from; the run's own checkpoints store it."""
    return {"path": str(path), "crc32": fingerprint(path / "state.json")["crc32"]}


def check_note(counters: Mapping[str, Any], cfg: Config, where: Path) -> dict[str, Any] | None:
    """Return the record, in the checkpoint `where`, of the checkpoint that its run started from, or None if the run
    started from the model folder.

    Raises TrainError if `run.start_from` now names a different checkpoint, or if that checkpoint has changed.
    """
    saved = counters.get("start_from")
    path = None if saved is None else Path(saved["path"])
    named = None if cfg.run.start_from is None else Path(cfg.run.start_from).resolve()
    moved = named is not None and path is not None and _has_same_state(named / FOLDER / path.name, saved)
    if named is not None and not moved and (path is None or named not in (path, *path.parents)):
        began = "the weights of model.path" if path is None else path
        raise TrainError(
            f"{where} belongs to a run that started from {began}, but run.start_from is {cfg.run.start_from}. Remove "
            "run.start_from to resume, or start a new run in another run.dir"
        )
    if path is not None and (path / "state.json").is_file() and make_note(path) != saved:
        raise TrainError(f"{where} belongs to a run that started from {path}, which has changed since; restore it")
    return saved


def _has_same_state(path: Path, saved: Mapping[str, Any] | None) -> bool:
    """Return whether a checkpoint is the one of a record, at another place."""
    return saved is not None and (path / "state.json").is_file() and make_note(path)["crc32"] == saved["crc32"]


def refuse_without_states(path: Path) -> None:
    """Raise TrainError if the checkpoint to resume from contains only weights."""
    if read_state(path).get("states", True):
        return
    earlier = [path.parent / f"step_{step}" for step in reversed(checkpoint.steps(path.parent))]
    whole = next((other for other in earlier if _has_states(other)), None)
    raise TrainError(
        f"{path} {checkpoint.WITHOUT_STATES}: a run cannot continue without optimizer and random states. Start a "
        f"new one with its weights, in another run.dir: run.start_from={path}"
        + ("" if whole is None else f"; or continue from {whole}, which has them: run.resume={whole}")
    )


def _has_states(path: Path) -> bool:
    """True if a run can resume from the checkpoint, according to its state.json; False if it is damaged."""
    try:
        document = read_state(path)
    except checkpoint.CheckpointError:
        return False
    return bool(document.get("states", True)) and not checkpoint.why_misplaced(path, document)
