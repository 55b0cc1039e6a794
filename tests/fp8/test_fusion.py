"""Sisters as one GEMM: the same codes, outputs and weight gradients, counted layer by layer, and never wrong when a
model does not call them as expected."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8 import fusion, joined
from octavo.fp8.arithmetic.cast import quantize
from octavo.fp8.weights import cache
from tests.fp8.weights.test_fsdp_cache import alone  # noqa: F401

SIZES = {"q_proj": 256, "k_proj": 128, "v_proj": 128}


class Attention(nn.Module):
    """q, k and v of one input, mixed so that each gradient is its own."""

    def __init__(self, k=96, bias=("q_proj", "v_proj"), sizes=SIZES, **kwargs):
        super().__init__()
        for name, n in sizes.items():
            setattr(self, name, nn.Linear(k, n, bias=name in bias, **kwargs))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return torch.cat([q.sin(), k.cos() * v], -1)


class Mlp(nn.Module):
    def __init__(self, k=96, n=128):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)
        self.down_proj = nn.Linear(n, k, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def pair(module, recipe="blockwise", **kwargs):
    """The module converted and unfused, and its fused twin."""
    plain = fp8.apply(module, fp8.plan(module, fp8.Policy(recipe=recipe, **kwargs)))
    twin = copy.deepcopy(plain)
    assert all(f.reason is None for f in fusion.fuse(twin)), fusion.fuse(copy.deepcopy(plain))
    return plain, twin


def attention(recipe="blockwise", seed=0, policy=None, **kwargs):
    torch.manual_seed(seed)
    return pair(Attention(**kwargs), recipe, **(policy or {}))


def run(module, x, inner=lambda m, x: m(x)):
    """(output, gradient of x, gradients of the parameters by name)."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    with fp8.count_gemms() as counts:
        y = inner(module, x)
        y.float().square().sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in module.named_parameters()}, counts


def assert_same(plain, twin, x, inner=lambda m, x: m(x), lowered=False, recomputed=True):
    y, dx, grads, counts = run(plain, x, inner)
    y2, dx2, grads2, counts2 = run(twin, x, inner)
    assert torch.equal(y, y2)
    # One sum in place of three roundings: near, and for bf16 nearer to the truth.
    assert fp8.calc_diff(dx, dx2) < (1e-10 if dx.dtype == torch.float32 and not lowered else 1e-5)
    for name, grad in grads.items():
        assert (grad is None) == (grads2[name] is None), name
        assert grad is None or torch.equal(grad, grads2[name]), name
    for name in ("calls", "flops", "due", "came", "gradless"):
        ours, theirs = (
            {k: v for k, v in getattr(c, name).items() if recomputed or "recompute" not in k} for c in (counts, counts2)
        )
        assert ours == theirs, name


def seeded(seed):
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))


def group_of(module):
    return next(m._group for m in module.modules() if "_group" in m.__dict__)


def gemms(monkeypatch):
    """The GEMMs that the reference really runs."""
    backend, ran = fp8.kernels.registry.get("reference"), []
    for name in ("gemm_fwd", "gemm_dgrad", "gemm_wgrad"):
        own = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, own=own, name=name, **k: ran.append(name) or own(*a, **k))
    return ran


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96), (96,), (0, 96)])
def test_outputs_and_gradients_are_those_of_single_gemms(recipe, dtype, shape):
    plain, twin = attention(recipe, dtype=dtype)
    for seed in range(3):
        assert_same(plain, twin, torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    assert group_of(twin).off is None


def test_three_gemms_run_in_all_and_each_layer_is_counted(monkeypatch):
    _, twin = attention()
    ran = gemms(monkeypatch)
    counts = run(twin, torch.randn(7, 96))[3]
    assert ran == ["gemm_fwd", "gemm_dgrad", "gemm_wgrad"]
    for name, n in SIZES.items():
        for gemm in ("fwd", "dgrad", "wgrad"):
            assert counts[name, gemm, "reference"] == 1 and counts.flops[name, gemm, "reference"] == 2 * 7 * 96 * n


def test_hybrid_and_inputs_that_need_no_gradient_and_frozen_weights():
    for policy in ({"format": "hybrid"}, {}):
        plain, twin = attention(policy=policy)
        x = torch.randn(6, 96)
        for m in (plain, twin):
            m(x).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), twin.parameters(), strict=True))
    for m in (plain, twin):
        for layer in (m.q_proj, m.k_proj, m.v_proj):
            layer.weight.requires_grad_(False)
    assert_same(plain, twin, x)
    plain.q_proj.weight.requires_grad_(True)
    twin.q_proj.weight.requires_grad_(True)
    assert_same(plain, twin, x)  # no longer alike: each by itself


