"""The torch backend on the CPU (one scale per tensor or row), and its support of other devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import fp8
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import registry
from octavo.fp8.kernels import torch_backend as tb
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.metrics import calc_diff
from tests.fp8 import oracle

BACKEND = registry.get("torch")
CPU = torch.device("cpu")
SIZES = ((33, 80, 144), (1, 12, 20), (3, 171, 117), (16, 16, 16), (300, 49, 31))


def exact(q: Quantized) -> torch.Tensor:
    """Compute code * scale in float64 by the oracle."""
    codes, scales = q.data.view(torch.uint8).numpy(), q.scale.double().numpy()
    return torch.from_numpy(oracle.dequantize(codes, np.asarray(scales), q.spec.format, q.spec.block))


def operands(name: str, op: str, m: int, n: int, k: int, format: str | None = None) -> tuple[Quantized, Quantized]:
    """Casts of operands whose magnitudes spread by row and by column, so that a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(m + n + k)

    def spread(rows: int, cols: int) -> torch.Tensor:
        x = torch.randn(rows, cols, generator=generator)
        steps = [torch.randint(-3, 4, (size,), generator=generator).float() for size in (rows, cols)]
        return x * torch.exp2(steps[0])[:, None] * torch.exp2(steps[1])

    x, w, dy = spread(m, k), spread(n, k), spread(m, n)
    gemm = recipe(name, format).gemm(op)
    a, b = {"fwd": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}[op]
    return BACKEND.quantize(a, gemm.a), BACKEND.quantize(b, gemm.b)


def product(op: str, a_q: Quantized, b_q: Quantized) -> torch.Tensor:
    a, b = exact(a_q), exact(b_q)
    return {"fwd": lambda: a @ b.T, "dgrad": lambda: a @ b, "wgrad": lambda: a.T @ b}[op]()


