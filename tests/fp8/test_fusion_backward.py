"""Sisters as one node of the graph: backwards that come one by one, edits in between, and what is held how long."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8 import fusion
from tests.fp8.test_fusion import SIZES, attention, seeded


def each(m, x):
    return [m.q_proj(x), m.k_proj(x), m.v_proj(x)]


def backward_in_turn(m, x, order=tuple(SIZES), region=each):
    """One backward for each output, in some order; (gradient of x, gradients of the parameters)."""
    m.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    with fp8.count_gemms() as counts:
        ys = dict(zip(SIZES, region(m, x), strict=True))
        for name in order:
            ys[name].square().sum().backward()
    return x.grad, {n: p.grad for n, p in m.named_parameters()}, counts


@pytest.mark.parametrize("order", [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj"), ("k_proj",)])
def test_a_backward_for_each_output(order):
    plain, twin = attention()
    for seed in range(2):
        dx, grads, counts = backward_in_turn(plain, seeded(seed), order)
        dx2, grads2, counts2 = backward_in_turn(twin, seeded(seed), order)
        assert torch.equal(dx, dx2) and counts.calls == counts2.calls and counts.came == counts2.came
        for name, grad in grads.items():
            assert (grad is None) == (grads2[name] is None)
            assert grad is None or torch.equal(grad, grads2[name])


def test_a_backward_for_each_output_of_a_recomputed_region():
    def region(m, x):
        return checkpoint(each, m, x, use_reentrant=False)

    plain, twin = attention()
    dx, grads, _ = backward_in_turn(plain, seeded(0), region=region)
    dx2, grads2, _ = backward_in_turn(twin, seeded(0), region=region)
    assert torch.equal(dx, dx2) and all(torch.equal(g, grads2[n]) for n, g in grads.items())


def test_twice_through_one_output_needs_a_retained_graph():
    plain, twin = attention()
    x, grads = seeded(0), []
    for m in (plain, twin):
        m.zero_grad()
        y = [m.q_proj(x), m.k_proj(x)]
        y[0].sum().backward(retain_graph=True)
        y[0].sum().backward()
        y[1].sum().backward()
        grads.append([m.q_proj.weight.grad, m.k_proj.weight.grad])
        with pytest.raises(RuntimeError, match="second time"):
            y[1].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_codes_for_a_backward_to_come_die_with_the_last_one_and_with_the_graph():
    _, twin = attention()
    x = torch.randn(40, 96)

    def codes():
        found = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.shape == (40, 96))
        return len({t.untyped_storage().data_ptr() for t in found if t.dtype == torch.float8_e4m3fn})

    q, k = twin.q_proj(x), twin.k_proj(x)
    q.sum().backward()
    assert codes() == 1  # for k; nobody asked for v
    k.sum().backward()
    assert codes() == 0
    q, k = twin.q_proj(x), twin.k_proj(x)
    q.sum().backward()
    del q, k
    assert codes() == 0


def test_an_edited_weight_is_refused_by_the_backwards_that_use_it_alone():
    plain, twin = attention()
    for m in (plain, twin):
        x = seeded(0).requires_grad_()
        v = m.v_proj(x)
        with torch.no_grad():
            m.q_proj.weight.mul_(2)
        v.sum().backward()
        m.given = x.grad
    assert torch.equal(plain.given, twin.given) and torch.equal(plain.v_proj.weight.grad, twin.v_proj.weight.grad)
    for m in (plain, twin):
        for first in (False, True):  # also where another backward came before
            x = seeded(0).requires_grad_()
            q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)
            if first:
                q.sum().backward()
            with torch.no_grad():
                m.k_proj.weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (k.sum() if first else (q + k[:, :1] + v[:, :1]).sum()).backward()


def test_a_leaf_and_what_nobody_claimed_are_freed_by_a_step_and_by_invalidate():
    for end in ("backward", "step", "invalidate", "another call"):
        _, twin = attention()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
        x = torch.randn(4, 96, requires_grad=True)
        q = twin.q_proj(x)
        held = [weakref.ref(x), *(weakref.ref(y) for y in fusion._pending().ys if y is not None)]
        if end == "backward":
            q.sum().backward()
        elif end == "step":
            optimizer.step()
        elif end == "invalidate":
            fp8.invalidate(twin)
        else:
            twin(torch.randn(4, 96)).sum().backward()
        del x, q
        assert len(held) == 3 and not any(r() is not None for r in held), end


def test_an_input_that_numpy_may_write_is_not_carried_from_sister_to_sister():
    _, twin = attention()
    with torch.no_grad():
        for x in (torch.from_numpy(seeded(0).numpy().copy()), seeded(0)):
            for step in range(4):
                layer = (twin.q_proj, twin.k_proj)[step % 2]
                assert torch.equal(layer(x), fp8.linear(x, layer.weight, layer.bias))
                x.numpy()[:] *= 2


def test_backends_never_run_under_autocast_and_transforms_go_to_the_layers(monkeypatch):
    _, twin = attention()
    backend, lowered = fp8.kernels.registry.get("reference"), []
    for name in ("gemm_fwd", "gemm_dgrad", "gemm_wgrad"):
        own = getattr(backend, name)
        monkeypatch.setattr(
            backend, name, lambda *a, own=own, **k: lowered.append(torch.is_autocast_enabled("cpu")) or own(*a, **k)
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twin(seeded(0).requires_grad_()).float().sum().backward()
    assert lowered == [False] * 3
    with pytest.raises(RuntimeError, match="'q_proj' was called under a transform of torch.func"):
        torch.func.grad(lambda x: twin(x).sum())(seeded(0))
