"""Frozen FP8 weights: only codes and scales, one byte per parameter.

LoRA trains with them as its base, and FP8 checkpoints contain them. A frozen weight is an
:class:`~octavo.fp8.weights.fp8_tensor.Fp8Weight` that consists permanently of codes: it has the shape and the dtype of
the values that it represents, requires no gradient, and keeps its codes unchanged, bit for bit. GEMMs multiply by the
codes; other code gets the values ``code * scale``, dequantized temporarily. So a stock ``nn.Linear`` with a frozen
weight computes in high precision, and :func:`octavo.fp8.apply` converts it to an FP8 layer like any other.

=======  ==============  ==========  ==========================================================
kind     block of a cast recipe      scales of a weight [N, K]
=======  ==============  ==========  ==========================================================
row      (1, -1)         rowwise     [N, 1], one per row (output channel)
block    (128, 128)      blockwise   [ceil(N / 128), ceil(K / 128)], the layout of DeepSeek's checkpoints
tensor   (-1, -1)        tensorwise  [1, 1]
=======  ==============  ==========  ==========================================================

Experts are [E, N, K], and their scales have a leading dimension E. Scales are dequantization multipliers, value = code
* scale, in fp32, and need not be powers of two: scales of a checkpoint are kept unchanged.

``model.to(device)``, copies, pickles and FSDP2 keep codes and scales; another dtype, a gradient and a write are
refused. ``model.state_dict()`` has the frozen weights themselves, which read as values and load, code for code, into a
model with the same frozen weights; files contain :func:`octavo.fp8.fp8_state_dict`, plain codes and scales by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.base.recipe_specs import FROZEN_BLOCKS, NAME_OF_KIND, SPECS
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.layout import grid_shape
from octavo.fp8.kernels.registry import get
from octavo.fp8.weights.fp8_codes import Codes, Source
from octavo.fp8.weights.fp8_rows import Need, Shards, assemble_scales, gather, shard_mesh
from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import is_whole, local_of, reshard

FROZEN = {kind: CastSpec("e4m3", block, SPECS[NAME_OF_KIND[kind]].scale) for kind, block in FROZEN_BLOCKS.items()}
"""Kind -> the cast of its codes: the cast of the weight in the forward of the matching recipe."""


def frozen_from_codes(
    codes: Tensor, scale: Tensor, spec: CastSpec, dtype: torch.dtype = torch.bfloat16, transposed: bool = False
) -> nn.Parameter:
    """Create a frozen weight from existing codes, without a copy.

    Args:
        codes: float8_e4m3fn, [N, K], or [E, N, K] for experts, in the orientation of their GEMM.
        scale: fp32 dequantization multipliers, one for each block of ``spec``: [n, k] or [E, n, k].
        spec: the cast of the codes; its ``scale`` may be "pow2" only if every scale is a power of two (some GEMMs need
            it).
        dtype: the dtype of the values that the weight represents.
        transposed: True if the module stores the parameter as [E, K, N] (experts of some families).

    Raises ValueError for an unsupported dtype, or a grid of scales that does not match the shape and block.
    """
    if codes.dtype is not spec.fmt.dtype or codes.dim() not in (2, 3):
        raise ValueError(
            f"A frozen weight takes codes of {spec.fmt.dtype} with two or three dimensions; found {codes.dtype} of "
            f"shape {list(codes.shape)}."
        )
    wanted = (*codes.shape[:-2], *grid_shape(codes.shape[-2], codes.shape[-1], spec))
    if tuple(scale.shape) != wanted or scale.dtype is not torch.float32:
        raise ValueError(
            f"Codes of shape {list(codes.shape)} in blocks of {spec.block} have scales of shape {list(wanted)} in "
            f"torch.float32; found {list(scale.shape)} in {scale.dtype}."
        )
    if transposed and codes.dim() == 2:
        raise ValueError(f"Only experts are stored transposed; found codes of two dimensions, {list(codes.shape)}.")
    shape = codes.shape if not transposed else torch.Size((*codes.shape[:-2], codes.shape[-1], codes.shape[-2]))
    source = Source((Need(spec, get("reference"), 1, transposed),), shape)
    frozen = Codes([Quantized(codes.detach(), scale.detach(), spec)], source, transposed, frozen=True)
    return nn.Parameter(Fp8Weight.from_codes(frozen, shape, dtype, codes.device), requires_grad=False)


def frozen_rows(
    codes: Tensor, scale: Tensor, spec: CastSpec, dtype: torch.dtype, transposed: bool, whole: torch.Size, first: int
) -> Fp8Weight:
    """Create one rank's rows of a frozen weight from existing codes.

    Args:
        codes: [n, K], or [e, N, K] for experts, possibly none: the rows (or experts) from ``first`` on.
        scale: the scales of all blocks that these rows touch, as in :func:`frozen_from_codes`.
        whole: the shape of the whole weight as its module stores it.
    """
    source = Source((Need(spec, get("reference"), 1, transposed),), whole)
    height = spec.block[0]
    lead = 0 if codes.dim() == 3 else first if height == -1 else first % height
    local_codes = [Quantized(codes.detach(), scale.detach(), spec)] if codes.shape[0] else []
    shard = Codes(local_codes, source, transposed, frozen=True, lead=lead if local_codes else 0, shard=True)
    return Fp8Weight.from_codes(shard, (codes.shape[0], *whole[1:]), dtype, codes.device)


def freeze_weight(
    values: Tensor, kind: str | CastSpec = "block", dtype: torch.dtype | None = None, transposed: bool = False
) -> nn.Parameter:
    """Quantize ``values`` [N, K] or [E, N, K] ([E, K, N] if ``transposed``) into a frozen weight.

    ``kind`` is row, block or tensor, or a cast. On the meta device the frozen weight has no codes, for planning. Raises
    ValueError for an unknown kind.
    """
    if not isinstance(kind, CastSpec) and kind not in FROZEN:
        raise ValueError(f"Unknown kind of frozen weights {kind!r}; use one of {', '.join(FROZEN)}.")
    spec = kind if isinstance(kind, CastSpec) else FROZEN[kind]
    if values.is_meta:
        matrix = values.mT if transposed else values
        codes = torch.empty(matrix.shape, dtype=spec.fmt.dtype, device="meta")
        scale = torch.empty((*matrix.shape[:-2], *grid_shape(matrix.shape[-2], matrix.shape[-1], spec)), device="meta")
        return frozen_from_codes(codes, scale, spec, dtype or values.dtype, transposed)
    q = Need(spec, get("reference"), 1, transposed).cast(values.detach())
    return frozen_from_codes(q.data, q.scale, spec, dtype or values.dtype, transposed)


def is_frozen(value: object) -> bool:
    """Return True for a frozen FP8 weight, or a DTensor of one."""
    return _frozen_codes(value) is not None


def _frozen_codes(value: object) -> Codes | None:
    """Return this rank's codes of a frozen weight; None for anything else."""
    local = local_of(value)
    return local.frozen if isinstance(local, Fp8Weight) else None


