"""Load run states: find the newest good checkpoint of a run, and load it on any number of ranks.

:mod:`octavo.checkpoint.run_state.writing` describes the contents of a checkpoint and how it is written. Optimizer state
is stored by parameter *name*, so the shards of two ranks load into one process and vice versa. Before a tensor is read,
every file is compared with its checksum.

NaN and infinity are not loaded, because no training can continue from them. If state.json lacks "finite", `latest`
reads all values of the checkpoint to check them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from octavo import fp8
from octavo.checkpoint import compat
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state import files
from octavo.checkpoint.run_state import optimizer_state as states
from octavo.checkpoint.run_state.collective_errors import Ranks, dcp_errors, fail_together
from octavo.checkpoint.run_state.dcp_safe import SafeReader, TensorLoadPlanner, read_item, tensor_entry
from octavo.checkpoint.run_state.tensor_names import check_names, entry_label, refuse_nonfinite, tensors
from octavo.checkpoint.run_state.writing import TRAINED

WITHOUT_STATES = "holds only weights (run.save_states: false)"


@dataclass(frozen=True)
class RestoredState:
    """The parts of a checkpoint that `load` returns; model and optimizer are loaded in place.

    step      the step after which the state was saved
    counters  the JSON that was saved
    extra     all extra tensors of all ranks, on the CPU (see `rng.restore`)
    ranks     the number of ranks that wrote the checkpoint
    """

    step: int
    counters: dict[str, Any]
    extra: dict[str, torch.Tensor]
    ranks: int


def latest(directory: str | os.PathLike[str], world: Ranks, log: Callable[[str], None] | None = None) -> Path | None:
    """Return the newest good checkpoint, with every file compared with its checksum; None if there is no checkpoint.

    Checkpoints that are damaged, or hold NaN or infinity, are skipped, with a line to `log` (on rank 0). A collective:
    rank 0 searches, and all ranks get its result. Raises CheckpointError if there are checkpoints but none is good:
    silently starting over would be wrong.
    """
    directory = Path(directory)
    outcome = world.gather_objects(_find_newest(directory, log) if world.rank == 0 else {})[0]
    if outcome["step"] is not None:
        return files.step_path(directory, outcome["step"])
    if outcome["problems"]:
        raise CheckpointError(
            f"no checkpoint in {directory} can be used: {'; '.join(outcome['problems'])}. Restore one from a copy, or "
            "start again in another run.dir"
        )
    return None


def _find_newest(directory: Path, log: Callable[[str], None] | None) -> dict[str, Any]:
    problems: list[str] = []
    try:
        files.restore_previous(directory)
        present = files.steps(directory)
    except OSError as error:
        return {"step": None, "problems": [f"{directory} cannot be read: {error.strerror}"]}
    if not present:  # only links or other spellings: silently starting over would be wrong
        problems += [f"{name} is not a checkpoint that a run wrote" for name in files.foreign_entries(directory)]
    for step in reversed(present):
        path = files.step_path(directory, step)
        try:
            document = files.read_state(path)
            file_problems = (files.file_problem(path, name, entry) for name, entry in document["files"].items())
            bad = files.why_misplaced(path, document) or next((problem for problem in file_problems if problem), None)
            bad = bad or describe_nonfinite(path, document)
        except CheckpointError as error:
            bad = str(error)
        if bad is None:
            return {"step": step, "problems": problems}
        problems.append(bad)
        if log is not None:
            log(f"checkpoint step_{step} is skipped: {bad}")
    return {"step": None, "problems": problems}


def describe_nonfinite(path: Path, document: Mapping[str, Any]) -> str | None:
    """Return a sentence with the first tensor of a checkpoint that contains NaN or infinity, or None.

    Values are read, one tensor at a time, unless state.json (`document`) says that they are finite.
    """
    name = compat.find_nonfinite(document, lambda: _read_values(path))
    return None if name is None else f"{entry_label(name)} holds NaN or infinity"


def _read_values(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (entry, tensor) of a checkpoint one by one, weights first, without the caller's extra tensors."""
    places = SafeReader(path).read_metadata().storage_data
    ordered = sorted(places, key=lambda index: (not index.fqn.startswith("model."), index.fqn))
    for index in (index for index in ordered if not index.fqn.startswith("extra.")):
        yield index.fqn, read_item(path / places[index].relative_path, places[index], index.fqn)


def load(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: Ranks,
    may_be_missing: Callable[[str], bool] = lambda name: False,
) -> RestoredState:  # fmt: skip
    """Load the checkpoint directory `path` into `model` and `optimizer`, in place. A collective.

    The model must have the parameters that were saved, except those for whose name `may_be_missing` returns True; for a
    checkpoint of trained parameters it must train exactly these. The optimizer must have the same parameter groups. The
    number of ranks may differ. `optimizer=None` loads only the model. The caller restores the scheduler, the data
    position and the random generators from the returned counters and extra tensors. Every file is compared with its
    checksum first.

    Raises CheckpointError on every rank, naming the file or the tensor; also for NaN and infinity, and then the model
    already holds them.
    """
    path = Path(path)
    document = read_verified(path, world)
    if optimizer is not None and not document.get("states", True):
        raise CheckpointError(f"{path} {WITHOUT_STATES}: it has no optimizer state to continue with")
    with fail_together("read", path, world):
        reader = SafeReader(path)
        metadata = reader.read_metadata()
        trained_only = document.get("holds") == TRAINED
        state = tensors(model, None, trained_only)
        check_names(state, metadata, path, trained_only, model, may_be_missing)
        loaded: states.Slots = {}
        if optimizer is not None:
            loaded, slots = states.allocate_slots(model, optimizer, metadata, document, path)
            state.update(slots)
        extra = {
            name: torch.empty((entry := tensor_entry(metadata, name)).size, dtype=entry.properties.dtype)
            for name in metadata.state_dict_metadata
            if name.startswith("extra.")
        }
        state.update(extra)
    with dcp_errors("read", path):
        dcp.load(state, storage_reader=reader, planner=TensorLoadPlanner(), no_dist=world.size == 1)
    fp8.invalidate(model)  # the weights were written in place, so cached FP8 codes are stale
    with fail_together("read", path, world):
        fix = "Use an earlier checkpoint (run.resume=auto and commands without --step skip such checkpoints)"
        refuse_nonfinite(state, path, fix)
    if optimizer is not None:
        states.load_slots(model, optimizer, loaded, document)
    return RestoredState(
        step=document["step"],
        counters=document["counters"],
        extra={name.removeprefix("extra."): tensor for name, tensor in extra.items()},
        ranks=document["ranks"],
    )


def read_verified(path: Path, world: Ranks) -> dict[str, Any]:
    """Return state.json of a checkpoint after comparing its files with it: none missing, changed or unlisted.

    A collective, in which each rank reads a part of the files. Raises CheckpointError on every rank.
    """
    document: dict[str, Any] = {}
    with fail_together("read", path, world):
        document = files.read_state(path)
        listed = sorted(document["files"].items())
        for name, entry in listed[world.rank :: world.size]:
            if bad := files.file_problem(path, name, entry):
                raise CheckpointError(bad)
        if unlisted := {entry.name for entry in path.glob("*.distcp")} - set(document["files"]):
            raise CheckpointError(f"{path / min(unlisted)} is not in the list of {files.STATE}: it was added later")
    return document
