"""How much memory each setting saves: every switch is changed alone, with the rest as configured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.train.errors import TrainError
from octavo.train.estimate.memory.footprint import Footprints, changed, refused, value_of

# switch -> (values from the most memory to the least, or pairs of them; its cost in words)
SWITCHES: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.states": (
        ("fp32", "bf16", "fp8"),
        "moments in fewer bits",
    ),  # without coat, which takes more bytes than fp8 and is less exact
    "optimizer.master": (("fp32", "bf16+16", "bf16+sr"), "bf16+16 is exactly fp32; bf16+sr rounds weights at random"),
    "optimizer.update": (("step", "backward"), "one micro-batch a step; with train.clip a second backward"),
    "optimizer.offload": ((False, True), "states cross the bus twice a step"),
    "fp8.activations": (("bf16", "fp8"), "norm inputs, gate and up rounded to FP8"),
    "fp8.weight_codes": (("keep", "recast"), "a cast of each weight at each use"),
    "train.recompute": (("none", "selective", "full"), "up to another forward of the blocks"),
    "train.logits": (("full", "chunked"), "another GEMM of the head"),
    "train.offload_activations": ((False, True), "activations cross the bus twice a step"),
}


@dataclass(frozen=True)
class Switch:
    """The effect of one switch.

    ``bytes`` is the number of bytes saved with the switch on. ``on`` says whether it is on. ``value`` is its current
    value, or the value that it would be changed to.
    """

    key: str
    value: Any
    on: bool
    bytes: int
    cost: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "on": self.on, "bytes": self.bytes, "cost": self.cost}


def savings(sizes: Footprints, ranks: int = 1) -> Iterator[Switch]:
    """For each switch that is on, return its savings; for each other possible step, return what it would save."""
    cfg = sizes.cfg
    now = sizes.of(cfg, ranks).total
    for key, (values, cost) in SWITCHES.items():
        if key in ("fp8.activations", "fp8.weight_codes") and (cfg.fp8.plan is not None or not sizes.plan.share):
            continue
        if key == "train.logits" and not sizes.chunks(changed(cfg, {key: "chunked"})):
            continue
        current = value_of(cfg, key)
        if key == "train.recompute":
            ways = {how for _, how in current}
            current = ways.pop() if len(ways) == 1 else current.foundation
        at = values.index(current) if current in values else 0
        others = ([values[0]] if at else []) + list(values[at + 1 :])
        for other in others:
            tried = changed(cfg, {key: other})
            # a run refuses backward together with accumulation; it is shown anyway, and the cost names the condition
            if refused(tried) and (key != "optimizer.update" or cfg.train.phase == "rl"):
                continue
            try:
                saved = sizes.of(tried, ranks).total - now
            except TrainError:  # this model has nothing to recompute in that way
                continue
            on = other == values[0] and at > 0
            yield Switch(key, current if on else other, on, saved if on else -saved, cost)
