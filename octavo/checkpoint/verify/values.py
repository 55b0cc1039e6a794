"""Scans values: NaN, infinities, zero blocks, bad scales, and codes or scales that make no sense together.

Tensors are read in pieces of rows, so that memory stays at a few tens of MB for any model. Codes are compared as bytes:
without the sign bit the codes of E4M3 are ordered by magnitude, 0x7F is NaN and 0x7E is 448.

What can be detected without a reference, and how certain it is:

    scales all 1            a weight whose largest values are 224 to 448: certain, scales were lost
    values on E4M3's grid   a BF16 weight with only E4M3 values, up to 448: certain, codes without scales
    peaks above 1000        and below 100 with 1 / scale: a suspicion that reciprocals are stored
    peaks 300 times below   the median of the other layers, and ordinary with the scale's root: a suspicion that the
                            scale was applied twice
    codes below 56          a scale from a block's amax makes its largest code 224 or more: a suspicion

The peak of a block is its largest |code| * scale; the peak of a tensor is the median over its blocks. `--against`
confirms or refutes suspicions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers
from octavo.checkpoint.verify.names import scale_of
from octavo.checkpoint.verify.scales import Pair
from octavo.fp8.arithmetic import E4M3, NAN_CODE, decode

Progress = Callable[[int, int, str], None]

_FILLED = 56.0
_TALL, _PLAIN = 1e3, 1e2
_SMALL, _BELOW = 1e-3, 300.0
_CODES = 16.0  # E4M3 values of a weight reach this only where they are codes of a scaled cast
_MANY = 16  # distinct magnitudes below which a weight may lie on the grid by construction


@dataclass(frozen=True)
class _ScaleStats:
    """Medians over the non-zero blocks of an FP8 weight.

    code     largest code
    peak     largest code times the scale
    inverse  peak if the scale were its reciprocal
    root     peak if the scale were its square root
    ones     True if all scales are 1
    """

    pair: Pair
    code: float
    peak: float
    inverse: float
    root: float
    ones: bool


def scan(
    known: Mapping[str, FileTensor],
    pairs: Sequence[Pair],
    stock: StockModel | None,
    findings: Findings,
    progress: Progress | None,
) -> None:
    """Check every value. Without `stock` the model is unknown, and checks that need a weight's role are skipped."""
    total = sum(tensor.size for tensor in known.values())
    done = 0
    by_name = {pair.weight.name: pair for pair in pairs}
    scanned: list[_ScaleStats] = []
    for name, tensor in known.items():
        if progress is not None:
            progress(done, total, tensor.name)
        if tensor.dtype == "F8_E4M3":
            if stats := _scan_codes(tensor, by_name.get(tensor.name), findings):
                scanned.append(stats)
        elif tensor.dtype in ("F32", "BF16", "F16", "F64"):
            _scan_values(tensor, stock is not None and name in {**stock.linears, **stock.stacked}, findings)
        done += tensor.size
    if progress is not None:
        progress(total, total, "")
    _check_peaks(scanned, findings)
    if stock is not None:
        _check_shared_scales(by_name, known, stock, findings)


def scales_fp32(scale: FileTensor) -> Tensor:
    """Read the scales of a weight in fp32; uint8 scales are E8M0 exponents."""
    raw = scale.read()
    return (raw.view(torch.float8_e8m0fnu) if raw.dtype is torch.uint8 else raw).float()


def scan_inputs(headers: Headers, findings: Findings) -> None:
    """Check static scales of activations. They are independent of the values of the weights."""
    for name, tensor in headers.tensors.items():
        if not name.endswith(".input_scale") or tensor.dtype not in ("F32", "BF16", "F16"):
            continue
        values = tensor.read().float()
        if not bool(values.isfinite().all()):
            findings.fail("scale-nan", tensor, text="is NaN or infinite: calibrate it again.")
        elif not bool((values > 0).all()):
            kind = "negative" if bool((values < 0).any()) else "zero"
            text = f"is {kind}, but a scale of activations must be positive; calibrate it again."
            findings.fail(f"scale-{kind}", tensor, text=text)


def split_experts(tensor: FileTensor) -> list[FileTensor]:
    """Return the matrices of a weight: itself, or each expert of a stack."""
    if len(tensor.shape) < 3:
        return [tensor]
    count, size = tensor.shape[0], tensor.size // max(1, tensor.shape[0])
    return [
        FileTensor(tensor.name, tensor.path, tensor.dtype, tensor.shape[1:], tensor.start + i * size, size)
        for i in range(count)
    ]


def _scan_codes(tensor: FileTensor, pair: Pair | None, findings: Findings) -> _ScaleStats | None:
    peaks, nans = [], 0
    block = (1, -1) if pair is None else pair.block
    for matrix in split_experts(tensor):
        step = block[0] if block[0] > 0 else 1
        rows = []
        for _, piece in matrix.rows(step):
            magnitude = piece.view(torch.uint8) & NAN_CODE
            nans += int((magnitude == NAN_CODE).sum())
            # NaN counts as the smallest code, so that a block of NaN is not reported as a block of zeros.
            rows.append(_amax(magnitude.masked_fill_(magnitude == NAN_CODE, 1), block))
        if rows:
            grid = torch.cat(rows)
            peaks.append(grid.amax(0, keepdim=True) if block[0] == -1 else grid)
    if nans:
        findings.fail("nan-codes", tensor, nans=nans)
    if pair is None or not peaks:
        return None
    codes = torch.stack(peaks) if len(tensor.shape) > 2 else peaks[0]
    scale = scales_fp32(pair.scale)
    if scale.numel() != codes.numel():
        return None  # another grid, which `scales` reports
    scale = scale.reshape(codes.shape)
    has_bad_scales = _check_scale_values(pair, scale, codes, findings)
    usable = (codes > 0) & (scale > 0) & scale.isfinite()
    zero = int((codes == 0).sum())
    if zero and not has_bad_scales:
        where = torch.nonzero(codes == 0)[0].tolist()
        findings.warn("zero-block", tensor, zero=zero, blocks=codes.numel(), where=where)
    if not bool(usable.any()):
        return None
    value = decode(codes[usable].view(E4M3.dtype))
    s = scale[usable]
    code, peak, inverse, root = (float(x.median()) for x in (value, value * s, value / s, value * s.sqrt()))
    return _ScaleStats(pair, code, peak, inverse, root, bool((s == 1).all()))