@pytest.mark.parametrize("format", ("e4m3", "hybrid"))
@pytest.mark.parametrize("op", ("fwd", "dgrad", "wgrad"))
@pytest.mark.parametrize("name", ("tensorwise", "delayed", "rowwise"))
def test_gemms_against_float64(name: str, op: str, format: str) -> None:
    for m, n, k in SIZES:
        a_q, b_q = operands(name, op, m, n, k, format)
        right = product(op, a_q, b_q)
        magnitude = product(op, *(q._replace(data=q.data.view(torch.uint8).bitwise_and(127).view(q.data.dtype))
                                  for q in (a_q, b_q)))  # fmt: skip
        for dtype, ulp in ((torch.float32, 2**-20), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
            y = getattr(BACKEND, f"gemm_{op}")(a_q, b_q, dtype)
            assert y.shape == right.shape and y.dtype is dtype and y.is_contiguous()
            # Each element: the rounding of the result, and fp32's of the sum.
            error = (y.double() - right).abs()
            assert bool((error <= ulp * right.abs() + 2**-18 * magnitude + 2**-24).all()), (dtype, error.max())
            if dtype is torch.float32:
                assert calc_diff(y, right) < 1e-10


@pytest.mark.parametrize("bias_dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("tensorwise", "rowwise"))
def test_a_bias_is_added_before_the_one_rounding(name: str, bias_dtype: torch.dtype) -> None:
    for m, n, k in SIZES:
        x_q, w_q = operands(name, "fwd", m, n, k)
        bias = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 64).to(bias_dtype)
        exactly = product("fwd", x_q, w_q) + bias.double()
        for dtype in (torch.bfloat16, torch.float32):
            y = BACKEND.gemm_fwd(x_q, w_q, dtype, bias)
            assert y.dtype is dtype and y.shape == (m, n)
            if dtype is torch.bfloat16:  # fp32's noise in the sum may turn a tie: a few take the other neighbour
                assert (y != exactly.to(dtype)).double().mean() < 0.02
            assert calc_diff(y, exactly) < (3e-6 if dtype is torch.bfloat16 else 1e-10)


def of_blocks(product: tb.Product, dtype: torch.dtype, fast: bool = False, bias: torch.Tensor | None = None) -> Any:
    """Compute cuBLAS's 1x128 by 128x128 product of a Hopper in float64."""
    a, b = product.a.double(), product.b.double()
    scale_a, scale_b = (s.double().repeat_interleave(128, i) for i, s in ((1, product.scale_a), (0, product.scale_b)))
    out = (a * scale_a[:, : a.shape[1]]) @ (b * scale_b.repeat_interleave(128, 1)[: b.shape[0], : b.shape[1]])
    return (out if bias is None else out + bias.double()).float().to(dtype)


def rounding_twice(product: tb.Product, dtype: torch.dtype, fast: bool = False, bias: Any = None) -> Any:
    return of_blocks(product, dtype) + (0 if bias is None else bias)


def refusing(product: tb.Product, dtype: torch.dtype, fast: bool = False, bias: Any = None) -> Any:
    if bias is not None:
        raise RuntimeError("no bias with scales of blocks\nat scaled_mm")
    return of_blocks(product, dtype)


@pytest.mark.parametrize("gpu", (of_blocks, rounding_twice, refusing))
def test_block_gemm_adds_bias_if_it_rounds_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested once per device; otherwise, and for a bias of another dtype, Triton computes the product."""
    tries: list[object] = []
    lent: list[object] = []
    monkeypatch.setattr(tb, "multiply", lambda *args, **more: (tries.append(args), gpu(*args, **more))[1])
    monkeypatch.setattr(registry.get("triton"), "gemm_fwd", lambda *_: lent.append(1) or torch.zeros(33, 171))
    x_q, w_q = operands("blockwise", "fwd", 33, 171, 144)
    bias = torch.randn(171, generator=torch.Generator().manual_seed(0)) * 64
    tb.why_not_bias.cache_clear()
    try:
        for _ in range(2):
            y = BACKEND.gemm_fwd(x_q, w_q, torch.bfloat16, bias.bfloat16())
        why_not = tb.why_not_bias(CPU, torch.bfloat16)
    finally:
        tb.why_not_bias.cache_clear()
    if gpu is of_blocks:
        exactly = product("fwd", x_q, w_q) + bias.bfloat16().double()
        assert why_not is None and not lent and len(tries) == 4 and y.shape == (33, 171)
        assert (y != exactly.to(torch.bfloat16)).double().mean() < 0.02
        BACKEND.gemm_fwd(x_q, w_q, torch.bfloat16, bias)
        assert len(lent) == 1, "an fp32 bias would be rounded first"
    else:
        assert len(lent) == 2 and len(tries) == 2, "tried once: a product without the bias, and one with it"
        assert ("% of the values differ" if gpu is rounding_twice else "torch raises: no bias") in str(why_not)


def test_unaligned_bias_is_copied() -> None:
    bias = torch.arange(64, dtype=torch.bfloat16)[3:19]
    assert tb._align_bias(bias).storage_offset() == 0 and torch.equal(tb._align_bias(bias), bias)
    assert tb._align_bias(bias.clone()).data_ptr() != bias.data_ptr()


@pytest.mark.parametrize("op", ("fwd", "dgrad", "wgrad"))
def test_separate_row_scales_give_same_result(op: str) -> None:
    """For GPUs whose row kernel returns only BF16: the product of codes, then both scales."""
    for m, n, k in SIZES:
        a_q, b_q = operands("rowwise", op, m, n, k)
        right = product(op, a_q, b_q)
        rows, cols = right.shape
        y = tb._multiply_rows(tb.make_product(op, a_q, b_q), op == "fwd", None, torch.float32, rows, cols)
        assert y.shape == right.shape and y.is_contiguous() and calc_diff(y, right) < 1e-10


class Products(TorchDispatchMode):
    """Record the named arguments of torch's operator for scaled products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_mm" in func._schema.name:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            self.seen.append({**given, **(kwargs or {})})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("op", ("fwd", "dgrad", "wgrad"))
@pytest.mark.parametrize("name", ("tensorwise", "delayed", "rowwise"))
def test_fast_accumulation_only_in_forward(name: str, op: str, dtype: torch.dtype) -> None:
    """Both modes sum equally on the CPU, so the argument of torch's operator is checked."""
    a_q, b_q = operands(name, op, 16, 32, 48)
    biases = (None, torch.zeros(32, dtype=dtype)) if op == "fwd" else (None,)
    for bias in biases:
        with Products() as products:
            getattr(BACKEND, f"gemm_{op}")(a_q, b_q, dtype, **({} if bias is None else {"bias": bias}))
        assert [call.get("use_fast_accum", False) for call in products.seen] == [op == "fwd"]


@pytest.mark.parametrize("op", ("fwd", "dgrad", "wgrad"))
def test_block_gemms_never_use_fast_accumulation(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU supports these products, so the call is intercepted."""
    recorded: list[bool] = []

    def caught(a: torch.Tensor, b: torch.Tensor, *rest: Any, use_fast_accum: bool, **options: Any) -> torch.Tensor:
        recorded.append(use_fast_accum)
        return torch.zeros(a.shape[0], b.shape[1], dtype=options["output_dtype"])

    monkeypatch.setattr(tb.F, "scaled_mm", caught)
    for name in ("blockwise", "mxfp8"):
        getattr(BACKEND, f"gemm_{op}")(*operands(name, op, 128, 128, 128), torch.bfloat16)
    assert recorded == [False, False]


@pytest.mark.parametrize("shape", [(256, 384, 512), (300, 200, 272)], ids=str)
def test_tiles_of_x_give_wgrad_the_form_of_fwd(shape: tuple[int, int, int]) -> None:
    """Codes and scales of `blockwise`'s wgrad have the layout of a forward that an H200 ran."""
    m, n, k = shape
    wgrad = tb.make_product("wgrad", *operands("blockwise", "wgrad", m, n, k))
    fwd = tb.make_product("fwd", *operands("blockwise", "fwd", n, k, m))  # dy^T [N, M] times x [M, K]
    assert wgrad.kind == fwd.kind == "block"
    assert [(t.shape, t.stride()) for t in wgrad[1:]] == [(t.shape, t.stride()) for t in fwd[1:]]


def test_separate_row_scales_do_not_overflow() -> None:
    for large, small in ((1e34, 1e-30), (1e-30, 1e34)):
        gemm = recipe("rowwise").fwd
        assert gemm is not None
        a_q, b_q = (
            BACKEND.quantize(torch.full((n, 128), v), s) for n, v, s in ((16, large, gemm.a), (32, small, gemm.b))
        )
        y = tb._multiply_rows(tb.make_product("fwd", a_q, b_q), True, None, torch.float32, 16, 32)
        assert bool(y.isfinite().all()) and calc_diff(y, product("fwd", a_q, b_q)) < 1e-10


def test_operands_in_layout_are_not_copied() -> None:
    x_q, w_q = operands("rowwise", "fwd", 32, 48, 64)
    inputs = tb.make_product("fwd", x_q, w_q)
    assert inputs.a.data_ptr() == x_q.data.data_ptr() and inputs.b.data_ptr() == w_q.data.data_ptr()
    assert inputs.scale_a.data_ptr() == x_q.scale.data_ptr()


@pytest.mark.parametrize("m, n, k", ((0, 4, 8), (4, 0, 8), (4, 8, 0)))
def test_empty_matrices(m: int, n: int, k: int) -> None:
    for name in ("tensorwise", "rowwise"):
        for op, shape in (("fwd", (m, n)), ("dgrad", (m, k)), ("wgrad", (n, k))):
            y = getattr(BACKEND, f"gemm_{op}")(*operands(name, op, m, n, k), torch.bfloat16)
            assert y.shape == shape and y.dtype is torch.bfloat16 and not y.any()
        y = BACKEND.gemm_fwd(*operands(name, "fwd", m, n, k), torch.float32, torch.full((n,), 2.0))
        assert y.shape == (m, n) and bool((y == 2.0).all())


def test_bad_block_makes_rows_nan() -> None:
    x = torch.randn(20, 40)
    x[3, 5] = float("nan")
    gemm = recipe("rowwise").fwd
    y = BACKEND.gemm_fwd(BACKEND.quantize(x, gemm.a), BACKEND.quantize(torch.randn(24, 40), gemm.b), torch.float32)
    assert bool(y[3].isnan().all()) and not y[:3].isnan().any() and not y[4:].isnan().any()


def test_linear_layer_runs_on_torch_backend() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b, dy = (torch.randn(shape, generator=generator) for shape in ((3, 11, 36), (20, 36), (20,), (3, 11, 20)))
    results = {}
    for backend in ("torch", "reference"):
        inputs = [t.clone().requires_grad_() for t in (x, w, b)]
        with fp8.count_gemms() as counts:
            y = fp8.linear(*inputs, recipe="rowwise", backend=backend)
            y.backward(dy)
        assert {used for _, _, used in dict(counts)} == {backend}
        results[backend] = (y.detach(), *(t.grad for t in inputs))
    for actual, expected in zip(*results.values(), strict=True):
        assert calc_diff(actual, expected) < 1e-10


def test_casts_use_another_backend() -> None:
    x = torch.randn(40, 300)
    for spec in (CastSpec("e4m3", (1, 128)), CastSpec("e5m2", (-1, -1), "fp32")):
        actual, expected = BACKEND.quantize(x, spec), fp8.quantize(x, spec, backend="reference")
        assert torch.equal(actual.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(BACKEND.dequantize(actual), fp8.dequantize(expected))
    row, col = BACKEND.quantize_both(x, CastSpec("e4m3", (1, 128)), CastSpec("e4m3", (128, 1)))
    assert row.scale.shape == (40, 3) and col.scale.shape == (1, 300)
    inputs = BACKEND.quantize_with_scale(x, torch.tensor(0.5), CastSpec("e4m3", (-1, -1), "fp32"))
    assert float(inputs.scale) == 0.5


def test_mismatched_operands_are_rejected() -> None:
    x_q, w_q = operands("rowwise", "fwd", 4, 8, 16)
    with pytest.raises(CastError, match=r"gemm_dgrad: the operands are \[4, 16\] and \[8, 16\]"):
        BACKEND.gemm_dgrad(x_q, w_q, torch.float32)
    with pytest.raises(CastError, match="cannot multiply e4m3 row pow2 by e4m3 tensor fp32; use the casts of a recipe"):
        BACKEND.gemm_fwd(x_q, BACKEND.quantize(torch.randn(8, 16), CastSpec("e4m3", (-1, -1), "fp32")), torch.float32)


def test_support_on_cpu() -> None:
    for name in ("tensorwise", "delayed", "rowwise"):
        assert all(BACKEND.supports(op, recipe(name), CPU, None) is None for op in ("fwd", "dgrad", "wgrad"))
    assert BACKEND.supports("fwd", recipe("blockwise"), CPU, None) == (
        "torch has no blocks of 1x128 by 128x128 on the CPU"
    )
    assert "1x128 by 1x128" in BACKEND.supports("wgrad", recipe("blockwise_1d"), CPU, None)
    assert "e8m0" in BACKEND.supports("dgrad", recipe("mxfp8"), CPU, None)
    assert "only for two matrices in E4M3" in BACKEND.supports("dgrad", recipe("blockwise", "hybrid"), CPU, None)
    assert "it has no casts" in BACKEND.supports("quantize", CastSpec(), CPU, None)
    assert BACKEND.supports("grouped_fwd", recipe("rowwise"), CPU, None) == "it has no grouped_fwd"
    assert "high precision" in BACKEND.supports("wgrad", recipe("rowwise", wgrad="bf16"), CPU, None)
    assert (
        "slower than the reference" in BACKEND.why_not_auto(CPU) and BACKEND.why_not_auto(torch.device("cuda")) is None
    )
    assert "not on meta" in BACKEND.supports("fwd", recipe("rowwise"), torch.device("meta"), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a GPU that is not there")
def test_no_gpu_is_reported() -> None:
    why_not = BACKEND.supports("fwd", recipe("tensorwise"), torch.device("cuda"), None)
    assert why_not == "it depends on the GPU, but this process sees no GPU"


ADA, HOPPER, B200, CONSUMER, AMPERE = (8, 9), (9, 0), (10, 0), (12, 0), (8, 0)


@pytest.mark.parametrize(
    "kind, capability, cuda, why_not",
    [
        *((kind, AMPERE, (13, 0), "compute capability 8.9 or later, this GPU has 8.0") for kind in tb._SCALINGS),
        *((("tensor"), gpu, (12, 6), None) for gpu in (ADA, HOPPER, B200, CONSUMER)),
        *(("row", gpu, (12, 8), None) for gpu in (ADA, B200)),
        ("row", CONSUMER, (13, 0), "cuBLAS rejects one scale per row above compute capability 10.x"),
        ("row", HOPPER, (12, 9), None),
        ("row", HOPPER, (12, 8), "one scale per row needs CUDA 12.9 or later on compute capability 9.0"),
        ("block", HOPPER, (13, 0), None),
        ("line", HOPPER, (12, 9), None),
        ("block", HOPPER, (12, 8), "need CUDA 12.9 or later, this torch is built with 12.8"),
        ("block", ADA, (13, 0), "only on compute capability 9.0, this GPU has 8.9"),
        ("line", B200, (13, 0), "only on compute capability 9.0, this GPU has 10.0"),
        ("mx", HOPPER, (13, 0), "need compute capability 10.0 or later, this GPU has 9.0"),
        ("mx", B200, (12, 6), "need CUDA 12.8 or later, this torch is built with 12.6"),
        ("mx", B200, (12, 8), None),
    ],
)
def test_support_on_gpus(kind: str, capability: tuple[int, int], cuda: tuple[int, int], why_not: str | None) -> None:
    results = tb.why_not_on_gpu(kind, capability, cuda)
    assert results is None if why_not is None else why_not in (results or "")


def test_scaling_kind() -> None:
    for name, kinds in {
        "tensorwise": ("tensor",) * 3,
        "rowwise": ("row",) * 3,
        "blockwise": ("block",) * 3,
        "blockwise_1d": ("block", "block", "line"),
        "mxfp8": ("mx",) * 3,
    }.items():
        gemms = [recipe(name).gemm(op) for op in CONTRACTED]
        assert tuple(tb.scaling_kind(op, g.a, g.b) for op, g in zip(CONTRACTED, gemms, strict=True)) == kinds
    line, square, tensor = CastSpec(), CastSpec("e4m3", (128, 128)), CastSpec("e5m2", (-1, -1), "fp32")
    assert tb.scaling_kind("fwd", square, line) is None and tb.scaling_kind("fwd", tensor, tensor) is None
    assert tb.scaling_kind("fwd", CastSpec("e4m3", (1, 32)), CastSpec("e4m3", (1, 32))) is None  # mx is e8m0
    assert tb.scaling_kind("fwd", CastSpec("e4m3", (1, 128), "e8m0"), square) is None


@pytest.mark.parametrize("rows, blocks", ((1, 1), (128, 4), (130, 5), (300, 37)))
def test_mx_scales_are_swizzled_as_documented(rows: int, blocks: int) -> None:
    """Each byte by the formula of cuBLAS's documentation; the rest zero."""
    generator = torch.Generator().manual_seed(rows)
    scale = torch.randint(1, 255, (rows, blocks), generator=generator, dtype=torch.uint8)
    flat = tb.swizzle_scales(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    tiles_across = -(-blocks // 4)
    expected = torch.zeros(-(-rows // 128) * tiles_across * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * tiles_across + block // 4
            inside = row % 128
            expected[tile * 512 + (inside % 32) * 16 + (inside // 32) * 4 + block % 4] = scale[row, block]
    assert torch.equal(flat, expected)
