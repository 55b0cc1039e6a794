"""Seal and unseal model folders, tensor by tensor and atomically.

    seal_model     SRC -> DST: permuted weights, config.json and generation settings with sealed token ids, a tokenizer
                   of numbers, unchanged processor settings, sealed.json
    unseal_model   a sealed folder, trained or not (`hf/` of a run), -> the plain model, bit for bit

Memory holds one tensor at a time (all experts that are written as one tensor). Weights, FP8 codes and scales keep their
dtypes (:mod:`octavo.sealing.codes`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo import models
from octavo.base import atomic_write
from octavo.base.seal_note import NOTE, Note, read_note, write_note
from octavo.base.wording import count_noun
from octavo.checkpoint.export.files import Shards, nbytes
from octavo.checkpoint.export.names import Matrices
from octavo.checkpoint.hf_folder import MAX_FILE_BYTES, plan_parts
from octavo.models.folder.folder import companions, copy_companions, read_companion, read_json, require_one_folder
from octavo.models.weights.iterate import stored_dtypes
from octavo.models.weights.shards import open_weights
from octavo.models.weights.ties import empty_like_load
from octavo.models.weights.unloaded import PREDICTION_KEYS, describe_names, find_unloaded, is_prediction
from octavo.sealing import permute
from octavo.sealing.check import check_structure
from octavo.sealing.codes import Permute, find_fp8_weights
from octavo.sealing.errors import SealError
from octavo.sealing.inputs import replace_token_ids
from octavo.sealing.key import Key
from octavo.sealing.permute import Orders
from octavo.sealing.structure import Structure, read_structure
from octavo.sealing.tokenizer import write_tokenizer

Progress = Callable[[int, int], None]
#: name prefixes of COMPANIONS that contain words; they are rewritten or left out
_WORD_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class SealResult:
    """The result: folder, number of tensors, bytes, the largest difference of logits in the check (None without a
    check), and the parts of the model that are not permuted."""

    directory: Path
    tensors: int
    bytes: int
    difference: float | None
    stays: tuple[str, ...]


def seal_model(
    source: str | Path,
    target: str | Path,
    key: Key,
    *,
    largest: int | None = None,
    progress: Progress = lambda done, total: None,
) -> SealResult:
    """Write the sealed twin of a model folder.

    largest   most bytes of each of the two models in the check (:func:`octavo.sealing.check.check_structure`)
    progress  called with bytes done and total bytes

    Raises SealError for an existing target, a folder that is sealed or has three parts, and a structure or FP8 codes
    that cannot be sealed, naming the tensor; ModelError for a folder that cannot be read.
    """
    source, target = Path(source), Path(target)
    _check_folders(source, target)
    if read_note(source, SealError) is not None:
        raise SealError(f"{source} is sealed already ({NOTE}). Use the plain folder")
    stock = Matrices(empty_like_load(source))
    _refuse_unloaded(source, stock)
    axes = read_structure(stock.model)
    orders = axes.draw(key)
    difference = check_structure(source, key, largest)
    with atomic_write.new_folder(target, SealError) as folder:
        tensors, size = _write_weights(source, folder, stock, axes, orders, permute.seal_tensor, progress)
        _write_configs(source, folder, orders, back=False)
        write_tokenizer(source, folder, orders["vocab"])
        for file in companions(source):
            if not file.name.startswith(_WORD_FILES) and file.name not in (*_CONFIGS, NOTE):
                _write_settings(file, folder / file.name)
        _copy_processor_class(source, folder)
        note = {"family": stock.model.config.model_type, "stays": axes.stays, "difference": difference}
        write_note(folder, Note("model", key.fingerprint, note))
        models.load_processor(folder)  # fails here if training could not load it
        atomic_write.sync_tree(folder)
    return SealResult(target, tensors, size, difference, tuple(axes.stays))


def unseal_model(
    source: str | Path,
    target: str | Path,
    key: Key,
    like: str | Path | None = None,
    *,
    progress: Progress = lambda done, total: None,
) -> SealResult:
    """Write the plain model of a sealed folder.

    like  the plain folder that was sealed, from which tokenizer, template and processor are copied. By default only
          weights and configuration are written

    Raises SealError for a folder that is not sealed or has another key, and as :func:`seal_model` does.
    """
    source, target = Path(source), Path(target)
    _check_folders(source, target)
    check_sealed_with(source, key)
    if like is not None and read_note(like, SealError) is not None:
        raise SealError(f"--model {like} is sealed, too. Use the plain folder with the tokenizer")
    stock = Matrices(empty_like_load(source))
    _refuse_unloaded(source, stock)
    axes = read_structure(stock.model)
    orders = axes.draw(key)
    with atomic_write.new_folder(target, SealError) as folder:
        tensors, size = _write_weights(source, folder, stock, axes, orders, permute.unseal_tensor, progress)
        if like is not None:
            copy_companions(Path(like), folder)
        _write_configs(source, folder, orders, back=True)
        atomic_write.sync_tree(folder)
    return SealResult(target, tensors, size, None, tuple(axes.stays))


def check_sealed_with(folder: str | Path, key: Key) -> Note:
    """Return the note of a sealed folder. Raises SealError if it is not sealed, or with another key."""
    note = read_note(folder, SealError)
    if note is None:
        state = f"is not sealed: it has no {NOTE}" if Path(folder).is_dir() else "is not a folder; name an existing one"
        raise SealError(f"{folder} {state}")
    if note.key != key.fingerprint:
        raise SealError(f"{folder} was sealed with the key {note.key}, but this one is {key.fingerprint}")
    return note


def _refuse_unloaded(source: Path, stock: Matrices) -> None:
    """Raise SealError for tensors that the model does not load, such as layers for multi-token prediction: no module
    says what their axes are."""
    unloaded = [entry.name for entry in find_unloaded(source, stock.model)]
    if unloaded:
        text = stock.model.config.get_text_config()
        announces = any(is_prediction(stock.model, name) for name in unloaded)
        keys = [key for key in PREDICTION_KEYS if announces and getattr(text, key, None)]
        also = f", and {', '.join(keys)} from its config.json" if keys else ""
        raise SealError(
            f"{source} has {count_noun(len(unloaded), 'tensor')} that the model does not load "
            f"({describe_names(unloaded)}), first {unloaded[0]}, and sealing cannot permute them. Their axes are "
            "unknown, and unpermuted they would reveal the order of the other weights. Seal a copy of the folder "
            f"without them: remove them{also}"
        )


def _check_folders(source: Path, target: Path) -> None:
    require_one_folder(source, "octavo seal")
    if target.exists():
        raise SealError(f"{target} exists, and nothing is overwritten. Choose another folder, or delete it")
    destination, origin = target.absolute(), source.resolve()
    if origin == destination or origin in destination.parents:
        raise SealError(f"{target} is inside {source}, which must not change. Choose a folder outside it")


def _write_weights(
    source: Path, folder: Path, stock: Matrices, axes: Structure, orders: Orders, move: Permute, progress: Progress,
) -> tuple[int, int]:  # fmt: skip
    """Write every tensor, permuted; return (number, bytes)."""
    codes = find_fp8_weights(source, stock, axes)
    parts = [p for p in plan_parts(stock, stored_dtypes(source), 1) if not set(p.parameters) & set(codes.matrices)]
    with open_weights(source, bool(codes.matrices))[0] as opened:
        shapes = {name: tensor.shape for name, tensor in opened.stored.items()}
    plain = [
        (name, dtype, _stored_shape(shape, shapes.get(name))) for part in parts for name, dtype, shape in part.tensors
    ]
    tensors = [*plain, *codes.tensors()]
    total = sum(nbytes(dtype, shape) for _, dtype, shape in tensors)
    group_of = {name: part.parameters for part in parts for name in part.parameters}
    waiting: dict[str, Tensor] = {}
    done = 0
    with Shards(folder, tensors, MAX_FILE_BYTES) as shards:
        for name, value in models.iter_weights(source):
            pieces: Iterable[tuple[str, Tensor]] = ()
            if not isinstance(value, Tensor):
                pieces = codes.permute(name, value, axes.layouts[name], orders, move, stock.is_transposed(name))
            elif name in group_of:  # other tensors are computed by transformers, and not saved
                waiting[name] = move(value, axes.layouts[name], orders)
                if all(member in waiting for member in group_of[name]):
                    pieces = stock.revert({member: waiting.pop(member) for member in group_of[name]}).items()
            for disk, tensor in pieces:
                is_transposed = _stored_shape(tuple(tensor.shape), shapes.get(disk)) != tuple(tensor.shape)
                shards.write(disk, tensor.mT if is_transposed else tensor)
                done += nbytes(tensor.dtype, tuple(tensor.shape))
                progress(done, total)
        shards.finish()
    return len(tensors), total


def _stored_shape(shape: tuple[int, ...], stored: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of a tensor on disk: the source's shape for experts that are published as [E, K, N], transposed
    relative to how transformers saves them."""
    return stored if stored == (*shape[:-2], *shape[:-3:-1]) and len(shape) == 3 else shape


# Other files ----------------------------------------------------------------------------------------------------------


def _write_configs(source: Path, folder: Path, orders: Orders, back: bool) -> None:
    for name in _CONFIGS:
        if (source / name).exists():
            raw = read_json(source / name)
            raw.pop("auto_map", None)
            _write_json(folder / name, replace_token_ids(raw, orders["vocab"], back))


def _write_settings(file: Path, target: Path) -> None:
    """Copy a processor's settings without its chat template, which contains words."""
    raw = read_companion(file)
    if file.suffix != ".json":
        target.write_bytes(raw)
        return
    _write_json(target, {name: value for name, value in json.loads(raw).items() if name != "chat_template"})


def _copy_processor_class(source: Path, folder: Path) -> None:
    """Copy the processor's class name in the tokenizer's configuration, by which transformers finds the processor."""
    named: Any = read_json(source / "tokenizer_config.json") if (source / "tokenizer_config.json").exists() else {}
    if kind := named.get("processor_class"):
        file = folder / "tokenizer_config.json"
        _write_json(file, {**read_json(file), "processor_class": kind})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
