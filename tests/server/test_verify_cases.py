"""The folders that `octavo verify` is tested with, loaded in vLLM: their stored outcomes are what happens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.models.tiny import tiny
from octavo.train.artifacts.export import export_model
from tests.checkpoint import server_cases, surplus
from tests.checkpoint.server_folders import LAYERS, OK, Case, write
from tests.server import outcomes, reference
from tests.server.client import Server, ServerRefused

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.long]

KERNELS = {"bf16": "", "bf16_tied": "", "dyn": "", "block": "block", "ctblock": "block"}
KERNELS |= dict.fromkeys(("tensor", "static", "auto", "autostatic"), "tensor")
ROWS = [[5 + (7 * row + 3 * at) % 370 for at in range(32)] for row in range(2)]


def kernel_of(form: str) -> str:
    """The kernel of the test that vLLM needs for a form of any family ("dyn@qwen2")."""
    return KERNELS[form.partition("@")[0]]


class Forms:
    """Good folders of each form, and vLLM's answers for them."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.tokenizer = tiny.write("llama", folder / "tokenizer")
        self._scores: dict[str, reference.Scores] = {}

    def scores(self, form: str) -> reference.Scores:
        if form not in self._scores:
            self.server.load(write(Case(form, OK), self.folder / form, self.tokenizer), kernel_of(form))
            self._scores[form] = self.server.score(ROWS)
        return self._scores[form]


@pytest.fixture(scope="module")
def forms(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Forms:
    return Forms(server, tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("name", server_cases.CASES)
def test_stored_outcome_is_what_the_server_does(
    forms: Forms, tmp_path: Path, seen: dict[str, dict[str, Any]], name: str
) -> None:
    case = server_cases.CASES[name]
    good = forms.scores(case.base)
    far = reference.TIMES * reference.distance(forms.scores("dyn"), forms.scores("bf16")).mean
    kernel = "block" if name.startswith(("ragged", "block")) else kernel_of(case.base)  # some bring their own blocks
    folder = write(case, tmp_path / "folder", forms.tokenizer)
    observed = outcomes.observe(forms.server, folder, kernel, ROWS, good, far)
    predicted = outcomes.predict(folder)
    note(seen, name, observed, predicted, bool(kernel))
    assert predicted == observed.verdict == case.vllm, observed


def note(
    seen: dict[str, dict[str, Any]], name: str, observed: outcomes.Outcome, predicted: str, kernel: bool = False
) -> None:
    row = {"kernel_of_the_test": kernel, "vllm": observed.verdict, "detail": observed.detail, "verify": predicted}
    seen["folders"][f"tiny {name}"] = row


@pytest.mark.parametrize("format", ["bf16", "fp8-dynamic"])
def test_exports_with_tensors_that_the_class_does_not_load_are_refused(
    forms: Forms, tmp_path: Path, seen: dict[str, dict[str, Any]], format: str
) -> None:
    """vLLM's class of a Llama refuses `mtp.*`, in the export as in the folder that it was made from."""
    plain = write(Case("bf16", OK), tmp_path / "plain", forms.tokenizer)
    source = surplus.copy(plain, tmp_path / "source", surplus.tensors(LAYERS))
    export_model(source, tmp_path / format, format)
    assert surplus.same(tmp_path / format, surplus.tensors(LAYERS))
    form = "dyn" if format == "fp8-dynamic" else "bf16"
    for name, folder in ((f"{format}-not-loaded", tmp_path / format), ("bf16-not-loaded-source", source)):
        observed = outcomes.observe(forms.server, folder, "", ROWS, forms.scores(form), 0.0)
        predicted = outcomes.predict(folder)
        note(seen, name, observed, predicted)
        assert predicted == observed.verdict == outcomes.REFUSES, observed
        assert "There is no module or parameter named" in observed.detail


def test_first_prompt_fails_with_the_tokenizer_of_a_larger_model(
    forms: Forms, model: Path, tmp_path: Path, seen: dict[str, dict[str, Any]]
) -> None:
    """vLLM compares token numbers with the larger one of tokenizer and embedding, and looks up a row that is not there.
    The engine does not serve another request. Tokens that have rows are not noticed, whatever they stand for."""
    folder = write(Case("bf16", OK), tmp_path / "folder", forms.tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, folder / name)
    forms.server.load(folder)  # starts
    with pytest.raises(ServerRefused, match="IndexError: index out of range") as refused:
        forms.server.chat("What is this?", 4)
    predicted = outcomes.predict(folder)
    note(seen, "bf16-foreign-tokenizer", outcomes.Outcome(outcomes.WRONG, str(refused.value)), predicted)
    assert predicted == outcomes.WRONG


def test_engine_with_a_damaged_chat_template_starts_and_refuses_to_chat(
    forms: Forms, tmp_path: Path, seen: dict[str, dict[str, Any]]
) -> None:
    folder = write(Case("bf16", OK), tmp_path / "folder", forms.tokenizer)
    (folder / "chat_template.jinja").write_text("{% for m in messages")
    observed = outcomes.observe(forms.server, folder, "", ROWS, forms.scores("bf16"), 0.0)
    with pytest.raises(ServerRefused, match="TemplateSyntaxError"):
        forms.server.chat("What is this?", 4)
    predicted = outcomes.predict(folder)
    note(seen, "bf16-template-cut", observed, predicted)
    assert predicted == observed.verdict == outcomes.OK, observed
