"""Compares names, shapes and dtypes with the stock model, and config.json with the contents of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers
from octavo.models.custom.mpt import MPTConfig, ignored_by_stock
from octavo.models.custom.register import is_custom
from octavo.models.folder.quantization import is_cache_scale

#: suffixes that quantizers append to a weight's name for its scales; longest first
SCALES = ("_scale_inv", "_scale_2", "_scale", "_zero_point")
_HIGH = ("F32", "BF16", "F16")
_FLOATS = (*_HIGH, "F8_E4M3", "F8_E5M2")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def scale_of(name: str) -> str | None:
    """Return the weight that scales on disk belong to by their name, "" for scales of a KV cache, which belong to none;
    None if the name is not one of scales."""
    if is_cache_scale(name):
        return ""
    for suffix in SCALES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return f"{name.removesuffix('.input_scale')}.weight" if name.endswith(".input_scale") else None


def check_names(headers: Headers, stock: StockModel, findings: Findings) -> dict[str, FileTensor]:
    """Return the tensors by the stock model's names on disk, without scales, and report differences."""
    known: dict[str, FileTensor] = {}
    present = headers.tensors
    for name, held in present.items():
        if scale_of(name) is not None and name not in stock.shapes:
            continue
        # Layers and tied names are known as they are; other names may be aliases that the loader accepts.
        known_as = name if name in stock.linears or name in stock.tied_on_disk else stock.alias(name, present)
        if known_as is None:
            if not stock.is_ignored(name):
                findings.fail("extra", held)
            continue
        known[known_as] = held
        _check_shape(known_as, held, stock, findings)
        if held.dtype not in _FLOATS:
            findings.fail("dtype", held)
        elif held.dtype == "F8_E5M2":
            findings.fail("e5m2", held)
    _check_stacked_twice(known, stock, findings)
    for name, shape in stock.shapes.items():
        if name in known:
            continue
        singles = stock.stacked.get(name, ())
        separate = any(single in known for single in singles)
        for one in [single for single in singles if single not in known] if separate else [name]:
            wanted = list(stock.linears[one].shape if one in stock.linears else shape)
            findings.fail("missing", tensor=one, wanted=wanted, folder=headers.folder)
    return known


def _check_stacked_twice(known: Mapping[str, FileTensor], stock: StockModel, findings: Findings) -> None:
    for name, singles in stock.stacked.items():
        double = [single for single in singles if single in known]
        if name in known and double:
            findings.fail("duplicate/stacked", known[name].file, name, other=known[double[0]], single=double[0])


def _check_shape(name: str, held: FileTensor, stock: StockModel, findings: Findings) -> None:
    if name in stock.tied_on_disk:
        wanted = stock.shapes[stock.tied_on_disk[name]]
    else:
        wanted = stock.shapes.get(name) or (stock.linears[name].shape if name in stock.linears else ())
    transposed = name in stock.stacked and held.shape == (*wanted[:-2], wanted[-1], wanted[-2])
    if held.shape != tuple(wanted) and not transposed:
        hint = " (it is transposed)" if held.shape == tuple(wanted)[::-1] else ""
        findings.fail("shape", held, wanted=list(wanted), hint=hint)


def check_fields(model: PreTrainedModel, findings: Findings) -> None:
    """Warn about fields of config.json that Octavo uses and transformers' class of the same name ignores."""
    if isinstance(model.config, MPTConfig) and (fields := ignored_by_stock(model.config)):
        findings.warn("mpt-fields", "config.json", fields=", ".join(fields))


def check_config(raw: Mapping[str, Any], block: Mapping[str, Any] | None, headers: Headers, findings: Findings) -> None:
    """Compare quantization_config, dtype and architectures of config.json with the files."""
    codes = [held for held in headers.tensors.values() if held.fp8]
    if codes and block is None:
        dangling = "scales" if any(scale_of(name) for name in headers.tensors) else "none"
        findings.fail(f"quantization-lost/{dangling}", codes[0].file, codes[0].name, count=len(codes))
    if block is not None and not codes and headers.tensors:
        findings.fail("quantization-without-codes", "config.json")
    if not raw.get("architectures"):
        findings.fail("architectures", "config.json")
    if is_custom(raw.get("model_type")):
        findings.warn("own-family", "config.json", family=raw["model_type"])
    _config_dtype(raw, headers, findings)
    if any(str(raw.get(key, "")).startswith(("float8", "torch.float8")) for key in ("dtype", "torch_dtype")):
        findings.fail("config-dtype/float8", "config.json")


def _config_dtype(raw: Mapping[str, Any], headers: Headers, findings: Findings) -> None:
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
        findings.warn("config-dtype/none", "config.json", most=most)
    elif str(dtype).removeprefix("torch.") != most and str(dtype) != "auto" and "float8" not in str(dtype):
        findings.warn("config-dtype/other", "config.json", dtype=dtype, most=most)


def check_ties(
    headers: Headers, known: Mapping[str, FileTensor], stock: StockModel, quick: bool, findings: Findings
) -> None:
    """Report tied weights that are on disk twice: a warning if they have the same bytes, else a failure."""
    for second, first in stock.tied_on_disk.items():
        two, one = known.get(second), known.get(first)
        if two is None or one is None:
            continue
        same = two.dtype == one.dtype and two.shape == one.shape
        if same and not quick:
            pairs = zip(two.rows(), one.rows(), strict=True)
            same = all(a.view(torch.uint8).equal(b.view(torch.uint8)) for (_, a), (_, b) in pairs)
        if same:
            findings.warn("tied-twice", two, one=one)
        else:
            findings.fail("tied", two, one=one)
