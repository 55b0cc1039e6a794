"""Triton's GEMMs in its interpreter: each element against float64 on the same codes.

Magnitudes vary by powers of two along the rows and columns of both operands, and the tolerance of an element is the
error of fp32 sums of |a| |b|, so that any misplaced scale of a row, column or block is detected.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.fp8.arithmetic import cast
from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.registry import get
from octavo.fp8.kernels.triton_kernels import tiles
from octavo.fp8.kernels.triton_kernels.gemm import gemm
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED, launches
from octavo.fp8.kernels.triton_kernels.tiles import Gpu, Tile
from tests.fp8 import oracle
from tests.fp8.kernels.forms.gemm import variants

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu holds the compiled kernels to the same")

ROOT = Path(__file__).parents[3]
DIMS = {"fwd": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}  # the contracted dimension of each operand
TITLES = ("tensorwise", "rowwise", "blockwise", "blockwise hybrid", "mxfp8")
POINTERS, DESCRIPTORS = Gpu(0, 1), Gpu(90, 132)
SIZES = (
    (48, 3420 % 128, POINTERS),
    (80, 4304 % 256, DESCRIPTORS),
    (144, 1176 % 512, POINTERS),
    (276, 130, DESCRIPTORS),
)
SMALL = Tile(64, 64, 128, 4, 3)
SHARED = {89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes a program may have


def spread(rows: int, cols: int, seed: int, reach: int = 6) -> Tensor:
    """Random values whose rows and columns have magnitudes of their own, powers of two."""
    g = torch.Generator().manual_seed(seed)
    down = torch.randint(-reach, reach + 1, (rows, 1), generator=g)
    across = torch.randint(-reach, reach + 1, (1, cols), generator=g)
    return torch.randn(rows, cols, generator=g) * torch.exp2((down + across).float())


def sides(which: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of both operands, for M tokens, N outputs, K inputs."""
    return {"fwd": ((m, k), (n, k)), "dgrad": ((m, n), (n, k)), "wgrad": ((m, n), (m, k))}[which]


def operands(title: str, which: str, m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    casts = recipe(*title.split()).gemm(which)
    assert casts is not None
    a, b = sides(which, m, n, k)
    return cast.quantize(spread(*a, seed=1), casts.a), cast.quantize(spread(*b, seed=2), casts.b)


def in_float64(q: Quantized) -> np.ndarray:
    scale = q.scale.float().double().numpy()
    return oracle.dequantize(q.data.view(torch.uint8).numpy(), scale, q.spec.format, q.spec.block)


def check(got: Tensor, a_q: Quantized, a_dim: int, b_q: Quantized, b_dim: int) -> None:
    """Element by element: within the rounding of fp32 sums of the magnitudes; and 1e-5 over all (NUMERICS, GEMM)."""
    a, b = in_float64(a_q), in_float64(b_q)
    a, b = (a if a_dim == 1 else a.T), (b.T if b_dim == 1 else b)
    want, most = a @ b, np.abs(a) @ np.abs(b)
    results = got.double().numpy()
    assert results.shape == want.shape
    off = np.abs(results - want) - (a.shape[1] + 8) * 2.0**-24 * most
    worst = np.unravel_index(np.argmax(off), off.shape)
    assert off[worst] <= 0, f"at {worst}: {results[worst]} instead of {want[worst]}"
    if np.any(want):
        assert 1 - 2 * np.sum(results * want) / (np.sum(results**2) + np.sum(want**2)) < 1e-5


def fits(tile: Tile, title: str) -> Tile:
    return tile._replace(k=32) if title == "mxfp8" else tile


# "hybrid" is of gradients alone. Each recipe and each GEMM in both forms, by turns.
FORMS = [
    pytest.param(title, which, gpu, id=f"{title}-{which}-{'pointers' if gpu is POINTERS else 'descriptors'}")
    for i, title in enumerate(TITLES)
    for j, which in enumerate(DIMS)
    for gpu in ((POINTERS, DESCRIPTORS) if title == "blockwise" else ((POINTERS, DESCRIPTORS)[(i + j) % 2],))
    if (title, which) != ("blockwise hybrid", "fwd")
] + [pytest.param("blockwise_1d", "wgrad", gpu, id=f"blockwise_1d-wgrad-sm{gpu.sm}") for gpu in (POINTERS, DESCRIPTORS)]


@pytest.mark.parametrize(("title", "which", "gpu"), FORMS)
def test_every_recipe_and_gemm(title: str, which: str, gpu: Gpu) -> None:
    """Sizes that are no multiple of anything, more than one block of every side, more than one tile each way."""
    a, b = operands(title, which, 131, 135, 137 if gpu is POINTERS and title != "mxfp8" else 92)
    with launches() as recorded:
        got = gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32, gpu=gpu, tile=fits(SMALL, title))
    assert recorded["gemm_kernel"] == 1
    check(got, a, DIMS[which][0], b, DIMS[which][1])


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 48, 80), (17, 80, 144), (127, 1, 92), (128, 144, 48), (129, 92, 1)], ids=str
)
@pytest.mark.parametrize("title", ["rowwise", "blockwise", "mxfp8"])
def test_odd_sizes(title: str, m: int, n: int, k: int) -> None:
    for which in ("fwd", "wgrad") if m > 100 else DIMS:
        a, b = operands(title, which, m, n, k)
        check(gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32), a, DIMS[which][0], b, DIMS[which][1])


