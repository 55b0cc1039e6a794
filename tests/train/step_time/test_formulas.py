"""The formulas of cost, beside cases worked out by hand and the published ones that they restate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import load_config
from octavo.models.structure import shapes
from octavo.parallel import Layout
from octavo.train.errors import TrainError
from octavo.train.estimate import step_time
from octavo.train.estimate.memory import MemoryEstimator
from octavo.train.estimate.step_time import wire
from octavo.train.estimate.step_time.search import split_long_rows
from octavo.train.estimate.step_time.seconds import Ring, _transfer_seconds
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens

QWEN_8B = step_time.Decoder(36, 4096, 32, 8, 128)
QWEN_235B = step_time.Decoder(94, 4096, 64, 4, 128, 94, 128, 8)
QWEN_30B = step_time.Decoder(48, 2048, 32, 4, 128, 48, 128, 8)


def mesh(ulysses: int = 1, **axes: int) -> step_time.Mesh:
    return step_time.Mesh(Layout(**axes), ulysses)


def settings(name: str, *overrides: str):
    return load_config(None, [f"model.path={name}", "data.train=[{path: none}]", "train.steps=1", *overrides])


def sizes(name: str, tokens: Tokens | None = None, *overrides: str) -> MemoryEstimator:
    cfg = settings(name, *overrides)
    model, family = shapes.shape_model(name)
    plan, _, _ = planning.plan_model(cfg, model, family)
    none = Tokens({"foundation": 128, "lm_head": 128}, 128, 0)
    return MemoryEstimator(cfg, model, family, plan, tokens or none)


def test_fsdp_moves_each_shard_to_all_others() -> None:
    block, root = step_time.Group("layers.0", 4, 100, 50, True), step_time.Group("", 4, 10, 5, False)
    assert wire.fsdp_bytes([block, root], 1) == {"gather": 3 * (2 * 100 + 10), "reduce": 3 * 55, "sum": 0}
    assert wire.fsdp_bytes([block, root], 2)["sum"] == 50 + 2 * 3  # 2 (R - 1) / R of a shard, in pieces of whole bytes
    twice = wire.fsdp_bytes([block, root], 1, two_backwards=True)
    assert twice == {"gather": 3 * (3 * 100 + 2 * 10), "reduce": 2 * 3 * 55, "sum": 0}


def test_context_moves_heads_or_keys() -> None:
    """A layer: Ulysses 4 (Hq + Hk) D b T / P (U - 1) / U; gathered keys 2 Hk D b T (C - 1) / C, gradients in fp32."""
    rows = step_time.Rows(1024)
    four = wire.context_bytes(QWEN_8B, rows, mesh(4, context=4))
    assert four == {"ulysses": 36 * 4 * 40 * 128 * 2 * 256 * 3 // 4, "keys": 0, "keys_grad": 0, "features": 0}
    gathered = wire.context_bytes(QWEN_8B, rows, mesh(1, context=4))
    assert gathered["ulysses"] == 0
    assert gathered["keys"] == 36 * 2 * 8 * 128 * 2 * 1024 * 3 // 4
    assert gathered["keys_grad"] == 36 * 2 * 8 * 128 * 4 * 1024 * 3 // 4
    both = wire.context_bytes(QWEN_8B, rows, mesh(2, context=4))
    assert both["ulysses"] == 36 * 4 * 40 * 128 * 2 * 256 // 2 and both["keys"] == 36 * 2 * 4 * 128 * 2 * 1024 // 2
    again = wire.context_bytes(QWEN_8B, replace(rows, recomputed_attention=1), mesh(4, context=4))
    assert again["ulysses"] == four["ulysses"] * 3 // 2


@pytest.mark.parametrize(("decoder", "even"), [(QWEN_8B, 10 / 3), (QWEN_30B, 6), (QWEN_235B, 34 / 3)])
def test_gathered_keys_are_fewer_bytes_up_to_a_number_of_ranks(decoder: step_time.Decoder, even: float) -> None:
    """Equal at P = (Hq / Hk + 1) 2 b / (b + 4)."""

    def moved(ranks: int, ulysses: int) -> int:
        many = replace(decoder, kv_heads=decoder.kv_heads * 8, heads=decoder.heads * 8)  # so that any number divides
        return sum(wire.context_bytes(many, step_time.Rows(2**20), mesh(ulysses, context=ranks)).values())

    assert (decoder.heads / decoder.kv_heads + 1) * 4 / 6 == pytest.approx(even)
    below, above = (1 << (int(even).bit_length() - 1)), 1 << int(even).bit_length()
    assert moved(below, 1) < moved(below, below) and moved(above, 1) > moved(above, above)


def test_experts_move_rows_of_their_tokens() -> None:
    """8 k d bytes a token and layer in BF16."""
    found = wire.expert_bytes(QWEN_30B, step_time.Rows(4096), mesh(shard=8, expert=8))
    assert found["dispatch"] + found["combine"] == 48 * 8 * 8 * 2048 * 4096 * 7 // 8
    assert found["counts"] == 48 * 8 * 128 * 7 // 8
    assert not any(wire.expert_bytes(QWEN_30B, step_time.Rows(4096), mesh(shard=8)).values())


@pytest.mark.parametrize(("value", "gradient", "tokens"), [(2, 4, 36_864), (1, 2, 18_432)])
def test_experts_pay_below_a_number_of_tokens(value: int, gradient: int, tokens: int) -> None:
    """Of Qwen3-30B-A3B: gathering all experts and sending tokens to them are as many bytes at 37k tokens a rank."""
    ranks, layer = 2**20, 128 * 3 * 2048 * 768
    group = step_time.Group("experts", ranks, value * layer // ranks, gradient * layer // ranks, True)
    found = wire.expert_bytes(
        replace(QWEN_30B, sparse=1, experts=ranks), step_time.Rows(tokens), mesh(shard=ranks, expert=ranks)
    )
    gathered = wire.fsdp_bytes([group], 1)
    assert found["dispatch"] + found["combine"] == pytest.approx(gathered["gather"] + gathered["reduce"], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("qwen3_8b", 49, 74), ("qwen3_vl_30b_a3b", 23, 57), ("qwen3_vl_235b_a22b", 148, 281)],
)
def test_flops_of_a_token_are_the_published_ones(name: str, short: float, long: float) -> None:
    """GFLOP a token at 4k and 32k."""
    for row, expected in ((4096, short), (32768, long)):
        counts = {"foundation": row, "lm_head": row}
        if "vl" in name:
            counts |= {"image_encoder": 0, "image_projector": 0}
        of = sizes(name, Tokens(counts, row, 0))
        assert step_time.estimate_work(of, of.cfg).model_flops / row / 1e9 == pytest.approx(expected, abs=0.6)


def test_experts_dealt_to_ranks_are_gathered_by_fewer() -> None:
    of = sizes("qwen3_vl_30b_a3b")
    work = step_time.estimate_work(of, of.cfg)
    plain, dealt = (work.groups(Layout(shard=16, expert=n)) for n in (1, 8))
    assert {group.ranks for group in plain} == {16} and {group.ranks for group in dealt} == {16, 2}
    assert sum(g.reduced * g.ranks for g in plain) == sum(
        g.reduced * g.ranks * (8 if g.ranks == 2 else 1) for g in dealt
    )


def test_links() -> None:
    """8 in a node: a gather over 16 takes each node's 8 adapters; of an all-to-all half goes to the other node."""
    cluster = step_time.Cluster.parse("h100x8x2")
    links, slow = cluster.speeds.links, replace(cluster, network=5e9)
    assert _transfer_seconds("gather", 7e9, Ring(8, 1), cluster) == pytest.approx(7e9 / 450e9 / links)
    assert _transfer_seconds("gather", 15e9, Ring(16, 1), cluster) == pytest.approx(
        15e9 / 450e9 / links
    )  # NVLink limits
    assert _transfer_seconds("gather", 15e9, Ring(16, 1), slow) == pytest.approx(16e9 / 2 / (8 * 5e9) / links)
    assert _transfer_seconds("sum", 10e9, Ring(2, 8), cluster) == pytest.approx(10e9 / 50e9 / links)
    assert _transfer_seconds("dispatch", 15e9, Ring(16, 1), cluster) == pytest.approx(8e9 / 50e9 / links)
    assert _transfer_seconds("sum", 10e9, Ring(1, 8), cluster) == 0


