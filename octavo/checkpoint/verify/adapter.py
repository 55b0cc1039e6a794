"""Checks a PEFT adapter folder, adapter_config.json with adapter_model.safetensors, by itself and against a base.

For a layer W [N, K] the file holds `base_model.model.X.lora_A.weight` [r, K] and `X.lora_B.weight` [N, r] (for stacked
experts [E r, K] and [N, E r]); the layer's output gains B A x * alpha / r. The file contains nothing of the base, so a
folder can be complete and not fit its base. If a base is available (--against, or the folder that adapter_config.json
names), each layer is looked up in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.findings import FAIL, GARBAGE, OK, REFUSES, WARN, Findings, Verdict
from octavo.checkpoint.verify.headers import FileTensor, Headers, read_folder
from octavo.models import ModelError, empty
from octavo.models.folder.folder import read_json
from octavo.models.structure.skeleton import stock_config

STEM = "adapter_model"
_PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.(?P<part>lora_A|lora_B)\.weight$")
_VECTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_magnitude_vector(\.weight)?$")


def is_adapter(folder: Path) -> bool:
    """Return True if a folder is an adapter: it has adapter_config.json and no config.json of a model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def check_adapter(folder: Path, base: Path | None, findings: Findings) -> tuple[Headers, dict[str, Any]]:
    """Check files, names, shapes and dtypes, and the layers of the base if there is one.

    Returns the headers and adapter_config.json, {} if that cannot be read.
    """
    headers = read_folder(folder, findings, STEM)
    config: dict[str, Any] | None = None
    with findings.collect_errors("adapter_config.json"):
        config = read_json(folder / "adapter_config.json")
    if config is None:
        return headers, {}
    _check_config(config, findings)
    if any(finding.file == "adapter_config.json" and finding.status == FAIL for finding in findings):
        config |= {"target_modules": None, "rank_pattern": None}  # unusable: do not check layers against them
    parts = _adapter_pairs(headers, findings)
    for layer, pair in parts.items():
        _check_pair(layer, pair, config, findings)
        if not _is_targeted(layer, config):
            findings.fail("adapter-target", next(iter(pair.values())), layer=layer)
    if not parts and headers.tensors:
        findings.fail("adapter-empty", f"{STEM}.safetensors", folder=folder)
    named = config.get("base_model_name_or_path")
    if base is None and isinstance(named, str) and (Path(named) / "config.json").is_file():
        base = Path(named)
    if base is not None:
        _check_base(parts, base, findings)
    return headers, config


def _check_config(config: Mapping[str, Any], findings: Findings) -> None:
    file = "adapter_config.json"
    if config.get("peft_type") != "LORA":
        findings.fail("config/peft-type", file, peft_type=config.get("peft_type"))
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        findings.fail("config/rank", file, rank=rank)
    for key in ("lora_alpha", "target_modules"):
        if config.get(key) is None and not (key == "target_modules" and config.get("target_parameters")):
            findings.fail("config/key", file, key=key)
    targets, patterns = config.get("target_modules"), config.get("rank_pattern")
    try:
        for expression in [*(patterns or {}), *([targets] if isinstance(targets, str) else [])]:
            re.compile(expression)
        are_names = isinstance(targets, str) or all(isinstance(name, str) for name in targets or ())
    except (re.error, TypeError):
        are_names = False
    if not are_names or not isinstance(patterns, dict | None):
        findings.fail("config/targets", file, targets=targets, patterns=patterns)
    if not config.get("base_model_name_or_path"):
        findings.warn("adapter-base", file)


def _adapter_pairs(headers: Headers, findings: Findings) -> dict[str, dict[str, FileTensor]]:
    parts: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in headers.tensors.items():
        if match := _PART.match(name):
            parts.setdefault(match["layer"], {})[match["part"]] = tensor
        elif not _VECTOR.match(name) and "lora_" in name:
            findings.fail("adapter-names", tensor)
        if tensor.dtype not in ("F32", "BF16", "F16"):
            findings.fail("adapter-dtype", tensor)
    return parts


