"""Hugging Face folders to DCP and back: bit for bit, with DCP's own loader as the witness, and what cannot be."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from octavo import fp8
from octavo.checkpoint import CheckpointError, SafeReader, convert
from octavo.checkpoint.convert import folder as convert_folder
from octavo.checkpoint.convert import work as convert_work
from octavo.checkpoint.dcp_safe import TensorsOnly
from octavo.models import ModelError
from octavo.models.headers import DTYPES

NAME = "model.language_model.layers.0.mlp.down_proj.weight"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind that a checkpoint may hold: dtypes, a scalar, nothing at all, odd lengths, experts in one tensor."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "lm_head.weight": values(10, 6).bfloat16(),
        "model.language_model.embed_tokens.weight": values(10, 6).bfloat16(),
        "model.language_model.norm.weight": values(7),
        "model.language_model.layers.0.mlp.experts.gate_up_proj": values(3, 4, 6).bfloat16(),
        "model.language_model.layers.0.steps": torch.tensor(7),
        "model.language_model.layers.0.mask": torch.tensor([True, False, True]),
        "model.visual.patch_embed.weight": values(4, 3, 2, 2, 2).half(),
        "model.visual.nothing": torch.empty(0, 5),
        "model.visual.bytes": torch.arange(5, dtype=torch.uint8),
    }


def write(folder: Path, shards: list[dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    """A folder as publishers leave it: shards, index, configuration, files of all sorts."""
    folder.mkdir(parents=True)
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt", "made": "by a test"})
        names |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}, indent=2))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "qwen3_vl", "dtype": "bfloat16"}))
    (folder / "tokenizer.json").write_text('{"a": "\\u00e9"}')
    (folder / "merges.txt").write_bytes(b"\xff\xfe\r\n")
    return folder


def quantized(seed: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict]:
    """An FP8 folder in DeepSeek's layout, two shards with a weight apart from its scales, and its configuration."""
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(seed))
    q = fp8.quantize(weight, fp8.FROZEN["block"])
    other = fp8.quantize(weight[:128, :128].contiguous(), fp8.FROZEN["block"])
    head = torch.randn(4, 4)
    config = {
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    }
    first = {NAME: q.data, "lm_head.weight": head, "b.weight": other.data, "b.weight_scale_inv": other.scale}
    return first, {f"{NAME}_scale_inv": q.scale.to(torch.float8_e8m0fnu)}, config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    all_of = tensors()
    names = list(all_of)
    return write(tmp_path / "model", [{n: all_of[n] for n in names[:4]}, {n: all_of[n] for n in names[4:]}])


