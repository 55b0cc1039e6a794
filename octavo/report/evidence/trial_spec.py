"""The specification of a trial: its runs and its settings.

The kinds of runs are: high precision (``reference``), high precision with another seed (``noise``), one FP8 recipe
(``fp8``), that recipe with another seed (``seed``) or with fewer savings (``saving``), a ``fork`` of the reference in
one precision, and a ``cell`` of a factorial trial.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config import Config
from octavo.config.stages import stage_configs
from octavo.report.evidence.claims import ACCURACY_MARGIN, LOSS_MARGIN, HeldOut
from octavo.report.evidence.power import Estimate


@dataclass(frozen=True)
class Run:
    """One run of the trial: the name of its folder, its label on the page, its kind and its configuration.

    ``of`` is the FP8 run that an FP8 fork or a run with another seed belongs to ("" in high precision), ``begins`` the
    step after which a fork begins, and ``number`` the number of a fork, shared by both precisions, which read the same
    data. ``factors`` are the components in FP8 if the trial is factorial.
    """

    name: str
    label: str
    kind: str
    cfg: Config
    of: str = ""
    number: int = 0
    begins: int = 0
    factors: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of steps that this run trains itself."""
        return self.cfg.train.total_steps - self.begins

    @property
    def all_steps(self) -> int:
        """The number of steps that are trained for this run, with its earlier stages. Stages of `epochs` count as 0."""
        return sum(stage.train.steps or 0 for stage in stage_configs(self.cfg)) - self.begins

    @property
    def may_fail(self) -> bool:
        """Whether the trial continues if this run fails; a failure in high precision ends the trial."""
        return self.kind in ("fp8", "saving", "seed", "cell") or (self.kind == "fork" and bool(self.of))

    @property
    def after(self) -> Path | None:
        """The checkpoint that must exist before this run can begin."""
        return None if self.cfg.run.fork is None else Path(self.cfg.run.fork)


@dataclass(frozen=True)
class Trial:
    """The settings of a trial.

    ``forks`` and ``seeds`` are numbers of runs; ``no_forks`` is the reason if there are no forks. ``held_out`` has the
    evaluations on held-out data, or None without such data. ``expected`` has the estimates made before the first run.
    ``factors`` are the components of a factorial trial, and ``left_out`` the other components that the configuration
    has in FP8. ``claims`` names the claims to judge, or is empty for the default ones. ``loss_margin`` is the margin of
    the held-out loss.
    """

    held_out: HeldOut | None = None
    forks: int = 0
    no_forks: str = ""
    seeds: int = 1
    accuracy_margin: float = ACCURACY_MARGIN
    jobs: int = 1
    expected: tuple[Estimate, ...] = ()
    factors: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    loss_margin: float = LOSS_MARGIN
