"""Memory before a run: its bytes by kind, what each switch saves, and the fastest setting that fits a card."""

from octavo.train.estimate.memory.fit import ASSUMED, Fit, Setting, gb, propose, settings_of
from octavo.train.estimate.memory.footprint import KINDS, Card, Footprint, Footprints, changed
from octavo.train.estimate.memory.switches import Switch, savings

__all__ = [
    "ASSUMED", "KINDS", "Card", "Fit", "Footprint", "Footprints", "Setting", "Switch", "changed", "gb",
    "propose", "savings", "settings_of",
]  # fmt: skip