def test_the_best_mesh_fits_and_every_other_says_why_not() -> None:
    """Of 30B parameters on two nodes, in short rows: states do not fit one GPU, and experts need not be gathered."""
    counts = {"foundation": 2048, "lm_head": 2048, "image_encoder": 0, "image_projector": 0}
    some = (
        "data.packing=true",
        "train.global_batch=64",
        "train.micro_batch=1",
        "train.seq_length=2048",
        "optimizer.master=bf16+16",
    )
    of = sizes(
        "qwen3_vl_30b_a3b",
        Tokens(counts, 2048, 0),
        *some,
        "fp8.recipe=off",
        "train.recompute=full",
        "train.logits=chunked",
    )
    cluster = step_time.Cluster.parse("h100x8x2")
    found = step_time.search(of, cluster, step_time.estimate_work(of, of.cfg).decoder)
    best = found[0]
    assert best.excess <= 0 and best.mesh.layout.ranks == 16
    assert len({(*vars(f.mesh.layout).values(),) for f in found}) == len(found) > 20
    fits = [f for f in found if f.excess <= 0]
    assert found[: len(fits)] == fits and max(f.estimate.rate for f in fits) <= 1.01 * best.estimate.rate
    assert all("does not fit" in f.explain(best) for f in found[len(fits) :])
    assert any("% time" in f.explain(best) for f in fits[1:])
    assert sum(best.estimate.shares.values()) == pytest.approx(1)