def _amax(magnitude: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of each block of a piece, uint8 [row blocks, column blocks]. Ragged edges are padded
    with 0."""
    m, k = magnitude.shape
    c = k if block[1] == -1 else block[1]
    r = m if block[0] == -1 else block[0]
    right, below = -k % c, -m % r
    if right or below:
        magnitude = torch.nn.functional.pad(magnitude, (0, right, 0, below))
    m, k = magnitude.shape
    return magnitude.view(m // r, r, k // c, c).amax((1, 3))


def _check_scale_values(pair: Pair, scale: Tensor, codes: Tensor, findings: Findings) -> bool:
    """Report scales that are not finite and positive. Returns True if there are any."""
    has_bad_scales = False
    for kind, mask, what in (
        ("scale-nan", ~scale.isfinite(), "NaN or infinite"),
        ("scale-zero", scale == 0, "zero"),
        ("scale-negative", scale < 0, "negative"),
    ):
        if count := int(mask.sum()):
            has_bad_scales = True
            where = torch.nonzero(mask)[0].tolist()
            zeros = int((mask & (codes == 0)).sum())
            note = f" ({zeros} of them over codes that are all zero, which become NaN when requantized)"
            text = f"has {count} scales that are {what}, the first at {where}{note if zeros else ''}; a scale must be "
            findings.fail(kind, pair.scale, text=f"{text}positive, and 1 for a block of zeros: export again.")
    return has_bad_scales


def _scan_values(tensor: FileTensor, linear: bool, findings: Findings) -> None:
    bad, peak, on_grid, distinct = 0, 0.0, linear and tensor.dtype != "F64", 0
    for _, piece in tensor.rows():
        finite = piece.isfinite()
        if not bool(finite.all()):
            bad += int((~finite).sum())
            piece = piece.masked_fill(~finite, 0)
        peak = max(peak, float(piece.abs().max()))
        if on_grid:
            head = piece.flatten()[:4096].float()
            on_grid = bool((head.to(E4M3.dtype).float() == head).all())
            distinct = max(distinct, head.abs().unique().numel())
        if on_grid:
            on_grid = bool((piece.to(E4M3.dtype).to(piece.dtype) == piece).all())
    if bad:
        findings.fail("nan-values", tensor, bad=bad)
    if not linear or not tensor.size:
        return
    if peak == 0:
        findings.warn("zero-weight", tensor)
    elif on_grid and peak >= _CODES and peak <= E4M3.max:
        findings.fail("codes-as-values", tensor, peak=peak)
    elif on_grid and distinct >= _MANY:
        findings.warn("cast-through-fp8", tensor, peak=peak)


def _check_peaks(scanned: Sequence[_ScaleStats], findings: Findings) -> None:
    peaks = sorted(s.peak for s in scanned)
    for seen in scanned:
        weight, scale = seen.pair.weight, seen.pair.scale
        others = sorted(peaks[: (i := peaks.index(seen.peak))] + peaks[i + 1 :]) or [math.nan]
        peers = others[len(others) // 2]
        if seen.ones:
            how = "plain values cast to FP8" if seen.code < _FILLED else "codes of a scaled cast"
            findings.fail("unscaled", weight, seen=seen, how=how)
        elif seen.peak > _TALL and seen.inverse < _PLAIN:
            findings.fail("reciprocal", scale, weight=weight, seen=seen)
        elif seen.peak > _TALL:
            findings.warn("magnitude", weight, seen=seen)
        elif seen.peak < _SMALL and _SMALL < seen.root < _PLAIN:
            add = findings.fail if seen.peak < peers / _BELOW else findings.warn
            add("double-scaled", weight, seen=seen, peers=peers)
        elif seen.code < _FILLED and seen.pair.block != (-1, -1):
            findings.warn("unfilled", weight, seen=seen)


def _check_shared_scales(
    pairs: Mapping[str, Pair], known: Mapping[str, FileTensor], stock: StockModel, findings: Findings
) -> None:
    """Warn about per-tensor scales that layers of a fused GEMM do not share: servers quantize them again."""
    for group in stock.fused_groups:
        tensor = [known.get(f"{layer.disk}.weight") for layer in group]
        fused = [pairs[h.name] for h in tensor if h is not None and h.name in pairs]
        if len(fused) < 2 or any(pair.block != (-1, -1) for pair in fused):
            continue
        scales = [float(scales_fp32(pair.scale).flatten()[0]) for pair in fused]
        if len(set(scales)) > 1:
            leaves = [layer.disk.rpartition(".")[2] for layer in group]
            names = ", ".join(f"{leaf} {scale:.4g}" for leaf, scale in zip(leaves, scales, strict=True))
            findings.warn("scale-unshared", fused[0].scale, names=names)


def weights_by_name(headers: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Return all weights by their names on disk, for a scan without a model."""
    return {name: tensor for name, tensor in headers.items() if scale_of(name) is None}
