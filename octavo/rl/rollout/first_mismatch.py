"""Where rollout and trainer part: the first module that gives other numbers for the same tokens.

One completion runs twice with the same weights: token by token as the engine ran it, and in one piece as the trainer
does. What goes into each module and comes out of it is compared in the order in which the trainer calls them. Products
of other shapes round differently, so only what differs by more than rounding counts: the distance of a token's numbers
over their length, above :func:`rounding` of the dtype that the model computes in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def rounding(dtype: torch.dtype) -> float:
    """The relative distance that products of other shapes hardly exceed: 1e-4 in fp32, three units of the last place in
    BF16, where FP8 codes of inputs flip as well."""
    return max(1e-4, 3 * torch.finfo(dtype).eps)


Place = tuple[str, str, int]  # module, "in" or "out", which call of a forward


class Difference(NamedTuple):
    """`where` in words; `by`: the largest relative distance of a token's numbers; `beyond` rounding, or not."""

    where: str
    by: float
    beyond: bool

    def __str__(self) -> str:
        if self.beyond:
            return f"the layer that differs first is {self.where}, by {self.by:.2g} of its numbers' length"
        return (
            f"no layer differs by more than rounding, which adds up: the largest difference is {self.by:.2g} of its "
            f"numbers' length, in {self.where}"
        )


def first_difference(
    model: nn.Module, train: Callable[[], Any], generate: Callable[[], Any], limit: float
) -> Difference | None:
    """What `train` and `generate`, which each run the model over the same tokens, compute differently first, by more
    than `limit`; where nothing does, where they differ most; None where all is equal to the bit."""
    with _watched(model) as ours:
        train()
    with _watched(model) as theirs:
        generate()
    most: Difference | None = None
    for place, (whole,) in ((place, found) for place, found in ours.items() if len(found) == 1):
        pieces = [piece for piece in theirs.get(place, ()) if piece.shape[1:] == whole.shape[1:]]
        if not pieces or len(pieces) != len(theirs[place]):
            continue
        other = torch.cat(pieces)
        if len(whole) - len(other) not in (0, 1):  # the last token was chosen, and is not looked back at
            continue
        distance = _distance(whole[: len(other)], other)
        if distance > limit:
            return Difference(_in_words(place), distance, True)
        if distance and (most is None or distance > most.by):
            most = Difference(_in_words(place), distance, False)
    return most


def _distance(x: Tensor, y: Tensor) -> float:
    """The largest over tokens of |x - y| / |x|; NaN against a number is infinitely far."""
    x, y = (t.reshape(len(t), -1).double() for t in (x, y))
    apart, length = (x - y).norm(dim=1), x.norm(dim=1)
    ratio = torch.where(apart > 0, apart / length, 0.0).where(~(x - y).isnan().any(dim=1), torch.inf)
    return float(ratio.max()) if len(ratio) else 0.0


def _in_words(place: Place) -> str:
    name, end, _ = place
    if end == "out":
        return name
    parent, _, own = name.rpartition(".")
    return f"{parent or 'the model'} (in what it hands to its {own})"


def _sorts(module: nn.Module) -> bool:
    """Experts, whose weights have three dimensions: tokens stand in the order of experts inside."""
    return any(p is not None and p.dim() == 3 for p in module._parameters.values())


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[Place, list[Tensor]]]:
    """What goes into and comes out of each module, in host memory: a tensor [tokens, ...] for each forward of the
    model, in the order of calls."""
    found: dict[Place, list[Tensor]] = defaultdict(list)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    hooks = [model.register_forward_pre_hook(lambda *given: calls.clear())]

    def note(name: str, end: str, values: Any) -> None:
        tensor = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1), None)
        if tensor is not None:
            call = calls[name, end] = calls[name, end] + 1
            flat = tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor
            found[name, end, call].append(flat.detach().cpu().clone())

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
        yield found
    finally:
        for hook in hooks:
            hook.remove()
