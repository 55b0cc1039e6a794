"""Which families can be trained, and why others can only be planned."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import Gemma3Config, Lfm2VlConfig, PaliGemmaConfig, Qwen3Config
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

from octavo import models
from octavo.base.model_families import RECORDS, trained_families
from octavo.models.processors import stock
from octavo.train.errors import TrainError
from octavo.train.setup.checks import check_family


def test_trained_families_have_a_processor():
    named = [RECORDS[family].processor for family in trained_families("images")]
    assert set(named) == set(stock.PROCESSORS)


def test_text_models_and_the_families_of_the_table_train(checkpoint):
    assert models.why_not_trained(Qwen3Config()) is None
    assert models.why_not_trained(models.read_config(checkpoint("internvl"))) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PaliGemmaConfig, "its prompt attends both ways"),
        (Lfm2VlConfig, "its forward takes spatial_shapes, which no family that trains here has"),
        (
            Qwen2_5OmniThinkerConfig,
            "it takes sounds (input_features), and Octavo does not know how they enter its tower",
        ),
        (Gemma3Config, "Octavo knows neither its image processor nor how its images are cut"),
    ],
)
def test_untrained_families_have_a_reason(config, reason, monkeypatch):
    if config is Gemma3Config:
        monkeypatch.delitem(RECORDS, config.model_type)
    assert reason in models.why_not_trained(config())


def test_rank_that_hangs_is_named(monkeypatch):
    monkeypatch.setattr(models, "read_config", lambda path: Gemma3Config())
    monkeypatch.setitem(RECORDS, "gemma3", replace(RECORDS["gemma3"], why_not="of this reason"))
    with pytest.raises(TrainError, match="'gemma3' can be planned but not trained: of this reason"):
        check_family(SimpleNamespace(model=SimpleNamespace(path="somewhere")))
