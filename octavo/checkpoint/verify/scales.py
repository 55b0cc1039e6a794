"""Checks the layout of FP8 weights by headers: each has scales with the right name, grid and dtype.

`octavo.models.folder.quantization` has the table of methods, names and grids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.base.model_families import trains_on
from octavo.checkpoint.stock_model import Linear, StockModel
from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers
from octavo.checkpoint.verify.names import scale_of
from octavo.models import describe
from octavo.models.folder.quantization import Quantization

_OTHER = {"_scale_inv": "_scale", "_scale": "_scale_inv"}
_METHOD = {"_scale_inv": "fp8", "_scale": "compressed-tensors"}
_SCALE_DTYPES = ("F32", "BF16")


@dataclass(frozen=True)
class Pair:
    """FP8 codes and their scales. `block` is the (rows, columns) that share a scale; -1 means the whole side."""

    weight: FileTensor
    scale: FileTensor
    block: tuple[int, int]

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales that follows from the block, with experts as the first dimension."""
        lead, (n, k) = self.weight.shape[:-2], self.weight.shape[-2:]
        r, c = self.block
        return (*lead, 1 if r == -1 else -(-n // r), 1 if c == -1 else -(-k // c))


def pair_weights_and_scales(headers: Headers, q: Quantization | None, findings: Findings) -> list[Pair]:
    """Return every FP8 weight with its scales, and report missing or wrong scales and scales of another layout.

    Without a quantization_config (`q` None) the layout is guessed from the scales, so that values can still be checked.
    """
    pairs = []
    for tensor in headers.tensors.values():
        if tensor.dtype != "F8_E4M3" or scale_of(tensor.name) is not None:
            continue
        if (scale := _scales_of(tensor, headers, q, findings)) and (block := _find_block(tensor, scale, q, findings)):
            pairs.append(Pair(tensor, scale, block))
    _check_dangling(headers, q, findings)
    return pairs


def _scales_of(tensor: FileTensor, headers: Headers, q: Quantization | None, findings: Findings) -> FileTensor | None:
    by_suffix = {suffix: headers.tensors.get(tensor.name + suffix) for suffix in _OTHER}
    if q is None:
        return by_suffix["_scale_inv"] or by_suffix["_scale"]
    right, wrong = q.scale_suffix, _OTHER[q.scale_suffix]
    scale, stray = by_suffix[right], by_suffix[wrong]
    if scale is None and stray is not None:
        findings.fail(
            "scale-name", stray, weight=tensor, q=q, right=tensor.name + right, wrong=wrong, method=_METHOD[wrong]
        )
        return stray
    if scale is None:
        findings.fail("scale-missing", tensor, right=tensor.name + right)
        return None
    if stray is not None:
        findings.fail("scale-both", stray, weight=tensor, scale=scale, q=q)
    return scale


def _find_block(
    tensor: FileTensor, scale: FileTensor, q: Quantization | None, findings: Findings
) -> tuple[int, int] | None:
    """Return the block of the config if the scales fit it, else one that fits the scales; None if none does."""
    _check_scale_dtype(scale, q, findings)
    if len(tensor.shape) < 2:
        findings.fail("fp8-elsewhere/vector", tensor, dimensions=len(tensor.shape))
        return None
    lead, (n, k) = tensor.shape[:-2], tensor.shape[-2:]
    shape = scale.shape
    if q is None:
        return _guess_block(n, k, shape[len(lead) :])
    wanted = (*lead, *q.grid(n, k))
    if shape == wanted or (q.kind == "tensor" and not lead and shape in {(1,), ()}):
        return q.spec.block
    guessed = _guess_block(n, k, shape[len(lead) :])
    what = "x".join(str(side) for side in q.block) if q.block else q.kind
    of, grid = list(tensor.shape), list(wanted)
    if shape == (*lead, *wanted[:-3:-1]):
        findings.fail("scale-transposed", scale, weight=tensor, of=of, what=what, wanted=grid)
        return None
    findings.fail("scale-grid", scale, weight=tensor, of=of, what=what, wanted=grid, fits=_describe_fit(guessed))
    return guessed


def _describe_fit(block: tuple[int, int] | None) -> str:
    if block is None:
        return ""
    named = {(1, -1): "one per row (strategy channel)", (-1, -1): "one per tensor"}
    return f" (it fits {named.get(block) or f'blocks of {block[0]}x{block[1]}'})"


def _guess_block(n: int, k: int, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the block that a grid of scales implies, trying common ones first; None if no block fits."""
    if tuple(shape) in {(), (1,)}:
        return (-1, -1)
    if len(shape) == 1 and shape[0] == n:
        return (1, -1)
    if len(shape) != 2:
        return None
    for r, c in ((128, 128), (64, 64), (32, 32), (256, 256), (1, 128), (1, 32)):
        if (-(-n // r), -(-k // c)) == tuple(shape):
            return (r, c)
    if tuple(shape) == (n, 1):
        return (1, -1)
    return (-1, -1) if tuple(shape) == (1, 1) else None


def _check_scale_dtype(scale: FileTensor, q: Quantization | None, findings: Findings) -> None:
    powers = q is not None and q.scale_format == "ue8m0"
    if scale.dtype in _SCALE_DTYPES or (scale.dtype == "F8_E8M0" and powers):
        return
    case = {"F8_E8M0": "/no-scale-fmt", "F16": "/half"}.get(scale.dtype, "")
    findings.fail(f"scale-dtype{case}", scale)


def _check_dangling(headers: Headers, q: Quantization | None, findings: Findings) -> None:
    static = q is not None and q.activations == "static"
    for name, tensor in headers.tensors.items():
        weight = scale_of(name)
        if weight is None:
            wanted = f"{name.removesuffix('.weight')}.input_scale"
            if static and tensor.fp8 and wanted not in headers.tensors:
                findings.fail("scale-missing/input", tensor, wanted=wanted)
        elif not weight:
            continue  # scales of a KV cache: see `cache_scales`
        elif name.endswith(".input_scale"):
            if q is not None and not static:
                findings.fail("scale-dangling/input", tensor, q=q)
        elif (scaled := headers.tensors.get(weight)) is None or not scaled.fp8:
            case = "/value" if scaled is not None else ""
            findings.fail(f"scale-dangling{case}", tensor, weight=weight, scaled=scaled)


def check_fp8_places(known: Mapping[str, FileTensor], stock: StockModel, findings: Findings) -> None:
    """Report FP8 where no loader dequantizes (embeddings, norms, routers), and in lm_head, which servers do not
    quantize."""
    for name, tensor in known.items():
        if not tensor.fp8:
            continue
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf == "gate" or "router" in leaf:
            kind = "router"
        elif name in stock.stacked:
            kind = "stacked"
        elif name not in stock.linears:
            kind = "fp8-elsewhere"
        elif name == stock.head:
            kind = "head"
        else:
            continue
        findings.fail(kind, tensor, single=next(iter(stock.stacked.get(name, ())), ""))


def check_audio_fp8(known: Mapping[str, FileTensor], stock: StockModel, findings: Findings) -> None:
    """Warn about FP8 in audio components, which servers run with transformers' modules in high precision; each once."""
    if not trains_on(stock.model.config.model_type, "sound"):
        return
    family = describe(stock.model)
    parts = {name: family.component_of(layer.module) for name, layer in stock.linears.items()}
    for component in ("audio_encoder", "audio_projector"):
        tensor = next((tensor for name, tensor in known.items() if tensor.fp8 and parts.get(name) == component), None)
        if tensor is not None:
            findings.warn("of-sound", tensor, component=component)


def check_blocks(
    known: Mapping[str, FileTensor], stock: StockModel, q: Quantization | None, findings: Findings
) -> None:
    """Report shapes that servers' block kernels refuse, and fused matrices whose parts are not all FP8 or all not."""
    for group in stock.fused_groups:
        _check_one_kind(group, known, findings)
    if q is None or q.block is None:
        return
    r, c = q.block
    inner = {layer.disk for group in stock.fused_groups for layer in (group if group[0].expert else group[:-1])}
    for name, tensor in known.items():
        layer = stock.linears.get(name)
        if not tensor.fp8 or layer is None:
            continue
        n, k = tensor.shape[-2:]
        if k % c:
            findings.fail("block-k", tensor, k=k, c=c)
        if n % r and layer.disk in inner:
            findings.fail("block-n", tensor, n=n, r=r)
        elif n % r and n > r and q.method == "fp8":  # compressed-tensors pads the last block
            findings.warn("block-ragged", tensor, n=n, r=r, rows=n // -(-n // r))


def _check_one_kind(group: tuple[Linear, ...], known: Mapping[str, FileTensor], findings: Findings) -> None:
    tensor = [known.get(f"{layer.disk}.weight") for layer in group]
    weights = [h for h in tensor if h is not None]
    codes = [h for h in weights if h.fp8]
    if codes and len(codes) < len(weights):
        other = next(h for h in weights if not h.fp8)
        findings.fail("fused-mixed", codes[0].file, codes[0].name, other=other)
