"""Maps tensors on disk to parameters with transformers' conversion rules.

Names on disk often differ from names of modules (Qwen2.5-VL, InternVL), and experts that are one tensor in a module are
separate tensors on disk, or transposed. transformers has rules for that (`WeightRenaming`, `WeightConverter`). Here
they are applied only to names, so that weights can be read expert by expert; pieces describe the effect of a rule on
the tensors:

    piece        a tensor on disk, or one expert's slice of it, possibly transposed ([K, N] on disk for a GEMM's [N, K])
    slot         one expert: its pieces, concatenated by rows (gate before up)
    origin       a parameter: its slots, or its only piece

Any other rule (for example splitting a fused q, k, v) is run by transformers on whole tensors.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from octavo.models.weights.shards import StoredTensor


class Piece(NamedTuple):
    """A tensor on disk, or the slice `at` of its first dimension; `turned`: transposed for the GEMM."""

    stored: StoredTensor
    at: int | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in GEMM orientation."""
        shape = self.stored.shape if self.at is None else self.stored.shape[1:]
        return (shape[1], shape[0]) if self.turned else shape


@dataclass
class Origin:
    """The tensors of the parameter (or buffer) `name`: for each slot its pieces, in order; a single slot if it has no
    experts.

    `converter`: transformers' rule, if it must run on `collected` (its source patterns and the tensors on disk); it may
    produce several parameters, `targets`. `missing_names`: names of incomplete experts that are missing on disk.
    """

    name: str
    slots: tuple[tuple[Piece, ...], ...] = ()
    experts: bool = False
    converter: WeightConverter | None = None
    collected: tuple[tuple[str, StoredTensor], ...] = ()
    targets: tuple[str, ...] = ()
    missing_names: tuple[str, ...] = ()

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """The tensors on disk that are read for it, each once."""
        all_tensors = [s for _, s in self.collected] or [piece.stored for slot in self.slots for piece in slot]
        return tuple(dict.fromkeys(all_tensors))


@dataclass
class Sources:
    """All origins, and the tensors on disk that no parameter needs; `rules`: transformers' rules that matched a
    name."""

    origins: list[Origin]
    unknown: list[StoredTensor]
    duplicates: list[tuple[StoredTensor, StoredTensor]]
    rules: list[WeightTransform]


def map_sources(model: PreTrainedModel, stored: Iterable[StoredTensor], experts: Container[str] = ()) -> Sources:
    """Return the origins of a model's parameters and persistent buffers. The model may be on the meta device.

    experts: the parameters of experts, to recognize those that are stored on disk as in the module.

    If a parameter has two sets of tensors, the one with codes is used, and both are listed as `duplicates`.
    """
    wanted: dict[str, Tensor] = model.state_dict()
    rules = get_model_conversion_mapping(model)
    names = _NameMapper(model, rules, wanted)
    candidates: dict[str, dict[object, _Source]] = {}
    unknown, duplicates, origins = [], [], []
    for entry in sorted(stored, key=lambda s: dot_natural_key(s.name)):
        name, pattern, rule = names(entry.name)
        if name not in wanted:
            unknown.append(entry)
            continue
        key = entry.name if rule is None else id(rule)
        candidates.setdefault(name, {}).setdefault(key, _Source(rule, [])).collected.append((pattern, entry))
    for name, options in candidates.items():
        chosen = max(options.values(), key=lambda o: o.collected[0][1].is_codes)  # the first one on a tie
        duplicates += [(chosen.collected[0][1], o.collected[0][1]) for o in options.values() if o is not chosen]
        shape = tuple(wanted[name].shape)
        if chosen.rule is not None:
            origins.append(_make_origin(model, name, chosen.rule, chosen.collected, shape))
            continue
        entry = chosen.collected[0][1]
        if name in experts and len(entry.shape) == 3:
            turned = is_transposed(model.get_submodule(name.rpartition(".")[0]))
            origins.append(Origin(name, _split_stack(entry, turned), experts=True))
        else:
            origins.append(Origin(name, ((Piece(entry),),)))
    return Sources(origins, unknown, duplicates, [rule for rule in rules if rule.was_used()])


class _Source(NamedTuple):
    """One source of a parameter: a rule and its tensors, or a single tensor."""

    rule: WeightConverter | None
    collected: list[tuple[str, StoredTensor]]


class _NameMapper:
    """Maps a name on disk to (parameter, pattern of the rule, conversion rule or None)."""

    def __init__(self, model: PreTrainedModel, rules: list[WeightTransform], wanted: dict[str, Tensor]) -> None:
        self._wanted = wanted
        self._prefix = model.base_model_prefix
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._rules = [rule for rule in rules if isinstance(rule, WeightConverter)]
        # llm-compressor and Octavo write separate experts for every family, as most families of transformers do;
        # families with fused experts on disk have no rule for that
        conversions = get_checkpoint_conversion_mapping("qwen2_moe") or []
        self._single_experts = [rule for rule in conversions if isinstance(rule, WeightConverter)]

    def __call__(self, name: str) -> tuple[str, str, WeightConverter | None]:
        renamed = self._apply_rules(name, self._renamings, self._rules)
        if renamed[0] not in self._wanted:
            for renamings, rules in (([], []), (self._renamings, self._single_experts)):
                other = self._apply_rules(name, renamings, rules)
                if other[0] in self._wanted:
                    return other
        return renamed

    def _apply_rules(
        self, name: str, renamings: list[WeightRenaming], rules: list[WeightConverter]
    ) -> tuple[str, str, WeightConverter | None]:
        renamed, pattern = rename_source_key(name, renamings, rules, self._prefix, self._wanted)
        return renamed, pattern or "", next((r for r in rules if pattern in r.source_patterns), None)


