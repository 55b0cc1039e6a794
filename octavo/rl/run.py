"""`run(cfg)`: a training job of any phase."""

from __future__ import annotations

from typing import Any

from octavo import train
from octavo.config import Config
from octavo.rl.phases.preference_phase import PreferencePhase
from octavo.rl.phases.rl_phase import RlPhase
from octavo.train.setup.phase import SFT, Phase


def phase_of(cfg: Config) -> Phase:
    """Create the phase object of `train.phase`. A phase holds the state of one run."""
    classes = {name: phase for phase in (PreferencePhase, RlPhase) for name in phase.names}
    return classes[cfg.train.phase]() if cfg.train.phase in classes else SFT


def run(cfg: Config, **options: Any) -> train.RunResult:
    """Call :func:`octavo.train.run` in the configuration's phase, with the same options."""
    return train.run(cfg, phase=phase_of(cfg), **options)
