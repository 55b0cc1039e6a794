"""The settings of a run in phase rl: its section, completed with the algorithm's defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.config import Config
from octavo.config.sections.rl import RlSection
from octavo.generation import Sampling
from octavo.rl.objectives.importance import Correction
from octavo.rl.objectives.penalties import Kl
from octavo.rl.objectives.policy_losses import Clip
from octavo.rl.objectives.registry import ALGORITHMS, Algorithm, Values


@dataclass(frozen=True)
class Settings:
    """`section` is the section of the configuration; the other fields are resolved from it and the algorithm."""

    section: RlSection
    algorithm: Algorithm
    clip: Clip
    advantage: str
    beta: float
    kl: Kl
    kl_in: str
    overlong: int
    refill: bool
    correction: Correction | None
    seed: int
    values: Values | None

    @classmethod
    def of(cls, cfg: Config) -> Settings:
        rl = cfg.rl
        assert rl is not None, "octavo.config.rules checks it"
        algorithm = ALGORITHMS[rl.algorithm]
        low = algorithm.clip.low if rl.clip_low is None else rl.clip_low
        high = algorithm.clip.high if rl.clip_high is None else rl.clip_high
        correction = None
        if rl.correction != "off":
            correction = Correction(rl.correction_level, rl.correction, rl.correction_low, rl.correction_high)
        return cls(
            rl,
            algorithm,
            Clip(low, high),
            rl.advantage or algorithm.advantage,
            algorithm.beta if rl.kl is None else rl.kl,
            rl.kl_estimator or algorithm.kl,
            rl.kl_in or algorithm.kl_in,
            round(algorithm.overlong * rl.max_new_tokens) if rl.overlong is None else rl.overlong,
            not algorithm.equal_groups if rl.dynamic_sampling is None else rl.dynamic_sampling,
            correction,
            cfg.run.seed,
            _values(rl, algorithm.values, cfg.lora is not None),
        )

    @property
    def updates(self) -> int:
        """Number of optimizer updates per step."""
        return self.section.epochs * self.section.mini_batches


def make_sampling(rl: RlSection, seed: int, step: int, excluded: tuple[int, ...]) -> Sampling:
    """Return the sampling settings of a step. `excluded`: image placeholder tokens, which are not sampled."""
    return Sampling(rl.max_new_tokens, rl.temperature, rl.top_p, rl.top_k, rl.min_p, rl.stop, seed, step, excluded)


def _values(rl: RlSection, defaults: Values | None, separate: bool) -> Values | None:
    """Return the settings of the critic, or None without one. With separate layers its loss has the weight 1."""
    if defaults is None:
        return None
    weight = 1.0 if separate else rl.value_weight
    configured = {"gamma": rl.gamma, "lam": rl.lam, "clip": rl.value_clip, "weight": weight}
    return replace(defaults, **{name: value for name, value in configured.items() if value is not None})
