"""Measure a model's layers, and keep the measurements in a file.

The cache is one JSON file, ``$XDG_CACHE_HOME/octavo/measurements.json`` (``~/.cache`` where that is unset), with one
entry for each machine (GPU, driver, torch, CUDA, backends and their versions) and case. It is written after each
case, to a temporary file that is renamed: a measurement that is killed keeps its results and continues from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from octavo.base import accelerator, atomic_write, safe_read
from octavo.base.recipe_specs import RANKED
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.measuring.bench import Timer, measure_case, measure_time
from octavo.fp8.measuring.cases import (
    FORMAT,
    HIGH,
    Case,
    Measured,
    MeasureError,
    Measurements,
    list_candidates,
    make_cases,
)
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.policy.decisions import decide_layers, device_of
from octavo.fp8.policy.policy import Policy

Progress = Callable[[int, int, str], None]  # (cases done, cases in all, what is measured now)


def default_cache() -> Path:
    """The default path of the file with measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "measurements.json"


class MeasurementCache:
    """A file with measurements. Raises MeasureError if it is damaged or has a different format."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = default_cache() if path is None else Path(path)

    def load(self, machine: Machine) -> dict[Case, Measured]:
        """Return the measurements of this machine; empty if there is no file."""
        return next((dict(m.cases) for m in self._read() if m.machine == machine), {})

    def put(self, machine: Machine, case: Case, measured: Measured) -> None:
        """Add one case. The file is read first, to keep entries that other processes added."""
        all_measurements = self._read()
        here = next((m for m in all_measurements if m.machine == machine), None)
        if here is None:
            here = Measurements(machine)
            all_measurements.append(here)
        here.cases[case] = measured
        text = json.dumps(
            {"octavo_measurements": FORMAT, "machines": [m.to_json() for m in all_measurements]}, indent=1
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write.write_text(self.path, text + "\n", shared=True)

    def _read(self) -> list[Measurements]:
        if not os.path.lexists(self.path):
            return []
        try:
            document = safe_read.read_json(self.path)
            if (version := document["octavo_measurements"]) not in (1, FORMAT):
                raise ValueError(f"it has format {version}, this version writes {FORMAT}")
            return [Measurements.from_json(m, version) for m in document["machines"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MeasureError(
                f"{self.path} holds no measurements of this version of Octavo ({type(error).__name__}: "
                f"{safe_read.printable(error)}). Delete it, and measure again."
            ) from error


def measure(
    model: nn.Module,
    policy: Policy | str = "auto",
    components: Mapping[str, tuple[str, ...]] | None = None,
    tokens: Mapping[str, int] | None = None,
    *,
    device: torch.device | str | None = None,
    cache: MeasurementCache | None = None,
    progress: Progress = lambda done, total, what: None,
    timer: Timer = measure_time,
    machine: Machine | None = None,
) -> Measurements:
    """Measure each distinct layer of a model in high precision and in the recipes that a policy allows.

    Args:
        model: may be on the meta device; its weights are neither read nor copied.
        policy: a :class:`Policy` or a recipe's name. "auto" allows its candidates, a recipe allows itself.
        components: as for :func:`octavo.fp8.plan`.
        tokens: tokens of one forward for each component, the M of its layers.
        device: device to measure on. Default: the device of the model, or for a meta model the GPU if there is one.
        cache: its cases are not measured again. None does not store measurements.
        progress: called before each case, and once more at the end.
        timer, machine: for tests.

    Raises:
        PlanError: as plan; tokens that are not whole numbers, are negative, or are all 0.
        MeasureError: tokens are missing; a case does not fit into memory or fails; the cache is damaged.
    """
    policy = policy if isinstance(policy, Policy) else Policy(recipe=policy)
    if tokens is None:
        raise MeasureError(
            "The speed of a layer depends on its tokens: set the tokens of one forward for each component, "
            "such as tokens={'foundation': 8192}."
        )
    target = device_of(model) if device is None else torch.device(device)
    machine = Machine.detect(target) if machine is None else machine
    decided = decide_layers(model, policy, components, tokens)
    cases = make_cases(model, [row for row, _, _ in decided], tokens)
    modules = dict(model.named_modules())
    pending: dict[Case, dict[Recipe, None]] = {}
    stock: dict[Case, nn.Module] = {}
    for row, decision, why_not in decided:
        allowed = decision.allowed_recipes(policy) if why_not is None and row.name in cases else {}
        if allowed:
            pending.setdefault(cases[row.name], {}).update(dict.fromkeys(allowed.values()))
            stock.setdefault(cases[row.name], modules[row.module])
    known = {} if cache is None else cache.load(machine)
    measurements = Measurements(machine)
    for number, (case, recipes) in enumerate(pending.items()):
        progress(number, len(pending), str(case))
        wanted = sorted(recipes, key=lambda r: RANKED.index(r.name))
        names = {HIGH, *(name for name, _, _ in list_candidates(case, wanted, target, policy.backend))}
        if case in known and names <= known[case].entries.keys():
            measurements.cases[case] = _select_entries(known[case], names)
            continue
        # Experts are measured with the stock module; a linear layer is built from its sizes.
        experts = stock[case] if case.kind == "experts" else None
        measurements.cases[case] = measure_case(case, wanted, target, policy.backend, experts, timer)
        accelerator.empty_cache(target)
        if cache is not None:
            cache.put(machine, case, measurements.cases[case])
    progress(len(pending), len(pending), "")
    return measurements


def _select_entries(measured: Measured, names: set[str]) -> Measured:
    return Measured({name: entry for name, entry in measured.entries.items() if name in names})
