"""Trials of reinforcement learning and of preferences: held-out answers decide, and rewards are reported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from synthetic_runs import CONFIG, GOOD_PROOF, health, judged, plan, write_run

from octavo.config import load_config_text, override, to_yaml
from octavo.report import ReportError, Trial, compare
from octavo.report.evidence import claims, rl_claims
from octavo.report.evidence.claims import HeldOut
from octavo.report.evidence.run_reader import read, read_failed_run
from octavo.report.run.completions import LENGTH, side_by_side
from octavo.report.trial.judge import judge
from octavo.report.trial.report_page import write
from octavo.report.trial.reuse import read_finished
from octavo.report.trial.rl_plots import learning_figure, pair_sides
from octavo.report.trial.runs import high_precision_config, make_runs

STEPS = 30
CONFIGS = {
    "rl": CONFIG.replace("train: {", "train: {phase: rl, ").replace("global_batch: 8, ", "")
    + "rl: {rewards: [exact_match], max_new_tokens: 8}\n",
    "preference": CONFIG.replace("train: {", "train: {phase: preference, "),
}


def configured(phase: str, *overrides: str):
    return override(load_config_text(CONFIGS[phase]), [f"train.steps={STEPS}", *overrides])


def said(step: int, text: str, row: int = 3, **more) -> dict:
    own = {"step": step, "file": "train.json", "row": row, "sample": 0, "prompt": "Third?", "answer": "7"}
    return {**own, "completion": text, "reward": 1.0, "ended": "stop", "tokens": 2, **more}


def plant(cfg, kind: str, offset: float, completions: list[dict] | None) -> Path:
    """A finished run whose reward ends `offset` above 0.5; before its last third it is far from that."""
    reward = np.full(STEPS, 0.5 + offset)
    reward[: 2 * STEPS // 3] = 9 * offset
    at = np.linspace(1, 2, STEPS)
    figures = {"reward": reward, "length": at, "entropy": at, "logp_gap_mean": 1e-7 * at, "logp_gap_max": 1e-6 * at}
    figures |= {"rollout_tokens_per_s": 900 * at, "training_tokens_per_s": 700 * at}
    if cfg.train.phase == "preference":
        figures = {
            "rewards/margins": reward,
            "rewards/accuracies": at / 2,
            "rewards/chosen": at,
            "rewards/rejected": -at,
        }
        completions = None
    proof = {**GOOD_PROOF, **({"rollouts": {"first": 1, "last": STEPS, "stale": 0}} if cfg.rl else {})}
    fp8 = {"tables": {1: health()}, "plan_json": plan(), "proof": proof} if kind in ("fp8", "seed") else {}
    noise = np.random.default_rng(cfg.run.seed).normal(0, 1e-8, STEPS)
    more = {"figures": figures, "completions": completions}
    return write_run(Path(cfg.run.dir), noise, config=to_yaml(cfg), **fp8, **more)


@pytest.fixture
def planted(tmp_path: Path):
    """A function that plants the runs of a trial; FP8's reward is `gaps[seed]` above high precision's."""

    def make(phase: str = "rl", gaps: tuple = (0.01, -0.02, 0.04), texts: tuple = ("8", "7"), cfg=None, **fp8_row):
        cfg = cfg or configured(phase)
        runs = make_runs(cfg, ["blockwise"], tmp_path / "trial", seeds=len(gaps))
        for run in runs:
            ours = run.kind in ("fp8", "seed")
            text = texts[1] if ours else texts[0]
            rows = [said(step, text, **(fp8_row if ours else {})) for step in range(1, STEPS + 1)]
            plant(run.cfg, run.kind, 0.1 + (gaps[run.cfg.run.seed] if ours else 0), rows)
        return [(run, read_finished(run)) for run in runs]

    return make


def answers(records, fp8: float = 0.95, high: float = 0.95, before: float = 0.5) -> HeldOut:
    """Every run judged: FP8's and high precision's answers of one seed are right by chances drawn alike."""
    found = HeldOut(judged(before, 3.0))
    for run, _ in records:
        share = fp8 if run.kind in ("fp8", "seed") else high
        found.runs[run.name] = judged(share, gemms=30, seed=run.cfg.run.seed)
    return found


def by_name(verdict) -> dict:
    return {claim.name: claim for claim in verdict.claims}


@pytest.mark.parametrize("phase", CONFIGS)
def test_held_out_answers_of_all_seeds_decide(planted, phase: str) -> None:
    records = planted(phase)
    verdict = judge(records, Trial(answers(records), seeds=3, accuracy_margin=rl_claims.ACCURACY_MARGIN))
    assert verdict.status == "pass" and verdict.reasons == ()
    assert [claim.name for claim in verdict.claims] == list(rl_claims.CLAIMS)
    accuracy = by_name(verdict)["accuracy"]
    assert accuracy.margin == 0.02 and "of 4800 right" in accuracy.sentence and "over 3 seeds" in accuracy.sentence
    assert not any("loss" in check.name for check in verdict.checks)
    assert "held-out accuracy pass" in verdict.line and "gap of" not in verdict.line  # what is reported decides nothing
    assert verdict.data["phase"] == phase and np.isnan(verdict.data["arms"][-1]["gap"])


def test_worse_answers_fail_and_better_ones_warn(planted) -> None:
    records = planted()
    trial = Trial(answers(records, fp8=0.88), seeds=3, accuracy_margin=0.02)
    assert judge(records, trial).status == "fail"
    assert judge(records, Trial(answers(records, high=0.88), seeds=3, accuracy_margin=0.02)).status == "warn"


def test_accuracy_includes_one_bad_seed_of_three(planted) -> None:
    records = planted()
    held = answers(records)
    worst = next(run.name for run, _ in records if run.kind == "seed")
    held.runs[worst] = judged(0.80, gemms=30, seed=1)
    found = by_name(judge(records, Trial(held, seeds=3, accuracy_margin=0.02)))
    assert found["accuracy"].status == "fail" and found["accuracy"].figure == pytest.approx(-0.05, abs=0.01)
    seeds = found["accuracy_seeds"]
    assert seeds.low < -0.2 < seeds.high and seeds.status == "reported"


def test_training_without_learning_is_undecided(planted) -> None:
    records = planted()
    verdict = judge(records, Trial(answers(records, before=0.95), seeds=3, accuracy_margin=0.02))
    assert verdict.status == "undecided" and "before training answers as well" in verdict.claims[0].sentence
    for run, _ in records:
        file = Path(run.cfg.run.dir) / "metrics.jsonl"
        file.write_text(file.read_text().replace('"lr": 0.001', '"lr": 0.0'))
    still = judge(
        [(run, read_finished(run)) for run, _ in records], Trial(answers(records), seeds=3, accuracy_margin=0.02)
    )
    assert still.status == "undecided" and "no step of high precision changed a weight" in still.claims[0].sentence


def test_verdict_names_missing_held_out_data(planted) -> None:
    verdict = judge(planted(), Trial(seeds=3))
    assert verdict.status == "undecided" and verdict.exit_code == 3
    assert "set data.eval: only held-out answers decide in phase rl" in verdict.claims[0].sentence
    assert by_name(verdict)["reward_gap"].low is not None  # is reported all the same


def test_reward_gap_uses_last_third_and_pairs_of_seeds(planted) -> None:
    gaps = (0.01, -0.02, 0.04)
    found = by_name(judge(planted(gaps=gaps), Trial(seeds=3)))["reward_gap"]
    low, high = stats.t.interval(0.95, 2, np.mean(gaps), stats.sem(gaps))
    assert (found.figure, found.low, found.high) == pytest.approx((0.01, low, high))
    assert found.status == "reported" and found.margin is None and "0.61 in FP8, 0.6 in high" in found.sentence
    one = by_name(judge(planted(gaps=(0.03,)), Trial()))["reward_gap"]
    assert one.low is None and one.shown == "+0.03" and "gives no interval: use --seeds 3" in one.sentence


def test_accuracy_gain_is_relative_to_the_initial_model(planted) -> None:
    records = planted()
    held = answers(records, before=0.5)
    found = by_name(judge(records, Trial(held, seeds=3)))["accuracy_gained"]
    alone = claims.paired_accuracy(held.runs["fp8-blockwise"].pieces, held.before.pieces)
    assert (
        found.low > 0.4 and found.figure == pytest.approx(alone.estimate, abs=0.01) and "right before" in found.sentence
    )


def test_failed_seed_fails_the_claim(planted, tmp_path: Path) -> None:
    records = planted()
    unproven = [(run, replace(record, proof={}) if run.kind == "seed" else record) for run, record in records]
    verdict = judge(unproven, Trial(answers(records), seeds=3, accuracy_margin=0.02))
    assert verdict.status == "fail" and "has no proof.json" in verdict.claims[0].sentence
    none = read_failed_run(tmp_path / "none", "the weights were not finite")
    broken = [(run, none if run.name.endswith("blockwise-seed-1") else record) for run, record in records]
    held = answers(records)
    del held.runs["fp8-blockwise-seed-1"]
    claim, *others = judge(broken, Trial(held, seeds=3, accuracy_margin=0.02)).claims
    assert claim.status == "fail" and "seed 1: the weights were not finite" in claim.sentence and not others
    (fp8, high), *_ = pair_sides(broken)
    drawn = learning_figure([fp8, high], rl_claims.PANELS["rl"])
    reward = drawn.axes[0]
    assert reward.get_title() == "Reward" and len(reward.get_lines()) == (2 + 1) + (3 + 1)  # seeds, and their mean


def test_same_data_compares_prompts_instead_of_tokens(planted) -> None:
    data = {c.name: c for c in judge(planted(), Trial(seeds=3)).checks}["same_data"]
    assert data.status == "pass" and "recorded prompts of all 30 steps" in data.sentence
    other = next(c for c in judge(planted(row=4), Trial(seeds=3)).checks if c.name == "same_data")
    assert other.status == "fail" and "30 steps had different prompts" in other.sentence
    drawn = planted(cfg=configured("rl", "rl.dynamic_sampling=true"), row=4)  # further prompts are drawn, runs part
    assert not [c for c in judge(drawn, Trial(seeds=3)).checks if c.name == "same_data"]


def test_page(planted, tmp_path: Path) -> None:
    records = planted(texts=("<b>8</b>", "7" * 2 * LENGTH))
    verdict = judge(records, Trial(answers(records), seeds=3, accuracy_margin=0.02))
    page, numbers, *images = write(verdict, records, tmp_path / "report")
    html, data = page.read_text(), json.loads(numbers.read_text())
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads[:5] == ["Claims", "Checks", "Learning", "Completions", "Accuracy"] and "Loss" not in heads
    assert {image.name for image in images} == {"claims.png", "learning.png", "gap.png", "health.png", "memory.png"}
    assert "stays about 0, however good the policy is" in html and "no claims on losses" in html
    assert f"<p>Steps 1 to {STEPS} updated the same weights and FP8 codes that generated their completions" in html
    assert "&lt;b&gt;8&lt;/b&gt;" in html and "7" * LENGTH + " ..." in html and "7" * (LENGTH + 1) not in html
    assert not re.search(r"\bnan\b", html) and "before training</td>" in html and "rollout, generated tokens" in html
    assert [step["step"] for step in data["completions"][0]["steps"]] == [1, 16, 30]
    assert data["before"]["exact_match"] == pytest.approx(0.5, abs=0.05) and data["arms"][0]["figures"]["reward"]
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    learning = next(d for d in drawings if "Length of completions" in d)
    assert "Entropy" in learning and "KL to the reference" not in learning  # nobody recorded a KL
    words = " ".join(tile for tile in re.findall(r'class="tile">(.*?)</div>', html))
    assert "0.610" in words and "reward, last third of the steps; fp32: 0.600" in words  # over three seeds


def test_page_of_preferences(planted, tmp_path: Path) -> None:
    cfg = configured("preference", "fp8.recipe=blockwise", "optimizer.states=fp8")
    records = planted("preference", gaps=(0.01,), cfg=cfg)
    html = write(judge(records, Trial()), records, tmp_path / "report")[0].read_text()
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert "Learning" in heads and "Completions" not in heads and "Margin of rewards" in html
    drawing = next(d for d in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL) if "Pairs in order" in d)
    assert "high precision, seed 1" in drawing and not re.search(r"\bnan\b", html)
    costs = html.split("The cost of each memory saving")[1].split("</table>")[0]
    assert "margin, this saving" in costs and re.search(r"\+ optimizer.*?0\.0100", costs, flags=re.DOTALL)


def test_completions_are_matched_by_prompt(tmp_path: Path) -> None:
    loss = np.zeros(4)
    many = [{"role": "user", "content": "?"}]
    a = write_run(tmp_path / "a", loss, completions=[said(1, "x", prompt=many), said(2, "y"), said(4, "z")])
    b = write_run(tmp_path / "b", loss, completions=[said(1, "x"), said(2, "y", row=9, ended="length"), said(3, "w")])
    (first,) = side_by_side(read(a), read(b))  # where both were asked the same
    assert first["step"] == 1 and first["rows"][0]["prompt"] == json.dumps(many)
    b = write_run(tmp_path / "b", loss, completions=[said(2, "y", row=9, ended="length"), said(3, "w")])
    (last,) = side_by_side(read(a), read(b))
    assert last["step"] == 2
    assert [(row["high"] and row["high"]["text"], row["fp8"] and row["fp8"]["ended"]) for row in last["rows"]] == [
        ("y", None), (None, "length"),
    ]  # fmt: skip
    assert side_by_side(read(a), read(write_run(tmp_path / "c", loss))) == []


def test_completion_without_reward_is_rejected(tmp_path: Path) -> None:
    home = write_run(tmp_path / "a", np.zeros(2), completions=[said(1, "x"), said(2, "x", reward=None)])
    with pytest.raises(ReportError, match=r"completions\.jsonl:2.*reward"):
        read(home)


def test_non_numeric_figures_are_rejected(tmp_path: Path) -> None:
    home = write_run(tmp_path / "a", np.zeros(2), figures={"reward": [0.0, 1.0]})
    assert read(home).figures["reward"].tolist() == [0.0, 1.0] and "kl" not in read(home).figures
    file = home / "metrics.jsonl"
    file.write_text(file.read_text().replace('"reward": 1.0', '"reward": "much"'))
    with pytest.raises(ReportError, match=r"metrics\.jsonl:2.*reward"):
        read(home)


def test_rl_trial_has_pairs_of_seeds_and_no_forks(tmp_path: Path, monkeypatch) -> None:
    asked: list[str] = []
    told: list[str] = []

    def run(cfg, *, console=None, label=None, phase=None, describe_plan=None, watchers=()):
        assert phase.names == ("rl",)
        asked.append(Path(cfg.run.dir).name)
        fp8 = "fp8" in asked[-1]
        plant(cfg, "fp8" if fp8 else "reference", 0.1, [said(1, "8")])
        return SimpleNamespace(status="finished", steps=STEPS)

    def judge_run(run, *_, high: bool = False):
        assert not high  # a loss at the same weights is no claim here
        told.append(run.name)
        return judged(0.95, gemms=30, seed=run.cfg.run.seed)

    monkeypatch.setattr("octavo.train.run", run)
    monkeypatch.setattr("octavo.report.trial.held_out.evaluate_model", lambda *_: judged(0.5, 3.0))
    monkeypatch.setattr("octavo.report.trial.held_out.evaluate_run", judge_run)
    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"learning": "", "gap": ""}, []))
    with pytest.raises(ReportError, match="forks=2: forks compare losses, which decide nothing in phase rl"):
        compare(configured("rl"), None, tmp_path / "trial", forks=2)
    assert asked == []
    runs = ["high-precision", "high-precision-seed-1", "fp8-blockwise", "fp8-blockwise-seed-1"]
    verdict = compare(configured("rl", "fp8.recipe=blockwise"), None, tmp_path / "trial", seeds=2)
    assert asked == told == runs
    assert verdict.status == "pass" and by_name(verdict)["accuracy"].margin == rl_claims.ACCURACY_MARGIN


def test_high_precision_keeps_keys_and_values_as_computed() -> None:
    cfg = configured("rl", "fp8.recipe=blockwise", "rl.kv=fp8")
    assert high_precision_config(cfg).rl.kv == "bf16" and high_precision_config(cfg).rl.rewards == cfg.rl.rewards
    labels = [run.label for run in make_runs(cfg, None, Path("x"))]
    assert "FP8 without savings" in labels
