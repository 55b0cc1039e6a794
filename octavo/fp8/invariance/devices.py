"""The batch-invariant kernels of each kind of device, and the test that they are batch-invariant.

On a CPU torch's own products are used, padded and in pieces (:mod:`octavo.fp8.invariance.products`), and its sums of a
row read only that row anyway. A GPU's libraries choose tiles, and split contractions and rows, by sizes and by free
resources: GPUs use kernels with fixed tiles and a fixed order (:data:`KERNELS`, which ``octavo.fp8.kernels`` fills). No
interface promises that the bits of a row do not depend on its position in a tile, or on the program that computes it;
compilers and tensor cores decide that. So each kind of kernel is tested once for each size on the device itself
(:func:`prove`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic.errors import Fp8Error


class InvarianceError(Fp8Error, RuntimeError):
    """An operation whose result for a row would depend on the other rows."""


class RowKernels(Protocol):
    """Batch-invariant kernels. Operands are plain tensors on one device, in fp32, bf16 or fp16; nothing here is
    differentiable. Raises InvarianceError for other dtypes, and if a test on the device failed."""

    def product(
        self, a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype
    ) -> Tensor:
        """alpha a [M, K] @ b [K, N] + beta start, in ``dtype``; start broadcasts to [M, N]."""
        ...

    def grouped_product(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """[R, N] in the dtype of a [R, K]: rows sorted by expert, expert e's up to ``ends[e]``, times b [E, K, N] of
        their expert; zeros after the last expert's rows."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None, real: Tensor | None,
        window: int | None, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out [B, H, T, D_v] in q's dtype, lse fp32 [B, H, T]): see :mod:`octavo.fp8.invariance.attention`."""
        ...

    def sums(self, x: Tensor) -> Tensor:
        """The sum of each row of x [R, N]: fp32 [R] (float64 for float64)."""
        ...


KERNELS: dict[str, Callable[[], RowKernels]] = {}
"""Kind of device -> its kernels."""


def kernels_for(x: Tensor) -> RowKernels | None:
    """The kernels of x's device; None if torch's functions are used there."""
    load = KERNELS.get(x.device.type)
    return None if load is None else load()


def autocast_disabled(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast on x's device."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


TRIAL_ROWS = 130
"""Larger than a tile of any kernel, and not a multiple of one."""

_proven: set[tuple[object, ...]] = set()


def prove(key: tuple[object, ...], what: str, begin: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    """Test once that a row has the same bits among any other rows.

    ``begin()`` creates random operands of :data:`TRIAL_ROWS` rows, and returns a function that computes the result
    for a selection ``which`` of these rows (int64 on the CPU). ``key`` identifies the operation and the device.

    Raises InvarianceError, with ``what`` and a row, if the bits differ.
    """
    if key in _proven:
        return
    all_rows = torch.arange(TRIAL_ROWS)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        run = begin()
        expected = run(all_rows).cpu()
        # One row, the last rows, every seventh in reverse order, and all but one at other positions.
        subsets = (all_rows[TRIAL_ROWS // 2 :][:1], all_rows[-3:], all_rows.flip(0)[::7], all_rows.roll(5)[:-1])
        for subset in subsets:
            differing = (run(subset).cpu() != expected[subset]).reshape(len(subset), -1).any(1)
            if differing.any():
                row = int(subset[differing][0])
                raise InvarianceError(
                    f"invariant: {what} was tried on this device, and row {row} of {TRIAL_ROWS} has other bits "
                    f"among {len(subset)} rows. Use rl.invariant: false here"
                )
    _proven.add(key)