def _make_origin(
    model: PreTrainedModel,
    name: str,
    rule: WeightConverter,
    collected: list[tuple[str, StoredTensor]],
    shape: tuple[int, ...],
) -> Origin:
    module = model.get_submodule(name.rpartition(".")[0])
    stacked = _stack_experts(rule, collected, shape, is_transposed(module))
    if stacked is not None:
        return Origin(name, stacked[0], experts=True, missing_names=stacked[1])
    first = rule.target_patterns[0]
    targets = tuple(name.replace(first, target) for target in rule.target_patterns)
    return Origin(name, converter=rule, collected=tuple(collected), targets=targets)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module of experts stores them as [E, K, N]."""
    return bool(getattr(module, "is_transposed", False))


def _stack_experts(
    rule: WeightConverter, collected: list[tuple[str, StoredTensor]], shape: tuple[int, ...], transposed: bool
) -> tuple[tuple[tuple[Piece, ...], ...], tuple[str, ...]] | None:
    """Return the pieces of each expert and the names of missing ones, for a rule that only stacks experts, concatenates
    projections by rows and transposes; None for any other rule."""
    # Translate each operation to the way pieces are read (`merged`, `along`, `turned`); give up on an unknown one.
    if len(shape) != 3 or len(rule.target_patterns) != 1:
        return None
    merged, along, turned = False, None, transposed
    for op in rule.operations:
        if type(op) is MergeModulelist and op.dim == 0 and not merged:
            merged = True
        elif type(op) is Concatenate and op.dim in (1, 2) and merged and along is None:
            if getattr(op, "num_shards_attribute", None) is not None:
                return None
            along = op.dim
        elif type(op) is Transpose and {op.dim0, op.dim1} == {1, 2}:
            disk = collected[0][1].shape
            if not getattr(op, "check_dims", False) or disk != shape:  # with check_dims it runs only if shapes differ
                turned = not turned
                along = None if along is None else 3 - along
        else:
            return None
    rows = 2 if transposed else 1  # the dimension of the parameter that is a GEMM's rows
    if along not in (None, rows) or (along is None and len(rule.source_patterns) > 1):
        return None
    if merged:
        return _separate_experts(rule, collected, shape[0], turned)
    entry = collected[0][1]
    return (_split_stack(entry, turned), ()) if len(collected) == 1 and len(entry.shape) == 3 else None


def _split_stack(entry: StoredTensor, turned: bool) -> tuple[tuple[Piece, ...], ...]:
    """Return a slot for each expert of a tensor with all experts."""
    return tuple((Piece(entry, index, turned),) for index in range(entry.shape[0]))


def _separate_experts(
    rule: WeightConverter, collected: list[tuple[str, StoredTensor]], experts: int, turned: bool
) -> tuple[tuple[tuple[Piece, ...], ...], tuple[str, ...]] | None:
    """Return the slots of experts that are separate on disk: each has a piece of each source pattern, in the rule's
    order."""
    pieces: dict[tuple[str, int], Piece] = {}
    for pattern, entry in collected:
        match = re.search(_index_pattern(pattern), entry.name)
        if match is None or len(entry.shape) != 2 or (pattern, int(match.group(1))) in pieces:
            return None
        pieces[pattern, int(match.group(1))] = Piece(entry, None, turned)
    count = max(experts, 1 + max(index for _, index in pieces))
    slots, missing_names = [], []
    for index in range(count):
        slots.append(tuple(pieces[p, index] for p in rule.source_patterns if (p, index) in pieces))
        missing_names += [
            _expert_name(rule, collected[0][1].name, p, index) for p in rule.source_patterns if (p, index) not in pieces
        ]
    return tuple(slots), tuple(missing_names)


def _index_pattern(pattern: str) -> str:
    return pattern.replace("*.", r"(\d+)\.")


def _expert_name(rule: WeightConverter, like: str, pattern: str, index: int) -> str:
    """Return the name on disk of expert `index` under a pattern, derived from another name of the same rule."""
    numbered = pattern.replace("*", str(index))
    for other in rule.source_patterns:
        like, changed = re.subn(_index_pattern(other), numbered, like)
        if changed:
            break
    return like


def run_rule(origin: Origin, model: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run transformers' rule on whole tensors (by their names on disk); return parameter -> values."""
    assert origin.converter is not None
    rule = deepcopy(origin.converter)
    for pattern, entry in origin.collected:
        value = values[entry.name]
        rule.add_tensor(origin.name, entry.name, pattern, lambda value=value: value)  # type: ignore[arg-type]
    with torch.no_grad():
        converted = rule.convert(origin.name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
