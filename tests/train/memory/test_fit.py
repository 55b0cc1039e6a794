"""The proposal: the fastest that fits, exact ones first, with reasons; what would be needed where nothing fits."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from octavo.config import load_config_text, override
from octavo.models.tiny import tiny
from octavo.train.estimate.memory import footprint
from octavo.train.estimate.memory.card import CONTEXT, FRAGMENTS, Card
from octavo.train.estimate.memory.fit import LINK, TIE, _combinations, _select_fastest, configured_settings, propose
from octavo.train.estimate.memory.footprint import MemoryEstimator, with_settings
from octavo.train.estimate.memory.switches import SWITCHES, savings
from octavo.train.setup import planning
from octavo.train.setup.token_counts import Tokens

TRAIN = ("logits", "offload_activations", "recompute", "micro_batch")


@pytest.fixture(scope="module")
def all_of(place) -> MemoryEstimator:
    """Its forwards are counted once for all tests."""
    cfg = load_config_text(f"""
model: {{path: {place / "text"}}}
data: {{train: [{{path: x.json}}]}}
train: {{steps: 6, seq_length: 128, micro_batch: 1, global_batch: 2}}
""")
    model, family = planning.meta_model(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    return MemoryEstimator(cfg, model, family, plan, Tokens({"foundation": 128, "lm_head": 128}, 128, 0))


def card(usable: float) -> Card:
    made = Card("a card", int((usable + CONTEXT) / (1 - FRAGMENTS)) + 1)
    assert 0 <= made.usable - usable < 10
    return made


@pytest.mark.long
def test_fit_prefers_fast_then_exact_combinations(all_of) -> None:
    found = propose(all_of, card(1e12))
    assert found.best is not None and not found.faster
    assert found.best.relative <= TIE
    rounded = replace(found.best, settings={**found.best.settings, "optimizer.master": "bf16+sr"})
    exact = replace(found.best, settings={**found.best.settings, "optimizer.master": "fp32"})
    assert (
        _select_fastest([rounded, replace(exact, seconds=1.005 * exact.seconds)]).settings["optimizer.master"] == "fp32"
    )


def test_fit_explains_switches_for_a_small_card(all_of, place) -> None:
    roomy = propose(all_of, card(1e12)).best
    assert roomy is not None
    tight = propose(all_of, card(0.5 * roomy.footprint.total))
    best = tight.best
    assert best is not None and best.excess(tight.card) <= 0 and tight.reasons
    assert all(s.excess(tight.card) > 0 and s.seconds < best.seconds for s in tight.faster)
    # what is proposed is a configuration that can be run
    text = f"""
model: {{path: {place / "text"}}}
data: {{train: [{{path: x.json}}]}}
"""
    lines = [line for line in best.to_yaml(configured_settings(all_of.cfg)) if line != "train:"]
    more = [line for line in best.to_yaml() if line.startswith("  ") and line.split(":")[0].strip() in TRAIN]
    lines = [line for line in lines if line not in more]
    made = load_config_text("\n".join([text, *lines, "train:", "  steps: 1", "  global_batch: 2", *more]))
    assert made.optimizer.states == best.settings["optimizer.states"]
    assert {key: value for key, value in configured_settings(made).items() if key in best.settings} == best.settings
    again = override(all_of.cfg, shlex.split(best.to_overrides(configured_settings(all_of.cfg))))
    assert configured_settings(again) == configured_settings(made)


def test_settings_given_are_held(all_of) -> None:
    roomy = propose(all_of, card(1e12)).best
    assert roomy is not None
    found = propose(all_of, card(0.6 * roomy.footprint.total), held=["optimizer.states", "train.recompute"])
    settings = (found.best or found.smallest).settings
    assert settings["optimizer.states"] == "fp32" and settings["train.recompute"] == "none"


def test_offloaded_states_cross_the_link_both_ways(all_of) -> None:
    held = frozenset(configured_settings(all_of.cfg)) - {"optimizer.offload"}
    here, away = sorted(_combinations(all_of, card(1e12), 1, held), key=lambda s: s.settings["optimizer.offload"])
    assert away.footprint.host > 0 == here.footprint.host
    assert away.seconds - here.seconds == pytest.approx(2 * away.footprint.host / LINK, rel=0.01)


def test_fit_reports_that_nothing_fits(all_of) -> None:
    found = propose(all_of, card(1e3))
    assert found.best is None and found.smallest.excess(found.card) > 0 and found.ranks is None


def test_search_without_settings_that_cannot_fit_finds_the_same_fitting_ones(all_of) -> None:
    """The smaller search is the one over numbers of ranks."""
    everything = list(_combinations(all_of, card(1e12), 1, frozenset()))
    sizes = sorted(s.footprint.total for s in everything)
    for usable in (sizes[0] - 20, sizes[len(sizes) // 3], sizes[-1]):
        limit = card(usable)
        fitting = [s.settings for s in everything if s.excess(limit) <= 0]
        pruned = _combinations(all_of, limit, 1, frozenset(), all_if_none_fits=False)
        assert [s.settings for s in pruned if s.excess(limit) <= 0] == fitting


def test_loss_of_routers_keeps_the_same_bytes_in_every_setting_of_memory(tmp_path, monkeypatch) -> None:
    """So it is counted once for each dtype, and not in each of the forwards of a search."""
    model_folder = tiny.write("qwen3_moe", tmp_path / "moe", size="mini")
    cfg = load_config_text(f"""
model: {{path: {model_folder}}}
data: {{train: [{{path: x.json}}]}}
train: {{steps: 6, seq_length: 64, micro_batch: 1, global_batch: 2}}
optimizer: {{master: bf16+sr}}
""")
    model, family = planning.meta_model(cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    counted = []
    real = footprint.count_balance_loss
    monkeypatch.setattr(footprint, "count_balance_loss", lambda *args: counted.append(real(*args)) or counted[-1])
    for keys in ({}, {"train.recompute": "selective", "fp8.activations": "fp8"}):
        sizes = MemoryEstimator(cfg, model, family, plan, Tokens({"foundation": 64, "lm_head": 64}, 64, 0))
        sizes.estimate(with_settings(cfg, keys))
        sizes.estimate(with_settings(cfg, {"train.recompute": "full"}))
    assert len(counted) == 2 and counted[0] == counted[1] > 0


def test_search_and_savings_report_their_progress(all_of) -> None:
    reports: list[tuple[int, int]] = []
    propose(all_of, card(1e3), progress=lambda done, total: reports.append((done, total)))
    assert [done for done, _ in reports] == list(range(reports[0][1])) and len({total for _, total in reports}) == 1
    reports.clear()
    assert list(savings(all_of, progress=lambda done, total: reports.append((done, total))))
    assert reports == [(number, len(SWITCHES)) for number in range(len(SWITCHES))]
