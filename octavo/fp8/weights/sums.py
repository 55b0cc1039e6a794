"""Checksums of weights and of their cached codes, to detect changes.

A rollout and the update that learns from it must multiply by the same bits. These are codes from a layer's cache, or
casts of its parameter: if neither changed, both multiplied by the same bits.

The checksum of a tensor is the sum of its words w_i times 2 i + 1, modulo 2^64: it changes with any one word and with
the order of words, except by chance. It does not protect against deliberate changes.

:func:`stale_codes` compares codes with their weight: a write through ``.data`` changes neither a version nor an
address, and the layer continues with the codes of the old weight (:mod:`octavo.fp8.weights.cache`). It casts a sample
of rows again with the existing scales; an equal weight gives equal codes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic.cast import CastSpec, Quantized, quantize_with_scale
from octavo.fp8.weights.cache import CachesWeights, masters
from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import local_of, reshard

_WORDS, _WORDS_ON_CPU = 1 << 22, 1 << 16
"""Words of 8 bytes per operation: few kernels on a GPU, and a size that fits in the cache of a CPU."""
_BASE = 6364136223846793005
"""An odd number (Knuth's for LCGs), whose powers are the factors of these partial sums."""

_SAMPLE = 1 << 15
"""Elements of a weight that are cast again to find stale codes; at least 4 rows."""

_MIN_MAGNITUDE = 2.0**-100
"""Magnitudes above this never become zero in a cast with their own scale, for any recipe."""

WeightSums = Mapping[str, int]


@torch.no_grad()
def weight_sums(model: nn.Module) -> WeightSums:
    """Return checksums of this rank's part of all parameters of a model and of the FP8 codes in their layers' caches.
    Reshards parameters that a forward left gathered. Waits for the device once."""
    reshard(model)
    named = dict(_named_tensors(model))
    each = [_checksum(tensor) for tensor in named.values()]
    sums = [value.to(each[0].device) for value in each]  # a weight may be in host memory
    return dict(zip(named, torch.stack(sums).tolist() if sums else (), strict=True))


def changed_weights(before: WeightSums, now: WeightSums) -> list[str]:
    """Return the names of the tensors that differ, in the model's order. Codes are compared only if both have them,
    because codes that were cast or dropped in between depend on their parameter."""
    return [name for name, value in now.items() if before.get(name, value) != value]


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            weight, path = local_of(parameter), f"{name}.{key}" if name else key
            if isinstance(weight, Fp8Weight):
                for number, q in enumerate(weight.frozen.codes if weight.frozen is not None else ()):
                    yield f"{path} (its codes{'' if not number else f' {number + 1}'})", q.data
                    yield f"{path} (the scales of its codes{'' if not number else f' {number + 1}'})", q.scale
            elif weight is not None:
                yield path, weight
        if isinstance(module, CachesWeights):
            yield from _cached_tensors(name, module)


def _cached_tensors(name: str, module: CachesWeights) -> Iterator[tuple[str, Tensor]]:
    for key, cache in module._weight_caches().items():
        for kind, codes in (("", cache._codes), (", for dgrad", cache._for_dgrad)):
            for (part, spec), q in codes.items():
                which = "" if part.slot is None else f" of slot {part.slot}"
                which += "" if part.rows is None else " of rows {} to {}".format(*part.rows)
                yield f"{name}.{key} (its codes in {spec}{which}{kind})", q.data
                yield f"{name}.{key} (the scales of its codes in {spec}{which}{kind})", q.scale
    for number, held in enumerate(masters(module)):
        yield f"{name} (the master of its FP8 weight {number})", local_of(held.tensor)
        for kind, tensors in ({} if held.rows is None else held.rows._asdict()).items():
            for cast, tensor in enumerate(tensors):
                yield f"{name} ({kind} of the rows of its FP8 weight {number}, cast {cast})", tensor


@torch.no_grad()
def stale_codes(model: nn.Module, draw: int = 0) -> list[str]:
    """Return the names of the FP8 layers whose next GEMM would use codes that differ from their current weight.

    Codes that an optimizer step, a version or an address shows to be old are cast again at the next use and are not
    stale. ``draw`` selects the sampled rows. Waits for the device once. Shards of FP8 weights between steps
    (``param=True`` under FSDP2) are not checked: writes to them are detected, also through ``.data``.

    Call :func:`octavo.fp8.invalidate` after such writes.
    """
    marks: list[tuple[str, Tensor]] = []
    for name, module in model.named_modules():
        if not isinstance(module, CachesWeights):
            continue
        for key, cache in module._weight_caches().items():
            weight = module._parameters.get(key)
            if weight is None or not cache.is_valid(weight):
                continue
            where = f"{name}.{key}" if key != "weight" else name or key
            marks += [(where, _is_stale(part.of(weight), q, draw)) for (part, _), q in cache._codes.items()]
    device = marks[0][1].device if marks else None
    differ = torch.stack([mark.to(device) for _, mark in marks]).tolist() if marks else ()
    return list(dict.fromkeys(name for (name, _), stale in zip(marks, differ, strict=True) if stale))


def stale_codes_message(names: Sequence[str]) -> str:
    """Return an error message for the result of :func:`stale_codes`, with the fix."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"FP8 GEMMs of {names[0]}{others} multiply by codes of a previous weight: it was written through .data (an "
        "average, a merge, NumPy) and no optimizer step followed. Call octavo.fp8.invalidate(model) after such writes, "
        "or write to the parameter itself under torch.no_grad()."
    )


def _is_stale(matrix: Tensor, q: Quantized, draw: int) -> Tensor:
    """Return True, as a 0-d bool, if the codes of a sample of rows of ``matrix`` [N, K] or [E, N, K] differ from ``q``.
    Blocks whose scale is NaN are skipped: there one NaN or infinity determines the codes of all values."""
    *experts, n, k = matrix.shape
    rows = n * (experts[0] if experts else 1)
    count = min(rows, max(4, _SAMPLE // max(k, 1)))
    index = (torch.arange(count, device=matrix.device) * rows // max(count, 1) + draw) % max(rows, 1)
    at, high, wide = (index // n, index % n) if experts else (index,), *q.spec.block
    block = torch.zeros_like(at[-1]) if high == -1 else at[-1] // high
    scale = q.scale.float()[(*at[:-1], block)]
    spec = CastSpec(q.spec.format, (1, wide), q.spec.scale)
    rows_now = matrix[at]
    fresh = quantize_with_scale(rows_now, scale, spec).data.view(torch.uint8)
    held = q.data.view(torch.uint8)[at]
    bad = scale.isnan()
    known = ~_expand_mask(bad, wide, k)
    zeros = ((fresh | held) & 0x7F) == 0  # of either sign
    # A block of zeros has the scale 1. Small values written into it would be zeros again under this scale, which a new
    # cast would not make them. (Other blocks have the scale 1 only if their largest value is in the hundreds.)
    lost = zeros & _expand_mask(scale == 1, wide, k) & (rows_now.abs() > _MIN_MAGNITUDE)
    return ((fresh != held) & known & ~zeros | lost).any()


def _expand_mask(of_blocks: Tensor, wide: int, k: int) -> Tensor:
    """Expand a mask of blocks to a mask of columns."""
    return of_blocks if wide == -1 else of_blocks.repeat_interleave(wide, dim=1)[:, :k]


def _checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor, 0-d int64 on its device."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned = len(flat) % 8 == 0 and flat.storage_offset() % 8 == 0
    words = flat.view(torch.int64) if aligned else flat.to(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = _WORDS_ON_CPU if flat.device.type == "cpu" else _WORDS
    factors = torch.arange(1, 2 * max(1, min(size, len(words))), 2, device=flat.device)
    for piece in words.split(size) if len(words) else ():
        total = total * _BASE + (piece * factors[: len(piece)]).sum()
    return total
