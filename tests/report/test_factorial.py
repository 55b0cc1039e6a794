"""The effects of a factorial trial: tables with planted effects, the cells that are trained, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic_runs import GOOD_PROOF, health, judged, losses, plan, write_run

from octavo.config import Component, load_config, load_config_text, override, to_yaml
from octavo.data.builtin import digits
from octavo.models.tiny import tiny
from octavo.report import ReportError, compare
from octavo.report.evidence import claims
from octavo.report.evidence.factorial import NONE, Cell, compute_contrast, compute_effects, subsets
from octavo.report.trial import factorial_cells, parallel_runs
from octavo.report.trial.reuse import read_finished

PARTS = ("image_encoder", "foundation")
BOTH = "+".join(PARTS)
PROJECTOR = "image_projector"


def table(planted: dict[tuple[str, ...], float], factors: tuple[str, ...], base: float = 0.0) -> dict[Cell, float]:
    """A cell is the base and half of every planted effect, plus where an even number of its components is left out."""
    return {
        Cell(cell): base + sum((-1) ** len(set(of) - set(cell)) * effect / 2 for of, effect in planted.items())
        for cell in subsets(factors)
    }


@pytest.mark.parametrize("k", [2, 3, 4])
def test_planted_effects_are_found(k: int) -> None:
    factors = tuple("abcd"[:k])
    rng = np.random.default_rng(k)
    planted = {of: float(rng.normal()) for of in subsets(factors)[1:]}
    seeds = [table(planted, factors, base=float(seed)) for seed in range(3)]
    found = compute_effects(seeds, factors)
    assert [effect.of for effect in found] == subsets(factors)[1:]
    for effect in found:
        assert effect.by_seed == pytest.approx([planted[effect.of]] * 3)
    assert [effect.is_main for effect in found] == [True] * k + [False] * (2**k - k - 1)


def test_additive_costs_have_no_interaction() -> None:
    figures = {NONE: 0.0, Cell("a"): 0.01, Cell("b"): 0.03, Cell("ab"): 0.04}
    assert [compute_contrast(figures, of) for of in ("a", "b", "ab")] == pytest.approx([0.01, 0.03, 0.0])
    figures[Cell("ab")] = 0.06  # two points more together: half of them is the interaction
    assert [compute_contrast(figures, of) for of in ("a", "b", "ab")] == pytest.approx([0.02, 0.04, 0.01])


def test_intervals_over_seeds_cover_planted_effects() -> None:
    rng, planted, covered = np.random.default_rng(0), {("a",): 0.01, ("b",): 0.0, ("a", "b"): 0.002}, 0
    for _ in range(200):
        seeds = [
            {cell: y + level + rng.normal(0, 0.003) for cell, y in table(planted, ("a", "b")).items()}
            for level in rng.normal(0, 1, 4)  # what a seed does to all of its cells goes out
        ]
        found = compute_effects(seeds, ("a", "b"))[0]
        assert found.interval == claims.mean_gap(found.by_seed)
        covered += found.interval.low <= 0.01 <= found.interval.high
    assert 0.9 * 200 <= covered <= 199


def test_seed_with_missing_cell_is_ignored() -> None:
    with pytest.raises(ValueError, match="seed 1 has 1 of the 4 cells of a, b"):
        compute_effects([table({}, ("a", "b")), {NONE: 0.0}], ("a", "b"))
    (alone,) = [e for e in compute_effects([table({("a",): 1.0}, ("a", "b"))], ("a", "b")) if e.of == ("a",)]
    assert alone.interval is None and alone.by_seed == (1.0,)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model that sees, and a few digits."""
    place = tmp_path_factory.mktemp("factorial")
    tiny.write("qwen3_vl", place / "model", size="mini")
    digits.write(place / "digits", train=32, test=16)
    (place / "run.yaml").write_text(
        "model: {path: model}\ndata: {train: [{path: digits/train.json}], eval: [{path: digits/test.json}]}\n"
        "train: {steps: 2, seq_length: 64, micro_batch: 8, global_batch: 8, lr: 2e-3, warmup: 0}\n"
        "run: {dir: run, health_every: 2, hf: false, threads: 1}\n"
    )
    return place


@pytest.fixture
def cfg(place: Path) -> Any:
    return load_config(place / "run.yaml")


def fp8_of(run: Any) -> set[str]:
    return set(factorial_cells.fp8_layers(run.cfg))


