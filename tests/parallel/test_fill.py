"""Models that are filled after sharding equal those loaded in one process bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8, models
from octavo.fp8.weights import is_frozen, plain, span
from octavo.models.tiny import tiny
from octavo.models.weights import streaming
from octavo.parallel import World, WorldError, load_into_shards, shard
from tests import ranks
from tests.models.fp8_folders import edit_weights, quantized

LONG = pytest.mark.long
BF16 = {"dtype": "bfloat16"}


class Case(NamedTuple):
    """A folder, its loading options, and the recipe and `param` of its layers before sharding."""

    folder: str
    how: dict[str, Any]
    recipe: str | None = None
    param: bool = False


#: gate and up have 320 rows: borders of ranks lie inside blocks of 128
CASES = {
    "values": Case("qwen3", {}),
    "tied twice": Case("twice", BF16),
    "untied by values": Case("untied", BF16),
    "rows": Case("qwen3", {**BF16, "load_in_fp8": "row"}, "rowwise"),
    "blocks": Case("qwen3", {**BF16, "load_in_fp8": "block"}, "blockwise"),
    "tensors": Case("qwen3", {**BF16, "load_in_fp8": "tensor"}, "tensorwise"),
    "experts": Case("qwen3_vl_moe", {**BF16, "load_in_fp8": "block"}),
    "codes": Case("coded", BF16),
    "codes of experts": Case("coded_moe", BF16),
    "decoded": Case("coded", {**BF16, "keep_fp8": False}),
    "decoded and cast": Case("coded", {**BF16, "keep_fp8": False, "load_in_fp8": "row"}),
    "halves": Case("qwen3", {"split": True}, "blockwise"),
    "param": Case("qwen3", {}, "blockwise", True),
    "towers": Case("qwen3_vl", BF16),
    "halves of experts": Case("qwen3_vl_moe", {"split": True}, "blockwise"),
    "halves of codes": Case("coded", {"split": True}),
    "drawn": Case("qwen3", {"drawn": 5}, "blockwise", True),
    "drawn with halves": Case("qwen3_vl_moe", {"drawn": 5, "split": True}, "blockwise"),
    **{
        family: Case(family, BF16)
        for family in ("qwen2_5_vl", "internvl", "llavaonevision1_5", "nvila_lite", "qwen3_moe", "llama", "mpt")
    },
}
DEALT = {
    "experts of values": Case("qwen3_vl_moe", {}),
    "halves of experts": CASES["halves of experts"],
    "param of experts": Case("qwen3_moe", {}, "blockwise", True),
}
FEW = {name: CASES[name] for name in ("rows", "blocks", "codes of experts", "halves", "drawn")}


Folders = Callable[[Iterable[Case]], Path]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """folders(cases) -> where their small checkpoints lie by name: of a family, in FP8, or with a head beside the
    embedding it is tied to. Each is written when it is first asked for."""
    place = tmp_path_factory.mktemp("fill")

    def write(name: str) -> Path:
        folder = place / name
        if folder.exists():
            return folder
        if name in ("coded", "coded_moe"):
            source, form = ("qwen3", "fp8") if name == "coded" else ("qwen3_moe", "channel")
            quantized(write(source), folder, form)
        elif name in ("twice", "untied"):
            tiny.write("qwen3", folder, size="mini")
            more = 1.0 if name == "untied" else 0.0
            edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + more}))
        else:
            tiny.write(name, folder, size="small" if name == "qwen3" else "mini")
        return folder

    def written(cases: Iterable[Case]) -> Path:
        for case in cases:
            write(case.folder)
        return place

    return written


def _load(folder: Path, case: Case) -> tuple[nn.Module, dict[str, Tensor], models.DeferredModel | models.DeferredInit]:
    """Return (unsharded model, its lower halves, model to be filled)."""
    how = {key: getattr(torch, value) if key == "dtype" else value for key, value in case.how.items()}
    if (seed := how.pop("drawn", None)) is not None:
        unread = models.init_deferred(folder / case.folder, seed=seed, **how)
        whole = models.init_model(folder / case.folder, seed=seed)
        return *(models.split_model(whole, "cpu") if how else (whole, {})), unread
    unread = models.load_deferred(folder / case.folder, **how)
    if how.pop("split", False):
        return *models.load_split(folder / case.folder), unread
    return models.load(folder / case.folder, **how), {}, unread


def _differences(world: World, folder: Path, case: Case) -> list[str]:
    whole, lows, unread = _load(folder, case)
    for model in (whole, unread.model):
        if case.recipe is not None:
            fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=case.recipe, param=case.param)))
    assert all(p.is_meta for p in unread.model.parameters())
    shard(unread.model, models.describe(unread.model), world)
    halves, read = load_into_shards(unread.model, unread, world)
    actual = ["the very model", "buffers", "codes", "halves"]
    local, stock = unread.model, dict(whole.named_buffers())
    if all(torch.equal(b, stock[name]) for name, b in local.named_buffers()):
        actual.remove("buffers")
    if fp8.fingerprint(local) == fp8.fingerprint(whole):
        actual.remove("codes")
    if halves.keys() == lows.keys() and all(_here(halves[name], lows[name]) for name in lows):
        actual.remove("halves")
    state, wanted = ranks.whole_state(local, world), whole.state_dict()
    names = [(name, p.dtype, p.requires_grad) for name, p in whole.named_parameters()]
    if names == [(name, p.dtype, p.requires_grad) for name, p in local.named_parameters()]:
        actual.remove("the very model")
    for name, values in state.items():
        value = wanted[name].dequantize() if is_frozen(wanted[name]) else plain(wanted[name])
        if value.dtype != values.dtype or not torch.equal(value, values):
            actual.append(name)
    return actual + ([] if not state or state.keys() == wanted.keys() else ["names"])


def _here(low: Tensor, whole: Tensor) -> bool:
    """Return whether these are the lower halves of this rank's rows."""
    local = span(low)
    return torch.equal(plain(low).flatten(), whole.flatten()[local.start : local.stop])


