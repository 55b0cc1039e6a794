"""Every image-text model of transformers is described, or rejected by a rule."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AyaVisionConfig,
    Florence2Config,
    Gemma3Config,
    Glm4vConfig,
)

from octavo import models
from octavo.models.folder import folder
from octavo.models.forward import survey

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
LEAST = {"5.17.0": {"described": 53, "not built": 15}, "5.24.0": {"described": 67, "not built": 12}}
"""Of a version that was looked at: how many must be described, and how many at most cannot be built."""


def test_some_families():
    gemma, glm = survey.survey_family(Gemma3Config), survey.survey_family(Glm4vConfig)
    assert {gemma.here, glm.here} <= {survey.TRAINS, survey.PLANNED}
    assert gemma.projector == ("model.multi_modal_projector",) and gemma.decoder == "model.language_model"
    assert glm.projector == ("model.visual.merger", "model.visual.downsample")
    assert glm.blocks == ("model.visual.blocks", "model.language_model.layers") and glm.image_token == 151343
    assert survey.survey_family(Florence2Config).cells[-1].startswith("refused: it is an encoder-decoder model")
    broken = survey.survey_family(AyaVisionConfig)
    assert broken.here == survey.UNBUILT and broken.why.startswith("ValueError: embed_dim must be divisible")


@pytest.mark.long
@pytest.mark.rare
def test_every_family_of_this_version():
    actual = list(survey.survey())
    names = {one.model_type for one in actual}
    assert names >= {"qwen2_audio", "voxtral", *(c.model_type for c in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)}
    for one in actual:
        assert one.here in survey.SUPPORT_LEVELS
        described = one.here in (survey.TRAINS, survey.PLANNED)
        assert described == bool(one.decoder and one.blocks)
        assert one.why or one.here == survey.TRAINS, one.model_type
        assert len(one.why) < 200, one.why
    counts = {
        "described": sum(one.here in (survey.TRAINS, survey.PLANNED) for one in actual),
        **{here: sum(one.here == here for one in actual) for here in (survey.REFUSED, survey.UNBUILT)},
    }
    print(f"\ntransformers {transformers.__version__}: {counts}")
    if (least := LEAST.get(transformers.__version__)) is not None:
        assert counts["described"] >= least["described"] and counts["not built"] <= least["not built"]
    written = re.search(r"The table is for transformers ([\d.]+),", PAGE.read_text(encoding="utf-8"))
    if written[1] == transformers.__version__:
        result = runpy.run_path(str(PAGE.parent / "site" / "families.py"))["page"](actual)
        assert PAGE.read_text(encoding="utf-8") == result, "python docs/site/families.py writes it again"


@pytest.mark.long
def test_broken_file_does_not_fall_back_to_defaults(tmp_path):
    """phi4_multimodal's depthwise channels contain "depth", kosmos-2.5's patches "size"."""
    file = tmp_path / "config.json"
    for config_class in survey.config_classes().values():
        try:
            file.write_text(survey.full_default_config(config_class).to_json_string(use_diff=False))
        except models.ModelError:  # a class without a default
            continue
        folder.check_sizes(file)


@pytest.mark.parametrize("field", [{"depthwise_separable_out_channel": 1024}, {"max_num_patches": 4096}])
def test_size_limits_use_the_first_matching_word(tmp_path, field):
    (tmp_path / "config.json").write_text(json.dumps(field))
    folder.check_sizes(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"depth": 1024}))
    with pytest.raises(models.ModelError, match="has depth=1024, but the maximum is 1000"):
        folder.check_sizes(tmp_path / "config.json")
