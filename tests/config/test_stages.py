"""`train.stages`: what each stage sets, and what is told of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import ConfigError, load_config, load_config_text, to_yaml
from octavo.config.load import plain
from octavo.config.stages import run_configs, stage_configs

TEXT = """
model: {path: model}
data: {train: [{path: a.jsonl}], packing: true}
run: {dir: runs/x, hf: true, milestones: [15]}
train:
  lr: 1e-4
  warmup: 3
  stages:
    - {freeze: [foundation], steps: 10}
    - {steps: 20, lr: 1e-5, data: {train: [{path: b.jsonl}]}}
    - {epochs: 1}
"""


def problems(*overrides: str, text: str = TEXT) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as raised:
        load_config_text(text, overrides)
    return [(problem.key, f"{problem.reason}; {problem.fix}") for problem in raised.value.problems]


def test_a_configuration_is_that_of_its_last_stage(tmp_path):
    cfg = load_config_text(TEXT, base=tmp_path)
    assert (cfg.train.steps, cfg.train.epochs, cfg.train.lr, cfg.model.freeze) == (None, 1.0, 1e-4, ())
    assert cfg.data.train[0].path == str(tmp_path / "a.jsonl") and cfg.data.packing
    assert load_config_text(to_yaml(cfg)) == cfg == load_config(plain(cfg))


def test_each_stage_is_an_ordinary_configuration(tmp_path):
    first, second, third = stage_configs(load_config_text(TEXT, base=tmp_path))
    assert (first.train.steps, first.train.epochs, first.model.freeze) == (10, None, ("foundation",))
    assert (second.train.steps, second.train.lr, second.model.freeze, second.train.warmup) == (20, 1e-5, (), 3)
    assert second.data.train[0].path == str(tmp_path / "b.jsonl") and second.data.packing
    assert (third.train.steps, third.train.epochs, third.train.lr) == (None, 1.0, 1e-4)
    assert not any(one.train.stages for one in (first, second, third))
    without = load_config_text(TEXT, ["train.stages=[]", "train.steps=9"])
    assert stage_configs(without) == (without,) == run_configs(without)


def test_runs_begin_with_the_weights_of_the_one_before():
    runs = run_configs(load_config_text(TEXT, ["run.start_from=runs/w"]))
    assert [run.run.dir for run in runs] == ["runs/x/stages/1", "runs/x/stages/2", "runs/x"]
    assert [run.run.start_from for run in runs] == ["runs/w", "runs/x/stages/1", "runs/x/stages/2"]
    assert [(run.run.hf, run.run.milestones) for run in runs] == [(False, ()), (False, ()), (True, (15,))]


@pytest.mark.parametrize(
    ("override", "key", "told"),
    [
        ("train.stages.0.lrr=2", "train.stages.0.lrr", "did you mean `lr`"),
        ("train.stages.0.freeze=[foo bar]", "train.stages.0.freeze.0", "neither a component nor a glob"),
        ("train.stages.1.data={packing: 3}", "train.stages.1.data.packing", "expected true or false"),
        ("train.stages.1.data={train: []}", "train.stages.1.data.train", "must not be empty"),
        ("train.stages.1.data=[]", "train.stages.1.data", "expected a mapping"),
        ("train.stages.0.steps=null", "train.stages.0.steps", "required, but absent"),
        ("train.stages.0.epochs=1", "train.stages.0.epochs", "both set the length"),
        ("train.stages=3", "train.stages", "expected a list"),
        ("train.stages=[a]", "train.stages.0", "expected a mapping"),
        ("train.stages=[null]", "train.stages.0", "expected a mapping"),
        ("train.stages=[{data: a}]", "train.stages.0.data", "expected a mapping"),
        ("train.stages.0.steps=2", "train.warmup", "in stage 1: warmup 3 takes all of 2 steps"),
        ("train.steps=3", "train.steps", "each stage of train.stages has its own; set train.stages.0.steps"),
        ("run.resume=runs/x/checkpoints/step_1", "run.resume", "use auto"),
        ("run.fork=runs/x/checkpoints/step_1", "run.fork", "a fork continues one run"),
    ],
)
def test_a_wrong_stage_is_named(override, key, told):
    ((found, reason),) = problems(override)
    assert found == key and told in reason


def test_problems_of_all_stages_are_told_at_once():
    found = problems("train.stages.0.warmup=10", "train.stages.1.warmup=20", "train.stages.2.freeze=[a/b]")
    assert [key for key, _ in found] == ["train.stages.0.warmup", "train.stages.1.warmup", "train.stages.2.freeze.0"]


def test_a_common_setting_may_be_overridden_unless_every_stage_has_it():
    assert [stage.train.lr for stage in stage_configs(load_config_text(TEXT, ["train.lr=1"]))] == [1, 1e-5, 1]
    others = [f"train.stages.{number}.lr=0.5" for number in (0, 2)]
    assert problems(*others, "train.lr=1")[0][0] == "train.lr"
    assert (
        problems("model.freeze=[lm_head]", *(f"train.stages.{n}.freeze=[]" for n in range(3)))[0][0] == "model.freeze"
    )


def test_a_file_that_extends_stages_cannot_change_what_they_all_set(tmp_path):
    (tmp_path / "base.yaml").write_text(TEXT)
    (tmp_path / "child.yaml").write_text("extends: base.yaml\ntrain: {steps: 3, warmup: 1}")
    with pytest.raises(ConfigError, match="child.yaml:2: train.steps: it has no effect, because each stage"):
        load_config(tmp_path / "child.yaml")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\ntrain: {warmup: 1, stages: [{steps: 3}]}")
    (tmp_path / "base.yaml").write_text(TEXT.partition("  stages")[0] + "  steps: 9")
    assert load_config(tmp_path / "child.yaml").train.steps == 3


def test_sections_of_a_phase_belong_to_its_stages():
    stages = "train.stages=[{phase: sft, steps: 4}, {phase: preference, steps: 5}]"
    first, second = stage_configs(load_config_text(TEXT, [stages, "preference={beta: 0.5}", "data.packing=false"]))
    assert first.preference is None and second.preference is not None and second.preference.beta == 0.5
    assert problems("preference={beta: 0.5}")[0] == (
        "preference",
        "no stage has the phase preference; remove the section, or set `phase` in a stage",
    )


def test_an_entry_that_no_stage_has_is_named():
    assert problems("train.stages.0.data.train.0.path=x.jsonl")[0][0] == "train.stages.0.data.train"


def test_a_preset_does_not_replace_what_a_stage_sets():
    fast = ("preset=fast", "data.packing=false")
    cfg = load_config_text(TEXT, [*fast, "train.stages.0.compile=false"])
    assert [stage.train.compile for stage in stage_configs(cfg)] == [False, True, True]
    assert all(stage.train.compile for stage in stage_configs(load_config_text(TEXT, fast)))


def test_missing_files_of_stages_are_named(tmp_path):
    from octavo.cli.arguments import missing_files

    (tmp_path / "model").mkdir()
    (tmp_path / "a.jsonl").write_text("")
    told = missing_files(load_config_text(TEXT, base=Path(tmp_path)), None)
    assert [text.partition(":")[0] for text in told if "jsonl" in text] == ["train.stages.1.data.train.0.path"]
