"""Rejected conversions: errors of source and destination are reported, and finished files are kept."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from octavo.checkpoint import CheckpointError, convert
from octavo.checkpoint.convert import resumable_work as convert_work
from octavo.models import ModelError
from tests.checkpoint.convert_folders import adapter, same_files, tensors, two_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_shards(tmp_path / "model")


def test_invalid_source_or_destination_is_rejected(folder, tmp_path):
    (tmp_path / "there").mkdir()
    for source, destination, words in (
        (tmp_path / "nowhere", "d", "nowhere is not a folder"),
        (folder / "config.json", "d", "is not a folder"),
        (folder, "there", "there exists and is not overwritten"),
        (folder, "model", "is inside .*model, which must not change"),
        (folder, "model/dcp", "is inside .*model, which must not change"),
        (folder, "x.converting", "is not a valid name for a new directory"),
    ):
        with pytest.raises(CheckpointError, match=words):
            convert.hf_to_dcp(source, tmp_path / destination)
    with pytest.raises(CheckpointError, match="holds a whole model, not adapter_model.safetensors"):
        convert.lora_hf_to_dcp(folder, tmp_path / "d")
    with pytest.raises(CheckpointError, match="holds an adapter, not model.safetensors"):
        convert.hf_to_dcp(adapter(tmp_path), tmp_path / "d")
    with pytest.raises(CheckpointError, match="has no .metadata: it is not a DCP checkpoint"):
        convert.dcp_to_hf(folder, tmp_path / "d")
    assert not (tmp_path / "d").exists() and not list(tmp_path.glob("*.converting"))


def test_checkpoint_with_nan_is_rejected(folder, tmp_path):
    """A folder's own bytes come back whatever they say; what was trained is a model, or it is not."""
    trained = {f"model.{name}": value.clone() for name, value in tensors().items()}
    name = next(name for name, value in trained.items() if value.dtype is torch.bfloat16)
    trained[name].view(-1)[-1] = float("nan")
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "trained", no_dist=True)
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        convert.dcp_to_hf(tmp_path / "trained", tmp_path / "back", like=folder)
    assert not (tmp_path / "back").exists()


def test_pickles_are_rejected(folder, tmp_path):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"contains only pickled weights \(pytorch_model.bin\)"):
        convert.hf_to_dcp(folder, tmp_path / "d")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or not a safetensors file"):
        convert.hf_to_dcp(folder, tmp_path / "d")


class _Run:
    def __reduce__(self):
        return (print, ("this ran",))


def test_pickles_in_dcp_are_rejected_and_byte_entries_stay_unread(folder, tmp_path, capsys):
    convert.hf_to_dcp(folder, tmp_path / "dcp")
    release = tmp_path / "dcp/release"
    (release / "__version.distcp").write_bytes(pickle.dumps(_Run()))
    (tmp_path / "dcp/conversion.json").unlink()
    convert.dcp_to_hf(release, tmp_path / "back", like=folder)  # entries that are no tensors are never opened
    (release / ".metadata").write_bytes(pickle.dumps(_Run()))
    with pytest.raises(CheckpointError, match="metadata was refused"):
        convert.dcp_to_hf(release, tmp_path / "d", like=folder)
    assert "this ran" not in capsys.readouterr().out


def test_damaged_folder_is_reported(folder, tmp_path):
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    whole = shard.read_bytes()
    for data, words in (
        (whole[:-3], "bytes, but its header declares"),
        (whole[:40], "declares a header of"),
        (whole + b"x", "bytes, but its header declares"),
        (b"", "it has 0 bytes"),
        (whole[:8] + b"[" + whole[9:], "its header is not JSON"),
        (whole.replace(b'"BF16"', b'"BF17"', 1), "has the dtype 'BF17'"),
        (whole.replace(b"[10,6]", b"[10,7]", 1), r"lm_head.weight is BF16 \[10, 7\], 140 bytes"),
    ):
        shard.write_bytes(data)
        with pytest.raises(CheckpointError, match=words) as raised:
            convert.hf_to_dcp(folder, tmp_path / "d")
        assert shard.name in str(raised.value)
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing, although model.safetensors.index.json names it"):
        convert.hf_to_dcp(folder, tmp_path / "d")


