"""Measured cases (a kind of layer and its sizes), their candidates, and results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import nn

from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.dense.gemms import select_layer_backends
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.registry import BackendError, Selection
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.policy.topology import Row

FORMAT = 2
"""Of measurements in a file."""
HIGH = "high precision"

_PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MeasureError(Fp8Error, RuntimeError):
    """A measurement that cannot be made or read. The message has a fix."""


@dataclass(frozen=True)
class Case:
    """A kind of layer to measure: ``m`` tokens times a weight [n, k], with or without ``bias``. ``frozen`` has no
    wgrad, ``dgrad=False`` no dgrad; ``weights`` is the dtype of the weights.

    Experts are measured as a module of class ``type``, with ``experts`` experts, ``top_k`` per token, and (n, k) the
    shape of gate and up.
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
        remarks = [w for w, on in (("bias", self.bias), ("frozen", self.frozen), ("no dgrad", not self.dgrad)) if on]
        if self.experts is not None:
            remarks.append(f"{self.experts} experts, {self.top_k} per token, {self.type}")
        return " ".join([f"{self.kind} M={self.m} N={self.n} K={self.k} {self.weights}", *remarks])


@dataclass(frozen=True)
class Entry:
    """Times of one candidate: ``seconds`` of the device and ``host`` seconds of one micro-step with valid codes, and
    ``weights``, the additional seconds to cast the weights. ``spread`` as in
    :class:`~octavo.fp8.measuring.timing.Timing`. ``rejected``: reason if it is rejected; then times are not valid."""

    recipe: str
    backends: Mapping[str, str]
    seconds: float = 0.0
    host: float = 0.0
    weights: float = 0.0
    spread: float = 0.0
    rejected: str | None = None

    def cost(self, micro_steps: int = 1) -> float:
        """Return seconds per micro-step: the larger of device time, with its share of the weight cast, and host
        time."""
        return max(self.seconds + self.weights / micro_steps, self.host)


@dataclass(frozen=True)
class Measured:
    """The candidates of a case by name; the baseline :data:`HIGH` is always present."""

    entries: Mapping[str, Entry]

    @property
    def high(self) -> Entry:
        return self.entries[HIGH]

    def to_json(self) -> dict[str, object]:
        """Return the candidates with times in milliseconds, or the reason for a rejection."""
        return {
            name: e.rejected
            or {"ms": 1e3 * e.seconds, "host_ms": 1e3 * e.host, "weights_ms": 1e3 * e.weights, "spread": e.spread}
            for name, e in self.entries.items()
        }


@dataclass
class Measurements:
    """Measured cases and their machine. Measurements of an emulated machine are reported and decide nothing."""

    machine: Machine
    cases: dict[Case, Measured] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Measurements({len(self.cases)} cases on {self.machine.gpu}, torch {self.machine.torch})"

    def to_json(self) -> dict[str, object]:
        """Return JSON types for :meth:`from_json`."""
        return {
            "machine": self.machine.to_json(),
            "cases": [
                {"case": asdict(case), "entries": {name: asdict(e) for name, e in measured.entries.items()}}
                for case, measured in self.cases.items()
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, object], version: int = FORMAT) -> Measurements:
        """Return measurements that :meth:`to_json` wrote in format ``version``: 1 up to Octavo 0.5.0, or 2."""
        content = cast(Mapping[str, Any], document)  # of a file: MeasurementCache reports what does not fit
        rename = _rename_old_recipe if version == 1 else str
        cases = {
            Case(**_drop_fields(item["case"], "outputs", "biases")): Measured(
                {
                    rename(name): _read_entry({**_drop_fields(entry, "layout"), "recipe": rename(entry["recipe"])})
                    for name, entry in item["entries"].items()
                }
            )
            for item in content["cases"]
            if item["case"]["kind"] != "sisters"
        }
        return cls(Machine(**content["machine"]), cases)


def _read_entry(fields_read: Mapping[str, Any]) -> Entry:
    """Read an entry. Raises ValueError for invalid times, as in a damaged file."""
    for name in ("seconds", "host", "weights", "spread"):
        value = fields_read.get(name, 0.0)
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r:.60}, expected a time")
    return Entry(**fields_read)


def _rename_old_recipe(text: str) -> str:
    """Rename ``blockwise`` of version 0.5.0, as a recipe or as the precision of a GEMM, to today's name of its
    casts."""
    return re.sub(r"\bblockwise\b", "blockwise_1d", text)


def _drop_fields(fields_read: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Drop fields that version 0.4.0 wrote for layers that ran as one GEMM."""
    return {name: value for name, value in fields_read.items() if name not in names}


def make_cases(model: nn.Module, rows: Sequence[Row], tokens: Mapping[str, int]) -> dict[str, Case]:
    """Return row name -> case, for rows that a plan can convert and that have tokens.

    The input of a layer requires a gradient if a trained parameter comes before it in the order of modules, which is
    the order of execution in supported models.
    """
    trained = False
    needs: dict[str, bool] = {}
    weights: dict[str, str] = {}
    for name, module in model.named_modules():
        needs[name] = trained
        parameters = list(module.parameters(recurse=False))
        trained = trained or any(p.requires_grad for p in parameters)
        if parameters:
            weights[name] = _PRECISION.get(parameters[0].dtype, str(parameters[0].dtype))
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


def list_candidates(
    case: Case, recipes: Sequence[Recipe], device: torch.device, requested: str = "auto"
) -> Iterator[tuple[str, Recipe, dict[str, Selection]]]:
    """Yield (name, recipe, backend of each GEMM) for each allowed recipe on each backend that supports all its GEMMs,
    and on the default choice of the registry. The reference is included only if no other backend supports the
    recipe."""
    shape = (case.m, case.n, case.k)
    names = [requested]
    if requested == "auto":
        names = [n for n in registry.names() if registry.get(n).why_not_auto(device) is None] + ["auto"]
    for recipe in recipes:
        supported: dict[str, dict[str, Selection]] = {}
        for name in names:
            try:
                chosen = select_layer_backends(recipe, device, shape, name, case.kind)
            except BackendError:
                continue
            supported.setdefault(" + ".join(dict.fromkeys(s.backend.name for s in chosen.values())), chosen)
        faster = {name: chosen for name, chosen in supported.items() if name != "reference"}
        for name, chosen in (faster or supported).items():
            yield f"{recipe.summary()} on {name}", recipe, chosen
