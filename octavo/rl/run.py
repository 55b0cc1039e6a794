"""`run(cfg)`: a training job of any phase, in one run or in stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import train
from octavo.base.atomic_write import write_text
from octavo.base.wording import count_noun
from octavo.config import Config, stage_folders, to_yaml
from octavo.config.stages import run_configs
from octavo.fp8 import PlanError
from octavo.models import ModelError
from octavo.models.compose.from_config import compose_model
from octavo.rl.phases.preference_phase import PreferencePhase
from octavo.rl.phases.rl_phase import RlPhase
from octavo.train.callbacks.progress import Display
from octavo.train.run_dir.earlier_run import is_binding, refuse_foreign_directory
from octavo.train.run_dir.file_names import CONFIG
from octavo.train.setup import planning
from octavo.train.setup.phase import SFT, Phase
from octavo.train.setup.resolve_config import resolve_recipe


def phase_of(cfg: Config) -> Phase:
    """Create the phase object of `train.phase`. A phase holds the state of one run."""
    classes = {name: phase for phase in (PreferencePhase, RlPhase) for name in phase.names}
    return classes[cfg.train.phase]() if cfg.train.phase in classes else SFT


def run(cfg: Config, **options: Any) -> train.RunResult:
    """Call :func:`octavo.train.run` in the configuration's phase, with the same options; for each of `train.stages`
    one after the other. A stage that has finished is not trained again. Returns the result of the last stage, or of
    the one that was stopped. Callbacks and watchers begin and end with each stage."""
    if not cfg.train.stages:
        return train.run(cfg, phase=phase_of(cfg), **options)
    stages, directory = run_configs(cfg), Path(cfg.run.dir)
    console = options.get("console") if os.environ.get("RANK", "0") == "0" else None
    log = Display(console, options.get("label", "")).log
    _check_plans(cfg, stages[1:], log)
    _begin(cfg, stages)
    for number, stage in enumerate(stages, 1):
        this = f"stage {number} of {len(stages)}"
        if stage is not stages[-1] and (directory / CONFIG).is_file() and not Path(stage.run.dir).exists():
            log(f"{this}: its directory is gone, and the last stage has begun without it")
            continue
        log(f"{this}: {stage.run.dir}, frozen: {', '.join(stage.model.freeze) or 'nothing'}")
        result = train.run(stage, phase=phase_of(stage), **options)
        if result.late_stop is not None and number < len(stages):  # asked to stop while the stage ended
            result = replace(result, status="stopped", signal=result.late_stop or None)
            log(f"stopped after {this}. Continue with run.resume=auto")
        if result.status != "finished":
            break
    return result


def _check_plans(cfg: Config, stages: Sequence[Config], log: Callable[[str], None]) -> None:
    """Plan the later stages, so that their problems are reported before the first is trained. Models that are
    fetched first, and plans that need measurements, are left to their stage."""
    if cfg.model.foundation is not None:
        compose_model(cfg, log)
    if not Path(cfg.model.path).is_dir() or cfg.model.fp8_twin is not None:
        return
    for number, stage in enumerate(stages, 1):
        stage = resolve_recipe(stage)
        try:
            if not planning.has_open_recipes(stage):
                planning.plan_for(stage)
        except (ModelError, PlanError, train.TrainError) as error:
            raise type(error)(f"train.stages.{number}: {error}") from error


def _begin(cfg: Config, stages: Sequence[Config]) -> None:
    """Write the configuration of all stages, on the main rank. Raises TrainError, before the first stage is trained, if
    the directory holds another run, or stages of another number."""
    if os.environ.get("RANK", "0") != "0":
        return
    directory, saved = Path(cfg.run.dir), stage_folders.count_stages(Path(cfg.run.dir))
    if saved == len(stages):
        return
    if saved is None and (directory / CONFIG).is_file():
        raise train.TrainError(f"run.dir {directory} contains a run without stages. Name another run.dir")
    if saved is None:
        refuse_foreign_directory(directory)
    elif any(is_binding(Path(stage.run.dir)) for stage in stages):
        raise train.TrainError(
            f"{directory} was begun with {count_noun(saved, 'stage')}, and train.stages has {len(stages)} now. Restore "
            "them, or name another run.dir"
        )
    else:
        stage_folders.config_file(directory, saved).unlink()
    file = stage_folders.config_file(directory, len(stages))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, to_yaml(cfg))
