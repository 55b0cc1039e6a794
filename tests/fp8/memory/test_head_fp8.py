"""A head in FP8: planned, proven, and its losses in chunks those of its own FP8 logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.memory import ChunkedHead, chunk_head
from octavo.fp8.memory.head_gemms import HeadCall, begin_head
from octavo.fp8.metrics import calc_diff
from octavo.fp8.proof import Proof
from tests.fp8.memory.test_chunked_head import asked, tiny

ROWS = 512  # the vocabulary of the tiny models


def planned(head: object = None, tied: bool = False, **policy: object) -> tuple[nn.Module, fp8.Plan]:
    model = tiny("qwen3")
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    given = {"lm_head": head or {"recipe": "blockwise"}}
    plan = fp8.plan(model, fp8.Policy(recipe="off", components=given, **policy))  # type: ignore[arg-type]
    return fp8.apply(model, plan), plan


def results(model: nn.Module, chunk: int | None, seed: int = 0) -> list[Tensor]:
    """The losses and every gradient; ``chunk`` None: of full logits."""
    inputs, target = asked(seed)
    model.zero_grad(set_to_none=True)
    if chunk is None:
        logits = model(**inputs).logits.float()
        each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    else:
        head = chunk_head(model)
        assert isinstance(head, ChunkedHead)
        with head.losses(target, chunk=chunk) as given:
            each = given.checked_losses(model(**inputs).logits)
    each.sum().backward()
    return [each.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise_1d", "rowwise", "tensorwise", "mxfp8"])
def test_losses_and_gradients_match_logits(recipe):
    """But for scales that a chunk has of its own, and codes that flip where dy differs in its last bit."""
    model, _ = planned(head={"recipe": recipe})
    want, high = results(model, None), results(tiny("qwen3"), None)
    got = results(model, chunk=1)
    assert model.lm_head._site.codes.block == 128 and len(got) == len(want)
    if recipe != "tensorwise":  # whose scale is that of a chunk's rows of the weight
        torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=4e-6)
    for a, b, exact in zip(got, want, high, strict=True):
        error = calc_diff(b, exact)  # what FP8 costs at all
        assert calc_diff(a, b) <= max(4 * error, 1e-6)
    assert calc_diff(want[0], high[0]) > 1e-9  # it is FP8


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "mxfp8"])
def test_logits_equal_those_of_layer(recipe):
    model, _ = planned(head={"recipe": recipe})
    h, weight = torch.randn(7, model.lm_head.in_features), model.lm_head.weight
    head = begin_head(h, weight, HeadCall(128, torch.float32, model.lm_head._site, False), (False, False))
    found = [head.product(slice(start, start + 128), None) for start in range(0, ROWS, 128)]
    assert torch.equal(torch.cat(found, 1), model.lm_head(h))


@pytest.mark.parametrize("off", ["fwd", "dgrad", "wgrad"])
def test_head_gemms_can_stay_in_high_precision(off):
    model, _ = planned(head={"recipe": "blockwise", off: "bf16"})
    torch.testing.assert_close(results(model, 1)[0], results(model, None)[0], rtol=2e-6, atol=4e-6)
    with fp8.count_gemms() as counts:
        results(model, 1)
    ran = {gemm: backend for layer, gemm, backend in counts if layer == "lm_head"}
    assert ran[off] == "high" and sum(backend == "high" for backend in ran.values()) == (2 if off == "fwd" else 1)


def test_plan_and_proof_include_head():
    model, plan = planned()
    (row,) = [r for r in plan.rows if r.kind == "lm_head"]
    assert row.fp8 and row.reason == "component lm_head"
    assert "lm_head" in plan.table() and plan.share == 0.0
    proof = Proof(plan)
    with fp8.count_gemms() as counts:
        results(model, 1)
        results(model, 1, seed=1)
    proof.observe(counts, {"foundation": 2, "lm_head": 2})
    blocks = ROWS // 128
    calls = {gemm: {"reference": 2 * blocks} for gemm in ("fwd", "recompute", "dgrad", "wgrad")}
    assert proof.report()["components"]["lm_head"] == calls and not proof.pending
    kept = 5  # positions with a target of the two samples
    assert counts.flops["lm_head", "wgrad", "reference"] == 2 * (2 * kept * row.shape[0] * row.shape[1])
    with fp8.count_gemms() as counts, fp8.high_precision(model):
        results(model, 1)
    with pytest.raises(fp8.ProofError, match="lm_head: planned 1 fwd, counted none"):
        proof.observe(counts, {"foundation": 1, "lm_head": 1})


def test_weights_are_cast_once_per_step_for_any_chunks():
    model, _ = planned()
    codes, parts = model.lm_head._site.codes, ROWS // 128
    for chunk in (1, 3, 1):  # more room in the second forward: the partition stays
        results(model, chunk)
    assert codes.casts == parts and len(codes) == parts
    assert fp8.weight_cache_bytes(model) == ROWS * 64 + parts * 4
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    results(model, 1)
    assert codes.casts == 2 * parts and len(codes) == parts
    results(model, 9)
    model.lm_head._site.codes.block = None
    results(model, 9)  # one block of all rows: a partition that changes leaves no codes behind
    assert len(codes) == 1


def test_high_precision_context_runs_stock_head():
    model, _ = planned()
    want = results(model, 1)
    with fp8.high_precision(model):
        high = results(model, 1)
    stock = tiny("qwen3")
    assert all(torch.equal(a, b) for a, b in zip(high, results(stock, 1), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results(model, 1), want, strict=True))


def test_tied_embedding_gets_both_gradients():
    model, plan = planned(tied=True, param=True)
    table = model.get_input_embeddings().weight
    assert model.lm_head.weight is table and type(table) is nn.Parameter  # param: true speaks of others
    assert [r.row.tied for r in plan.rows if r.kind == "lm_head"] == [("model.embed_tokens.weight",)]
    results(model, 1)
    inputs, _ = asked()
    apart = torch.nn.functional.one_hot(inputs["input_ids"].flatten(), ROWS).any(0)
    size = table.grad.abs().sum(1)
    assert (size > 0).all() and size[apart.bool()].mean() > 2 * size[~apart.bool()].mean()


def test_no_targets_and_frozen_weight():
    model, _ = planned()
    inputs, target = asked()
    with chunk_head(model).losses(torch.full_like(target, -100)) as given:
        loss = given.checked_losses(model(**inputs).logits)
    loss.sum().backward()
    assert not loss.any() and not model.lm_head.weight.grad.any()
    model.lm_head.weight.requires_grad_(False)
    with fp8.count_gemms() as counts:
        results(model, 1)
    assert not [1 for layer, gemm, _ in counts if layer == "lm_head" and gemm == "wgrad"]


def test_health_sees_the_head():
    model, _ = planned()
    with fp8.health() as figures:
        results(model, 1)
    seen = figures.table()["lm_head"]
    assert {"x", "w", "dy", "x_wgrad", "dy_wgrad"} <= seen.keys() and seen["dw_cosine"] > 0.99


def test_head_recipe_must_be_named():
    model = tiny("qwen3")
    rows = {r.name: r for r in fp8.plan(model, fp8.Policy(rules=(fp8.Rule("**", "rowwise"),))).rows}
    assert rows["lm_head"].reason == "lm_head stays in high precision"
    rows = {r.name: r for r in fp8.plan(model, fp8.Policy(rules=(fp8.Rule("lm_head", "rowwise"),))).rows}
    assert rows["lm_head"].recipe.name == "rowwise"
    for wrong in ({"recipe": "auto"}, {"recipe": "delayed"}, {"recipe": "blockwise", "param": True}):
        with pytest.raises(fp8.PlanError, match=r"lm_head.*is not supported for a head. Name a recipe"):
            fp8.Policy(components={"lm_head": wrong})
    delayed = fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="off", rules=(fp8.Rule("lm_head", "delayed"),))))
    assert "delayed scaling" in str(chunk_head(delayed))


def test_plan_file_includes_head(tmp_path):
    _, plan = planned()
    again = fp8.load_plan(fp8.save_plan(plan, tmp_path / "plan.json"), tiny("qwen3"))
    assert [r.name for r in again.rows if r.fp8] == ["lm_head"]


def test_blocks_use_codes_of_rows(monkeypatch):
    """In Triton's interpreter: what is laid out for tensor cores is each block's own buffer, and nothing is copied."""
    pytest.importorskip("triton")
    from octavo.fp8.kernels import layout

    model, _ = planned(backend="triton")
    other, _ = planned(backend="reference")
    assert torch.equal(results(model, 1)[0], results(other, 1)[0])
    held = model.lm_head._site.codes._codes
    assert len(held) == ROWS // 128 and all(layout.is_k_major(q, 1) for q in held.values())
