"""Memory estimates before a run: bytes by kind, the savings of each switch, and the fastest setting that fits."""

from octavo.train.estimate.memory.fit import ASSUMED, Fit, Setting, gb, propose, settings_of
from octavo.train.estimate.memory.footprint import KINDS, Card, Footprint, Footprints, changed
from octavo.train.estimate.memory.switches import Switch, savings

__all__ = [
    "ASSUMED", "KINDS", "Card", "Fit", "Footprint", "Footprints", "Setting", "Switch", "changed", "gb",
    "propose", "savings", "settings_of",
]  # fmt: skip
