"""The form of a model on disk: names and shapes, linear layers, experts, and alternative names.

In memory parameters are named after modules; on disk they have the names of the family's published checkpoints
(`model.visual.blocks` in memory is `visual.blocks` on disk in Qwen2.5-VL). So the names of a model on the meta device
are converted with transformers' own code, in both directions: the names that save_pretrained would write, and the
parameter that from_pretrained would fill from a name. FP8 checkpoints store experts one by one even where the family's
own folders stack them (Qwen3-VL-MoE), so both forms are known.
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
from octavo.models.weights.unloaded import loaders_ignore

#: parameter of stacked experts -> the names of the projections that are stacked in it, in the order of its rows
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Linear:
    """A layer whose weight may be FP8.

    disk    name of the module on disk
    module  name of the module in memory
    shape   (N, K) of the weight
    types   class names of the module, with its base classes
    expert  whether it is one of a layer's experts
    """

    disk: str
    module: str
    shape: tuple[int, int]
    types: tuple[str, ...]
    expert: bool = False


class StockModel:
    """A stock model on the meta device with its names on disk, by transformers' conversion in both directions.

    state    parameter or persistent buffer -> its meta tensor
    tied     second names of tied parameters -> the first name
    weights  `state` without second names
    modules  name -> module
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

    # Memory to disk: the names that are written ----------------------------------------------------------------------

    def revert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters as transformers would save them, with names, pieces and orientation on disk."""
        if getattr(self.model, "_weight_conversions", None) is not None:  # set when the model was loaded
            return revert_weight_conversion(self.model, dict(state))
        if not self._conversions:
            return dict(state)
        # Set only for this call. Otherwise transformers would look the conversions up again at each call.
        self.model._weight_conversions = self._conversions  # type: ignore[assignment]
        try:
            return revert_weight_conversion(self.model, dict(state))
        finally:
            del self.model._weight_conversions

    @cached_property
    def _conversions(self) -> list[WeightTransform]:
        """The conversions that transformers looks up for a model that was not loaded, which visits all its modules."""
        moves = get_model_conversion_mapping(self.model, add_legacy=False)
        return [move for move in moves if not isinstance(move, PrefixChange)]

    @cached_property
    def disk(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> its names on disk: several if it is written in pieces. Parameters of a group share theirs."""
        names: dict[str, tuple[str, ...]] = {}
        for group in self._groups():
            names |= dict.fromkeys(group, tuple(self.revert({name: self.weights[name] for name in group})))
        return {name: names[name] for name in self.weights}

    def _groups(self) -> list[tuple[str, ...]]:
        """Parameters in groups that transformers converts together: usually one parameter, but in Ernie the experts for
        text and those for images, which continue the same numbering."""
        multi_target = [move.target_patterns for move in self._converters if len(move.target_patterns) > 1]
        groups, grouped = [], set()
        for name in self.weights:
            if name in grouped:
                continue
            group: tuple[str, ...] = (name,)
            for patterns in multi_target:
                for matched in (pattern for pattern in patterns if pattern in name):
                    members = tuple(name.replace(matched, pattern) for pattern in patterns)
                    group = members if all(member in self.weights for member in members) else group
            groups.append(group)
            grouped |= set(group)
        return groups

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name on disk -> shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.revert(self.weights).items()}

    @cached_property
    def tied_on_disk(self) -> dict[str, str]:
        """Names on disk of tied weights -> the name on disk that holds their values."""

        def disk_name(name: str) -> str:
            (disk,) = self.revert({name: self.state[name]})
            return disk

        return {disk_name(second): disk_name(first) for second, first in self.tied.items()}

    def disk_name(self, module: str) -> str:
        """Return the name on disk of a module."""
        for name in (f"{module}.weight", *(n for n in self.weights if n.startswith(f"{module}."))):
            on_disk = self.disk.get(name, ())
            leaf = name.removeprefix(f"{module}.")
            if len(on_disk) == 1 and on_disk[0].endswith(f".{leaf}"):
                return on_disk[0].removesuffix(f".{leaf}")
        # Its parameters are written in pieces (experts one by one), or it is tied: convert the parent's name, and
        # append the last part of its name.
        parent, _, last = module.rpartition(".")
        return f"{self.disk_name(parent)}.{last}" if parent and parent in self.modules else module

    # Disk to memory: the parameters that are filled ------------------------------------------------------------------

    def to_module(self, name: str) -> str:
        """Return the parameter that transformers would fill from a name on disk, even if the model does not have it.

        Raises CheckpointError for a name that its conversion cannot handle.
        """
        moves = self._renamings, self._converters
        try:
            moved, _ = rename_source_key(name, *moves, self.model.base_model_prefix, self.state)
        except (ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"transformers cannot map the name {name!r}: {error}") from error
        return moved

    def to_module_prefix(self, name: str) -> str:
        """Return the module for a module name on disk, as transformers converts the names in a skip list."""
        moved = name + "."
        for move in (*self._renamings, *self._converters):
            moved, _ = move.rename_source_key(moved)
        return moved.removesuffix(".")

    def alias(self, name: str, present: Iterable[str]) -> str | None:
        """Return the standard disk name for another name that the loader also accepts, or None if `present` has
        both."""
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
        """Return whether the family's loaders leave out a tensor with this name."""
        return loaders_ignore(self.model, name)

    # Layers ----------------------------------------------------------------------------------------------------------

    @cached_property
    def linears(self) -> dict[str, Linear]:
        """Name on disk of a weight -> its layer; experts one by one."""
        back = {self.to_module(name): name for name in (*self.shapes, *self.tied_on_disk)}
        layers: dict[str, Linear] = {}
        for name, module in self.modules.items():
            weight = f"{name}.weight"
            if not isinstance(module, nn.Linear) or weight not in back:
                continue
            disk = back[weight]
            types = tuple(cls.__name__ for cls in type(module).__mro__)
            layer = Linear(disk.removesuffix(".weight"), name, (module.out_features, module.in_features), types)
            if weight not in self.tied:
                layers[disk] = layer
            else:
                layers.setdefault(disk, layer)
        for disk, shape in self.shapes.items():
            if (match := _EXPERT_NAME.match(disk)) and len(shape) == 2 and disk not in layers:
                layers[disk] = _expert_linear(disk, match["experts"], shape)
        for disk, singles in self.stacked.items():
            moved = self.to_module(disk)
            many, rows, columns = self.state[moved].shape
            size = (rows * many // len(singles), columns)
            layers |= {name: _expert_linear(name, moved.rpartition(".")[0], size) for name in singles}
        return layers

    @cached_property
    def stacked(self) -> dict[str, tuple[str, ...]]:
        """Name on disk of stacked experts -> the names of the same experts stored one by one, in their order."""
        singles = {}
        for disk in [name for name, shape in self.shapes.items() if len(shape) == 3 and ".experts." in name]:
            prefix, _, leaf = disk.rpartition(".")
            moved = self.to_module(disk)
            if moved not in self.state or leaf not in EXPERTS or self.is_transposed(moved):
                continue
            many = range(len(self.state[moved]))
            singles[disk] = tuple(f"{prefix}.{e}.{projection}.weight" for e in many for projection in EXPERTS[leaf])
        return singles

    @cached_property
    def head(self) -> str | None:
        """The name on disk of the output projection's weight."""
        module = self.model.get_output_embeddings()
        names = [name for name, candidate in self.modules.items() if candidate is module]
        return next((disk for disk, layer in self.linears.items() if layer.module in names), None)

    def is_transposed(self, parameter: str) -> bool:
        """Return whether a parameter of experts is [E, K, N] in memory."""
        return is_transposed(self.modules[parameter.rpartition(".")[0]])

    @cached_property
    def names(self) -> set[str]:
        """Every name that a skip list may contain: modules and parameters, by their names in memory and on disk."""
        known = {*self.modules, *(name for name, _ in self.model.named_parameters(remove_duplicate=False))}
        for name in (*self.shapes, *self.linears, *self.tied_on_disk):
            parts = name.split(".")
            known.update(".".join(parts[:i]) for i in range(1, len(parts) + 1))
        return known

    @cached_property
    def fused_groups(self) -> list[tuple[Linear, ...]]:
        """The groups of layers that servers merge into one matrix, in its order; incomplete groups are left out."""
        by_name = {layer.disk: layer for layer in self.linears.values()}
        groups = []
        for layer in by_name.values():
            parent, _, leaf = layer.disk.rpartition(".")
            for leaves in FUSED:
                if leaf == leaves[0]:
                    group = [by_name.get(f"{parent}.{other}" if parent else other) for other in leaves]
                    if all(group):
                        groups.append(tuple(g for g in group if g))
        return groups


_EXPERT_NAME = re.compile(r"(?P<experts>.+\.experts)\.\d+\.\w+\.weight$")


def _expert_linear(weight: str, module: str, shape: tuple[int, ...]) -> Linear:
    n, k = shape
    return Linear(weight.removesuffix(".weight"), module, (n, k), ("Linear",), expert=True)
