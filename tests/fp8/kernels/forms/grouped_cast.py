"""The forms of the casts for experts: ``triton_kernels/grouped_cast.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.kernels.groups import Groups, group_rows
from octavo.fp8.kernels.triton_kernels import cast, grouped_cast
from tests.fp8.kernels.forms import Variant, launched


def _form(name: str, call: Callable[[Tensor, Groups], object], at: int = -1) -> Variant:
    """What ``call`` launches for the rows, in bf16, of 128 experts, eight of whom each of 8192 tokens chose."""
    groups = group_rows(torch.empty(8 * 8192, dtype=torch.int64, device="meta"), 128).groups
    x = torch.empty(groups.rows, 2048, dtype=torch.bfloat16, device="meta")
    return launched(name, cast, lambda: call(x, groups), at)


def variants() -> list[Variant]:
    """What differs from the casts of single matrices: rows of experts, for bf16."""
    results = []
    for name, block, contract in (
        ("1x128", (1, 128), 1),
        ("128x1", (128, 1), 0),
        ("row", (1, -1), 1),
        ("column", (-1, 1), 0),
        ("tensor", (-1, -1), 1),
    ):
        spec = CastSpec("e4m3", block, "fp32" if name == "tensor" else "pow2")
        results.append(
            _form(
                f"cast of experts' rows, {name}",
                lambda x, g, s=spec, c=contract: grouped_cast.quantize_rows(x, s, g, c),
            )
        )
    row, col = CastSpec("e4m3", (1, 128)), CastSpec("e4m3", (128, 1))
    results.append(_form("cast of experts' rows, both", lambda x, g: grouped_cast.quantize_rows_both(x, row, col, g)))
    column = CastSpec("e4m3", (-1, 1))
    results.append(_form("amax of experts' columns", lambda x, g: grouped_cast.quantize_rows(x, column, g, 0), 0))
    results.append(_form("scales of experts", lambda x, g: grouped_cast.quantize_rows(x, column, g, 0), 1))
    return results
