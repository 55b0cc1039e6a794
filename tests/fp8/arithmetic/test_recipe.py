"""Recipes: the table of docs/numerics.md, and all error messages."""

from __future__ import annotations

import pytest
import torch

from octavo import fp8
from octavo.fp8.arithmetic.cast import CastSpec, dequantize, quantize
from octavo.fp8.arithmetic.recipe import RECIPES, Delayed, Gemm, Recipe, RecipeError, recipe

# Plan files up to 0.5.0 have no casts: file_form._CASTS_OF_0_5_0 has those of the lines that have changed since.
TABLE = {
    "tensorwise": ("tensor tensor", "tensor tensor", "tensor tensor", "fp32", "hybrid"),
    "rowwise": ("row row", "row column", "column column", "pow2", "e4m3"),
    "blockwise": ("1x128 128x128", "1x128 128x128", "128x1 128x128", "pow2", "e4m3"),
    "blockwise_1d": ("1x128 128x128", "1x128 128x128", "128x1 128x1", "pow2", "e4m3"),
    "mxfp8": ("1x32 1x32", "1x32 32x1", "32x1 32x1", "e8m0", "e4m3"),
    "delayed": ("tensor tensor", "tensor tensor", "tensor tensor", "fp32", "hybrid"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_table(name: str) -> None:
    r = recipe(name)
    *blocks, scale, default = TABLE[name]
    assert r.name == name and r.format == default
    for gemm, expected in zip((r.fwd, r.dgrad, r.wgrad), blocks, strict=True):
        assert gemm is not None
        assert " ".join(str(spec).split()[1] for spec in (gemm.a, gemm.b)) == expected
        assert gemm.a.scale == gemm.b.scale == scale
    assert (r.delayed == Delayed(16)) if name == "delayed" else (r.delayed is None)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "blockwise_1d", "delayed"])
def test_hybrid_uses_e5m2_only_for_dy(name: str) -> None:
    r = recipe(name, format="hybrid")
    assert r.fwd and r.dgrad and r.wgrad
    assert [s.format for g in (r.fwd, r.dgrad, r.wgrad) for s in (g.a, g.b)] == ["e4m3"] * 2 + ["e5m2", "e4m3"] * 2
    plain = recipe(name, format="e4m3")
    assert all(s.format == "e4m3" for g in (plain.fwd, plain.dgrad, plain.wgrad) if g for s in (g.a, g.b))


@pytest.mark.parametrize("name", RECIPES)
def test_dy_is_never_scaled_in_two_dimensional_blocks(name: str) -> None:
    r = recipe(name)
    for gemm in (r.dgrad, r.wgrad):
        assert gemm is not None and (gemm.a.block == (-1, -1) or 1 in gemm.a.block)


def test_fwd_and_dgrad_share_weight_cast() -> None:
    for name in RECIPES:
        r = recipe(name)
        assert r.fwd and r.dgrad
        assert (r.fwd.b == r.dgrad.b) == (name not in ("rowwise", "mxfp8"))


def test_each_gemm_can_stay_in_high_precision() -> None:
    r = recipe("blockwise", wgrad="bf16")
    assert r.wgrad is None and r.fwd is not None and r.gemm("wgrad") is None and r.gemm("fwd") is r.fwd
    assert r.summary() == str(r) == "blockwise e4m3 wgrad=bf16"
    assert recipe("tensorwise", fwd="bf16", dgrad="bf16").summary() == "tensorwise hybrid fwd=bf16 dgrad=bf16"
    assert recipe("mxfp8").summary() == "mxfp8 e4m3"


def test_describe_shows_three_equations() -> None:
    assert recipe("blockwise", format="hybrid", wgrad="bf16").describe().splitlines() == [
        "blockwise (hybrid)",
        "  fwd    y  = x[e4m3 1x128 pow2] @ w.T[e4m3 128x128 pow2]",
        "  dgrad  dx = dy[e5m2 1x128 pow2] @ w[e4m3 128x128 pow2]",
        "  wgrad  dw = dy.T_bf16 @ x_bf16",
    ]
    assert recipe("delayed").describe().splitlines()[0] == "delayed (hybrid), amax history of 16"


