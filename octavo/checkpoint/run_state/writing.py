"""Writes run states atomically: everything a run needs to continue bit for bit.

A checkpoint holds tensors in DCP (`model.<name>`, `optimizer.<parameter>.<key>`, `extra.<name>`) and everything else as
JSON in state.json: counters, the optimizer's hyper-parameters by group, and size and checksum of every file. A
checkpoint of weights only (`run.save_states: false`) holds no optimizer state except the parts that belong to a weight
(`optimizer_state.WEIGHT_STATES`).

A save has two halves. `take_snapshot` collects the state as live tensors and checks that it is finite; `write` writes
it to the disk. `save` calls both; :mod:`octavo.checkpoint.run_state.background` copies the snapshot in between and
writes while training continues.

A save survives a kill at any moment: everything is written into `.step_N.tmp`, every file and directory is fsynced, and
only then is the directory renamed to `step_N`. A directory with that name was complete once; the checksums detect later
damage. NaN and infinity are not written, because no training can continue from them.
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
from octavo.checkpoint.run_state.collective_errors import Ranks, dcp_errors, fail_together
from octavo.checkpoint.run_state.dcp_safe import SafeWriter
from octavo.checkpoint.run_state.expert_rows import TensorSavePlanner
from octavo.checkpoint.run_state.tensor_names import entry_label, local_tensors, refuse_non_tensors, tensors

TRAINED = "trained"  # value of "holds" in state.json where only trained parameters are saved


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after a step.

    tensors   entry name -> tensor, DTensor or `ShardedRows`. Live tensors, which the next step changes
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

    See `take_snapshot` and `write` for the other arguments and for the errors raised.
    """
    snapshot = take_snapshot(
        step,
        model=model,
        optimizer=optimizer,
        extra=extra,
        counters=counters,
        world=world,
        trained_only=trained_only,
        weights_only=weights_only,
    )
    return write(directory, snapshot, world, keep, encrypt=encrypt)


def take_snapshot(
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, torch.Tensor],
    counters: Mapping[str, Any],
    world: Ranks,
    trained_only: bool = False,
    weights_only: bool = False,
) -> Snapshot:
    """Return the state after `step` steps, as live tensors. A collective.

    trained_only  save only the parameters that require a gradient (adapters); the caller loads the others from
                  another source. Frozen FP8 weights are never saved: their codes come from another folder
    weights_only  save no optimizer state except the parts that belong to a weight. state.json records it, and `load`
                  then refuses to fill an optimizer. `load_weights` reads both kinds
    extra         further tensors. A name that several ranks pass must have equal values on them (one copy is written);
                  tensors of a single rank have the rank in their name
    counters      JSON values, taken from rank 0

    Raises CheckpointError on every rank if a value is not finite or not a tensor.
    """
    state = tensors(model, optimizer, trained_only)
    if weights_only:
        state = {
            n: t for n, t in state.items() if n.startswith("model.") or n.rpartition(".")[2] in states.WEIGHT_STATES
        }
    state.update({f"extra.{name}": tensor for name, tensor in extra.items()})
    refuse_non_tensors(state)
    with fail_together("write", Path(f"step_{step}"), world):
        if bad := fp8.find_nonfinite(local_tensors(state)):
            raise CheckpointError(
                f"after step {step} {entry_label(bad[0])} holds NaN or infinity (tensors that do: {len(bad)}): "
                "training cannot continue from that, so no checkpoint is written. Earlier checkpoints are untouched"
            )
    document = {
        "format": files.FORMAT,
        "step": step,
        "ranks": world.size,
        "counters": dict(counters),
        "groups": states.groups(model, None if weights_only else optimizer),
        "finite": True,  # as checked above; without it, `latest` reads all values
        **({"holds": TRAINED} if trained_only else {}),
        **({"states": False} if weights_only else {}),
    }
    return Snapshot(state, document)


def write(
    directory: str | os.PathLike[str],
    snapshot: Snapshot,
    world: Ranks,
    keep: int | None,
    group: dist.ProcessGroup | None = None,
    encrypt: bool = False,
) -> Path:
    """Write a snapshot to `directory`/step_N and return that path; then delete all but the `keep` newest checkpoints
    (None: delete none). A collective of `world`.

    group    process group of DCP's own collectives; None: the default group
    encrypt  encrypt every file with the key of each rank's process, which must be the same on all ranks

    Raises CheckpointError on every rank if the checkpoint could not be written (disk full, no permission, ...). The
    existing checkpoints are then untouched.
    """
    directory, step = Path(directory), snapshot.step
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} is too small: a run that saves keeps at least 1 checkpoint (run.keep)")
    tmp = files.temporary_path(directory, step, "tmp")
    if encrypt:
        _check_same_key(world)
    try:
        with fail_together("write", tmp, world):
            if world.rank == 0:
                directory.mkdir(parents=True, exist_ok=True)
                files.remove_leftovers(directory)
                tmp.mkdir()
        with dcp_errors("write", tmp):
            single = world.size == 1
            state, writer = dict(snapshot.tensors), SafeWriter(tmp, encrypt)
            dcp.save(state, storage_writer=writer, planner=TensorSavePlanner(), process_group=group, no_dist=single)
        fingerprints: dict[str, dict[str, int]] = {}
        with fail_together("read back", tmp, world):
            names = [f"__{world.rank}_*.distcp", *([".metadata"] if world.rank == 0 else [])]
            fingerprints = {file.name: files.fingerprint(file) for name in names for file in sorted(tmp.glob(name))}
        all_fingerprints = {name: entry for part in world.gather_objects(fingerprints) for name, entry in part.items()}
        with fail_together("finish", tmp, world):
            if world.rank == 0:
                # state.json comes last: without it a directory is not a checkpoint.
                files.write_state(tmp, {**snapshot.document, "files": all_fingerprints}, encrypt)
                files.publish(directory, step)
                if keep is not None:
                    files.prune(directory, step, keep)
    except CheckpointError:
        if world.rank == 0:
            # Best effort, to free a full disk. `files.remove_leftovers` removes the rest when the next save begins.
            shutil.rmtree(tmp, ignore_errors=True)
        raise
    return files.step_path(directory, step)


def _check_same_key(world: Ranks) -> None:
    """Raise CheckpointError unless all ranks have the same key: otherwise no process could read the checkpoint."""
    key = ""
    with fail_together("write", Path("checkpoints"), world):
        key = encryption.find_key().id.hex()
    if len(keys := sorted({*world.gather_objects(key)})) > 1:
        raise CheckpointError(f"the ranks have different keys ({', '.join(keys)}). Use the same key on all ranks")
