"""Run states, read: the newest good one of a run, loaded on as many ranks as there are then.

What a checkpoint holds, and how it is written, is told in :mod:`octavo.checkpoint.run_state.writing`. The optimizer's
state goes by parameter *name*, so two ranks' shards load into one process and the other way round. Before a tensor is
read, every file is compared to its checksum.

NaN and infinity are not loaded: nothing can go on from them. A checkpoint whose state.json does not say "finite" has
its values read where the newest is asked for.
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
from octavo.checkpoint.run_state.collective_errors import Ranks, dcp_errors, shared
from octavo.checkpoint.run_state.dcp_safe import SafeReader, TensorsOnly, read_item
from octavo.checkpoint.run_state.tensor_names import named, refuse_dead, same_names, tensors
from octavo.checkpoint.run_state.writing import TRAINED

WITHOUT_STATES = "holds weights alone (run.save_states: false)"


@dataclass(frozen=True)
class Restored:
    """What `load` gives back beside the model and the optimizer that it filled.

    step      the step after which the state was saved
    counters  the JSON that was saved
    extra     all extra tensors, on the CPU, those of every rank (see `rng.restore`)
    ranks     how many ranks wrote it
    """

    step: int
    counters: dict[str, Any]
    extra: dict[str, torch.Tensor]
    ranks: int


def latest(directory: str | os.PathLike[str], world: Ranks, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest good checkpoint, every file read and compared to its checksum; None where there is none at all.

    One that is damaged, or holds NaN or infinity, is passed over, and `say` is called (on rank 0). A collective: rank 0
    looks, all get its answer. Raises CheckpointError if there are checkpoints but none is good: starting over in
    silence would be wrong.
    """
    directory = Path(directory)
    found = world.gather_objects(_look(directory, say) if world.rank == 0 else {})[0]
    if found["step"] is not None:
        return files.place(directory, found["step"])
    if found["problems"]:
        raise CheckpointError(
            f"no checkpoint in {directory} can be used: {'; '.join(found['problems'])}. Restore one from a copy, or "
            "start anew in another run.dir"
        )
    return None


def _look(directory: Path, say: Callable[[str], None] | None) -> dict[str, Any]:
    problems: list[str] = []
    try:
        files.recover(directory)
        there = files.steps(directory)
    except OSError as error:
        return {"step": None, "problems": [f"{directory} cannot be read: {error.strerror}"]}
    if not there:  # of links alone, or other spellings: starting over in silence would be wrong
        problems += [f"{name} is none that a run wrote" for name in files.others(directory)]
    for step in reversed(there):
        path = files.place(directory, step)
        try:
            document = files.read_state(path)
            problems_of = (files.problem(path, name, entry) for name, entry in document["files"].items())
            bad = files.copied(path, document) or next((found for found in problems_of if found), None)
            bad = bad or not_finite(path, document)
        except CheckpointError as error:
            bad = str(error)
        if bad is None:
            return {"step": step, "problems": problems}
        problems.append(bad)
        if say is not None:
            say(f"checkpoint step_{step} is passed over: {bad}")
    return {"step": None, "problems": problems}


def not_finite(path: Path, document: Mapping[str, Any]) -> str | None:
    """What of a checkpoint holds NaN or infinity, in a sentence; None: nothing does. Values are read, a tensor at a
    time, unless its state.json says that they are finite."""
    name = compat.not_finite(document, lambda: _values(path))
    return None if name is None else f"{named(name)} holds NaN or infinity"


def _values(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint but for the caller's extra ones, one at a time, weights first."""
    places = SafeReader(path).read_metadata().storage_data
    ours = sorted(places, key=lambda index: (not index.fqn.startswith("model."), index.fqn))
    for index in (index for index in ours if not index.fqn.startswith("extra.")):
        yield index.fqn, read_item(path / places[index].relative_path, places[index], index.fqn)


def load(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: Ranks,
    spare: Callable[[str], bool] = lambda name: False,
) -> Restored:  # fmt: skip
    """Fill `model` and `optimizer` in place from the checkpoint directory `path`. A collective.

    The model must have the parameters that were saved (of a checkpoint of trained parameters alone: it must train just
    these), but for those whose names are `spare`, and the optimizer the same groups of them; the number of ranks may
    differ. `optimizer=None` fills the model alone. Scheduler, data position and generators are the caller's, from the
    counters and extra tensors returned. Every file is compared to its checksum first.

    Raises CheckpointError, naming the file or the tensor, and on every rank; also for NaN and infinity, which the model
    then holds.
    """
    path = Path(path)
    document = verified(path, world)
    if optimizer is not None and not document.get("states", True):
        raise CheckpointError(f"{path} {WITHOUT_STATES}: there is no optimizer state in it to go on with")
    with shared("read", path, world):
        reader = SafeReader(path)
        metadata = reader.read_metadata()
        trained_only = document.get("holds") == TRAINED
        state = tensors(model, None, trained_only)
        same_names(state, metadata, path, trained_only, model, spare)
        loaded: states.Slots = {}
        if optimizer is not None:
            loaded, slots = states.slots(model, optimizer, metadata, document, path)
            state.update(slots)
        extra = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if name.startswith("extra.")
        }
        state.update(extra)
    with dcp_errors("read", path):
        dcp.load(state, storage_reader=reader, planner=TensorsOnly(), no_dist=world.size == 1)
    fp8.invalidate(model)  # weights were written in place, behind every cache of FP8 codes
    with shared("read", path, world):
        fix = "Use an earlier checkpoint (run.resume=auto and commands without --step pass over such)"
        refuse_dead(state, path, fix)
    if optimizer is not None:
        states.fill(model, optimizer, loaded, document)
    return Restored(
        step=document["step"],
        counters=document["counters"],
        extra={name.removeprefix("extra."): tensor for name, tensor in extra.items()},
        ranks=document["ranks"],
    )


def verified(path: Path, world: Ranks) -> dict[str, Any]:
    """state.json of a checkpoint, once all of its files were found to be what it says, and no others. A collective;
    raises CheckpointError."""
    document: dict[str, Any] = {}
    with shared("read", path, world):
        document = files.read_state(path)
        listed = sorted(document["files"].items())
        for name, entry in listed[world.rank :: world.size]:
            if bad := files.problem(path, name, entry):
                raise CheckpointError(bad)
        if unlisted := {entry.name for entry in path.glob("*.distcp")} - set(document["files"]):
            raise CheckpointError(f"{path / min(unlisted)} is not in the list of {files.STATE}: it was added later")
    return document
