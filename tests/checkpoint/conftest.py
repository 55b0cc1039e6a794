"""Good folders of every format, for whoever plants corruptions in copies of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import folders


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> folders.Good:
    """good("fp8-block", "qwen3_moe") -> the folder, written once; read only."""
    place = tmp_path_factory.mktemp("good")
    tokenizer = folders.tokenizers(place / "tokenizer")

    def get(form: str, model: str = "qwen3") -> Path:
        folder = place / f"{form}-{model}"
        return folder if folder.exists() else folders.write(form, folder, tokenizer, model)

    return get
