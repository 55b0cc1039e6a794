"""Names that others import: each stays where it is, whatever file it is written in."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys

import pytest

NAMES = {
    "octavo": ["load"],
    "octavo.checkpoint.trainer": ["Fp8Callback"],
    "octavo.config": ["Config", "Dataset", "load_config", "load_config_text"],
    "octavo.data": ["IGNORE", "Encoder", "read", "train_loader"],
    "octavo.generation": ["Completion", "Engine", "Prompt", "Sampling"],
    "octavo.models": ["frames", "load", "load_processor"],
    "octavo.rl.rewards": ["RewardError", "Rewards"],
    "octavo.train": ["Callback", "run"],
}
VALUES = {"IGNORE": -100}
MODULES = {"frames"}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_public_name_is_where_it_was(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if name in VALUES:
        assert value == VALUES[name]
    elif name in MODULES:
        assert inspect.ismodule(value) and value.__name__.startswith(f"{module}.")
    elif name[0].isupper():
        assert inspect.isclass(value) and value.__name__ == name
    else:
        assert inspect.isfunction(value) and value.__name__ == name


def test_bench_is_run_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo.bench", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("octavo.bench", run_name="__main__")
    assert end.value.code == 2 and "usage: python -m octavo.bench report DIR" in capsys.readouterr().out