def test_the_joined_codes_are_those_of_each_weight():
    for recipe, contracts in (("blockwise", (1,)), ("mxfp8", (1, 0))):
        _, twin = attention(recipe, k=200)
        run(twin, torch.randn(4, 200))
        held = group_of(twin).joined
        assert len(held) == len(contracts) == held.casts
        for spec, codes in held._codes.items():
            alone_ = [quantize(layer.weight, spec) for layer in (twin.q_proj, twin.k_proj, twin.v_proj)]
            assert torch.equal(codes.data.view(torch.uint8), torch.cat([q.data.view(torch.uint8) for q in alone_]))
            assert torch.equal(codes.scale.float(), torch.cat([q.scale.float() for q in alone_]))
        assert all(len(m._site.codes) == 0 for m in (twin.q_proj, twin.k_proj, twin.v_proj))
        assert 512 * 200 <= fp8.code_bytes(twin) / len(contracts) < 512 * 200 * 1.05
        fp8.invalidate(twin)
        assert fp8.code_bytes(twin) == 0


def test_the_joined_matrix_lies_as_a_gemm_wants_it():
    from octavo.fp8.kernels import layout

    for recipe in ("blockwise", "mxfp8"):
        r = fp8.recipe(recipe)
        for spec, contract in ((r.fwd.b, 1), (r.dgrad.b, 0)):
            parts = [quantize(torch.randn(n, 200), spec) for n in (256, 128)]
            whole = joined.join(parts, contract)
            assert layout.lies(whole, contract)
            assert torch.equal(fp8.dequantize(whole), torch.cat([fp8.dequantize(q) for q in parts]))


@pytest.mark.parametrize("name", ["adamw_fused", "in_place", "data", "state_dict"])
def test_no_stale_codes(name):
    plain, twin = attention()
    x = torch.randn(4, 96)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, fused=True) for m in (plain, twin)]
    for _ in range(3):
        assert_same(plain, twin, x)
        assert_same(plain, twin, x + 1)
        for m, optimizer in zip((plain, twin), optimizers, strict=True):
            if name == "adamw_fused":
                optimizer.step()
            elif name == "in_place":
                with torch.no_grad():
                    m.v_proj.weight.mul_(2)
            elif name == "data":
                m.k_proj.weight.data = m.k_proj.weight.data * 2
            else:
                m.load_state_dict({k: 2 * v for k, v in m.state_dict().items()})
    assert group_of(twin).joined.casts == 3


def test_a_weight_or_input_edited_between_two_sisters_is_noticed():
    plain, twin = attention()

    def edit_weight(m, x):
        q = m.q_proj(x)
        with torch.no_grad():
            m.k_proj.weight.mul_(1.5)
            m.v_proj.bias.add_(1)
        return torch.cat([q, m.k_proj(x), m.v_proj(x)], -1)

    x = torch.randn(4, 96)
    with torch.no_grad():
        assert torch.equal(edit_weight(plain, x), edit_weight(twin, x))
        for m in (plain, twin):
            x = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
            q = m.q_proj(x)
            x.mul_(2)
            k = m.k_proj(x)
            want = fp8.linear(x, m.k_proj.weight, m.k_proj.bias)
            assert torch.equal(k, want) and not torch.equal(q, m.q_proj(x))