def same_files(one: Path, other: Path) -> None:
    names = sorted(p.name for p in one.iterdir() if p.is_file())
    assert names == sorted(p.name for p in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def by_dcp(directory: Path, wanted: dict[str, torch.Tensor], safe: bool = False) -> dict[str, torch.Tensor]:
    """What DCP's own loader (or Octavo's safe one) finds, into empty tensors."""
    state = {key: torch.zeros_like(value) for key, value in wanted.items()}
    if safe:
        reader = SafeReader(directory, pass_over_bytes=True)
        dcp.load(state, storage_reader=reader, planner=TensorsOnly(), no_dist=True)
    else:
        dcp.load({"model": state}, checkpoint_id=directory, no_dist=True)
        return state
    return state


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().flatten().view(torch.uint8) if t.numel() else t

    return one.dtype is other.dtype and one.shape == other.shape and bool(torch.equal(raw(one), raw(other)))


def test_there_and_back_is_the_same_folder(folder, tmp_path):
    messages: list[str] = []
    steps: list[tuple[int, int]] = []
    there = convert.hf_to_dcp(
        folder, tmp_path / "dcp", say=messages.append, progress=lambda done, total: steps.append((done, total))
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
def test_dcp_itself_reads_it(folder, tmp_path, safe):
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


def test_dcp_finds_the_path_to_each_weight_and_the_version(folder, tmp_path):
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


def test_fp8_codes_and_scales_come_back_as_they_are(tmp_path):
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
        fp8.Quantized(first[NAME], second[f"{NAME}_scale_inv"].float(), fp8.FROZEN["block"]), torch.bfloat16
    )
    assert equal(found[NAME], values)
    assert equal(found["lm_head.weight"], first["lm_head.weight"].bfloat16())
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"


def test_a_tied_head_is_written_twice_and_comes_back_once(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"has lm_head.weight of its own: nothing is tied"):
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


def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file({f"{prefix}A.weight": torch.randn(2, 4), f"{prefix}B.weight": torch.randn(4, 2)},
              folder / "adapter_model.safetensors")  # fmt: skip
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return folder


def test_adapters_get_the_names_that_peft_gives_them(tmp_path):
    folder = adapter(tmp_path)
    convert.lora_hf_to_dcp(folder, tmp_path / "dcp")
    key = "base_model.model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    found = by_dcp(tmp_path / "dcp/release", {key: torch.zeros(2, 4)})
    assert equal(found[key], next(iter(load_file(folder / "adapter_model.safetensors").values())))
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")


@pytest.mark.parametrize("prefix", ["model.", "", "base_model.model.model."])
def test_what_was_trained_elsewhere_comes_back_as_its_folder(folder, tmp_path, prefix):
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
    convert.dcp_to_hf(out, tmp_path / "back", like=folder, say=messages.append)
    assert any("no checksums" in line for line in messages)
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(tmp_path / "back" / file.name)
        assert list(found) == list(load_file(file))
        assert all(equal(value, trained[name]) for name, value in found.items())
    assert (tmp_path / "back/merges.txt").read_bytes() == b"\xff\xfe\r\n"


def test_pieces_of_two_ranks_are_put_together(tmp_path):
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
            with pytest.raises(CheckpointError, match="of the 10 values of a, 4 are there"):
                convert.dcp_to_hf(out, tmp_path / "lost", like=folder)
        else:
            convert.dcp_to_hf(out, tmp_path / "back", like=folder)
            found = load_file(tmp_path / "back/model-00001-of-00001.safetensors")
            assert equal(found["a"], value) and equal(found["b"], torch.ones(2))


def test_what_was_trained_in_fp32_becomes_bf16_if_asked(folder, tmp_path):
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


# What cannot be ------------------------------------------------------------------------------------------------------


def test_ends_that_cannot_be(folder, tmp_path):
    (tmp_path / "there").mkdir()
    for source, destination, words in (
        (tmp_path / "nowhere", "d", "nowhere is not a folder"),
        (folder / "config.json", "d", "is not a folder"),
        (folder, "there", "there exists, and nothing is overwritten"),
        (folder, "model", "lies in .*model, which is only read"),
        (folder, "model/dcp", "lies in .*model, which is only read"),
        (folder, "x.converting", "is no name for a new directory"),
    ):
        with pytest.raises(CheckpointError, match=words):
            convert.hf_to_dcp(source, tmp_path / destination)
    with pytest.raises(CheckpointError, match="holds no adapter_model.safetensors but a whole model"):
        convert.lora_hf_to_dcp(folder, tmp_path / "d")
    with pytest.raises(CheckpointError, match="holds no model.safetensors but an adapter"):
        convert.hf_to_dcp(adapter(tmp_path), tmp_path / "d")
    with pytest.raises(CheckpointError, match="has no .metadata: it is no DCP checkpoint"):
        convert.dcp_to_hf(folder, tmp_path / "d")
    assert not (tmp_path / "d").exists() and not list(tmp_path.glob("*.converting"))


def test_pickles_are_refused(folder, tmp_path):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"holds only pickled weights \(pytorch_model.bin\)"):
        convert.hf_to_dcp(folder, tmp_path / "d")
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged or no safetensors file"):
        convert.hf_to_dcp(folder, tmp_path / "d")


class _Run:
    def __reduce__(self):
        return (print, ("this ran",))


def test_a_pickle_in_dcp_is_refused_and_a_stranger_s_bytes_stay_unread(folder, tmp_path, capsys):
    convert.hf_to_dcp(folder, tmp_path / "dcp")
    release = tmp_path / "dcp/release"
    (release / "__version.distcp").write_bytes(pickle.dumps(_Run()))
    (tmp_path / "dcp/conversion.json").unlink()
    convert.dcp_to_hf(release, tmp_path / "back", like=folder)  # entries that are no tensors are never opened
    (release / ".metadata").write_bytes(pickle.dumps(_Run()))
    with pytest.raises(CheckpointError, match="metadata was refused"):
        convert.dcp_to_hf(release, tmp_path / "d", like=folder)
    assert "this ran" not in capsys.readouterr().out