def test_long_rows_are_counted_in_short_ones() -> None:
    tokens = Tokens({"foundation": 32768}, 32768, 0)
    assert split_long_rows(tokens) == Tokens({"foundation": 32768}, 4096, 0, 32768)
    assert split_long_rows(replace(tokens, sample=700)).sample == 700


def test_a_cluster_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    lines = "gpu: ours\nbf16: 1e15\nfp8: 2e15\nmemory: 96GB\nhbm: 2.4e12\nper_node: 8\nnodes: 2\nnvlink: 450e9\n"
    file.write_text(lines + "network: 50e9\nspeeds: {bf16: 0.5}\n")
    cluster = step_time.Cluster.parse(str(file))
    assert cluster.ranks == 16 and cluster.speeds == replace(step_time.Cluster.parse("h100x8x2").speeds, bf16=0.5)
    assert cluster.memory.size == 96 * 10**9
    for text, said in (
        (lines, "network missing"), (lines + "network: 0\n", "network must be above 0"),
        (lines + "network: fast\n", "network must be a number"),
        (lines + "network: 1\nrings: 3\n", "unknown keys: rings"),
        (lines + "network: 1e9\nspeeds: {rings: 3}\n", "speeds.rings"), ("a: [", "ours.yaml"),
        (lines + "network: 1e9\nspeeds: {bf16: 6}\n", "speeds.bf16 must be at most 1"),
        (lines + "network: 1e9\nspeeds: {bf16: }\n", "speeds.bf16 must be a number"),
        (lines + "network: 1e9\nspeeds: 3\n", "speeds must be a mapping of attention"),
        (lines.replace("nodes: 2", "nodes: true") + "network: 1e9\n", "nodes must be a number"),
        (lines.replace("gpu: ours", "gpu: 3") + "network: 1e9\n", "gpu must be a name, found 3"),
        (lines.replace("96GB", "96XB") + "network: 1e9\n", "ours.yaml: memory: cannot parse the card '96XB'"),
        ("", "the file is empty; docs/scale.md shows"),
        ("- 3", "the top level of the file is a list; docs/scale.md shows"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(TrainError, match=said):
            step_time.Cluster.parse(str(file))


@pytest.mark.parametrize("text", ["h100", "h100x8", "h10x8x8", "h100x0x8", "x8x8"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(TrainError, match=r"(mean h100x8x8|as in h100x8x8)|above 0"):
        step_time.Cluster.parse(text)
