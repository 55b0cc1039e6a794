"""Triton's grouped GEMMs in its interpreter, against float64 on the same codes, for each expert."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.fp8.arithmetic.cast import CastError, CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import recipe
from octavo.fp8.kernels import reference_grouped
from octavo.fp8.kernels.groups import TILE, Groups, expert_spans, group_rows, select_expert
from octavo.fp8.kernels.registry import get
from octavo.fp8.kernels.triton_kernels import grouped
from octavo.fp8.kernels.triton_kernels.gemm import gemm
from octavo.fp8.kernels.triton_kernels.launch import INTERPRETED, launches
from octavo.fp8.kernels.triton_kernels.tiles import Gpu
from tests.fp8.kernels.test_triton_gemm import DESCRIPTORS, DIMS, POINTERS, TITLES, check, spread

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu holds the compiled kernels to the same")

N, K = 48, 136


def routed(*sizes: int, strangers: int = 3) -> Groups:
    """Return groups of experts with these numbers of rows, in shuffled pairs, some without an expert."""
    chosen = torch.cat([torch.full((n,), e) for e, n in enumerate(sizes)] + [torch.full((strangers,), len(sizes))])
    shuffled = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))]
    return group_rows(shuffled, len(sizes)).groups


UNEVEN = routed(130, 0, 5, strangers=130)  # tiles of expert 0, 0, 2, and of none
FEW = routed(3, 0, 9)
FORMS = {"fwd": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def operands(title: str, which: str, groups: Groups, n: int = N, k: int = K) -> tuple[Quantized, Quantized]:
    casts = recipe(*title.split()).gemm(which)
    assert casts is not None
    created = []
    for seed, (name, spec) in enumerate(zip(FORMS[which], (casts.a, casts.b), strict=True)):
        if name == "w":
            w = torch.stack([spread(n, k, 10 + e) for e in range(groups.experts)])
            created.append(reference_grouped.quantize_experts(w, spec))
        else:
            rows = spread(groups.rows, n if name == "dy" else k, seed)
            created.append(reference_grouped.quantize_rows(rows, spec, groups))
    return created[0], created[1]


def run(
    which: str, a: Quantized, b: Quantized, groups: Groups, gpu: Gpu | None = None, bias: Tensor | None = None
) -> Tensor:
    if which == "fwd":
        return grouped.fwd(a, b, groups, torch.float32, bias, gpu=gpu)
    return getattr(grouped, which)(a, b, groups, torch.float32, gpu=gpu)


def expert(w_q: Quantized, index: int) -> Quantized:
    return Quantized(w_q.data[index], w_q.scale[index], w_q.spec)


@pytest.mark.parametrize(("title", "which"), [*itertools.product(TITLES, DIMS), ("blockwise_1d", "wgrad")])
def test_every_recipe_and_gemm(title: str, which: str) -> None:
    """Each expert's result comes from its own rows; experts without rows get zeros; padding is finite."""
    groups = UNEVEN
    a, b = operands(title, which, groups)
    gpu = POINTERS if title in ("rowwise", "blockwise") else DESCRIPTORS
    name = "grouped_wgrad_kernel" if which == "wgrad" else "grouped_rows_kernel"
    with launches() as recorded:
        got = run(which, a, b, groups, gpu)
    assert recorded[name] == 1
    assert got.isfinite().all()
    for e, span in expert_spans(groups):
        original = select_expert(a, e, span)
        if which == "wgrad":
            check(got[e], original, 0, select_expert(b, e, span), 0)
        else:
            check(got[span], original, 1, expert(b, e), DIMS[which][1])
    if which == "wgrad":
        assert torch.equal(got[1], torch.zeros_like(got[1]))
    else:
        assert not got[groups.tiles.repeat_interleave(TILE) < 0].any()


@pytest.mark.long
@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", TITLES)
def test_matches_one_product_per_expert(title: str, which: str) -> None:
    """What ``gemm`` makes of the expert's own rows, up to the order of sums; both forms, by turns."""
    turn = TITLES.index(title) + list(DIMS).index(which)
    for i, sizes in enumerate(((1,), (0, 17), (129, 127, 0, 1), (0, 0), (300, 3))):
        gpu = (POINTERS, DESCRIPTORS)[(i + turn) % 2]
        groups = routed(*sizes, strangers=0)
        a, b = operands(title, which, groups, 92, 80)
        got = run(which, a, b, groups, gpu)
        for e, span in expert_spans(groups):
            original, other = (
                select_expert(a, e, span),
                (select_expert(b, e, span) if which == "wgrad" else expert(b, e)),
            )
            want = gemm(original, DIMS[which][0], other, DIMS[which][1], torch.float32, gpu=gpu)
            torch.testing.assert_close(got[e] if which == "wgrad" else got[span], want, rtol=1e-6, atol=1e-5)


