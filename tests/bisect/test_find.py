"""Answers of a search for each kind of fault, with a fake trainer (conftest.py)."""

from __future__ import annotations

import json
import math

import pytest
from torch import nn

from octavo import bisect, fp8
from octavo.bisect.candidates import Space
from octavo.bisect.short_runs import BisectError
from octavo.cli.main import main
from octavo.config import load_config
from octavo.fp8 import planning

from .conftest import CONFIG, GEMMS, LAYERS

ALL = len(LAYERS) * len(GEMMS)
LOG = math.ceil(math.log2(ALL))
UP = "model.layers.2.up_proj"


def when(*names: str, harm: float = 0.3, recipes: tuple[str, ...] = (), after: int = 0):
    """Increase the loss where all of these are on (in one of these recipes, if given), after some step."""

    def harm_of(cfg, on, step):
        is_on = all(name in on and (not recipes or on[name] in recipes) for name in names)
        return harm if is_on and step > after else 0.001

    return harm_of


def test_single_gemm_is_found_in_logarithmic_runs_and_its_layer_stays_in_fp8(trainer, cfg, tmp_path):
    trained = trainer(when(f"{UP}.fwd", recipes=("tensorwise",)))
    answer = bisect.bisect(cfg(), tmp_path)
    assert [[candidate.words for candidate in culprits] for culprits in answer.sets] == [[f"fwd of {UP}"]]
    assert answer.candidates == ALL and answer.status == "found"
    assert (
        len(trained) <= 2 + LOG + 1 + 2 + 1
    )  # both references, halving, one set, without it (short and long), rowwise
    assert answer.how == f"{UP} in rowwise" and answer.steps < 80
    works = load_config(tmp_path / "works.yaml")
    assert [(rule.match, rule.recipe) for rule in works.fp8.rules] == [(UP, "rowwise")]
    assert works.run.dir.endswith("runs/it") and works.fp8.recipe == "tensorwise"
    result = json.loads((tmp_path / "bisect.json").read_text())
    assert result["sets"][0][0] == {"name": UP, "gemm": "fwd", "component": "foundation"}
    assert len(result["runs"]) == len(answer.lines) and result["rules"] == [{"match": UP, "recipe": "rowwise"}]
    page = (tmp_path / "bisect.html").read_text()
    assert f"fwd of {UP} breaks it" in page and page.count("<svg") == 4
    assert min((tmp_path / f"{name}.png").stat().st_size for name in ("loss", "gap")) > 5000


def test_gemm_that_fails_in_all_recipes_is_removed(trainer, no_plots, cfg, tmp_path):
    trainer(when(f"{UP}.wgrad"))
    answer = bisect.bisect(cfg(), tmp_path)
    assert answer.how == f"removing wgrad of {UP}"
    assert [(r.match, r.recipe, r.wgrad, r.fwd) for r in answer.works.fp8.rules] == [(UP, None, "bf16", None)]


def test_two_gemms_that_break_it_only_together(trainer, no_plots, cfg, tmp_path):
    trainer(when(f"{LAYERS[1]}.dgrad", f"{UP}.fwd"))
    answer = bisect.bisect(cfg(), tmp_path)
    assert {candidate.words for candidate in answer.sets[0]} == {f"dgrad of {LAYERS[1]}", f"fwd of {UP}"}
    assert len(answer.sets) == 1 and len(answer.out) == 1  # the one with fewer FLOPs is removed
    assert answer.out[0].name == UP and "together with" in answer.sentence


def test_two_independent_gemms(trainer, no_plots, cfg, tmp_path):
    first, second = when(f"{LAYERS[0]}.fwd"), when(f"{UP}.dgrad", harm=0.5)
    trainer(lambda *args: max(first(*args), second(*args)))
    answer = bisect.bisect(cfg(), tmp_path)
    assert {candidate.words for candidate in answer.out} == {f"fwd of {LAYERS[0]}", f"dgrad of {UP}"}
    assert len(answer.sets) == 2


def test_faults_that_appear_at_different_steps(trainer, no_plots, cfg, tmp_path):
    early, late = when(f"{UP}.fwd", after=20, harm=0.6), when(f"{LAYERS[0]}.fwd", after=55, harm=0.6)
    trainer(lambda *args: max(early(*args), late(*args)))
    answer = bisect.bisect(cfg(), tmp_path)
    assert {candidate.words for candidate in answer.out} == {f"fwd of {UP}", f"fwd of {LAYERS[0]}"}


