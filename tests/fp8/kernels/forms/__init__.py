"""The compiled forms of kernels, a file for each file of ``triton_kernels/``: :func:`variants` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch

SPILL_BOUND = 128
"""Bytes of local memory a thread that are still no fault: some registers once, kept in the L1 cache."""


class Variant(NamedTuple):
    """One compiled form of a kernel: what ``python -m tests.fp8.kernels.aot`` builds for each architecture.

    ``signature`` gives Triton's type of each argument that is no constant (``"*bf16"``, ``"*fp8e4nv"``, ``"*u8"``,
    ``"i32"``; ``":16"`` behind it: a multiple of 16, as Triton finds out by itself at a launch); ``constants`` the
    constexpr arguments; ``architectures`` those it is used on; ``maxnreg`` the most registers a thread may have;
    ``fused`` whether a product may be rounded together with the sum it enters; ``spill`` the most bytes of local memory
    a thread, more than usual for a form that was timed and is the fastest all the same.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    architectures: tuple[int, ...] = (89, 90, 100, 120)
    maxnreg: int | None = None
    fused: bool = True
    spill: int = SPILL_BOUND


_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32"}
_TYPES |= {torch.int64: "i64"}


def launched(name: str, module: Any, call: Callable[[], object], at: int = -1) -> Variant:
    """The form of a kernel that ``call()``, given tensors on meta, starts by ``module.launch``, the last one or the one
    ``at`` an index: as it runs, with its constants and options, and with what Triton makes of integers (1 is a
    constant)."""
    with mock.patch.object(module, "launch") as launch:
        call()
    (kernel, _, *args), options = launch.call_args_list[at]
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for key, value in zip(kernel.arg_names[: len(args)], args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[key] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, int) and value != 1:
            signature[key] = "i32" if value % 16 else "i32:16"
        else:
            constants[key] = value
    constants |= {key: value for key, value in options.items() if key in kernel.arg_names}
    return Variant(name, kernel, signature, constants, options.get("num_warps", 4), maxnreg=options.get("maxnreg"))