def test_bias_of_each_expert() -> None:
    x, w = operands("blockwise", "fwd", FEW)
    bias = torch.randn(N, FEW.experts).t()
    plain, got = run("fwd", x, w, FEW), run("fwd", x, w, FEW, bias=bias)
    for e, span in expert_spans(FEW):
        assert torch.equal(got[span], plain[span] + bias[e])


@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("title", ["rowwise", "blockwise"])
def test_backend_matches_reference(title: str, which: str) -> None:
    """With the backend's own casts of rows and weights, in bf16, rounded once."""
    triton, reference = get("triton"), get("reference")
    casts, (name, other) = recipe(title).gemm(which), FORMS[which]
    assert casts is not None
    tensors = {"x": spread(FEW.rows, K, 1), "dy": spread(FEW.rows, N, 2), "w": torch.randn(FEW.experts, N, K)}
    got, want = (
        getattr(backend, f"grouped_{which}")(
            backend.quantize_rows(tensors[name], casts.a, FEW, DIMS[which][0]),
            backend.quantize_experts(tensors["w"], casts.b, DIMS[which][1])
            if other == "w"
            else backend.quantize_rows(tensors[other], casts.b, FEW, DIMS[which][1]),
            FEW,
            dtype,
        )
        for backend, dtype in ((triton, torch.bfloat16), (reference, torch.float32))
    )
    assert got.dtype is torch.bfloat16
    if which != "wgrad":
        real = torch.cat([torch.arange(span.start, span.stop) for _, span in expert_spans(FEW)])
        got, want = got[real], want[real]
    torch.testing.assert_close(got.float(), want, rtol=2.0**-7, atol=1e-4 * want.abs().max().item())


def test_bad_value_affects_only_its_expert() -> None:
    groups = FEW
    casts = recipe("tensorwise").fwd
    assert casts is not None
    x = torch.randn(groups.rows, K)
    x[int(groups.starts[2]) + 1, 7] = float("nan")
    w_q = reference_grouped.quantize_experts(torch.randn(groups.experts, N, K), casts.b)
    got = run("fwd", reference_grouped.quantize_rows(x, casts.a, groups), w_q, groups)
    for e, span in expert_spans(groups):
        assert bool(got[span].isnan().all()) == (e == 2) and bool(got[span].isnan().any()) == (e == 2)


def test_weights_may_have_any_strides() -> None:
    """Codes with strides of their own, sizes that are no multiple of 16, one scale a row of weights."""
    groups = routed(3, 14)
    for spec in (CastSpec("e4m3", (128, 128), "pow2"), CastSpec("e4m3", (1, 128), "fp32"), CastSpec("e4m3", (1, -1))):
        w = torch.stack([spread(20, 150, e) for e in range(2)])
        plain = reference_grouped.quantize_experts(w, spec)
        codes = plain.data.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(plain.data.dtype)
        scale = plain.scale.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        x = reference_grouped.quantize_rows(spread(groups.rows, 150, 5), CastSpec(), groups)
        want = run("fwd", x, plain, groups)
        assert torch.equal(run("fwd", x, Quantized(codes, scale, spec), groups, DESCRIPTORS), want)
        for e, span in expert_spans(groups):
            check(want[span], select_expert(x, e, span), 1, expert(plain, e), 1)


def test_empty_inputs() -> None:
    groups = routed(0, 0, strangers=0)
    for title, gpu in (("blockwise", POINTERS), ("tensorwise", DESCRIPTORS)):
        for which in DIMS:
            assert not run(which, *operands(title, which, groups), groups, gpu).any()
    groups, spec = routed(3), CastSpec()
    x = reference_grouped.quantize_rows(torch.randn(groups.rows, 0), spec, groups)
    w = Quantized(torch.zeros(1, 8, 0, dtype=spec.fmt.dtype), torch.ones(1, 8, 0), spec)
    bias = torch.randn(1, 8)
    assert torch.equal(run("fwd", x, w, groups, DESCRIPTORS, bias=bias)[:3], bias.expand(3, 8))


def test_errors_describe_request() -> None:
    x, w = operands("blockwise", "fwd", UNEVEN)
    with pytest.raises(CastError, match=r"grouped_dgrad: rows \[640, 136\] and weights \[3, 48, 136\].*\[R, N\]"):
        grouped.dgrad(x, w, UNEVEN, torch.float32)
    with pytest.raises(CastError, match="groups of 384 rows and 2 experts"):
        grouped.fwd(x, w, routed(3, 140), torch.float32)
    with pytest.raises(CastError, match="grouped_wgrad: .* do not agree in their rows"):
        grouped.wgrad(x, w, UNEVEN, torch.float32)
