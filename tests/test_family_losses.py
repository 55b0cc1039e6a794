"""The comparison of `make test-oldest`, on one family and one version: equal losses pass, and any other is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests import family_losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("losses")
    family_losses.write(place, ("qwen2_5_vl",))
    return place


def test_equal_losses_pass_and_one_bit_more_is_found(folder: Path) -> None:
    assert family_losses.compare(folder, {}) == []
    record = json.loads((folder / "losses.json").read_text())
    assert list(record["losses"]["qwen2_5_vl"]) == ["text", "images", "videos"]
    planted = {**record, "losses": {"qwen2_5_vl": {**record["losses"]["qwen2_5_vl"]}}}
    value = planted["losses"]["qwen2_5_vl"]["videos"]
    planted["losses"]["qwen2_5_vl"]["videos"] = (float.fromhex(value) * (1 + 2**-23)).hex()
    try:
        (folder / "losses.json").write_text(json.dumps(planted))
        [sentence] = family_losses.compare(folder, {})
        assert sentence.startswith("qwen2_5_vl videos: the loss is ")
        assert family_losses.compare(folder, {"qwen2_5_vl videos": "planted"}) == []
        (folder / "losses.json").write_text(json.dumps(record))
        batch = load_file(folder / "qwen2_5_vl.images.safetensors")
        written = (folder / "qwen2_5_vl.images.safetensors").read_bytes()
        save_file(
            {**batch, "pixel_values": batch["pixel_values"] * (1 + 2**-23)}, folder / "qwen2_5_vl.images.safetensors"
        )
        sentences = family_losses.compare(folder, {"qwen2_5_vl images": "follows"})
        assert any(one.startswith("qwen2_5_vl batches: pixel_values of images differ") for one in sentences)
        (folder / "qwen2_5_vl.images.safetensors").write_bytes(written)
        (folder / "losses.json").write_text(json.dumps({**record, "torch": "1.0"}))
        assert "nothing is compared" in family_losses.compare(folder, {})[0]
    finally:
        (folder / "losses.json").write_text(json.dumps(record))
    assert "DIFFERS says so" in family_losses.compare(folder, {"qwen2_5_vl": "no longer"})[0]