@pytest.mark.long
@pytest.mark.parametrize(("m", "others"), zip([1, 17, 127, 128, 129, 300], [SIZES[:2], SIZES[2:]] * 3, strict=True))
@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", TITLES)
def test_many_sizes(title: str, which: str, m: int, others: tuple[tuple[int, int, Gpu], ...]) -> None:
    """Both forms with every number of tokens, every other size with three of them."""
    for n, k, gpu in others:
        a, b = operands(title, which, m, n, k)
        got = gemm(a, DIMS[which][0], b, DIMS[which][1], torch.float32, gpu=gpu)
        check(got, a, DIMS[which][0], b, DIMS[which][1])


@pytest.mark.parametrize("title", TITLES)
def test_backend_matches_reference(title: str) -> None:
    """By the backend's three methods, whatever its casts write, with a bias, rounded once."""
    triton, reference = get("triton"), get("reference")
    for which in DIMS:
        casts = recipe(*title.split()).gemm(which)
        assert casts is not None
        xs = [spread(*shape, seed=i) for i, shape in enumerate(sides(which, 40, 24, 72))]
        bias = {"bias": torch.randn(24)} if which == "fwd" else {}
        actual = [triton.quantize(x, s, dim) for x, s, dim in zip(xs, (casts.a, casts.b), DIMS[which], strict=True)]
        original = [reference.quantize(x, s) for x, s in zip(xs, (casts.a, casts.b), strict=True)]
        got = getattr(triton, f"gemm_{which}")(*actual, torch.float32, **bias)
        want = getattr(reference, f"gemm_{which}")(*original, torch.float32, **bias)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (CastSpec("e4m3", (1, 128), "pow2"), CastSpec("e4m3", (-1, -1), "fp32")),
        (CastSpec("e5m2", (1, -1), "fp32"), CastSpec("e4m3", (128, 128), "pow2")),
        (CastSpec("e5m2", (1, 128), "fp32"), CastSpec("e5m2", (128, 128), "e8m0")),
        (CastSpec("e4m3", (1, 32), "e8m0"), CastSpec("e4m3", (1, 128), "pow2")),
        (CastSpec("e4m3", (1, 32), "fp32"), CastSpec("e5m2", (1, -1), "e8m0")),
        (CastSpec("e4m3", (128, 128), "e8m0"), CastSpec("e4m3", (1, 128), "e8m0")),
        (CastSpec("e4m3", (-1, -1), "pow2"), CastSpec("e5m2", (128, 128), "fp32")),
    ],
    ids=str,
)
def test_any_mix_of_scales_and_formats(a: CastSpec, b: CastSpec) -> None:
    a_q, b_q = cast.quantize(spread(70, 150, 1), a), cast.quantize(spread(131, 150, 2), b)
    check(gemm(a_q, 1, b_q, 1, torch.float32), a_q, 1, b_q, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("title", TITLES)
def test_bad_values_affect_only_dependent_results(title: str, bad: float) -> None:
    casts = recipe(*title.split()).fwd
    assert casts is not None
    x, w = torch.randn(20, 200), torch.randn(24, 200)
    x[3, 150] = bad
    x_q, w_q = cast.quantize(x, casts.a), cast.quantize(w, casts.b)
    for gpu in (POINTERS, DESCRIPTORS):
        got = gemm(x_q, 1, w_q, 1, torch.float32, gpu=gpu, tile=fits(SMALL, title))
        touched = torch.ones(20, 1) if title == "tensorwise" else (torch.arange(20) == 3).float()[:, None]
        assert torch.equal(got.isnan(), (touched > 0).expand(20, 24))


@pytest.mark.parametrize("kind", ["fp32", "e8m0"])
@pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128), (1, 32)], ids=str)
def test_bad_scale_makes_result_nan(block: tuple[int, int], kind: str) -> None:
    """Valid codes with a NaN scale."""
    x_q, w_q = (cast.quantize(torch.ones(rows, 140), CastSpec("e4m3", block, kind)) for rows in (130, 9))
    scale = x_q.scale.view(torch.uint8) if kind == "e8m0" else x_q.scale
    scale[1, -1] = 0xFF if kind == "e8m0" else math.nan
    got = gemm(x_q, 1, w_q, 1, torch.float32).isnan()
    first = 1 if block[0] == 1 else 128
    touched = torch.arange(130) // first == 1
    assert torch.equal(got, touched[:, None].expand(130, 9))


