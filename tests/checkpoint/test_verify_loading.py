"""`models.load` refuses the planted corruptions that concern who loads, by a sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from octavo import models
from tests.checkpoint import planted
from tests.checkpoint.folders import Good

CASES = [c for c in planted.CORRUPTIONS if c.load and not c.against]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.plant.__name__)
def test_damaged_folders_are_refused(case: planted.Corruption, good: Good, tmp_path: Path) -> None:
    form = case.forms[-1] if case.forms[-1] == "fp8-block" else case.forms[0]
    folder = tmp_path / "damaged"
    shutil.copytree(good(form, case.model), folder)
    models.load(folder, torch.bfloat16)
    case.plant(folder)
    with pytest.raises(models.ModelError) as refused:
        models.load(folder, torch.bfloat16)
    assert any(part in str(refused.value) for part in (folder.name, ".safetensors", "config.json"))
