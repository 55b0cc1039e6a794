"""The axes of a model's tensors, and its permutations drawn from a key.

:mod:`octavo.sealing.rules` determines what is permuted, and the uses of its items how far a permutation may reach
(:mod:`octavo.sealing.draw`). :attr:`Structure.stays` lists what is not permuted, and why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from octavo import models
from octavo.sealing.draw import Use, draw_block_order, draw_head_orders, draw_order
from octavo.sealing.errors import SealError
from octavo.sealing.key import Key
from octavo.sealing.permute import FIXED, Axis, Layout, Segment, axis_size
from octavo.sealing.rules import find_rule

UNCONSTRAINED = ("vocab", "patch", "bins")
_EXPERT_SUFFIX = re.compile(r"\.(experts|gate|router)(\..*)?$")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads")
_REPEATED = re.compile(r"(\d+)\*(.+)")


@dataclass
class Structure:
    """The permuted axes of a model.

    layouts  parameter or persistent buffer -> its axes
    sizes    permutation -> its number of items
    uses     permutation -> the positions of its items (`draw.Use`)
    heads    attention -> (permutation of its groups, of its heads)
    groups   permutation of experts -> number of expert groups among which a router chooses first
    stays    what is not permuted, in words
    """

    layouts: dict[str, Layout] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    uses: dict[str, set[Use]] = field(default_factory=lambda: defaultdict(set))
    heads: dict[str, tuple[str, str]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    stays: list[str] = field(default_factory=list)

    def draw(self, key: Key) -> dict[str, np.ndarray]:
        """Return permutation -> its order."""
        orders: dict[str, np.ndarray] = {}
        for outer, inner in self.heads.values():
            count, num_heads = self.sizes[outer], self.sizes[inner]
            if {outer, inner} & self.fixed:
                orders[outer], orders[inner] = np.arange(count), np.arange(num_heads)
                continue
            orders[outer], orders[inner] = draw_head_orders(
                key, outer, count, num_heads // count, self.uses[outer], self.uses[inner]
            )
        for name, count in self.sizes.items():
            if name in orders:
                continue
            if name in self.groups:
                orders[name] = draw_block_order(key, name, count, [(1, 0)], (count // self.groups[name],))
            elif name in UNCONSTRAINED:
                orders[name] = draw_order(key, name, count)
            else:
                orders[name] = draw_block_order(key, name, count, self.uses[name])
        return orders


def read_structure(model: nn.Module) -> Structure:
    """Return the structure of a stock model, which may be on the meta device. Raises SealError, naming the tensor, for
    a tensor without a rule or with unexpected sizes."""
    return _StructureReader(model).read()


class _StructureReader:
    """Determines the structure of one model."""

    def __init__(self, model: Any) -> None:
        self.model, self.config, self.result = model, model.config, Structure()
        self.family = models.describe(model)
        self.modules = dict(model.named_modules())

    def read(self) -> Structure:
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        for name, tensor in self.model.state_dict().items():
            if name not in tied:
                self.result.layouts[name] = self._layout(name, tuple(tensor.shape))
        text = self.config.get_text_config()
        attention = getattr(text, "attn_config", None)
        if getattr(text, "alibi", False) or getattr(attention, "alibi", False):
            self.result.fixed |= {name for pair in self.result.heads.values() for name in pair}
            self.result.stays.append("heads: with ALiBi a head's slope depends on its position")
        self.result.stays += ["positions within a head: rotary embeddings pair them", "layers", "positions of patches"]
        return self.result

    def _layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        owner, _, leaf = name.rpartition(".")
        module = self.modules[owner]
        subject = owner if leaf in ("weight", "bias") else name
        rule = find_rule(subject, type(module).__name__)
        if rule is None:
            raise SealError(
                f"{name} {list(shape)} of {type(self.model).__name__} is unknown to sealing. Left unpermuted, it would "
                "reveal the order of adjacent layers, so this model cannot be sealed"
            )
        words = [word.strip() for word in rule.split(",")]
        view = shape
        if words[-1] == "patch" and len(shape) > 1:
            view = (shape[0], int(np.prod(shape[1:])))
        if len(shape) == 1:
            words = words[:1]
        if len(words) == 1:  # [1, E] of Ernie's corrections
            words = ["-"] * (len(view) - 1) + words
        if words[0] == "experts" and len(view) == 3:
            return self._experts(name, subject, module, words, view)
        if len(words) != len(view):
            raise self._shape_error(name, shape, rule)
        axes = tuple(self._axis(word, places, subject, name) for word, places in zip(words, view, strict=True))
        for axis in axes:
            self._record_use(axis)
        return Layout(axes, None if view == shape else view)

    def _experts(self, name: str, subject: str, module: Any, words: list[str], shape: tuple[int, ...]) -> Layout:
        """Return the layout of stacked experts [E, N, K], each with a separate permutation of its width."""
        if getattr(module, "is_transposed", False):
            words = [words[0], words[2], words[1]]
        first = self._axis(words[0], shape[0], subject, name)
        each = tuple(
            tuple(
                self._axis(word.replace("@width", f"@width{number}"), places, subject, name)
                for word, places in zip(words[1:], shape[1:], strict=True)
            )
            for number in range(shape[0])
        )
        for axes in each:
            for axis in axes:
                self._record_use(axis)
        return Layout((first,), each=each)

    def _record_use(self, axis: Axis) -> None:
        start = 0
        for name, unit in axis:
            self.result.uses[name].add((unit, start))
            start += self.result.sizes[name] * unit

    # Words -----------------------------------------------------------------------------------------------------------

    def _axis(self, word: str, places: int, subject: str, name: str) -> Axis:
        """Return the axis for a word of a rule, with so many positions."""
        if word == "-" or (word.endswith("?") and places == self._head_dim(subject)):
            return FIXED
        word = word.removesuffix("?")
        parts = [part.strip() for part in word.split("+")]
        if len(parts) == 1 and (times := _REPEATED.fullmatch(parts[0])):
            label = self._label(times[2], subject)
            count = int(times[1]) or places // self._size(label, places, name)
            parts = [times[2]] * count
        if word.endswith("^"):
            label = self._label(word[:-1], subject)
            return self._check_segments(((label, places // self._size(label, places, name)),), places, name)
        labels = [self._label(part, subject) for part in parts]
        if all(part in ("q", "kv", "lk", "lv") for part in parts):
            return self._check_segments(self._head_segments(parts, labels, places, subject), places, name)
        return self._check_segments(tuple((label, 1) for label in labels), places, name, len(labels))

    def _check_segments(self, axis: tuple[tuple[str, int], ...], places: int, name: str, parts: int = 1) -> Axis:
        for label, _ in axis:
            self._size(label, places // parts, name)
        segments = tuple(Segment(*entry) for entry in axis)
        if axis_size(segments, self.result.sizes) != places:
            expected = " + ".join(f"{self.result.sizes[label]} x {unit} of {label}" for label, unit in axis)
            raise SealError(
                f"{name} has an axis of {places}, but {expected} were expected: this model cannot be sealed"
            )
        return segments

    def _size(self, label: str, places: int, name: str) -> int:
        """Return the number of items of a permutation; a new one has as many as there are positions."""
        return self.result.sizes.setdefault(label, places)

    def _label(self, word: str, subject: str) -> str:
        """Return the name of the permutation for a word at this parameter."""
        parent = subject.rpartition(".")[0]
        if word == "own":
            return self._part(subject)
        if word == "experts":
            label = f"{_EXPERT_SUFFIX.sub('', subject)}@experts"
            if (groups := getattr(self.config.get_text_config(), "n_group", None)) and groups > 1:
                self.result.groups[label] = groups
            return label
        if word in ("q", "kv", "lk", "lv"):
            return f"{parent}@{word}"
        if word.startswith("@"):
            base = parent.rpartition(".")[0] if word.startswith("@@") else parent
            rest = word.lstrip("@")
            return f"{base}{'.' if '@' in rest else '@'}{rest}"
        return word

    def _part(self, subject: str) -> str:
        for place, label in ((self.family.tower, "tower"), (self.family.audio_tower, "ear")):
            if place and subject.startswith(f"{place}."):
                return label
        return "res"

    def _head_segments(
        self, parts: list[str], labels: list[str], places: int, subject: str
    ) -> tuple[tuple[str, int], ...]:
        """Return the segments of heads, whose numbers come from the configuration."""
        config: Any = self._config(subject)
        if parts[0] in ("lk", "lv"):
            counts = {"lk": config.linear_num_key_heads, "lv": config.linear_num_value_heads}
            unit = {"lk": config.linear_key_head_dim, "lv": config.linear_value_head_dim}
        else:
            query_heads = _number_of_heads(config, *_HEADS)
            kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
            counts, unit = {"q": query_heads, "kv": kv_heads}, {}
        parent = subject.rpartition(".")[0]
        outer, inner = [f"{parent}@{word}" for word in (("lk", "lv") if "lk" in counts else ("kv", "q"))]
        self.result.heads[parent] = (outer, inner)
        for word, count in counts.items():
            self.result.sizes.setdefault(f"{parent}@{word}", count)
        total = sum(counts[part] for part in parts)
        equal_units = len(set(parts)) == 1 or not unit
        return tuple(
            (label, places // total if equal_units else unit[part]) for part, label in zip(parts, labels, strict=True)
        )

    def _head_dim(self, subject: str) -> int:
        """Return the head size of this attention."""
        config = self._config(subject)
        return int(getattr(config, "head_dim", None) or config.hidden_size // _number_of_heads(config, *_HEADS))

    def _config(self, subject: str) -> Any:
        part = self._part(subject)
        if part == "tower":
            return self.config.vision_config
        return self.config.audio_config if part == "ear" else self.config.get_text_config()

    def _shape_error(self, name: str, shape: tuple[int, ...], rule: str) -> SealError:
        return SealError(f"{name} has the shape {list(shape)}, but {rule} was expected: this model cannot be sealed")


def _number_of_heads(config: Any, *names: str) -> int:
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if count is None:
        raise SealError(f"the configuration of a {type(config).__name__} has no number of attention heads")
    return int(count)
