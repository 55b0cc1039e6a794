"""Grouped GEMMs of experts: each expert as if alone, bit for bit, and never a wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.arithmetic.cast import scale_fp32
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.kernels import reference_grouped, registry
from octavo.fp8.kernels.groups import TILE, expert_spans, group_rows, real_rows, select_expert
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.moe import Experts, grouped_high
from octavo.fp8.moe import experts as moe
from octavo.fp8.moe.grouped import why_not_grouped
from octavo.fp8.proof import Proof

E, H, I = 5, 144, 40  # noqa: E741
SPECS = [
    fp8.CastSpec(block=(1, 128)),
    fp8.CastSpec(block=(128, 1)),
    fp8.CastSpec(block=(128, 128)),
    fp8.CastSpec("e5m2", (1, -1), "fp32"),
    fp8.CastSpec(block=(-1, 1)),
    fp8.CastSpec("e5m2", (-1, -1), "fp32"),
    fp8.CastSpec(block=(32, 1), scale="e8m0"),
]
ROUTES = {
    "uneven": lambda g: torch.cat([torch.full((140,), 1), torch.randint(0, 3, (21,), generator=g), torch.tensor([4])]),
    "all on one": lambda g: torch.full((130,), 3),
    "one row": lambda g: torch.tensor([2]),
    "none": lambda g: torch.zeros(0, dtype=torch.long),
    "strangers": lambda g: torch.tensor([1, E, -1, 4, 1, E + 7, 0]),
    "full tiles": lambda g: torch.arange(E).repeat_interleave(TILE),
}
RECIPES = [
    fp8.recipe("blockwise"), fp8.recipe("rowwise"), fp8.recipe("tensorwise"), fp8.recipe("mxfp8"),
    fp8.recipe("blockwise", "hybrid", wgrad="bf16"), fp8.recipe("rowwise", fwd="bf16"),
    fp8.recipe("tensorwise", dgrad="bf16"),
]  # fmt: skip
REFERENCE = registry.get("reference")


def spread(*shape, generator):
    """Values whose magnitudes differ by row and by column, by powers of two, so that no block is like another."""
    x = torch.randn(*shape, generator=generator)
    rows = 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    return x * rows * 2.0 ** torch.randint(-6, 6, (shape[-1],), generator=generator)


def same(a, b):
    a, b = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (a, b))
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(9), b.nan_to_num(9)))


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows_of_each_expert_are_cast_separately(name, spec):
    g = torch.Generator().manual_seed(0)
    groups = group_rows(ROUTES[name](g), E).groups
    x = spread(groups.rows, H, generator=g)
    found = dict(expert_spans(groups))
    if len(found) > 1:
        x[next(iter(found.values())).start, 3] = float("nan")
    q = REFERENCE.quantize_rows(x, spec, groups)
    seen = torch.zeros_like(q.scale, dtype=torch.bool)
    for expert, span in found.items():
        want, got = fp8.quantize(x[span], spec), select_expert(q, expert, span)
        assert same(got.data, want.data) and same(got.scale, want.scale)
        select_expert(q._replace(scale=seen), expert, span).scale.fill_(True)
    real = torch.zeros(groups.rows, dtype=torch.bool)
    for span in found.values():
        real[span] = True
    assert torch.equal(real, real_rows(groups))
    assert not q.data.view(torch.uint8)[~real].any(), "padding is zero"
    assert (q.scale.float()[~seen] == 1).all(), "a block without rows has the scale 1"


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_strided_weights_are_cast_per_expert(spec):
    w = spread(E, H, I, generator=torch.Generator().manual_seed(0)).mT
    q = REFERENCE.quantize_experts(w, spec)
    for expert in range(E):
        want = fp8.quantize(w[expert], spec)
        assert same(q.data[expert], want.data) and same(q.scale[expert], want.scale)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", ["blockwise", "blockwise_1d", "rowwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize(("pairs", "experts"), [(0, 0), (3, 0), (0, 2)])
def test_no_experts_or_no_pairs_give_empty_results_and_zeros(backend, name, pairs, experts):
    on, recipe = registry.get(backend), fp8.recipe(name)
    groups = group_rows(torch.zeros(pairs, dtype=torch.int64), experts).groups
    x, dy, w = (torch.randn(*s) for s in ((groups.rows, 40), (groups.rows, 24), (experts, 24, 40)))
    x_q, x_kept = on.quantize_rows_both(x, recipe.fwd.a, recipe.wgrad.b, groups)
    dy_q, dy_kept = on.quantize_rows_both(dy, recipe.dgrad.a, recipe.wgrad.a, groups)
    for q in (x_q, x_kept, dy_q, dy_kept):
        assert not q.data.view(torch.uint8).any() and (scale_fp32(q) == 1).all()
    w_q, w_t = (on.quantize_experts(w, g.b, c) for g, c in ((recipe.fwd, 1), (recipe.dgrad, 0)))
    assert w_q.data.shape == w.shape and w_q.scale.shape[0] == experts
    y = on.grouped_fwd(x_q, w_q, groups, torch.float32)
    dx = on.grouped_dgrad(dy_q, w_t, groups, torch.float32)
    dw = on.grouped_wgrad(dy_kept, x_kept, groups, torch.float32)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, w.shape)
    assert not y.any() and not dx.any() and not dw.any()


def test_block_across_experts_is_rejected():
    groups = group_rows(torch.tensor([0, 1]), 2).groups
    with pytest.raises(fp8.CastError, match="a block of 96 rows would span two experts"):
        REFERENCE.quantize_rows(torch.ones(groups.rows, 8), fp8.CastSpec(block=(96, 1)), groups)
    with pytest.raises(fp8.CastError, match="has 7 rows, but its groups have 256"):
        REFERENCE.quantize_rows(torch.ones(7, 8), fp8.CastSpec(), groups)


class Block(nn.Module):
    """Experts as transformers writes them, in all their forms."""

    def __init__(self, transposed=False, bias=False, experts=E, inner=I):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        up, down = spread(experts, 2 * inner, H, generator=g) / 64, spread(experts, H, inner, generator=g) / 64
        self.is_transposed = transposed
        self.gate_up_proj = nn.Parameter((up.mT if transposed else up).contiguous())
        self.down_proj = nn.Parameter((down.mT if transposed else down).contiguous())
        if bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * inner, generator=g))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, H, generator=g))
        self.act_fn = nn.functional.silu

    def matrix(self, name, expert):
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias", None)
        return weight.t() if self.is_transposed else weight, None if bias is None else bias[expert]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return self.looped(hidden_states, top_k_index, top_k_weights, nn.functional.linear)

    def looped(self, x, index, share, linear):
        """Every expert alone, in the plainest way; a pair without an expert adds zero."""
        pairs = x.repeat_interleave(index.shape[1], 0)
        out = []
        for pair, expert in enumerate(index.reshape(-1).tolist()):
            if not 0 <= expert < E:
                out.append((pair, torch.zeros(1, H, dtype=x.dtype)))
        for expert in range(E):
            mine = (index.reshape(-1) == expert).nonzero().flatten()
            gate, up = linear(pairs[mine], *self.matrix("gate_up_proj", expert)).chunk(2, -1)
            y = linear(self.act_fn(gate) * up, *self.matrix("down_proj", expert))
            out += [(pair, y[i : i + 1]) for i, pair in enumerate(mine.tolist())]
            out.append((-1, y[:0]))  # an expert without rows belongs to the graph
        y = torch.cat([row for _, row in sorted(out, key=lambda entry: entry[0])])
        return (y * share.reshape(-1, 1)).view(*index.shape, H).sum(-2).to(x.dtype)


def converted(block, chosen, backend="reference"):
    device = block.gate_up_proj.device
    grouped = {g: registry.select(f"grouped_{g}", recipe_or_spec=chosen, device=device, requested=backend)
               for g in ("fwd", "dgrad", "wgrad") if chosen.gemm(g) is not None}  # fmt: skip
    return Experts.convert(block, {name: LayerGemms(name, chosen, grouped) for name in moe.PROJECTIONS})


def inputs(name, top_k, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    pairs = ROUTES[name](g)
    index = pairs[: len(pairs) // top_k * top_k].view(-1, top_k)
    x = spread(len(index), H, generator=g).to(dtype)
    return x.requires_grad_(), index, torch.rand(index.shape, generator=g).to(dtype).requires_grad_()


def results(call, block, given, dy):
    block.zero_grad()
    y = call(*given)
    y.backward(dy)
    return [y.detach(), given[0].grad, given[2].grad, *(p.grad for p in block.parameters())]


# One expert a token and two, by turns: routes know no recipes.
TURNS = [(c, name, 1 + (i + j) % 2) for i, c in enumerate(RECIPES) for j, name in enumerate(ROUTES)]


@pytest.mark.parametrize(("chosen", "name", "top_k"), TURNS, ids=str)
def test_grouped_experts_equal_loop(chosen, name, top_k):
    """y, dx, the weights' and the routing weights' gradients; but for the sum of a bias, which has its own order."""
    block = Block(transposed=top_k == 2, bias=top_k == 2)
    ours = converted(Block(transposed=top_k == 2, bias=top_k == 2), chosen)
    a, b = inputs(name, top_k), inputs(name, top_k)
    dy = spread(*a[0].shape, generator=torch.Generator().manual_seed(7))
    want = results(lambda *given: block.looped(*given, lambda x, w, c: fp8.linear(x, w, c, chosen)), block, a, dy)
    got = results(ours, ours, b, dy)
    names = ["y", "dx", "dshare", *(n for n, _ in block.named_parameters())]
    for what, x, z in zip(names, got, want, strict=True):
        if what.endswith("_bias"):
            assert torch.allclose(x, z, rtol=1e-5, atol=1e-6 * float(z.abs().max()) if z.numel() else 0), what
        else:
            assert torch.equal(x, z), what


def test_bf16_and_autocast_round_like_loop():
    chosen = fp8.recipe("blockwise")
    block, ours = Block().bfloat16(), converted(Block().bfloat16(), chosen)
    a, b = inputs("uneven", 1, torch.bfloat16), inputs("uneven", 1, torch.bfloat16)
    dy = torch.randn(a[0].shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    want = results(lambda *given: block.looped(*given, lambda x, w, c: fp8.linear(x, w, c, chosen)), block, a, dy)
    assert all(map(torch.equal, results(ours, ours, b, dy), want))
    block, ours = Block(), converted(Block(), chosen)
    a, b = inputs("uneven", 1), inputs("uneven", 1)
    with torch.autocast("cpu", torch.bfloat16):
        looped = block.looped(*a, lambda x, w, c: fp8.linear(x, w, c, chosen))
        assert torch.equal(ours(*b), looped)
    looped.backward(dy.float())
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(*b)
    y.backward(dy.float())
    assert torch.equal(a[0].grad, b[0].grad) and b[0].grad.dtype == torch.float32
    assert torch.equal(block.down_proj.grad, ours.down_proj.grad)


def saved(block, given):
    """What the forward keeps: (dtype, elements) of every tensor that autograd saves."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append((t.dtype, t.numel())) or t, lambda t: t):
        block(*given)
    return found


