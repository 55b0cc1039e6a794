"""Writes the trained weights as a Hugging Face folder (hf/) from all ranks, none of which holds the whole model.

Names, dtypes, shapes and file offsets are decided before any value is read. Then one parameter at a time is gathered,
and the rank with the least work so far converts it to the layout on disk and writes it to its offset. So a rank holds
its shards and one full tensor, and the files have the same bytes for any number of ranks. An error on one rank is
raised on all, and leaves no files.

Tensors of a model in three folders begin with the name of their folder; in its files they have the rest of the name
(:class:`FolderShards`).
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
from octavo.checkpoint.export.carried import RANDOM, Carried, lost, plan_carried
from octavo.checkpoint.export.encrypted import EncryptedShards
from octavo.checkpoint.export.files import PlannedTensor, Shards, nbytes
from octavo.checkpoint.run_state.collective_errors import Ranks
from octavo.checkpoint.stock_model import StockModel
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
from octavo.models.weights.shards import has_weights
from octavo.models.weights.ties import empty_without_ties, keeps_weights_apart

MAX_FILE_BYTES = 5 * 10**9  # bytes of a file, the default of transformers
_FAILURES = (OSError, RuntimeError, TypeError, ValueError)


class Part(NamedTuple):
    """Parameters that are converted together (usually one), their tensors on disk, and the rank that writes them."""

    parameters: tuple[str, ...]
    tensors: tuple[PlannedTensor, ...]
    rank: int


def save_hf(
    model: nn.Module,
    source: str | Path,
    directory: str | Path,
    world: Ranks,
    largest: int = MAX_FILE_BYTES,
    skip: Callable[[str], bool] = lambda name: False,
    encrypt: bool = False,
    loaded: bool | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write `model`, whole or sharded over the ranks of `world`, as a model folder, and return its path. A collective.

    source   the folder that the model was loaded from: config, tokenizer and processor files are copied from it, and
             the tensors that its class does not load (:mod:`octavo.checkpoint.export.carried`)
    largest  maximum bytes of a file; a larger tensor gets a separate file
    skip     whether a parameter name is not part of the model (parameters of a critic)
    encrypt  encrypt every file (:mod:`octavo.base.encryption`); which tensors share a file then depends on the ranks
    loaded   True if the weights were loaded from `source`: a source without weights is then reported. False if they
             were random: tensors of `source` do not belong to them, and are left out. None if unknown
    log      called on rank 0 with a sentence about the tensors that the class does not load

    Weights are written in their training dtypes (in BF16 where the optimizer keeps lower halves, which no forward uses)
    and frozen FP8 weights as their values. Weights that config.json ties and that are separate in the model are both
    written, with `tie_word_embeddings: false`. The folder is written as `.NAME.part`, forced to the disk and renamed,
    so `directory` is complete or unchanged. An earlier model in it is replaced if it holds nothing else.

    Raises ModelError for any other directory that is not empty, names or shapes that differ from the model in `source`,
    weights on the meta device, NaN or infinity, a file to copy that cannot be read or is a link out of the source, and
    a full disk; CheckpointError with the message of another rank that failed.
    """
    source, target = Path(source), Path(directory)
    _check_target(target)
    if not source.is_dir():
        raise models.ModelError(
            f"{target} cannot be written: {source}, the folder that the model was loaded from, is no longer there. "
            "config.json, the tokenizer and the tensors that the model does not load are copied from it: move it back"
        )
    check_companions(source, copied=True)
    stock_model = models.empty(source)
    untied = keeps_weights_apart(model, stock_model)
    stock = StockModel(empty_without_ties(source) if untied else stock_model)
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if not skip(name)}
    _check_names(state, stock.model)
    state = {name: master_of(state[name]) for name in stock.weights if name in state}
    # Gathered before any file exists, so that all ranks raise together.
    nonfinite = {name for names in world.gather_objects(fp8.find_nonfinite(state.items())) for name in names}
    _refuse_nonfinite([name for name in state if name in nonfinite], state)
    parts = plan_parts(stock, {name: t.dtype for name, t in state.items()}, world.size)
    carried = _plan_carried(source, stock, loaded, world)
    parts += [Part((), (tensor,), number % world.size) for number, tensor in enumerate(carried.tensors())]
    with _temporary_folder(target, world) as folder:
        tensors = [tensor for part in parts for tensor in part.tensors]
        owners = {name: part.rank for part in parts for name, _, _ in part.tensors}
        encrypted = encryption.Folder(folder, _shared_folder_id(world)) if encrypt else None
        folder_shards = FolderShards(folder, tensors, largest, owners, world.rank, parts_of(source), encrypted)
        with _open_shards(folder_shards, world) as shards:
            _write_parts(state, parts, stock, shards, world, carried)
        sizes: Counter[torch.dtype] = Counter()
        for _, dtype, shape in (tensor for part in parts if part.parameters for tensor in part.tensors):
            sizes[dtype] += nbytes(dtype, shape) // dtype.itemsize if dtype.is_floating_point else 0
        with _fail_together(world):
            if world.rank == 0:
                shards.write_index()
                most = max(sizes, key=sizes.__getitem__, default=torch.float32)
                write_config(source, folder, most, encrypted=encrypted, changes=carried.config, untied=untied)
                copy_companions(source, folder, encrypted)
                stop_tokens.add_end_token(source, folder, encrypted)
                if encrypted is not None:
                    encrypted.write_list()
                atomic_write.sync_tree(folder)
    for sentence in carried.sentences() if world.rank == 0 else ():
        log(sentence)
    return target