def test_recipes_are_values() -> None:
    assert recipe("rowwise") == recipe("rowwise") != recipe("rowwise", dgrad="bf16")
    assert len({recipe(n) for n in RECIPES} | {recipe(n) for n in RECIPES}) == len(RECIPES)
    assert fp8.RECIPES is RECIPES
    spec = CastSpec()
    assert Gemm(spec, spec) == Gemm(spec, spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "blockwize"}, "'blockwize' does not exist. Did you mean 'blockwise'.*tensorwise, rowwise, blockwise"),
        ({"name": "zzz"}, "'zzz' does not exist. There are: tensorwise"),
        ({"name": "off"}, "'off' is the absence of a recipe: leave the layer out of the plan"),
        ({"name": "rowwise", "format": "e5m2"}, "format='e5m2' does not exist.*Use 'e4m3'.*or 'hybrid'"),
        ({"name": "mxfp8", "format": "hybrid"}, "'mxfp8' does not support format='hybrid'.*Use format='e4m3'"),
        (
            {"name": "rowwise", "wgrad": "fp16"},
            "wgrad='fp16' is not a precision; use 'fp8', 'bf16' or the recipe of its casts",
        ),
        (
            {"name": "rowwise", "fwd": "bf16", "dgrad": "bf16", "wgrad": "bf16"},
            "leaves nothing in FP8; keep one of them 'fp8', or leave the layer out",
        ),
    ],
)
def test_error_messages(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**arguments)


@pytest.mark.parametrize("length", [0, -1, 1.5, True])
def test_history_length_is_checked(length: object) -> None:
    with pytest.raises(RecipeError, match="must be an integer from 1 to 65,536"):
        Delayed(length)  # type: ignore[arg-type]


def test_gemm_uses_casts_of_another_recipe() -> None:
    r = recipe("tensorwise", fwd="blockwise", wgrad="bf16")
    assert (r.fwd, r.dgrad, r.wgrad) == (recipe("blockwise").fwd, recipe("tensorwise").dgrad, None)
    assert r.gemm_precisions() == {"fwd": "blockwise", "dgrad": "fp8", "wgrad": "bf16"}
    assert r.summary() == "tensorwise hybrid fwd=blockwise wgrad=bf16"
    assert recipe("tensorwise", fwd="tensorwise") == recipe("tensorwise")
    assert recipe("rowwise", format="hybrid", dgrad="rowwise") == recipe("rowwise", format="hybrid")
    for name in ("delayed", "off", "rowwize"):
        with pytest.raises(RecipeError, match="is not a precision"):
            recipe("tensorwise", fwd=name)
    with pytest.raises(RecipeError, match="all GEMMs of a layer share its histories"):
        recipe("delayed", wgrad="rowwise")


def test_dy_of_dgrad_has_no_blocks_of_several_tokens() -> None:
    """Not even in a recipe of the user's own: the gradients of a small token vanish, which the reference shows."""
    b, wide = recipe("blockwise"), CastSpec("e4m3", (128, 128))
    assert b.dgrad and b.wgrad
    with pytest.raises(RecipeError, match=r"dy of dgrad has blocks of 128x128.*loses all of them.*\(1, 128\)"):
        Recipe("mine", "e4m3", b.fwd, Gemm(wide, b.dgrad.b), b.wgrad)
    for block in ((128, 1), (128, -1), (-1, 128), (-1, 1)):
        with pytest.raises(RecipeError, match="loses all of them"):
            Recipe("mine", "e4m3", b.fwd, Gemm(CastSpec("e4m3", block), b.dgrad.b), b.wgrad)
    Recipe("mine", "e4m3", b.fwd, b.dgrad, Gemm(b.wgrad.a, wide))
    torch.manual_seed(0)
    dy = torch.randn(128, 128)
    dy[0] *= 2.0**-24
    errors = [float((dequantize(quantize(dy, spec)) - dy)[0].norm() / dy[0].norm()) for spec in (wide, b.dgrad.a)]
    assert errors[0] == 1 and errors[1] < 0.05


def _distribution(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy [512 tokens, 256], bf16: normal, or with outlier channels, outlier tokens or heavy tails, and then with
    gradients of tokens that differ by powers of two."""
    make = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(512, 256, generator=make) for _ in range(2))
    if kind != "normal":
        x[:, ::50] *= 60
        dy *= torch.exp2(4 * torch.randn(512, 1, generator=make))
    if kind == "outlier tokens":
        x[::200] *= 100
    if kind == "heavy tails":
        x *= torch.exp2(2 * torch.randn(512, 256, generator=make))
    return x.bfloat16(), dy.bfloat16()


@pytest.mark.parametrize("kind", ["normal", "outlier channels", "outlier tokens", "heavy tails"])
def test_tiles_of_x_cost_nothing_in_wgrad(kind: str) -> None:
    """Signal to quantization noise of dw, in dB: `blockwise_1d` as `blockwise`, docs/numerics.md."""
    x, dy = _distribution(kind)
    exact = dy.double().t() @ x.double()
    ratios = []
    for name in ("blockwise", "blockwise_1d"):
        gemm = recipe(name).wgrad
        assert gemm is not None
        a, b = (dequantize(quantize(operand, spec)).double() for operand, spec in ((dy, gemm.a), (x, gemm.b)))
        ratios.append(float(20 * torch.log10(exact.norm() / (a.t() @ b - exact).norm())))
    assert ratios[1] == pytest.approx(ratios[0], abs=0.02) and ratios[0] > 28, ratios