def test_the_same_values_without_a_graph_are_another_input():
    plain, twin = attention()
    assert_same(plain, twin, torch.randn(4, 96), lambda m, x: torch.cat([m.q_proj(x), m.k_proj(x.detach())], -1))


USES = {
    "one alone": lambda m, x: m.k_proj(x),
    "two": lambda m, x: torch.cat([m.q_proj(x), m.v_proj(x)], -1),
    "another order": lambda m, x: torch.cat([m.v_proj(x), m.q_proj(x), m.k_proj(x)], -1),
    "cross attention": lambda m, x: torch.cat([m.q_proj(x), m.k_proj(x * 2), m.v_proj(x * 2)], -1),
    "cross attention, shared": lambda m, x: (lambda c: torch.cat([m.q_proj(x), m.k_proj(c), m.v_proj(c)], -1))(x * 2),
    "twice": lambda m, x: torch.cat([m(x), m(x)], -1),
    "one twice": lambda m, x: torch.cat([m.q_proj(x), m.q_proj(x)], -1),
    "one not in the loss": lambda m, x: m.q_proj(x) + m.k_proj(x).detach()[:, :1] + m.v_proj(x)[:, :1],
    "half without a graph": lambda m, x: m.q_proj(x) + torch.no_grad()(m.k_proj)(x)[:, :1],
}


@pytest.mark.parametrize("use", USES)
def test_other_uses_stay_right(use):
    plain, twin = attention()
    for seed in range(4):
        assert_same(plain, twin, torch.randn(4, 96, generator=torch.Generator().manual_seed(seed)), USES[use])
    together = use in ("another order", "twice", "one not in the loss")
    assert (group_of(twin).off is None) == together
    if not together:  # single layers from the next optimizer step on
        for m in (plain, twin):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        assert_same(plain, twin, torch.randn(4, 96), USES[use])
        assert fusion.fused(twin) == () and fp8.code_bytes(twin) == fp8.code_bytes(plain)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_fuses_what_its_forward_fused(use, reentrant):
    """Or activation checkpointing finds another number of saved tensors."""
    plain, twin = attention()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, twin)]
    together = use in ("another order", "twice")  # else a GEMM is recomputed for sisters whom nobody calls

    def two_regions(m, x):
        y = checkpoint(USES[use], m, x, use_reentrant=reentrant)
        return torch.cat([y, checkpoint(USES[use], m, x * 2, use_reentrant=reentrant)], -1)

    for seed in range(4):
        assert_same(plain, twin, seeded(seed), two_regions, recomputed=together)
        if seed == 2:
            for optimizer in optimizers:
                optimizer.step()
            twin.load_state_dict(plain.state_dict())


def test_a_region_that_begins_between_two_sisters():
    plain, twin = attention()

    def cut(m, x):
        q = m.q_proj(x)
        return torch.cat([q, checkpoint(m.k_proj, x, use_reentrant=False), m.v_proj(x)], -1)

    for seed in range(4):
        assert_same(plain, twin, seeded(seed), cut, recomputed=False)


def test_autocast_and_a_model_that_writes_into_an_output():
    plain, twin = attention()

    def lowered(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x)

    assert_same(plain, twin, torch.randn(9, 96), lowered, lowered=True)

    def writes(m, x):
        q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
        saved = k.sin()  # would notice a version shared with q
        q += 1
        return torch.cat([nn.functional.relu(q, inplace=True), saved, v], -1)

    assert_same(plain, twin, torch.randn(9, 96), writes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    plain, twin = attention()

    def recomputed(m, x):
        return checkpoint(m, x, use_reentrant=reentrant)

    def recomputed_inside(m, x):
        return checkpoint(lambda x: m(x) * 1.0, x * 1.0, use_reentrant=reentrant)

    for inner in (recomputed, recomputed_inside):
        for seed in range(3):
            x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed))
            assert_same(plain, twin, x, inner)
    assert group_of(twin).off is None