def _all(world: World, folder: str, cases: dict[str, Case]) -> dict[str, list[str]]:
    streaming._CHUNK = 1 << 13  # many chunks, as large matrices have
    return {name: wrong for name, case in cases.items() if (wrong := _differences(world, Path(folder), Case(*case)))}


@pytest.mark.parametrize(
    ("size", "cases", "axes"),
    [
        pytest.param(2, FEW, {}, id="two"),
        pytest.param(2, DEALT, {"expert": 2}, id="dealt"),
        pytest.param(3, CASES, {}, id="three", marks=LONG),
        pytest.param(2, {name: case for name, case in CASES.items() if name not in FEW}, {}, id="more", marks=LONG),
        pytest.param(4, FEW, {"replicate": 2}, id="copies", marks=LONG),
        pytest.param(4, DEALT, {"expert": 2}, id="dealt over two of four", marks=LONG),
    ],
)
def test_each_rank_has_its_rows_of_the_one_process_model(
    folders: Folders, size: int, cases: dict[str, Case], axes: dict[str, int]
):
    assert ranks.run(_all, size, str(folders(cases.values())), cases, **axes) == [{}] * size


READ = ("values", "rows", "blocks", "codes")


def _read(world: World, folder: str) -> list[float]:
    """Fraction of the file that this rank reads: plain, FP8 by rows, by blocks, and codes."""
    out = []
    for case in READ:
        _, _, unread = _load(Path(folder), CASES[case])
        shard(unread.model, models.describe(unread.model), world)
        _, read = load_into_shards(unread.model, unread, world)
        total = sum(entry.nbytes for entry in unread.prepared.stream.shards.stored.values())
        out.append(read / total)
    return out


def test_a_rank_reads_its_shards_and_the_rest_of_blocks_that_are_cut(folders: Folders):
    place = folders(CASES[name] for name in READ)
    plain_part, rows, blocks, codes = ranks.run(_read, 2, str(place))[0]
    assert plain_part == rows == pytest.approx(0.5, abs=0.01)
    assert 0.5 < blocks < 0.9  # 256 of 320 rows, and all of the 128 of others
    assert 0.5 < codes < 0.53  # every rank has all scales


def test_unfilled_parameter_is_an_error(folders: Folders):
    unread = models.load_deferred(folders([CASES["values"]]) / "qwen3")
    unread.prepared.sources.origins.pop()
    with pytest.raises(WorldError, match="no values for 1 sharded parameter, first model"):
        load_into_shards(unread.model, unread, World())
