"""Weights of FP8 layers are written in random ways and orders, between forwards, backwards and optimizer steps.

``fp8.weights.stale_codes`` must name exactly the layers that would compute with codes of a previous weight: those whose
output differs from that of a copy, which has no codes and casts its weight.

    python -m tests.fuzz.test_stale_codes --cases 2000 --seed 1
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from octavo import fp8
from octavo.fp8.weights import stale_codes
from tests.fuzz.bounded import Finding, command

RECIPES = tuple(name for name in fp8.RECIPES if name != "delayed")  # delayed scaling keeps a history between forwards
SIZES = (8, 24, 33, 96, 128, 130, 160)
OPERATIONS = 12


def _numpy(weight: nn.Parameter, part: slice, factor: float) -> None:
    weight.detach().numpy()[part] *= factor


#: writes of (weight, rows, factor) that layers cannot detect
UNSEEN: dict[str, Callable[[nn.Parameter, slice, float], object]] = {
    "data": lambda w, part, factor: w.data[part].mul_(factor),
    "copy": lambda w, part, factor: w.data[part].copy_(w.data[part] * factor),
    "foreach": lambda w, part, factor: torch._foreach_mul_([w.data[part]], factor),
    "numpy": _numpy,
}
#: writes that layers detect
SEEN: dict[str, Callable[[nn.Parameter, slice, float], object]] = {
    "in place": lambda w, part, factor: w[part].mul_(factor),
    "whole": lambda w, part, factor: w.copy_(w * factor),
    "new data": lambda w, part, factor: setattr(w, "data", w.data * factor),
}


def run(seed: int, cases: int, tally: Counter[str] | None = None) -> list[Finding]:
    """Run the cases. ``tally`` counts the operations and the stale layers."""
    tally = Counter() if tally is None else tally
    findings = []
    for number in range(cases):
        rng = random.Random(f"{seed} {number}")
        torch.manual_seed(rng.randrange(1 << 30))
        fault = _case(rng, tally)
        if fault is not None:
            findings.append(Finding(f"seed {seed}, case {number}", fault))
    return findings


def _case(rng: random.Random, tally: Counter[str]) -> str | None:
    sizes = [rng.choice(SIZES) for _ in range(rng.randint(2, 4))]
    layers = [nn.Linear(a, b, bias=rng.random() < 0.5) for a, b in zip(sizes, [*sizes[1:], 64], strict=True)]
    model = nn.Sequential(*layers).to(rng.choice((torch.float32, torch.bfloat16)))
    dtype = model[0].weight.dtype
    policy = fp8.Policy(rng.choice(RECIPES), weight_codes=rng.choice(("keep", "both", "recast")))
    rules = tuple(fp8.Rule(str(i), recipe=policy.recipe) for i in range(len(model)))
    fp8.apply(model, fp8.plan(model, fp8.Policy(policy.recipe, weight_codes=policy.weight_codes, rules=rules)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    x = torch.randn(5, sizes[0], dtype=dtype)
    history = []
    for _ in range(OPERATIONS):
        what = rng.choice(("forward", "forward", "backward", "step", "invalidate", "unseen", "unseen", "seen"))
        if what in ("unseen", "seen"):
            what = _write(rng, model, UNSEEN if what == "unseen" else SEEN, dtype)
        elif what == "step":
            optimizer.step()
        elif what == "invalidate":
            fp8.invalidate(model)
        elif what == "forward":
            with torch.no_grad():
                model(x)
        else:
            model(x).float().square().mean().backward()
        history.append(what)
        tally[what.split(" ")[0]] += 1
        named, stale = stale_codes(model, draw=rng.randrange(9)), _stale(model, sizes, dtype)
        tally["stale"] += len(stale)
        if named != stale:
            return f"{policy.recipe} {policy.weight_codes} {dtype} {sizes}: {history}: {named} named, but {stale} stale"
    return None


def _write(rng: random.Random, model: nn.Sequential, ways: dict[str, Callable[..., object]], dtype: torch.dtype) -> str:
    way, number = rng.choice(sorted(ways)), rng.randrange(len(model))
    if way == "numpy" and dtype is torch.bfloat16:  # numpy has no bfloat16
        way = "data"
    weight = model[number].weight
    first = rng.randrange(weight.shape[0])
    part = slice(first, rng.randint(first, weight.shape[0]))
    with torch.no_grad():
        ways[way](weight, part, rng.choice((1.0, 1.001, 1.1, 0.5, 2.0, -1.0, 0.0, 1e-3)))
    return f"{way} to {number}"


@torch.no_grad()
def _stale(model: nn.Sequential, sizes: list[int], dtype: torch.dtype) -> list[str]:
    """Return the layers with codes whose output differs from that of their copy.

    Layers without codes are skipped: a forward would cast them, and change whether their next write can be detected.
    """
    names = []
    for name, (layer, inputs) in enumerate(zip(model, sizes, strict=True)):
        if not layer._site.codes.is_valid(layer.weight):
            continue
        x = torch.eye(inputs, dtype=dtype)  # each element of the weight by itself
        if not torch.equal(layer(x), copy.deepcopy(layer)(x)):
            names.append(str(name))
    return names


def test_only_stale_codes_are_named() -> None:
    tally: Counter[str] = Counter()
    assert run(7, 40, tally) == []
    assert tally["stale"] > 20 and min(tally[what] for what in (*UNSEEN, "in", "whole", "new", "step")) > 0


if __name__ == "__main__":
    command(run, cases=200, seed=7)
