"""Massive activations: a few values of a layer's input that are so large that one FP8 scale for the whole tensor leaves
the other values few bits (Sun et al., arXiv 2402.17762). Pretrained models have them in inputs of `down_proj`.

Forward pre-hooks read the first input of each FP8 layer and are removed afterwards, so that layers know nothing of
them, later steps cost nothing, and no result changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.base.recipe_specs import COARSE_TO_FINE, CURRENT_SCALING, SPECS, TENSOR, Block
from octavo.fp8.observe import phase

SMALLEST_NORMAL = 2.0**-6 / 448
"""E4M3's smallest normal number, in units of its largest."""

REPORTED = 0.25
"""The share of an input's values below the smallest normal, under one scale, from which the input is reported. Such
values keep 0 to 2 of the 3 mantissa bits. Unlike amax / RMS, which is at most the square root of the number of values,
the share hardly depends on the number of tokens."""

HARMFUL = 0.9
"""The share under the scales of the plan's recipe from which outputs suffer: the error of a typical token is then 1.3
to 1.6 times the error with finer scales, and rises quickly (docs/lab/massive_activations.md)."""

# Variants have the blocks of the recipe that they differ from.
_BLOCK_OF = {name: SPECS[name].blocks[0] for name in CURRENT_SCALING if not SPECS[name].variant}
_MAX_NAMED = 2  # layers in a line


@dataclass(frozen=True)
class InputStatistics:
    """Figures of the first input of a layer.

    amax       its largest magnitude
    rms        root of its mean square
    subnormal  recipe -> share of its nonzero values below E4M3's smallest normal under the recipe's scales, 0 to 1
    """

    amax: float
    rms: float
    subnormal: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """amax / RMS"""
        return self.amax / self.rms

    @property
    def under_one_scale(self) -> float:
        """The share of subnormal values if the tensor had one scale."""
        return self.under(TENSOR)

    def under(self, block: Block) -> float:
        """Return the share of subnormal values if each block of the input had a scale."""
        return self.subnormal[next(name for name, known in _BLOCK_OF.items() if known == block)]

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "amax_rms": self.ratio}


class InputWatch:
    """Reads the first input of each layer of `plan` whose forward casts it to FP8. Routed experts are not read: their
    inputs are formed inside the module of all experts."""

    def __init__(self, model: nn.Module, plan: fp8.Plan) -> None:
        modules = dict(model.named_modules())
        self._figures: dict[str, Tensor] = {}
        self._handles = [
            modules[row.name].register_forward_pre_hook(self._hook(row.name))
            for row in plan.rows
            if row.kind == "linear" and row.recipe is not None and row.recipe.fwd is not None and row.name in modules
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
        return {
            name: InputStatistics(amax, rms, dict(zip(_BLOCK_OF, shares, strict=True)))
            for name, (amax, rms, *shares) in rows.items()
            if 0 < amax + rms < float("inf")
        }

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def read(module: nn.Module, args: tuple[object, ...]) -> None:
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
    """Return [amax, RMS, share of subnormal values under each recipe] of x as a tensor on its device: reading it would
    wait for it."""
    magnitudes = x.abs().reshape(-1, x.shape[-1])
    rms = torch.linalg.vector_norm(x, dtype=torch.float32) / x.numel() ** 0.5
    zeros = x.numel() - torch.count_nonzero(magnitudes)
    shares = [
        (_count_subnormal(magnitudes, block) - zeros) / (x.numel() - zeros).clamp(min=1) for block in _BLOCK_OF.values()
    ]
    return torch.stack([magnitudes.amax().float(), rms, *shares])


def _count_subnormal(magnitudes: Tensor, block: Block) -> Tensor:
    """Return how many magnitudes [M, K], zeros included, are below the smallest normal of their block."""
    rows, columns = magnitudes.shape
    width = columns if block[1] == -1 else block[1]
    padded = nn.functional.pad(magnitudes, (0, -columns % width)).view(rows, -1, width)
    amax = padded.amax() if block[0] == -1 else padded.amax(-1, keepdim=True)
    small = padded < (amax.float() * SMALLEST_NORMAL).to(padded.dtype)
    # Values of a zero block are not below 0; all of them are zeros, which the caller does not count.
    return torch.count_nonzero((small | (padded == 0)).view(rows, -1)[:, :columns])


def find_massive(statistics: Mapping[str, InputStatistics]) -> dict[str, InputStatistics]:
    """Return the inputs with massive activations, those with the largest share of subnormal values first."""
    massive = {name: one for name, one in statistics.items() if one.under_one_scale >= REPORTED}
    return dict(sorted(massive.items(), key=lambda item: -item[1].under_one_scale))


def describe_massive(massive: Mapping[str, InputStatistics], plan: fp8.Plan) -> str:
    """Return one line: which inputs of `plan`'s layers have massive activations, and what to do. `massive` is the
    result of `find_massive`, not empty."""
    worst = ", ".join(f"{name} ({one.ratio:.0f} times its RMS)" for name, one in [*massive.items()][:_MAX_NAMED])
    others = f" and {len(massive) - _MAX_NAMED} more" if len(massive) > _MAX_NAMED else ""
    return f"massive activations in the input of {worst}{others}: {_advice(massive, plan)}"


def _advice(massive: Mapping[str, InputStatistics], plan: fp8.Plan) -> str:
    shares: dict[str, float] = {}  # layer -> its share under the scales that the plan gives it
    names: dict[str, None] = {}
    for row in plan.rows:
        if row.name in massive and row.recipe is not None and row.recipe.fwd is not None:
            shares[row.name] = massive[row.name].under(row.recipe.fwd.a.block)
            names[row.recipe.name] = None
    bad = [name for name, share in shares.items() if share >= HARMFUL]
    lost = f"{' and '.join(names)} leaves {_percent(max(shares.values()))} of their values subnormal in FP8"
    if not bad:
        return f"nothing to do, {lost}, and outputs suffer from {_percent(HARMFUL)} on"
    for finer in COARSE_TO_FINE:
        if (rest := max(massive[name].under(_BLOCK_OF[finer]) for name in bad)) < HARMFUL:
            rules = ", ".join(f"{{match: {name}, recipe: {finer}}}" for name in bad[:_MAX_NAMED])
            ellipsis = "" if len(bad) <= _MAX_NAMED else ", ..."
            return f"{lost}, {finer} {_percent(rest)}: fp8.rules=[{rules}{ellipsis}]"
    return f"{lost}, and {COARSE_TO_FINE[-1]} does not help; recipe: off in fp8.rules keeps such a layer out of FP8"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
