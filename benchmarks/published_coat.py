"""COAT's AdamW as its authors published it, in plain torch: a peer for `benchmarks/optimizer.py`.

Xi et al., "COAT: Compressing Optimizer states and Activation for Memory-Efficient FP8 Training", ICLR 2025, arXiv
2410.19313, and the kernel of its repository (NVlabs/COAT, Apache-2.0), whose arithmetic is rewritten here: nothing
is copied. Groups of 128 elements of each flattened parameter; for each moment z of a group

    max, min = largest and smallest |z|, 1e-30 added to both
    k        = floor(16 * log2(448^2 / 2) / log2(max / min)) / 16
    c        = sqrt(max) * sqrt(min)      s = (max / c)^k / 448      code = e4m3(sign(z) * (|z| / c)^k / s), to nearest
    z'       = sign(code) * (|code| * s)^(1/k) * c

A weight steps with the moments as they are before they are encoded. Zeros are left out of the minimum unless the first
element of the group is one, as the kernel's reduction does (which loses more: a zero hides what its lane has seen).
k is infinite where all magnitudes are equal, and such a group decodes to c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_GROUP = 128
_LEAST = 1e-30
_TARGET = math.log2(448.0 * 448.0 / 2)
_GRID = 16.0  # COAT's expand_min: k is a multiple of its inverse

Kept = tuple[Tensor, Tensor, Tensor, Tensor]
"""E4M3 codes [G, 128] of one moment, and the group's s, k, c [G, 1]."""


def encode(z: Tensor) -> Kept:
    """One moment, fp32 [G, 128]."""
    size = z.abs()
    low = size.where(size > 0, torch.inf).amin(1, keepdim=True).where(size[:, :1] > 0, 0.0) + _LEAST
    high = size.amax(1, keepdim=True) + _LEAST
    k = torch.floor(_TARGET / torch.log2(high / low) * _GRID) / _GRID
    c = high.sqrt() * low.sqrt()
    s = (high / c).pow(k).where(k.isfinite(), 1.0) / 448.0
    y = (size / c).pow(k).where(k.isfinite(), 1.0) / s
    return (z.sign() * y).to(torch.float8_e4m3fn), s, k, c


def decode(stored: Kept) -> Tensor:
    codes, s, k, c = stored
    y = codes.float() * s
    return y.sign() * y.abs().pow(1.0 / k) * c


class PublishedCoat(torch.optim.Optimizer):
    """AdamW without weight decay whose moments are kept so; a ragged last group is filled with zeros."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, n = self.state[p], p.numel()
                g = nn.functional.pad(p.grad.flatten(), (0, -n % _GROUP)).view(-1, _GROUP)
                t = state["step"] = state.get("step", 0) + 1
                m, v = (decode(state[key]) if key in state else torch.zeros_like(g) for key in ("m", "v"))
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g * g
                away = v.sqrt() / math.sqrt(1 - beta2**t) + group["eps"]
                p.sub_((group["lr"] / (1 - beta1**t) * m / away).flatten()[:n].view(p.shape))
                state["m"], state["v"] = encode(m), encode(v)

    def second_moments(self, p: nn.Parameter) -> Tensor:
        """What is kept of v, decoded and flat."""
        return decode(self.state[p]["v"]).flatten()[: p.numel()]
