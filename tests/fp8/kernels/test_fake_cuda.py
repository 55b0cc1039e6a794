"""torch's checks of operand layouts, on fake CUDA tensors.

Tensors of ``FakeTensorMode`` have a shape, strides and a device but no memory. torch runs the same checks as before a
real GEMM: orientation of rows and columns, sizes in multiples of 16, shapes and strides of scales. The operands are
first converted on the CPU, and the fake tensors have their shapes and strides.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.recipe import RECIPES, recipe
from octavo.fp8.kernels import torch_backend as tb
from octavo.fp8.kernels.layout import CONTRACTED
from tests.fp8.kernels.laid_out import laid_out

GEMMS = ("fwd", "dgrad", "wgrad")
WIDE = (
    (3420, 1280),
    (1152, 4304),
    (1176, 1280),
    (144, 80),
)  # (N, K) of published towers
TOKENS = (1, 2, 15, 16, 17, 33, 127, 128, 129, 300)


@lru_cache(maxsize=8)
def nothing(shape: tuple[int, int], spec: cast.CastSpec) -> Quantized:
    """Where codes lie is asked here, not what they are: one weight serves all numbers of tokens."""
    return cast.quantize(torch.zeros(shape), spec)


def operands(name: str, op: str, m: int, n: int, k: int, plain: bool = False) -> tuple[Quantized, Quantized]:
    gemm = recipe(name).gemm(op)
    sides = {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[op]
    a, b = nothing(sides[0], gemm.a), nothing(sides[1], gemm.b)
    if plain:  # as the reference leaves it: nothing padded, nothing ordered
        return a, b
    dims = CONTRACTED[op]
    return laid_out(a, dims[0]), laid_out(b, dims[1])


def ask(product: tb.Product, dtype: torch.dtype = torch.bfloat16, **more: object) -> Tensor:
    """multiply() on fake CUDA tensors with the shapes and strides of these."""
    with FakeTensorMode(), torch.no_grad():
        fake = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in product[1:]]
        return tb.multiply(product._replace(**dict(zip(product._fields[1:], fake, strict=True))), dtype, **more)


def widened(product: tb.Product) -> tb.Product:
    """b with its columns filled up to whole blocks of 128, for a check of torch that takes n // 128 blocks of n
    columns for granted where its CUDA code takes the ceiling (_meta_registrations.py of 2.13)."""
    k, n = product.b.shape
    return product._replace(b=product.b.new_zeros(-(-n // 128) * 128, k, dtype=torch.uint8).view(product.b.dtype).t())


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_torch_accepts_every_gemm_of_every_recipe(name: str, op: str) -> None:
    for n, k in WIDE:
        for m in TOKENS if (n, k) == WIDE[-1] else (17, 128):
            product = tb.make_product(op, *operands(name, op, m, n, k))
            rows, cols = {"fwd": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[op]
            if product.kind == "block" and product.b.shape[1] % 128:
                # The rest of the check by its own words: a multiple of 16, contiguous along the contraction.
                assert product.b.shape[1] % 16 == 0 and product.b.stride() == (1, product.b.shape[0])
                assert product.scale_b.shape[1] == -(-product.b.shape[1] // 128)
                product = widened(product)
            out = ask(product)
            assert out.device.type == "cuda" and out.shape[0] >= rows and out.shape[1] >= cols


FEW = (1, 2, 7, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 300)
MORE = tuple(m for m in range(34, 301) if m % 16 in (0, 1, 15) and m not in FEW)  # beside each border of 16


@pytest.mark.parametrize("m", [*FEW, *(pytest.param(m, marks=pytest.mark.long) for m in MORE)])
def test_any_number_of_tokens(m: int) -> None:
    """M is a free dimension in forward and dgrad, and the contraction of wgrad."""
    for name in RECIPES:
        for op in GEMMS:
            product = tb.make_product(op, *operands(name, op, m, 256, 128))
            assert ask(product, torch.float32).dtype is torch.float32


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("name", RECIPES)
def test_reference_casts_are_converted(name: str, op: str) -> None:
    # Torch's description of its product, unlike the product, takes no part of a 128x128 block among the columns.
    whole = op == "dgrad" or (name, op) == ("blockwise", "wgrad")
    for m, n, k in ((17, 384, 128), (33, 256, 128 if whole else 171)):
        ask(tb.make_product(op, *operands(name, op, m, n, k, plain=True)))


def test_bias_and_fast_accumulation_pass() -> None:
    for name in ("tensorwise", "rowwise"):
        product = tb.make_product("fwd", *operands(name, "fwd", 7, 32, 64))
        assert ask(product, fast=True).shape == (7, 32)


def refused(product: tb.Product) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        ask(product)
    return str(caught.value)


def test_wrong_layouts_are_rejected() -> None:
    """What these tests are worth: each fault that they should see, made on purpose."""
    row = tb.make_product("fwd", *operands("rowwise", "fwd", 33, 80, 144))
    assert "row_major" in refused(row._replace(a=row.a.t().contiguous().t()))
    assert "col_major" in refused(row._replace(b=row.b.contiguous()))
    assert "divisible by 16" in refused(row._replace(a=row.a[:, :140].contiguous(), b=row.b[:140]))
    assert "divisible by 16" in refused(row._replace(b=row.b[:, :75]))
    assert "scale_a" in refused(row._replace(scale_a=row.scale_a[:32]))
    assert "scale_b" in refused(row._replace(scale_b=row.scale_b[:, :64]))
    block = tb.make_product("fwd", *operands("blockwise", "fwd", 33, 256, 640))
    assert "stride" in refused(block._replace(scale_a=block.scale_a.contiguous()))
    assert "scale a" in refused(block._replace(scale_a=block.scale_a[:33]))  # without the padding
    assert "scale b" in refused(block._replace(scale_b=block.scale_b[:5]))  # five blocks, not rounded up to eight
    assert "scale b" in refused(block._replace(scale_b=block.scale_b.contiguous()))
    line = tb.make_product("wgrad", *operands("blockwise", "wgrad", 300, 80, 144))
    assert "scale b" in refused(line._replace(scale_b=line.scale_b.contiguous()))
    mx = tb.make_product("fwd", *operands("mxfp8", "fwd", 33, 80, 144))
    assert "MX" in refused(mx._replace(scale_a=mx.scale_a[:-1]))


def test_unconverted_casts_would_be_rejected() -> None:
    """Handing over what the reference wrote, as it lies, is no GEMM on a GPU."""
    x_q, w_q = operands("rowwise", "fwd", 33, 75, 140, plain=True)
    assert "divisible by 16" in refused(tb.Product("row", x_q.data, w_q.data.t(), x_q.scale, w_q.scale.t()))
