"""Hugging Face folders to DCP and back, bit for bit, checked with DCP's loader."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from octavo import fp8
from octavo.checkpoint import CheckpointError, convert
from octavo.checkpoint.convert import folder as convert_folder
from octavo.checkpoint.export.result import ExportResult, TensorStats
from octavo.cli.main import main
from octavo.fp8.weights import FROZEN
from octavo.models import ModelError
from octavo.models.folder.headers import DTYPES
from tests.checkpoint.convert_folders import (
    NAME,
    adapter,
    by_dcp,
    equal,
    quantized,
    same_files,
    tensors,
    two_shards,
    write,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return two_shards(tmp_path / "model")


def test_round_trip_restores_the_folder(folder, tmp_path):
    messages: list[str] = []
    steps: list[tuple[int, int]] = []
    there = convert.hf_to_dcp(
        folder, tmp_path / "dcp", log=messages.append, progress=lambda done, total: steps.append((done, total))
    )
    assert (there.tensors, there.files, there.kept) == (9, 2, 0) and not messages
    assert steps[-1][0] == steps[-1][1] == there.bytes
    assert sorted(p.name for p in (tmp_path / "dcp").iterdir()) == [
        "conversion.json", "hf", "latest_checkpointed_iteration.txt", "release"
    ]  # fmt: skip
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")
    convert.dcp_to_hf(tmp_path / "dcp" / "release", tmp_path / "again", workers=1)  # the folder of .metadata itself
    same_files(folder, tmp_path / "again")
    assert not list(tmp_path.glob("*.converting"))


@pytest.mark.parametrize("safe", [False, True])
def test_dcp_loads_converted_checkpoint(folder, tmp_path, safe):
    convert.hf_to_dcp(folder, tmp_path / "dcp")
    wanted = {}
    for name, value in tensors().items():
        experts = "gate_up_proj" in name  # one matrix in DCP, as MindSpeed-MM shards it
        wanted[f"model.{name}"] = value.reshape(-1, value.shape[-1]) if experts else value
    if safe:
        found = by_dcp(tmp_path / "dcp/release", {f"model.{k}": v for k, v in wanted.items()}, safe=True)
        found = {key.removeprefix("model."): value for key, value in found.items()}
    else:
        found = by_dcp(tmp_path / "dcp/release", wanted)
    for key, value in wanted.items():
        assert equal(found[key], value), key


def test_dcp_metadata_has_weight_paths_and_version(folder, tmp_path):
    """As MindSpeed-MM merges a checkpoint: into nothing, by the paths that .metadata names."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    convert.hf_to_dcp(folder, tmp_path / "dcp", lora_base=True)
    state: dict = {}
    reader = dcp.FileSystemReader(tmp_path / "dcp/release")
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert state["checkpoint_version"] == 3.0
    assert set(state["model"]) == {f"base_model.model.model.{name}" for name in tensors()}
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")


def test_fp8_codes_and_scales_survive_round_trip(tmp_path):
    first, second, config = quantized()
    folder = write(tmp_path / "fp8", [first, second], config)
    convert.hf_to_dcp(folder, tmp_path / "dcp")
    wanted = {f"model.{name}": value for name, value in (first | second).items()}
    found = by_dcp(tmp_path / "dcp/release", wanted)
    assert all(equal(found[key], value) for key, value in wanted.items())
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")


@pytest.mark.parametrize("when", ["there", "back"])
def test_to_bf16_multiplies_codes_by_their_scales(tmp_path, when):
    first, second, config = quantized()
    folder = write(tmp_path / "fp8", [first, second], config)
    convert.hf_to_dcp(folder, tmp_path / "dcp", to_bf16=when == "there")
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back", to_bf16=when == "back")
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "back" / file)
    assert set(found) == set(index["weight_map"]) == {NAME, "lm_head.weight", "b.weight"}
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in found.values())
    values = fp8.dequantize(
        fp8.Quantized(first[NAME], second[f"{NAME}_scale_inv"].float(), FROZEN["block"]), torch.bfloat16
    )
    assert equal(found[NAME], values)
    assert equal(found["lm_head.weight"], first["lm_head.weight"].bfloat16())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"


