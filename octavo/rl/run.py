"""`run(cfg)`: a training job of any phase, in one run or in stages."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo import train
from octavo.base.atomic_write import write_text
from octavo.base.wording import count_noun
from octavo.config import Config, load_config, stage_folders, to_yaml
from octavo.config.stages import run_configs
from octavo.rl.phases.preference_phase import PreferencePhase
from octavo.rl.phases.rl_phase import RlPhase
from octavo.train.callbacks.progress import Display
from octavo.train.run_dir.earlier_run import refuse_foreign_directory
from octavo.train.run_dir.file_names import CONFIG
from octavo.train.setup.phase import SFT, Phase


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
    stages = run_configs(cfg)
    _begin(cfg, len(stages))
    console = options.get("console") if os.environ.get("RANK", "0") == "0" else None
    log = Display(console, options.get("label", "")).log
    for number, stage in enumerate(stages, 1):
        log(f"stage {number} of {len(stages)}: {stage.run.dir}, frozen: {', '.join(stage.model.freeze) or 'nothing'}")
        result = train.run(stage, phase=phase_of(stage), **options)
        if result.late_stop is not None and number < len(
            stages
        ):  # asked to stop while it ended: the next must not begin
            result = replace(result, status="stopped", signal=result.late_stop or None)
            log(f"stopped after stage {number} of {len(stages)}. Continue with run.resume=auto")
        if result.status != "finished":
            break
    return result


def _begin(cfg: Config, count: int) -> None:
    """Write the configuration of all stages, on the main rank. Raises TrainError, before the first stage is trained, if
    the directory holds another run, or stages of another number."""
    if os.environ.get("RANK", "0") != "0":
        return
    directory = Path(cfg.run.dir)
    file = stage_folders.config_file(directory)
    if not file.is_file():
        if (directory / CONFIG).is_file():
            raise train.TrainError(f"run.dir {directory} contains a run without stages. Name another run.dir")
        refuse_foreign_directory(directory)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, to_yaml(cfg))
    elif (saved := len(load_config(file).train.stages)) != count:
        raise train.TrainError(
            f"{directory} was begun with {count_noun(saved, 'stage')}, and train.stages has {count} now. Restore them, "
            "or name another run.dir"
        )
