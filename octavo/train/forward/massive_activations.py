"""Massive activations: a few values of a layer's input that are so large that one FP8 scale for the whole tensor leaves
the other values few bits (Sun et al., arXiv 2402.17762). Pretrained models have them in inputs of `down_proj`.

Forward pre-hooks read the first input of each FP8 layer and are removed afterwards, so that layers know nothing of
them, later steps cost nothing, and no result changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.base.recipe_specs import PER_TOKEN, TENSOR
from octavo.fp8.observe import phase

SMALLEST_NORMAL = 2.0**-6 / 448
"""E4M3's smallest normal number, in units of its largest."""

THRESHOLD = 0.25
"""The share of an input's values below the smallest normal from which the input is reported. Such values keep 0 to 2 of
the 3 mantissa bits. Unlike amax / RMS, which is at most the square root of the number of values, the share hardly
depends on the number of tokens."""


@dataclass(frozen=True)
class InputStatistics:
    """Figures of the first input of a layer.

    amax       its largest magnitude
    rms        root of its mean square
    subnormal  share of its nonzero values below E4M3's smallest normal, if the tensor had one scale: 0 to 1
    """

    amax: float
    rms: float
    subnormal: float

    @property
    def ratio(self) -> float:
        """amax / RMS"""
        return self.amax / self.rms

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "amax_rms": self.ratio}

    @classmethod
    def from_json(cls, figures: Mapping[str, float]) -> InputStatistics:
        return cls(figures["amax"], figures["rms"], figures["subnormal"])


class InputWatch:
    """Reads the first input of each layer of `plan` that casts it to FP8. Routed experts are not read: their inputs are
    formed inside their module."""

    def __init__(self, model: nn.Module, plan: fp8.Plan) -> None:
        modules = dict(model.named_modules())
        self._figures: dict[str, Tensor] = {}
        self._handles = [
            modules[row.name].register_forward_pre_hook(self._hook(row.name))
            for row in plan.rows
            if row.kind == "linear" and casts_input(row) and row.name in modules
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def statistics(self) -> dict[str, InputStatistics]:
        """Return the figures by layer, in the order of their forwards. Layers that did not run, or whose input was zero
        or not finite, are absent. Waits for the device."""
        rows = {name: figures.tolist() for name, figures in self._figures.items()}
        return {name: InputStatistics(*row) for name, row in rows.items() if row[1] > 0 and sum(row) < float("inf")}

    def _hook(self, name: str) -> Any:
        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            if name in self._figures or not args or not isinstance(args[0], Tensor) or not args[0].numel():
                return
            if phase().counted:  # False in the forward of a dummy image
                self._figures[name] = _figures(args[0].detach())

        return read


@contextmanager
def watch_inputs(model: nn.Module, plan: fp8.Plan) -> Iterator[InputWatch]:
    """Read inputs of the forwards inside the context."""
    watch = InputWatch(model, plan)
    try:
        yield watch
    finally:
        watch.remove()


@torch.no_grad()
def _figures(x: Tensor) -> Tensor:
    """Return [amax, RMS, share of subnormal values] of x as a tensor on its device: reading it would wait for it."""
    magnitudes = x.abs()
    amax = magnitudes.amax().float()
    rms = torch.linalg.vector_norm(x, dtype=torch.float32) / x.numel() ** 0.5
    nonzero = torch.count_nonzero(magnitudes)
    small = torch.count_nonzero(magnitudes < (amax * SMALLEST_NORMAL).to(x.dtype)) - (x.numel() - nonzero)
    return torch.stack([amax, rms, small / nonzero.clamp(min=1)])


def find_massive(statistics: Mapping[str, InputStatistics]) -> dict[str, InputStatistics]:
    """Return the inputs with massive activations, those with the largest share of subnormal values first."""
    massive = {name: one for name, one in statistics.items() if one.subnormal >= THRESHOLD}
    return dict(sorted(massive.items(), key=lambda item: -item[1].subnormal))


def describe_massive(massive: Mapping[str, InputStatistics], plan: fp8.Plan) -> str:
    """Return one line: which inputs of `plan`'s layers have massive activations, and what to do. `massive` is the
    result of `find_massive`, not empty."""
    worst = ", ".join(f"{name} ({one.ratio:.0f} times its RMS)" for name, one in [*massive.items()][:_MAX_NAMED])
    more = f" and {len(massive) - _MAX_NAMED} more" if len(massive) > _MAX_NAMED else ""
    return f"massive activations in the input of {worst}{more}: {_advice(massive, plan)}"


def _advice(massive: Mapping[str, InputStatistics], plan: fp8.Plan) -> str:
    coarse = [row for row in plan.rows if row.name in massive and shares_one_scale(row)]
    if not coarse:
        recipes = {row.recipe.name: None for row in plan.rows if row.name in massive and row.recipe is not None}
        return f"nothing to do, since tokens do not share scales in {' and '.join(recipes)}"
    share = max(massive[row.name].subnormal for row in coarse)
    rules = ", ".join(f"{{match: {row.name}, recipe: {_FINER}}}" for row in coarse[:_MAX_NAMED])
    more = "" if len(coarse) <= _MAX_NAMED else ", ..."
    recipes = {row.recipe.name: None for row in coarse if row.recipe is not None}
    return (
        f"{' and '.join(recipes)} has one scale for all tokens, with which up to {100 * share:.0f} % of the values are "
        f"subnormal; a scale for each token costs nothing: fp8.rules=[{rules}{more}]"
    )


_MAX_NAMED = 2
_FINER = PER_TOKEN[0]


def casts_input(row: fp8.PlanRow) -> bool:
    """Return True if a GEMM of the layer casts x to FP8: fwd or wgrad."""
    return row.recipe is not None and (row.recipe.fwd is not None or _wgrad_cast(row) is not None)


def _wgrad_cast(row: fp8.PlanRow) -> fp8.CastSpec | None:
    """Return the cast of x in wgrad, None if wgrad does not run in FP8."""
    assert row.recipe is not None
    return None if row.recipe.wgrad is None or row.row.frozen else row.recipe.wgrad.b


def shares_one_scale(row: fp8.PlanRow) -> bool:
    """Return True if fwd or wgrad casts x with one scale for the whole tensor."""
    if row.recipe is None:
        return False
    casts = [None if row.recipe.fwd is None else row.recipe.fwd.a, _wgrad_cast(row)]
    return any(spec is not None and spec.block == TENSOR for spec in casts)