def test_tied_head_is_written_twice_and_restored_once(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"has a separate lm_head.weight: no weights are tied"):
        convert.hf_to_dcp(folder, tmp_path / "dcp", tie_weights=True)
    all_of = tensors()
    head = all_of.pop("lm_head.weight")
    tied = write(tmp_path / "tied", [all_of])
    convert.hf_to_dcp(tied, tmp_path / "dcp", tie_weights=True)
    embeddings = all_of["model.language_model.embed_tokens.weight"]
    found = by_dcp(tmp_path / "dcp/release", {"model.lm_head.weight": torch.zeros_like(head)})
    assert equal(found["model.lm_head.weight"], embeddings)
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(tied, tmp_path / "back")


def test_adapter_keys_match_peft(tmp_path):
    folder = adapter(tmp_path)
    convert.lora_hf_to_dcp(folder, tmp_path / "dcp")
    key = "base_model.model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    found = by_dcp(tmp_path / "dcp/release", {key: torch.zeros(2, 4)})
    assert equal(found[key], next(iter(load_file(folder / "adapter_model.safetensors").values())))
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")


@pytest.mark.parametrize("prefix", ["model.", "", "base_model.model.model."])
def test_checkpoint_trained_elsewhere_is_converted_with_like(folder, tmp_path, prefix):
    """DCP's own writer, with a version and an optimizer's state beside the weights: they are found."""
    trained = {name: value + 1 if value.is_floating_point() else value for name, value in tensors().items()}
    state = {
        "model": {prefix + name: value.reshape(-1, value.shape[-1]) if value.dim() == 3 else value
                  for name, value in trained.items()},
        "optimizer": {"state": torch.ones(3)},
        "checkpoint_version": 3.0,
    }  # fmt: skip
    out = tmp_path / "out"
    dcp.save(state, checkpoint_id=out / "iter_0000050", no_dist=True)
    (out / "latest_checkpointed_iteration.txt").write_text("50")
    with pytest.raises(CheckpointError, match="was not converted by Octavo.*--like FOLDER"):
        convert.dcp_to_hf(out, tmp_path / "back")
    messages: list[str] = []
    convert.dcp_to_hf(out, tmp_path / "back", like=folder, log=messages.append)
    assert any("no checksums" in line for line in messages)
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(tmp_path / "back" / file.name)
        assert list(found) == list(load_file(file))
        assert all(equal(value, trained[name]) for name, value in found.items())
    assert (tmp_path / "back/merges.txt").read_bytes() == b"\xff\xfe\r\n"


