"""The memory that each switch saves, if only that switch is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from octavo.train.errors import TrainError
from octavo.train.estimate.memory.footprint import MemoryEstimator, breaks_rule, value_of, with_settings

Progress = Callable[[int, int], None]


def ignore_progress(done: int, total: int) -> None:
    """Report nothing."""


# switch -> (values from the most memory to the least, cost in words)
SWITCHES: dict[str, tuple[tuple[Any, ...], str]] = {
    "optimizer.states": (
        ("fp32", "bf16", "fp8"),
        "moments in fewer bits",
    ),  # without coat, which takes more bytes than fp8 and is less exact
    "optimizer.master": (("fp32", "bf16+16", "bf16+sr"), "bf16+16 is exactly fp32; bf16+sr rounds weights at random"),
    "optimizer.update": (("step", "backward"), "one micro-batch per step; with train.clip a second backward"),
    "optimizer.offload": ((False, True), "states cross the bus twice per step"),
    "fp8.activations": (("bf16", "fp8"), "norm inputs, gate and up are rounded to FP8"),
    "fp8.weight_codes": (("keep", "recast"), "a cast of each weight at each use"),
    "train.recompute": (("none", "selective", "full"), "up to another forward of the blocks"),
    "train.logits": (("full", "chunked"), "one more GEMM of the head"),
    "train.offload_activations": ((False, True), "activations cross the bus twice per step"),
}


@dataclass(frozen=True)
class Switch:
    """The effect of one switch.

    ``bytes`` is the number of bytes saved. ``on`` is True if the configuration uses the switch; ``value`` is then its
    value, otherwise the value that it would be changed to. ``cost`` describes the cost in words.
    """

    key: str
    value: Any
    on: bool
    bytes: int
    cost: str

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "on": self.on, "bytes": self.bytes, "cost": self.cost}


def savings(sizes: MemoryEstimator, ranks: int = 1, progress: Progress = ignore_progress) -> Iterator[Switch]:
    """Yield what each switch saves: a switch that is on saves it now, every other value would save it. ``progress`` is
    called with the number of switches done and of all."""
    cfg = sizes.cfg
    total = sizes.estimate(cfg, ranks).total
    for number, (key, (values, cost)) in enumerate(SWITCHES.items()):
        progress(number, len(SWITCHES))
        if key in ("fp8.activations", "fp8.weight_codes") and (cfg.fp8.plan is not None or not sizes.plan.share):
            continue
        if key == "train.logits" and not sizes.uses_chunked_head(with_settings(cfg, {key: "chunked"})):
            continue
        current = value_of(cfg, key)
        if key == "train.recompute":
            modes = {mode for _, mode in current}
            current = modes.pop() if len(modes) == 1 else current.foundation
        position = values.index(current) if current in values else 0
        new_values = ([values[0]] if position else []) + list(values[position + 1 :])
        for new_value in new_values:
            candidate = with_settings(cfg, {key: new_value})
            # validation rejects backward with accumulation; it is listed anyway, and its cost names the condition
            if breaks_rule(candidate) and (key != "optimizer.update" or cfg.train.phase == "rl"):
                continue
            try:
                saved = sizes.estimate(candidate, ranks).total - total
            except TrainError:  # the model cannot be recomputed that way
                continue
            on = new_value == values[0] and position > 0
            yield Switch(key, current if on else new_value, on, saved if on else -saved, cost)
