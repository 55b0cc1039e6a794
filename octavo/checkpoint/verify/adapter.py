"""A PEFT adapter folder: adapter_config.json beside adapter_model.safetensors, checked by themselves and with a base.

Of a layer W [N, K] the file holds `base_model.model.X.lora_A.weight` [r, K] and `X.lora_B.weight` [N, r] (for stacked
experts [E r, K] and [N, E r]); y gains B A x * alpha / r. Nothing of the base is in it, so the folder can be whole and
still not fit: with a base at hand (--against, or the folder that adapter_config.json names) each layer is looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.stock_model import Stock
from octavo.checkpoint.verify.findings import FAIL, WARN, Findings, Verdict
from octavo.checkpoint.verify.headers import Headers, Held, read_folder
from octavo.models import ModelError, empty
from octavo.models.folder.folder import read_json
from octavo.models.structure.skeleton import stock_config

STEM = "adapter_model"
_PART = re.compile(r"base_model\.model\.(?P<layer>.+)\.(?P<part>lora_A|lora_B)\.weight$")
_VECTOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_magnitude_vector(\.weight)?$")


def is_adapter(folder: Path) -> bool:
    """Whether a folder says that it is an adapter: it has no model's config.json."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def check_adapter(folder: Path, base: Path | None, found: Findings) -> tuple[Headers, dict[str, Any]]:
    """Files, names, shapes and dtypes; and the base's layers where a base is there. Returns headers and the config."""
    headers = read_folder(folder, found, STEM)
    config: dict[str, Any] | None = None
    with found.failing("adapter_config.json"):
        config = read_json(folder / "adapter_config.json")
    if config is None:
        return headers, {}
    _config(config, found)
    if any(finding.file == "adapter_config.json" and finding.status == FAIL for finding in found):
        config |= {"target_modules": None, "rank_pattern": None}  # no word on which layers they lead to
    parts = _parts(headers, found)
    for layer, pair in parts.items():
        _pair(layer, pair, config, found)
        if not _targeted(layer, config):
            found.fail("adapter-target", next(iter(pair.values())), layer=layer)
    if not parts and headers.tensors:
        found.fail("adapter-empty", f"{STEM}.safetensors", folder=folder)
    named = config.get("base_model_name_or_path")
    if base is None and isinstance(named, str) and (Path(named) / "config.json").is_file():
        base = Path(named)
    if base is not None:
        _base(parts, base, found)
    return headers, config


def _config(config: Mapping[str, Any], found: Findings) -> None:
    file = "adapter_config.json"
    if config.get("peft_type") != "LORA":
        found.fail("config/peft-type", file, peft_type=config.get("peft_type"))
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        found.fail("config/rank", file, rank=rank)
    for key in ("lora_alpha", "target_modules"):
        if config.get(key) is None and not (key == "target_modules" and config.get("target_parameters")):
            found.fail("config/key", file, key=key)
    targets, patterns = config.get("target_modules"), config.get("rank_pattern")
    try:
        for expression in [*(patterns or {}), *([targets] if isinstance(targets, str) else [])]:
            re.compile(expression)
        good = isinstance(targets, str) or all(isinstance(name, str) for name in targets or ())
    except (re.error, TypeError):
        good = False
    if not good or not isinstance(patterns, dict | None):
        found.fail("config/targets", file, targets=targets, patterns=patterns)
    if not config.get("base_model_name_or_path"):
        found.warn("adapter-base", file)


def _parts(headers: Headers, found: Findings) -> dict[str, dict[str, Held]]:
    parts: dict[str, dict[str, Held]] = {}
    for name, held in headers.tensors.items():
        if match := _PART.match(name):
            parts.setdefault(match["layer"], {})[match["part"]] = held
        elif not _VECTOR.match(name) and "lora_" in name:
            found.fail("adapter-names", held)
        if held.dtype not in ("F32", "BF16", "F16"):
            found.fail("adapter-dtype", held)
    return parts


