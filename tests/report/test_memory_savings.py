"""What each memory saving cost: which runs are trained for it, and what the page says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_runs import CONFIG, GOOD_PROOF, health, losses, plan, write_run

from octavo.config import load_config_text, to_yaml
from octavo.report import compare
from octavo.report.trial.memory_savings import ablation, cost_rows, describe_last_saving, without_savings
from octavo.report.trial.runs import high_precision_config, make_runs, own_recipe

SAVING = CONFIG + (
    "fp8: {activations: fp8, foundation: {param: true}}\n"
    "optimizer: {states: fp8, master: bf16+sr, update: backward}\n"
)  # fmt: skip


@pytest.fixture
def saving():
    return load_config_text(SAVING)


def test_settings_add_one_saving_at_a_time(saving) -> None:
    found = ablation(saving)
    assert [words for words, _ in found] == [
        "FP8 without savings", "+ optimizer states in fp8", "+ weights as bf16+sr", "+ activations in FP8",
        "+ FP8 weights between steps",
    ]  # fmt: skip
    plain = found[0][1]
    assert plain == without_savings(saving) and plain.fp8.recipe == saving.fp8.recipe
    assert (plain.optimizer.states, plain.optimizer.master, plain.optimizer.update) == ("fp32", "fp32", "step")
    assert plain.fp8.activations == "bf16" and plain.fp8.foundation.param is None
    by_words = dict(found)
    assert [setting.train.precision for _, setting in found] == ["bf16", "bf16", "auto", "auto", "auto"]  # all BF16
    assert by_words["+ optimizer states in fp8"].optimizer.states == "fp8"
    assert by_words["+ optimizer states in fp8"].optimizer.master == "fp32"
    assert by_words["+ activations in FP8"].fp8.foundation.param is None
    last = by_words["+ FP8 weights between steps"]
    assert last.fp8 == saving.fp8 and last.optimizer.update == "step"


def test_fp8_head_is_a_setting_of_the_ablation() -> None:
    cfg = load_config_text(CONFIG + "fp8: {lm_head: {recipe: rowwise}}\n")
    ((words, before),) = ablation(cfg)
    assert words == "FP8 without savings" and before.fp8.lm_head is None and before.fp8.recipe == cfg.fp8.recipe
    assert describe_last_saving(cfg) == "+ lm_head in FP8 (rowwise)"
    alone = load_config_text(CONFIG + "fp8: {recipe: off, lm_head: {recipe: rowwise}}\n")
    assert own_recipe(alone) == "by-component" and high_precision_config(alone).fp8.lm_head is None


def test_configuration_without_savings_has_no_ablation() -> None:
    assert ablation(load_config_text(CONFIG)) == []


def test_high_precision_has_no_savings_and_keeps_the_model_dtype(saving, tmp_path: Path) -> None:
    runs = {a.name: a for a in make_runs(saving, None, tmp_path)}
    reference = runs["high-precision"].cfg
    assert reference.fp8.recipe == "off" and reference.fp8.activations == "bf16"
    assert (reference.optimizer.states, reference.optimizer.master) == ("fp32", "fp32")
    assert reference.train.precision == "bf16"
    assert [a.kind for a in runs.values()] == ["reference", "noise", *["saving"] * 5, "fp8"]
    assert not [a for a in make_runs(saving, None, tmp_path, savings=False) if a.kind == "saving"]
    assert not [a for a in make_runs(saving, ["rowwise", "mxfp8"], tmp_path) if a.kind == "saving"]
    high = load_config_text(CONFIG + "optimizer: {states: fp8}\n")
    assert make_runs(high, None, tmp_path)[0].cfg.train.precision == "auto"


def _run(label: str, size: int, gap: float, speed: float, failure: str | None = None) -> dict:
    memory = {"weights": size, "peak_rss": 10**9}
    return {"label": label, "memory": memory, "gap": gap, "speed_ratio": speed, "eval": None, "failure": failure}


def test_each_setting_is_compared_with_the_last_trained_one() -> None:
    first, second, third = cost_rows(
        [_run("plain", 100, 0.01, 0.5), _run("+ a", 60, math.nan, math.nan, "diverged")],
        _run("FP8 blockwise", 40, -0.01, 0.25),
        "+ b",
    )
    assert first["saved"] is None and second["failure"] == "diverged"
    assert (third["label"], third["bytes"], third["saved"]) == ("+ b", 40, 60)
    assert third["loss_change"] == pytest.approx(0.99 / 1.01 - 1)
    assert third["speed_change"] == -0.5


def test_page_shows_the_cost_of_each_saving(saving, tmp_path: Path, monkeypatch, sound_answers) -> None:
    order = [words for words, _ in ablation(saving)]

    def run(cfg, *, console=None, label=None, phase=None, describe_plan=None, watchers=()):
        home, fp8 = Path(cfg.run.dir), not Path(cfg.run.dir).name.startswith("high")
        setting = {f"saving-{n}": n for n in range(len(order))}.get(home.name, len(order))
        memory = {"weights": 10_000_000 >> setting, "optimizer": 1 << 20, "peak_rss": 9}
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF, "zeroed": 0} if fp8 else {}
        loss = losses(cfg.train.steps, 0.001 * setting * fp8, cfg.run.seed)
        write_run(home, loss, config=to_yaml(cfg), speed=5000.0 / (1 + setting), memory=memory, **extra)
        return SimpleNamespace(dir=home, status="finished", steps=cfg.train.steps)

    import octavo.train

    monkeypatch.setattr(octavo.train, "run", run, raising=False)
    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"loss": "", "gap": ""}, []))
    verdict = compare(saving, None, tmp_path, forks=0)
    text = (tmp_path / "report" / "report.html").read_text()
    assert "The cost of each memory saving" in text and "+ update in backward" in text
    assert "-17 %" in text  # from a fifth of 5000 tokens a second to a sixth
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["savings"]
    assert [row["label"] for row in rows] == [*order, "+ update in backward"]
    zeroed = next(check for check in verdict.checks if check.name == "v_zero")
    assert (zeroed.shown, zeroed.status) == ("0", "pass")
