"""Who computes rows that stand for themselves on which kind of device, and how one knows that they do.

On a CPU torch's own products do it, padded and in pieces (:mod:`octavo.fp8.invariance.products`), and its sums of a
row look at that row anyway. A GPU's libraries pick tiles, and cut contractions and rows, by sizes and by what is free:
there kernels with fixed tiles and a fixed order do it (:data:`KERNELS`, which ``octavo.fp8.kernels`` fills). That a
row's bits do not depend on its place in a tile, or on which program gets it, is a property of compilers and of tensor
cores, not of any interface; so each kind of kernel is tried once for each size on the very device (:func:`prove`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from octavo.fp8.arithmetic.errors import Fp8Error


class InvarianceError(Fp8Error, RuntimeError):
    """Something whose result for a row would depend on the rows beside it."""


class RowKernels(Protocol):
    """Each row of each result by itself. Operands are plain tensors of one device, in fp32, bf16 or fp16; nothing here
    is differentiable. Raises InvarianceError for other dtypes, and where a trial on the device failed."""

    def product(
        self, a: Tensor, b: Tensor, start: Tensor | None, beta: float, alpha: float, dtype: torch.dtype
    ) -> Tensor:
        """alpha a [M, K] @ b [K, N] + beta start, in ``dtype``; start [M, N] or what broadcasts to it."""
        ...

    def grouped_product(self, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        """[R, N] in the dtype of a [R, K]: its rows up to ``ends`` [E], each expert's behind the last one's, times the
        expert's b [E, K, N]; zeros behind them."""
        ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, positions: Tensor | None, own: Tensor | None,
        window: int | None, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out [B, H, T, D_v] in q's dtype, lse fp32 [B, H, T]): see :mod:`octavo.fp8.invariance.attention`."""
        ...

    def sums(self, x: Tensor) -> Tensor:
        """[R]: the sum of each row of x [R, N], in fp32 (float64 of float64)."""
        ...


KERNELS: dict[str, Callable[[], RowKernels]] = {}
"""Kind of device -> its kernels."""


def kernels_for(x: Tensor) -> RowKernels | None:
    """The kernels of x's device; None where torch computes."""
    give = KERNELS.get(x.device.type)
    return None if give is None else give()


def unlowered(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast on x's device."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


ROWS_OF_TRIAL = 130
"""More than a tile of any kernel has, and not a multiple."""

_proven: set[tuple[Any, ...]] = set()


def prove(key: tuple[Any, ...], what: str, begin: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    """Try once that rows have their bits in any company. ``begin()`` makes random operands of :data:`ROWS_OF_TRIAL`
    rows, and a function that gives the result of those rows ``which`` (int64 on the CPU) that are asked for. ``key``
    says what is tried, and on which device.

    Raises InvarianceError, with ``what`` and a row, if they do not.
    """
    if key in _proven:
        return
    every = torch.arange(ROWS_OF_TRIAL)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        run = begin()
        whole = run(every).cpu()
        for which in (every[ROWS_OF_TRIAL // 2 :][:1], every[-3:], every.flip(0)[::7], every.roll(5)[:-1]):
            differing = (run(which).cpu() != whole[which]).reshape(len(which), -1).any(1)
            if differing.any():
                row = int(which[differing][0])
                raise InvarianceError(
                    f"invariant: {what} was tried on this device, and row {row} of {ROWS_OF_TRIAL} has other bits "
                    f"among {len(which)} rows. Use rl.invariant: false here"
                )
    _proven.add(key)