def _pair(layer: str, pair: Mapping[str, Held], config: Mapping[str, Any], found: Findings) -> None:
    a, b = pair.get("lora_A"), pair.get("lora_B")
    if a is None or b is None:
        there = a or b
        assert there is not None
        found.fail("adapter-half", there, lacks="lora_B" if b is None else "lora_A")
        return
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        found.fail("adapter-shape", a, b=b, other=list(b.shape))
        return
    rank = _rank(layer, config)
    if rank and a.shape[0] % rank:
        found.fail("adapter-rank", a, rank=rank)


def _targeted(layer: str, config: Mapping[str, Any]) -> bool:
    """Whether target_modules lead PEFT to a layer, by PEFT's rule: an expression for the whole name, or a list of names
    and ends of names. Layers of target_parameters, and words such as all-linear, it finds in the model."""
    targets = config.get("target_modules")
    if not targets or config.get("target_parameters") or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in targets)


def _rank(layer: str, config: Mapping[str, Any]) -> int | None:
    for key, value in (config.get("rank_pattern") or {}).items():
        if type(value) is int and value > 0 and re.match(rf"(.*\.)?({key})$", layer):
            return value
    rank = config.get("r")
    return rank if type(rank) is int and rank > 0 else None


def _base(parts: Mapping[str, Mapping[str, Held]], base: Path, found: Findings) -> None:
    try:
        stock = Stock(empty(stock_config(base)))
    except ModelError as error:
        found.fail("config/base", "config.json", error=error)
        return
    for layer, pair in parts.items():
        a, b = pair.get("lora_A"), pair.get("lora_B")
        if a is None or b is None:
            continue
        module = layer.removesuffix(".base_layer")
        weight = stock.state.get(f"{module}.weight")
        if weight is None and module.endswith(".experts"):
            continue  # a stack of experts: which of its two parameters only nesting tells
        if weight is None:
            found.fail("adapter-layer", a, module=module, base=base)
        elif (b.shape[0], a.shape[-1]) != tuple(weight.shape[:2]) and len(weight.shape) == 2:
            about = {"module": module, "wanted": list(weight.shape), "base": base}
            found.fail("adapter-shape/base", a, rows=b.shape[0], columns=a.shape[-1], **about)


def check_factors(headers: Headers, zero: Mapping[str, bool], found: Findings) -> None:
    """An adapter whose every B is zero was never trained. `zero`: name -> whether all values are zero."""
    seen = [name for name in zero if ".lora_B" in name]
    if seen and all(zero[name] for name in seen):
        found.warn("adapter-untrained", headers.tensors[seen[0]])


def adapter_verdicts(found: Findings, config: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """PEFT's, vLLM's and SGLang's: the folder loads where nothing failed, with what servers do not take."""
    broken = next((f for f in found if f.status == FAIL), None) or next(
        (f for f in found if f.kind == "encrypted"), None
    )
    warned = next((f for f in found if f.status == WARN), None)
    out = []
    for loader in ("transformers", "vLLM", "SGLang"):
        source = "run: PEFT on transformers" if loader == "transformers" else f"read from {loader}'s code, not run"
        if broken is not None:
            bad = broken.kind in ("nan-values", "adapter-rank", "adapter-dtype")
            out.append(Verdict(loader, "loads garbage" if bad else "refuses", broken.text, source))
        elif loader != "transformers" and (config.get("use_dora") or config.get("modules_to_save")):
            what = "DoRA" if config.get("use_dora") else "modules_to_save"
            out.append(Verdict(loader, "refuses", f"{what} is not served; merge the adapter (octavo merge)", source))
        elif warned is not None:
            out.append(Verdict(loader, "warns", warned.text, source))
        else:
            out.append(Verdict(loader, "ok", "PEFT's names, shapes and dtypes", source))
    return tuple(out)


def described(config: Mapping[str, Any]) -> str:
    """What the adapter is, for the head of a report."""
    more = " DoRA" if config.get("use_dora") else " rsLoRA" if config.get("use_rslora") else ""
    return f"PEFT adapter, rank {json.dumps(config.get('r'))}{more}"
