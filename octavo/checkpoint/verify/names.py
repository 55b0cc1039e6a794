"""Names, shapes and dtypes against the stock model, and config.json against what the files hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.checkpoint.stock_model import Stock
from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import Headers, Held
from octavo.models.custom.mpt import MPTConfig, not_in_stock
from octavo.models.custom.register import is_own
from octavo.models.folder.quantization import is_cache_scale

#: what follows a weight's name where quantizers keep its scales; longest first
SCALES = ("_scale_inv", "_scale_2", "_scale", "_zero_point")
_HIGH = ("F32", "BF16", "F16")
_FLOATS = (*_HIGH, "F8_E4M3", "F8_E5M2")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def scale_of(name: str) -> str | None:
    """The weight that a name on disk holds the scales of, "" for those of a KV cache, which belong to none; None where
    it is no name of scales."""
    if is_cache_scale(name):
        return ""
    for suffix in SCALES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return f"{name.removesuffix('.input_scale')}.weight" if name.endswith(".input_scale") else None


def check_names(headers: Headers, stock: Stock, found: Findings) -> dict[str, Held]:
    """The tensors by the name that the stock model gives them (scales left out); reports what differs."""
    known: dict[str, Held] = {}
    present = headers.tensors
    for name, held in present.items():
        if scale_of(name) is not None and name not in stock.shapes:
            continue
        own = name if name in stock.linears or name in stock.tied_on_disk else stock.alias(name, present)
        if own is None:
            if not stock.is_ignored(name):
                found.fail("extra", held)
            continue
        known[own] = held
        _shape(own, held, stock, found)
        if held.dtype not in _FLOATS:
            found.fail("dtype", held)
        elif held.dtype == "F8_E5M2":
            found.fail("e5m2", held)
    _stacked_twice(known, stock, found)
    for name, shape in stock.shapes.items():
        if name in known:
            continue
        singles = stock.stacked.get(name, ())
        separate = any(single in known for single in singles)
        for one in [single for single in singles if single not in known] if separate else [name]:
            wanted = list(stock.linears[one].shape if one in stock.linears else shape)
            found.fail("missing", tensor=one, wanted=wanted, folder=headers.folder)
    return known


def _stacked_twice(known: Mapping[str, Held], stock: Stock, found: Findings) -> None:
    for name, singles in stock.stacked.items():
        double = [single for single in singles if single in known]
        if name in known and double:
            found.fail("duplicate/stacked", known[name].file, name, other=known[double[0]], single=double[0])


def _shape(name: str, held: Held, stock: Stock, found: Findings) -> None:
    if name in stock.tied_on_disk:
        wanted = stock.shapes[stock.tied_on_disk[name]]
    else:
        wanted = stock.shapes.get(name) or (stock.linears[name].shape if name in stock.linears else ())
    turned = name in stock.stacked and held.shape == (*wanted[:-2], wanted[-1], wanted[-2])
    if held.shape != tuple(wanted) and not turned:
        hint = " (it is transposed)" if held.shape == tuple(wanted)[::-1] else ""
        found.fail("shape", held, wanted=list(wanted), hint=hint)


def check_fields(model: PreTrainedModel, found: Findings) -> None:
    """Fields of config.json that Octavo computes and transformers' class of the same name leaves out."""
    if isinstance(model.config, MPTConfig) and (fields := not_in_stock(model.config)):
        found.warn("mpt-fields", "config.json", fields=", ".join(fields))


def check_config(raw: Mapping[str, Any], block: Mapping[str, Any] | None, headers: Headers, found: Findings) -> None:
    """quantization_config, dtype and architectures of config.json against the files."""
    codes = [held for held in headers.tensors.values() if held.fp8]
    if codes and block is None:
        dangling = "scales" if any(scale_of(name) for name in headers.tensors) else "none"
        found.fail(f"quantization-lost/{dangling}", codes[0].file, codes[0].name, count=len(codes))
    if block is not None and not codes and headers.tensors:
        found.fail("quantization-without-codes", "config.json")
    if not raw.get("architectures"):
        found.fail("architectures", "config.json")
    if is_own(raw.get("model_type")):
        found.warn("own-family", "config.json", family=raw["model_type"])
    _config_dtype(raw, headers, found)
    if any(str(raw.get(key, "")).startswith(("float8", "torch.float8")) for key in ("dtype", "torch_dtype")):
        found.fail("config-dtype/float8", "config.json")


def _config_dtype(raw: Mapping[str, Any], headers: Headers, found: Findings) -> None:
    text = raw.get("text_config") if isinstance(raw.get("text_config"), Mapping) else {}
    dtype = next((d[k] for d in (raw, text or {}) for k in ("dtype", "torch_dtype") if d.get(k)), None)
    sizes: Counter[str] = Counter()
    for held in headers.tensors.values():
        if held.dtype in _DTYPES and scale_of(held.name) is None:
            sizes[held.dtype] += held.size
    if not sizes:
        return
    most = _DTYPES[sizes.most_common(1)[0][0]]
    if dtype is None:
        found.warn("config-dtype/none", "config.json", most=most)
    elif str(dtype).removeprefix("torch.") != most and str(dtype) != "auto" and "float8" not in str(dtype):
        found.warn("config-dtype/other", "config.json", dtype=dtype, most=most)


def check_ties(headers: Headers, known: Mapping[str, Held], stock: Stock, quick: bool, found: Findings) -> None:
    """Tied weights that are on disk twice: they must be the same bytes."""
    for second, first in stock.tied_on_disk.items():
        two, one = known.get(second), known.get(first)
        if two is None or one is None:
            continue
        same = two.dtype == one.dtype and two.shape == one.shape
        if same and not quick:
            pairs = zip(two.rows(), one.rows(), strict=True)
            same = all(a.view(torch.uint8).equal(b.view(torch.uint8)) for (_, a), (_, b) in pairs)
        if same:
            found.warn("tied-twice", two, one=one)
        else:
            found.fail("tied", two, one=one)