def test_cells_differ_only_in_fp8_components(cfg, tmp_path: Path) -> None:
    found, left_out = factorial_cells.make_runs(cfg, PARTS, None, tmp_path, 0, 2)
    assert [(run.name, run.cfg.run.seed, run.factors) for run in found] == [
        ("high-precision", 0, ()), ("high-precision-seed-1", 1, ()),
        ("cell-image_encoder-seed-0", 0, PARTS[:1]), ("cell-foundation-seed-0", 0, PARTS[1:]),
        ("cell-image_encoder-seed-1", 1, PARTS[:1]), ("cell-foundation-seed-1", 1, PARTS[1:]),
        (f"fp8-blockwise-{BOTH}", 0, PARTS), (f"fp8-blockwise-{BOTH}-seed-1", 1, PARTS),
    ]  # fmt: skip
    assert left_out == (PROJECTOR,)  # nobody named it, so it is in high precision everywhere
    assert parallel_runs._sort_runs(found)[0].kind in ("cell", "fp8")
    for run in found[2:4] + found[6:7]:
        assert fp8_of(run) == set(run.factors)
        read = load_config_text(to_yaml(run.cfg))  # as a process of its own reads it
        assert read.fp8 == run.cfg.fp8
        plain = read.model_copy(update={"fp8": found[0].cfg.fp8})
        assert plain.train == found[0].cfg.train and plain.optimizer == found[0].cfg.optimizer
    assert found[2].cfg.run.health_every == 0 and found[6].cfg.run.health_every == 2


def test_component_order_does_not_change_cells() -> None:
    assert factorial_cells.check_components(("foundation", "image_encoder")) == ("image_encoder", "foundation")


def test_cell_with_all_components_is_the_configured_run(cfg, tmp_path: Path) -> None:
    found, left_out = factorial_cells.make_runs(cfg, (*PARTS, PROJECTOR), None, tmp_path, 0, 1)
    assert left_out == () and len(found) == 2 + 6 + 1 and found[-1].name == "fp8-blockwise"
    saving = override(cfg, ["optimizer.states=fp8"])  # in no cell
    found, _ = factorial_cells.make_runs(saving, (*PARTS, PROJECTOR), None, tmp_path, 0, 1)
    assert {run.cfg.optimizer.states for run in found} == {"fp32"} and found[-1].name != "fp8-blockwise"


def test_forks_use_the_cell_with_all_components(cfg, tmp_path: Path) -> None:
    found, _ = factorial_cells.make_runs(override(cfg, ["train.steps=120"]), PARTS, None, tmp_path, 2, 1)
    forks = [run for run in found if run.kind == "fork" and run.of]
    assert [run.of for run in forks] == [f"fp8-blockwise-{BOTH}"] * 2 and fp8_of(forks[1]) == set(PARTS)


def test_cells_keep_rules_and_recipes_of_their_components(cfg, tmp_path: Path) -> None:
    rules = ['fp8.rules=[{match: "**.layers.0.**", recipe: rowwise}]', "fp8.image_encoder={recipe: tensorwise}"]
    changed = override(cfg, [*rules, "fp8.recipe=off", "fp8.foundation={recipe: mxfp8}"])
    found, _ = factorial_cells.make_runs(changed, PARTS, None, tmp_path, 0, 1)
    tower, model, both = found[2:]
    assert [fp8_of(run) for run in (tower, model, both)] == [{"image_encoder"}, {"foundation"}, set(PARTS)]
    assert tower.cfg.fp8.foundation == Component(recipe="off") and model.cfg.fp8.foundation.recipe == "mxfp8"


