"""The optimizer as a torch optimizer: whatever parameters, gradients and settings come."""

import copy

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.arithmetic.moments import STATES
from octavo.fp8.weights import versions
from octavo.fp8.weights.shards import plain
from octavo.fp8.weights.versions import watch_optimizers


def trained(parameter, gradients, **settings):
    optimizer = fp8.AdamW([parameter], **{"lr": 1e-2, **settings})
    for g in gradients:
        parameter.grad = g
        optimizer.step()
    return optimizer


def some(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (127,), (128,), (129,), (3, 50), (4, 16, 24), (0, 8)])
def test_any_shape_matches_torch(states, shape):
    ours, theirs = nn.Parameter(some(shape)), nn.Parameter(some(shape))
    gradients = [some(shape, seed) for seed in range(1, 11)]
    trained(ours, gradients, states=states)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0)
    for g in gradients:
        theirs.grad = g
        reference.step()
    assert ours.shape == theirs.shape
    travelled = (theirs.detach() - some(shape)).norm()
    assert float((ours - theirs).detach().norm()) <= 0.1 * float(travelled)


def test_state_sizes_match_documentation():
    n = 128 * 50
    for states, master, want in [
        ("fp8", "fp32", 2.0625 + 4),
        ("fp8", "bf16+16", 2.0625 + 2),
        ("fp8", "bf16+sr", 2.0625),
        ("coat", "bf16+sr", 2.1875),
        ("bf16", "bf16+sr", 4),
        ("fp32", "bf16+sr", 8),
    ]:
        p = nn.Parameter(some(n).bfloat16())
        state = trained(p, [some(n).bfloat16()], states=states, master=master).state[p]
        assert sum(t.numel() * t.element_size() for name, t in state.items() if name != "step") == want * n
        assert state["step"].shape == () and state["step"].dtype == torch.float32 and float(state["step"]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_any_float_dtype(dtype):
    exact, other = nn.Parameter(some(200)), nn.Parameter(some(200))
    coarse = [some(200, s).to(dtype) for s in range(1, 4)]
    trained(exact, [g.float() for g in coarse])
    other.grad_dtype = None  # torch would refuse a gradient of another dtype than the weight's
    trained(other, coarse)
    assert torch.equal(exact, other)


def test_groups_have_separate_settings():
    a, b, frozen = (nn.Parameter(some(300, s).bfloat16()) for s in range(3))
    frozen.requires_grad_(False)
    before = frozen.clone()
    optimizer = fp8.AdamW([{"params": [a], "states": "coat", "master": "bf16+sr"}, {"params": [frozen, b]}], lr=1e-3)
    optimizer.add_param_group(
        {"params": [c := nn.Parameter(some(5))], "states": "fp32", "lr": 1.0, "weight_decay": 0.5}
    )
    for p in (a, b, c):
        p.grad = some(p.shape, 9).to(p.dtype)
    optimizer.step()
    assert "exp_avg_figures" in optimizer.state[a] and "master" not in optimizer.state[a]
    assert "exp_avg_sq_range" in optimizer.state[b] and optimizer.state[b]["master"].dtype == torch.float32
    assert set(optimizer.state[c]) == {"step", "exp_avg", "exp_avg_sq"}
    assert frozen not in optimizer.state and torch.equal(frozen, before)
    assert torch.allclose(c.detach(), some(5) * 0.5 - some(5, 9).sign(), atol=1e-6)


def test_random_bits_do_not_depend_on_frozen_parameters():
    def run(freeze):
        first, second = nn.Parameter(some(256).bfloat16()), nn.Parameter(some(256, 1).bfloat16())
        optimizer = fp8.AdamW([first, second], lr=1e-3, master="bf16+sr")
        for seed in range(5):
            first.grad = None if freeze else some(256, seed).bfloat16()
            second.grad = some(256, seed).bfloat16()
            optimizer.step()
        return second.detach()

    assert torch.equal(run(True), run(False))


def test_seed_makes_steps_reproducible():
    def run(seed, states="fp8"):
        p = nn.Parameter(some(1024).bfloat16())
        trained(p, [some(1024, s).bfloat16() for s in range(4)], master="bf16+sr", seed=seed, states=states)
        return p.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    assert not torch.equal(run(1, "fp32"), run(1 + (1 << 40), "fp32"))


def test_sparse_gradients_match_dense():
    table, dense = nn.Embedding(10, 40, sparse=True), nn.Embedding(10, 40)
    dense.load_state_dict(table.state_dict())
    for layer in (table, dense):
        optimizer = fp8.AdamW(layer.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([1, 1, 7])).square().sum().backward()
            optimizer.step()
    assert torch.equal(table.weight, dense.weight)


def test_noncontiguous_weights_match_contiguous():
    lying, flat = nn.Parameter(some((30, 20)).t()), nn.Parameter(some((30, 20)).t().contiguous())
    assert not lying.is_contiguous()
    gradients = [some((20, 30), s) for s in range(1, 5)]
    trained(lying, gradients)
    trained(flat, gradients)
    assert torch.equal(lying, flat)


def test_factor_multiplies_gradients():
    a, b, c = (nn.Parameter(some(300)) for _ in range(3))
    for p, factor, value in ((a, 0.25, 4.0), (b, torch.tensor(0.25), 4.0), (c, None, 1.0)):
        optimizer = fp8.AdamW([p], eps=1e-2)
        for seed in range(3):
            p.grad = some(300, seed) * value
            optimizer.step(factor=factor)
    assert torch.equal(a, b) and torch.equal(a, c)


def test_closure_runs_with_gradients_enabled():
    p = nn.Parameter(some(10))
    optimizer = fp8.AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = float(p.detach().square().sum())
    assert optimizer.step(closure).item() == pytest.approx(before)
    assert float(p.detach().square().sum()) < before


def test_schedulers_and_tensor_learning_rates_work():
    a, b = nn.Parameter(some(50)), nn.Parameter(some(50))
    for p, lr in ((a, 0.125), (b, torch.tensor(0.125))):
        optimizer = fp8.AdamW([p], lr=lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for seed in range(3):
            p.grad = some(50, seed)
            optimizer.step()
            schedule.step()
    assert torch.equal(a, b)


def test_step_invalidates_cached_codes():
    p = nn.Parameter(some(10))
    p.grad = some(10)
    optimizer = fp8.AdamW([p])
    watch_optimizers()  # as the first weight that is cast does
    before = versions.now
    optimizer.step()
    assert versions.now > before


def test_copied_optimizer_is_independent():
    p = nn.Parameter(some(200))
    optimizer = trained(p, [some(200, 1)])
    twin = copy.deepcopy(optimizer)
    other = twin.param_groups[0]["params"][0]
    for each, chosen in ((p, optimizer), (other, twin)):
        each.grad = some(200, 2)
        chosen.step()
    assert torch.equal(p, other) and other is not p
    for name, value in optimizer.state[p].items():
        assert torch.equal(value.float(), twin.state[other][name].float()), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": "fp4"}, "none of fp8, coat, bf16, fp32"),
        ({"master": "bf16"}, r"none of fp32, bf16\+16, bf16\+sr"),
        ({"master": "bf16+sr"}, r"\.bfloat16\(\)"),
        ({"master": "bf16+16"}, r"take master='fp32'"),
        ({"lr": -1.0}, "take 0 or more"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, r"\[0, 1\)"),
        ({"eps": -1e-8}, "0 or more"),
        ({"seed": -1}, "from 0 to"),
    ],
)
def test_invalid_settings_are_rejected_with_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        fp8.AdamW([nn.Parameter(torch.zeros(3))], **settings)


