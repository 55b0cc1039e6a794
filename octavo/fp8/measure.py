"""What a linear layer costs on this machine: forward, dgrad and wgrad, quantization included, BF16 beside each recipe.

One :class:`Case` is measured for each distinct kind, shape and need of gradients in a model, with the tokens that one
forward really sends through it. All candidates of a case (BF16, and every allowed recipe on every backend that can do
it) are called in one run by :func:`octavo.fp8.timing.time_calls`, through the same modules, autograd and autocast as in
training. A candidate that fails, or whose outputs are not finite or far from BF16's, is out, with the reason.

Codes of weights are cast once an optimizer step and serve all its micro-steps. So every FP8 candidate is timed twice:
with valid codes, and with codes dropped before the call. The difference is the price of the cast; a plan divides it by
the micro-steps (:meth:`Entry.cost`). BF16 pays its own cast of fp32 weights in every micro-step, as autocast does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo.fp8.choose import backends_for
from octavo.fp8.experts import Experts
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.registry import BackendError, Selection
from octavo.fp8.linear import Linear, Site
from octavo.fp8.machine import Machine
from octavo.fp8.recipe import Recipe
from octavo.fp8.timing import Timed, time_calls
from octavo.fp8.topology import Row
from octavo.fp8.weights import invalidate

__all__ = ["Case", "Entry", "MeasureError", "Measured", "Measurements", "cases_of", "measure_case"]

#: calc_diff to BF16 of a sound y, dx and dw, the doctor's bound: E4M3 leaves about 1e-3, E5M2 gradients 5e-3, a wrong
#: scale or layout 1
SOUND = 0.02
HIGH = "high precision"
_ROWS = 1 << 24  # elements compared at once: float64 copies of a large output would not fit beside it
_PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MeasureError(RuntimeError):
    """A measurement that cannot be made or cannot be read; the message names the cure."""


@dataclass(frozen=True)
class Case:
    """What is measured: ``m`` tokens times a weight [n, k], with or without ``bias``; ``frozen`` runs no wgrad,
    ``dgrad`` False no dgrad; ``weights`` is the dtype they are kept in.

    Experts are measured as the whole module (class ``type``): ``experts`` of them, ``top_k`` a token, (n, k) being
    the shape of gate and up.
    """

    kind: str
    m: int
    n: int
    k: int
    bias: bool = False
    frozen: bool = False
    dgrad: bool = True
    weights: str = "fp32"
    experts: int | None = None
    top_k: int | None = None
    type: str = ""

    def __str__(self) -> str:
        more = [w for w, on in (("bias", self.bias), ("frozen", self.frozen), ("no dgrad", not self.dgrad)) if on]
        if self.experts is not None:
            more.append(f"{self.experts} experts, {self.top_k} a token, {self.type}")
        return " ".join([f"{self.kind} M={self.m} N={self.n} K={self.k} {self.weights}", *more])


@dataclass(frozen=True)
class Entry:
    """One candidate's figures. ``seconds`` of the device and ``host`` seconds of one micro-step with valid codes,
    ``weights`` more where the weights are cast anew; ``spread`` as in :class:`~octavo.fp8.timing.Timed`.
    ``rejected``: why it is out, and then nothing else counts."""

    recipe: str
    backends: Mapping[str, str]
    seconds: float = 0.0
    host: float = 0.0
    weights: float = 0.0
    spread: float = 0.0
    rejected: str | None = None

    def cost(self, micro_steps: int = 1) -> float:
        """Seconds a micro-step: what device and host need, whichever is more, and its part of the weights' cast."""
        return max(self.seconds + self.weights / micro_steps, self.host)


@dataclass(frozen=True)
class Measured:
    """A case's candidates by name; :data:`HIGH` is the baseline and always there."""

    entries: Mapping[str, Entry]

    @property
    def high(self) -> Entry:
        return self.entries[HIGH]


