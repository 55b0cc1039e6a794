"""hf/: the trained weights as a Hugging Face folder that all ranks write, none of which holds the whole model.

Names, dtypes, shapes and places in the files are decided before a value is known. Then parameter by parameter is
gathered, and one rank, each time that with the least to do, turns it into what transformers has on disk and writes it
into its place. So a rank holds its shards and one tensor, and the files are the same bytes on any number of ranks. What
fails on one rank fails on all, and leaves nothing.

Tensors of a model in three folders are named after the folder that they belong to; inside it they have the names that
are left (:class:`Homes`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.base import atomic_write, encryption, target_folder
from octavo.base.safe_read import printable
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.export.encrypted import EncryptedShards
from octavo.checkpoint.export.files import Planned, Shards, nbytes
from octavo.checkpoint.run_state.collective_errors import Ranks
from octavo.checkpoint.stock_model import Stock
from octavo.fp8.weights import full, is_frozen, master_of
from octavo.models.folder.folder import (
    INDEX,
    PARTS,
    check_companions,
    companions,
    copy_companions,
    parts_of,
    write_config,
)
from octavo.models.processors import stop_tokens

LARGEST = 5 * 10**9
_FAILURES = (OSError, RuntimeError, TypeError, ValueError)


class Part(NamedTuple):
    """Parameters that are converted together (one, usually), what they are on disk, and the rank that writes it."""

    parameters: tuple[str, ...]
    tensors: tuple[Planned, ...]
    rank: int


def save_hf(
    model: nn.Module,
    source: str | Path,
    directory: str | Path,
    world: Ranks,
    largest: int = LARGEST,
    skip: Callable[[str], bool] = lambda name: False,
    encrypt: bool = False,
) -> Path:
    """Write `model`, whole or sharded over the ranks of `world`, as a model folder, and return it. A collective.

    source   the folder the model was loaded from: config, tokenizer and processor files are copied from it
    largest  bytes of a file at most; a tensor above that has its own
    skip     names that are no part of the model (a critic's)
    encrypt  every file (:mod:`octavo.base.encryption`); which tensors share one then depends on the number of ranks

    What is written is what trains: weights in the dtypes they have (BF16 where an optimizer keeps lower halves, which
    no forward saw), frozen FP8 ones as their values. Written aside (`.NAME.part`), forced to the disk, then renamed:
    the directory is whole or as it was. An earlier model is replaced where the directory holds nothing else.

    Raises ModelError for any other directory that is not empty, names or shapes that are not those of the source's
    model, weights on the meta device, NaN or infinity, a file to copy that cannot be read or is a link out of the
    source, and a full disk; CheckpointError with the words of another rank that failed.
    """
    source, target = Path(source), Path(directory)
    _check_target(target)
    check_companions(source, copied=True)
    stock = Stock(models.empty(source))
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if not skip(name)}
    _check_names(state, stock.model)
    state = {name: master_of(state[name]) for name in stock.weights if name in state}
    dead = {name for found in world.gather_objects(fp8.find_nonfinite(state.items())) for name in found}
    _refuse_dead([name for name in state if name in dead], state)
    parts = planned(stock, {name: t.dtype for name, t in state.items()}, world.size)
    with _aside(target, world) as made:
        tensors = [tensor for part in parts for tensor in part.tensors]
        owners = {name: part.rank for part in parts for name, _, _ in part.tensors}
        encrypted = encryption.Folder(made, _one_id(world)) if encrypt else None
        homes = Homes(made, tensors, largest, owners, world.rank, parts_of(source), encrypted)
        with _shards(homes, world) as shards:
            _write(state, parts, stock, shards, world)
        sizes: Counter[torch.dtype] = Counter()
        for _, dtype, shape in tensors:
            sizes[dtype] += nbytes(dtype, shape) // dtype.itemsize if dtype.is_floating_point else 0
        with _agreed(world):
            if world.rank == 0:
                shards.write_index()
                most = max(sizes, key=sizes.__getitem__, default=torch.float32)
                write_config(source, made, most, encrypted=encrypted)
                copy_companions(source, made, encrypted)
                stop_tokens.state_end(source, made, encrypted)
                if encrypted is not None:
                    encrypted.write_list()
                atomic_write.sync_tree(made)
    return target


def planned(stock: Stock, dtypes: Mapping[str, torch.dtype], ranks: int) -> list[Part]:
    """What is written, in the model's order, and who does it: a function of the model and the number of ranks alone."""
    users: dict[str, list[str]] = {}
    for name in stock.weights:
        for disk in stock.disk[name]:
            users.setdefault(disk, []).append(name)
    parts, seen, load = [], set(), [0] * ranks
    ignored = set(getattr(stock.model, "_keys_to_ignore_on_save", None) or ())
    for name in stock.weights:
        if name in seen or name in ignored:
            continue
        group = tuple(users[stock.disk[name][0]])
        seen |= set(group)
        metas = {n: stock.weights[n].to(dtypes[n]) for n in group}
        tensors = tuple((disk, t.dtype, tuple(t.shape)) for disk, t in stock.revert(metas).items())
        rank = load.index(min(load))
        load[rank] += sum(nbytes(dtype, shape) for _, dtype, shape in tensors)
        parts.append(Part(group, tensors, rank))
    return parts


def _write(state: Mapping[str, Tensor], parts: list[Part], stock: Stock, shards: Homes, world: Ranks) -> None:
    """All parts, one after the other; a rank that cannot write goes on gathering, since the others wait for it."""
    with _agreed(world):
        error: Exception | None = None
        for part in parts:
            whole = {name: _whole(state[name]) for name in part.parameters}
            if part.rank != world.rank or error is not None:
                continue
            try:
                for name, value in stock.revert(whole).items():
                    shards.write(name, value)
            except _FAILURES as caught:
                error = caught
        if error is not None:
            raise error
        shards.flush()


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor in high precision; a collective for a DTensor."""
    here: Tensor = full(tensor.detach())
    return here.dequantize() if is_frozen(here) else here


@contextmanager
def _aside(target: Path, world: Ranks) -> Iterator[Path]:
    """One new directory for all ranks, which becomes `target`, or vanishes: see `atomic_write.folder`."""
    with ExitStack() as stack:
        made: Path | None = None
        with _agreed(world):
            if world.rank == 0:
                made = stack.enter_context(atomic_write.folder(target, models.ModelError))
        yield Path(world.gather_objects(str(made))[0])
        with _agreed(world):
            stack.close()


def _one_id(world: Ranks) -> bytes:
    """The id of the folder that all ranks write, from the first."""
    return bytes.fromhex(world.gather_objects(os.urandom(16).hex())[0])


@contextmanager
def _shards(shards: Homes, world: Ranks) -> Iterator[Homes]:
    """The files, with their headers, open on every rank."""
    try:
        for first in (True, False):  # the others open what the first rank made
            with _agreed(world):
                if (world.rank == 0) == first:
                    shards.open(create=first)
        yield shards
    finally:
        shards.close()


@contextmanager
def _agreed(world: Ranks) -> Iterator[None]:
    """What fails on one rank fails on all: there with its own error, elsewhere with its words."""
    error: Exception | None = None
    try:
        yield
    except _FAILURES as caught:
        error = caught
    said = [words for words in world.gather_objects(None if error is None else str(error)) if words is not None]
    if error is not None:
        raise error
    if said:
        raise CheckpointError(f"another rank failed, and this one with it: {said[0]}")


def _check_target(target: Path) -> None:
    """Raise ModelError for a directory that no model may replace."""
    if target.exists() and (
        not target.is_dir() or (target_folder.contents(target) and not (target / "config.json").exists())
    ):
        raise models.ModelError(f"{target} exists and is no model folder; name another directory, or delete it.")
    if foreign := _foreign(target):
        raise models.ModelError(
            f"{target} would be replaced, and {printable(foreign[0])} in it is no part of a model; move it away."
        )


def _foreign(target: Path) -> list[str]:
    """What is in a model folder that no saved model has, and would be gone with it."""
    names = target_folder.contents(target)
    own = {"config.json", INDEX, encryption.LIST, *(file.name for file in companions(target))}
    inside = {f"{part}/{name}" for part in parts_of(target) for name in os.listdir(target / part)}
    names = {name for name in names if not (inside and name in PARTS)} | inside
    return sorted(name for name in names if Path(name).name not in own and not name.endswith(".safetensors"))


def _check_names(weights: Mapping[str, Tensor], stock: nn.Module) -> None:
    """Raise ModelError where names or shapes are not those of the stock model; tied names may be left out."""
    wanted = stock.state_dict()
    tied = set(getattr(stock, "all_tied_weights_keys", {}))
    absent = [name for name in wanted if name not in weights and name not in tied]
    strange = [name for name in weights if name not in wanted]
    if absent or strange:
        raise models.ModelError(
            f"the weights are not those of the source's model: {len(absent)} missing (first {absent[:1]}), "
            f"{len(strange)} unknown (first {strange[:1]}). Save with the folder that the model was loaded from."
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise models.ModelError(
                f"{name} has shape {tuple(tensor.shape)}, the source's model {tuple(wanted[name].shape)}. Save with "
                "the folder that the model was loaded from."
            )
        if tensor.is_meta:
            raise models.ModelError(f"{name} is on the meta device and has no values to save. Load the weights first.")


def _refuse_dead(bad: Sequence[str], of: Mapping[str, Tensor]) -> None:
    """Raise ModelError where tensors, the `bad` ones, hold NaN or infinity."""
    if bad:
        raise models.ModelError(
            f"{bad[0]} holds NaN or infinity ({len(bad)} of {len(of)} tensors do), and a model that does answers "
            "with NaN: nothing is written. Save an earlier checkpoint."
        )


class Homes:
    """The weight files of a model that is being written: as `Shards`, for the folders `parts` of a directory, or
    without them for itself. `owners`: tensor -> the rank that writes it; `encrypted`: then values come in
    the order of `tensors`."""

    def __init__(
        self, directory: Path, tensors: Iterable[Planned], largest: int, owners: Mapping[str, int], rank: int,
        parts: Sequence[str] = (), encrypted: encryption.Folder | None = None,
    ) -> None:  # fmt: skip
        self._named = bool(parts)
        planned: dict[str, list[Planned]] = {part: [] for part in parts or ("",)}
        for name, dtype, shape in tensors:
            part, name = self._place(name)
            planned[part].append((name, dtype, shape))
        own: dict[str, dict[str, int]] = {part: {} for part in planned}
        for tensor, owner in owners.items():
            part, name = self._place(tensor)
            own[part][name] = owner
        self._shards: dict[str, Shards | EncryptedShards] = {}
        for part, named in own.items():
            if encrypted is not None:
                self._shards[part] = EncryptedShards(directory / part, planned[part], largest, named, rank, encrypted)
            else:
                mine = [name for name, owner in named.items() if owner == rank]
                self._shards[part] = Shards(directory / part, planned[part], largest, mine)
        self._folders = [directory / part for part in parts]

    def _place(self, name: str) -> tuple[str, str]:
        """(folder, name in it) of a tensor."""
        part, _, inside = name.partition(".")
        return (part, inside) if self._named else ("", name)

    def open(self, create: bool = True) -> None:
        """Make the files, with their headers, or open those that another process made."""
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        for shards in self._shards.values():
            shards.open(create)

    def close(self) -> None:
        for shards in self._shards.values():
            shards.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        part, inside = self._place(name)
        self._shards[part].write(inside, tensor)

    def flush(self) -> None:
        """Force what this process wrote to the disk. Raises CheckpointError if a tensor never came."""
        for shards in self._shards.values():
            shards.flush()

    def write_index(self) -> None:
        """The list of what is where, in each folder with several files."""
        for shards in self._shards.values():
            shards.write_index()