def codes_of_frozen(weight: Tensor) -> Quantized:
    """Return the codes and scales of a frozen weight without copying; for a sharded one, those of this rank's rows
    (empty on a rank without rows). Raises ValueError for other weights."""
    codes = _frozen_codes(weight)
    if codes is None:
        raise ValueError(f"{type(weight).__name__} of shape {list(weight.shape)} is not a frozen FP8 weight.")
    return codes.codes[0] if codes.codes else _empty_codes(codes, local_of(weight).device)


def codes_cast(weight: object) -> CastSpec | None:
    """Return the cast of the codes of a frozen weight, sharded or not; None for other weights."""
    codes = _frozen_codes(weight)
    return None if codes is None else codes.need.spec


def frozen_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and frozen FP8 weights of a model, each weight once."""
    return ((name, p) for name, p in model.named_parameters() if is_frozen(p))


def frozen_bytes(model: nn.Module) -> int:
    """Return the bytes of the codes and scales of all frozen weights of a model on this rank."""
    codes = [codes_of_frozen(weight) for _, weight in frozen_weights(model)]
    return sum(t.numel() * t.element_size() for q in codes for t in (q.data, q.scale))


def kind_of(spec: CastSpec) -> str:
    """Return row, block or tensor; for other blocks, the cast as text."""
    return next((kind for kind, s in FROZEN.items() if (s.format, s.block) == (spec.format, spec.block)), str(spec))


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Return a SHA-256 of each frozen weight by its name: equal before and after a training that did not change codes
    or scales.

    It is the same on any number of ranks; if the model is sharded, all ranks must call it. Each rank hashes its own
    rows, and the digest of a weight covers the digests of its rows (or experts), in order, and all scales. Adapters do
    not change names: ``X.base_layer.weight`` is listed as ``X.weight``.
    """
    reshard(model)
    return {name.replace(".base_layer.", "."): _digest(weight) for name, weight in frozen_weights(model)}


