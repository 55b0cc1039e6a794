"""Sizes that tensor cores do not take as they are: which, and what they cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.kernels import layout
from octavo.fp8.policy.padding import padding

ALL = ("fwd", "dgrad", "wgrad")


@pytest.mark.parametrize(
    ("recipe", "shape", "sizes"),
    [
        ("blockwise", (3420, 1280), (3456, 1280)),  # Qwen2.5-VL's tower
        ("rowwise", (3420, 1280), (3424, 1280)),
        ("mxfp8", (1280, 3420), (1280, 3424)),
        ("blockwise", (4304, 1152), (4352, 1152)),  # SigLIP's
        ("tensorwise", (4304, 1152), (4304, 1152)),
        ("delayed", (255, 1152), (256, 1152)),
        ("blockwise", (1024, 4096), (1024, 4096)),
    ],
)
def test_padding_is_that_of_the_buffers(recipe, shape, sizes):
    made = fp8.recipe(recipe)
    found = padding(made, shape, ALL)
    assert found.sizes == sizes
    assert (found.part > 0) == (shape != sizes)
    buffer, real = layout.codes_buffer(*shape, made.dgrad.b, 0, torch.device("cpu"))
    assert tuple(real.shape) == shape and buffer.shape[1] == sizes[0]


def test_the_cost_is_counted_by_gemm():
    made = fp8.recipe("blockwise")
    alone = [padding(made, (3420, 1280), (gemm,)).part for gemm in ALL]
    assert alone == pytest.approx([3424 / 3420 - 1, 3456 / 3420 - 1, 3424 / 3420 - 1])
    assert padding(made, (3420, 1280), ALL).part == pytest.approx(sum(alone) / 3)
    assert padding(fp8.recipe("blockwise", fwd="bf16"), (3420, 1280), ("fwd",)) == ((3420, 1280), 0.0)


def test_a_plan_names_layer_size_and_cost():
    """And no layer stays for its size."""
    with torch.device("meta"):
        block = [nn.ModuleDict({"gate": nn.Linear(1280, 3420), "down": nn.Linear(3420, 1280)}) for _ in range(3)]
        model = nn.ModuleDict({"blocks": nn.ModuleList(block), "odd": nn.Linear(1152, 255)})
    plan = fp8.plan(model, "blockwise")
    assert plan.share == 1
    at = next(i for i, note in enumerate(plan.notes) if "zeros" in note)
    assert plan.notes[at : at + 4] == (
        "7 of 7 FP8 layers have sizes that tensor cores take filled up with zeros, 0.43 % of linear FLOPs more:",
        "blocks.{0..2}.gate: 3420 x 1280 as 3456 x 1280, 0.43 % more",
        "blocks.{0..2}.down: 1280 x 3420 as 1280 x 3456, 0.43 % more",
        "odd: 255 x 1152 as 256 x 1152, 0.39 % more",
    )
    assert plan.notes[at + 3] in plan.table()
    only = fp8.Policy("off", rules=({"match": "**.0.gate", "recipe": "tensorwise", "wgrad": "bf16"},))
    notes = fp8.plan(model, only).notes
    assert "blocks.0.gate: 3420 x 1280 as 3424 x 1280, 0.12 % more" in notes
    del model["blocks"], model["odd"]
    model["even"] = nn.Linear(256, 4304, device="meta")
    assert not any("zeros" in note for note in fp8.plan(model, "rowwise").notes)
