"""Nothing in a step waits for a device: no value is read into Python between the first forward and the end of the
backward. On the CPU that is told by the operations that would wait; casts are held to the rules of a device."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8 import cast

from .test_fusion import Attention

WAITS = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_static", "masked_select", "unique", "_unique2",
    "unique_consecutive", "bincount", "repeat_interleave", "equal", "histc", "allclose",
)  # fmt: skip


class NeverWaits(TorchDispatchMode):
    """Fails at the first operation whose result a device would have to hand to the host."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        name = func.overloadpacket.__name__
        lengths = name == "repeat_interleave" and isinstance(args[-1], int)
        assert name not in WAITS or lengths, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{func} by a mask waits"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(cast, "_may_look", lambda tensor: False)


def step(m, x, wrap=lambda m, x: m(x)):
    y = wrap(m, x)
    y.square().mean().backward()


def test_the_watch_notices():
    x = torch.randn(4)
    for wait in (lambda: x.max().item(), lambda: bool(x.any()), lambda: x[x > 0], lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="waits"), NeverWaits():
            wait()


@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("lowered", [False, True])
def test_no_step_of_any_recipe_waits(recipe, reentrant, lowered):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 32, bias=False))
    fp8.apply(m, fp8.plan(m, recipe))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    x = torch.randn(3, 5, 96, requires_grad=True)

    def wrap(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=lowered):
            return m(x) if reentrant is None else checkpoint(m, x, use_reentrant=reentrant)

    with fp8.count_gemms() as counts, NeverWaits() as watch:
        for _ in range(2):  # with an empty and with a filled history, with and without codes in the cache
            step(m, x, wrap)
        optimizer.step()
        step(m, x, wrap)
    assert counts.total("wgrad") == 6 and watch.seen > 100


def test_no_fused_step_waits():
    torch.manual_seed(0)
    for recipe in ("blockwise", "mxfp8"):
        m = fp8.apply(Attention(), fp8.plan(Attention(), fp8.Policy(recipe=recipe, fuse="on")))
        x = torch.randn(5, 96, requires_grad=True)
        with NeverWaits() as watch:
            for inner in (m, m.q_proj):
                step(inner, x)
                step(inner, x, lambda m, x: checkpoint(m, x, use_reentrant=False))
        assert watch.seen > 100 and m.q_proj.weight.grad is not None


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_a_device_gives_what_the_cpu_gives(recipe, monkeypatch):
    """The rules for bad and tiny blocks run everywhere on a device, and change nothing where there are none."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(96, 48))
    fp8.apply(m, fp8.plan(m, recipe))
    twin, x = copy.deepcopy(m), torch.randn(5, 96)
    step(m, x)
    monkeypatch.undo()
    step(twin, x)
    assert torch.equal(m[0].weight.grad, twin[0].weight.grad)