def test_small_gradients_survive() -> None:
    """1e-7 and below: scales of 2^-30 and their product are in no danger."""
    casts = recipe("blockwise").wgrad
    assert casts is not None
    dy, x = cast.quantize(spread(40, 24, 1) * 1e-9, casts.a), cast.quantize(spread(40, 32, 2) * 1e-7, casts.b)
    got = gemm(dy, 0, x, 0, torch.float32)
    assert (got != 0).all()
    check(got, dy, 0, x, 0)


FAR = {"large by small": (1e36, 1e-30), "small by large": (1e-30, 1e36), "both small": (1e-17, 1e-17)}


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize(
    ("title", "gemms"),
    [("tensorwise", "fwd dgrad"), ("rowwise", "fwd wgrad"), ("blockwise", "fwd"), ("blockwise hybrid", "dgrad")],
)
def test_finite_result_does_not_overflow(title: str, gemms: str, far: str) -> None:
    """A sum with one scale overflows fp32, the product with both does not; the reference behaves equally."""
    for which in gemms.split():
        casts = recipe(*title.split()).gemm(which)
        assert casts is not None
        a, b = sides(which, 16, 20, 140)
        a_q = cast.quantize(spread(*a, seed=1, reach=1).abs() * FAR[far][0], casts.a)
        b_q = cast.quantize(spread(*b, seed=2, reach=1).abs() * FAR[far][1], casts.b)
        check(gemm(a_q, DIMS[which][0], b_q, DIMS[which][1], torch.float32), a_q, DIMS[which][0], b_q, DIMS[which][1])
        original = getattr(get("reference"), f"gemm_{which}")(a_q, b_q, torch.float32)
        check(original, a_q, DIMS[which][0], b_q, DIMS[which][1])


