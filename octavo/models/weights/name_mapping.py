"""Which tensors on disk make which parameter, by transformers' own conversion rules.

Names on disk are often not those of the modules (Qwen2.5-VL, InternVL), and experts that a module holds in one tensor
lie one by one on disk, or transposed. transformers has rules for that (`WeightRenaming`, `WeightConverter`). They are
applied here to names alone, so that whoever reads may go expert by expert; what a rule does to the tensors is put in
terms of pieces:

    piece        a tensor on disk, or one expert's slice of it, perhaps turned ([K, N] on disk for a GEMM's [N, K])
    a slot       one expert: its pieces one below the other (gate above up)
    origin       a parameter: its slots, or its one piece

A rule that is more than that (a fused q, k, v cut apart, say) stays transformers' to run, on whole tensors.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    dot_natural_key,
    rename_source_key,
)

from octavo.models.weights.shards import Stored


class Piece(NamedTuple):
    """A tensor on disk, or the slice `at` of its first dimension; `turned`: transposed for the GEMM."""

    stored: Stored
    at: int | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """As the GEMM has it."""
        shape = self.stored.shape if self.at is None else self.stored.shape[1:]
        return (shape[1], shape[0]) if self.turned else shape


@dataclass
class Origin:
    """What makes the parameter (or buffer) `name`: for each slot its pieces, in order; one slot if it has no experts.

    `converter` is transformers' rule where it must run itself, on `collected` (its source pattern -> tensors on disk);
    it may make several parameters, `makes`. `lacks`: names on disk that should be there, of experts that are not whole.
    """

    name: str
    slots: tuple[tuple[Piece, ...], ...] = ()
    experts: bool = False
    converter: WeightConverter | None = None
    collected: tuple[tuple[str, Stored], ...] = ()
    makes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The tensors on disk that it takes, each once."""
        every = [s for _, s in self.collected] or [piece.stored for slot in self.slots for piece in slot]
        return tuple(dict.fromkeys(every))


@dataclass
class Sources:
    """All origins, and the names on disk that nothing wants; `rules`: transformers' rules that matched something."""

    origins: list[Origin]
    unknown: list[Stored]
    twice: list[tuple[Stored, Stored]]
    rules: list[Any]


def sources(model: PreTrainedModel, stored: Iterable[Stored], experts: Container[str] = ()) -> Sources:
    """The origins of a model's parameters and persistent buffers. The model may be on the meta device.

    experts: the parameters that hold experts, for those that lie on disk as the module has them.

    Where tensors offer the same parameter twice, those that hold codes are used, and both are listed as `twice`.
    """
    wanted: dict[str, Tensor] = model.state_dict()
    rules = get_model_conversion_mapping(model)
    names = _Names(model, rules, wanted)
    offers: dict[str, dict[object, _Offer]] = {}
    unknown, twice, origins = [], [], []
    for entry in sorted(stored, key=lambda s: dot_natural_key(s.name)):
        name, pattern, rule = names(entry.name)
        if name not in wanted:
            unknown.append(entry)
            continue
        key = entry.name if rule is None else id(rule)
        offers.setdefault(name, {}).setdefault(key, _Offer(rule, [])).collected.append((pattern, entry))
    for name, offered in offers.items():
        kept = max(offered.values(), key=lambda o: o.collected[0][1].is_codes)  # the first of equal ones
        twice += [(kept.collected[0][1], o.collected[0][1]) for o in offered.values() if o is not kept]
        shape = tuple(wanted[name].shape)
        if kept.rule is not None:
            origins.append(_origin(model, name, kept.rule, kept.collected, shape))
            continue
        entry = kept.collected[0][1]
        if name in experts and len(entry.shape) == 3:
            turned = is_transposed(model.get_submodule(name.rpartition(".")[0]))
            origins.append(Origin(name, _stack(entry, turned), experts=True))
        else:
            origins.append(Origin(name, ((Piece(entry),),)))
    return Sources(origins, unknown, twice, [rule for rule in rules if rule.was_used()])


class _Offer(NamedTuple):
    """One way to make a parameter: a rule and what it takes, or a tensor as it is."""

    rule: WeightConverter | None
    collected: list[tuple[str, Stored]]


