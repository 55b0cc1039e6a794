"""Run states, written: everything that a run needs to go on bit for bit, on disk whole or not at all.

A checkpoint holds tensors in DCP (`model.<name>`, `optimizer.<parameter>.<key>`, `extra.<name>`) and all else as
JSON in state.json: counters, the optimizer's hyper-parameters by group, and size and checksum of every file. One of
weights alone has of the optimizer nothing but what is part of a weight (`optimizer_state.OF_WEIGHTS`).

A save is two halves. `take` is the moment: what the state consists of, found finite, as live tensors. `write` is the
disk. `save` does one after the other; :mod:`octavo.checkpoint.run_state.background` copies in between, and writes
beside the steps that follow.

How a kill at any moment is survived: everything is written into `.step_N.tmp`, every file and directory is
fsynced, and only then renamed to `step_N`. A directory of that name is whole, or was damaged later; the checksums
tell. NaN and infinity are not written: nothing could go on from them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from octavo import fp8
from octavo.base import encryption
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state import files
from octavo.checkpoint.run_state import optimizer_state as states
from octavo.checkpoint.run_state.collective_errors import Ranks, dcp_errors, shared
from octavo.checkpoint.run_state.dcp_safe import SafeWriter
from octavo.checkpoint.run_state.expert_rows import EachOnce
from octavo.checkpoint.run_state.tensor_names import all_tensors, here, named, tensors

TRAINED = "trained"  # what a checkpoint of trained parameters alone says that it holds


@dataclass(frozen=True)
class Moment:
    """What a run is after a step.

    tensors   by entry: tensors, DTensors, `Rows`. Live ones: they change with the next step
    document  state.json without its list of files
    """

    tensors: Mapping[str, Any]
    document: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.document["step"])


def save(
    directory: str | os.PathLike[str],
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, torch.Tensor],
    counters: Mapping[str, Any],
    world: Ranks,
    keep: int | None,
    trained_only: bool = False,
    weights_only: bool = False,
    encrypt: bool = False,
) -> Path:
    """Write `directory`/step_N and return it; then delete all but the `keep` newest (None: delete none). A collective.

    For the rest, and what is raised, see `take` and `write`.
    """
    moment = take(
        step, model=model, optimizer=optimizer, extra=extra, counters=counters, world=world,
        trained_only=trained_only, weights_only=weights_only,
    )  # fmt: skip
    return write(directory, moment, world, keep, encrypt=encrypt)


def take(
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, torch.Tensor],
    counters: Mapping[str, Any],
    world: Ranks,
    trained_only: bool = False,
    weights_only: bool = False,
) -> Moment:
    """The state after `step` steps, of live tensors. A collective.

    trained_only: of the model, save the parameters that ask for a gradient alone (adapters), for a caller that loads
    the others again from elsewhere. Frozen FP8 weights are never saved: they are codes that came from elsewhere.
    weights_only: of the optimizer, save nothing but what is part of a weight; state.json says so, and `load` refuses to
    fill an optimizer from it. `load_weights` reads either.

    extra: tensors of the caller's. A name that several ranks give must carry equal values (one copy is written);
    what is each rank's own carries the rank in its name. counters: JSON values, taken from rank 0.

    Raises CheckpointError on every rank if it holds a value that is not finite or no tensor.
    """
    state = tensors(model, optimizer, trained_only)
    if weights_only:
        state = {n: t for n, t in state.items() if n.startswith("model.") or n.rpartition(".")[2] in states.OF_WEIGHTS}
    state.update({f"extra.{name}": tensor for name, tensor in extra.items()})
    all_tensors(state)
    with shared("write", Path(f"step_{step}"), world):
        if bad := fp8.find_nonfinite(here(state)):
            raise CheckpointError(
                f"after step {step} {named(bad[0])} holds NaN or infinity (tensors that do: {len(bad)}): nothing "
                "can go on from that, and no checkpoint is written of it. Those already there are untouched"
            )
    document = {
        "format": files.FORMAT,
        "step": step,
        "ranks": world.size,
        "counters": dict(counters),
        "groups": states.groups(model, None if weights_only else optimizer),
        "finite": True,
        **({"holds": TRAINED} if trained_only else {}),
        **({"states": False} if weights_only else {}),
    }
    return Moment(state, document)


def write(
    directory: str | os.PathLike[str],
    moment: Moment,
    world: Ranks,
    keep: int | None,
    group: dist.ProcessGroup | None = None,
    encrypt: bool = False,
) -> Path:
    """Write `directory`/step_N of a moment and return it; then delete all but the `keep` newest (None: delete none). A
    collective of `world`; DCP's own go through `group` (None: the group of all). `encrypt`: every file, with the key of
    each rank's process, which must be the same.

    Raises CheckpointError on every rank if it could not be written (disk full, no permission, ...). The checkpoints
    that were there are then untouched.
    """
    directory, step = Path(directory), moment.step
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} was asked; a run that saves keeps at least 1 checkpoint (run.keep)")
    tmp = files.aside(directory, step, "tmp")
    if encrypt:
        _one_key(world)
    try:
        with shared("write", tmp, world):
            if world.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                files.sweep(directory)
                tmp.mkdir()
        with dcp_errors("write", tmp):
            alone = world.size == 1
            state, writer = dict(moment.tensors), SafeWriter(tmp, encrypt)
            dcp.save(state, storage_writer=writer, planner=EachOnce(), process_group=group, no_dist=alone)
        mine: dict[str, dict[str, int]] = {}
        with shared("read back", tmp, world):
            names = [f"__{world.rank}_*.distcp", *([".metadata"] if world.rank == 0 else [])]
            mine = {file.name: files.fingerprint(file) for name in names for file in sorted(tmp.glob(name))}
        listed = {name: entry for part in world.gather_objects(mine) for name, entry in part.items()}
        with shared("finish", tmp, world):
            if world.rank == 0:
                files.write_state(tmp, {**moment.document, "files": listed}, encrypt)
                files.publish(directory, step)
                if keep is not None:
                    files.prune(directory, step, keep)
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(tmp, ignore_errors=True)  # best effort: a full disk is freed; what stays is swept later
        raise
    return files.place(directory, step)


def _one_key(world: Ranks) -> None:
    """That all ranks have the same key: else no process could read what they write. Raises CheckpointError."""
    key = ""
    with shared("write", Path("checkpoints"), world):
        key = encryption.find().id.hex()
    if len(found := sorted({*world.gather_objects(key)})) > 1:
        raise CheckpointError(f"the ranks were given different keys ({', '.join(found)}). Give all of them the same")
