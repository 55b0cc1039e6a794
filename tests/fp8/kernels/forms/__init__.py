"""The forms in which kernels are compiled, a file for each of ``triton_kernels/``: :func:`variants` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One compiled form of a kernel: what ``python -m tests.fp8.kernels.aot`` builds for each architecture.

    ``signature`` gives Triton's type of each argument that is no constant (``"*bf16"``, ``"*fp8e4nv"``, ``"*u8"``,
    ``"i32"``; ``":16"`` behind it: a multiple of 16, as Triton finds out by itself at a launch); ``constants`` the
    constexpr arguments; ``architectures`` those it is used on; ``maxnreg`` the most registers a thread may have;
    ``fused`` whether a product may be rounded together with the sum it enters.
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
