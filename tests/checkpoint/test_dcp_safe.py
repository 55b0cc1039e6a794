"""Untrusted checkpoints run no code: planted `.metadata`, byte entries and tensor streams."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from octavo.checkpoint import CheckpointError, SafeReader, latest
from octavo.checkpoint.run_state import files as contents
from octavo.checkpoint.run_state.dcp_safe import TensorLoadPlanner
from tests.checkpoint.models import One, fresh, load, save, trained


class Payload:
    """Pickles to a call that writes a file: what an attacker would have it do."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def _metadata(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


def _plant(path: Path, name: str, data: bytes) -> None:
    """Replace a file as an attacker would, who can also make state.json agree."""
    (path / name).write_bytes(data)
    document = contents.read_state(path)
    document["files"][name] = contents.fingerprint(path / name)
    contents.write_state(path, document)


def _stock(directory: Path, state: dict) -> Path:
    """A checkpoint as plain torch writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def _read(directory: Path, state: dict) -> None:
    try:
        dcp.load(state, storage_reader=SafeReader(directory), planner=TensorLoadPlanner(), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


@pytest.fixture(autouse=True)
def _one_process_is_meant():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_allowed_globals_match_installed_torch(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu]
    given = {f"t{i}": torch.zeros(3, 2).to(dtype) for i, dtype in enumerate(dtypes)} | {"scalar": torch.ones(())}
    directory = _stock(tmp_path / "stock", given)
    read = {name: torch.full_like(t, 0) for name, t in given.items()}
    _read(directory, read)
    assert all(torch.equal(read[n].view(torch.uint8), t.view(torch.uint8)) for n, t in given.items() if t.dim())
    assert read["scalar"] == 1


def test_planted_metadata_is_rejected_without_running_code(tmp_path):
    path, flag = save(tmp_path / "run", 3, *trained()), tmp_path / "owned"
    metadata = _metadata(path)
    for place in ("planner_data", "storage_meta", "version"):
        kept = getattr(metadata, place)
        setattr(metadata, place, Payload(flag))
        _plant(path, ".metadata", pickle.dumps(metadata))
        with pytest.raises(
            CheckpointError, match=r"\.metadata was refused: it names posix\.system, which DCP does not write"
        ):
            load(path, *fresh())
        setattr(metadata, place, kept)
    assert not flag.exists()
    pickle.loads(pickle.dumps(Payload(flag)))
    assert flag.exists(), "the payload itself must work, or this test shows nothing"


@pytest.mark.parametrize("name", ["eval", "setattr", "exec", "__import__", "open"])
def test_builtins_are_not_allowed(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(f"cbuiltins\n{name}\n.".encode())
    with pytest.raises(CheckpointError, match=f"it names builtins.{name}"):
        SafeReader(tmp_path).read_metadata()


def test_getattr_reads_members_of_one_enum_only(tmp_path):
    """As Python 3.11.2 pickles them; by any other attribute a file could reach every module."""
    where = Metadata.__module__

    def read(kind: str, name: str) -> None:
        (tmp_path / ".metadata").write_bytes(f"cbuiltins\ngetattr\n(c{kind}\nS'{name}'\ntR.".encode())
        SafeReader(tmp_path).read_metadata()

    for kind, name in (
        (f"{where}\nMetadata", "__init__"),
        (f"{where}\n_MEM_FORMAT_ENCODING", "__class__"),
        (f"{where}\n_MEM_FORMAT_ENCODING", "mro"),
        ("torch\nSize", "__reduce__"),
        ("builtins\ngetattr", "__globals__"),
    ):
        with pytest.raises(CheckpointError, match="by getattr, which DCP does not write"):
            read(kind, name)
    with pytest.raises(CheckpointError) as refused:  # a member, which is no metadata
        read(f"{where}\n_MEM_FORMAT_ENCODING", "TORCH_CONTIGUOUS_FORMAT")
    assert "it holds a _MEM_FORMAT_ENCODING" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["torch\nload", "torch.serialization\nload", "torch.distributed.checkpoint.metadata\nField", "os\nsystem"]
)
def test_similar_names_are_not_allowed(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(f"c{name}\n.".encode())
    with pytest.raises(CheckpointError, match="which DCP does not write"):
        SafeReader(tmp_path).read_metadata()


def test_allowed_class_cannot_be_modified(tmp_path):
    """BUILD with a slot state would set attributes on the class object, for the whole process."""
    where = Metadata.__module__
    classes = [f"c{where}\nMetadata\n", f"c{where}\n_MEM_FORMAT_ENCODING\n", "ctorch.serialization\n_get_layout\n"]
    member = f"c{where}\n_MEM_FORMAT_ENCODING\n(I0\ntR"
    for target in [*classes, member]:
        data = target.encode() + b"(N(dS'hacked'\nI1\nstb."
        pickletools.dis(data, out=io.StringIO())  # well-formed
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match="it tries to change"):
            SafeReader(tmp_path).read_metadata()
    assert not hasattr(Metadata, "hacked")
    assert not hasattr(_MEM_FORMAT_ENCODING(0), "hacked")


@pytest.mark.parametrize("data", [b"", b"\x80", b"I1\n.", b"not a pickle", b"(lp0\n.", b"0."])
def test_wrong_metadata_object_is_reported(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata (is damaged|was refused)"):
        SafeReader(tmp_path).read_metadata()


def test_byte_entry_is_rejected_before_it_is_opened(tmp_path):
    flag = tmp_path / "owned"
    directory = _stock(tmp_path / "stock", {"model.w": torch.zeros(2), "extra.note": Payload(flag)})
    assert flag.exists() is False
    words = r"its entry extra\.note is not a tensor but bytes"
    with pytest.raises(CheckpointError, match=words):
        SafeReader(directory).read_metadata()
    with pytest.raises(AssertionError, match=words):  # torch's own words around ours
        _read(directory, {"model.w": torch.zeros(2)})
    assert not flag.exists()


def test_planted_byte_entry_is_rejected(tmp_path):
    """A tensor's own entry turned into bytes: DCP's planner would unpickle it without weights_only."""
    path, flag = save(tmp_path / "run", 3, *trained(), extra={"note": torch.zeros(1)}), tmp_path / "owned"
    metadata = _metadata(path)
    stream = io.BytesIO()
    torch.save(Payload(flag), stream)
    data = (path / "__0_0.distcp").read_bytes()
    metadata.state_dict_metadata["extra.note"] = BytesStorageMetadata()
    index = next(i for i in metadata.storage_data if i.fqn == "extra.note")
    del metadata.storage_data[index]
    metadata.storage_data[MetadataIndex("extra.note")] = _StorageInfo("__0_0.distcp", len(data), len(stream.getvalue()))
    _plant(path, "__0_0.distcp", data + stream.getvalue())
    _plant(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"its entry extra\.note is not a tensor but bytes"):
        load(path, *fresh())
    planner = TensorLoadPlanner()
    planner.set_up_planner({"extra.note": torch.zeros(1)}, metadata, True)
    with pytest.raises(CheckpointError, match=r"its entry extra\.note is not a tensor but bytes"):
        planner.create_local_plan()
    assert not flag.exists()


def _replace_stream(path: Path, name: str, value: object) -> None:
    """Point one tensor's entry to a stream of ours at the end of the data file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    data, metadata = (path / "__0_0.distcp").read_bytes(), _metadata(path)
    index = next(i for i in metadata.storage_data if i.fqn == name)
    metadata.storage_data[index] = _StorageInfo("__0_0.distcp", len(data), len(stream.getvalue()))
    _plant(path, "__0_0.distcp", data + stream.getvalue())
    _plant(path, ".metadata", pickle.dumps(metadata))


