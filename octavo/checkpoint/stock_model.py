"""What a model has on disk: names, shapes, linear layers, experts, and other names of the same.

A model's parameters have names of modules; on disk they have those of the family's own published checkpoints
(`model.visual.blocks` in memory is `visual.blocks` on disk in Qwen2.5-VL). So a model on the meta device sends its
names through transformers' own conversion, there (what save_pretrained would write) and back (what from_pretrained
would do with a name). FP8 checkpoints hold experts one by one also where a family's own folders stack them
(Qwen3-VL-MoE), so both are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from octavo.checkpoint.errors import CheckpointError
from octavo.models.folder.quantization import FUSED
from octavo.models.weights.name_mapping import is_transposed

#: the parameter of stacked experts -> the projections in it, one below the other, as they are named one by one
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Linear:
    """A layer whose weight may be FP8: disk and module-space name of the module, shape [N, K], class names."""

    disk: str
    module: str
    shape: tuple[int, int]
    types: tuple[str, ...]
    expert: bool = False


class Stock:
    """A stock model on the meta device, and its names on disk: by transformers' conversion there and back.

    tied     second names of parameters -> the first
    weights  parameter or persistent buffer -> its meta tensor; second names left out
    modules  module -> the same
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.state: dict[str, Tensor] = model.state_dict()
        self.tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self.weights = {name: t for name, t in self.state.items() if name not in self.tied}
        self.modules = dict(model.named_modules())
        moves = get_model_conversion_mapping(model)
        self._renamings = [m for m in moves if isinstance(m, WeightRenaming)]
        self._converters = [m for m in moves if isinstance(m, WeightConverter)]
        #: patterns of names that the family's own folders hold and the model does not
        self._ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    # There: what is written ------------------------------------------------------------------------------------------

    def revert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters as transformers would save them: names, pieces and orientation."""
        if getattr(self.model, "_weight_conversions", None) is not None:  # those that the model was loaded by
            return revert_weight_conversion(self.model, dict(state))
        if not self._conversions:
            return dict(state)
        self.model._weight_conversions = self._conversions  # type: ignore[assignment]
        try:
            return revert_weight_conversion(self.model, dict(state))
        finally:
            del self.model._weight_conversions

    @cached_property
    def _conversions(self) -> list[WeightTransform]:
        """What transformers looks up for a model that was not loaded, going through all its modules at each call."""
        found = get_model_conversion_mapping(self.model, add_legacy=False)
        return [move for move in found if not isinstance(move, PrefixChange)]

    @cached_property
    def disk(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> its names on disk, several where it is written in pieces; those of a group are all written in
        the same."""
        found: dict[str, tuple[str, ...]] = {}
        for group in self._groups():
            found |= dict.fromkeys(group, tuple(self.revert({name: self.weights[name] for name in group})))
        return {name: found[name] for name in self.weights}

    def _groups(self) -> list[tuple[str, ...]]:
        """Parameters, and together those that transformers writes and reads as one (the experts of Ernie for text and
        those for images, which are numbered on)."""
        several = [move.target_patterns for move in self._converters if len(move.target_patterns) > 1]
        groups, grouped = [], set()
        for name in self.weights:
            if name in grouped:
                continue
            group: tuple[str, ...] = (name,)
            for patterns in several:
                for own in (pattern for pattern in patterns if pattern in name):
                    named = tuple(name.replace(own, pattern) for pattern in patterns)
                    group = named if all(one in self.weights for one in named) else group
            groups.append(group)
            grouped |= set(group)
        return groups

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name on disk -> shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.revert(self.weights).items()}

    @cached_property
    def tied_on_disk(self) -> dict[str, str]:
        """Names on disk of tied weights -> the one that holds their values."""

        def only(name: str) -> str:
            (disk,) = self.revert({name: self.state[name]})
            return disk

        return {only(second): only(first) for second, first in self.tied.items()}

    def renamed(self, module: str) -> str:
        """The name on disk of a module."""
        for name in (f"{module}.weight", *(n for n in self.weights if n.startswith(f"{module}."))):
            found = self.disk.get(name, ())
            leaf = name.removeprefix(f"{module}.")
            if len(found) == 1 and found[0].endswith(f".{leaf}"):
                return found[0].removesuffix(f".{leaf}")
        # Its parameters are written in pieces (experts one by one), or it is tied: its parent's name, and its own.
        parent, _, own = module.rpartition(".")
        return f"{self.renamed(parent)}.{own}" if parent and parent in self.modules else module

    # Back: what is read ----------------------------------------------------------------------------------------------

    def to_module(self, name: str) -> str:
        """The parameter of the model that transformers fills from a disk name (which need not exist)."""
        moves = self._renamings, self._converters
        try:
            moved, _ = rename_source_key(name, *moves, self.model.base_model_prefix, self.state)
        except (ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"transformers cannot place the name {name!r}: {error}") from error
        return moved

    def to_module_prefix(self, name: str) -> str:
        """The module that a disk name of a module becomes: what transformers does with the names of a skip list."""
        moved = name + "."
        for move in (*self._renamings, *self._converters):
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
        return any(re.search(pattern, name) for pattern in self._ignored)

    # Layers ----------------------------------------------------------------------------------------------------------

    @cached_property
    def linears(self) -> dict[str, Linear]:
        """Name on disk of the weight -> its layer; experts one by one."""
        back = {self.to_module(name): name for name in (*self.shapes, *self.tied_on_disk)}
        found: dict[str, Linear] = {}
        for name, module in self.modules.items():
            weight = f"{name}.weight"
            if not isinstance(module, nn.Linear) or weight not in back:
                continue
            disk = back[weight]
            types = tuple(cls.__name__ for cls in type(module).__mro__)
            layer = Linear(disk.removesuffix(".weight"), name, (module.out_features, module.in_features), types)
            if weight not in self.tied:
                found[disk] = layer
            else:
                found.setdefault(disk, layer)
        for disk, shape in self.shapes.items():
            if (match := _ONE.match(disk)) and len(shape) == 2 and disk not in found:
                found[disk] = _expert(disk, match["experts"], shape)
        for disk, singles in self.stacked.items():
            moved = self.to_module(disk)
            many, rows, columns = self.state[moved].shape
            size = (rows * many // len(singles), columns)
            found |= {name: _expert(name, moved.rpartition(".")[0], size) for name in singles}
        return found

    @cached_property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        """Name on disk of stacked experts -> the names that the same experts have one by one, in their order."""
        found = {}
        for disk in [name for name, shape in self.shapes.items() if len(shape) == 3 and ".experts." in name]:
            prefix, _, leaf = disk.rpartition(".")
            moved = self.to_module(disk)
            if moved not in self.state or leaf not in EXPERTS or self.transposed(moved):
                continue
            many = range(len(self.state[moved]))
            found[disk] = tuple(f"{prefix}.{e}.{one}.weight" for e in many for one in EXPERTS[leaf])
        return found

    @cached_property
    def head(self) -> str | None:
        """The name on disk of the output projection's weight."""
        module = self.model.get_output_embeddings()
        names = [name for name, one in self.modules.items() if one is module]
        return next((disk for disk, layer in self.linears.items() if layer.module in names), None)

    def transposed(self, parameter: str) -> bool:
        """Whether experts lie in memory as [E, K, N]."""
        return is_transposed(self.modules[parameter.rpartition(".")[0]])

    @cached_property
    def names(self) -> set[str]:
        """Every name that a skip list may mean: modules and parameters, in both name spaces."""
        found = {*self.modules, *(name for name, _ in self.model.named_parameters(remove_duplicate=False))}
        for name in (*self.shapes, *self.linears, *self.tied_on_disk):
            parts = name.split(".")
            found.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
        return found

    @cached_property
    def fused_groups(self) -> list[tuple[Linear, ...]]:
        """The layers that servers put into one matrix, in its order; only groups that are whole."""
        at = {layer.disk: layer for layer in self.linears.values()}
        groups = []
        for layer in at.values():
            parent, _, leaf = layer.disk.rpartition(".")
            for leaves in FUSED:
                if leaf == leaves[0]:
                    group = [at.get(f"{parent}.{other}" if parent else other) for other in leaves]
                    if all(group):
                        groups.append(tuple(g for g in group if g))
        return groups


_ONE = re.compile(r"(?P<experts>.+\.experts)\.\d+\.\w+\.weight$")


def _expert(weight: str, module: str, shape: tuple[int, ...]) -> Linear:
    n, k = shape
    return Linear(weight.removesuffix(".weight"), module, (n, k), ("Linear",), expert=True)
