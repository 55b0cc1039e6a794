"""The compiled fused layers on a GPU, with the checks of the interpreter at sizes of real models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels import layout, reference
from octavo.fp8.kernels.triton_kernels import fused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PAIRS = {
    "blockwise": (CastSpec(block=(1, 128)), CastSpec(block=(128, 1))),
    "row": (CastSpec(block=(1, 128)), None),
    "mxfp8": (CastSpec(block=(1, 32), scale="e8m0"), CastSpec(block=(32, 1), scale="e8m0")),
    "hybrid": (CastSpec("e5m2", (1, 128), "fp32"), CastSpec("e5m2", (128, 1), "fp32")),
    "rowwise": (CastSpec(block=(1, -1)), CastSpec(block=(-1, 1))),
}
SIZES = [(1, 48), (300, 3420), (129, 1176), (2048, 4096), (7, 16384)]


def numbers(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    make = torch.Generator(device="cuda").manual_seed(seed)
    spread = torch.randint(-4, 5, (rows, 1), generator=make, device="cuda").float()
    x = (torch.randn(rows, cols, generator=make, device="cuda") * torch.exp2(spread)).clamp(-80, 80)
    if rows > 10:
        x[3] = 0.0
        x[4] *= 1e-7
        x[5, 40] = float("nan")
        x[6, 7] = float("inf")
    return x.to(dtype)


def assert_near(a: torch.Tensor, b: torch.Tensor, most: int) -> None:
    """Equal to within ``most`` units in the last place, element by element; NaN where the other has NaN."""
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    places = [t.contiguous().view(kind).long() for t in (a, b)]
    places = [torch.where(p < 0, torch.iinfo(kind).min - p, p) for p in places]
    assert torch.equal(a.isnan(), b.isnan())
    worst = int((places[0] - places[1]).abs().masked_fill(a.isnan(), 0).max())
    assert worst <= most, f"{worst} units in the last place"


def assert_cast(q: Quantized | None, y: torch.Tensor, spec: CastSpec | None, contract: int) -> None:
    if spec is None:
        assert q is None
        return
    assert q is not None
    expected = cast.quantize(y, spec)
    results, requested = layout.k_major(q, contract), layout.k_major(expected, contract)
    assert torch.equal(results.codes.view(torch.uint8), requested.codes.view(torch.uint8))
    assert torch.equal(q.scale.float().nan_to_num(7e37), expected.scale.float().nan_to_num(7e37))
    assert results.codes.untyped_storage().data_ptr() == q.data.untyped_storage().data_ptr(), "codes were copied"


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_16_bits(size: tuple[int, int], pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, col = PAIRS[pair]
    dh, gate, up = (numbers(*size, torch.bfloat16, s) for s in range(3))
    weight = torch.randn(size[1], device="cuda").bfloat16()
    y, rstd, row_q, col_q = fused.rmsnorm_quantize(gate, weight, 1e-6, row, col)
    exact = reference.rmsnorm_quantize(gate, weight, 1e-6, None, None)
    assert_near(y, exact[0], 1)
    assert_near(rstd, exact[1], 2)
    assert_cast(row_q, y, row, 1)
    assert_cast(col_q, y, col, 0)
    h, row_q, col_q = fused.swiglu_quantize(gate, up, row, col)
    assert_near(h, reference.swiglu_quantize(gate, up, None, None)[0], 1)
    assert_cast(row_q, h, row, 1)
    assert_cast(col_q, h, col, 0)

    original, recorded = fused._plain, []
    monkeypatch.setattr(
        fused, "_plain", lambda like, emit, *o: recorded.append(original(like, True, *o)) or recorded[-1]
    )
    results = fused.swiglu_backward_quantize(dh, gate, up, row, col)
    d, g, u = dh.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    expected = ((d * u * (s + g * s * (1 - s))).bfloat16(), (d * g * s).bfloat16())
    for values, exact_values, q in zip(recorded, expected, (results[:2], results[2:]), strict=True):
        assert_near(values, exact_values, 1)
        assert_cast(q[0], values, row, 1)
        assert_cast(q[1], values, col, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    row, col = PAIRS["blockwise"]
    x, w = numbers(300, 3420, dtype), torch.randn(3420, device="cuda")
    y, _, row_q, col_q = fused.rmsnorm_quantize(x, w, 1e-6, row, col)
    assert_near(y, reference.rmsnorm_quantize(x, w, 1e-6, None, None)[0], 1 if dtype is torch.float16 else 8)
    assert_cast(row_q, y, row, 1)
    assert_cast(col_q, y, col, 0)
    h, row_q, col_q = fused.swiglu_quantize(x, x, row, col)
    exact = reference.swiglu_quantize(x, x, None, None)[0].nan_to_num(0, 0, 0).double()
    # exp by its approximate instruction: the error of the product x * log2(e) grows with x
    assert (
        (h.nan_to_num(0, 0, 0).double() - exact).abs()
        <= (2**-10 if dtype is torch.float16 else 2e-5) * exact.abs() + 2.0**-24
    ).all()
    assert_cast(row_q, h, row, 1)
    assert_cast(col_q, h, col, 0)


def test_no_synchronization_and_graph_replay() -> None:
    row, col = PAIRS["blockwise"]
    gate, up = numbers(256, 1024, torch.bfloat16), numbers(256, 1024, torch.bfloat16, 1)

    def work() -> list[torch.Tensor]:
        a = fused.rmsnorm_quantize(gate, gate[0], 1e-6, row, col)
        b = fused.swiglu_quantize(gate, up, row, col)
        c = fused.swiglu_backward_quantize(gate, gate, up, row, col)
        return [q.data.view(torch.uint8) for q in (a[2], a[3], b[1], b[2], *c)]

    expected = [t.clone() for t in work()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
