"""The table of families: values derived from it, no other lists of families, and adding a family."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
from pathlib import Path

import pytest

from octavo import models
from octavo.base.model_families import RECORDS, FamilyRecord, tiny_families, trained_families, trains_on, video_families
from octavo.cli import tiny as command
from octavo.models.forward import survey
from octavo.models.processors import stock
from octavo.models.tiny import special_tokens, tiny
from octavo.models.tiny.configs import CHECKPOINTS
from octavo.models.tiny.parts import PAIRS, decoder_fields, processor_files, qwen_vision_fields, vision_ids
from octavo.parallel import ImageSharding
from tests.models.conftest import batch

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 3
TABLE = "model_families.py"
# Their words are those of other frameworks' files, of which some are a `model_type` by chance or by descent.
IMPORTERS = ("importers",)
# Octavo's own code of a family, which gives it its `model_type`.
OWN_CODE = ("mpt", "nvila", "onevision")
# A format of rows, called like the family for which it was made.
FORMATS = {"llava": ("data.py", "conversations.py", "sources.py")}


@pytest.fixture(scope="module")
def sources() -> dict[Path, ast.Module]:
    """The files that have a family's `model_type` as a string, parsed without docstrings."""
    quoted = re.compile(f"[\"']({'|'.join(map(re.escape, RECORDS))})[\"']")
    parsed = {}
    for path in sorted((ROOT / "octavo").rglob("*.py")):
        if not {*IMPORTERS, *OWN_CODE}.isdisjoint(path.relative_to(ROOT).parts):
            continue
        if quoted.search(text := path.read_text(encoding="utf-8")):
            parsed[path] = ast.parse(text)
    return parsed


def families_in(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and n.value in RECORDS}


def test_few_files_name_a_family(sources):
    named = {
        family: [p.name for p in sources if family in families_in(sources[p]) and p.name not in FORMATS.get(family, ())]
        for family in RECORDS
    }
    assert all(TABLE in files for files in named.values())
    assert {family: files for family, files in named.items() if len(files) > MOST_FILES} == {}


def test_records_name_existing_processors_and_checkpoints():
    assert set(CHECKPOINTS) == set(tiny_families())
    for family in trained_families("images"):
        record = RECORDS[family]
        assert record.processor in stock.PROCESSORS and record.image_cut
        kind = models.vision_of(models.tiny_config(family)).kind
        assert kind == ("patches" if record.image_cut.endswith("patches") else kind)
        assert (kind == "tiles") == record.image_cut.endswith(("tiles", "tile"))
    assert set(video_families()) <= set(trained_families("images"))
    assert not trains_on(["qwen3_vl"], "images") and not trains_on("qwen3", "images", "sound")


def test_family_is_added_by_record_processor_and_checkpoint(tmp_path, monkeypatch):
    """EXAONE 4.5, which transformers ships, and which is planned only: the three edits, as a change would make them."""
    library = pytest.importorskip("transformers.models.exaone4_5.processing_exaone4_5")
    from transformers import Exaone4_5_Config

    monkeypatch.delitem(RECORDS, "exaone4_5", raising=False)
    assert "Octavo knows neither its image processor" in models.why_not_trained(Exaone4_5_Config())

    # 1. the record
    record = FamilyRecord("exaone4_5", "ExaoneImageTextProcessor", "patches")
    monkeypatch.setitem(RECORDS, "exaone4_5", record)

    # 2. the processor
    class ExaoneImageTextProcessor(stock.TraitsWithoutVideo, library.Exaone4_5_Processor):
        image_class = stock.Qwen2VLImages

    monkeypatch.setitem(stock.PROCESSORS, "ExaoneImageTextProcessor", ExaoneImageTextProcessor)

    # 3. the small checkpoint
    files = processor_files("Exaone4_5_Processor", "Qwen2VLImageProcessor", PAIRS, "Qwen2VLVideoProcessor")

    def exaone4_5(size, vocab, ids):
        decoder = decoder_fields(size, vocab, sliding_window=None, model_type="exaone4")
        decoder["layer_types"] = ["full_attention"] * decoder["num_hidden_layers"]
        tower = qwen_vision_fields(decoder["hidden_size"], depth=2, intermediate_size=128, num_key_value_heads=2)
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
        names = {name: vision_ids(ids)[name] for name in ("image_token_id", "video_token_id")}
        return Exaone4_5_Config(text_config=decoder, vision_config=tower, **names)

    monkeypatch.setitem(
        CHECKPOINTS, "exaone4_5", type(CHECKPOINTS["qwen3_vl"])(exaone4_5, special_tokens.QWEN_VL, files)
    )

    # What follows from them.
    assert "exaone4_5" in trained_families("images")
    folder = tiny.write("exaone4_5", tmp_path / "exaone", size="mini")
    model, processor = models.load(folder), models.load_processor(folder, max_pixels=1024)
    assert type(processor) is ExaoneImageTextProcessor
    assert models.why_not_trained(model.config) is None and models.why_not_packed(model) is None
    inputs = batch(processor, image=True)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in model.parameters())
    assert sum(models.vision_of(model.config).patches(inputs)) == len(inputs["pixel_values"])
    assert ImageSharding(model, models.describe(model), None) is not None
    found = survey.survey_family(Exaone4_5_Config)
    assert found.here == survey.TRAINS and found.why.startswith("not packed, has layers of type sliding_attention")
    page = runpy.run_path(str(ROOT / "docs/site/families.py"))["page"]([found])
    assert (
        "| `exaone4_5` | image_encoder, image_projector, foundation | no: has layers of type sliding_attention" in page
    )
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert "exaone4_5" in parser.format_help().replace("\n", " ")