@pytest.mark.parametrize(("title", "which"), [("tensorwise", "fwd"), ("rowwise", "dgrad"), ("blockwise", "fwd")])
def test_zeros_and_infinities_of_large_scales(title: str, which: str) -> None:
    """Both scales far out: sums that are zero stay zero, those beyond fp32 are infinite, none is NaN."""
    casts = recipe(title).gemm(which)
    assert casts is not None
    x, w = torch.zeros(16, 32), torch.zeros(32, 32)
    x[:, 0] = w[1, 1] = 1e34
    w[0, 0] = 3e38
    q = [cast.quantize(t, s) for t, s in zip((x, w), (casts.a, casts.b), strict=True)]
    for backend in ("triton", "reference"):
        got = getattr(get(backend), f"gemm_{which}")(*q, torch.float32)
        assert bool((got[:, 0] == math.inf).all()) and not got[:, 1:].any(), backend


def test_scales_are_applied_in_order() -> None:
    """fp32 scales round: first a's, then b's, bit for bit. Sums of small whole numbers are exact in any order."""
    g = torch.Generator().manual_seed(0)
    for block in ((-1, -1), (1, -1)):
        spec = CastSpec("e4m3", block, "fp32")
        a_q, b_q = (cast.quantize(torch.randn(n, 24, generator=g), spec) for n in (16, 20))
        codes = [torch.randint(-8, 9, q.data.shape, generator=g).float() for q in (a_q, b_q)]
        a_q, b_q = (q._replace(data=c.to(q.data.dtype)) for q, c in zip((a_q, b_q), codes, strict=True))
        want = codes[0] @ codes[1].T * a_q.scale.view(-1, 1) * b_q.scale.view(1, -1)
        assert torch.equal(gemm(a_q, 1, b_q, 1, torch.float32), want)
        assert torch.equal(get("reference").gemm_fwd(a_q, b_q, torch.float32), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
def test_rounds_once_after_the_bias(dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    """Two tiles of columns, each with the bias of its own."""
    a, b = (cast.quantize(torch.randn(n, 70), CastSpec("e4m3", (1, -1), "pow2")) for n in (20, SMALL.n + 33))
    bias = torch.randn(SMALL.n + 33, 2).to(bias_dtype)[:, 0]  # a column, as a fused one may hold it
    plain = gemm(a, 1, b, 1, torch.float32, tile=SMALL)
    assert torch.equal(gemm(a, 1, b, 1, dtype, bias, tile=SMALL), (plain + bias.float()).to(dtype))


def test_empty_sides() -> None:
    spec = CastSpec()
    a, b = cast.quantize(torch.randn(0, 40), spec), cast.quantize(torch.randn(24, 40), spec)
    for gpu in (POINTERS, DESCRIPTORS):
        assert gemm(a, 1, b, 1, torch.bfloat16, gpu=gpu).shape == (0, 24)
        bias = torch.randn(24)
        for other in (spec, CastSpec("e4m3", (-1, -1), "fp32"), CastSpec("e4m3", (1, 32), "e8m0")):
            none = [cast.quantize(torch.randn(n, 0), other) for n in (5, 24)]
            assert torch.equal(gemm(none[0], 1, none[1], 1, torch.float32, gpu=gpu), torch.zeros(5, 24))
            assert torch.equal(gemm(none[0], 1, none[1], 1, torch.float32, bias, gpu=gpu), bias.expand(5, 24))


def test_codes_in_layout_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backend's own casts write is multiplied without a copy of codes or scales."""
    triton = get("triton")
    taken: list[Tensor] = []
    monkeypatch.setattr(tiles, "source", lambda codes, *_: taken.append(codes) or codes.view(torch.uint8))
    casts = recipe("blockwise").dgrad
    assert casts is not None
    dy, w = triton.quantize(torch.randn(30, 150), casts.a, 1), triton.quantize(torch.randn(150, 50), casts.b, 0)
    triton.gemm_dgrad(dy, w, torch.bfloat16)
    assert [t.data_ptr() for t in taken] == [dy.data.data_ptr(), w.data.data_ptr()]
    assert layout.is_k_major(dy, 1) and layout.is_k_major(w, 0)


def test_errors_describe_request() -> None:
    a, b = (cast.quantize(torch.randn(8, n), CastSpec()) for n in (32, 48))
    with pytest.raises(CastError, match=r"\[8, 32\] and \[8, 48\].*agree in dimension 1 of the first and 1"):
        gemm(a, 1, b, 1, torch.float32)
    with pytest.raises(CastError, match=r"contracted along dimension 0 has blocks of \(1, 128\).*backend='reference'"):
        gemm(a, 0, b, 0, torch.float32)


@pytest.mark.parametrize("sm", [89, 90, 100, 120])
def test_tiles_fit_gpu(sm: int) -> None:
    """Operands in flight fit into shared memory, sums into registers, one scale of 128 rows or columns into a tile."""
    for variant in variants():
        if variant.architectures != (sm,):
            continue
        form, tile = variant.constants["FORM"], variant.constants["TILE"]
        assert (tile.m + tile.n) * tile.k * variant.num_stages <= SHARED[sm] - 1024
        held_twice = not form.scaled and (form.promote or form.a.side or form.b.side)
        sums = tile.m * tile.n * (2 if held_twice else 1) // (32 * variant.num_warps)
        assert sums <= 128
        assert form.b.free != 128 or tile.n <= 128
        assert form.tma == (sm >= 90)
        assert form.scaled == (sm >= 100 and "mxfp8" in variant.name)


def test_small_products_use_small_tiles() -> None:
    e4m3 = CastSpec("e4m3", (-1, -1), "fp32")
    full, block = tiles.scale_block(e4m3, 1), tiles.scale_block(CastSpec(), 1)
    hopper = Gpu(90, 132)
    fast = tiles.form(full, full, fast=True, gpu=hopper)
    slow = tiles.form(full, full, fast=False, gpu=hopper)
    assert (fast.promote, slow.promote, tiles.form(full, full, False, Gpu(100, 148)).promote) == (False, True, False)
    assert tiles.form(block, block, False, hopper) == tiles.form(block, block, True, hopper)
    assert tiles.choose(8192, 8192, fast, hopper)[:2] == (256, 128)
    assert tiles.choose(8192, 8192, fast, hopper, tallest=128)[:2] == (128, 128), "a tile of rows has one expert"
    assert tiles.choose(8192, 8192, slow, hopper)[:2] == (128, 128)
    assert tiles.choose(64, 1152, slow, hopper)[:2] == (64, 64)
    assert tiles.choose(512, 1152, slow, hopper)[:2] == (64, 128)


COUNT = """
import json, re
from tests.fp8.kernels import aot
from tests.fp8.kernels.forms import gemm
found = {}
for variant in gemm.variants():
    arch, which = variant.architectures[0], variant.name.split()[2]
    if variant.name.startswith("gemm tensorwise fwd") or variant.name.startswith("gemm tensorwise dgrad"):
        text = aot._compile(variant, arch).asm["ptx"]
        found[f"{arch} {which}"] = [len(re.findall(p, text)) for p in (r"\\badd\\.(rn\\.)?f32", r"mma")]
print(json.dumps(found))
"""


@pytest.mark.long
def test_compiled_gradient_gemms_promote_accumulators() -> None:
    """Where tensor cores sum coarsely, each step's product of dgrad goes through one fp32 addition a value (64 a
    thread); forward GEMMs have none, and neither has SM100, whose sums are fp32."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environ, cwd=ROOT, capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout)
    assert {key: adds for key, (adds, _) in results.items()} == {
        f"{arch} {which}": 64 if which == "dgrad" and arch != 100 else 0
        for arch in (89, 90, 100, 120)
        for which in ("fwd", "dgrad")
    }
    assert all(products for _, products in results.values())


def test_form_names_are_unique() -> None:
    results = [(v.name, v.architectures) for v in variants()]
    assert len(results) == len(set(results))