@dataclass
class Measurements:
    """The cases that were measured, and where. ``machine.emulated`` ones are shown and decide nothing."""

    machine: Machine
    cases: dict[Case, Measured] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON types; :meth:`from_json` gives it back."""
        return {
            "machine": self.machine.to_json(),
            "cases": [
                {"case": asdict(case), "entries": {name: asdict(e) for name, e in found.entries.items()}}
                for case, found in self.cases.items()
            ],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Measurements:
        cases = {
            Case(**item["case"]): Measured({name: Entry(**entry) for name, entry in item["entries"].items()})
            for item in given["cases"]
        }
        return cls(Machine(**given["machine"]), cases)


def cases_of(model: nn.Module, rows: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, Case]:
    """Row name -> its case, for the rows that a plan may convert and that any token reaches.

    An input asks for a gradient if a parameter that is trained comes before the layer in the order of the modules,
    which is the order of execution in the models that Octavo knows.
    """
    trained = False
    needs: dict[str, bool] = {}
    weights: dict[str, str] = {}
    for name, module in model.named_modules():
        needs[name] = trained
        own = list(module.parameters(recurse=False))
        trained = trained or any(p.requires_grad for p in own)
        if own:
            weights[name] = _PRECISION.get(own[0].dtype, str(own[0].dtype))
    out: dict[str, Case] = {}
    by_module = {(r.module, r.name.rpartition(".")[2]): r for r in rows}
    for row in rows:
        m = tokens.get(row.component, 0)
        if row.kind not in ("linear", "experts") or m < 1:
            continue
        first = by_module.get((row.module, "gate_up_proj"), row) if row.kind == "experts" else row
        out[row.name] = Case(
            row.kind, m, *first.shape, first.bias, row.frozen, needs[row.module], weights[row.module],
            row.experts, row.experts_per_token or row.experts, row.type if row.kind == "experts" else "",
        )  # fmt: skip
    return out


def candidates(
    case: Case, recipes: Sequence[Recipe], device: torch.device, requested: str = "auto"
) -> Iterator[tuple[str, Recipe, dict[str, Selection]]]:
    """(name, recipe, backend of each GEMM): every allowed recipe on every backend that can do all of it, and on the mix
    that the registry would choose. The reference counts only where nothing faster is able."""
    shape = (case.m, case.n, case.k)
    names = [requested]
    if requested == "auto":
        names = [n for n in registry.names() if registry.get(n).volunteers(device) is None] + ["auto"]
    for recipe in recipes:
        able: dict[str, dict[str, Selection]] = {}
        for name in names:
            try:
                chosen = backends_for(recipe, device, shape, name, case.kind)
            except BackendError:
                continue
            able.setdefault(" + ".join(dict.fromkeys(s.backend.name for s in chosen.values())), chosen)
        faster = {name: chosen for name, chosen in able.items() if name != "reference"}
        for name, chosen in (faster or able).items():
            yield f"{recipe.short()} on {name}", recipe, chosen


Timer = Callable[[Case, Mapping[str, Callable[[], Any]], torch.device], Mapping[str, Timed]]


def by_the_clock(case: Case, calls: Mapping[str, Callable[[], Any]], device: torch.device) -> Mapping[str, Timed]:
    """The timer of measurements; tests put another in its place."""
    return time_calls(calls, device, warmup=2, rounds=10, budget=0.5 * len(calls))


def measure_case(
    case: Case,
    recipes: Sequence[Recipe],
    device: torch.device,
    requested: str = "auto",
    experts: nn.Module | None = None,
    timer: Timer = by_the_clock,
) -> Measured:
    """Measure one case: BF16 and every candidate, side by side.

    Args:
        recipes: the recipes that are allowed.
        requested: "auto", or the one backend that may be used.
        experts: the stock module of a case of experts, whose structure is copied (its weights are not).

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
            f"{case} cannot be measured on {device}: {_first(error)}. Give fewer tokens (--tokens), or free the device."
        ) from error
    for name, recipe, chosen in candidates(case, recipes, device, requested):
        entry = Entry(recipe.short(), {g: s.backend.name for g, s in chosen.items()})
        try:
            module = bench.converted(recipe, chosen)
            call = bench.call(module)
            why = _unhealthy(call(), truth)
        except Exception as error:  # whatever a kernel raises is this candidate's answer, and is shown
            why = _first(error)
        if why is not None:
            entries[name] = Entry(entry.recipe, entry.backends, rejected=why)
            continue
        entries[name] = entry
        calls[name], calls[f"{name}, cold"] = call, _cold(module, call)
    times = timer(case, calls, device)
    for name in calls:
        if name in entries:
            entries[name] = _timed(entries[name], times[name], times.get(f"{name}, cold"))
    return Measured(entries)