def test_accumulation_uncounted_and_no_grad():
    plain, twin = attention()
    for m in (plain, twin):
        for seed in range(2):
            m(torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), twin.parameters(), strict=True))
    assert group_of(twin).joined.casts == 1

    def both(m, x):
        with fp8.uncounted():
            dummy = m(x)
        with torch.no_grad():
            m(x)
        return dummy * 0 + m(x)

    assert_same(plain, twin, torch.randn(4, 96), both)
    with torch.inference_mode():
        x = torch.randn(4, 96)
        assert torch.equal(plain(x), twin(x))


def test_health_sees_each_layer():
    plain, twin = attention()
    tables = []
    for m in (plain, twin):
        with fp8.health() as h:
            run(m, torch.randn(40, 96, generator=torch.Generator().manual_seed(0)))
        tables.append(h.table())
    assert tables[0] == tables[1] and set(tables[0]) == set(SIZES)


def test_nothing_outlives_its_use():
    _, twin = attention()
    x = torch.randn(4, 96, requires_grad=True)
    inner = x * 1
    q = twin.q_proj(inner)
    held = fusion._pending()
    rest = [weakref.ref(y) for y in held.ys if y is not None]
    assert len(rest) == 2
    q.sum().backward()
    gc.collect()
    assert not any(r() is not None for r in rest)
    assert twin.k_proj.weight.grad is None and twin.q_proj.weight.grad is not None
    with torch.no_grad():
        inner = x * 1
        twin.q_proj(inner)
        rest = [weakref.ref(y) for y in fusion._pending().ys if y is not None]
        assert len(rest) == 2
        del inner
        assert not any(r() is not None for r in rest)


class Token:
    """Lives as long as the graph whose hook holds it."""


def test_a_graph_with_a_fused_node_is_freed_without_the_garbage_collector():
    _, twin = attention()
    token = Token()
    inner = torch.randn(4, 96, requires_grad=True) * 1
    inner.register_hook(lambda grad, held=token: grad)
    y, alive = twin(inner), weakref.ref(token)
    del inner, token
    assert alive() is not None
    gc.disable()
    try:
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_copies_and_pickles():
    plain, twin = attention()
    x = torch.randn(4, 96)
    for made in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert group_of(made) is not group_of(twin) and group_of(made).members[0] is made.q_proj
        assert_same(plain, made, x)
        with torch.no_grad():
            made.k_proj.weight.mul_(2)
        assert not torch.equal(made(x), twin(x))
    assert list(twin.state_dict()) == list(plain.state_dict())
    fusion.unfuse(twin)
    assert fusion.fused(twin) == () and all("_group" not in m.__dict__ for m in twin.modules())
    assert_same(plain, twin, x)


def test_gate_and_up_and_the_policy():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Mlp(), "b": Attention(), "c": nn.ModuleDict({"gate_proj": nn.Linear(96, 96)})})
    plain = fp8.apply(copy.deepcopy(model), fp8.plan(model, "blockwise"))
    twin = fp8.apply(model, fp8.plan(model, fp8.Policy(fuse="on")))
    assert fusion.fused(plain) == ()
    assert fusion.fused(twin) == (("a.gate_proj", "a.up_proj"), ("b.q_proj", "b.k_proj", "b.v_proj"))
    assert_same(plain["a"], twin["a"], torch.randn(5, 96))
    with pytest.raises(fp8.PlanError, match="fuse='maybe'.*use 'off', 'on' or 'auto'"):
        fp8.Policy(fuse="maybe")


