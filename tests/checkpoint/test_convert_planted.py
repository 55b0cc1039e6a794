"""Conversions of damaged FP8 folders are rejected, naming file and tensor, and leave no files."""

from __future__ import annotations

import shutil

import pytest

from octavo.checkpoint import CheckpointError, convert
from octavo.models import ModelError
from tests.checkpoint import folders, planted


@pytest.mark.parametrize("form", ["fp8-block", "ct-row", "ct-tensor"])
def test_planted_corruptions_are_rejected_and_leave_no_files(tmp_path, form):
    (tmp_path / "no_tokenizer").mkdir()
    good = folders.write(form, tmp_path / "good", tmp_path / "no_tokenizer")
    by_headers = [planted.dropped_scale, planted.codes_cast_to_bf16_scale_left, planted.skip_list_covers_fp8]
    by_headers += [planted.transposed_scale] if form != "ct-tensor" else []
    by_values = [planted.scales_of_one, planted.nan_block, planted.nan_scale, planted.zero_scale]
    for plant in by_headers + by_values:
        bad = tmp_path / plant.__name__
        shutil.copytree(good, bad)
        plant(bad)
        for to_bf16 in (True, False) if plant in by_headers else (True,):
            with pytest.raises((CheckpointError, ModelError)) as refused:
                convert.hf_to_dcp(bad, tmp_path / f"{plant.__name__}-made", to_bf16=to_bf16)
            assert "model.layers." in str(refused.value) and ".safetensors" in str(refused.value)
            assert not (tmp_path / f"{plant.__name__}-made").exists()