class _Bench:
    """A layer of one case with its inputs; two sets of them, so that no call finds its own in a cache."""

    def __init__(self, case: Case, device: torch.device, experts: nn.Module | None) -> None:
        self.case, self.device = case, device
        dtype = {v: k for k, v in _PRECISION.items()}.get(case.weights, torch.float32)
        self.low = torch.bfloat16 if device.type == "cuda" else torch.float32
        if case.kind == "experts":
            if experts is None:
                raise MeasureError(f"{case} needs the module of experts that it stands for.")
            self.stock = _empty_copy(experts, device, dtype)
        else:
            self.stock = nn.Linear(case.k, case.n, bias=case.bias, device=device, dtype=dtype)
        with torch.no_grad():
            for p in self.stock.parameters():
                p.normal_(std=0.02)
        self.stock.requires_grad_(not case.frozen).train()
        self.inputs = [self._input() for _ in range(2)]

    def _input(self) -> tuple[tuple[Tensor, ...], Tensor]:
        case = self.case
        x = torch.randn(case.m, case.k, device=self.device).to(self.low).requires_grad_(case.dgrad)
        if case.kind != "experts":
            return (x,), torch.randn(case.m, case.n, device=self.device).to(self.low)
        assert case.experts is not None and case.top_k is not None
        index = torch.rand(case.m, case.experts, device=self.device).topk(case.top_k, dim=1).indices
        share = torch.full(index.shape, 1 / case.top_k, device=self.device, dtype=self.low)
        return (x, index, share), torch.randn(case.m, case.k, device=self.device).to(self.low)

    def converted(self, recipe: Recipe, chosen: Mapping[str, Selection]) -> nn.Module:
        """An FP8 layer over the same weights."""
        if self.case.kind != "experts":
            twin = nn.Linear(self.case.k, self.case.n, bias=self.case.bias, device="meta")
            twin._parameters.update(self.stock._parameters)
            return Linear.convert(twin, Site(str(self.case), recipe, chosen)).train()
        memo = {id(p): p for p in self.stock.parameters()}
        module = copy.deepcopy(self.stock, memo)
        sites = {name: Site(name, recipe, chosen) for name in ("gate_up_proj", "down_proj")}
        return Experts.convert(module, sites).train()

    def call(self, module: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
        """() -> (y, gradients) of one forward and backward, on the inputs by turns."""
        turn = 0

        def run() -> tuple[Tensor, ...]:
            nonlocal turn
            given, dy = self.inputs[turn % 2]
            turn += 1
            with self._autocast():
                y = module(*given)
            wanted = [t for t in (given[0], *module.parameters()) if t.requires_grad]
            if not wanted:
                return (y,)
            return (y, *torch.autograd.grad(y, wanted, dy.to(y.dtype)))

        return run

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=self.low) if self.device.type == "cuda" else nullcontext()


def _cold(module: nn.Module, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        invalidate(module)
        return call()

    return run


def _timed(entry: Entry, warm: Timed, cold: Timed | None) -> Entry:
    more = 0.0 if cold is None else max(0.0, cold.device - warm.device)
    return Entry(entry.recipe, entry.backends, warm.device, warm.host, more, warm.spread)


def _empty_copy(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module's structure with memory of its own on ``device``; its weights are never copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, device="meta", dtype=dtype), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo).to_empty(device=device)


def _unhealthy(ours: Sequence[Tensor], truth: Sequence[Tensor]) -> str | None:
    """Why results cannot be trusted, None if they are finite and near BF16's."""
    words = ("y", "the first gradient", "the second gradient", "the third gradient", "a gradient")
    for i, (a, b) in enumerate(zip(ours, truth, strict=True)):
        what = words[min(i, 4)]
        if not bool(a.isfinite().all()):
            return f"{what} is not finite"
        far = _far(a.detach(), b.detach())
        if not far < SOUND:
            return f"{what} is far from high precision: calc_diff {far:.2g}, sound is below {SOUND}"
    return None


def _far(a: Tensor, b: Tensor) -> float:
    """calc_diff, a part at a time."""
    off = total = 0.0
    for x, y in zip(a.flatten().split(_ROWS), b.flatten().split(_ROWS), strict=True):
        x, y = x.double(), y.double()
        off += float((x - y).square().sum())
        total += float(x.square().sum() + y.square().sum())
    return off / total if total else 0.0


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
