"""Codes of a weight whose rows lie on several ranks: bit for bit those of the whole weight, for every recipe.

The ranks run one after the other in this process; what they would all-reduce is collected in a first round.
"""

import pytest
import torch

from octavo import fp8
from octavo.fp8.kernels import select
from octavo.fp8.weights import fp8_rows
from octavo.fp8.weights.fp8_rows import Need, Shards

SHAPES = [(300, 200), (128, 128), (7, 33), (5, 16), (1, 40), (513, 130)]


def needs(name, grouped=False, transposed=False):
    recipe = fp8.recipe(name)
    backend = select("fwd", recipe_or_spec=recipe, device=torch.device("cpu"), requested="reference").backend
    found = [Need(recipe.fwd.b, backend, 1, transposed, grouped)]
    return found if recipe.dgrad.b == recipe.fwd.b else [*found, Need(recipe.dgrad.b, backend, 0, transposed, grouped)]


class Mesh:
    """Stands for a process group: ``all_reduce`` collects in the first round and answers in the second."""

    def __init__(self, monkeypatch):
        self.calls, self.largest = 0, None
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def get_group(self):
        return None

    def all_reduce(self, bits, op, group):
        self.calls += 1
        self.largest = bits.clone() if self.largest is None else torch.maximum(self.largest, bits)
        bits.copy_(self.largest)


def gather(values, casts, ranks, monkeypatch):
    """(the codes of the whole weight out of what all ranks sent, the all-reduces of one rank, bytes sent by one)."""
    chunks = list(values.split(max(1, -(-values.shape[0] // ranks)))) + [values[:0]] * ranks
    mesh = Mesh(monkeypatch)
    for _ in range(2):
        mesh.calls, sent = 0, []
        for rank in range(ranks):
            shards = Shards(values.shape[0], ranks, rank)
            sent.append(fp8_rows.pack_for_gather(fp8_rows.cast(chunks[rank], casts, shards, mesh), shards))
    assert all(a.shape == b.shape for parts in zip(*sent, strict=True) for a, b in zip(parts, parts[1:], strict=False))
    whole = tuple(torch.cat(parts) for parts in zip(*sent, strict=True))
    codes = fp8_rows.unpack_gathered(whole, casts, values.shape, Shards(values.shape[0], ranks, 0), None)
    return codes, mesh.calls / ranks, sum(t.numel() * t.element_size() for t in sent[0])


def same(q, want):
    assert q.data.dtype is want.data.dtype and q.scale.dtype is want.scale.dtype
    assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(q.scale.float(), want.scale.float()) or torch.equal(
        q.scale.view(torch.uint8), want.scale.view(torch.uint8)
    )


def spread(shape, dtype=torch.float32, seed=0):
    """Magnitudes that differ by row and by column, so that a wrong block shows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp2(torch.randint(-9, 9, (shape[-2], 1), generator=generator))
    cols = torch.exp2(torch.randint(-9, 9, (shape[-1],), generator=generator))
    return (torch.randn(shape, generator=generator) * rows * cols).to(dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", fp8.RECIPES)
def test_shards_have_codes_of_whole_weight(name, ranks, monkeypatch):
    casts = needs(name)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            values = spread(shape, dtype)
            codes, calls, _ = gather(values, casts, ranks, monkeypatch)
            for q, need in zip(codes, casts, strict=True):
                same(q, need.cast(values))
            cut = any(Shards(shape[0], ranks, 0).cuts(need) for need in casts)
            assert calls == cut, "one all-reduce where a block is cut, none elsewhere"


def test_only_cut_blocks_need_collective():
    (blockwise,), rowwise = needs("blockwise"), needs("rowwise")
    assert not Shards(512, 4, 0).cuts(blockwise) and Shards(513, 4, 0).cuts(blockwise)
    assert [Shards(512, 4, 0).cuts(need) for need in rowwise] == [False, True]
    assert not Shards(1, 4, 0).cuts(rowwise[1]), "one row lies on one rank"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", fp8.RECIPES)
def test_nonfinite_value_affects_block_on_all_ranks(name, bad, monkeypatch):
    values, casts = spread((300, 140)), needs(name)
    values[130, 3] = bad
    codes, _, _ = gather(values, casts, 3, monkeypatch)
    for q, need in zip(codes, casts, strict=True):
        want = need.cast(values)
        same(q, want)
        assert q.scale.float().isnan().any()


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", fp8.RECIPES)
def test_experts_are_never_cut(name, transposed, grouped, monkeypatch):
    casts = needs(name, grouped, transposed)
    values = spread((5, 40, 34))
    for ranks in (1, 2, 4):
        codes, calls, _ = gather(values, casts, ranks, monkeypatch)
        assert calls == 0
        for q, need in zip(codes, casts, strict=True):
            matrices = values.mT if transposed else values
            for e in range(5):
                alone = need.backend.quantize(matrices[e], need.spec, need.contract)
                same(fp8.Quantized(q.data[e], q.scale[e], q.spec), alone)


def test_rank_sends_one_byte_per_parameter_and_scales(monkeypatch):
    values = spread((512, 256))
    sizes = {}
    for name in fp8.RECIPES:
        _, _, sizes[name] = gather(values, needs(name), 2, monkeypatch)
    codes = 256 * 256
    assert sizes["blockwise"] == codes + 4 * (2 * 2)
    assert sizes["tensorwise"] == codes + 4
    assert sizes["rowwise"] == 2 * codes + 4 * (256 + 256)
    assert sizes["mxfp8"] == 2 * codes + 256 * 8 + 8 * 256


def test_scales_are_updated_in_place(monkeypatch):
    for name in fp8.RECIPES:
        casts, values = needs(name), spread((70, 48))
        first, _, _ = gather(values, casts, 3, monkeypatch)
        held = [q.scale for q in first]
        sent = []
        other = spread((70, 48), seed=1)
        mesh = Mesh(monkeypatch)
        for _ in range(2):
            sent = [
                fp8_rows.pack_for_gather(fp8_rows.cast(part, casts, Shards(70, 3, r), mesh), Shards(70, 3, r))
                for r, part in enumerate(other.split(24))
            ]
        whole = tuple(torch.cat(parts) for parts in zip(*sent, strict=True))
        again = fp8_rows.unpack_gathered(whole, casts, other.shape, Shards(70, 3, 0), held)
        for q, need, old in zip(again, casts, held, strict=True):
            assert q.scale is old
            same(q, need.cast(other))


def test_pieces_separate_cut_and_whole_blocks():
    # 300 rows on 3 ranks, blocks of 128: rank 1 has rows 100 to 200, the end of block 0 and the beginning of block 1.
    shards = Shards(300, 3, 1)
    assert shards.cut(128) == [0, 1]
    assert list(shards.pieces(128)) == [(0, 28, 0), (28, 100, 1)]
    assert list(Shards(300, 3, 2).pieces(128)) == [(0, 56, 1), (56, 100, None)]
    assert list(Shards(5, 4, 3).pieces(1)) == []
    assert [shards.first_block(r, 128) for r in range(4)] == [0, 1, 2, 3]
