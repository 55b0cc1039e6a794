"""Reads torch.distributed.checkpoint (DCP) directories without unpickling arbitrary objects.

DCP unpickles in two places, each of which runs any code that the file names:

1. `.metadata`, with a bare `pickle.load`. `SafeReader` reads it with an unpickler that admits, by name, only the dozen
   classes that DCP writes there; then it checks the resulting object, including the file names in it.
2. Every entry that is not a tensor ("byte entry"), with an unrestricted `torch.load`. `TensorLoadPlanner` refuses a
   checkpoint that holds one. Octavo writes none: everything but tensors is JSON in state.json.

The tensors themselves are zip streams of `torch.save` inside `*.distcp`, which DCP opens with `weights_only=True`;
`SafeReader` opens them itself, so that safety does not depend on the version of torch.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from octavo.base import accelerator, safe_read
from octavo.base.encryption.writer import open_encrypted
from octavo.base.wording import count_noun
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.run_state.expert_rows import ShardedRows


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"a tensor of layout {name!r}; run states hold strided tensors only")
    return torch.strided


def _path(*parts: str) -> str:
    """Replace pathlib classes: DCP records the path that it first wrote to, which is not used."""
    return "/".join(str(part) for part in parts)


def _member(kind: object, name: object) -> object:
    """Replace getattr, by which Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles members of an enum."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it reads {name!r} of {kind!r} by getattr, which DCP does not write")
    return _MEM_FORMAT_ENCODING[str(name)]


_RECORDS = (
    Metadata,
    TensorStorageMetadata,
    BytesStorageMetadata,  # allowed, so that the error below can name the entry
    ChunkStorageMetadata,
    TensorProperties,
    MetadataIndex,
    StorageMeta,
    _StorageInfo,
)

# The globals in a `.metadata` of torch 2.11 to 2.13, found by disassembling the pickle -> what they resolve to here.
_ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in (*_RECORDS, _MEM_FORMAT_ENCODING)},
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **{("torch", str(value)[6:]): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}


class _MetadataUnpickler(pickle._Unpickler):
    """The pure Python unpickler, because single opcodes of the C implementation cannot be overridden."""

    stack: list[object]  # of the base class, which typeshed does not list
    dispatch = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which DCP does not write")
        return _ALLOWED_GLOBALS[module, name]


_load_build = pickle._Unpickler.dispatch[pickle.BUILD[0]]


def _load_build_of_records(unpickler: Any) -> None:
    # BUILD sets attributes of the object on the stack. On a class, a function or an enum member that would change DCP
    # for the whole process, so only new instances of DCP's records may be filled.
    if type(unpickler.stack[-2]) not in _RECORDS:
        raise pickle.UnpicklingError(f"it tries to change {unpickler.stack[-2]!r} itself")
    _load_build(unpickler)


_MetadataUnpickler.dispatch[pickle.BUILD[0]] = _load_build_of_records


