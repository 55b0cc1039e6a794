"""Sizes that tensor cores do not take as they are: which, and what they cost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8 import kernels
from octavo.fp8.arithmetic.cast import Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.torch_backend import make_product, multiply
from octavo.fp8.planning.table import compute_padding

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
def test_padding_matches_buffers(recipe, shape, sizes):
    made = fp8.recipe(recipe)
    found = compute_padding(made, shape, ALL)
    assert found.sizes == sizes
    assert (found.part > 0) == (shape != sizes)
    buffer, real = layout.codes_buffer(*shape, made.dgrad.b, 0, torch.device("cpu"))
    assert tuple(real.shape) == shape and buffer.shape[1] == sizes[0]


@pytest.mark.parametrize("shape", [(3420, 1280), (1280, 3420), (4304, 1152), (255, 1152), (576, 7168)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_padding_cost_matches_products(recipe, shape):
    """Published sizes, laid out as torch's product takes them: no less than the plan names, and no more."""
    made, (n, k), tokens = fp8.recipe(recipe), shape, 128
    sizes = {"fwd": ((tokens, k), (n, k)), "dgrad": ((tokens, n), (n, k)), "wgrad": ((tokens, n), (tokens, k))}
    for gemm, operands in sizes.items():
        casts = made.gemm(gemm)
        codes = []
        for (rows, columns), spec in zip(operands, (casts.a, casts.b), strict=True):
            contract = layout.CONTRACTED[gemm][len(codes)]
            scale = torch.ones(layout.grid_shape(rows, columns, spec), dtype=E8M0 if spec.scale == "e8m0" else None)
            _, data = layout.codes_buffer(rows, columns, spec, contract, torch.device("cpu"), zero=True)
            codes.append(Quantized(data, scale, spec))
        product = make_product(gemm, *codes)
        flops = product.a.shape[0] * product.a.shape[1] * product.b.shape[1]
        named = (compute_padding(made, shape, (gemm,)).part + 1) * tokens * n * k
        # dy's rows in wgrad, N, are handed over as they are where each has a scale or all have one
        few = named * (1 - n / layout.round_up(n, 16)) if gemm == "wgrad" else 0
        assert named - few - 1 <= flops <= named + 1


def test_results_of_padded_width_are_copied():
    """By torch's product (K = 3420: dx and dw; N = 3420: y alone), and not by the reference."""
    with torch.device("meta"):
        model = nn.ModuleDict({"gate": nn.Linear(1280, 3420), "down": nn.Linear(3420, 1280)})
    notes = fp8.plan(model, fp8.Policy("rowwise", backend="torch")).notes
    assert "gate: 3420 x 1280 padded to 3424 x 1280, 0.12 % more, y copied out" in notes
    assert "down: 1280 x 3420 padded to 1280 x 3424, 0.12 % more, dx and dw copied out" in notes
    a, b = (fp8.quantize(torch.ones(16, width), fp8.recipe("rowwise").fwd.a) for width in (32, 32))
    torch_backend = kernels.get("torch")
    assert torch_backend.pads_results and not kernels.get("reference").pads_results
    for columns in (15, 16):
        wide = multiply(make_product("fwd", a, Quantized(b.data[:columns], b.scale[:columns], b.spec)), torch.float32)
        assert wide.shape == (16, 16)


def test_padding_cost_includes_head():
    """GOT-OCR2's, 151860 words; in the share of a model it is no part of what it is divided by elsewhere."""
    with torch.device("meta"):
        model = nn.ModuleDict({"up": nn.Linear(1024, 1024), "lm_head": nn.Linear(1024, 151860)})
    plan = fp8.plan(model, fp8.Policy("rowwise", components={"lm_head": "rowwise"}))
    [note] = [note for note in plan.notes if "padded for" in note]
    more, whole = 12 * 1024, (151860 + 1024) * 1024
    assert f"which adds {100 * more / whole:.2g} % to the FLOPs of all layers" in note
    tiny = fp8.plan(model, fp8.Policy("off", components={"lm_head": "rowwise"}))
    assert any("lm_head: 151860 x 1024 padded to 151872 x 1024" in note for note in tiny.notes)


def test_padding_cost_is_per_gemm():
    made = fp8.recipe("blockwise")
    alone = [compute_padding(made, (3420, 1280), (gemm,)).part for gemm in ALL]
    assert alone == pytest.approx([3424 / 3420 - 1, 3456 / 3420 - 1, 3424 / 3420 - 1])
    assert compute_padding(made, (3420, 1280), ALL).part == pytest.approx(sum(alone) / 3)
    assert compute_padding(fp8.recipe("blockwise", fwd="bf16"), (3420, 1280), ("fwd",)) == ((3420, 1280), 0.0)


def test_plan_notes_padded_layers():
    """And no layer stays for its size."""
    with torch.device("meta"):
        block = [nn.ModuleDict({"gate": nn.Linear(1280, 3420), "down": nn.Linear(3420, 1280)}) for _ in range(3)]
        model = nn.ModuleDict({"blocks": nn.ModuleList(block), "odd": nn.Linear(1152, 255)})
    plan = fp8.plan(model, "blockwise")
    assert plan.share == 1
    at = next(i for i, note in enumerate(plan.notes) if "padded for" in note)
    assert plan.notes[at : at + 4] == (
        "7 of 7 FP8 layers have sizes that are padded for tensor cores, which adds 0.43 % to the FLOPs of all layers:",
        "blocks.{0..2}.gate: 3420 x 1280 padded to 3456 x 1280, 0.43 % more",
        "blocks.{0..2}.down: 1280 x 3420 padded to 1280 x 3456, 0.43 % more",
        "odd: 255 x 1152 padded to 256 x 1152, 0.39 % more",
    )
    assert plan.notes[at + 3] in plan.table()
    only = fp8.Policy("off", rules=({"match": "**.0.gate", "recipe": "tensorwise", "wgrad": "bf16"},))
    notes = fp8.plan(model, only).notes
    assert "blocks.0.gate: 3420 x 1280 padded to 3424 x 1280, 0.12 % more" in notes
    del model["blocks"], model["odd"]
    model["even"] = nn.Linear(256, 4304, device="meta")
    assert not any("padded for" in note for note in fp8.plan(model, "rowwise").notes)
