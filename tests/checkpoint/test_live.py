"""hf/ written by all ranks has the bytes of one process and is written atomically."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import checkpoint, models
from octavo.checkpoint.export.files import Shards
from octavo.checkpoint.hf_folder import plan_parts
from octavo.checkpoint.stock_model import StockModel
from octavo.fp8.weights import is_frozen
from octavo.models.tiny import tiny
from octavo.parallel import World, shard
from tests import ranks

SMALL = 150_000  # bytes of a file
FEW = ("qwen3_vl_moe", "qwen3_moe")  # experts turned round on disk, and one by one
REST = ("qwen3_vl", "qwen2_5_vl", "internvl", "llavaonevision1_5", "nvila_lite", "llama", "mpt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mini checkpoints of some families."""
    place = tmp_path_factory.mktemp("hf")
    for family in (*FEW, *REST):
        tiny.write(family, place / family, size="mini")
    return place


def _bytes(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


def _write(world: World, folder: str, families: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The files of each family: in BF16, a part frozen in FP8, tied weights tied, and a critic that is left out."""
    found = {}
    for family in families:
        source, target = Path(folder) / family, Path(folder) / f"{family}_{world.size}"
        model = models.load(source, torch.bfloat16, load_in_fp8="row" if family in FEW else None)
        description = models.describe(model)
        model.register_parameter("critic", torch.nn.Parameter(torch.ones(4)))
        shard(model, description, world)
        checkpoint.save_hf(model, source, target, world, SMALL, skip=lambda name: name == "critic")
        world.barrier()
        found[family] = _bytes(target)
    return found


def _same(folder: Path, size: int, families: tuple[str, ...], replicate: int = 1) -> None:
    alone = _write(World(), str(folder), families)
    assert ranks.run(_write, size, str(folder), families, replicate=replicate) == [alone] * size
    for family in families:
        model = models.load(folder / family, torch.bfloat16, load_in_fp8="row" if family in FEW else None)
        weights = {n: w.dequantize() if is_frozen(w) else w for n, w in model.state_dict().items()}
        stock = folder / f"{family}_stock"
        models.empty(folder / family).save_pretrained(stock, state_dict=weights)
        files = [load_file(file) for file in sorted((folder / f"{family}_1").glob("*.safetensors"))]
        written = {name: tensor for file in files for name, tensor in file.items()}
        wanted = load_file(stock / "model.safetensors")
        assert len(files) > 1 and sum(map(len, files)) == len(written)
        assert written.keys() == wanted.keys() and all(torch.equal(t, wanted[name]) for name, t in written.items())
        again = models.load(folder / f"{family}_1", torch.bfloat16).state_dict()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        others = _bytes(folder / family)
        assert {name for name, sum_ in alone[family].items() if others.get(name) == sum_} >= {"tokenizer.json"}


def test_two_ranks_write_the_bytes_of_one(folder: Path):
    _same(folder, 2, FEW)


@pytest.mark.long
def test_replicated_model_is_written_once(folder: Path):
    _same(folder, 4, FEW[:1], replicate=2)


@pytest.mark.long
def test_three_ranks_write_each_family(folder: Path):
    _same(folder, 3, REST)


def test_ranks_share_the_writing():
    stock = StockModel(models.empty(models.tiny_config("qwen3_moe")))
    parts = plan_parts(stock, dict.fromkeys(stock.weights, torch.bfloat16), 3)
    load = [0, 0, 0]
    sizes = [sum(torch.Size(shape).numel() for _, _, shape in part.tensors) for part in parts]
    for part, size in zip(parts, sizes, strict=True):
        load[part.rank] += size
    assert max(load) - min(load) <= max(sizes)
    assert [name for part in parts for name in part.parameters] == list(stock.weights)


def _fails(world: World, folder: str) -> list[str]:
    """What each rank says where the last one cannot write, and where it holds a NaN."""
    source, target = Path(folder) / "llama", Path(folder) / "kept"
    model = models.load(source)
    shard(model, models.describe(model), world)
    checkpoint.save_hf(model, source, target, world)
    said, write = [], Shards.write

    def full(self: Shards, name: str, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    for what in ("disk", "value"):
        Shards.write = full if what == "disk" and world.rank == 1 else write
        if what == "value" and world.rank == 1:
            model.model.norm.weight.to_local().data[-1] = torch.nan
        try:
            checkpoint.save_hf(model, source, target, world)
        except (OSError, ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    Shards.write = write
    return said


def test_failure_on_one_rank_fails_all_and_keeps_existing_files(folder: Path):
    first, second = ranks.run(_fails, 2, str(folder))
    assert "another rank failed: [Errno 28] No space left" in first[0]
    assert "No space left" in second[0]
    assert first[1] == second[1] and "model.norm.weight holds NaN or infinity (1 of" in first[1]
    models.load(folder / "kept")
    assert not [entry for entry in folder.iterdir() if entry.name.startswith(".")]
