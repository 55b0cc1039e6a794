"""The forms of Gluon's GEMM for Hopper: ``triton_kernels/gluon_gemm.py``, for the shapes of the other GEMMs."""

from __future__ import annotations

import itertools

import torch

from octavo.fp8.kernels.layout import CONTRACTED
from octavo.fp8.kernels.triton_kernels import gluon_gemm
from tests.fp8.kernels import recorded
from tests.fp8.kernels.forms import Variant
from tests.fp8.kernels.forms.gemm import SHAPES, distinct, operands
from tests.fp8.kernels.forms.grouped import GROUPS, grouped_operands
from tests.fp8.kernels.forms.grouped import SHAPES as EXPERT_SHAPES

TITLES = ("blockwise", "tensorwise", "rowwise", "blockwise hybrid", "tensorwise e4m3")


def variants() -> list[Variant]:
    """Dense and grouped, with a bias where a layer of those shapes has one, and with a weight's gradient in fp32."""
    found: list[Variant] = []
    for title, op in itertools.product(TITLES, CONTRACTED):
        with recorded.launches(gluon_gemm) as seen:
            for n, k in SHAPES:
                a, b = operands(title, op, 16384, n, k)
                dtype = torch.float32 if op == "wgrad" and n == 12288 else torch.bfloat16
                gluon_gemm.gemm(a, CONTRACTED[op][0], b, CONTRACTED[op][1], dtype)
                if op == "fwd" and k == 1152:
                    bias = torch.empty(n, dtype=torch.bfloat16, device="meta")
                    gluon_gemm.gemm(a, 1, b, 1, dtype, bias)
            for shape in EXPERT_SHAPES:
                a, b = grouped_operands(title, op, *shape)
                if op == "wgrad":
                    gluon_gemm.grouped_wgrad(a, b, GROUPS, torch.bfloat16)
                else:
                    gluon_gemm.grouped_rows(a, b, CONTRACTED[op][1], GROUPS, torch.bfloat16)
        for kernel, args, options in seen:
            kind = ("grouped " if options["GROUPS"] else "") + ("bias " if options["BIAS"] else "")
            found.append(recorded.variant(f"gluon {kind}{title} {op}", 90, kernel, args, options))
    return distinct(found)
