"""A pretrained model, four layers of it, in vLLM: what `.ci/run` checks of a server."""

from __future__ import annotations

import pytest

from tests.server import checks, folders, outcomes, reference
from tests.server.conftest import FourLayers

pytestmark = [pytest.mark.server, pytest.mark.long]

#: one of each verdict, and what vLLM does with it
DAMAGES = {"dyn-missing-norm": outcomes.WRONG, "dyn-qlost": outcomes.REFUSES, "dyn-stray": outcomes.OK}


@pytest.mark.parametrize("name", ["bf16", "dyn"])
def test_loaded_folder_answers_like_its_reference(four_layers: FourLayers, name: str) -> None:
    prompts = reference.question_rows(four_layers.model)
    rows = reference.held_rows(four_layers.model, 4, 128)
    compared = checks.compare(four_layers.server, four_layers.base(name), "", rows, prompts)
    assert not compared.problems
    if name == "dyn":
        # q, k, v, o, gate, up and down of SmolLM2: 576 hidden, 192 of keys and values, 1536 inner
        assert compared.counts["codes"] == 4 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
        assert compared.counts["scales"] == 4 * (576 + 192 + 192 + 576 + 2 * 1536 + 576)


def test_running_engine_takes_new_weights_and_the_old_ones_again(four_layers: FourLayers) -> None:
    assert not four_layers.update("dyn")


@pytest.mark.parametrize("damage", [d for d in folders.DAMAGES if d.name in DAMAGES], ids=lambda damage: damage.name)
def test_verify_knows_what_the_server_does(four_layers: FourLayers, damage: folders.Damage) -> None:
    seen, predicted = four_layers.observe(damage)
    assert seen.verdict == DAMAGES[damage.name], seen
    assert predicted == seen.verdict, seen
