"""Compares names, shapes and dtypes with the stock model, and config.json with the contents of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.findings import Findings
from octavo.checkpoint.verify.headers import FileTensor, Headers
from octavo.models.custom.mpt import MPTConfig, ignored_by_stock
from octavo.models.custom.register import COMPOSED, is_custom
from octavo.models.folder.folder import read_json
from octavo.models.folder.quantization import is_cache_scale

#: suffixes that quantizers append to a weight's name for its scales; longest first
SCALES = ("_scale_inv", "_scale_2", "_scale", "_zero_point")
MODELOPT_FILE = "hf_quant_config.json"
_HIGH = ("F32", "BF16", "F16")
_FLOATS = (*_HIGH, "F8_E4M3", "F8_E5M2")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def scale_of(name: str) -> str | None:
    """Return the name of the weight that a scale on disk belongs to, "" for scales of a KV cache, which have no weight,
    or None if this is not the name of a scale."""
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
    for name, tensor in present.items():
        if scale_of(name) is not None and name not in stock.shapes:
            continue
        # Layers and tied names are known as they are; other names may be aliases that the loader accepts.
        known_as = name if name in stock.linears or name in stock.tied_on_disk else stock.alias(name, present)
        if known_as is None:
            if not stock.is_ignored(name):
                findings.fail("extra", tensor)
            continue
        known[known_as] = tensor
        _check_shape(known_as, tensor, stock, findings)
        if tensor.dtype not in _FLOATS:
            findings.fail("dtype", tensor)
        elif tensor.dtype == "F8_E5M2":
            findings.fail("e5m2", tensor)
    _check_stacked_twice(known, stock, findings)
    for name, shape in stock.shapes.items():
        if name in known:
            continue
        singles = stock.stacked.get(name, ())
        separate = any(single in known for single in singles)
        for missing in [single for single in singles if single not in known] if separate else [name]:
            wanted = list(stock.linears[missing].shape if missing in stock.linears else shape)
            findings.fail("missing", tensor=missing, wanted=wanted, folder=headers.folder)
    return known


def _check_stacked_twice(known: Mapping[str, FileTensor], stock: StockModel, findings: Findings) -> None:
    for name, singles in stock.stacked.items():
        double = [single for single in singles if single in known]
        if name in known and double:
            findings.fail("duplicate/stacked", known[name].file, name, other=known[double[0]], single=double[0])


def _check_shape(name: str, tensor: FileTensor, stock: StockModel, findings: Findings) -> None:
    if name in stock.tied_on_disk:
        wanted = stock.shapes[stock.tied_on_disk[name]]
    else:
        wanted = stock.shapes.get(name) or (stock.linears[name].shape if name in stock.linears else ())
    transposed = name in stock.stacked and tensor.shape == (*wanted[:-2], wanted[-1], wanted[-2])
    if tensor.shape != tuple(wanted) and not transposed:
        hint = " (it is transposed)" if tensor.shape == tuple(wanted)[::-1] else ""
        findings.fail("shape", tensor, wanted=list(wanted), hint=hint)


def check_fields(model: PreTrainedModel, findings: Findings) -> None:
    """Warn about fields of config.json that Octavo uses and transformers' class of the same name ignores."""
    if isinstance(model.config, MPTConfig) and (fields := ignored_by_stock(model.config)):
        findings.warn("mpt-fields", "config.json", fields=", ".join(fields))


def check_config(
    raw: Mapping[str, Any],
    block: Mapping[str, object] | None,
    headers: Headers,
    stock: StockModel | None,
    findings: Findings,
) -> None:
    """Compare quantization_config, dtype and architectures of config.json with the files."""
    codes = [tensor for tensor in headers.tensors.values() if tensor.fp8]
    # ModelOpt up to 0.29 wrote no quantization_config into config.json, but this file.
    if block is None and (headers.folder / MODELOPT_FILE).is_file():
        check_modelopt(headers.folder, bool(codes), findings)
    elif codes and block is None:
        case = "scales" if any(scale_of(name) for name in headers.tensors) else "none"
        findings.fail(f"quantization-lost/{case}", codes[0].file, codes[0].name, count=len(codes))
    if isinstance(block, Mapping) and not codes and headers.tensors:
        findings.fail("quantization-without-codes", "config.json")
    if not raw.get("architectures"):
        wanted = "LlamaForCausalLM" if stock is None else type(stock.model).__name__
        findings.fail("no-architectures", "config.json", wanted=wanted)
    elif not any(hasattr(transformers, str(name)) for name in raw["architectures"]) and not is_custom(
        raw.get("model_type")
    ):
        findings.fail("architectures/unknown", "config.json", names=raw["architectures"])
    if is_custom(raw.get("model_type")):
        is_composed = raw["model_type"] in COMPOSED
        findings.warn("composed" if is_composed else "own-family", "config.json", family=raw["model_type"])
    _check_config_dtype(raw, headers, findings)
    if any(str(raw.get(key, "")).startswith(("float8", "torch.float8")) for key in ("dtype", "torch_dtype")):
        findings.fail("config-dtype/float8", "config.json")


def check_modelopt(folder: Path, quantized: bool, findings: Findings) -> None:
    """Report ModelOpt's file, from which vLLM and SGLang take the quantization if config.json has none."""
    with findings.collect_errors(MODELOPT_FILE, "quantization-file"):
        settings = read_json(folder / MODELOPT_FILE).get("quantization")
        algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
        findings.fail("modelopt" if quantized else "quantization-file", MODELOPT_FILE, algorithm=algorithm)


def _check_config_dtype(raw: Mapping[str, Any], headers: Headers, findings: Findings) -> None:
    text = raw.get("text_config") if isinstance(raw.get("text_config"), Mapping) else {}
    dtype = next((d[k] for d in (raw, text or {}) for k in ("dtype", "torch_dtype") if d.get(k)), None)
    sizes: Counter[str] = Counter()
    for tensor in headers.tensors.values():
        if tensor.dtype in _DTYPES and scale_of(tensor.name) is None:
            sizes[tensor.dtype] += tensor.size
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
    for name, tied_to in stock.tied_on_disk.items():
        second, first = known.get(name), known.get(tied_to)
        if second is None or first is None:
            continue
        is_equal = second.dtype == first.dtype and second.shape == first.shape
        if is_equal and not quick:
            pairs = zip(second.rows(), first.rows(), strict=True)
            is_equal = all(a.view(torch.uint8).equal(b.view(torch.uint8)) for (_, a), (_, b) in pairs)
        if is_equal:
            findings.warn("tied-twice", second, first=first)
        else:
            findings.fail("tied", second, first=first)