def test_rejected_group_does_not_change_optimizer():
    optimizer = fp8.AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match=r"\.float\(\) or \.bfloat16\(\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 1


def test_single_updates_index_parameters_once():
    """Update in backward does; a walk each time would be a square of their number."""

    class Watched(list):
        walks = 0

        def __iter__(self):
            Watched.walks += 1
            return super().__iter__()

    params = [nn.Parameter(torch.ones(3)) for _ in range(50)]
    optimizer = fp8.AdamW(params, lr=1e-2)
    optimizer.param_groups[0]["params"] = Watched(optimizer.param_groups[0]["params"])
    for p in reversed(params):
        p.grad = torch.ones(3)
        optimizer.update([p])
    assert Watched.walks == 1 and all(optimizer.state[p]["step"] == 1 for p in params)


def test_single_updates_equal_full_step():
    def run(singly):
        params = [nn.Parameter(some(200, i).bfloat16()) for i in range(4)]
        optimizer = fp8.AdamW(params[:2], lr=1e-2, master="bf16+sr")
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": params[2:], "lr": 3e-2})
            for i, p in enumerate(params):
                p.grad = some(200, 10 * step + i).bfloat16()
            known = params if step else params[:2]
            for some_ in [[p] for p in reversed(known)] if singly else [known]:
                optimizer.update(some_)
        return params

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_unknown_parameter_is_rejected():
    optimizer = fp8.AdamW([nn.Parameter(torch.ones(3))])
    other = nn.Parameter(torch.ones(5))
    other.grad = torch.ones(5)
    with pytest.raises(ValueError, match=r"shape \[5\] is in no group"):
        optimizer.update([other])


def _masters(fp8_weight=False):
    """A BF16 layer that stepped twice, with its optimizer: fp32 masters apart from the weights."""
    model = nn.Linear(40, 20, dtype=torch.bfloat16)
    if fp8_weight:
        model = nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16))
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="blockwise", param=True)))
    optimizer = fp8.AdamW(model.parameters(), lr=1e-3)
    for seed in range(2):
        _step(model, optimizer, seed)
    return model, optimizer


def _step(model, optimizer, seed):
    for p in model.parameters():
        p.grad = some(p.shape, seed).bfloat16()
    optimizer.step()


def _bits_of(optimizer):
    return {i: (plain(p).clone(), optimizer.state[p]["master"].clone()) for i, p in enumerate(optimizer.state)}


