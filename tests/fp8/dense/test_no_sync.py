"""A step never synchronizes with a device: no value is read into Python during forward and backward.

On the CPU, operations that would synchronize are detected, and casts follow the rules of other devices.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from octavo import fp8
from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.adamw import MASTERS, reference_step
from octavo.fp8.arithmetic.moments import STATES
from octavo.fp8.optim import engine
from octavo.fp8.optim.in_backward import clip_factor, gradient_norm
from tests.fp8.dense.test_siblings import Attention
from tests.gpu.blocks import Block

WAITS = (
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_static", "masked_select", "unique", "_unique2",
    "unique_consecutive", "bincount", "repeat_interleave", "equal", "histc", "allclose",
)  # fmt: skip


class NeverWaits(TorchDispatchMode):
    """Fail at the first operation whose result a device would have to copy to the host."""

    def __init__(self, at_home=lambda tensor: False):
        """``at_home``: says of a tensor that it is in host memory even where there is a device."""
        super().__init__()
        self.seen, self.at_home = 0, at_home

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], torch.Tensor) and self.at_home(args[0]):
            return func(*args, **(kwargs or {}))
        lengths = name == "repeat_interleave" and isinstance(args[-1], int)
        assert name not in WAITS or lengths, f"{func} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{func} by a mask waits"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(cast, "_can_read_values", lambda tensor: False)


def step(m, x, wrap=lambda m, x: m(x)):
    y = wrap(m, x)
    y.square().mean().backward()


def test_sync_detector_works():
    x, home = torch.randn(4), torch.randn(4)
    with NeverWaits(lambda tensor: tensor is home):
        home.nonzero()
    for wait in (lambda: x.max().item(), lambda: bool(x.any()), lambda: x[x > 0], lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="waits"), NeverWaits():
            wait()


# Autocast at every second one: it casts x before the layer, whose recipe it does not know.
@pytest.mark.parametrize(
    ("recipe", "reentrant", "lowered"),
    [
        (recipe, how, (i + j) % 2 > 0)
        for i, recipe in enumerate(fp8.RECIPES)
        for j, how in enumerate((None, False, True))
    ],
)
def test_step_does_not_synchronize(recipe, reentrant, lowered):
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


def test_shared_input_step_does_not_synchronize():
    torch.manual_seed(0)
    for recipe in ("blockwise", "mxfp8"):
        m = fp8.apply(Attention(), fp8.plan(Attention(), recipe))
        x = torch.randn(5, 96, requires_grad=True)
        with NeverWaits() as watch:
            for inner in (m, m.q_proj):
                step(inner, x)
                step(inner, x, lambda m, x: checkpoint(m, x, use_reentrant=False))
        assert watch.seen > 100 and m.q_proj.weight.grad is not None


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", MASTERS)
def test_optimizer_step_does_not_synchronize(states, master, monkeypatch):
    """The reference runs the step here, as on a GPU without Triton."""
    monkeypatch.setattr(engine, "step_on_cpu", reference_step)
    torch.manual_seed(0)
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    m = nn.Sequential(nn.Linear(96, 48), nn.Linear(48, 5)).to(dtype)
    optimizer = fp8.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, states=states, master=master)

    def counted(tensor):  # how many steps there were is known to the host
        return any(tensor is state.get("step") for state in optimizer.state.values())

    for number in range(2):  # states are made in the first
        for p in m.parameters():
            p.grad = torch.randn_like(p)
        with NeverWaits(counted) as watch:
            factor = clip_factor(gradient_norm(m.parameters()), 0.5)
            optimizer.step(factor=factor)
            optimizer.zero_grad()
        assert watch.seen > 50, number


@pytest.mark.parametrize(
    ("recipe", "fuse", "how"),
    [("blockwise", "on", how) for how in ("none", "selective", "full")]
    + [("blockwise", "off", "full"), ("tensorwise", "off", "selective")],
)
def test_saved_codes_do_not_synchronize(recipe, fuse, how):
    """Norms, attention, gated MLP and recomputation."""
    torch.manual_seed(0)
    m = nn.Sequential(Block(64, 160, 32), Block(64, 160, 32)).bfloat16()
    policy = fp8.Policy(recipe=recipe, fuse=fuse, activations="fp8")
    plan = fp8.plan(m, policy)
    fp8.apply(m, plan)
    assert {b.kind for b in plan.blocks if b.saves} >= {"norm", "gated MLP", "attention"}
    fp8.activation_checkpointing(m.named_children(), how)
    x = torch.randn(2, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    with NeverWaits() as watch:
        for _ in range(2):
            step(m, x)
    assert watch.seen > 500 and all(p.grad is not None for p in m.parameters())


@pytest.mark.parametrize("home", [False, True])
def test_chunked_loss_does_not_synchronize(home, monkeypatch):
    """Targets are inspected only if they are in host memory."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    target = torch.randint(300, (40,))
    target[::3] = -100
    if home:  # what is made of targets alone are whole numbers
        watch = NeverWaits(lambda tensor: not tensor.is_floating_point())
    else:
        monkeypatch.setattr(target, "fake_mode", None, raising=False)  # taken as values that cannot be looked at
        watch = NeverWaits()
    with watch:
        fp8.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, z_loss=1e-4, chunk=8).sum().backward()
        logs, entropy = fp8.token_log_probs(hidden, weight, target, entropy=True, chunk=8)
        (logs.sum() + entropy.sum()).backward()
    assert watch.seen > 100


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "tensorwise"])
def test_fp8_weights_do_not_synchronize(recipe):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 32)).bfloat16()
    fp8.apply(m, fp8.plan(m, fp8.Policy(recipe=recipe, param=True)))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    x = torch.randn(5, 96, dtype=torch.bfloat16)
    with NeverWaits() as watch:
        for _ in range(3):  # codes are cast in the first forward, and after each step
            step(m, x)
            optimizer.step()
            optimizer.zero_grad()
    assert watch.seen > 100


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_device_matches_cpu(recipe, monkeypatch):
    """The rules for bad and tiny blocks always run on a device, and do not change normal blocks."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(96, 48))
    fp8.apply(m, fp8.plan(m, recipe))
    twin, x = copy.deepcopy(m), torch.randn(5, 96)
    step(m, x)
    monkeypatch.undo()
    step(twin, x)
    assert torch.equal(m[0].weight.grad, twin[0].weight.grad)
