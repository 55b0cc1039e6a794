"""The first module whose numbers differ between rollout and trainer for the same tokens.

A completion runs twice with the same weights: token by token as in the engine, and as a whole as in the trainer. The
inputs and outputs of each module are compared in the order in which the trainer calls the modules. Products of other
shapes round differently, so only a difference above rounding counts: the norm of the difference of a token's numbers,
relative to their norm, above :func:`rounding` of the dtype that the model computes in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def rounding(dtype: torch.dtype) -> float:
    """The relative distance that products of other shapes rarely exceed: 1e-4 in fp32, and three units in the last
    place in BF16, where single FP8 codes of inputs change too."""
    return max(1e-4, 3 * torch.finfo(dtype).eps)


Place = tuple[str, str, int]  # module, "in" or "out", which call of a forward


class Difference(NamedTuple):
    """`where`: the module in words; `by`: the largest relative distance of a token's numbers; `beyond`: above
    rounding."""

    where: str
    by: float
    beyond: bool

    def __str__(self) -> str:
        if self.beyond:
            return f"the first layer that differs is {self.where}, by {self.by:.2g} of the norm of its numbers"
        return (
            f"no layer differs by more than rounding, which accumulates: the largest difference is {self.by:.2g} of "
            f"the norm of its numbers, in {self.where}"
        )


def first_difference(
    model: nn.Module, train: Callable[[], Any], generate: Callable[[], Any], limit: float
) -> Difference | None:
    """The first difference above `limit` between `train` and `generate`, which each run the model over the same tokens.
    If there is none, the largest difference; None if all numbers are equal to the bit."""
    with _watched(model) as ours:
        train()
    with _watched(model) as theirs:
        generate()
    most: Difference | None = None
    # The trainer runs the completion in one forward; a module that it calls more often has no counterpart to compare.
    for place, (whole,) in ((place, tensors) for place, tensors in ours.items() if len(tensors) == 1):
        pieces = [piece for piece in theirs.get(place, ()) if piece.shape[1:] == whole.shape[1:]]
        if not pieces or len(pieces) != len(theirs[place]):
            continue
        other = torch.cat(pieces)
        if len(whole) - len(other) not in (0, 1):  # the engine does not run the last token, which it only samples
            continue
        distance = _distance(whole[: len(other)], other)
        if distance > limit:
            return Difference(_in_words(place), distance, True)
        if distance and (most is None or distance > most.by):
            most = Difference(_in_words(place), distance, False)
    return most


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest |x - y| / |x| over tokens; infinite where only one of them is NaN."""
    x, y = (t.reshape(len(t), -1).double() for t in (x, y))
    apart, length = (x - y).norm(dim=1), x.norm(dim=1)
    ratio = torch.where(apart > 0, apart / length, 0.0).where(~(x - y).isnan().any(dim=1), torch.inf)
    return float(ratio.max()) if len(ratio) else 0.0


def _in_words(place: Place) -> str:
    name, end, _ = place
    if end == "out":
        return name
    parent, _, child = name.rpartition(".")
    return f"{parent or 'the model'} (in the input of its {child})"


def _sorts(module: nn.Module) -> bool:
    """Whether a module holds experts (weights of three dimensions), inside which tokens are sorted by expert."""
    return any(p is not None and p.dim() == 3 for p in module._parameters.values())


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[Place, list[Tensor]]]:
    """The inputs and outputs of each module, in host memory: a tensor [tokens, ...] for each forward of the model, in
    the order of calls."""
    tensors: dict[Place, list[Tensor]] = defaultdict(list)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    hooks = [model.register_forward_pre_hook(lambda *args: calls.clear())]  # a forward counts its calls from 1

    def note(name: str, end: str, values: Any) -> None:
        tensor = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1), None)
        if tensor is not None:
            call = calls[name, end] = calls[name, end] + 1
            flat = tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
            tensors[name, end, call].append(flat.detach().cpu().clone())

    modules = dict(model.named_modules())
    sorted_inside = tuple(f"{name}." for name, module in modules.items() if _sorts(module))
    for name, module in modules.items():
        if not name or name.startswith(sorted_inside):
            continue

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            note(name, "in", (*args, *kwargs.values()))

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            note(name, "out", output if isinstance(output, tuple) else (output,))

        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield tensors
    finally:
        for hook in hooks:
            hook.remove()
