"""The AdamW step: equal bits on all paths and for all splits, exact low halves, unbiased rounding, NaN."""

import pytest
import torch

from octavo.fp8.arithmetic.adamw import Hyper, Piece, Scalars, find_edges, reference_step
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, STATES
from octavo.fp8.optim import cpu
from octavo.fp8.optim.engine import step_on_cpu

MASTERS = [
    ("fp32", torch.float32),
    ("fp32", torch.bfloat16),
    ("bf16+16", torch.bfloat16),
    ("bf16+sr", torch.bfloat16),
]


def make_piece(w, start, states, master):
    groups = -(-(start + w.numel()) // GROUP) - start // GROUP
    state = {
        k.name: torch.zeros((w.numel(),) if k.row is None else (groups, *k.row), dtype=k.dtype) for k in LAYOUT[states]
    }
    if master == "bf16+16":
        state["master_low"] = torch.zeros(w.numel(), dtype=torch.int16)
    elif master == "fp32" and w.dtype == torch.bfloat16:
        state["master"] = w.float()
    return state


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def gradient(n, step):
    generator = torch.Generator().manual_seed(step)
    g = torch.randn(n, generator=generator) * (torch.randn(n, generator=generator) * 3).exp() * 1e-3
    g[::7] = 0
    g[256:512] = 0
    g[300] *= 1e-18
    return g


@pytest.mark.parametrize("states", ["fp8", "bf16"])
@pytest.mark.parametrize("bad", [None, float("nan"), -float("inf"), 3e19, 1e-37])
def test_rare_settings_match_reference_bitwise(states, bad):
    """Zeros, NaN, Inf, second moments above 2^127 and vanished ones, each alone in a chunk and together."""
    n = 3 * cpu.CHUNK + 640
    w = torch.randn(n, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = [w.clone(), w.clone()]
    both = [make_piece(w, 0, states, "bf16+16") for _ in weights]
    for step in (1, 2):
        g = torch.randn(n, generator=torch.Generator().manual_seed(step))
        g[cpu.CHUNK : cpu.CHUNK + 300] = 0
        g[2 * cpu.CHUNK + 5 :: 3] = 0
        if bad is not None:
            g[7] = g[cpu.CHUNK + 9000] = g[2 * cpu.CHUNK + 6] = bad
            g[n - 500 : n - 100] = bad
        for engine, weight, state in zip((reference_step, step_on_cpu), weights, both, strict=True):
            engine([Piece(weight, g, state, 0, 3, step)], Hyper(1e-3, states=states, master="bf16+16"), None, None)
        assert same(*weights)
        for name in both[0]:
            assert same(both[0][name], both[1][name]), name


@pytest.mark.parametrize(("master", "dtype"), MASTERS)
@pytest.mark.parametrize("states", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("start", [0, 77])
def test_cached_cpu_step_matches_reference_bitwise(states, master, dtype, start):
    n = 20_000
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(n, generator=generator).to(dtype)
    weights = [w.clone(), w.clone()]
    both = [make_piece(w, start, states, master) for _ in weights]
    hyper = Hyper(1e-3, weight_decay=0.1, states=states, master=master, seed=5)
    for step in range(1, 6):
        g = gradient(n, step)
        if step == 4:
            g[5000], g[9000] = float("nan"), float("inf")
        for engine, weight, state in zip((reference_step, step_on_cpu), weights, both, strict=True):
            engine([Piece(weight, g, state, start, 3, step)], hyper, 0.7, None)
        assert same(*weights)
        for name in both[0]:
            assert same(both[0][name], both[1][name]), name


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("master", "dtype"), [MASTERS[0], MASTERS[3]])
def test_parameter_in_parts_of_whole_groups_equals_one_piece(states, master, dtype):
    n = 1500
    w = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    one, parts = w.clone(), w.clone()
    hyper = Hyper(1e-3, states=states, master=master)
    state = make_piece(w, 0, states, master)
    cuts = [(0, 128), (128, 896), (896, 1500)]
    split = [make_piece(w[a:b], a, states, master) for a, b in cuts]
    for step in range(1, 6):
        g = gradient(n, step)
        step_on_cpu([Piece(one, g, state, 0, 1, step)], hyper, None, None)
        step_on_cpu(
            [Piece(parts[a:b], g[a:b], s, a, 1, step) for (a, b), s in zip(cuts, split, strict=True)], hyper, None, None
        )
    assert same(one, parts)
    for name in state:
        assert same(state[name], torch.cat([s[name] for s in split])), name


def test_fp32_states_follow_torch():
    n = 1000
    w = torch.randn(n, generator=torch.Generator().manual_seed(0))
    actual, expected = w.clone(), torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([expected], lr=1e-3, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1)
    state = make_piece(w, 0, "fp32", "fp32")
    hyper = Hyper(1e-3, 0.8, 0.99, 1e-6, 0.1, states="fp32")
    for step in range(1, 101):
        g = gradient(n, step)
        expected.grad = g.clone()
        optimizer.step()
        step_on_cpu([Piece(actual, g, state, 0, 0, step)], hyper, None, None)
    assert float((actual - expected.detach()).norm() / (actual - w).norm()) < 1e-5


@pytest.mark.parametrize(("states", "grad_dtype"), [("fp32", torch.float32), ("fp8", torch.bfloat16)])
def test_bf16_weight_with_low_halves_equals_fp32_weight(grad_dtype, states):
    n = 700
    high = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    full = high.float()
    split_state, whole_state = make_piece(high, 0, states, "bf16+16"), make_piece(full, 0, states, "fp32")
    split_hyper = Hyper(1e-3, weight_decay=0.01, states=states, master="bf16+16")
    whole_hyper = Hyper(1e-3, weight_decay=0.01, states=states)
    for step in range(1, 151):
        g = (gradient(n, step) * 0.98**step).to(grad_dtype)
        step_on_cpu([Piece(high, g, split_state, 0, 0, step)], split_hyper, None, None)
        step_on_cpu([Piece(full, g, whole_state, 0, 0, step)], whole_hyper, None, None)
    bits = (high.view(torch.int16).to(torch.int32) << 16) + split_state["master_low"]
    assert torch.equal(bits, full.view(torch.int32))
    assert float((high.float() - full).abs().max() / full.abs().max()) < 2**-8


def test_stochastically_rounded_weights_are_unbiased():
    """Steps of a hundredth of a BF16 step, for which rounding to nearest would never change a weight."""
    n = 1 << 16
    w = torch.full((n,), 1.0 + 2**-7)
    rounded, exact = w.to(torch.bfloat16), w.clone()
    hyper = Hyper(1e-4, 0.0, 0.0, 0.0, states="fp32", master="bf16+sr")
    state, exact_state = make_piece(rounded, 0, "fp32", "bf16+sr"), make_piece(exact, 0, "fp32", "fp32")
    steps = 20
    for step in range(1, steps + 1):
        g = torch.ones(n)
        step_on_cpu([Piece(rounded, g, state, 0, 0, step)], hyper, None, None)
        step_on_cpu([Piece(exact, g, exact_state, 0, 0, step)], Hyper(1e-4, 0.0, 0.0, 0.0, states="fp32"), None, None)
    moved, want = float((w - rounded.float()).double().mean()), float((w - exact).double().mean())
    deviation = (steps * 1e-4 * 2**-7 / n) ** 0.5  # a sum of draws that are mostly 0 and seldom 2^-7
    assert want > 100 * deviation and abs(moved - want) < 4 * deviation


def test_nan_gradient_affects_only_its_weight():
    for states in STATES:
        w = torch.ones(300)
        state = make_piece(w, 0, states, "fp32")
        g = torch.ones(300)
        g[130] = float("nan")
        step_on_cpu([Piece(w, g, state, 0, 0, 1)], Hyper(1e-3, states=states), None, None)
        assert w.isnan().nonzero().flatten().tolist() == [130]
        step_on_cpu([Piece(w, torch.ones(300), state, 0, 0, 2)], Hyper(1e-3, states=states), None, None)
        spread = list(range(128, 256)) if states in ("fp8", "coat") else [130]
        assert w.isnan().nonzero().flatten().tolist() == spread


def test_second_moments_never_become_zero():
    n = 640
    w = torch.zeros(n)
    state = make_piece(w, 0, "fp8", "fp32")
    exact = torch.zeros(n)
    for step in range(1, 301):
        g = gradient(n, step) * 0.97**step
        exact = exact * 0.999 + g * g * 0.001
        step_on_cpu([Piece(w, g, state, 0, 0, step)], Hyper(1e-3), None, None)
    lost = (state["exp_avg_sq_codes"] == 0) & (state["exp_avg_codes"] & 1 == 0) & (exact > 1e-37)
    assert int(lost.sum()) == 0 and w.isfinite().all() and float(w.abs().max()) < 0.3


def test_tensor_learning_rate_equals_float():
    # "meta" has no values: what is computed must not be read; a CPU tensor's is
    number = Scalars.compute(Hyper(3e-4, weight_decay=0.1), 7)
    assert Scalars.compute(Hyper(torch.tensor(3e-4, dtype=torch.float64), weight_decay=0.1), 7) == number
    assert isinstance(Scalars.compute(Hyper(torch.tensor(3e-4, device="meta")), 7).pace, torch.Tensor)


def test_edges_are_partial_groups():
    def cut(n, start):
        w = torch.zeros(n)
        return [tuple(e)[1:] for e in find_edges([Piece(w, w, {}, start, 0, 1)])]

    assert cut(256, 0) == [] and cut(0, 5) == []
    assert cut(1, 0) == [(0, 1, 0, 0, 0)]
    assert cut(10, 5) == [(0, 10, 0, 5, 0)]
    assert cut(300, 100) == [(0, 28, 0, 100, 0), (284, 300, 3, 0, 3)]
    assert cut(28, 100) == [(0, 28, 0, 100, 0)]
