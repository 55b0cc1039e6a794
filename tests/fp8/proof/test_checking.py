"""GEMMs of a step computed again: nothing is found where nothing is wrong, one bit is found wherever it flips, and all
GEMMs come round."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.fp8.observe import recorder
from octavo.fp8.proof import CheckedGemm, CorruptionChecker, check_size, checking, comparing, fp8_gemms, select_gemms

ALL = tuple(CheckedGemm("one", gemm) for gemm in ("fwd", "dgrad", "wgrad"))


class Faulty(ReferenceBackend):
    """The reference with a fault: ``cast`` gets the operands that were cast, ``product`` the values of a GEMM."""

    name = "faulty"
    cast: Callable[[Quantized], Any] = staticmethod(lambda q: None)
    product: Callable[[str, Tensor], Any] = staticmethod(lambda gemm, out: None)

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        q = super().quantize(x, spec)
        self.cast(q)
        return q

    def quantize_both(self, x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:  # type: ignore[override]
        return self.quantize(x, row), self.quantize(x, col)

    def gemm_fwd(self, *given: Any) -> Tensor:
        out = super().gemm_fwd(*given)
        self.product("fwd", out)
        return out

    def gemm_dgrad(self, *given: Any) -> Tensor:
        out = super().gemm_dgrad(*given)
        self.product("dgrad", out)
        return out

    def gemm_wgrad(self, *given: Any) -> Tensor:
        out = super().gemm_wgrad(*given)
        self.product("wgrad", out)
        return out


def flip(x: Tensor, at: tuple[int, int], bit: int) -> None:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    x.view(kind)[at] ^= 1 << bit


class Once:
    """Does something to the ``number``-th matrix of a shape that it is shown, once or every time."""

    def __init__(self, shape: tuple[int, int], work: Callable[[Tensor], Any], number: int = 1, ever: bool = False):
        self.shape, self.work, self.left, self.ever = shape, work, number, ever

    def __call__(self, x: Tensor) -> None:
        if tuple(x.shape) == self.shape:
            self.left -= 1
            if self.left == 0 or (self.ever and self.left < 0):
                self.work(x)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    backend = Faulty()
    monkeypatch.setitem(registry._backends, backend.name, backend)
    return backend


def trained(
    recipe: str, check: CorruptionChecker | None, backend: str = "auto", between: Any = None, x: Any = None
) -> list[Tensor]:
    """A forward and backward of a layer [200, 136] on 150 rows: y, dx, dw."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(136, 200)})
    fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, backend=backend)))
    x = (torch.randn(150, 136) * 3 if x is None else x).requires_grad_()
    if check is None:
        y = model["one"](x)
        y.pow(2).mean().backward()
    else:
        with check.attach():
            y = model["one"](x)
            if between is not None:
                between(y)
            y.pow(2).mean().backward()
    assert x.grad is not None and model["one"].weight.grad is not None
    return [y.detach(), x.grad, model["one"].weight.grad]


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_check_finds_nothing_and_changes_nothing(recipe: str) -> None:
    check = CorruptionChecker(ALL)
    with_check, without = trained(recipe, check), trained(recipe, None)
    assert all(torch.equal(a, b) for a, b in zip(with_check, without, strict=True))
    assert check.faults == [] and check.done.products == 3 and check.done.unsteady == 0
    sizes = 150 * 136, 200 * 136, 150 * 200
    assert check.done.codes == 2 * sum(sizes) and check.done.values == sum(sizes), "all of both operands, all products"
    assert recorder._checkers == []


def test_overflow_is_not_a_fault() -> None:
    x = torch.randn(150, 136)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    for recipe in ("blockwise", "tensorwise"):
        check = CorruptionChecker(ALL)
        trained(recipe, check, x=x.clone())
        assert check.faults == [] and check.done.products == 3


def test_unchecked_layers_have_no_overhead() -> None:
    check = CorruptionChecker([CheckedGemm("another", "fwd")])
    trained("blockwise", check)
    assert check.done.products == 0
    with check.attach():
        assert not recorder.begin("one", True, True, True).keeps_x
        assert not recorder.is_watching(), "blocks stay fused"
        with pytest.raises(RuntimeError, match="one checker"), CorruptionChecker(ALL).attach():
            pass


@pytest.mark.parametrize(
    ("recipe", "shape", "part", "at", "wanted"),
    [
        ("blockwise", (150, 136), "data", (149, 135), ("fwd", "a code of x", 1)),
        ("blockwise", (150, 136), "scale", (149, 1), ("fwd", "a scale of x", 1)),
        ("tensorwise", (150, 136), "scale", (0, 0), ("fwd", "a scale of x", 1)),
        ("rowwise", (200, 136), "data", (7, 3), ("fwd", "a code of w", 1)),
        ("mxfp8", (150, 200), "data", (20, 30), ("dgrad", "a code of dy", 1)),
        ("blockwise", (150, 200), "data", (130, 199), ("wgrad", "a code of dy", 2)),
    ],
)
def test_flipped_bit_of_cast_is_found(faulty: Faulty, recipe, shape, part, at, wanted) -> None:
    """In the operand of one GEMM: the cast of that GEMM names it, at its place."""
    gemm, what, number = wanted
    once = Once(shape, lambda x: None, number)

    def cast(q: Quantized) -> None:
        once.work = lambda _: flip(getattr(q, part), at, 0)
        once(q.data)

    faulty.cast = cast
    check = CorruptionChecker([CheckedGemm("one", gemm)])
    trained(recipe, check, backend="faulty")
    (fault,) = check.faults
    found = fault.difference
    assert (fault.site, fault.backend, found.what) == (("one", gemm), "faulty", what)
    assert found.bits == 1 and found.at == at and found.count == 1
    assert (
        str(found) == f"{what} is {found.found} at {list(at)} and {found.wanted} by the reference's cast, 1 bit apart"
    )
    assert found.found.startswith("0x") == (part == "data" or recipe == "mxfp8")


