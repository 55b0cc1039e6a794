"""Delayed scaling: scales from the amax history, and the values that it records."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo import fp8
from octavo.fp8.arithmetic import quantize_with_scale
from octavo.fp8.delayed import reduce_scaling_state
from octavo.fp8.metrics import calc_diff
from octavo.fp8.observe import uncounted
from tests import ranks


def layer(recipe="delayed"):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(32, 16, bias=False))
    return fp8.apply(m, fp8.plan(m, recipe))


def x_history(m):
    return fp8.scaling_state(m)["0.fp8_amax_x"][0]


def dy_history(m):
    return fp8.scaling_state(m)["0.fp8_amax_dy"][0]


def constant_input(amax):
    return torch.full((4, 32), float(amax))


def test_an_empty_history_gives_current_scaling():
    m = layer()
    x, dy = torch.randn(4, 32), torch.randn(4, 16)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = m(a)
    y.backward(dy)
    w = m[0].weight.detach().clone().requires_grad_()
    z = fp8.linear(b, w, recipe="tensorwise")
    z.backward(dy)
    assert torch.equal(y, z) and torch.equal(a.grad, b.grad) and torch.equal(m[0].weight.grad, w.grad)


def test_history_rolls_per_forward_and_maximum_sets_scale():
    m = layer()
    for amax in (4, 1, 2):
        m(constant_input(amax)).sum().backward()
    assert x_history(m)[:4].tolist() == [2, 1, 4, 0] and dy_history(m)[:4].tolist() == [1, 1, 1, 0]
    x = torch.randn(4, 32).clamp(-1, 1) * 3
    got = m(x)
    q = quantize_with_scale(x, torch.tensor(4 / 448), m[0].recipe.fwd.a)
    w = fp8.dequantize(fp8.quantize(m[0].weight, m[0].recipe.fwd.b))
    assert calc_diff(got, fp8.dequantize(q) @ w.t()) < 1e-10
    for _ in range(m[0].recipe.delayed.length):
        m(constant_input(0.5))
    assert x_history(m).max() == 0.5


def test_values_beyond_history_saturate():
    m = layer()
    m(constant_input(1))
    with fp8.health() as h:
        m(constant_input(8).requires_grad_()).sum().backward()
    assert h.table()["0"]["x"]["saturation"] == 1.0
    assert x_history(m)[0] == 8, "the next forward knows"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_are_not_recorded(bad):
    m = layer()
    m(constant_input(2)).sum().backward()
    x = constant_input(3)
    x[1, 1] = bad
    y = m(x)
    assert y.isnan().all()
    y.sum().backward()
    m(constant_input(1)).backward(torch.full((4, 16), bad))
    assert x_history(m)[:3].tolist() == [1, 2, 0] and dy_history(m)[:3].tolist() == [1, 1, 0]
    with torch.no_grad():
        m[0].weight.grad = None
    assert m(constant_input(1)).isfinite().all()


def test_evaluation_does_not_record():
    m = layer()
    m(constant_input(2))
    m.eval()
    y = m(constant_input(1))
    with torch.no_grad():
        m(constant_input(5))
    assert x_history(m)[:2].tolist() == [2, 0]
    assert torch.equal(m(constant_input(1)), y)


def test_empty_input_does_not_record():
    m = layer()
    m(torch.zeros(0, 32)).sum().backward()
    assert not x_history(m).any() and not dy_history(m).any()


def assert_same_when_recomputed(losses, reentrant):
    """Checkpointed calls give the same weight gradient and the same histories. ``losses(module, call)`` runs the
    calls."""
    plain, saved = layer(), layer()
    want = losses(plain, lambda m, x: m(x))
    got = losses(saved, lambda m, x: checkpoint(m, x, use_reentrant=reentrant))
    assert torch.equal(want, got)
    assert torch.equal(x_history(plain), x_history(saved)) and torch.equal(dy_history(plain), dy_history(saved))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_finds_original_scale(reentrant):
    xs = [torch.randn(4, 32) * s for s in (1, 6, 0.5)]

    def losses(m, call):
        outs = [call(m, x.clone().requires_grad_()) for x in xs]  # all forwards first, as in a pipeline
        for out in reversed(outs):
            out.square().sum().backward()
        return m[0].weight.grad

    assert_same_when_recomputed(losses, reentrant)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("mode", "reentrant"), [("train", False), ("train", True), ("eval", False), ("uncounted", True)]
)
def test_recomputation_distinguishes_inputs_with_equal_amax(reentrant, mode, order):
    """Inputs with equal amax, between which the history changes, so that each has another scale."""
    noise = [torch.randn(4, 32).clamp(-1, 1) / 2 for _ in range(3)]
    for x in noise:
        x[0, 0] = 0.5
    xs = [noise[0], noise[1], noise[1], noise[2]]

    def losses(m, call):
        m(constant_input(40))
        outs = []
        for i, x in enumerate(xs):
            m.train(mode != "eval")
            with uncounted() if mode == "uncounted" else nullcontext():
                outs.append(call(m, x.clone().requires_grad_()))
            m.train()
            # 59 forwards after the first x: a recomputation finds the scales of the last 64
            for _ in range(16 if i < len(xs) - 1 else 8):
                m(constant_input(10.0 / (i + 1)))
        m.train(mode != "eval")
        for out in outs[::order]:
            out.square().sum().backward()
        return m[0].weight.grad

    assert_same_when_recomputed(losses, reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_recomputing_an_uncounted_dummy_gives_finite_gradients(reentrant, value):
    m = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    fp8.apply(m, fp8.plan(m, "delayed"))
    x = torch.full((8, 64), value, requires_grad=True)
    with uncounted():
        y = checkpoint(m, x, use_reentrant=reentrant)
    (y.sum() * 0).backward()
    assert all(bool((p.grad == 0).all()) for p in m.parameters()) and bool((x.grad == 0).all())
    assert not any(t.any() for t in fp8.scaling_state(m).values())


def test_a_checkpoint_inside_a_checkpoint_finds_the_first_forward():
    plain, saved = layer(), layer()

    def losses(m, inner, outer):
        for scale in (8, 1, 4):
            x = (torch.arange(128.0).view(4, 32) / 128 * scale).requires_grad_()
            outer(lambda x: inner(m, x) * 2, x).square().sum().backward()
        return m[0].weight.grad

    def nested(f, x):
        return checkpoint(f, x, use_reentrant=False)

    assert torch.equal(losses(plain, lambda m, x: m(x), lambda f, x: f(x)), losses(saved, nested, nested))


@pytest.mark.parametrize("packet", ["where", "cat", "index_select", "amax", "mm"])
def test_selective_checkpointing_replays_the_same_operations(packet):
    plain, saved = layer(), layer()
    op = getattr(torch.ops.aten, packet)

    def policy(ctx, func, *args, **kwargs):
        keep = func.overloadpacket is op
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(m, x):
        return checkpoint(
            lambda x: torch.cat([m(x), m(x * 3)]),
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    for m, call in ((plain, lambda m, x: torch.cat([m(x), m(x * 3)])), (saved, selective)):
        m(constant_input(1))  # the weight is cast once, outside
        for scale in (5, 1):
            x = (torch.arange(128.0).view(4, 32) / 128 * scale).requires_grad_()
            call(m, x).square().sum().backward()
    assert torch.equal(plain[0].weight.grad, saved[0].weight.grad)
    assert torch.equal(x_history(plain), x_history(saved)) and torch.equal(dy_history(plain), dy_history(saved))


def in_ddp(world):
    m = layer()
    wrapped = nn.parallel.DistributedDataParallel(m)
    for amax in (1, 2):
        wrapped(constant_input(amax * (10 if world.rank else 1))).sum().backward()
    original = x_history(m)[:3].tolist()
    reduce_scaling_state(wrapped)
    return {"own": original, "reduced": x_history(m)[:3].tolist(), "names": list(wrapped.state_dict())}


@pytest.mark.long
def test_ddp_keeps_history_of_each_rank():
    first, second = ranks.run(in_ddp, 2)
    assert (first["own"], second["own"]) == ([2, 1, 0], [20, 10, 0]), "DDP broadcasts buffers from rank 0"
    assert first["reduced"] == second["reduced"] == [20, 10, 0]
    assert first["names"] == ["module.0.weight"]


def test_model_planned_on_meta_gets_histories():
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(32, 16, bias=False))
    fp8.apply(m, fp8.plan(m, "delayed"))
    m(constant_input(3).to("meta"))
    m.to_empty(device="cpu")
    nn.init.ones_(m[0].weight)
    m(constant_input(2))
    assert x_history(m)[:2].tolist() == [2, 0]


def test_histories_follow_moves_and_copies():
    m = layer()
    m(constant_input(0.3)).sum().backward()
    before = x_history(m)
    m.to(torch.bfloat16)
    assert m[0].weight.dtype == torch.bfloat16
    assert torch.equal(x_history(m), before) and x_history(m).dtype == torch.float32
    twin = copy.deepcopy(m)
    twin(constant_input(9).bfloat16())
    assert torch.equal(x_history(m), before) and x_history(twin)[0] == 9
    assert list(m.state_dict()) == ["0.weight"]


def test_a_resumed_layer_continues_bit_for_bit():
    a = layer()
    for s in (1, 2, 0.1):
        a(torch.randn(4, 32) * s).sum().backward()
    b = layer()
    b.load_state_dict(a.state_dict())
    fp8.load_scaling_state(b, {k: v.clone() for k, v in fp8.scaling_state(a).items()})
    x = torch.randn(4, 32)
    assert torch.equal(a(x), b(x))
    assert fp8.scaling_state(layer("blockwise")) == {}


def test_state_of_another_model_is_rejected():
    m, other = layer(), nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    fp8.apply(other, fp8.plan(other, "delayed"))
    with pytest.raises(ValueError, match="2 are unknown.*Resume with the recipe"):
        fp8.load_scaling_state(m, fp8.scaling_state(other))
    with pytest.raises(ValueError, match="2 are missing"):
        fp8.load_scaling_state(m, {})
    state = fp8.scaling_state(m)
    state["0.fp8_amax_x"] = torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"has shape \[1, 3\], the model's has \[1, 16\]"):
        fp8.load_scaling_state(m, state)


def test_fingerprint_depends_on_row_order():
    from octavo.fp8.dense import delayed

    delayed._odd_multiplier_cache.clear()
    results = {}
    for rows in (4, 9, 3):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
        bits = x.view(torch.int64)
        want = (bits.sum(1) * torch.arange(1, 2 * rows, 2)).sum() | 1
        assert int(delayed._fingerprint(x)) == int(want)
        assert int(delayed._fingerprint(x.flip(0))) != int(want)
        (results[rows],) = delayed._odd_multiplier_cache.values()
    assert results[3] is results[9] and results[9].shape == (9,)
