"""Which runs a trial runs, what it reuses, continues and refuses; training itself is played by a stub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from synthetic_runs import CONFIG, GOOD_PROOF, health, losses, plan, write_run

from octavo.config import load_config_text, override, to_yaml
from octavo.fp8.arithmetic import CastTable
from octavo.report import ReportError, compare
from octavo.report.evidence.trial_spec import Run
from octavo.report.trial.reuse import check_same_casts
from octavo.report.trial.runs import make_runs, own_recipe


@pytest.fixture
def trained(monkeypatch, sound_answers):
    """Stands in for ``octavo.train.run``: writes a finished run and remembers which run was asked for."""
    asked: list[str] = []

    def run(cfg, *, console=None, label=None, phase=None, describe_plan=None, watchers=()):
        home = Path(cfg.run.dir)
        asked.append(home.name)
        fp8 = "fp8" in home.name
        for step in cfg.run.milestones:
            (home / "milestones" / f"step_{step}").mkdir(parents=True)
        begins = int(cfg.run.fork.rpartition("_")[2]) if cfg.run.fork else 0
        extra = {"tables": {1: health()}, "plan_json": plan(), "proof": GOOD_PROOF} if fp8 else {}
        write_run(
            home,
            losses(cfg.train.steps, 0.01 * cfg.run.seed, cfg.run.seed),
            config=to_yaml(cfg),
            begins=begins,
            **extra,
        )
        return SimpleNamespace(dir=home, status="finished", steps=cfg.train.steps)

    import octavo.train

    monkeypatch.setattr(octavo.train, "run", run, raising=False)
    return asked


@pytest.fixture
def undrawn(monkeypatch):
    """Plots take a second each; only one test needs them."""
    monkeypatch.setattr("octavo.report.trial.report_page.draw_plots", lambda *_: ({"loss": "", "gap": ""}, []))


def test_runs(cfg, tmp_path: Path) -> None:
    runs = make_runs(override(cfg, ["run.seed=3"]), ["rowwise", "mxfp8", "rowwise"], tmp_path)
    assert [(a.name, a.kind, a.cfg.fp8.recipe, a.cfg.run.seed) for a in runs] == [
        ("high-precision", "reference", "off", 3),
        ("high-precision-seed-4", "noise", "off", 4),
        ("fp8-rowwise", "fp8", "rowwise", 3),
        ("fp8-mxfp8", "fp8", "mxfp8", 3),
    ]
    fused = make_runs(override(cfg, ["fp8.fuse=on"]), ["mxfp8"], tmp_path)
    assert [a.cfg.fp8.fuse for a in fused] == ["off", "off", "on"]
    assert all(a.cfg.run.resume == "auto" and a.cfg.run.dir == str(tmp_path / "arms" / a.name) for a in runs)


def test_high_precision_drops_fp8_components_and_rules(tmp_path: Path) -> None:
    text = CONFIG + "fp8: {recipe: off, image_encoder: {recipe: rowwise}, rules: [{match: '**.a', recipe: mxfp8}]}\n"
    cfg = load_config_text(text)
    assert own_recipe(cfg) == "by-component"
    reference, _, fp8 = make_runs(cfg, None, tmp_path)
    assert reference.cfg.fp8.image_encoder is None and reference.cfg.fp8.rules == ()
    assert fp8.cfg.fp8 == cfg.fp8 and fp8.name == "fp8-by-component"


@pytest.mark.parametrize(
    ("overrides", "recipes", "message"),
    [
        (["fp8.recipe=off"], None, "has fp8.recipe: off.*name recipes to try: tensorwise, rowwise, blockwise"),
        ([], ["blockwize"], "unknown FP8 recipe 'blockwize'; choose one or more of tensorwise, rowwise"),
        ([], ["off"], "unknown FP8 recipe 'off'; choose one or more of tensorwise"),
        ([], [], "no recipe is named"),
    ],
)
def test_configuration_without_fp8_is_rejected(cfg, tmp_path: Path, overrides, recipes, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        compare(override(cfg, overrides), recipes, tmp_path)
    assert not list(tmp_path.iterdir()), "a refused trial leaves nothing behind"


def test_trial_runs_reuses_and_continues(cfg, tmp_path: Path, trained, undrawn) -> None:
    verdict = compare(cfg, None, tmp_path)
    assert verdict.status == "pass" and verdict.exit_code == 0
    fp8 = ["fp8-blockwise", *(f"fork-{n}-fp8-blockwise" for n in range(3))]
    high = ["high-precision", "high-precision-seed-1"]
    assert trained == [*high, *fp8, "fork-1-high-precision", "fork-2-high-precision"]
    forks = [run for run in make_runs(cfg, None, tmp_path, forks=3) if run.kind == "fork"]
    assert [run.cfg.run.seed for run in forks] == [0, 1, 2, 1, 2] and all(run.begins == 66 for run in forks)
    assert all(run.cfg.data.eval == () and run.after is not None for run in forks)
    assert [run["number"] for run in verdict.data["forks"]] == [0, 1, 2, 1, 2]
    assert (tmp_path / "report" / "report.html").is_file()
    trained.clear()

    compare(cfg, ["blockwise", "rowwise"], tmp_path, forks=0)
    assert trained == ["fp8-rowwise"], "finished runs are read, a new recipe is trained"
    trained.clear()

    (tmp_path / "arms" / "fp8-rowwise" / "result.json").unlink()
    compare(cfg, ["blockwise", "rowwise"], tmp_path, forks=0)
    assert trained == ["fp8-rowwise"], "a run that stopped half-way is handed to train, which continues it"


def test_changed_configuration_is_rejected_or_retrained(cfg, tmp_path: Path, trained, undrawn) -> None:
    compare(cfg, None, tmp_path)
    (tmp_path / "mine.txt").write_text("not the trial's")
    trained.clear()
    changed = override(cfg, ["train.lr=1e-3", "run.keep=5"])
    with pytest.raises(ReportError, match=r"trained with another configuration: train\.lr was 2e-05, is now 0\.001"):
        compare(changed, None, tmp_path)
    assert trained == []
    compare(changed, None, tmp_path, fresh=True)
    assert len(trained) == 8 and (tmp_path / "mine.txt").is_file()


def test_runs_with_casts_of_another_version_are_not_mixed(cfg, tmp_path: Path, trained, undrawn) -> None:
    compare(cfg, None, tmp_path)
    file = tmp_path / "arms" / "fp8-blockwise" / "plan.json"
    written = json.loads(file.read_text())
    lines = [{"match": "**", "recipe": "blockwise", "format": "hybrid", "dgrad": "tensorwise"}]
    file.write_text(json.dumps({**written, "layers": lines}))  # as of 0.5.0, without casts
    trained.clear()
    compare(cfg, None, tmp_path)
    both = ["blockwise", "rowwise"]
    with pytest.raises(ReportError, match=r"other casts.*blockwise \(hybrid\): wgrad x .* 128x1 .*--fresh"):
        compare(cfg, both, tmp_path)
    (tmp_path / "arms" / "high-precision" / "result.json").unlink()  # stopped before its first checkpoint
    with pytest.raises(ReportError, match="other casts"):
        compare(cfg, None, tmp_path)
    for damaged, message in (
        ({"layers": [1]}, "plan.json, entry 1 of layers: 1 is not a line"),
        ({"casts": {"a": 1}}, "'a' is"),
    ):
        file.write_text(json.dumps({**written, "layers": lines, **damaged}))
        with pytest.raises(ReportError, match=message):
            compare(cfg, None, tmp_path)
    assert trained == []
    # Runs of a plan file have the casts of that file, whichever version trains them.
    table = {"blockwise hybrid": CastTable().to_json()["blockwise_1d hybrid"]}
    plan_file = tmp_path / "saved.json"
    machine = {"gpu": "cpu", "torch": "2.13", "backends": {}}
    saved = {"octavo_plan": 1, "machine": machine, "model": [], "micro_steps": 1, "layers": lines}
    plan_file.write_text(json.dumps(saved))
    named = Run("fp8-by-plan", "", "fp8", override(cfg, [f"fp8.plan={plan_file}", f"run.dir={file.parent}"]))
    other = Run("other", "", "fp8", override(cfg, [f"run.dir={tmp_path / 'none'}"]))
    file.write_text(json.dumps({**written, "layers": lines, "casts": table}))
    check_same_casts([named, other])
    compare(cfg, both, tmp_path, fresh=True)
    assert len(trained) == 12


def test_tracking_settings_do_not_change_the_trial(cfg, tmp_path: Path, trained, undrawn) -> None:
    compare(cfg, None, tmp_path)
    trained.clear()
    compare(override(cfg, ["run.keep=5", "run.tensorboard=false", "run.save_every=50"]), None, tmp_path)
    assert trained == []


def test_stopped_run_stops_the_trial(cfg, tmp_path: Path, monkeypatch) -> None:
    import octavo.train

    stopped = SimpleNamespace(status="stopped", steps=7, exit_code=130)
    monkeypatch.setattr(octavo.train, "run", lambda cfg, **_: stopped)
    with pytest.raises(ReportError, match="1/8 high precision was stopped after step 7; the same command") as error:
        compare(cfg, None, tmp_path)
    assert error.value.exit_code == 130
    assert not (tmp_path / "report").exists()


def test_compare_under_torchrun_is_rejected(cfg, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ReportError, match="started on 2 processes, but it runs in one"):
        compare(cfg, None, tmp_path)


@pytest.mark.parametrize("kept", [pytest.param(0, marks=pytest.mark.long), 37])
def test_diverged_recipe_fails_and_the_others_continue(cfg, tmp_path: Path, trained, monkeypatch, kept) -> None:
    import octavo.train

    usual = octavo.train.run

    def run(cfg, **options):
        if cfg.fp8.recipe == "tensorwise":
            if kept:
                write_run(Path(cfg.run.dir), losses(kept), config=to_yaml(cfg), status="stopped")
            raise octavo.train.TrainError("10 steps in a row were not finite: layers.0")
        return usual(cfg, **options)

    monkeypatch.setattr(octavo.train, "run", run)
    verdict = compare(cfg, ["tensorwise"], tmp_path, forks=0)
    assert verdict.exit_code == 1, "a report is written though no FP8 run finished"
    assert verdict.reasons == ("FP8 tensorwise: Training failed: 10 steps in a row were not finite: layers.0",)
    assert verdict.line == f"FAIL: FP8 tensorwise (fail): training failed after step {kept}."
    assert "10 steps in a row were not finite" in (tmp_path / "report" / "report.html").read_text()
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert data["arms"][2]["failure"].startswith("10 steps") and data["arms"][2]["steps"] == kept
    both = compare(cfg, ["tensorwise", "blockwise"], tmp_path, forks=0)
    assert trained[-1] == "fp8-blockwise" and both.status == "fail" and "; FP8 blockwise (pass)" in both.line


def test_failed_high_precision_run_ends_the_trial(cfg, tmp_path: Path, monkeypatch) -> None:
    import octavo.train

    def run(cfg, **_):
        raise octavo.train.TrainError("not finite")

    monkeypatch.setattr(octavo.train, "run", run)
    with pytest.raises(octavo.train.TrainError, match="not finite"):
        compare(cfg, None, tmp_path)


def test_pairs_of_seeds(cfg, tmp_path: Path) -> None:
    runs = make_runs(cfg, ["blockwise"], tmp_path, seeds=3)
    assert [(run.name, run.cfg.run.seed) for run in runs if run.kind != "fork"] == [
        ("high-precision", 0), ("high-precision-seed-1", 1), ("high-precision-seed-2", 2),
        ("fp8-blockwise", 0), ("fp8-blockwise-seed-1", 1), ("fp8-blockwise-seed-2", 2),
    ]  # fmt: skip
    assert {run.of for run in runs if run.kind == "seed"} == {"fp8-blockwise"}


def test_impossible_forks_are_reported_and_not_trained(cfg, tmp_path: Path, trained, undrawn) -> None:
    short = compare(override(cfg, ["train.steps=10"]), None, tmp_path / "short")
    assert not any(name.startswith("fork") for name in trained)
    claim = next(claim for claim in short.claims if claim.name == "loss_forks")
    assert claim.status == "undecided" and "forks of 4 steps cannot diverge" in claim.sentence
    compare(cfg, None, tmp_path / "old", forks=0)
    later = tmp_path / "old" / "arms" / "high-precision" / "milestones" / "step_66"
    assert later.is_dir(), "forks can be asked for later"
    later.rmdir()  # as an earlier version trained it: no checkpoint at two thirds
    old = compare(cfg, None, tmp_path / "old")
    claim = next(claim for claim in old.claims if claim.name == "loss_forks")
    assert (
        claim.status == "undecided"
        and "is past step 66 and has no checkpoint of it" in claim.sentence
        and old.exit_code == 3
    )


def test_forks_use_the_storage_of_the_checkpoint(tmp_path: Path) -> None:
    text = (
        CONFIG + "fp8: {recipe: blockwise, param: true, activations: fp8}\noptimizer: {states: fp8, master: bf16+16}\n"
    )
    runs = make_runs(load_config_text(text), None, tmp_path, savings=False, forks=2)
    fork = next(run.cfg for run in runs if run.name == "fork-1-fp8-blockwise")
    high = next(run.cfg for run in runs if run.kind == "reference")
    assert fork.optimizer == high.optimizer and fork.train == high.train and not fork.fp8.param
    assert fork.fp8.activations == "fp8" and fork.fp8.recipe == "blockwise"


def test_data_changed_between_calls_is_rejected(cfg, tmp_path: Path, trained, undrawn) -> None:
    data = tmp_path / "train.json"
    data.write_text("[]")
    changing = override(cfg, [f"data.train=[{{path: {data}}}]"])
    compare(changing, None, tmp_path / "trial", forks=0)
    data.write_text("[1]")
    with pytest.raises(
        ReportError, match=r"made with different data: .*train\.json had 2 bytes, has 3 now.*--fresh trains"
    ):
        compare(changing, ["rowwise"], tmp_path / "trial", forks=0)
    compare(changing, None, tmp_path / "trial", forks=0, fresh=True)


def test_plan_without_fp8_is_rejected_before_training(cfg, tmp_path: Path, trained) -> None:
    from octavo import fp8
    from octavo.models.tiny import tiny

    tiny.write("qwen3", tmp_path / "model")
    nothing = override(cfg, [f"model.path={tmp_path / 'model'}", 'fp8.rules=[{match: "**", recipe: off}]'])
    with pytest.raises(fp8.PlanError, match="no layer of this model would run in FP8"):
        compare(nothing, None, tmp_path / "trial")
    assert trained == [] and not (tmp_path / "trial").exists()
