"""Checks that every loader reads the skip list as intended: FP8 layers quantized, all others not.

`modules_to_not_convert` (method fp8) and `ignore` (compressed-tensors) are read in different ways, which are in
`octavo.models.folder.quantization`; SGLang's is below. A name may be the module's in the model or the one on disk,
since loaders map one to the other. Sources: transformers 5.23 `should_convert_module`; vLLM `is_layer_skipped`
(exact names, all shards of a fused matrix alike); SGLang `is_layer_skipped` since pull request 23467 (whole
parts between dots, with and without `model.`); compressed-tensors 0.20 `is_match`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from octavo.checkpoint.stock_model import Linear, StockModel
from octavo.checkpoint.verify.findings import LOADERS, Findings
from octavo.checkpoint.verify.headers import FileTensor
from octavo.models.folder.quantization import (
    Quantization,
    matches_exactly,
    matches_parts,
    matches_pattern,
    matches_target,
)

#: the classes of linear layers in vLLM and SGLang, of which a target of compressed-tensors may name a part
_SERVER_CLASSES = ("columnparallellinear", "mergedcolumnparallellinear", "qkvparallellinear", "rowparallellinear")
_TOWERS = ("visual.", "vision_tower.", "audio_tower.", "multi_modal_projector.")


class SkipRules(Protocol):
    """The lists of a quantization_config that determine which layers are quantized."""

    @property
    def method(self) -> str: ...
    @property
    def skipped(self) -> tuple[str, ...]: ...
    @property
    def targets(self) -> tuple[str, ...]: ...


def layer_names(layer: Linear) -> tuple[str, ...]:
    """Return the names that a server may use for a layer: in the model, on disk, and for towers without `model.`."""
    names = dict.fromkeys((layer.disk if layer.expert else layer.module, layer.disk))
    without_prefix = [name.removeprefix("model.") for name in names]
    return (*names, *(name for name in without_prefix if name.startswith(_TOWERS) and name not in names))


def is_skipped_by(loader: str, layer: Linear, q: SkipRules, moved: tuple[str, ...]) -> bool:
    """Return True if a loader leaves a layer in high precision. `moved` is the skip list in the names of the model,
    which transformers uses."""
    if loader != "transformers":
        return not is_server_target(layer, q) or is_listed_for(loader, layer, q)
    if q.method == "fp8":
        return matches_pattern(layer.module, moved)
    names = (layer.disk if layer.expert else layer.module, layer.disk)
    is_target = any(matches_target(name, q.targets, layer.types) for name in names)
    return not is_target or any(matches_target(name, q.skipped, layer.types) for name in names)


def is_server_target(layer: Linear, q: SkipRules) -> bool:
    """Return True if vLLM and SGLang quantize a layer unless the skip list has it. They compare targets with names and
    with their own classes, of whose names a part is enough."""
    if q.method == "fp8":
        return True
    if any(target.lower() in cls for target in q.targets for cls in _SERVER_CLASSES):
        return True
    return any(matches_target(name, q.targets, ()) for name in layer_names(layer))


def is_listed_for(server: str, layer: Linear, q: SkipRules) -> bool:
    """Return True if vLLM or SGLang find a layer in the skip list; classes in `ignore` mean nothing to them."""
    names = layer_names(layer)
    if q.method == "compressed-tensors":
        return any(matches_target(name, q.skipped, ()) for name in names)
    if layer.expert:
        names = (*names, layer.disk.rpartition(".experts.")[0] + ".experts")
    rule = matches_exactly if server == "vLLM" else matches_parts
    return any(rule(name, q.skipped) for name in names)


def check_skips(
    known: Mapping[str, FileTensor],
    stock: StockModel,
    q: Quantization,
    listed: bool,
    on_disk: Iterable[str],
    findings: Findings,
) -> None:
    """Check each layer by each loader's rule, and report entries of the list that match nothing.

    Args:
        listed: True if config.json has a skip list.
        on_disk: the names of all tensors; an entry may name one that the model does not load.
    """
    key = "modules_to_not_convert" if q.method == "fp8" else "ignore"
    moved = tuple(stock.to_module_prefix(name) for name in q.skipped)
    head = stock.head and stock.head.removesuffix(".weight")
    done: set[str] = set()
    for name, layer in _layers(known, stock):
        tensor = known.get(name)
        codes = tensor is not None and tensor.fp8
        if tensor is None and layer.disk != head:
            continue  # missing, which `check_names` reports; only the head can be tied
        if layer.disk == head and q.method == "fp8" and not listed:
            continue  # without a list, transformers leaves the head unquantized; servers always do
        wrong = [loader for loader in LOADERS if is_skipped_by(loader, layer, q, moved) == codes]
        if layer.disk == head and not codes:  # servers never quantize it, listed or not
            wrong = [loader for loader in wrong if loader == "transformers"]
        if not wrong or layer.disk in done:
            continue
        done.add(layer.disk)
        file = tensor.file if tensor is not None else "config.json"
        fields = {"who": _join_names(wrong), "s": "s" * (len(wrong) == 1), "key": key}
        if codes:
            findings.fail("skip-covers-fp8", file, name, **fields, culprit=_matching_entry(layer, q))
        else:
            findings.fail("skip-missing", file, name, **fields, dtype=tensor.dtype if tensor else "tied", layer=layer)
    _check_entries(stock, q, key, on_disk, findings)


def _layers(known: Mapping[str, FileTensor], stock: StockModel) -> Iterable[tuple[str, Linear]]:
    """Yield the layers of the model: separate experts if they are stored separately, else each stack as one layer."""
    stacked = {single for name, singles in stock.stacked.items() if name in known for single in singles}
    for name, layer in stock.linears.items():
        if name not in stacked:
            yield name, layer
    seen: set[str] = set()
    for name in stock.stacked:
        experts = name.rpartition(".")[0]
        if name in known and experts not in seen:
            seen.add(experts)
            module = stock.to_module(name).rpartition(".")[0]
            yield name, Linear(experts, module, (0, 0), (type(stock.model.get_submodule(module)).__name__,))


def _matching_entry(layer: Linear, q: Quantization) -> str:
    """Return the first entry of the skip list that matches a layer, in brackets; "" if none does."""
    for entry in q.skipped:
        rules = (matches_exactly, matches_parts, matches_pattern) if q.method == "fp8" else (matches_target,)
        if any(rule(name, (entry,)) for rule in rules for name in layer_names(layer)):
            return f" ({entry!r})"
    return ""


def _check_entries(stock: StockModel, q: Quantization, key: str, on_disk: Iterable[str], findings: Findings) -> None:
    unloaded = [f"{name}." for name in on_disk if name not in stock.names]
    classes = {cls.__name__ for module in stock.model.modules() for cls in type(module).__mro__}
    for entry in q.skipped:
        known = {entry, f"model.{entry}", entry.removesuffix(".weight")}
        if known & stock.names or entry in classes or stock.is_ignored(f"{entry}.weight"):
            continue
        rule = matches_target if q.method == "compressed-tensors" else matches_pattern
        if any(rule(name, (entry,)) for name in stock.names):
            continue
        if any(name.startswith(f"{entry}.") for name in unloaded):
            continue
        findings.warn("skip-nothing", "config.json", entry=entry, key=key)


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
