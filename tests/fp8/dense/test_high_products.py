"""Products in high precision: a CPU without BF16 instructions computes them in fp32, in every kind of layer."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import fp8
from octavo.adapters.lowrank import low_rank
from octavo.base import accelerator
from octavo.fp8.dense import compiled, gemms
from octavo.fp8.dense.graph_arguments import HIGH_KEY
from octavo.fp8.invariance import BatchInvariantMode

BF16 = torch.bfloat16


@pytest.fixture
def no_instructions(monkeypatch):
    monkeypatch.setattr(accelerator, "multiplies_on_cpu", lambda dtype: False)


def draw(*shape, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_rounds_fp32_products_once(no_instructions, dtype, autocast):
    wide = torch.float32 if autocast else dtype
    x, w, b = (t.to(wide).requires_grad_() for t in (draw(2, 30, 48), draw(40, 48), draw(40)))
    dy = draw(2, 30, 40, dtype=dtype)
    with torch.autocast("cpu", dtype) if autocast else nullcontext():
        y = gemms.high_linear(x, w, b)
    y.backward(dy)
    x32, w32, b32 = (t.detach().to(dtype).float() for t in (x, w, b))
    rows = dy.float().view(60, 40)
    assert y.dtype == dtype and torch.equal(y, F.linear(x32, w32, b32).to(dtype))
    assert torch.equal(x.grad, (rows @ w32).to(dtype).to(wide).view(x.shape))
    assert torch.equal(w.grad, (rows.t() @ x32.view(60, 48)).to(dtype).to(wide))
    assert torch.equal(b.grad, dy.view(60, 40).sum(0).to(wide))


def test_mm_and_addmm_round_once_and_write_where_they_are_told(no_instructions):
    a, b, start = draw(30, 48), draw(48, 40), draw(30, 40)
    expected, out = (a.float() @ b.float()).to(BF16), torch.empty(30, 40, dtype=BF16)
    assert torch.equal(gemms.high_mm(a, b), expected)
    assert gemms.high_mm(a, b, out) is out and torch.equal(out, expected)
    assert torch.equal(
        gemms.high_addmm(start, a, b, alpha=0.5), torch.addmm(start.float(), a.float(), b.float(), alpha=0.5).to(BF16)
    )


def test_one_row_fp32_operands_and_invariant_products_stay_as_they_are(no_instructions):
    x, w = draw(1, 48), draw(40, 48)
    assert torch.equal(gemms.high_linear(x, w), F.linear(x, w))
    assert gemms.high_linear(draw(30, 48, dtype=torch.float32), w.float()).dtype == torch.float32
    rows, layer = draw(32, 48), nn.Linear(48, 40, bias=False).to(BF16)
    assert gemms.stock_forward(nn.Linear, layer, rows) is not None
    with BatchInvariantMode():
        expected = F.linear(rows, layer.weight)
        assert gemms.stock_forward(nn.Linear, layer, rows) is None
        assert torch.equal(gemms.high_linear(rows, layer.weight), expected)


@pytest.mark.parametrize("conv", [nn.Conv3d(3, 10, (2, 4, 4), (2, 4, 4)), nn.Conv2d(3, 10, 4, 4, bias=False)])
def test_a_convolution_over_single_patches_is_one_product(no_instructions, conv):
    conv = copy.deepcopy(conv).to(BF16)
    x = draw(40, 3, *conv.kernel_size).requires_grad_()
    y = gemms.stock_forward(type(conv), conv, x)
    exact = copy.deepcopy(conv).double()
    given = x.detach().double().requires_grad_()
    expected = exact(given)
    assert y.shape == expected.shape
    dy = draw(*y.shape)
    found = (y, *torch.autograd.grad(y, (x, *conv.parameters()), dy))
    wanted = (expected, *torch.autograd.grad(expected, (given, *exact.parameters()), dy.double()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-7, atol=1e-2)


def test_a_convolution_keeps_the_bits_of_the_stock_model(monkeypatch):
    conv, x = nn.Conv3d(3, 10, (2, 4, 4), (2, 4, 4)), draw(20, 3, 2, 4, 4)
    for has_instructions, layer, given in ((False, conv, x.float()), (True, copy.deepcopy(conv).to(BF16), x)):
        monkeypatch.setattr(accelerator, "multiplies_on_cpu", lambda dtype, has=has_instructions: has)
        assert gemms.stock_forward(nn.Conv3d, layer, given) is None


def test_other_convolutions_and_modules_keep_their_forward(no_instructions):
    x = draw(20, 4, 4, 4)
    assert gemms.stock_forward(nn.Conv2d, nn.Conv2d(4, 8, 2, 2).to(BF16), x) is None  # four patches
    assert gemms.stock_forward(nn.Conv2d, nn.Conv2d(4, 8, 4, 4, padding=1).to(BF16), x) is None
    assert gemms.stock_forward(nn.Conv2d, nn.Conv2d(4, 8, 4, groups=2).to(BF16), x) is None
    assert gemms.stock_forward(nn.Conv2d, nn.Conv2d(4, 8, 4).to(BF16), x[:0]) is None
    assert gemms.stock_forward(nn.Embedding, nn.Embedding(10, 16), torch.arange(10)) is None


class Doubled(nn.Conv3d):
    def forward(self, x):
        return 2 * super().forward(x)


class Negated(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


def test_a_derived_class_keeps_its_forward(no_instructions):
    model = nn.Sequential(Doubled(3, 64, (2, 4, 4), (2, 4, 4)), nn.Flatten(), Negated(64, 96)).to(BF16)
    x = draw(32, 3, 2, 4, 4)
    before = model(x)
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe="off")))
    assert type(model[0]) is not Doubled and torch.equal(model(x), before)


class SlowProducts(TorchDispatchMode):
    """Collects products of two 16-bit matrices, which a CPU without instructions computes slowly."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            a, b = args[-2:]
            if a.dtype == BF16 and min(a.numel() // a.shape[-1], b.shape[-1], a.shape[-1]) >= 16:
                self.seen.append((func, tuple(a.shape), tuple(b.shape)))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.lm_head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 128, bias=False)

    def forward(self, x):
        return self.lm_head(self.down(F.silu(self.up(x))))


