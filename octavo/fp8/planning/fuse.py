"""Fusing without a plan: gated MLPs as one function and norms that hand their codes on, in a model with FP8 layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from octavo.fp8.blocks import gated_mlp, rmsnorm
from octavo.fp8.dense.swap import Swapped, unswap

__all__ = ["Fusion", "fuse", "unfuse"]


class Fusion(NamedTuple):
    """What :func:`fuse` made of a gated MLP or a norm: ``reason`` is None if it is fused now, else why not."""

    names: tuple[str, ...]
    reason: str | None


def fuse(model: nn.Module) -> tuple[Fusion, ...]:
    """Let gated MLPs run as one function, and norms hand their codes to the FP8 layers behind them, where they can.

    Returns one :class:`Fusion` for each gated MLP and norm with an FP8 layer beside it. Parameters, names and state
    dicts stay; :func:`unfuse` takes it back.
    """
    return tuple(Fusion((name,), why) for name, why in (*gated_mlp.convert(model), *rmsnorm.convert(model)))


def unfuse(model: nn.Module) -> None:
    """Let norms, MLPs and what is behind attention compute by their stock forward again."""
    for module in list(model.modules()):
        if not (isinstance(module, Swapped) and module.precise):
            unswap(module)
