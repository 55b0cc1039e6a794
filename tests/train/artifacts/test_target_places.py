"""`look` at a run with something else where a file or a folder belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.train import TrainError
from octavo.train.artifacts import inspect_target
from tests.fuzz import mutate


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints", "config.json"])
@pytest.mark.parametrize("what", ["pipe", "device", "broken link"])
def test_error_names_a_wrong_file_type(name: str, what: str, tmp_path: Path) -> None:
    for file in ("config.yaml", name):
        (tmp_path / file).touch()
    mutate.replace_file(None, tmp_path / name, what)  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=rf"{tmp_path / name} is a (named pipe|device|link that leads nowhere)"):
        inspect_target(tmp_path)
