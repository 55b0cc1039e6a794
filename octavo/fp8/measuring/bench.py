"""The cost of a linear layer on this machine: forward, dgrad and wgrad with quantization, in BF16 and in each recipe.

A :class:`Case` is measured for each distinct kind, shape and combination of gradients in a model, with the tokens of
one forward. All candidates of a case (BF16, and each allowed recipe on each backend that supports it) are timed
together by :func:`octavo.fp8.measuring.timing.time_calls`, with the same modules, autograd and autocast as in training.
Candidates that fail, or whose results are not finite or too far from BF16, are rejected with a reason.

Codes of weights are cast once per optimizer step and shared by its micro-steps. So each FP8 candidate is timed twice:
with valid codes, and with codes dropped before the call. The difference is the cost of the cast, which a plan divides
by the number of micro-steps (:meth:`Entry.cost`). BF16 casts fp32 weights in each micro-step, as autocast does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.base import accelerator
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.delayed import convert
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.linear import Linear
from octavo.fp8.kernels.registry import Selection
from octavo.fp8.measuring.cases import _PRECISION, HIGH, Case, Entry, Measured, MeasureError, list_candidates
from octavo.fp8.measuring.timing import Timing, time_calls
from octavo.fp8.metrics import SOUND_DIFF
from octavo.fp8.moe.experts import Experts
from octavo.fp8.weights.cache import invalidate

_ROWS = 1 << 24  # elements compared at a time, because float64 copies of large outputs may not fit into memory


Timer = Callable[[Case, Mapping[str, Callable[[], Any]], torch.device], Mapping[str, Timing]]


def measure_time(case: Case, calls: Mapping[str, Callable[[], Any]], device: torch.device) -> Mapping[str, Timing]:
    """Time the calls; the default timer of :func:`measure_case`."""
    return time_calls(calls, device, warmup=2, rounds=10, budget=0.5 * len(calls))


def measure_case(
    case: Case,
    recipes: Sequence[Recipe],
    device: torch.device,
    requested: str = "auto",
    experts: nn.Module | None = None,
    timer: Timer = measure_time,
) -> Measured:
    """Measure BF16 and all candidates of one case.

    Args:
        recipes: the allowed recipes.
        requested: "auto", or the name of the only allowed backend.
        experts: the stock module of a case of experts. Its structure is copied, but not its weights.

    Raises:
        MeasureError: the case does not fit into memory, or high precision itself fails.
    """
    try:
        bench = _Bench(case, device, experts)
        entries = {HIGH: Entry("", {})}
        calls: dict[str, Callable[[], Any]] = {HIGH: bench.call(bench.stock)}
        truth = calls[HIGH]()
    except RuntimeError as error:  # out of memory is one
        raise MeasureError(
            f"{case} cannot be measured on {device}: {_first_line(error)}. Give fewer tokens (--tokens), or free the "
            "device."
        ) from error
    for name, recipe, chosen in list_candidates(case, recipes, device, requested):
        entry = Entry(recipe.summary(), {g: s.backend.name for g, s in chosen.items()})
        try:
            module = bench.make_fp8_module(recipe, chosen)
            call = bench.call(module)
            why = _why_unhealthy(call(), truth)
        except Exception as error:  # any error of a kernel rejects the candidate and is reported
            why = _first_line(error)
        if why is not None:
            entries[name] = replace(entry, rejected=why)
            continue
        entries[name] = entry
        calls[name], calls[f"{name}, cold"] = call, _drop_codes_before(module, call)
    times = timer(case, calls, device)
    for name in calls:
        if name in entries:
            entries[name] = _add_times(entries[name], times[name], times.get(f"{name}, cold"))
    return Measured(entries)


class _Bench:
    """A layer of one case with two sets of inputs, which alternate so that inputs are not cached."""

    def __init__(self, case: Case, device: torch.device, experts: nn.Module | None) -> None:
        self.case, self.device = case, device
        dtype = {v: k for k, v in _PRECISION.items()}.get(case.weights, torch.float32)
        self.low = accelerator.autocast_dtype(device) or torch.float32
        if case.kind == "experts":
            if experts is None:
                raise MeasureError(f"{case} needs its module of experts.")
            self.stock = _empty_copy(experts, device, dtype)
        else:
            self.stock = nn.Linear(case.k, case.n, bias=case.bias, device=device, dtype=dtype)
        with torch.no_grad():
            for p in self.stock.parameters():
                p.normal_(std=0.02)
        self.stock.requires_grad_(not case.frozen).train()
        self.inputs = [self._make_input() for _ in range(2)]

    def _make_input(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return (inputs of the module, gradient of its output)."""
        case = self.case
        x = torch.randn(case.m, case.k, device=self.device).to(self.low).requires_grad_(case.dgrad)
        if case.kind != "experts":
            return (x,), torch.randn(case.m, case.n, device=self.device).to(self.low)
        assert case.experts is not None and case.top_k is not None
        index = torch.rand(case.m, case.experts, device=self.device).topk(case.top_k, dim=1).indices
        share = torch.full(index.shape, 1 / case.top_k, device=self.device, dtype=self.low)
        return (x, index, share), torch.randn(case.m, case.k, device=self.device).to(self.low)

    def make_fp8_module(self, recipe: Recipe, chosen: Mapping[str, Selection]) -> nn.Module:
        """Return an FP8 layer with the same weights."""
        if self.case.kind != "experts":
            return _make_fp8_layer(self.stock, LayerGemms(str(self.case), recipe, chosen)).train()
        memo = {id(p): p for p in self.stock.parameters()}
        module = copy.deepcopy(self.stock, memo)
        sites = {name: LayerGemms(name, recipe, chosen) for name in ("gate_up_proj", "down_proj")}
        return Experts.convert(module, sites).train()

    def call(self, module: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that runs a forward and a backward on alternating inputs and returns (y, gradients)."""
        turn = 0

        def run() -> tuple[Tensor, ...]:
            nonlocal turn
            inputs, dy = self.inputs[turn % 2]
            turn += 1
            with self._autocast():
                y = module(*inputs)
            wanted = [t for t in (inputs[0], *module.parameters()) if t.requires_grad]
            return (y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))) if wanted else (y,)

        return run

    def _autocast(self) -> AbstractContextManager[Any]:
        return accelerator.autocast(self.device, accelerator.autocast_dtype(self.device))


def _make_fp8_layer(stock: nn.Module, site: LayerGemms) -> Linear:
    """Return an FP8 layer with the weights of a stock layer."""
    assert isinstance(stock, nn.Linear)
    twin = nn.Linear(stock.in_features, stock.out_features, bias=stock.bias is not None, device="meta")
    twin._parameters.update(stock._parameters)
    return convert(twin, site)


def _drop_codes_before(module: nn.Module, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        invalidate(module)
        return call()

    return run


def _add_times(entry: Entry, warm: Timing, cold: Timing | None) -> Entry:
    cast_seconds = 0.0 if cold is None else max(0.0, cold.device - warm.device)
    return replace(entry, seconds=warm.device, host=warm.host, weights=cast_seconds, spread=warm.spread)


def _empty_copy(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Copy the structure of a module to ``device`` with new, uninitialized weights."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, device="meta", dtype=dtype), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo).to_empty(device=device)


def _why_unhealthy(results: Sequence[Tensor], truth: Sequence[Tensor]) -> str | None:
    """Return why results (the output first) are rejected, or None if they are finite and close to BF16."""
    words = ("y", "the first gradient", "the second gradient", "the third gradient", "a gradient")
    for i, (a, b) in enumerate(zip(results, truth, strict=True)):
        what = words[min(i, 4)]
        if not bool(a.isfinite().all()):
            return f"{what} is not finite"
        difference = _calc_diff_by_parts(a.detach(), b.detach())
        if not difference < SOUND_DIFF:
            return f"{what} is far from high precision: calc_diff {difference:.2g}, the limit is {SOUND_DIFF}"
    return None


def _calc_diff_by_parts(a: Tensor, b: Tensor) -> float:
    """Compute calc_diff in parts."""
    off = total = 0.0
    for x, y in zip(a.flatten().split(_ROWS), b.flatten().split(_ROWS), strict=True):
        x, y = x.double(), y.double()
        off += float((x - y).square().sum())
        total += float(x.square().sum() + y.square().sum())
    return off / total if total else 0.0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
