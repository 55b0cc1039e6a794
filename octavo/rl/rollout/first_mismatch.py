"""Finds the first module whose activations differ between rollout and trainer for the same tokens.

A completion runs twice with the same weights: token by token as in the engine, and in one forward as in the trainer.
The inputs and outputs of each module are compared in the trainer's call order. GEMMs of different shapes round
differently, so a difference counts only above :func:`rounding`: the norm of the difference of a token's activations,
relative to their norm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def rounding(dtype: torch.dtype) -> float:
    """Return the relative distance that GEMMs of different shapes rarely exceed: 1e-4 in fp32, and three units in the
    last place in BF16, where single FP8 codes of inputs change too."""
    return max(1e-4, 3 * torch.finfo(dtype).eps)


Place = tuple[str, str, int]  # module, "in" or "out", number of the call in a forward


class Difference(NamedTuple):
    """The module, described in words; the largest relative distance of a token; and whether it exceeds rounding."""

    module: str
    distance: float
    exceeds_rounding: bool

    def __str__(self) -> str:
        if self.exceeds_rounding:
            return (
                f"the first layer that differs is {self.module}, by {self.distance:.2g} of the norm of its activations"
            )
        return (
            "no layer differs by more than rounding, which accumulates: the largest difference is "
            f"{self.distance:.2g} of the norm of the activations, in {self.module}"
        )


def first_difference(
    model: nn.Module, train: Callable[[], Any], generate: Callable[[], Any], limit: float
) -> Difference | None:
    """Return the first difference above `limit` between `train` and `generate`, which run the model over the same
    tokens. If none exceeds the limit, return the largest one, or None if all activations are bit-identical."""
    with _record_activations(model) as trainer:
        train()
    with _record_activations(model) as engine:
        generate()
    largest: Difference | None = None
    # The trainer runs the completion in one forward; a module that it calls more often has no counterpart to compare.
    for place, (expected,) in ((place, tensors) for place, tensors in trainer.items() if len(tensors) == 1):
        pieces = [piece for piece in engine.get(place, ()) if piece.shape[1:] == expected.shape[1:]]
        if not pieces or len(pieces) != len(engine[place]):
            continue
        actual = torch.cat(pieces)
        if len(expected) - len(actual) not in (0, 1):  # the engine samples the last token and does not run it
            continue
        distance = _distance(expected[: len(actual)], actual)
        if distance > limit:
            return Difference(_describe(place), distance, True)
        if distance and (largest is None or distance > largest.distance):
            largest = Difference(_describe(place), distance, False)
    return largest


def _distance(x: Tensor, y: Tensor) -> float:
    """Return the largest |x - y| / |x| over tokens, or infinity if the difference is NaN."""
    x, y = (t.reshape(len(t), -1).double() for t in (x, y))
    difference, norm = (x - y).norm(dim=1), x.norm(dim=1)
    ratio = torch.where(difference > 0, difference / norm, 0.0).where(~(x - y).isnan().any(dim=1), torch.inf)
    return float(ratio.max()) if len(ratio) else 0.0


def _describe(place: Place) -> str:
    name, end, _ = place
    if end == "out":
        return name
    parent, _, child = name.rpartition(".")
    return f"{parent or 'the model'} (in the input of its {child})"


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has expert weights (three dimensions). Inside it tokens are sorted by expert."""
    return any(p is not None and p.dim() == 3 for p in module._parameters.values())


@contextmanager
def _record_activations(model: nn.Module) -> Iterator[dict[Place, list[Tensor]]]:
    """Record the inputs and outputs of each module in host memory: one tensor [tokens, ...] per forward of the model,
    in call order."""
    tensors: dict[Place, list[Tensor]] = defaultdict(list)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    hooks = [model.register_forward_pre_hook(lambda *args: calls.clear())]  # calls are numbered per forward

    def record(name: str, end: str, values: Any) -> None:
        tensor = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1), None)
        if tensor is not None:
            call = calls[name, end] = calls[name, end] + 1
            flat = tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
            tensors[name, end, call].append(flat.detach().cpu().clone())

    modules = dict(model.named_modules())
    sorted_inside = tuple(f"{name}." for name, module in modules.items() if _has_experts(module))
    for name, module in modules.items():
        if not name or name.startswith(sorted_inside):
            continue

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            record(name, "in", (*args, *kwargs.values()))

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            record(name, "out", output if isinstance(output, tuple) else (output,))

        hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield tensors
    finally:
        for hook in hooks:
            hook.remove()
