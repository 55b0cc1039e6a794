"""Checks the scales of an FP8 KV cache: tensors without a weight, with which servers cast keys and values.

    name                                        written by
    X.k_scale, X.v_scale, X.q_scale             llm-compressor, and vLLM's own layers
    X.prob_scale                                the same, for the softmax
    X.kv_scale, kv_cache_scale                  AutoFP8 and the first versions of vLLM: one scale for both
    X.k_proj.output_scale, v_proj.output_scale  llm-compressor before 0.3
    X.k_proj.k_scale, X.v_proj.v_scale          ModelOpt

X is the attention module. `kv_cache_scheme` in the quantization_config tells loaders to use them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers
from octavo.models.folder.quantization import is_cache_scale

_DTYPES = ("F32", "BF16", "F16")
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")
_KEYS_OF = re.compile(rf"({_LAYER.pattern})\.(?:self_attn|attention|attn)\.(?:k|qkv)_proj\.weight$")


def check_cache(headers: Headers, block: Mapping[str, Any] | None, quick: bool, findings: Findings) -> str:
    """Compare the scales of a KV cache with `kv_cache_scheme`, and check their values unless `quick`.

    Args:
        block: the quantization_config, or None if config.json has none.

    Returns a description of the scales, "" if there are none.
    """
    scales = {name: tensor for name, tensor in headers.tensors.items() if is_cache_scale(name)}
    scheme = (block or {}).get("kv_cache_scheme")
    is_dynamic = isinstance(scheme, Mapping) and bool(scheme.get("dynamic"))  # computed at run time, not stored
    first = next(iter(scales.values()), None)
    if first is None:
        if scheme is not None and not is_dynamic:
            findings.warn("cache-scales/none", "config.json")
        return ""
    if scheme is None:
        findings.warn("cache-scales/no-scheme", first, count=len(scales))
    _check_halves(scales, findings)
    _check_layers(scales, headers, findings)
    for tensor in scales.values():
        if tensor.dtype not in _DTYPES:
            findings.fail("scale-dtype/cache", tensor)
        elif not quick and (problem := _find_bad_value(tensor)):
            text = f"is {problem[1]}, but a scale of a KV cache must be finite and positive: calibrate it again."
            findings.fail(f"scale-{problem[0]}", tensor, text=text)
    leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in scales))
    return f"{len(scales)} scales of an FP8 KV cache ({leaves})"


def _check_layers(scales: Mapping[str, FileTensor], headers: Headers, findings: Findings) -> None:
    """Report layers without scales if others of the same decoder have them, and scales of missing layers."""
    layers = dict.fromkeys(match[1] for name in headers.tensors if (match := _KEYS_OF.match(name)))
    layers_with_scales = {match[0]: name for name in scales if (match := _LAYER.match(name))}
    if not layers or not layers_with_scales:  # names of an unknown family
        return
    for layer, name in layers_with_scales.items():
        if layer not in layers:
            findings.warn("cache-scales/stray", scales[name], layer=layer)
            return
    decoders = {layer.rpartition(".")[0] for layer in layers_with_scales}
    without = [layer for layer in layers if layer.rpartition(".")[0] in decoders and layer not in layers_with_scales]
    if without:
        findings.warn("cache-scales/layers", scales[next(iter(scales))], layer=without[0], count=len(without))


def _check_halves(scales: Mapping[str, FileTensor], findings: Findings) -> None:
    """Report scales of keys without scales of values, and vice versa."""
    for key, value in (("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")):
        for leaf, other in ((key, value), (value, key)):
            for name, tensor in scales.items():
                if not name.endswith(f".{leaf}") or name.endswith((f"k_proj.{leaf}", f"v_proj.{leaf}")):
                    continue
                if (missing := name.removesuffix(leaf) + other) not in scales:
                    findings.warn("cache-scales/half", tensor, other=missing)
                    return


def _find_bad_value(tensor: FileTensor) -> tuple[str, str] | None:
    """Return (kind of finding, description) of a scale that is not finite and positive; None if it is."""
    values = tensor.read().float()
    if not values.numel():
        return "nan", "empty"
    if not bool(values.isfinite().all()):
        return "nan", "NaN or infinite"
    if not bool((values != 0).all()):
        return "zero", "zero"
    return None if bool((values > 0).all()) else ("negative", "negative")