class _Names:
    """Name on disk -> (parameter, the rule's pattern, the rule that converts or None)."""

    def __init__(self, model: PreTrainedModel, rules: list[Any], wanted: dict[str, Tensor]) -> None:
        self._wanted = wanted
        self._prefix = model.base_model_prefix
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._rules = [rule for rule in rules if isinstance(rule, WeightConverter)]
        # llm-compressor and Octavo write experts one by one for every family, as most of transformers' families have
        # them on disk; families with fused experts on disk have no rule for that
        more = get_checkpoint_conversion_mapping("qwen2_moe") or []
        self._single_experts = [rule for rule in more if isinstance(rule, WeightConverter)]

    def __call__(self, name: str) -> tuple[str, str, WeightConverter | None]:
        found = self._by(name, self._renamings, self._rules)
        if found[0] not in self._wanted:
            for renamings, rules in (([], []), (self._renamings, self._single_experts)):
                other = self._by(name, renamings, rules)
                if other[0] in self._wanted:
                    return other
        return found

    def _by(self, name: str, renamings: list[Any], rules: list[Any]) -> tuple[str, str, WeightConverter | None]:
        renamed, pattern = rename_source_key(name, renamings, rules, self._prefix, self._wanted)
        return renamed, pattern or "", next((r for r in rules if pattern in r.source_patterns), None)


def _origin(
    model: PreTrainedModel,
    name: str,
    rule: WeightConverter,
    collected: list[tuple[str, Stored]],
    shape: tuple[int, ...],
) -> Origin:
    module = model.get_submodule(name.rpartition(".")[0])
    found = _slots(rule, collected, shape, is_transposed(module))
    if found is not None:
        return Origin(name, found[0], experts=True, lacks=found[1])
    first = rule.target_patterns[0]
    makes = tuple(name.replace(first, target) for target in rule.target_patterns)
    return Origin(name, converter=rule, collected=tuple(collected), makes=makes)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module of experts stores them as [E, K, N]."""
    return bool(getattr(module, "is_transposed", False))


def _slots(
    rule: WeightConverter, collected: list[tuple[str, Stored]], shape: tuple[int, ...], transposed: bool
) -> tuple[tuple[tuple[Piece, ...], ...], tuple[str, ...]] | None:
    """The pieces of each expert and the names of absent ones, where a rule does no more than stack experts, put
    projections one below the other and transpose; None for any other."""
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
            if not getattr(op, "check_dims", False) or disk != shape:  # its own rule: only where shapes differ
                turned = not turned
                along = None if along is None else 3 - along
        else:
            return None
    rows = 2 if transposed else 1  # the dimension of the parameter that is a GEMM's rows
    if along not in (None, rows) or (along is None and len(rule.source_patterns) > 1):
        return None
    if merged:
        return _merged(rule, collected, shape[0], turned)
    entry = collected[0][1]
    return (_stack(entry, turned), ()) if len(collected) == 1 and len(entry.shape) == 3 else None


def _stack(entry: Stored, turned: bool) -> tuple[tuple[Piece, ...], ...]:
    """A slot for each expert of a tensor that holds all of them."""
    return tuple((Piece(entry, index, turned),) for index in range(entry.shape[0]))


def _merged(
    rule: WeightConverter, collected: list[tuple[str, Stored]], experts: int, turned: bool
) -> tuple[tuple[tuple[Piece, ...], ...], tuple[str, ...]] | None:
    """Experts one by one on disk: each slot has a piece of each source pattern, in the rule's order."""
    found: dict[tuple[str, int], Piece] = {}
    for pattern, entry in collected:
        match = re.search(_numbered(pattern), entry.name)
        if match is None or len(entry.shape) != 2 or (pattern, int(match.group(1))) in found:
            return None
        found[pattern, int(match.group(1))] = Piece(entry, None, turned)
    count = max(experts, 1 + max(index for _, index in found))
    slots, lacks = [], []
    for index in range(count):
        slots.append(tuple(found[p, index] for p in rule.source_patterns if (p, index) in found))
        lacks += [_name(rule, collected[0][1].name, p, index) for p in rule.source_patterns if (p, index) not in found]
    return tuple(slots), tuple(lacks)


def _numbered(pattern: str) -> str:
    return pattern.replace("*.", r"(\d+)\.")


def _name(rule: WeightConverter, like: str, pattern: str, index: int) -> str:
    """The name that expert `index` has on disk under a pattern, told from another of the same rule."""
    mine = pattern.replace("*", str(index))
    for other in rule.source_patterns:
        like, changed = re.subn(_numbered(other), mine, like)
        if changed:
            break
    return like


def run_rule(origin: Origin, model: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What transformers' own rule makes of whole tensors (by their names on disk): parameter -> values."""
    assert origin.converter is not None
    rule = deepcopy(origin.converter)
    for pattern, entry in origin.collected:
        value = values[entry.name]
        rule.add_tensor(origin.name, entry.name, pattern, lambda value=value: value)  # type: ignore[arg-type]
    with torch.no_grad():
        made = rule.convert(origin.name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