def _plan_carried(source: Path, stock: StockModel, loaded: bool | None, world: Ranks) -> Carried:
    """Return the tensors of `source` that the model does not load. Every rank reads the headers, and all must agree:
    a source that one of them cannot read is lost for all."""
    if not loaded and not has_weights(source):
        return Carried(source)
    carried = error = None
    try:
        carried = plan_carried(source, stock.model, why_not=RANDOM if loaded is False else None)
    except models.ModelError as caught:
        error = caught
    errors = [text for text in world.gather_objects(None if error is None else str(error)) if text is not None]
    if carried is None or errors:
        return lost(source, stock.model, models.ModelError(errors[0]))
    return carried


def plan_parts(stock: StockModel, dtypes: Mapping[str, torch.dtype], ranks: int) -> list[Part]:
    """Return the tensors to write, in the model's order, each with its rank.

    The result depends only on the model and the number of ranks, so that all ranks compute the same one.
    """
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


def _write_parts(
    state: Mapping[str, Tensor],
    parts: list[Part],
    stock: StockModel,
    shards: FolderShards,
    world: Ranks,
    carried: Carried,
) -> None:
    """Gather all parts, one after the other, and write the parts of this rank; parts without parameters are copied.

    A rank that cannot write continues to gather, because gathering is a collective that the others wait in.
    """
    with _fail_together(world):
        error: Exception | None = None
        for part in parts:
            whole = {name: _gather(state[name]) for name in part.parameters}
            if part.rank != world.rank or error is not None:
                continue
            try:
                values = stock.revert(whole).items() if whole else carried.read(part.tensors[0][0])
                for name, value in values:
                    shards.write(name, value)
            except _FAILURES as caught:
                error = caught
        if error is not None:
            raise error
        shards.flush()


def _gather(tensor: Tensor) -> Tensor:
    """Return the full tensor in high precision. A collective if it is a DTensor."""
    whole: Tensor = full(tensor.detach())
    return whole.dequantize() if is_frozen(whole) else whole


@contextmanager
def _temporary_folder(target: Path, world: Ranks) -> Iterator[Path]:
    """Create one new directory for all ranks, which is renamed to `target` or removed: see `atomic_write.folder`."""
    with ExitStack() as stack:
        folder: Path | None = None
        with _fail_together(world):
            if world.rank == 0:
                folder = stack.enter_context(atomic_write.new_folder(target, models.ModelError))
        yield Path(world.gather_objects(str(folder))[0])
        with _fail_together(world):
            stack.close()


def _shared_folder_id(world: Ranks) -> bytes:
    """Return an id for the encrypted folder, drawn on rank 0 and the same on all ranks."""
    return bytes.fromhex(world.gather_objects(os.urandom(16).hex())[0])


@contextmanager
def _open_shards(shards: FolderShards, world: Ranks) -> Iterator[FolderShards]:
    """Open the files on every rank; rank 0 creates them, with their headers."""
    try:
        for first in (True, False):  # rank 0 creates the files before the others open them
            with _fail_together(world):
                if (world.rank == 0) == first:
                    shards.open(create=first)
        yield shards
    finally:
        shards.close()


@contextmanager
def _fail_together(world: Ranks) -> Iterator[None]:
    """Run the block on all ranks. An error is raised on its rank, and as CheckpointError on the others."""
    error: Exception | None = None
    try:
        yield
    except _FAILURES as caught:
        error = caught
    messages = [text for text in world.gather_objects(None if error is None else str(error)) if text is not None]
    if error is not None:
        raise error
    if messages:
        raise CheckpointError(f"another rank failed: {messages[0]}")