class EncryptingFileSystem(FileSystem):
    """DCP's file system, which encrypts files as they are written. A file that was not finished cannot be read."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with open_encrypted(path) as stream:
            yield stream


class SafeWriter(FileSystemWriter):
    """DCP's writer with fsync and without the absolute path that DCP otherwise leaves in every checkpoint.

    encrypt   encrypt all its files, including `.metadata`
    """

    def __init__(self, path: str | os.PathLike[str], encrypt: bool = False) -> None:
        if accelerator.module_has_streams():
            super().__init__(path, single_file_per_rank=True, sync_files=True, overwrite=False)
        else:  # copying ahead needs the streams of an accelerator
            super().__init__(path, single_file_per_rank=True, sync_files=True, overwrite=False, per_thread_copy_ahead=0)
        if encrypt:
            self.fs = EncryptingFileSystem()

    def storage_meta(self) -> StorageMeta | None:
        return None


class SafeReader(FileSystemReader):
    """Reads a DCP directory from an untrusted source.

    Raises CheckpointError, naming the file, for a `.metadata` that names a foreign class or holds anything but
    tensors, for a tensor stream that is not one tensor of the announced shape and dtype, and for a path outside the
    directory.

    skip_byte_entries   skip entries that are not tensors, unread, instead of raising: other programs write such entries
                      with their weights (a version, arguments)
    """

    def __init__(self, path: str | os.PathLike[str], skip_byte_entries: bool = False) -> None:
        super().__init__(path)
        self.skip_byte_entries = skip_byte_entries
        self._read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of `.metadata`, read once: DCP then loads by the same object that the caller checked."""
        if self._read is None:
            self._read = self._unpickle()
        self._read.storage_meta = StorageMeta(load_id=self.load_id)
        return self._read

    def _unpickle(self) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(safe_read.read_bytes(path, CheckpointError))).load()
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} was refused: {error}. Use a checkpoint that you trust") from error
        except Exception as error:  # a damaged pickle fails in a dozen ways (EOFError, IndexError, TypeError, ...)
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error
        if self.skip_byte_entries:
            _drop_byte_entries(metadata)
        _check_metadata(metadata, path)
        metadata.planner_data = None  # paths chosen by the file, by which DCP would place the loaded values
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(_byte_entry_error(Path(self.path), item.storage_index.fqn))
            info = self.storage_data[item.storage_index]
            path = Path(self.path) / info.relative_path
            whole = read_item(path, info, item.storage_index.fqn)
            part = whole[tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))]
            target = planner.resolve_tensor(item).detach()
            if part.shape != target.shape or part.dtype != target.dtype:
                raise CheckpointError(
                    f"{path}: {item.storage_index.fqn} holds {_describe_tensor(part)} where {_describe_tensor(target)} "
                    "was announced"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class TensorLoadPlanner(DefaultLoadPlanner):
    """DCP's load planner for a flat dict of tensors and `ShardedRows`. A byte entry or another dtype is an error."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # DCP's own method would replace `ShardedRows` by None, and allocate meta tensors, of which there are none here.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        return value.shard(index) if isinstance(value, ShardedRows) else super().lookup_tensor(index)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, entry in self.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(_byte_entry_error(None, name))
            wanted = self.state_dict.get(name)
            if wanted is None:
                continue
            if entry.size != wanted.size() or entry.properties.dtype != wanted.dtype:
                raise CheckpointError(
                    f"the checkpoint's {name} is {_describe_type(entry.properties.dtype, entry.size)}, the run's is "
                    f"{_describe_tensor(wanted)}: it was written by another model or another setting of optimizer or "
                    "precision"
                )
        if missing := sorted(set(self.state_dict) - set(self.metadata.state_dict_metadata)):
            raise CheckpointError(
                f"the checkpoint has no values for {count_noun(len(missing), 'tensor')} of this run, first "
                f"{missing[0]}: it was written by another model, or with other parameters frozen"
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(_byte_entry_error(None, read_item.dest_index.fqn))


def _check_metadata(metadata: Any, path: Path) -> None:
    """Raise CheckpointError unless the unpickled object is DCP's metadata of tensors in files of this directory.

    Fields are read with `_field`, because the pickle decides which attributes its records have.
    """
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} was refused: it holds a {type(metadata).__name__}, not DCP metadata")
    entries, places = _field(metadata, "state_dict_metadata"), _field(metadata, "storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise CheckpointError(f"{path} was refused: it has no tables of entries and files")
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(_byte_entry_error(path, name))
        chunks, properties = _field(entry, "chunks"), _field(entry, "properties")
        sizes = [_field(entry, "size")]
        if isinstance(chunks, list):
            sizes += [_field(chunk, key) for chunk in chunks for key in ("offsets", "sizes")]
        whole = isinstance(chunks, list) and all(isinstance(size, torch.Size) for size in sizes)
        if not whole or not isinstance(name, str) or not isinstance(_field(properties, "dtype"), torch.dtype):
            raise CheckpointError(f"{path} was refused: its entry {name} does not describe a tensor")
    for index, info in places.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            raise CheckpointError(f"{path} was refused: its table of files holds a {type(info).__name__}")
        name, file = _field(index, "fqn"), _field(info, "relative_path")
        # A path with a folder in it could name any file of this machine.
        if not isinstance(file, str) or file != os.path.basename(file) or not file.endswith(".distcp"):
            raise CheckpointError(f"{path} was refused: {name} is stored in {file!r}, outside the checkpoint")
        if transforms := _field(info, "transform_descriptors"):
            raise CheckpointError(f"{path} was refused: {name} requires the transforms {transforms}")
        offset, length = _field(info, "offset"), _field(info, "length")
        if not (isinstance(offset, int) and isinstance(length, int) and offset >= 0 <= length):
            raise CheckpointError(f"{path} was refused: {name} is at {offset!r}, {length!r} bytes long")


def _drop_byte_entries(metadata: Any) -> None:
    """Remove the entries that are not tensors from both tables. An object of another kind is left for
    `_check_metadata`."""
    entries, places = _field(metadata, "state_dict_metadata"), _field(metadata, "storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        return
    bytes_of = {name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)}
    for name in bytes_of:
        del entries[name]
    for index in [index for index in places if _field(index, "fqn") in bytes_of]:
        del places[index]


def _field(record: Any, name: str) -> Any:
    """Return an attribute of a record, or None."""
    return getattr(record, name, None)


def read_item(path: Path, info: _StorageInfo, name: str) -> torch.Tensor:
    """Read one tensor from a `*.distcp` file to the CPU. Raises CheckpointError for anything else in its place."""
    try:
        with safe_read.open_file(path, CheckpointError) as file:
            file.seek(info.offset)
            stream = io.BytesIO(file.read(info.length))
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"{error} It holds {name}.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was refused: {name} is not a plain tensor ({safe_read.first_line(error)})"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged at {name}: {safe_read.first_line(error)}") from error
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{path} was refused: {name} is a {type(tensor).__name__}, not a tensor")
    return tensor


def tensor_entry(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """Return the entry of a tensor. `SafeReader` has refused or dropped all entries of other kinds."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata), name
    return entry


def _byte_entry_error(path: Path | None, name: str) -> str:
    where = f"{path} was refused: its" if path else "the checkpoint was refused: its"
    return f"{where} entry {name} is not a tensor but bytes, which DCP would unpickle. Octavo writes no such entries"


def _describe_tensor(tensor: torch.Tensor | ShardedRows) -> str:
    return _describe_type(tensor.dtype, tensor.shape)


def _describe_type(dtype: torch.dtype, shape: Any) -> str:
    return f"{str(dtype)[6:]} {list(shape)}"
