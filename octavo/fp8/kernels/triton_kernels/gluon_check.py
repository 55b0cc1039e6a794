"""Gluon's GEMM against the reference, on the device that is to use it: small products of the very kind that is asked
for, with tiles that are full on no side and several for each program. Once a process and kind."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic.cast import CastSpec, Quantized, quantize
from octavo.fp8.kernels.groups import TILE, Groups, route
from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.registry import get
from octavo.fp8.kernels.self_check import BOUND, excess, magnitudes, spread
from octavo.fp8.kernels.triton_kernels import gluon_gemm as own

TOKENS, OUTPUTS, INPUTS, EXPERTS = 600, 320, 456, 3
PROGRAMS = 4


@lru_cache(maxsize=256)
def wrong(op: str, a: CastSpec, b: CastSpec, device: torch.device) -> str | None:
    """Why results of this GEMM cannot be trusted on this device, None if they can: tried once a process."""
    try:
        with _disable_current_modes():  # whoever asks first may be under a fake mode: this is about the real device
            worst = deviation(op, a, b, device)
    except Exception as error:  # whatever the compiler or a launch raises is this device's answer, and is shown
        lines = str(error).strip().splitlines() or [""]
        return f"its {op} of {a} by {b} does not run here: {type(error).__name__}: {lines[-1]}"
    if worst <= 1:
        return None
    return f"its {op} of {a} by {b} was tried here and is off by {worst:.3g} times what rounding may do"


def deviation(op: str, a: CastSpec, b: CastSpec, device: torch.device) -> float:
    """How far the kernel is from the reference at the worst element, in units of what rounding may do (NaN counts as
    infinite): with and without a bias, into 16 and 32 bits."""
    reference = get("reference")
    named, a_dim, b_dim = op.removeprefix("grouped_"), *CONTRACTED[op.removeprefix("grouped_")]
    worst, bias = 0.0, None
    if named == op:
        sides = {"fwd": ((TOKENS, INPUTS), (OUTPUTS, INPUTS)), "dgrad": ((TOKENS, OUTPUTS), (OUTPUTS, INPUTS))}
        a_shape, b_shape = sides.get(op, ((TOKENS, OUTPUTS), (TOKENS, INPUTS)))
        a_q, b_q = quantize(spread(1, *a_shape), a), quantize(spread(2, *b_shape), b)
        want, most = (
            getattr(reference, f"gemm_{op}")(*q, torch.float32)
            for q in ((a_q, b_q), (magnitudes(a_q), magnitudes(b_q)))
        )
        bias = spread(3, OUTPUTS, 1).flatten() if op == "fwd" else None
        for added, dtype in ((None, torch.float32), (bias, torch.bfloat16)):
            got = own.gemm(_to(a_q, device), a_dim, _to(b_q, device), b_dim, dtype, _on(added, device), PROGRAMS)
            extra = torch.zeros(1) if added is None else added
            worst = max(worst, _off(got, want + extra, most + extra.abs()))
        return worst
    groups = route(torch.arange(TOKENS) % (EXPERTS * 2) // 2, EXPERTS + 1).groups  # the last expert has no rows
    a_q = reference.quantize_rows(spread(1, groups.rows, OUTPUTS if named != "fwd" else INPUTS), a, groups)
    there = Groups(groups.sizes.to(device), groups.starts.to(device), groups.tiles.to(device), groups.rows)
    if named == "wgrad":
        b_q = reference.quantize_rows(spread(2, groups.rows, INPUTS), b, groups)
        got = own.grouped_wgrad(_to(a_q, device), _to(b_q, device), there, torch.bfloat16, PROGRAMS)
    else:
        experts = spread(2, (EXPERTS + 1) * OUTPUTS, INPUTS).view(EXPERTS + 1, OUTPUTS, INPUTS)
        b_q = reference.quantize_experts(experts, b)
        bias = spread(3, EXPERTS + 1, OUTPUTS) if named == "fwd" else None
        got = own.grouped_rows(
            *(_to(a_q, device), _to(b_q, device), b_dim, there, torch.bfloat16, _on(bias, device), PROGRAMS)
        )
    multiply = getattr(reference, op)
    want, most = (multiply(*q, groups, torch.float32) for q in ((a_q, b_q), (magnitudes(a_q), magnitudes(b_q))))
    if bias is not None:
        owners = groups.tiles.repeat_interleave(TILE)
        added = bias[owners.clamp(min=0)] * (owners >= 0).unsqueeze(1)
        want, most = want + added, most + added.abs()
    return _off(got, want, most)


def _to(q: Quantized, device: torch.device) -> Quantized:
    return q._replace(data=q.data.to(device), scale=q.scale.to(device))


def _on(bias: Tensor | None, device: torch.device) -> Tensor | None:
    return None if bias is None else bias.to(device)


def _off(got: Tensor, want: Tensor, most: Tensor) -> float:
    """The largest difference over what is allowed there; infinite for NaN."""
    return excess(got, want, most * BOUND).max().item()
