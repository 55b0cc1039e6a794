"""The proposal: the fastest that fits, exact ones first, with reasons; what would be needed where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.config import load_config_text
from octavo.train import planning
from octavo.train.fit import TIE, _fastest, fit
from octavo.train.footprint import CONTEXT, FRAGMENTS, Card, Footprints
from octavo.train.tokens import Tokens


@pytest.fixture
def all_of(make, place) -> Footprints:
    cfg = make(f"model.path={place / 'text'}", "train.micro_batch=1", "train.global_batch=2")
    model, family = planning.model_of(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    return Footprints(cfg, model, family, plan, Tokens({"foundation": 128, "lm_head": 128}, 128, 0))


def card(usable: float) -> Card:
    made = Card("a card", int((usable + CONTEXT) / (1 - FRAGMENTS)) + 1)
    assert 0 <= made.usable - usable < 10
    return made


def test_room_enough_takes_the_fastest_and_of_equals_the_exact(all_of) -> None:
    found = fit(all_of, card(1e12))
    assert found.best is not None and not found.faster
    assert found.best.relative <= TIE
    rounded = replace(found.best, settings={**found.best.settings, "optimizer.master": "bf16+sr"})
    exact = replace(found.best, settings={**found.best.settings, "optimizer.master": "fp32"})
    assert _fastest([rounded, replace(exact, seconds=1.005 * exact.seconds)]).settings["optimizer.master"] == "fp32"


def test_less_room_takes_switches_and_says_why(all_of, place) -> None:
    roomy = fit(all_of, card(1e12)).best
    assert roomy is not None
    tight = fit(all_of, card(0.5 * roomy.footprint.total))
    best = tight.best
    assert best is not None and best.over(tight.card) <= 0 and tight.reasons
    assert all(s.over(tight.card) > 0 and s.seconds < best.seconds for s in tight.faster)
    # what is proposed is a configuration that can be run
    text = f"model: {{path: {place / 'text'}}}\ndata: {{train: [{{path: x.json}}]}}\n"
    lines = [
        line if not line.startswith("train:") else line[:-1] + ", steps: 1, global_batch: 2}" for line in best.yaml()
    ]
    assert load_config_text(text + "\n".join(lines)).optimizer.states == best.settings["optimizer.states"]


def test_settings_given_are_held(all_of) -> None:
    roomy = fit(all_of, card(1e12)).best
    assert roomy is not None
    found = fit(all_of, card(0.6 * roomy.footprint.total), held=["optimizer.states", "train.recompute"])
    settings = (found.best or found.smallest).settings
    assert settings["optimizer.states"] == "fp32" and settings["train.recompute"] == "none"


def test_nothing_fits(all_of) -> None:
    found = fit(all_of, card(1e3))
    assert found.best is None and found.smallest.over(found.card) > 0 and found.ranks is None
