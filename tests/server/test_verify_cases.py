"""The folders that `octavo verify` is tested with, loaded in vLLM: their stored outcomes are what happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.models.tiny import tiny
from tests.checkpoint import server_cases
from tests.checkpoint.server_folders import OK, Case, write
from tests.checkpoint.test_verify_servers import QUICK
from tests.server import outcomes, reference
from tests.server.client import Server

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.long]

KERNELS = {"bf16": "", "bf16_tied": "", "dyn": "", "tensor": "tensor", "block": "block", "ctblock": "block"}
NAMES = [name for name in QUICK if server_cases.CASES[name].base in KERNELS]
ROWS = [[5 + (7 * row + 3 * at) % 370 for at in range(32)] for row in range(2)]


class Forms:
    """Good folders of each form, and vLLM's answers for them."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.tokenizer = tiny.write("llama", folder / "tokenizer")
        self._scores: dict[str, reference.Scores] = {}

    def scores(self, form: str) -> reference.Scores:
        if form not in self._scores:
            self.server.load(write(Case(form, OK), self.folder / form, self.tokenizer), KERNELS[form])
            self._scores[form] = self.server.score(ROWS)
        return self._scores[form]


@pytest.fixture(scope="module")
def forms(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(server, tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("name", NAMES)
def test_stored_outcome_is_what_the_server_does(
    forms: Forms, tmp_path: Path, seen: dict[str, dict[str, Any]], name: str
) -> None:
    case = server_cases.CASES[name]
    good = forms.scores(case.base)
    far = reference.TIMES * reference.distance(forms.scores("dyn"), forms.scores("bf16")).mean
    kernel = KERNELS[case.base]
    if name.startswith("ragged"):
        kernel = "block"  # the case brings its own blocks
    folder = write(case, tmp_path / "folder", forms.tokenizer)
    observed = outcomes.observe(forms.server, folder, kernel, ROWS, good, far)
    predicted = outcomes.predict(folder)
    row = {"kernel_of_the_test": bool(kernel), "vllm": observed.verdict, "detail": observed.detail, "verify": predicted}
    seen["folders"][f"tiny {name}"] = row
    assert predicted == observed.verdict == case.vllm, observed