def test_only_the_codes_of_x_are_saved_and_none_for_a_frozen_weight():
    given = inputs("uneven", 2)
    rows = group_rows(given[1].reshape(-1), E).groups.rows
    ours = converted(Block(), fp8.recipe("blockwise"))
    found = saved(ours, given)
    assert (torch.float8_e4m3fn, rows * H) in found and (torch.float8_e4m3fn, rows * I) in found
    assert (torch.float32, rows * H) not in found
    ours.gate_up_proj.requires_grad_(False)
    ours.down_proj.requires_grad_(False)
    found = saved(ours, given)
    assert not [entry for entry in found if entry[0] == torch.float8_e4m3fn]
    with fp8.count_gemms() as counts:
        ours(*given).sum().backward()
    assert ours.down_proj.grad is None and given[0].grad is not None
    assert counts.total("wgrad") == 0 and counts.total("dgrad") == 2 * E == counts.total("fwd")


@pytest.mark.parametrize("name", ["blockwise", "tensorwise"])
def test_x_and_dy_are_cast_in_one_call_each(name, monkeypatch):
    """For fwd and wgrad, or dgrad and wgrad, of each projection; where the codes are the same the reference, which
    reads them either way round, makes them once."""
    reference, asked = type(registry.get("reference")), []
    both, single = reference.quantize_rows_both, reference_grouped.quantize_rows
    monkeypatch.setattr(reference, "quantize_rows_both", lambda *a: asked.append("both") or both(*a))
    monkeypatch.setattr(reference_grouped, "quantize_rows", lambda *a: asked.append("one") or single(*a))
    block, recipe = converted(Block(), fp8.recipe(name)), fp8.recipe(name)
    block(*inputs("uneven", 2)).sum().backward()
    differ = recipe.fwd.a != recipe.wgrad.b
    assert asked == ["both", *["one"] * (1 + differ)] * 4