def test_changed_codes_are_found(faulty: Faulty) -> None:
    """Memory that loses a bit between forward and backward: what wgrad multiplies is no more what x casts to."""
    kept: list[Quantized] = []
    faulty.cast = lambda q: kept.append(q) if tuple(q.data.shape) == (150, 136) else None
    check = CorruptionChecker([CheckedGemm("one", "wgrad")])
    trained("blockwise", check, "faulty", lambda y: [flip(q.data.data, (5, 6), 3) for q in kept])
    assert [f.difference.what for f in check.faults] == ["a code of x"]


@pytest.mark.parametrize("gemm", ["fwd", "dgrad", "wgrad"])
def test_flipped_bit_of_product_is_found(faulty: Faulty, gemm: str) -> None:
    """Once: the same kernel gives the other value twice. It is found in the lowest bit, at any place."""
    shape = {"fwd": (150, 200), "dgrad": (150, 136), "wgrad": (200, 136)}[gemm]
    once = Once(shape, lambda out: flip(out, (shape[0] - 1, 3), 0))
    faulty.product = lambda name, out: once(out) if name == gemm else None
    check = CorruptionChecker(ALL)
    trained("blockwise", check, backend="faulty")
    (fault,) = check.faults
    assert fault.site == ("one", gemm) and fault.difference.at == (shape[0] - 1, 3) and fault.difference.bits == 1
    assert "by faulty once more, 1 bit apart" in str(fault)
    assert fault.to_json()["said"] == str(fault) and fault.to_json()["at"] == [shape[0] - 1, 3]


def test_systematic_error_is_found(faulty: Faulty) -> None:
    """It agrees with itself, and the reference in host memory tells: in which tile of the product, is drawn."""
    faulty.product = lambda gemm, out: out[:64].mul_(1.5) if gemm == "wgrad" else None
    found = []
    for draw in range(8):
        check = CorruptionChecker(ALL, draw)
        trained("blockwise", check, backend="faulty")
        found += check.faults
    assert 0 < len(found) < 8, "rows from 128 on are as they should be"
    assert {fault.site.gemm for fault in found} == {"wgrad"}
    assert "by the reference on the CPU, where rounding explains" in str(found[0])


def test_nondeterministic_kernel_is_not_reported(faulty: Faulty) -> None:
    draw = random.Random(0)
    faulty.product = lambda gemm, out: out.mul_(1 + 1e-6 * draw.random())
    check = CorruptionChecker(ALL)
    trained("blockwise", check, backend="faulty")
    assert check.faults == [] and check.done.unsteady == 3


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1), (1, -1), (-1, 1), (-1, -1), (48, 32), (-1, 64)])
def test_bands_cover_an_operand(monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]) -> None:
    """Cut where blocks end, in an order that tells the place, whatever a block takes."""
    monkeypatch.setattr(comparing, "BAND", 4000)
    spec, x = CastSpec("e4m3", block, "pow2"), torch.randn(300, 217)
    q = fp8.quantize(x, spec)
    covered = torch.zeros(300, 217, dtype=torch.int32)
    for band in (bands := list(comparing._bands(x, spec))):
        covered[band] += 1
    assert bool((covered == 1).all()) and len(bands) > 1
    assert comparing.compare_cast("x", x, q) is None
    for at in ((0, 0), (299, 216), (150, 100)):
        flip(q.data, at, 2)
        found = comparing.compare_cast("x", x, q)
        assert found is not None and found.at == at
        flip(q.data, at, 2)


def test_checks_cover_all_gemms() -> None:
    there = tuple(CheckedGemm(f"layers.{n}", gemm) for n in range(50) for gemm in ("fwd", "dgrad", "wgrad"))
    size = check_size(len(there))
    assert size == 5 and check_size(3) == 3 and check_size(40) == checking.LEAST and check_size(0) == 0
    rounds = [[site for n in range(first, first + 30) for site in select_gemms(there, 7, n)] for first in (0, 30)]
    assert all(sorted(found) == sorted(there) for found in rounds) and rounds[0] != rounds[1]
    assert select_gemms(there, 7, 3) == select_gemms(there, 7, 3) != select_gemms(there, 8, 3)
    assert select_gemms((), 7, 3) == () and set(select_gemms(there[:3], 7, 9)) == set(there[:3])


def test_fp8_gemms_of_plan() -> None:
    model = nn.ModuleDict({"one": nn.Linear(128, 128), "two": nn.Linear(128, 128), "out": nn.Linear(128, 128)})
    model["two"].weight.requires_grad_(False)
    rules = (fp8.Rule("one", dgrad="bf16"), fp8.Rule("out", recipe="off"))
    plan = fp8.plan(model, fp8.Policy(recipe="blockwise", rules=rules))
    assert fp8_gemms(plan) == (("one", "fwd"), ("one", "wgrad"), ("two", "fwd"), ("two", "dgrad"))
