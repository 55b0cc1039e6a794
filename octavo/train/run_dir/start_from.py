"""What a run begins with that takes only another run's weights (`run.start_from`): a checkpoint, found and checked.

Model and adapters come from there; optimizer, schedule, random numbers and place in the data are new, so the settings
of the two runs may differ in all that does not change what the weights are. Which checkpoint it was stays in the run's
own ones: preferences are learnt against the first weights, whenever the run is resumed.
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
ADAPTER = ("rank", "alpha", "rslora", "dora")  # what of `lora` decides what an adapter's weights mean


def find(named: Path, cfg: Config, world: World, say: Callable[[str], None]) -> Path:
    """The checkpoint that `run.start_from` names: itself, or the newest good one of a run directory. A collective.

    Raises TrainError where there is none, and where its adapters are others than `lora` says.
    """
    path = named
    if not (named / "state.json").is_file():
        folder = named / FOLDER if (named / FOLDER).is_dir() else named
        newest = checkpoint.latest(folder, world, say) if folder.is_dir() else None
        if newest is None:
            what = "there is no such folder" if not named.is_dir() else "it is no checkpoint and holds none"
            raise TrainError(
                f"run.start_from {named}: {what}. Name a checkpoint such as runs/first/checkpoints/step_200, or the "
                "directory of a run, which means its newest"
            )
        path = newest
    path = path.resolve()
    _same_adapter(read_state(path), cfg, path)
    return path


def _same_adapter(document: Mapping[str, Any], cfg: Config, path: Path) -> None:
    """That a checkpoint of adapters is read by a run that has such ones."""
    was = (document["counters"].get("settings") or {}).get("lora")
    if not was or cfg.lora is None:  # the names of its weights tell the rest
        return
    current = cfg.lora.model_dump(mode="json")
    if differ := [
        f"lora.{key} was {was.get(key)!r}, is {current[key]!r}" for key in ADAPTER if was.get(key) != current[key]
    ]:
        raise TrainError(f"the adapters of {path} mean other weights here: {'; '.join(differ)}. Set them as they were")


def note(path: Path) -> dict[str, Any]:
    """What a run's checkpoints keep of the one that it began with."""
    return {"path": str(path), "crc32": fingerprint(path / "state.json")["crc32"]}


def noted(counters: Mapping[str, Any], cfg: Config, where: Path) -> dict[str, Any] | None:
    """What the checkpoint `where` keeps of the one that its run began with; None: the model of its folder.

    Raises TrainError where `run.start_from` names another one now, or the one there holds something else.
    """
    saved = counters.get("start_from")
    path = None if saved is None else Path(saved["path"])
    named = None if cfg.run.start_from is None else Path(cfg.run.start_from).resolve()
    if named is not None and (path is None or named not in (path, *path.parents)):
        began = "the weights of model.path" if path is None else path
        raise TrainError(
            f"{where} is of a run that began with {began}, and run.start_from is {cfg.run.start_from}. Leave it out to "
            "continue, or begin a new run in another run.dir"
        )
    if path is not None and (path / "state.json").is_file() and note(path) != saved:
        raise TrainError(f"{where} is of a run that began with {path}, which holds something else now; put it back")
    return saved


def refuse_without_states(path: Path) -> None:
    """Raise TrainError where a checkpoint that is to be continued holds weights alone."""
    if read_state(path).get("states", True):
        return
    earlier = [path.parent / f"step_{step}" for step in reversed(checkpoint.steps(path.parent))]
    whole = next((other for other in earlier if _has_states(other)), None)
    raise TrainError(
        f"{path} {checkpoint.WITHOUT_STATES}: without optimizer and random states no run continues from it. Begin a "
        f"new one with its weights, in another run.dir: run.start_from={path}"
        + ("" if whole is None else f"; or continue from {whole}, which has them: run.resume={whole}")
    )


def _has_states(path: Path) -> bool:
    """Whether a checkpoint can be continued, as far as its state.json says; of a damaged one not."""
    try:
        document = read_state(path)
    except checkpoint.CheckpointError:
        return False
    return bool(document.get("states", True)) and not checkpoint.why_misplaced(path, document)