def test_experts_are_cast_once_per_optimizer_step():
    ours, given = converted(Block(), fp8.recipe("rowwise")), inputs("uneven", 2)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for step in (1, 2):
        for _ in range(3):
            ours(*given).sum().backward()
        assert [ours._sites[n].codes.casts for n in moe.PROJECTIONS] == [2 * step, 2 * step], "one for fwd, one dgrad"
        before = ours(*given)
        optimizer.step()
        assert not torch.equal(ours(*given), before)
        ours._sites["gate_up_proj"].codes.casts = ours._sites["down_proj"].codes.casts = 2 * step
        fp8.invalidate(ours)


def test_health_ignores_padding_rows():
    ours, given = converted(Block(), fp8.recipe("tensorwise")), inputs("uneven", 2)
    with fp8.health() as health:
        ours(*given).sum().backward()
    for row in health.table().values():
        assert {"x", "w", "dy", "x_wgrad", "dy_wgrad", "dw_cosine"} <= row.keys() and row["nan_codes"] == 0
        assert row["dw_cosine"] > 0.9


class Shapes(Backend):
    """A backend that knows nothing but shapes: what it is given may live on a device that has no values."""

    name = "shapes"

    def supports(self, op, what, device, shape):
        return None

    def _codes(self, x, spec, grid):
        return fp8.Quantized(torch.empty_like(x, dtype=spec.fmt.dtype), x.new_ones(grid, dtype=torch.float32), spec)

    def quantize_rows(self, x, spec, groups, contract=1):
        return self._codes(x, spec, (groups.rows, 1))

    def quantize_experts(self, w, spec, contract=1):
        return self._codes(w, spec, (w.shape[0], 1, 1))

    def grouped_fwd(self, x_q, w_q, groups, out_dtype, bias=None):
        return x_q.scale.new_empty(groups.rows, w_q.data.shape[1], dtype=out_dtype)

    def grouped_dgrad(self, dy_q, w_q, groups, out_dtype):
        return dy_q.scale.new_empty(groups.rows, w_q.data.shape[2], dtype=out_dtype)

    def grouped_wgrad(self, dy_q, x_q, groups, out_dtype):
        return x_q.scale.new_empty(groups.experts, dy_q.data.shape[1], x_q.data.shape[1], dtype=out_dtype)


