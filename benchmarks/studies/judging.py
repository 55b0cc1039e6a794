"""Evaluates the trained weights of a unit on held-out data before the run ends."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from unit import Unit

from octavo import fp8, train


class Judging(train.Callback):
    """Plants what a unit plants; at the end judges the weights in their own and in high precision, takes the unit's
    further figures, and judges the mean of the weights over the last tenth of its steps, where it asks for that."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.held: dict[str, float] = {}
        self.more: dict[str, object] = {}
        self.mean: list[torch.Tensor] = []
        self.taken = 0

    def begin(self, run: train.Run) -> None:
        if self.unit.plant:
            call(self.unit.plant, run)
            fp8.invalidate(run.model)
            self._judge(run, "planted_")

    def end_step(self, run: train.Run, step: train.Step) -> None:
        if step.number in self.unit.watch_at:
            self.more[str(step.number)] = call(self.unit.watch, run)
        last = max(1, (run.cfg.train.steps - self.unit.begins) // 10)
        if not self.unit.average or step.number <= run.cfg.train.steps - last:
            return
        now = [p.detach().float() for p in run.model.parameters()]
        self.taken += 1
        if not self.mean:
            self.mean = [p.clone() for p in now]
        for mean, p in zip(self.mean, now, strict=True):
            mean.lerp_(p, 1 / self.taken)

    @torch.no_grad()
    def end(self, run: train.Run, result: train.RunResult) -> None:
        self._judge(run, "")
        if self.unit.look:
            self.more |= call(self.unit.look, run)
        if self.mean:
            for p, mean in zip(run.model.parameters(), self.mean, strict=True):
                p.copy_(mean)
            fp8.invalidate(run.model)
            self._judge(run, "averaged_")

    def _judge(self, run: train.Run, prefix: str) -> None:
        stepper, evalset = run.job.stepper, run.job.evalset
        if evalset is None:  # a unit that only watches
            return
        for word in ("own", "high") if run.fp8 else ("own",):
            with fp8.high_precision(run.model) if word == "high" else nullcontext():
                figures = train.evaluate(run.model, evalset, stepper.forward, run.world)
            self.held[prefix + word] = figures["loss"]
            if "exact_match" in figures:
                self.held[f"{prefix}{word}_right"] = figures["exact_match"]


def call(what: Sequence[object], *first: object) -> Any:
    """A function of this folder by name: a unit goes to another process, which takes no functions."""
    module, function, *arguments = what
    return getattr(importlib.import_module(module), function)(*first, *arguments)
