"""The layout of FP8 weights, from headers: each with its scales, under the right name, of the right grid and dtype.

`octavo.models.folder.quantization` has the table of methods, names and grids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.base.model_families import trains_on
from octavo.checkpoint.stock_model import Linear, Stock
from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import Headers, Held
from octavo.checkpoint.verify.names import scale_of
from octavo.models import describe
from octavo.models.folder.quantization import Quantization

_OTHER = {"_scale_inv": "_scale", "_scale": "_scale_inv"}
_METHOD = {"_scale_inv": "fp8", "_scale": "compressed-tensors"}
_SCALE_DTYPES = ("F32", "BF16")


@dataclass(frozen=True)
class Pair:
    """FP8 codes and their scales. block: (rows, columns) that share a scale, -1 for the whole side."""

    weight: Held
    scale: Held
    block: tuple[int, int]

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales as the block has it, experts in front."""
        lead, (n, k) = self.weight.shape[:-2], self.weight.shape[-2:]
        r, c = self.block
        return (*lead, 1 if r == -1 else -(-n // r), 1 if c == -1 else -(-k // c))


def pair_up(headers: Headers, q: Quantization | None, found: Findings) -> list[Pair]:
    """Every FP8 weight with its scales; reports those that have none, the wrong ones, or ones of another layout.

    Without a quantization_config the layout is guessed from the scales, so that values can be looked at all the same.
    """
    pairs = []
    for held in headers.tensors.values():
        if held.dtype != "F8_E4M3" or scale_of(held.name) is not None:
            continue
        if (scale := _scales_of(held, headers, q, found)) and (block := _block(held, scale, q, found)):
            pairs.append(Pair(held, scale, block))
    _dangling(headers, q, found)
    return pairs


def _scales_of(held: Held, headers: Headers, q: Quantization | None, found: Findings) -> Held | None:
    there = {suffix: headers.tensors.get(held.name + suffix) for suffix in _OTHER}
    if q is None:
        return there["_scale_inv"] or there["_scale"]
    right, wrong = q.scale_suffix, _OTHER[q.scale_suffix]
    scale, stray = there[right], there[wrong]
    if scale is None and stray is not None:
        found.fail("scale-name", stray, weight=held, q=q, right=held.name + right, wrong=wrong, method=_METHOD[wrong])
        return stray
    if scale is None:
        found.fail("scale-missing", held, right=held.name + right)
        return None
    if stray is not None:
        found.fail("scale-both", stray, weight=held, scale=scale, q=q)
    return scale


def _block(held: Held, scale: Held, q: Quantization | None, found: Findings) -> tuple[int, int] | None:
    """The block by the config where the scales fit it, else by the scales; None where no block fits them."""
    _dtype(scale, q, found)
    if len(held.shape) < 2:
        found.fail("fp8-elsewhere/vector", held, dimensions=len(held.shape))
        return None
    lead, (n, k) = held.shape[:-2], held.shape[-2:]
    shape = scale.shape
    if q is None:
        return _guess(n, k, shape[len(lead) :])
    wanted = (*lead, *q.grid(n, k))
    if shape == wanted or (q.kind == "tensor" and not lead and shape in {(1,), ()}):
        return q.spec.block
    guessed = _guess(n, k, shape[len(lead) :])
    what = "x".join(str(side) for side in q.block) if q.block else q.kind
    about = {"weight": held, "of": list(held.shape), "what": what, "wanted": list(wanted)}
    if shape == (*lead, *wanted[:-3:-1]):
        found.fail("scale-transposed", scale, **about)
        return None
    found.fail("scale-grid", scale, **about, fits=_as_if(guessed))
    return guessed


def _as_if(block: tuple[int, int] | None) -> str:
    if block is None:
        return ""
    named = {(1, -1): "one a row (strategy channel)", (-1, -1): "one a tensor"}
    return f" (it fits {named.get(block) or f'blocks of {block[0]}x{block[1]}'})"


def _guess(n: int, k: int, shape: Sequence[int]) -> tuple[int, int] | None:
    """The block that a grid of scales speaks of: usual ones before others."""
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


def _dtype(scale: Held, q: Quantization | None, found: Findings) -> None:
    powers = q is not None and q.scale_format == "ue8m0"
    if scale.dtype in _SCALE_DTYPES or (scale.dtype == "F8_E8M0" and powers):
        return
    case = {"F8_E8M0": "/unsaid", "F16": "/half"}.get(scale.dtype, "")
    found.fail(f"scale-dtype{case}", scale)


def _dangling(headers: Headers, q: Quantization | None, found: Findings) -> None:
    static = q is not None and q.activations == "static"
    for name, held in headers.tensors.items():
        weight = scale_of(name)
        if weight is None:
            wanted = f"{name.removesuffix('.weight')}.input_scale"
            if static and held.fp8 and wanted not in headers.tensors:
                found.fail("scale-missing/input", held, wanted=wanted)
        elif not weight:
            continue  # of a KV cache (`cache_scales`)
        elif name.endswith(".input_scale"):
            if q is not None and not static:
                found.fail("scale-dangling/input", held, q=q)
        elif (scaled := headers.tensors.get(weight)) is None or not scaled.fp8:
            case = "/value" if scaled is not None else ""
            found.fail(f"scale-dangling{case}", held, weight=weight, scaled=scaled)


def check_places(known: Mapping[str, Held], stock: Stock, found: Findings) -> None:
    """FP8 where no loader dequantizes: embeddings, norms, routers; and lm_head, which servers do not quantize."""
    for name, held in known.items():
        if not held.fp8:
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
        found.fail(kind, held, single=next(iter(stock.stacked.get(name, ())), ""))


def check_sound(known: Mapping[str, Held], stock: Stock, found: Findings) -> None:
    """FP8 in parts that servers run by transformers' own modules, which multiply values alone; each part once."""
    if not trains_on(stock.model.config.model_type, "sound"):
        return
    family = describe(stock.model)
    parts = {name: family.component_of(layer.module) for name, layer in stock.linears.items()}
    for component in ("audio_encoder", "audio_projector"):
        held = next((held for name, held in known.items() if held.fp8 and parts.get(name) == component), None)
        if held is not None:
            found.warn("of-sound", held, component=component)


def check_blocks(known: Mapping[str, Held], stock: Stock, q: Quantization | None, found: Findings) -> None:
    """What servers' block kernels ask of shapes, and that the shards of a fused matrix are of one kind."""
    for group in stock.fused_groups:
        _one_kind(group, known, found)
    if q is None or q.block is None:
        return
    r, c = q.block
    inner = {layer.disk for group in stock.fused_groups for layer in (group if group[0].expert else group[:-1])}
    for name, held in known.items():
        layer = stock.linears.get(name)
        if not held.fp8 or layer is None:
            continue
        n, k = held.shape[-2:]
        if k % c:
            found.fail("block-k", held, k=k, c=c)
        if n % r and layer.disk in inner:
            found.fail("block-n", held, n=n, r=r)
        elif n % r and n > r:
            found.warn("block-ragged", held, n=n, r=r, rows=n // -(-n // r))


def _one_kind(group: tuple[Linear, ...], known: Mapping[str, Held], found: Findings) -> None:
    held = [known.get(f"{layer.disk}.weight") for layer in group]
    there = [h for h in held if h is not None]
    codes = [h for h in there if h.fp8]
    if codes and len(codes) < len(there):
        other = next(h for h in there if not h.fp8)
        found.fail("fused-mixed", codes[0].file, codes[0].name, other=other)