def test_operators_of_compiled_graphs_multiply_in_fp32(no_instructions):
    """Called as a graph calls them, outside of its trace."""
    x, w, dy = draw(32, 64), draw(96, 64), draw(32, 96)
    with SlowProducts() as slow:
        y = compiled.multiply_fwd(x, x, x, w, None, BF16, HIGH_KEY, 0)
        dx = compiled._dgrad(dy, None, w, 32, BF16, HIGH_KEY)
        dw = compiled._wgrad(dy, None, x, None, w, 32, HIGH_KEY)
    assert not slow.seen and [t.shape for t in (y, dx, dw)] == [(32, 96), (32, 64), (96, 64)]


@pytest.mark.parametrize("setting", ["off", "fwd in bf16", "lora", "stock"])
def test_no_layer_multiplies_bf16_matrices_slowly(no_instructions, setting):
    model = Block().to(BF16)
    policy = fp8.Policy(recipe="blockwise", fwd="bf16") if setting == "fwd in bf16" else fp8.Policy(recipe="off")
    if setting != "stock":
        fp8.apply(model, fp8.plan(model, policy))
    x, a, b = (t.requires_grad_() for t in (draw(4, 16, 64), draw(32, 64), draw(128, 32)))
    with SlowProducts() as slow:
        y = model(x)
        y = low_rank(y, x, a, b, 0.5, 0.0, model) if setting == "lora" else y
        y.float().square().sum().backward()
    assert bool(slow.seen) == (setting == "stock")  # torch's own layers show that the mode sees them
    assert x.grad is not None
