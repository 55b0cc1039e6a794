"""Memory estimates before a run: bytes by kind, the savings of each switch, and the fastest setting that fits."""

from octavo.train.estimate.memory.card import Card
from octavo.train.estimate.memory.fit import ASSUMED, Fit, Setting, configured_settings, gb, propose
from octavo.train.estimate.memory.footprint import KINDS, Footprint, MemoryEstimator, with_settings
from octavo.train.estimate.memory.switches import Switch, savings

__all__ = [
    "ASSUMED", "KINDS", "Card", "Fit", "Footprint", "MemoryEstimator", "Setting", "Switch", "with_settings", "gb",
    "propose", "savings", "configured_settings",
]  # fmt: skip