def test_planted_tensor_stream_runs_no_code(tmp_path):
    path, flag = save(tmp_path / "run", 3, *trained()), tmp_path / "owned"
    _replace_stream(path, "model.seen", Payload(flag))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was refused: model\.seen is not a plain tensor"):
        load(path, *fresh())
    assert not flag.exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 2], "model.seen is a list, not a tensor"),
        (torch.zeros(2), r"model\.seen holds float32 \[2\] where float32 \[3\] was announced"),
        (torch.zeros(3, dtype=torch.float64), r"model\.seen holds float64 \[3\] where float32 \[3\] was announced"),
    ],
)
def test_tensor_stream_with_other_shape_or_dtype_is_rejected(tmp_path, value, words):
    path = save(tmp_path / "run", 3, *trained())
    _replace_stream(path, "model.seen", value)
    with pytest.raises(CheckpointError, match=words):
        load(path, *fresh())


@pytest.mark.parametrize("where", ["../secret.distcp", "/etc/passwd", "state.json", "", None])
def test_entry_outside_the_checkpoint_is_rejected(tmp_path, where):
    path = save(tmp_path / "run", 3, *trained())
    metadata = _metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = where
    _plant(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        load(path, *fresh())


def test_transforms_and_invalid_offsets_are_rejected(tmp_path):
    path = save(tmp_path / "run", 3, *trained())
    for field, value, words in (("transform_descriptors", ["zstd"], "requires the transforms"),
                                ("offset", -1, "is at -1"), ("length", "9", "'9' bytes long")):  # fmt: skip
        metadata = _metadata(path)
        setattr(next(iter(metadata.storage_data.values())), field, value)
        before = (path / ".metadata").read_bytes()
        _plant(path, ".metadata", pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=words):
            load(path, *fresh())
        _plant(path, ".metadata", before)


def test_records_with_missing_fields_are_rejected(tmp_path):
    path = save(tmp_path / "run", 3, *trained())
    for field in ("size", "chunks", "properties"):
        metadata = _metadata(path)
        delattr(metadata.state_dict_metadata["model.seen"], field)
        before = (path / ".metadata").read_bytes()
        _plant(path, ".metadata", pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=r"its entry model\.seen does not describe a tensor"):
            load(path, *fresh())
        _plant(path, ".metadata", before)


def test_state_json_with_outside_paths_or_missing_keys_is_rejected(tmp_path):
    path = save(tmp_path / "run", 3, *trained())
    document = contents.read_state(path)
    contents.write_state(path, {**document, "files": {"../x": {"size": 1, "crc32": 1}}})
    with pytest.raises(CheckpointError, match=r"lists '\.\./x', outside the checkpoint"):
        load(path, *fresh())
    contents.write_state(path, {k: v for k, v in document.items() if k != "counters"})
    with pytest.raises(CheckpointError, match="has no key 'counters'"):
        load(path, *fresh())
    contents.write_state(path, {**document, "format": "octavo-run-state-9"})
    with pytest.raises(CheckpointError, match="has format 'octavo-run-state-9', but this version reads"):
        load(path, *fresh())
    with pytest.raises(CheckpointError, match="has format"):
        latest(tmp_path / "run", One())


def test_sparse_layout_is_rejected(tmp_path):
    path = save(tmp_path / "run", 3, *trained())
    metadata = _metadata(path)
    metadata.state_dict_metadata["model.seen"].properties = TensorProperties(layout=torch.sparse_coo)
    _plant(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"layout 'torch\.sparse_coo'"):
        load(path, *fresh())
