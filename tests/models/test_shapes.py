"""Published shapes: correct number of parameters, without memory or time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo import models
from octavo.models.structure.shapes import SHAPES

# Totals of the published checkpoints (tied weights once), in billions.
PUBLISHED = {
    "qwen3_vl_2b": 2.13,
    "qwen3_vl_4b": 4.44,
    "qwen3_vl_8b": 8.77,
    "qwen3_vl_30b_a3b": 31.07,
    "qwen3_vl_235b_a22b": 235.67,
    "qwen2_5_vl_7b": 8.29,
    "internvl3_5_8b": 8.53,
    "llava_onevision_1_5_4b": 4.74,
    "llava_onevision_1_5_8b": 8.53,
    "nvila_8b": 8.07,
    "qwen3_1_7b": 1.72,
    "qwen3_8b": 8.19,
    "qwen3_14b": 14.77,
    "llama2_7b": 6.74,
    "qwen2_5_0_5b": 0.494,
    "mpt_1b": 1.316,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    model, family = models.shape_model(name)
    assert models.parameter_count(model) == pytest.approx(PUBLISHED[name] * 1e9, rel=0.005)
    assert all(p.is_meta for p in model.parameters())
    assert family.has_vision == any(word in name for word in ("vl", "nvila", "llava"))


def test_every_shape_is_checked():
    assert set(PUBLISHED) == set(SHAPES)


def test_an_unknown_shape_lists_the_known():
    with pytest.raises(models.ModelError, match=r"did you mean 'qwen3_vl_8b'\?\); known shapes: qwen3_vl_2b, .*mpt_1b"):
        models.shape_model("qwen3_vl_8")


@pytest.mark.long
def test_time_and_memory_of_the_largest():
    code = (
        "import time; from octavo import models; t = time.time(); models.shape_model('qwen3_vl_30b_a3b'); "
        "from octavo.train.step.memory_report import peak_rss; print(time.time() - t, peak_rss())"
    )
    seconds, peak = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(seconds) < 20 and int(peak) < 2 << 30
