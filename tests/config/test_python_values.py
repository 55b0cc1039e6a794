"""A configuration from a dict: the values and problems of the same configuration in YAML, and a copy of the dict."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import ConfigError, Fp8Section, load_config, load_config_text

YAML = """
model: {path: m}
fp8: {recipe: rowwise}
data: {train: [{path: a.json, weight: 2}, {path: "python:train_data"}]}
train: {steps: 3, lr: 1e-3, phase: sft}
"""


class Steps(enum.IntEnum):
    THREE = 3


def settings() -> dict[str, Any]:
    """The configuration of `YAML` with values of Python."""
    return {
        "model": {"path": Path("m")},
        "fp8": Fp8Section(recipe="rowwise"),
        "data": {"train": ({"path": Path("a.json"), "weight": np.float64(2)}, {"path": "python:train_data"})},
        "train": {"steps": np.int64(3), "lr": 1e-3, "phase": np.str_("sft")},
    }


def test_dict_gives_the_configuration_of_its_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(settings())
    assert config == load_config_text(YAML)
    assert config.model.path == str(tmp_path / "m") and config.data.train[1].path == "python:train_data"
    assert load_config({**settings(), "train": {"steps": Steps.THREE, "lr": 1e-3}}).train.steps == 3
    assert load_config(settings(), ["train.lr=2e-3"]).train.lr == 2e-3


def test_dict_is_not_changed() -> None:
    values = settings() | {"extends": []}
    before = copy.deepcopy(values)
    with pytest.raises(ConfigError):
        load_config(values, ["train.steps=7"])
    assert values == before


def test_dict_extends_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    Path("base/base.yaml").write_text(YAML)
    config = load_config({"extends": Path("base/base.yaml"), "train": {"steps": 5}})
    assert config.train.steps == 5 and config.train.lr == 1e-3
    assert config.model.path == str(tmp_path / "base/m")  # relative to the file that has it


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda v: v["train"].update(stepz=3), "train.stepz: unknown key; did you mean `steps`?"),
        (lambda v: v["train"].update(lr=float("nan")), "train.lr: expected a finite number, found nan"),
        (lambda v: v["train"].update(lr="fast"), "train.lr: expected a number, found 'fast'"),
        (lambda v: v["train"].update({3: 4}), "train.3: a key must be text, found 3 (int)"),
        (lambda v: v["train"].update(steps={1}), "train.steps: expected a value of a configuration, found {1} (set)"),
        (lambda v: v["train"].update(steps=np.arange(2)), "(ndarray); write a list: .tolist()"),
        (lambda v: v.update(rl=print), "pass reward functions as rewards of octavo.run"),
        (lambda v: v["data"].update(eval=[{"path": "python:rows"}]), "write python:eval_data"),
        (lambda v: v["data"]["train"][1].update(stream=True), "has no effect on rows in memory"),
        (lambda v: v["data"]["train"][1].update(split="a"), "has no effect on a local path"),
        (lambda v: v["data"].update(sealed=True), "sealed rows are a folder"),
        (lambda v: v["train"].update(x=v), "nested in more than 32 levels"),
        (lambda v: v["train"].update(x=[0] * 20_000), "it holds more than 10,000 values"),
    ],
)
def test_problems_name_the_key_and_the_fix(change: Callable[[dict[str, Any]], None], problem: str) -> None:
    values = settings()
    change(values)
    with pytest.raises(ConfigError) as error:
        load_config(values)
    assert problem in str(error.value) and len(error.value.problems) == 1
    assert str(error.value).startswith("the configuration: ")


def test_all_problems_of_a_dict_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"model": {"path": "m"}, "data": {"trian": []}, "train": {"steps": object(), "lr": -1}})
    assert [problem.key for problem in error.value.problems] == ["train.steps", "data.train", "data.trian", "train.lr"]


@pytest.mark.parametrize("source", [3, [("train", {})]])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="expected a path or a mapping, found .*; pass a dict"):
        load_config(source)
