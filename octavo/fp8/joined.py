"""The codes of several weights in one matrix, for layers that run as one GEMM.

Each weight w_i [N_i, K] is cast alone, so that its codes are those that its own GEMM would use, and they are laid one
below the other: [sum of N_i, K]. That is the cast of the joined matrix wherever no block reaches from one weight into
the next; which casts allow it is for :mod:`octavo.fp8.fusion` to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.weights import cache as caching
from octavo.fp8.weights.cache import WeightCache, WeightSlice
from octavo.fp8.weights.fp8_tensor import Fp8Weight

__all__ = ["Joined", "join"]


class Joined:
    """Joined codes, cast once per optimizer step: valid as long as those of every weight would be, by the rules of
    :class:`~octavo.fp8.weights.cache.WeightCache`, and dropped with the first of them. ``casts`` counts the casts
    made."""

    def __init__(self, caches: tuple[WeightCache, ...]) -> None:
        self.casts = 0
        self._caches = caches
        self._codes: dict[CastSpec, Quantized] = {}
        self._sources: list[Any] = []
        self._stamp: list[tuple[Any, ...]] = []
        for cache in caches:
            cache.joined = self

    def __len__(self) -> int:
        return len(self._codes)

    def serves(self, caches: tuple[WeightCache, ...]) -> bool:
        """False after a copy or a pickle gave the layers new caches."""
        return all(a is b and a.joined is self for a, b in zip(caches, self._caches, strict=True))

    def drop(self) -> None:
        """Forget all codes and free their memory."""
        self._codes.clear()
        self._sources, self._stamp = [], []

    def get(
        self, weights: tuple[Tensor, ...], spec: CastSpec, backend: Backend, contract: int, forward: bool
    ) -> Quantized:
        """The codes of these weights under ``spec``, laid out for a GEMM that contracts ``contract``.

        Only a forward begins a new generation, and a graph capture keeps nothing, as in ``WeightCache.get``.
        """
        cast = partial(_cast, weights, spec, backend, contract)
        keep = all(cache.keep for cache in self._caches) and not any(caching.capturing(w) for w in weights)
        if not keep or not (forward or self._valid(weights)):
            self.casts += 1
            return cast()
        if not self._valid(weights):
            self._codes.clear()
            self._sources = [caching.source_of(w) for w in weights]
            self._stamp = self._stamps(weights)
        if spec not in self._codes:
            with torch.inference_mode(False), torch.no_grad():  # they must serve a later training step
                self._codes[spec] = cast()
            self.casts += 1
        return self._codes[spec]

    def _valid(self, weights: tuple[Tensor, ...]) -> bool:
        return (
            bool(self._sources)
            and all(caching.same_source(s, w) for s, w in zip(self._sources, weights, strict=True))
            and self._stamp == self._stamps(weights)
        )

    def _stamps(self, weights: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
        return [cache._stamp_of(w) for cache, w in zip(self._caches, weights, strict=True)]


def _cast(weights: tuple[Tensor, ...], spec: CastSpec, backend: Backend, contract: int) -> Quantized:
    return join([_codes(w, spec, backend, contract) for w in weights], contract)


def _codes(weight: Tensor, spec: CastSpec, backend: Backend, contract: int) -> Quantized:
    gathered = weight.codes(spec) if isinstance(weight, Fp8Weight) else None
    return backend.quantize(WeightSlice().of(weight), spec, contract) if gathered is None else gathered


def join(parts: Sequence[Quantized], contract: int) -> Quantized:
    """Quantized matrices of as many columns one below the other, laid out for a GEMM that contracts ``contract``.

    The rows of all but the last must be multiples of the block's rows.
    """
    spec, device = parts[0].spec, parts[0].data.device
    rows, cols = sum(q.data.shape[0] for q in parts), parts[0].data.shape[1]
    free, contracted = layout.padded_sizes(rows, cols, spec, contract)
    _, data = layout.codes_buffer(rows, cols, spec, contract, device, zero=free * contracted != rows * cols)
    _stack(data.view(torch.uint8), [q.data.view(torch.uint8) for q in parts])
    if spec.scale == "e8m0":
        scale = torch.cat([q.scale.view(torch.uint8) for q in parts]).view(E8M0)
    else:
        scale = layout.scale_buffer(rows, cols, spec, contract, device)
        _stack(scale, [q.scale for q in parts])
    return Quantized(data, scale, spec)


def _stack(whole: Tensor, parts: Sequence[Tensor]) -> None:
    ends = accumulate((p.shape[0] for p in parts), initial=0)
    for (first, last), part in zip(pairwise(ends), parts, strict=True):
        whole[first:last].copy_(part)