def test_sound_configuration(trainer, no_plots, cfg, tmp_path):
    trained = trainer(when("unused"))
    answer = bisect.bisect(cfg(), tmp_path)
    assert answer.status == "sound" and len(trained) == 2 and answer.works is None
    assert "nothing is broken: loss" in answer.sentence and not (tmp_path / "works.yaml").exists()


def test_feature_is_found(trainer, no_plots, cfg, tmp_path):
    trainer(lambda c, on, step: 0.4 if c.optimizer.states == "fp8" else 0.0)
    answer = bisect.bisect(cfg("optimizer.states=fp8", "optimizer.update=backward"), tmp_path)
    assert [candidate.words for candidate in answer.out] == ["optimizer states in fp8"]
    assert answer.works.optimizer.states == "fp32" and answer.works.optimizer.update == "backward"
    assert not answer.works.fp8.rules and answer.works.fp8.recipe == "tensorwise"


def test_errors_and_infinite_losses_are_broken(trainer, no_plots, cfg, tmp_path):
    trainer(lambda c, on, step: "no kernel" if f"{UP}.fwd" in on and step > 5 else 0.0)
    answer = bisect.bisect(cfg(), tmp_path)
    assert [candidate.words for candidate in answer.out] == [f"fwd of {UP}"] and answer.steps == 6
    assert any("TrainError: no kernel" in line.outcome.failure for line in answer.lines)
    trainer(lambda c, on, step: math.inf if f"{UP}.dgrad" in on and step > 30 else 0.0)
    answer = bisect.bisect(cfg(), tmp_path / "b")
    assert [candidate.words for candidate in answer.out] == [f"dgrad of {UP}"]


def test_harm_of_many_candidates_gets_a_coarse_answer(trainer, no_plots, cfg, tmp_path):
    trainer(lambda c, on, step: 0.004 * sum(r == "tensorwise" and "fwd" in name for name, r in on.items()))
    answer = bisect.bisect(cfg(), tmp_path)
    assert answer.status == "diffuse" and answer.how == "rowwise everywhere"
    assert {rule.recipe for rule in answer.works.fp8.rules} == {"rowwise"} and len(answer.works.fp8.rules) <= 6
    trainer(lambda c, on, step: 0.004 * sum("dgrad" in name for name in on))
    assert bisect.bisect(cfg(), tmp_path / "b").how == "dgrad everywhere in high precision"
    trainer(lambda c, on, step: 0.3 if len(on) > 10 else 0.0)
    answer = bisect.bisect(cfg(), tmp_path / "c")
    assert answer.status == "unsolved" and answer.works is None


def test_search_by_time(trainer, no_plots, cfg, tmp_path):
    trainer(lambda c, on, step: 0.5 if f"{UP}.fwd" in on and c.train.compile else 0.0)
    answer = bisect.bisect(cfg("train.compile=true"), tmp_path, by="time")
    assert {candidate.words for candidate in answer.sets[0]} == {"compile", f"fwd of {UP}"}
    assert [candidate.words for candidate in answer.out] == ["compile"] and not answer.works.train.compile


def test_interrupted_search_is_continued(trainer, no_plots, cfg, tmp_path):
    harm = when(f"{UP}.fwd")
    calls = []

    def interrupt(*args):
        calls.append(args)
        if len(calls) == 400:
            raise KeyboardInterrupt
        return harm(*args)

    trainer(interrupt)
    with pytest.raises(KeyboardInterrupt):
        bisect.bisect(cfg(), tmp_path)
    trainer(harm)
    answer = bisect.bisect(cfg(), tmp_path)
    assert bisect.bisect(cfg(), tmp_path).trained == 0
    repeated = bisect.bisect(cfg(), tmp_path, fresh=True)
    assert repeated.sentence == answer.sentence and 0 < answer.trained < repeated.trained


