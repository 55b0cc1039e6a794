"""Compares the gradients of a sharded model with those of an unsharded one."""

from __future__ import annotations

from torch import nn

from octavo.fp8.weights import full


def worst_difference(sharded: nn.Module, whole: nn.Module, factor: float = 1.0) -> float:
    """The largest relative difference of a gradient; infinite where one of the two lacks one.
    ``factor``: what those of the sharded model were multiplied by."""
    worst = 0.0
    for (name, local), (other, want) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        if (local.grad is None) != (want.grad is None):
            return float("inf")
        if want.grad is not None:
            scale = want.grad.abs().max().clamp(min=1e-6)
            worst = max(worst, float((full(local.grad) / factor - want.grad).abs().max() / scale))
    return worst