@pytest.mark.parametrize(
    ("asked", "over", "more", "message"),
    [
        (("image_encodr", "foundation"), [], {}, "unknown component 'image_encodr'; did you mean image_encoder?"),
        (("foundation",), [], {}, "1 component.* named, and a design needs 2 to 4"),
        (("foundation", "foundation"), [], {}, "foundation is named twice"),
        (("audio_encoder", "foundation"), [], {}, "audio_encoder would have nothing in FP8.*did you mean image_enco"),
        (PARTS, ["fp8.foundation={recipe: off}"], {}, "foundation would have nothing.*In FP8 are image_encoder, im"),
        (PARTS, [], {"recipes": ["rowwise", "blockwise"]}, "components are tested with one recipe, got 2"),
        (PARTS, [], {"savings": True}, "memory savings are off in all cells"),
        (PARTS, ["data.eval=[]"], {}, "there are no held-out data; set data.eval"),
        (PARTS, ["fp8.recipe=auto"], {}, "recipe auto would be measured in each cell"),
    ],
)  # fmt: skip
def test_impossible_designs_are_rejected_before_training(cfg, tmp_path: Path, asked, over, more, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        compare(override(cfg, over), directory=tmp_path / "trial", factorial=asked, **more)
    assert not (tmp_path / "trial").exists()


def test_factorial_trials_of_preference_are_rejected(cfg) -> None:
    with pytest.raises(ReportError, match="phase preference: .*Use phase sft or pretrain"):
        factorial_cells.check_settings(SimpleNamespace(train=SimpleNamespace(phase="preference")), None, False)


COSTS = {"image_encoder": (0.05, 0.02), "foundation": (0.0, 0.0002)}  # of accuracy and of held-out loss


@pytest.fixture
def planted(monkeypatch, sound_answers) -> list[str]:
    """Stands in for training: runs whose figures cost what COSTS says, with a little of the seed's."""
    trained: list[str] = []

    def run(cfg, *, console=None, label=None, phase=None, describe_plan=None, watchers=()):
        home, fp8 = Path(cfg.run.dir), "high" not in Path(cfg.run.dir).name
        trained.append(home.name)
        there = [part for part in PARTS if part in home.name]
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF} if fp8 else {}
        noise = np.random.default_rng([cfg.run.seed, len(trained)]).normal(0, 1e-4)
        right, loss = (sum(COSTS[part][at] for part in there) for at in (0, 1))
        write_run(home, losses(cfg.train.steps, 0.0, cfg.run.seed), config=to_yaml(cfg), exact_match=None, **extra)
        rows = (home / "metrics.jsonl").read_text()
        last = {"loss": 0.2 * (1 + cfg.run.seed) * (1 + loss + noise), "exact_match": 0.98 - right + noise,
                "questions": 1600}  # fmt: skip
        (home / "metrics.jsonl").write_text(rows + json.dumps({"step": cfg.train.steps, "eval": last}) + "\n")
        return SimpleNamespace(dir=home, status="finished", steps=cfg.train.steps)

    import octavo.train

    monkeypatch.setattr(octavo.train, "run", run, raising=False)
    return trained


def test_costly_component_is_found_and_earlier_design_is_read(cfg, tmp_path: Path, planted, monkeypatch) -> None:
    cfg = override(cfg, ["train.steps=100"])
    verdict = compare(cfg, directory=tmp_path, factorial=PARTS, seeds=3)
    told = {(check.name, check.run): check for check in verdict.effects}
    assert {key: check.status for key, check in told.items()} == {
        (factorial_cells.ACCURACY, "image_encoder"): "fail", (factorial_cells.ACCURACY, "foundation"): "pass",
        (factorial_cells.ACCURACY, "image_encoder x foundation"): "reported",
        (factorial_cells.LOSS, "image_encoder"): "fail", (factorial_cells.LOSS, "foundation"): "pass",
        (factorial_cells.LOSS, "image_encoder x foundation"): "reported",
    }  # fmt: skip
    assert told[factorial_cells.ACCURACY, "image_encoder"].figure == pytest.approx(-0.05, abs=3e-4)
    assert told[factorial_cells.LOSS, "image_encoder"].figure == pytest.approx(0.02, abs=3e-4)
    assert factorial_cells.costly_components(verdict.effects) == ["image_encoder"] and verdict.exit_code == 1
    assert any("image_encoder: Effect on held-out accuracy" in reason for reason in verdict.reasons)
    assert len(planted) == 12 and not any("interval" in r and " x " in r for r in verdict.reasons)

    html = (tmp_path / "report" / "report.html").read_text()
    assert "Cost of each component" in html and "also has image_projector in FP8" in html
    assert "expected +-" not in html and (tmp_path / "report" / "effects.png").is_file()
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["factorial"]["components"] == list(PARTS) and data["factorial"]["left_out"] == [PROJECTOR]
    assert len(data["factorial"]["cells"]) == 12 and len(data["factorial"]["effects"]) == 6
    effect = next(one for one in data["power"] if one["claim"] == factorial_cells.LOSS)
    assert not effect["seen"] and set(effect["came"]) == set(PARTS) and "half" not in effect

    planted.clear()
    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"loss": "", "gap": ""}, []))
    compare(cfg, directory=tmp_path, factorial=PARTS, seeds=4)
    assert len(planted) == 4 and all(name.endswith("-seed-3") for name in planted)
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    effect = next(one for one in data["power"] if one["claim"] == factorial_cells.LOSS)
    assert effect["seen"] and effect["source"] == "seen in 3 seeds here" and effect["spread"] < 5e-4