def reasons(module, recipe="blockwise", **kwargs):
    fp8.apply(module, fp8.plan(module, fp8.Policy(recipe=recipe, **kwargs)))
    (found,) = fp8.fuse(module)
    assert fusion.fused(module) == ()
    return found.reason


def test_what_cannot_be_fused_says_why():
    assert "spans all outputs of a layer" in reasons(Attention(), "tensorwise")
    assert "w in dgrad spans all outputs" in reasons(Attention(), "rowwise")
    assert "amax history" in reasons(Attention(), "delayed")
    assert "wgrad stays in high precision" in reasons(Attention(), wgrad="bf16")
    assert "48 outputs are no multiple of 128" in reasons(Attention(sizes={**SIZES, "v_proj": 48}))
    assert "not all of them run in FP8" in reasons(Attention(), rules=(fp8.Rule("k_proj", recipe="off"),))
    assert "different recipes" in reasons(Attention(), rules=(fp8.Rule("k_proj", recipe="mxfp8"),))
    half = Attention()
    half.k_proj.weight.requires_grad_(False)
    assert "frozen and trained" in reasons(half)
    tied = Attention(bias=())
    tied.v_proj.weight = tied.k_proj.weight
    assert "tied weights" in reasons(tied)
    _, twin = attention()
    assert fp8.fuse(twin)[0].reason == "fused before"


def test_fsdp_gathers_codes_and_drops_them(alone):  # noqa: F811
    for reshard in (True, False):
        plain, twin = attention()
        fully_shard(twin, mesh=alone, reshard_after_forward=reshard)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, fused=True) for m in (plain, twin)]
        for step in range(3):
            losses = []
            for m, optimizer in zip((plain, twin), optimizers, strict=True):
                loss = m(torch.randn(4, 96, generator=torch.Generator().manual_seed(step))).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        assert group_of(twin).off is None and len(group_of(twin).joined) == 0 and group_of(twin).joined.casts > 0


def test_layers_sharded_one_by_one_run_alone(alone):  # noqa: F811
    plain, twin = attention()
    for layer in (twin.q_proj, twin.k_proj, twin.v_proj):
        fully_shard(layer, mesh=alone)
    x = torch.randn(4, 96)
    assert torch.equal(plain(x), twin(x))


def test_a_graph_capture_keeps_no_codes(monkeypatch):
    plain, twin = attention()
    x = torch.randn(4, 96)
    run(twin, x)
    casts = group_of(twin).joined.casts
    monkeypatch.setattr(cache, "capturing", lambda _: True)
    for _ in range(2):
        with torch.no_grad():  # unseen, as a replay's weights would be
            plain.k_proj.weight.data.mul_(2)
            twin.k_proj.weight.data.mul_(2)
        assert_same(plain, twin, x)
    assert group_of(twin).joined.casts == casts + 2


def test_high_precision_for_a_moment_also_under_a_class_on_top():
    torch.manual_seed(0)
    stock = Attention()
    x = torch.randn(4, 96)
    y = stock(x)
    _, twin = pair(copy.deepcopy(stock))
    quantized = twin(x)
    assert not torch.equal(quantized, y)
    for _ in range(2):
        with fp8.high_precision(twin):
            assert torch.equal(twin(x), y)
        assert torch.equal(twin(x), quantized)
        for layer in group_of(twin).members:  # as fully_shard on a layer makes it
            layer.__class__ = type("Wrapped", (type(layer),), {})


def test_an_output_is_a_column_of_one_buffer():
    plain, twin = attention()
    x = torch.randn(2, 3, 96)
    y = twin.k_proj(x)
    assert y.stride() == (3 * 512, 512, 1) and not y.is_contiguous()
    assert torch.equal(y.view(2, 3, 4, 32), plain.k_proj(x).view(2, 3, 4, 32))  # heads
    assert torch.equal(y.view(6, 128), plain.k_proj(x).view(6, 128))
    assert torch.equal(y.reshape(-1), plain.k_proj(x).view(-1))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        y.view(-1)