def _check_pair(layer: str, pair: Mapping[str, FileTensor], config: Mapping[str, Any], findings: Findings) -> None:
    a, b = pair.get("lora_A"), pair.get("lora_B")
    if a is None or b is None:
        half = a or b
        assert half is not None
        findings.fail("adapter-half", half, missing="lora_B" if b is None else "lora_A")
        return
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        findings.fail("adapter-shape", a, b=b, other=list(b.shape))
        return
    rank = _layer_rank(layer, config)
    if rank and a.shape[0] % rank:
        findings.fail("adapter-rank", a, rank=rank)


def _is_targeted(layer: str, config: Mapping[str, Any]) -> bool:
    """Return True if target_modules select a layer by PEFT's rule: a regular expression for the whole name, or a list
    of names and suffixes of names. For target_parameters and all-linear, which need the model, return True."""
    targets = config.get("target_modules")
    if not targets or config.get("target_parameters") or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in targets)


def _layer_rank(layer: str, config: Mapping[str, Any]) -> int | None:
    for key, value in (config.get("rank_pattern") or {}).items():
        if type(value) is int and value > 0 and re.match(rf"(.*\.)?({key})$", layer):
            return value
    rank = config.get("r")
    return rank if type(rank) is int and rank > 0 else None


def _check_base(parts: Mapping[str, Mapping[str, FileTensor]], base: Path, findings: Findings) -> None:
    try:
        stock = StockModel(empty(stock_config(base)))
    except ModelError as error:
        findings.fail("config/base", "config.json", error=error)
        return
    for layer, pair in parts.items():
        a, b = pair.get("lora_A"), pair.get("lora_B")
        if a is None or b is None:
            continue
        module = layer.removesuffix(".base_layer")
        weight = stock.state.get(f"{module}.weight")
        if weight is None and module.endswith(".experts"):
            continue  # stacked experts: the name does not identify which of their two parameters is adapted
        if weight is None:
            findings.fail("adapter-layer", a, module=module, base=base)
        elif (b.shape[0], a.shape[-1]) != tuple(weight.shape[:2]) and len(weight.shape) == 2:
            rows, columns, wanted = b.shape[0], a.shape[-1], list(weight.shape)
            findings.fail("adapter-shape/base", a, rows=rows, columns=columns, module=module, wanted=wanted, base=base)


def check_factors(headers: Headers, zero: Mapping[str, bool], findings: Findings) -> None:
    """Warn about an adapter that was never trained: all its B are zero. `zero` maps names to "all values are zero"."""
    b_names = [name for name in zero if ".lora_B" in name]
    if b_names and all(zero[name] for name in b_names):
        findings.warn("adapter-untrained", headers.tensors[b_names[0]])


def adapter_verdicts(findings: Findings, config: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """Return the verdicts of PEFT, vLLM and SGLang: the first failure decides, then features that servers do not
    support."""
    encrypted = next((f for f in findings if f.kind == "encrypted"), None)
    broken = next((f for f in findings if f.status == FAIL), encrypted)
    warned = next((f for f in findings if f.status == WARN), None)
    verdicts = []
    for loader in ("transformers", "vLLM", "SGLang"):
        source = "run: PEFT on transformers" if loader == "transformers" else f"read in its source ({loader})"
        if broken is not None:
            garbage = broken.kind in ("nan-values", "adapter-rank", "adapter-dtype")
            verdicts.append(Verdict(loader, GARBAGE if garbage else REFUSES, broken.text, source))
        elif loader != "transformers" and (config.get("use_dora") or config.get("modules_to_save")):
            feature = "DoRA" if config.get("use_dora") else "modules_to_save"
            reason = f"{feature} is not served; merge the adapter (octavo merge)"
            verdicts.append(Verdict(loader, REFUSES, reason, source))
        elif warned is not None:
            verdicts.append(Verdict(loader, OK, warned.text, source, warns=True))
        else:
            verdicts.append(Verdict(loader, OK, "PEFT's names, shapes and dtypes", source))
    return tuple(verdicts)


def describe_adapter(config: Mapping[str, Any]) -> str:
    """Describe the adapter for the head of a report."""
    variant = " DoRA" if config.get("use_dora") else " rsLoRA" if config.get("use_rslora") else ""
    return f"PEFT adapter, rank {json.dumps(config.get('r'))}{variant}"