@pytest.mark.parametrize("fp8_weight", [False, True])
def test_step_starts_from_loaded_weight(fp8_weight):
    model, optimizer = _masters(fp8_weight)
    loaded = {name: some(x.shape, 7).to(x.dtype) for name, x in model.state_dict().items()}
    model.load_state_dict(loaded)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _step(model, optimizer, 3)
    for name, p in model.named_parameters():
        assert torch.equal(plain(p), loaded[name]) and torch.equal(
            optimizer.state[p]["master"].bfloat16(), loaded[name]
        )


@pytest.mark.parametrize("fp8_weight", [False, True])
def test_masters_keep_bits_of_unchanged_weights(fp8_weight):
    """The same values loaded again, a copy and a state dict's way home change nothing; one element written changes
    that one."""
    model, optimizer = _masters(fp8_weight)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert not twin._written and not fp8.AdamW._written
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    for each in ((model, optimizer), (twin_model, twin)):
        _step(*each, 3)
    for (weight, master), (other, its) in zip(_bits_of(optimizer).values(), _bits_of(twin).values(), strict=True):
        assert torch.equal(weight, other) and torch.equal(master, its)
        assert not torch.equal(master, weight.float())
    twin.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        first = next(iter(twin_model.parameters()))
        first[0].copy_(torch.full_like(first[0], 3.0))
    _step(model, optimizer, 4)
    _step(twin_model, twin, 4)
    (ours, mine), (theirs, its) = _bits_of(optimizer)[0], _bits_of(twin)[0]
    assert torch.equal(ours[1:], theirs[1:]) and torch.equal(mine[1:], its[1:])
    assert torch.allclose(its[0], torch.tensor(3.0), atol=1e-2) and not torch.equal(mine[0], its[0])


def test_master_is_not_compared_without_external_writes(monkeypatch):
    model, optimizer = _masters()
    monkeypatch.setattr("octavo.fp8.optim.adamw._update_master", lambda *_: pytest.fail("compared without cause"))
    _step(model, optimizer, 3)


@pytest.mark.parametrize(
    ("master", "dtype", "change", "message"),
    [
        ("fp32", torch.bfloat16, lambda m, o: m.float(), r"\[20\] is float32 .* has .*master float32.*Put back"),
        ("fp32", torch.float32, lambda m, o: m.bfloat16(), "is bfloat16 .* master float32 are expected"),
        ("fp32", torch.float32, lambda m, o: m.half(), r"is torch.float16: .*\.bfloat16\(\)"),
        ("bf16+sr", torch.bfloat16, lambda m, o: m.float(), r"keeps weights in BF16, .* is torch.float32"),
        ("fp32", torch.float32, lambda m, o: setattr(m.weight, "data", some((4, 4))), r"gradient of shape \[20, 40\]"),
        ("fp32", torch.float32, lambda m, o: _replace(m), r"shape \[4, 4\] .* made for shape \[20, 40\]"),
        ("fp32", torch.bfloat16, lambda m, o: o.param_groups[0].update(master="bf16+sr"), "has .*master float32"),
        ("fp32", torch.float32, lambda m, o: o.param_groups[0].update(states="bf16"), "exp_avg bfloat16, .*expected"),
        ("fp32", torch.float32, lambda m, o: o.param_groups[0].update(states="fp4"), "none of fp8, coat, bf16, fp32"),
    ],
)
def test_changed_parameter_is_rejected_before_step(master, dtype, change, message):
    model = nn.Linear(40, 20, dtype=dtype)
    optimizer = fp8.AdamW([model.bias, model.weight], lr=1e-2, master=master)
    for p in model.parameters():
        p.grad = some(p.shape).to(dtype)
    optimizer.step()
    change(model, optimizer)
    before = copy.deepcopy([optimizer.state_dict()["state"], model.state_dict()])
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    after = [optimizer.state_dict()["state"], model.state_dict()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def _replace(model):
    model.weight.grad = None
    model.weight.data = some((4, 4))
    model.weight.grad = some((4, 4))


def test_bf16_and_fp32_moments_are_distinguished():
    p = nn.Parameter(some(5))
    optimizer = trained(p, [some(5)], states="fp32")
    optimizer.param_groups[0]["states"] = "bf16"  # of the same names
    with pytest.raises(ValueError, match="exp_avg bfloat16.*its state .* has exp_avg float32"):
        optimizer.step()


def test_factor_must_be_scalar():
    a, b = nn.Parameter(some(300)), nn.Parameter(some(300))
    with pytest.raises(ValueError, match=r"factor is a tensor of shape \[2\].*0-d tensor"):
        a.grad = some(300)
        fp8.AdamW([a]).step(factor=torch.ones(2))
    assert torch.equal(a, b)
    for p, factor in ((a, torch.tensor([0.25], dtype=torch.float64)), (b, 0.25)):
        p.grad = some(300)
        fp8.AdamW([p]).step(factor=factor)
    assert torch.equal(a, b)
