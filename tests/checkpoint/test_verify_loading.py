"""`models.load` rejects the planted corruptions that affect loading."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from octavo import models
from tests.checkpoint import planted
from tests.checkpoint.folders import Good

CASES = [c for c in planted.CORRUPTIONS if c.load and not c.against]


@pytest.fixture(scope="module")
def loads(good: Good) -> Callable[[str, str], Path]:
    """loads("fp8-block", "qwen3_moe") -> the good folder, which was loaded once."""

    @cache
    def get(form: str, model: str) -> Path:
        models.load(good(form, model), torch.bfloat16)
        return good(form, model)

    return get


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.plant.__name__)
def test_damaged_folders_are_rejected(
    case: planted.Corruption, loads: Callable[[str, str], Path], tmp_path: Path
) -> None:
    form = case.forms[-1] if case.forms[-1] == "fp8-block" else case.forms[0]
    folder = tmp_path / "damaged"
    shutil.copytree(loads(form, case.model), folder)
    case.plant(folder)
    with pytest.raises(models.ModelError) as refused:
        models.load(folder, torch.bfloat16)
    assert any(part in str(refused.value) for part in (folder.name, ".safetensors", "config.json"))
