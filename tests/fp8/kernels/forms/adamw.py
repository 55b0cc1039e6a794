"""The forms of AdamW: ``triton_kernels/adamw.py``."""

from __future__ import annotations

import triton.language as tl

from octavo.fp8.arithmetic.moments import LAYOUT
from octavo.fp8.kernels.triton_kernels.adamw import GROUPS, TILES, WARPS
from octavo.fp8.kernels.triton_kernels.adamw_kernels import adamw_step
from tests.fp8.kernels.forms import Variant


def variants() -> list[Variant]:
    """Every pair of states and master with BF16 gradients, the fp32 ones with fp32 gradients; and odd pieces."""
    kinds = [
        (states, master, "bf16" if master != "fp32" else "fp32", grad, aligned)
        for states in LAYOUT
        for master in ("fp32", "master", "bf16+16", "bf16+sr")
        for grad in (("fp32", "bf16") if master == "fp32" else ("bf16",))
        for aligned in ((True, False) if states == "fp8" else (True,))
    ]
    signature = {"places": "*i64", "numbers": "*fp32", "factor": "*fp32", "count": "i32", "top": "i32"}
    signature |= dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
    types = {"fp32": tl.float32, "bf16": tl.bfloat16}
    return [
        Variant(
            f"adamw {states} {master} g={grad}{'' if aligned else ' odd'}",
            adamw_step,
            signature,
            {"STATES": states, "MASTER": master, "W": types[weight], "G": types[grad], "ALIGNED": aligned}
            | {"GROUPS": GROUPS, "TILES": TILES},
            num_warps=WARPS,
            num_stages=1,
            fused=False,
        )
        for states, master, weight, grad, aligned in kinds
    ]
