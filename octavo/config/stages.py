"""Stages of a run (``train.stages``): each changes settings, and has the configuration of an ordinary run.

A configuration with stages is the one of its last stage, so that what reads the model, the data or the number of steps
of a run needs to know nothing of stages. Every stage has a value for each setting that any of them sets, from which the
other configurations follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from octavo.config.rules import general
from octavo.config.rules.findings import Finding, finding
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.data import DataSection
from octavo.config.sections.model import ModelSection
from octavo.config.sections.names import raw_section
from octavo.config.sections.train import StageSection, TrainSection
from octavo.config.stage_folders import STAGES
from octavo.config.yaml.document import Path
from octavo.config.yaml.problems import dotted

C = TypeVar("C", bound=Sections)

_SECTIONS: Mapping[str, type[BaseModel]] = {"train": TrainSection, "model": ModelSection, "data": DataSection}
_FREEZE = ("model", "freeze")
_LENGTHS = ("steps", "epochs")


def with_last_stage(data: object) -> object:
    """Return a raw configuration with the settings of its last stage, and with complete stages. With malformed ones,
    which are left to validation, it is unchanged."""
    if not isinstance(data, Mapping):
        return data
    sections = {name: raw_section(data.get(name, {})) for name in _SECTIONS}
    train = sections["train"]
    stages = train.get("stages") if isinstance(train, Mapping) else None
    if not isinstance(stages, list | tuple) or not stages:
        return data
    if not all(isinstance(section, Mapping) for section in sections.values()):
        return data
    try:
        chosen = [_settings(StageSection.model_validate(stage)) for stage in stages]
        names = dict.fromkeys(path for settings in chosen for path in settings)
        base = {path: value for path in names for value in _base(sections, path)}
        complete = [_stage({**base, **settings}) for settings in chosen]
    except ValidationError:
        return data
    last = _settings(complete[-1])
    merged = {
        name: {**section, **{key: value for (owner, key), value in last.items() if owner == name}}
        for name, section in sections.items()
        if name in data or any(owner == name for owner, _ in last)
    }
    return {**data, **merged, "train": {**merged["train"], "stages": tuple(complete)}}


def stage_configs(config: C) -> tuple[C, ...]:
    """Return the configuration of each stage, without stages; the configuration itself if it has none."""
    return tuple(_config(config, stage) for stage in config.train.stages) or (config,)


def keys_in_stage(config: Sections, number: int) -> dict[str, str]:
    """Return the dotted keys of an ordinary configuration that the stages set, each with its key in stage `number`
    (from 0, or -1 for the last). Without stages: an empty mapping."""
    settings = _settings(config.train.stages[number]) if config.train.stages else {}
    number %= len(config.train.stages) or 1
    return {dotted(path): dotted(_path_in_stage(path, number, settings)) for path in settings}


def run_configs(config: C) -> tuple[C, ...]:
    """Return the configurations of the runs that train the stages one after the other, each from the weights of the
    one before. The last has the directory of the whole run, and the others ``stages/1``, ``stages/2``, ... in it.
    Only the last writes ``hf/`` and milestones. Without stages: the configuration itself."""
    if not config.train.stages:
        return (config,)
    directory = FilePath(config.run.dir)
    configs = stage_configs(config)
    folders = [*(directory / STAGES / str(number) for number in range(1, len(configs))), directory]
    starts = [config.run.start_from, *map(str, folders)]
    runs = []
    for stage, folder, start in zip(configs, folders, starts, strict=False):
        changes: dict[str, object] = {"dir": str(folder), "start_from": start}
        if folder != directory:
            changes |= {"hf": False, "milestones": ()}
        runs.append(stage.model_copy(update={"run": config.run.model_copy(update=changes)}))
    return tuple(runs)


def with_stage_steps(config: C, steps: Sequence[int | None]) -> C:
    """Return a configuration whose stages have these numbers of steps, instead of epochs."""
    counted = [{"steps": count, "epochs": None} for count in steps]
    stages = [stage.model_copy(update=update) for stage, update in zip(config.train.stages, counted, strict=True)]
    train = config.train.model_copy(update={**counted[-1], "stages": tuple(stages)})
    return config.model_copy(update={"train": train})


def check_stages(config: Sections) -> list[Finding]:
    """Return the findings of all rules that a stage of the configuration breaks, with the keys of the stage."""
    findings = list(_rules(config))
    configs = stage_configs(config)
    of_stages = [general.check(stage) for stage in configs]
    for number, problems in enumerate(of_stages):
        settings = _settings(config.train.stages[number])
        for one in problems:
            path = _path_in_stage(one.path, number, settings)
            needs = tuple(_path_in_stage(needed, number, settings) for needed in one.needs)
            of_one_stage = (
                path == one.path and one.reason != general.ABSENT and not all(one in others for others in of_stages)
            )
            reason = f"in stage {number + 1}: {one.reason}" if of_one_stage else one.reason
            findings.append(replace(one, path=path, reason=reason, needs=needs))
    return list(dict.fromkeys(findings))


def ineffective_settings(value: Mapping[str, object]) -> Iterator[Path]:
    """Yield the common settings of a raw configuration that have no effect, because every stage sets them otherwise. A
    saved configuration has the values of the last stage there."""
    train = value.get("train")
    stages = train.get("stages") if isinstance(train, Mapping) else None
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        return
    for owner, section in ((name, value.get(name)) for name in _SECTIONS):
        for key in section if isinstance(section, Mapping) else ():
            keys = _LENGTHS if key in _LENGTHS else (key,)
            inside = [_path_in_stage((owner, name), 0, {(owner, name): None})[3:] for name in keys]
            set_by_all = bool(stages) and all(any(_has(stage, path) for path in inside) for stage in stages)
            common = _at(section, (key,))
            if set_by_all and common is not None and common != _at(stages[-1], inside[keys.index(key)]):
                yield owner, key


def _rules(config: Sections) -> Iterator[Finding]:
    run = config.run
    if run.fork is not None:
        reason = "a fork continues one run, and stages are several"
        yield finding("run.fork", reason, "remove it, or fork a checkpoint of one stage without train.stages")
    phases = {stage.train.phase for stage in stage_configs(config)}
    for name in ("rl", "preference"):
        if getattr(config, name) is not None and name not in phases:
            yield finding(name, f"no stage has the phase {name}", "remove the section, or set `phase` in a stage")
    if run.resume not in ("never", "auto"):
        reason = "the stage to resume is found by itself"
        yield finding("run.resume", reason, "use auto", "train.stages")


def _config(config: C, stage: StageSection) -> C:
    """Return the configuration of one stage."""
    settings = _settings(stage)
    changes: dict[str, dict[str, object]] = {"train": {"stages": ()}}
    for (owner, key), value in settings.items():
        changes.setdefault(str(owner), {})[str(key)] = value
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    phase = sections["train"].phase
    unused = {name: None for name in ("rl", "preference") if name != phase}  # the section of another stage's phase
    return config.model_copy(update={**sections, **unused})


def _settings(stage: StageSection) -> dict[Path, object]:
    """Return what a stage sets, by the path of the setting in a configuration without stages."""
    settings: dict[Path, object] = {}
    for key in stage.model_fields_set:
        value = getattr(stage, key)
        if key == "freeze":
            settings[_FREEZE] = value
        elif key == "data":
            settings |= {("data", name): getattr(value, name) for name in value.model_fields_set} if value else {}
        else:
            settings["train", key] = value
    for one, other in (_LENGTHS, _LENGTHS[::-1]):  # a stage that sets one of them does not take the common other
        if settings.get(("train", one)) is not None:
            settings.setdefault(("train", other), None)
    return settings


def _stage(settings: Mapping[Path, object]) -> StageSection:
    """Return the stage that sets these; the opposite of :func:`_settings`."""
    values = {str(key): value for (owner, key), value in settings.items() if owner == "train"}
    if _FREEZE in settings:
        values["freeze"] = settings[_FREEZE]
    data = {str(key): value for (owner, key), value in settings.items() if owner == "data"}
    return StageSection.model_validate({**values, **({"data": data} if data else {})})


def _base(sections: Mapping[str, Mapping[str, object]], path: Path) -> Iterator[object]:
    """Yield the value for stages that do not set ``path``: the common one, or the default; nothing if it is
    required."""
    owner, key = str(path[0]), str(path[1])
    field: FieldInfo = _SECTIONS[owner].model_fields[key]
    if key in sections[owner]:
        yield sections[owner][key]
    elif not field.is_required():
        yield field.get_default(call_default_factory=True)


def _path_in_stage(path: Path, number: int, settings: Mapping[Path, object]) -> Path:
    """Return where the stage ``number``, which has these settings, has a setting of an ordinary configuration."""
    if path[:2] not in settings:
        return path
    inside = {"model": path[1:], "data": path}.get(str(path[0]), path[1:])
    return ("train", "stages", number, *inside)


def _has(stage: object, path: Sequence[str | int]) -> bool:
    return isinstance(stage, Mapping) and path[0] in stage and (len(path) == 1 or _has(stage[path[0]], path[1:]))


def _at(stage: object, path: Sequence[str | int]) -> object:
    return _at(stage.get(path[0]), path[1:]) if path and isinstance(stage, Mapping) else stage
