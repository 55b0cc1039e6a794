"""What the model of a config.json wants on disk: names, shapes, linear layers, experts, and other names of the same.

The stock model is built on the meta device and its names go through transformers' own conversion, there (what
save_pretrained would write) and back (what from_pretrained would do with a name). FP8 checkpoints hold experts one by
one also where a family's own folders stack them (Qwen3-VL-MoE), so both are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from octavo.checkpoint.errors import CheckpointError
from octavo.models import ModelError, empty
from octavo.models.folder import quiet
from octavo.models.quantization import FUSED


@dataclass(frozen=True)
class Linear:
    """A layer whose weight may be FP8: disk and module-space name of the module, shape [N, K], class names."""

    disk: str
    module: str
    shape: tuple[int, int]
    types: tuple[str, ...]
    expert: bool = False


@dataclass
class Stock:
    """The model on disk.

    shapes   disk name -> shape, as save_pretrained would name it; tied names left out
    linears  disk name of the weight -> its layer; experts one by one
    stacked  disk name of stacked experts -> the disk names of the same experts one by one
    tied     disk names of tied weights -> the disk name that holds their values
    ignored  patterns of names that the family's own folders hold and the model does not (transformers' list)
    modules  every name that a skip list may mean: modules and parameters, in both name spaces
    """

    model: PreTrainedModel
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    modules: set[str] = field(default_factory=set)
    state: dict[str, Tensor] = field(default_factory=dict)
    _moves: tuple[list[WeightRenaming], list[WeightConverter]] = field(default_factory=lambda: ([], []))

    def to_module(self, name: str) -> str:
        """The parameter of the model that transformers fills from a disk name (which need not exist)."""
        renamings, converters = self._moves
        try:
            moved, _ = rename_source_key(name, renamings, converters, self.model.base_model_prefix, self.state)
        except (ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"transformers cannot place the name {name!r}: {error}") from error
        return moved

    def to_module_prefix(self, name: str) -> str:
        """The module that a disk name of a module becomes: what transformers does with the names of a skip list."""
        moved = name + "."
        for move in (*self._moves[0], *self._moves[1]):
            moved, _ = move.rename_source_key(moved)
        return moved.removesuffix(".")

    def alias(self, name: str, present: Iterable[str]) -> str | None:
        """The disk name that an unusual name stands for, where the loader takes both and only one is there."""
        if name in self.shapes:
            return name
        moved = self.to_module(name)
        wanted = self._by_module.get(moved)
        return wanted if wanted is not None and wanted not in present else None

    @cached_property
    def _by_module(self) -> Mapping[str, str]:
        merged = {name for name, layer in self.linears.items() if layer.expert}
        return {self.to_module(name): name for name in self.shapes if name not in merged}

    def is_ignored(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def read_stock(folder: Path, raw: Mapping[str, Any]) -> Stock:
    """The stock model of a folder's config.json, FP8 or not. Raises ModelError where none can be built."""
    if "auto_map" in raw:
        raise ModelError("asks to run Python code from the folder (auto_map); use the checkpoint's transformers form")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' strict dataclasses raise their own kinds; the cause is kept
        raise ModelError(f"cannot be used: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from error
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if part is not None and getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return stock_of(empty(config))


def stock_of(model: PreTrainedModel) -> Stock:
    """The same of a model on the meta device."""
    state = model.state_dict()
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    moves = get_model_conversion_mapping(model)
    stock = Stock(
        model,
        state=state,
        _moves=(
            [m for m in moves if isinstance(m, WeightRenaming)],
            [m for m in moves if isinstance(m, WeightConverter)],
        ),
    )
    stock.shapes = {
        name: tuple(tensor.shape)
        for name, tensor in revert_weight_conversion(model, {n: t for n, t in state.items() if n not in tied}).items()
    }
    for second, first in tied.items():
        second, first = (_only(revert_weight_conversion(model, {n: state[n]})) for n in (second, first))
        stock.tied[second] = first
    _linears(model, stock)
    _experts(model, stock)
    stock.ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    for name, _ in [*model.named_modules(), *model.named_parameters(remove_duplicate=False)]:
        stock.modules.add(name)
    for name in [*stock.shapes, *stock.linears, *stock.tied]:
        parts = name.split(".")
        stock.modules.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
    return stock


def _only(names: Mapping[str, Any]) -> str:
    (name,) = names
    return name


def _linears(model: PreTrainedModel, stock: Stock) -> None:
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    back = {stock.to_module(name): name for name in (*stock.shapes, *stock.tied)}
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if not isinstance(module, nn.Linear) or weight not in back:
            continue
        disk = back[weight]
        types = tuple(cls.__name__ for cls in type(module).__mro__)
        layer = Linear(disk.removesuffix(".weight"), name, (module.out_features, module.in_features), types)
        if weight not in tied:
            stock.linears[disk] = layer
        else:
            stock.linears.setdefault(disk, layer)


_ONE = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<leaf>\w+)\.weight$")


def _experts(model: PreTrainedModel, stock: Stock) -> None:
    """Experts as layers: those that lie one by one, and the names that stacked ones would have one by one."""
    for disk, shape in stock.shapes.items():
        if (match := _ONE.match(disk)) and len(shape) == 2 and disk not in stock.linears:
            n, k = shape
            name = disk.removesuffix(".weight")
            stock.linears[disk] = Linear(name, match["experts"], (n, k), ("Linear",), expert=True)
    state = stock.state
    for disk in [name for name, shape in stock.shapes.items() if len(shape) == 3 and ".experts." in name]:
        prefix, _, leaf = disk.rpartition(".")
        moved = stock.to_module(disk)
        if moved not in state or leaf not in ("gate_up_proj", "down_proj"):
            continue
        place = moved.rpartition(".")[0]
        owner = model.get_submodule(place)
        if getattr(owner, "is_transposed", False):
            continue
        many, rows, columns = state[moved].shape
        leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
        size = (rows // len(leaves), columns)
        names = []
        for index in range(many):
            for one in leaves:
                name = f"{prefix}.{index}.{one}"
                stock.linears[f"{name}.weight"] = Linear(name, place, size, ("Linear",), expert=True)
                names.append(f"{name}.weight")
        stock.stacked[disk] = tuple(names)


def fused_groups(stock: Stock) -> list[tuple[Linear, ...]]:
    """The layers that servers put into one matrix, in its order; only groups that are whole."""
    at = {layer.disk: layer for layer in stock.linears.values()}
    groups = []
    for layer in at.values():
        parent, _, leaf = layer.disk.rpartition(".")
        for leaves in FUSED:
            if leaf == leaves[0]:
                group = [at.get(f"{parent}.{other}" if parent else other) for other in leaves]
                if all(group):
                    groups.append(tuple(g for g in group if g))
    return groups