def test_single_seed_and_failed_cell_decide_nothing(cfg, tmp_path: Path, planted, monkeypatch) -> None:
    import octavo.train

    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"loss": "", "gap": ""}, []))
    said: list[str] = []
    console = SimpleNamespace(print=lambda text, **_: said.append(text), is_terminal=False)
    cfg = override(cfg, ["train.steps=100"])
    alone = compare(cfg, directory=tmp_path / "one", factorial=PARTS, console=console)
    assert said.index(next(line for line in said if "one seed gives no interval" in line)) < said.index(
        next(line for line in said if line.startswith("5 runs, 2 of them cells"))
    )
    assert {check.status for check in alone.effects if " x " not in check.run} == {"undecided"}
    assert (
        "-5.0" in alone.effects[0].sentence and "one seed gives no interval, use --seeds 3" in alone.effects[0].sentence
    )

    usual = octavo.train.run

    def run(cfg, **options):
        if "cell-foundation" in cfg.run.dir:
            raise octavo.train.TrainError("10 steps in a row were not finite")
        return usual(cfg, **options)

    monkeypatch.setattr(octavo.train, "run", run)
    broken = compare(cfg, directory=tmp_path / "two", factorial=PARTS, seeds=2)
    (effect,) = broken.effects
    assert effect.status == "fail" and "FP8 in foundation, seed 0: 10 steps in a row" in effect.sentence
    assert factorial_cells.costly_components(broken.effects) == []  # which is no price


def test_effects_cannot_pass_with_too_few_questions(cfg, tmp_path: Path, planted, monkeypatch) -> None:
    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"loss": "", "gap": ""}, []))
    monkeypatch.setattr("octavo.report.trial.held_out.evaluate_model", lambda *_: judged(0.1, 3.0, questions=80))
    monkeypatch.setattr("octavo.report.trial.held_out.evaluate_run", lambda *_, **__: judged(gemms=30, questions=80))
    cfg = override(cfg, ["train.steps=100"])
    found = {(c.name, c.run): c for c in compare(cfg, directory=tmp_path, factorial=PARTS, seeds=3).effects}
    sound = found[factorial_cells.ACCURACY, "foundation"]
    assert sound.status == "undecided"
    assert "one of 80 held-out questions is already more than the margin" in sound.sentence
    assert (
        found[factorial_cells.ACCURACY, "image_encoder"].status == "fail"
        and found[factorial_cells.LOSS, "foundation"].status == "pass"
    )


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
def test_factorial_trial_of_two_components_trains(cfg, tmp_path: Path) -> None:
    """Two steps of real training in each cell: FP8 ran where a cell says, and effects are of the runs' figures."""
    verdict = compare(cfg, directory=tmp_path, factorial=PARTS, seeds=2)
    proofs = {run["name"]: run["proof"].get("shares", {}) for run in verdict.data["arms"]}
    assert proofs["cell-foundation-seed-1"]["foundation"] == 1.0
    assert not proofs["cell-foundation-seed-1"].get("image_encoder")
    assert proofs["cell-image_encoder-seed-1"]["image_encoder"] == 1.0
    assert {cell["seed"] for cell in verdict.data["factorial"]["cells"]} == {0, 1}
    for check in verdict.effects:
        assert check.low is not None and check.low <= check.figure <= check.high

    ran = {run.name: read_finished(run) for run in factorial_cells.make_runs(cfg, PARTS, None, tmp_path, 0, 2)[0]}
    none, tower, model, both = (
        ran[name].eval["loss"]
        for name in ("high-precision", "cell-image_encoder-seed-0", "cell-foundation-seed-0", f"fp8-blockwise-{BOTH}")
    )
    told = verdict.data["factorial"]["effects"]
    first = next(e for e in told if e["figure"] == factorial_cells.LOSS and e["of"] == ["image_encoder"])
    assert first["by_seed"][0] == pytest.approx(((tower - none) + (both - model)) / none / 2)