def _check_target(target: Path) -> None:
    """Raise ModelError for a directory that a model must not replace."""
    if target.exists() and (
        not target.is_dir() or (target_folder.contents(target) and not (target / "config.json").exists())
    ):
        raise models.ModelError(f"{target} exists and is not a model folder; choose another directory, or delete it.")
    if foreign := _foreign_files(target):
        raise models.ModelError(
            f"{target} would be replaced, and {printable(foreign[0])} in it is not part of a model; move it away."
        )


def _foreign_files(target: Path) -> list[str]:
    """Return the files in a model folder that do not belong to a saved model, which replacing it would delete."""
    entries = target_folder.contents(target)
    model_files = {"config.json", INDEX, encryption.LIST, *(file.name for file in companions(target))}
    inside = {f"{part}/{name}" for part in parts_of(target) for name in os.listdir(target / part)}
    names = {name for name in entries if not (inside and name in PARTS)} | inside
    return sorted(name for name in names if Path(name).name not in model_files and not name.endswith(".safetensors"))


def _check_names(weights: Mapping[str, Tensor], stock: nn.Module) -> None:
    """Raise ModelError unless names and shapes match the stock model. Tied names may be missing."""
    wanted = stock.state_dict()
    tied = set(getattr(stock, "all_tied_weights_keys", {}))
    absent = [name for name in wanted if name not in weights and name not in tied]
    unknown = [name for name in weights if name not in wanted]
    if absent or unknown:
        raise models.ModelError(
            f"the weights do not match the source's model: {len(absent)} missing (first {absent[:1]}), "
            f"{len(unknown)} unknown (first {unknown[:1]}). Save with the folder that the model was loaded from."
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise models.ModelError(
                f"{name} has shape {tuple(tensor.shape)}, the source's model {tuple(wanted[name].shape)}. Save with "
                "the folder that the model was loaded from."
            )
        if tensor.is_meta:
            raise models.ModelError(f"{name} is on the meta device and has no values to save. Load the weights first.")


def _refuse_nonfinite(bad: Sequence[str], state: Mapping[str, Tensor]) -> None:
    """Raise ModelError if `bad`, the names of tensors in `state` that contain NaN or infinity, is not empty."""
    if bad:
        raise models.ModelError(
            f"{bad[0]} holds NaN or infinity ({len(bad)} of {len(state)} tensors do), so the model would return NaN: "
            "nothing is written. Save an earlier checkpoint."
        )


class FolderShards:
    """The weight files of a model that is being written, as `Shards` of each folder in `parts`, or of `directory`.

    owners     tensor -> the rank that writes it
    encrypted  write encrypted files; values must then come in the order of `tensors`
    """

    def __init__(
        self, directory: Path, tensors: Iterable[PlannedTensor], largest: int, owners: Mapping[str, int], rank: int,
        parts: Sequence[str] = (), encrypted: encryption.Folder | None = None,
    ) -> None:  # fmt: skip
        self._has_parts = bool(parts)
        planned: dict[str, list[PlannedTensor]] = {part: [] for part in parts or ("",)}
        for name, dtype, shape in tensors:
            part, name = self._place(name)
            planned[part].append((name, dtype, shape))
        owner_of: dict[str, dict[str, int]] = {part: {} for part in planned}
        for tensor, owner in owners.items():
            part, name = self._place(tensor)
            owner_of[part][name] = owner
        self._shards: dict[str, Shards | EncryptedShards] = {}
        for part, named in owner_of.items():
            if encrypted is not None:
                self._shards[part] = EncryptedShards(directory / part, planned[part], largest, named, rank, encrypted)
            else:
                local_names = [name for name, owner in named.items() if owner == rank]
                self._shards[part] = Shards(directory / part, planned[part], largest, local_names)
        self._folders = [directory / part for part in parts]

    def _place(self, name: str) -> tuple[str, str]:
        """Return (folder, name inside it) of a tensor."""
        part, _, inside = name.partition(".")
        return (part, inside) if self._has_parts else ("", name)

    def open(self, create: bool = True) -> None:
        """Create the files, with their headers, or open those that another process created."""
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
        for shards in self._shards.values():
            shards.open(create)

    def close(self) -> None:
        for shards in self._shards.values():
            shards.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its place in the files."""
        part, inside = self._place(name)
        self._shards[part].write(inside, tensor)

    def flush(self) -> None:
        """Force the files to the disk. Raises CheckpointError if a tensor of this process was not written."""
        for shards in self._shards.values():
            shards.flush()

    def write_index(self) -> None:
        """Write the index of each folder that has several files."""
        for shards in self._shards.values():
            shards.write_index()
