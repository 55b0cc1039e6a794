"""The AdamW kernel against the reference, bit for bit, in Triton's interpreter; and the compiled forms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from octavo.fp8.arithmetic.adamw import Hyper, Piece, reference_step
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, STATES
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.triton_kernels import adamw
from octavo.fp8.kernels.triton_kernels.launch import launches
from tests.fp8.kernels import aot

# NaN in, NaN out; numpy, on which the interpreter runs, says so each time.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MASTERS = ("fp32", "master", "bf16+16", "bf16+sr")
SEED = 0xFEDCBA9876543210 - (1 << 64)
# (elements, place of the first in the whole parameter): whole groups, ragged, inside one group, over a border, far out
SHAPES = [(384, 0), (1000, 256), (50, 100), (7, 5), (4226, 3), (160, 64), (130, (1 << 33) + 40), (0, 128)]


def piece(count: int, start: int, index: int, states: str, master: str, grad: torch.dtype) -> Piece:
    make = torch.Generator().manual_seed(index)
    weight = torch.randn(count, generator=make)
    groups = -(-(start % GROUP + count) // GROUP)
    state = {
        k.name: torch.zeros((count,) if k.row is None else (groups, *k.row), dtype=k.dtype) for k in LAYOUT[states]
    }
    if master == "bf16+16":
        state["master_low"] = torch.zeros(count, dtype=torch.int16)
    elif master == "master":
        state["master"] = weight.clone()
    weight = weight if master == "fp32" else weight.bfloat16()
    return Piece(weight, torch.zeros(count, dtype=grad), state, start, index, 1)


def make_pieces(
    states: str, master: str, shapes: Sequence[tuple[int, int]] = SHAPES
) -> tuple[list[Piece], list[Piece]]:
    def made() -> list[Piece]:
        kinds = (torch.float32, torch.bfloat16)
        return [piece(*shape, i, states, master, kinds[i % 2]) for i, shape in enumerate(shapes)]

    return made(), made()


def settings(states: str, master: str, **more: object) -> Hyper:
    master = "fp32" if master == "master" else master
    return Hyper(1e-3, weight_decay=0.1, states=states, master=master, seed=SEED, **more)  # type: ignore[arg-type]


def with_gradients(one: list[Piece], other: list[Piece], step: int, spread: float = 2.0) -> tuple[list, list]:
    """The pieces of a step, with gradients of all magnitudes and every fifth 0."""
    make = torch.Generator().manual_seed(step)
    for p, q in zip(one, other, strict=True):
        size = p.grad.numel()
        g = torch.randn(size, generator=make) * torch.exp(spread * torch.randn(size, generator=make)) * 1e-3
        g[::5] = 0
        p.grad.copy_(g)
        q.grad.copy_(g)
    return [p._replace(step=step) for p in one], [p._replace(step=step) for p in other]


def bits(x: torch.Tensor) -> torch.Tensor:
    """As bytes; a NaN counts as any other."""
    return (
        x.nan_to_num(7e3).view(torch.uint8) if x.is_floating_point() and x.element_size() > 1 else x.view(torch.uint8)
    )


def assert_same(one: Sequence[Piece], other: Sequence[Piece]) -> None:
    for p, q in zip(one, other, strict=True):
        for name, x, y in (("weight", p.weight, q.weight), *((k, v, q.state[k]) for k, v in p.state.items())):
            wrong = (bits(x) != bits(y)).nonzero()
            assert not len(wrong), (
                f"piece {p.index}, {name}: {len(wrong)} bytes differ, the first at {wrong[0].tolist()}"
            )


# A state and a master are read, computed and written apart from each other: each with half of the others.
WITH = {"fp8": MASTERS[::3], "coat": MASTERS[1:3], "bf16": MASTERS[::2], "fp32": MASTERS[1::2]}


@pytest.mark.parametrize(("states", "master"), [(states, master) for states in STATES for master in WITH[states]])
def test_kernel_equals_reference_bitwise(states: str, master: str) -> None:
    one, other = make_pieces(states, master)
    hyper = settings(states, master)
    for step, factor in ((1, None), (2, torch.tensor(0.7))):
        inputs, also = with_gradients(one, other, step)
        reference_step(inputs, hyper, factor, None)
        with launches() as recorded:
            adamw.step(also, hyper, factor)
        assert recorded == {"adamw_step": 4}, "one launch for each type of gradient, aligned or not"
    assert_same(one, other)
    assert any(not torch.equal(p.weight, q.weight) for p, q in zip(one, make_pieces(states, master)[0], strict=True))


@pytest.mark.parametrize("states", ["fp8", "coat", "bf16"])
def test_nonfinite_tiny_and_huge_values(states: str) -> None:
    one, other = make_pieces(states, "bf16+16", [(128 * 12, 0), (1000, 256)])
    for step in (1, 2):
        inputs, also = with_gradients(one, other, step)
        for p in (*inputs, *also):
            groups = p.grad[:896].view(-1, 128)
            groups[0, 3], groups[1, 5] = float("nan"), float("inf")
            groups[2], groups[3] = 0.0, 1e-30  # whose squares vanish
            groups[4, ::2], groups[5, 7] = 1e19, 1e20  # whose squares are 2^126 and more; infinite
        reference_step(inputs, settings(states, "bf16+16"), None, None)
        adamw.step(also, settings(states, "bf16+16"))
    assert_same(one, other)
    assert one[0].weight[3].isnan() and one[0].weight[896:].isfinite().all()


@pytest.mark.parametrize("states", ["fp8", "coat", "fp32"])
def test_groups_shared_by_ranks_use_common_extrema(states: str) -> None:
    one, other = make_pieces(states, "bf16+16")
    requested: list[list[int]] = [[], []]

    def agree(which: int):
        def shared(marks: torch.Tensor) -> torch.Tensor:
            requested[which].append(marks.shape[1])
            return torch.where((marks > 0) & (marks < 0x7E000000), marks + (1 << 20), marks)

        return shared

    for step in (1, 2):
        inputs, also = with_gradients(one, other, step)
        reference_step(inputs, settings(states, "bf16+16"), None, agree(0))
        adamw.step(also, settings(states, "bf16+16"), None, agree(1))
    assert_same(one, other)
    assert requested[0] == requested[1] and (states == "fp32" or requested[0])


def test_many_pieces_in_one_launch() -> None:
    shapes = [((i * 37) % 300 + 1, 128 * i) for i in range(37)] + [(4096 * 2 + 1, 0), (16, 16)]
    one, other = make_pieces("fp32", "fp32", shapes)
    inputs, also = with_gradients(one, other, 1)
    also = [p._replace(step=1 + p.index) for p in also]  # each with scalars of its own
    reference_step([p._replace(step=1 + p.index) for p in inputs], settings("fp32", "fp32"), None, None)
    adamw.step(also, settings("fp32", "fp32"))
    assert_same(one, other)


def test_unsupported_gradient_dtype_is_converted() -> None:
    p = piece(128, 0, 0, "fp8", "fp32", torch.float64)
    with pytest.raises(TypeError, match=r"no gradient of torch\.float64; cast it"):
        adamw.step([p], settings("fp8", "fp32"))


def test_registry_selects_kernel_on_gpu_and_reference_on_cpu() -> None:
    assert registry.select("adamw", recipe_or_spec=CastSpec(), device="cpu").backend.name == "reference"
    if not torch.cuda.is_available():  # a plan for another machine
        assert registry.select("adamw", recipe_or_spec=CastSpec(), device="cuda").backend.name == "triton"
    one, other = make_pieces("fp8", "bf16+sr", SHAPES[:3])
    inputs, also = with_gradients(one, other, 1)
    registry.get("reference").adamw(inputs, settings("fp8", "bf16+sr"), None)
    with launches() as recorded:
        registry.get("triton").adamw(also, settings("fp8", "bf16+sr"), None)
    assert recorded["adamw_step"]
    assert_same(one, other)


@pytest.mark.long
def test_compiled_kernel_uses_wide_loads_and_no_fma() -> None:
    rows = aot.report([90], only="adamw fp8 bf16+sr")  # another process, without the interpreter
    assert not aot.faults(rows), "a fused product would be a fault"
    wide, unusual = rows
    assert wide["spill"] == unusual["spill"] == 0
    assert wide["loads"][16] >= 2 and wide["stores"][16] >= 1, "BF16 weights and gradients"
    assert wide["loads"][8] >= 2 and wide["stores"][8] == 2 and 1 not in wide["stores"], "codes"