def _digest(weight: Any) -> str:
    q, source = codes_of_frozen(weight), local_of(weight).source
    rows = q.data.detach().contiguous().view(torch.uint8).cpu().numpy()
    digests = b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows)
    scales = q.scale.detach()
    if not is_whole(weight):
        digests, scales = _gather_digests(weight, digests)
    whole = hashlib.sha256(f"{q.spec.format} {q.spec.block} {list(source.whole)}".encode())
    whole.update(digests)
    whole.update(scales.contiguous().cpu().numpy().tobytes())
    return whole.hexdigest()


def _gather_digests(weight: Any, digests_here: bytes) -> tuple[bytes, Tensor]:
    """Return the digests of all rows, and all scales, of a weight whose rows are on several ranks. Collective call."""
    mesh, local = shard_mesh(weight), local_of(weight)
    (need,), whole, _ = local.source
    shards = Shards(whole[0], mesh.size(), mesh.get_local_rank())
    local_digests = torch.zeros(shards.chunk, 32, dtype=torch.uint8)
    if digests_here:
        digest_bytes = torch.frombuffer(bytearray(digests_here), dtype=torch.uint8)
        local_digests[: len(digests_here) // 32] = digest_bytes.view(-1, 32)
    scales = local.frozen.shard_rows(shards, local.device).scales[0]
    digests, scales = (gather(part.to(local.device), mesh) for part in (local_digests, scales))
    return digests[: whole[0]].cpu().numpy().tobytes(), assemble_scales(scales, need, whole, shards, None)


def _empty_codes(frozen: Codes, device: torch.device) -> Quantized:
    """Return the codes and scales of a weight without rows."""
    (need,), whole, _ = frozen.source
    n, k = (whole[-1], whole[-2]) if need.transposed else (whole[-2], whole[-1])
    lead, grid = ((0,), grid_shape(n, k, need.spec)) if len(whole) == 3 else ((), (0, grid_shape(1, k, need.spec)[1]))
    codes = torch.empty((*lead, n, k) if lead else (0, k), dtype=need.spec.fmt.dtype, device=device)
    return Quantized(codes, torch.empty((*lead, *grid), device=device), need.spec)


def dequantize_weights(model: nn.Module) -> nn.Module:
    """Replace every frozen weight by its dequantized values, in place, for instance before a change of dtype.

    Raises RuntimeError for a model that is sharded already, because FSDP2 has set up how it gathers.
    """
    dequantized: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if not is_frozen(parameter):
                continue
            if not isinstance(parameter, Fp8Weight):
                raise RuntimeError(
                    f"{path}.{name} is a frozen FP8 weight that is sharded already. Call fp8.dequantize_weights "
                    "before fully_shard."
                )
            if id(parameter) not in dequantized:  # tied weights stay tied
                dequantized[id(parameter)] = nn.Parameter(parameter.dequantize().contiguous(), requires_grad=False)
            module.__dict__.pop("_fp8_param", None)
            setattr(module, name, dequantized[id(parameter)])
    return model