def test_search_from_a_checkpoint(trainer, no_plots, cfg, tmp_path):
    start = tmp_path / "first" / "milestones" / "step_50"
    start.mkdir(parents=True)
    trainer(when(f"{UP}.fwd"))
    answer = bisect.bisect(cfg("optimizer.states=fp8"), tmp_path / "a", start=start)
    assert answer.lines[0].outcome.begins == 50 and len(answer.lines[0].outcome.losses) == 30
    assert answer.candidates == ALL  # states that a high-precision checkpoint does not have are off
    with pytest.raises(BisectError, match="the folder does not exist"):
        bisect.bisect(cfg(), tmp_path / "b", start=tmp_path / "none")
    with pytest.raises(BisectError, match="not a checkpoint of a run: their names are step_N"):
        bisect.bisect(cfg(), tmp_path / "b", start=tmp_path)
    for override in ("fp8.adapt=true", "fp8.rules=[{match: '**', recipe: 'off', first: 3}]"):
        with pytest.raises(BisectError, match="a search compares fixed plans"):
            bisect.bisect(cfg(override), tmp_path)
    with pytest.raises(BisectError, match="steps=31: the run has 30 steps"):
        bisect.bisect(cfg(), tmp_path / "b", start=start, steps=31)


def test_unsearchable_configurations_are_rejected(trainer, no_plots, cfg, tmp_path):
    trainer(lambda c, on, step: math.inf if step > 3 else 0.0)
    with pytest.raises(BisectError, match="high precision itself fails at step 4"):
        bisect.bisect(cfg(), tmp_path)
    with pytest.raises(BisectError, match="there is nothing to search"):
        bisect.bisect(cfg("fp8.recipe=off"), tmp_path / "b")
    with pytest.raises(BisectError, match="the losses of phase preference do not measure what is learned"):
        bisect.bisect(cfg("train.phase=preference", "preference={}"), tmp_path / "b")


def test_recipes_of_a_measurement_become_rules(trainer, no_plots, cfg, tmp_path):
    trainer(when(f"{UP}.fwd"))
    rules = "fp8.rules=[{match: '**.up_proj', recipe: rowwise}]"
    measured = bisect.bisect(cfg("fp8.recipe=auto", rules), tmp_path)
    assert measured.status == "found" and measured.works.fp8.recipe == "off"
    assert len(measured.works.fp8.rules) > len(LAYERS) - 1


@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_casts_of_a_plan_file_are_kept_or_refused(cfg, tmp_path, form):
    """As saved by 0.5.0, whose blockwise is blockwise_1d now; and casts of two recipes, which no rule can give."""
    model = nn.ModuleDict({"up": nn.Linear(128, 128)})
    for wgrad in ("bf16", "fp8", "tensorwise"):
        file = fp8.save_plan(fp8.plan(model, fp8.Policy("blockwise", form, wgrad=wgrad)), tmp_path / "plan.json")
        saved = json.loads(file.read_text())
        del saved["casts"]
        file.write_text(json.dumps(saved))
        plan = fp8.load_plan(file, model)
        cfg_of_file, written = cfg(f"fp8.plan={file}"), planning.document(plan, now=plan)
        if wgrad == "tensorwise":
            with pytest.raises(BisectError, match=f"up casts that no rule has: blockwise {form} wgrad=tensorwise"):
                Space.of(cfg_of_file, written, file)
            continue
        space = Space.of(cfg_of_file, written, file)
        name, word = {"bf16": ("blockwise", "bf16"), "fp8": ("blockwise_1d", None)}[wgrad]
        assert [(rule.recipe, rule.format, rule.wgrad) for rule in space.cfg.fp8.rules] == [(name, form, word)]
        assert [candidate.gemm for candidate in space.gemms] == ["fwd", "dgrad", "wgrad"][: 3 if wgrad == "fp8" else 2]
        assert space.recipes == {"up": name}


def test_bisect_command(trainer, no_plots, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octavo.cli.arguments.require_files", lambda cfg, file: cfg)
    (tmp_path / "run.yaml").write_text(CONFIG)
    trainer(when(f"{UP}.fwd"))
    assert main(["bisect", "run.yaml", "--steps", "40", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "found" and "run 1: the unchanged configuration" in err
    assert "next: octavo train runs/it-bisect/works.yaml" in err
    trainer(lambda c, on, step: 0.3 if len(on) > 10 else 0.0)
    assert main(["bisect", "run.yaml", "train.lr=1e-4", "--out", "b"]) == 1
    assert "no coarser change that was tried works" in capsys.readouterr().out
    for words, message in (
        (["--margin", "0"], "expected a share above 0"),
        (["--steps", "81"], "the run has 80 steps from its start"),
        (["--from", "nowhere"], "the folder does not exist"),
        (["fp8.recipe=off"], "there is nothing to search"),
    ):
        assert main(["bisect", "run.yaml", *words, "--out", "c"]) in (1, 2)
        assert message in capsys.readouterr().err
