"""`run(cfg)`: a training job of any phase."""

from __future__ import annotations

from typing import Any

from octavo import train
from octavo.config import Config
from octavo.rl.phases.preference_phase import PreferencePhase
from octavo.rl.phases.rl_phase import RlPhase
from octavo.train.setup.phase import SFT, Phase


def phase_of(cfg: Config) -> Phase:
    """A new phase object for `train.phase`; a phase holds the state of one run."""
    kinds = {name: kind for kind in (PreferencePhase, RlPhase) for name in kind.names}
    return kinds[cfg.train.phase]() if cfg.train.phase in kinds else SFT


def run(cfg: Config, **options: Any) -> train.RunResult:
    """:func:`octavo.train.run` in the configuration's phase, with the same options."""
    return train.run(cfg, phase=phase_of(cfg), **options)