def test_wrong_index_is_rejected(folder, tmp_path):
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    placed = good["weight_map"]
    files = sorted(set(placed.values()))
    moved = next(name for name, file in placed.items() if file == files[0])
    for weight_map, words in (
        ({**placed, moved: files[1]}, f"places {moved} in {files[1]}, and it is in {files[0]}"),
        ({**placed, "ghost": files[0]}, "places ghost in .*, and no shard holds it"),
        ({n: f for n, f in placed.items() if n != moved}, f"contains {moved}, which .* does not list"),
        ({**placed, "x": "../x.safetensors"}, "which is not a file of this folder"),
        ({}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises((CheckpointError, ModelError), match=words):
            convert.hf_to_dcp(folder, tmp_path / "d")


def test_flipped_bit_is_detected_when_converting_back(folder, tmp_path):
    convert.hf_to_dcp(folder, tmp_path / "dcp")
    file = tmp_path / "dcp/release/__0_0.distcp"
    whole = bytearray(file.read_bytes())
    entry = json.loads((tmp_path / "dcp/conversion.json").read_text())["tensors"][0][0]
    whole[entry["data"] + 3] ^= 1
    file.write_bytes(whole)
    for to_bf16 in (False, True):
        with pytest.raises(CheckpointError, match=r"__0_0.distcp is corrupt between bytes"):
            convert.dcp_to_hf(tmp_path / "dcp", tmp_path / f"back{to_bf16}", to_bf16=to_bf16)
        assert not (tmp_path / f"back{to_bf16}").exists()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "gone")
    (tmp_path / "dcp/hf/tokenizer.json").write_text("{}")
    shutil.copy(next(tmp_path.glob("dcp/release/__1*")), file)
    with pytest.raises(CheckpointError):
        convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "other")


def test_changed_manifest_and_companions_are_detected(folder, tmp_path):
    convert.hf_to_dcp(folder, tmp_path / "dcp")
    (tmp_path / "dcp/hf/tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is corrupt"):
        convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    notes = tmp_path / "dcp/conversion.json"
    notes.write_text(notes.read_text().replace("norm", "born"))
    with pytest.raises(CheckpointError, match="conversion.json was changed after it was written"):
        convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "b")
    notes.write_text("{")
    with pytest.raises(CheckpointError, match="conversion.json is damaged"):
        convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "b")


def test_like_of_another_model_is_rejected(folder, tmp_path):
    dcp.save({"model": {"model.a": torch.ones(2)}}, checkpoint_id=tmp_path / "out", no_dist=True)
    with pytest.raises(CheckpointError, match="has no values for 9 of 9 tensors.*trained from another model"):
        convert.dcp_to_hf(tmp_path / "out", tmp_path / "back", like=folder)
    wrong = {f"model.{n}": v for n, v in tensors().items()} | {"model.lm_head.weight": torch.ones(2, 2)}
    dcp.save({"model": wrong}, checkpoint_id=tmp_path / "out2", no_dist=True)
    with pytest.raises(
        CheckpointError,
        match=r"lm_head.weight has shape \[2, 2\], and .* has \[10, 6\]: it was trained from another model",
    ):
        convert.dcp_to_hf(tmp_path / "out2", tmp_path / "back", like=folder)
    (tmp_path / "out" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is the checkpoint of an Octavo run.*octavo export RUN"):
        convert.dcp_to_hf(tmp_path / "out", tmp_path / "back")


def test_full_disk_keeps_finished_files(folder, tmp_path, monkeypatch):
    real = convert.dcp.write_file

    def fails(file, *rest):
        if file.name.startswith("__1"):
            raise OSError(28, "No space left on device", str(file))
        return real(file, *rest)

    monkeypatch.setattr(convert.dcp, "write_file", fails)
    with pytest.raises(CheckpointError, match=r"the disk is full .* are kept in .*dcp.converting"):
        convert.hf_to_dcp(folder, tmp_path / "dcp", workers=1)
    assert not (tmp_path / "dcp").exists()
    monkeypatch.setattr(convert.dcp, "write_file", real)
    assert convert.hf_to_dcp(folder, tmp_path / "dcp").kept == 1
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")


def test_unfinished_conversion_with_other_options_is_not_continued(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_work.Work, "publish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert.hf_to_dcp(folder, tmp_path / "dcp")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"holds an unfinished conversion that differs in lora_base"):
        convert.hf_to_dcp(folder, tmp_path / "dcp", lora_base=True)
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"holds an unfinished conversion that differs in source"):
        convert.hf_to_dcp(folder, tmp_path / "dcp")