def test_damage_in_the_folder_is_named(folder, tmp_path):
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    whole = shard.read_bytes()
    for data, words in (
        (whole[:-3], "bytes where its header announces"),
        (whole[:40], "announces a header of"),
        (whole + b"x", "bytes where its header announces"),
        (b"", "it has 0 bytes"),
        (whole[:8] + b"[" + whole[9:], "its header is no JSON"),
        (whole.replace(b'"BF16"', b'"BF17"', 1), "has the dtype 'BF17'"),
        (whole.replace(b"[10,6]", b"[10,7]", 1), r"lm_head.weight is BF16 \[10, 7\], 140 bytes"),
    ):
        shard.write_bytes(data)
        with pytest.raises(CheckpointError, match=words) as raised:
            convert.hf_to_dcp(folder, tmp_path / "d")
        assert shard.name in str(raised.value)
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing, though model.safetensors.index.json names it"):
        convert.hf_to_dcp(folder, tmp_path / "d")


def test_an_index_that_lies_is_refused(folder, tmp_path):
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    placed = good["weight_map"]
    files = sorted(set(placed.values()))
    moved = next(name for name, file in placed.items() if file == files[0])
    for weight_map, words in (
        ({**placed, moved: files[1]}, f"places {moved} in {files[1]}, and it is in {files[0]}"),
        ({**placed, "ghost": files[0]}, "places ghost in .*, and no shard holds it"),
        ({n: f for n, f in placed.items() if n != moved}, f"holds {moved}, which .* does not list"),
        ({**placed, "x": "../x.safetensors"}, "which is not a file of this folder"),
        ({}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises((CheckpointError, ModelError), match=words):
            convert.hf_to_dcp(folder, tmp_path / "d")


def test_codes_without_scales_do_not_become_values(tmp_path):
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


def test_one_flipped_bit_is_found_on_the_way_back(folder, tmp_path):
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


def test_changed_notes_and_changed_companions_are_found(folder, tmp_path):
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


def test_another_model_s_folder_is_no_likeness(folder, tmp_path):
    dcp.save({"model": {"model.a": torch.ones(2)}}, checkpoint_id=tmp_path / "out", no_dist=True)
    with pytest.raises(CheckpointError, match="lacks 9 of 9 tensors.*trained from another model"):
        convert.dcp_to_hf(tmp_path / "out", tmp_path / "back", like=folder)
    wrong = {f"model.{n}": v for n, v in tensors().items()} | {"model.lm_head.weight": torch.ones(2, 2)}
    dcp.save({"model": wrong}, checkpoint_id=tmp_path / "out2", no_dist=True)
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[2, 2\], and .* has \[10, 6\] there"):
        convert.dcp_to_hf(tmp_path / "out2", tmp_path / "back", like=folder)
    (tmp_path / "out" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a checkpoint of a run of Octavo.*octavo export RUN"):
        convert.dcp_to_hf(tmp_path / "out", tmp_path / "back")


def test_a_full_disk_keeps_what_is_finished(folder, tmp_path, monkeypatch):
    real = convert.dcp.write_file

    def fails(file, *rest):
        if file.name.startswith("__1"):
            raise OSError(28, "No space left on device", str(file))
        return real(file, *rest)

    monkeypatch.setattr(convert.dcp, "write_file", fails)
    with pytest.raises(CheckpointError, match=r"the disk is full .* is kept in .*dcp.converting"):
        convert.hf_to_dcp(folder, tmp_path / "dcp", workers=1)
    assert not (tmp_path / "dcp").exists()
    monkeypatch.setattr(convert.dcp, "write_file", real)
    assert convert.hf_to_dcp(folder, tmp_path / "dcp").kept == 1
    convert.dcp_to_hf(tmp_path / "dcp", tmp_path / "back")
    same_files(folder, tmp_path / "back")


def test_the_beginnings_of_another_conversion_are_not_gone_on_with(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_work.Work, "publish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert.hf_to_dcp(folder, tmp_path / "dcp")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"beginnings of another conversion \(not the same: lora_base\)"):
        convert.hf_to_dcp(folder, tmp_path / "dcp", lora_base=True)
    (folder / "tokenizer.json").write_text("{ }")
    with pytest.raises(CheckpointError, match=r"not the same: source"):
        convert.hf_to_dcp(folder, tmp_path / "dcp")


def test_headers_of_safetensors_read_as_its_library_reads_them(folder):
    for shard in convert_folder.read_folder(folder).shards:
        by_library = load_file(folder / shard.file)
        assert {e.name: (DTYPES[e.dtype], e.shape) for e in shard.entries} == {
            name: (t.dtype, tuple(t.shape)) for name, t in by_library.items()
        }
        again = convert_folder.from_json(convert_folder.to_json(shard))
        assert again == shard