@pytest.fixture
def backend(monkeypatch):
    """Register a backend for one test."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    return registry.register


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemms_do_not_synchronize(backend, transposed):
    """On the meta device there are no values: whoever reads one, counts one or selects by one fails."""
    backend(Shapes())
    ours = converted(Block(transposed, bias=True).to("meta"), fp8.recipe("blockwise"), "shapes")
    x, index, share = (t.detach().to("meta") for t in inputs("uneven", 2))
    with pytest.raises((NotImplementedError, RuntimeError)):
        index.unique()  # the trap is set
    x.requires_grad_(), share.requires_grad_()
    with fp8.count_gemms() as counts:
        ours(x, index, share).sum().backward()
    assert x.grad.shape == x.shape and ours.gate_up_proj.grad.shape == ours.gate_up_proj.shape
    assert ours.down_proj_bias.grad.shape == (E, H)
    assert counts["down_proj", "wgrad", "shapes"] == E and counts.due("down_proj", "wgrad") == E


class Littered(ReferenceBackend):
    """Leaves in padding rows what the contract allows: anything finite."""

    name = "littered"

    def grouped_fwd(self, x_q, w_q, groups, out_dtype, bias=None):
        return self._litter(super().grouped_fwd(x_q, w_q, groups, out_dtype, bias), groups)

    def grouped_dgrad(self, dy_q, w_q, groups, out_dtype):
        return self._litter(super().grouped_dgrad(dy_q, w_q, groups, out_dtype), groups)

    def _litter(self, rows, groups):
        return torch.where(real_rows(groups).unsqueeze(1), rows, 3e38)


LITTERED = [*((chosen, "strangers") for chosen in RECIPES), (RECIPES[0], "uneven"), (RECIPES[0], "none")]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("chosen", "name"), LITTERED, ids=str)
def test_padding_rows_do_not_affect_results(backend, chosen, name, norm):
    backend(Littered())
    a, b = inputs(name, 1), inputs(name, 1)
    dy = torch.ones(a[0].shape)
    found = []
    for given, which in ((a, "reference"), (b, "littered")):
        block = converted(Block(bias=True), chosen, which)
        block.has_post_expert_norm, block.post_expert_norm = norm, nn.LayerNorm(H)
        found.append([t for t in results(block, block, given, dy) if t is not None])
    assert all(map(torch.equal, *found)) and all(t.isfinite().all() for t in found[0])


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(r, marks=[] if r == fp8.recipe("tensorwise") else pytest.mark.long) for r in RECIPES],
    ids=str,
)
def test_triton_matches_reference_for_whole_module(chosen):
    """In its interpreter: an expert without rows, one pair that has no expert, ragged sizes, biases, transposed."""
    launch = pytest.importorskip("octavo.fp8.kernels.triton_kernels.launch")
    if not launch.INTERPRETED:
        pytest.skip("Triton is compiled here: tests/gpu/test_moe.py")
    g = torch.Generator().manual_seed(5)
    x, index, share = spread(4, H, generator=g), torch.tensor([[2], [0], [3], [2]]), torch.rand(4, 1, generator=g)
    found = []
    for name in ("reference", "triton"):
        block = converted(Block(True, True, experts=3, inner=24), chosen, name)
        given = (x.clone().requires_grad_(), index, share.clone().requires_grad_())
        with launch.launches() as seen:
            found.append(results(block, block, given, torch.ones_like(x)))
        assert bool(seen) == (name == "triton")
    for want, got in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


class Ungrouped(ReferenceBackend):
    name = "ungrouped"

    def supports(self, op, what, device, shape):
        return "it knows no groups" if op.startswith("grouped") else super().supports(op, what, device, shape)


def test_experts_run_one_by_one_without_grouped_gemms(backend):
    backend(Ungrouped())
    results_of = {}
    for name in ("ungrouped", "reference"):
        model = nn.ModuleDict({"experts": Block()})
        plan = fp8.plan(model, fp8.Policy(recipe="blockwise", backend=name))
        fp8.apply(model, plan)
        with fp8.count_gemms() as counts:
            given = inputs("uneven", 2)
            results_of[name] = results(model["experts"], model, given, torch.ones_like(given[0]))
        proof = Proof(plan)
        proof.observe(counts, {"foundation": 1})
        noted = "2 rows of experts run one expert at a time: ungrouped: it knows no groups" in plan.notes
        assert noted == (name == "ungrouped") and (counts.idle["experts.down_proj"] == 1) == noted
    assert all(map(torch.equal, *results_of.values()))
    assert "a history per expert" in fp8.plan(nn.ModuleDict({"e": Block()}), "delayed").table()
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    chosen = fp8.recipe("rowwise")
    picked = {"fwd": registry.select("fwd", recipe_or_spec=chosen, device=cpu, requested="reference")}
    assert why_not_grouped(chosen, picked, cpu) is None and "which would synchronize" in why_not_grouped(
        chosen, picked, cuda
    )


def test_high_precision_gemms_ignore_padding():
    g = torch.Generator().manual_seed(0)
    groups = group_rows(ROUTES["uneven"](g), E).groups
    padding = ~real_rows(groups).unsqueeze(1)
    x = torch.randn(groups.rows, H, generator=g).masked_fill(padding, float("nan"))
    dy = torch.randn(groups.rows, I, generator=g).masked_fill(padding, float("inf"))
    w, bias = torch.randn(E, I, H, generator=g), torch.randn(E, I, generator=g)
    y, dx = grouped_high.fwd(x, w, bias, groups), grouped_high.dgrad(dy, w, groups)
    dw, db = grouped_high.wgrad(dy, x, groups, torch.float32), grouped_high.bias_grad(dy, groups)
    for expert, span in expert_spans(groups):
        assert torch.equal(y[span], x[span] @ w[expert].t() + bias[expert])
        assert torch.equal(dx[span], dy[span] @ w[expert])
        assert torch.equal(dw[expert], dy[span].t() @ x[span])
        assert torch.allclose(db[expert], dy[span].sum(0), rtol=1e-5, atol=1e-5)
    idle = groups.sizes == 0
    assert idle.any() and not dw[idle].any() and not db[idle].any()