def test_shards_of_two_ranks_are_joined(tmp_path):
    """A tensor in two files, as FSDP2 shards it; without one of them it is refused."""
    folder = write(tmp_path / "model", [{"a": torch.zeros(5, 2), "b": torch.zeros(2)}])
    value, out = torch.arange(10.0).reshape(5, 2), tmp_path / "out"
    out.mkdir()
    parts = {0: value[:3].clone(), 3: value[3:].clone()}
    places = {}
    for rank, (start, part) in enumerate(parts.items()):
        torch.save(part, out / f"__{rank}_0.distcp")
        size = (out / f"__{rank}_0.distcp").stat().st_size
        places[MetadataIndex("a", torch.Size([start, 0]), rank)] = _StorageInfo(f"__{rank}_0.distcp", 0, size)
    torch.save(torch.ones(2), out / "__2_0.distcp")
    size = (out / "__2_0.distcp").stat().st_size
    places[MetadataIndex("b", torch.Size([0]), 0)] = _StorageInfo("__2_0.distcp", 0, size)

    def described(*chunks: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(c[: len(c) // 2]), torch.Size(c[len(c) // 2 :])) for c in chunks]

    fp32 = TensorProperties(dtype=torch.float32)
    entries = {
        "a": TensorStorageMetadata(fp32, torch.Size([5, 2]), described((0, 0, 3, 2), (3, 0, 2, 2))),
        "b": TensorStorageMetadata(fp32, torch.Size([2]), described((0, 2))),
    }
    for missing in (False, True):
        if missing:
            places.pop(next(iter(places)))
        (out / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))
        if missing:
            with pytest.raises(CheckpointError, match="of the 10 values of a, 4 are present"):
                convert.dcp_to_hf(out, tmp_path / "lost", like=folder)
        else:
            convert.dcp_to_hf(out, tmp_path / "back", like=folder)
            found = load_file(tmp_path / "back/model-00001-of-00001.safetensors")
            assert equal(found["a"], value) and equal(found["b"], torch.ones(2))


def test_fp32_checkpoint_is_converted_to_bf16(folder, tmp_path):
    trained = {f"model.{name}": value.float() if value.is_floating_point() else value
               for name, value in tensors().items()}  # fmt: skip
    dcp.save({"model": trained}, checkpoint_id=tmp_path / "out", no_dist=True)
    convert.dcp_to_hf(tmp_path / "out", tmp_path / "wide", like=folder)
    convert.dcp_to_hf(tmp_path / "out", tmp_path / "back", like=folder, to_bf16=True)
    wide, back = ({}, {})
    for file in folder.glob("*.safetensors"):
        wide |= load_file(tmp_path / "wide" / file.name)
        back |= load_file(tmp_path / "back" / file.name)
    assert {t.dtype for t in wide.values() if t.is_floating_point()} == {torch.float32}
    assert {t.dtype for t in back.values() if t.is_floating_point()} == {torch.bfloat16}
    assert equal(back["model.language_model.norm.weight"], tensors()["model.language_model.norm.weight"].bfloat16())


def test_codes_without_scales_are_rejected(tmp_path):
    first, second, config = quantized()
    no_scale = write(tmp_path / "a", [first], config)
    with pytest.raises(ModelError, match=f"FP8 codes without scales: {NAME}_scale_inv is missing"):
        convert.hf_to_dcp(no_scale, tmp_path / "d", to_bf16=True)
    turned = write(tmp_path / "b", [first, {f"{NAME}_scale_inv": torch.ones(3, 2)}], config)
    with pytest.raises(ModelError, match=r"has shape \[3, 2\]; .* have scales of shape \[2, 2\]"):
        convert.hf_to_dcp(turned, tmp_path / "d", to_bf16=True)
    silent = write(tmp_path / "c", [first, second], {"model_type": "qwen3"})
    with pytest.raises(ModelError, match="config.json has no quantization_config"):
        convert.hf_to_dcp(silent, tmp_path / "d", to_bf16=True)
    assert not (tmp_path / "d").exists()


def test_headers_match_the_safetensors_library(folder):
    for shard in convert_folder.read_folder(folder).shards:
        by_library = load_file(folder / shard.file)
        assert {e.name: (DTYPES[e.dtype], e.shape) for e in shard.entries} == {
            name: (t.dtype, tuple(t.shape)) for name, t in by_library.items()
        }
        again = convert_folder.from_json(convert_folder.to_json(shard))
        assert again == shard


def test_counts_of_one_are_in_the_singular(tmp_path, capsys):
    assert main(["convert", "hf_to_dcp", str(write(tmp_path / "model", [tensors()])), str(tmp_path / "dcp")]) == 0
    assert re.search(r"dcp: 9 tensors, .* in 1 file, ", capsys.readouterr().out.replace("\n", " "))
    one = {"a": TensorStats(count=1, bytes=2)}
    done = ExportResult(tmp_path, "fp8-block", "llama", ("a",), 2, one, (1, 1), "fp8", {}, {})
    assert "1 of 1 linear layer in FP8, 1 tensor, " in done.sentences()[0] and done.sentences()[0].endswith("in 1 file")
