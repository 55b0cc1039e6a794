"""What a search answers for each kind of fault; training is played by a stub (conftest.py)."""

from __future__ import annotations

import json
import math

import pytest

from octavo import bisect
from octavo.bisect.short_runs import BisectError
from octavo.cli.main import main
from octavo.config import load_config

from .conftest import CONFIG, GEMMS, LAYERS

ALL = len(LAYERS) * len(GEMMS)
LOG = math.ceil(math.log2(ALL))
UP = "model.layers.2.up_proj"


def when(*names: str, harm: float = 0.3, recipes: tuple[str, ...] = (), after: int = 0):
    """Harm where all of these are on (in one of these recipes, if given), behind some step."""

    def found(cfg, on, step):
        there = all(name in on and (not recipes or on[name] in recipes) for name in names)
        return harm if there and step > after else 0.001

    return found


def test_one_gemm_is_found_in_a_logarithm_of_runs_and_its_layer_stays_in_fp8(trainer, cfg, tmp_path):
    trained = trainer(when(f"{UP}.fwd", recipes=("tensorwise",)))
    answer = bisect.bisect(cfg(), tmp_path)
    assert [[one.words for one in found] for found in answer.sets] == [[f"fwd of {UP}"]]
    assert answer.candidates == ALL and answer.status == "found"
    assert len(trained) <= 2 + LOG + 1 + 2 + 1  # the two ends, halving, alone, without (short and long), in rowwise
    assert answer.how == f"{UP} in rowwise" and answer.steps < 80
    works = load_config(tmp_path / "works.yaml")
    assert [(rule.match, rule.recipe) for rule in works.fp8.rules] == [(UP, "rowwise")]
    assert works.run.dir.endswith("runs/it") and works.fp8.recipe == "tensorwise"
    kept = json.loads((tmp_path / "bisect.json").read_text())
    assert kept["sets"][0][0] == {"name": UP, "gemm": "fwd", "component": "foundation"}
    assert len(kept["runs"]) == len(answer.lines) and kept["rules"] == [{"match": UP, "recipe": "rowwise"}]
    page = (tmp_path / "bisect.html").read_text()
    assert f"fwd of {UP} breaks it" in page and page.count("<svg") == 2
    assert min((tmp_path / f"{name}.png").stat().st_size for name in ("loss", "gap")) > 5000


def test_a_gemm_that_no_recipe_saves_is_taken_out(trainer, undrawn, cfg, tmp_path):
    trainer(when(f"{UP}.wgrad"))
    answer = bisect.bisect(cfg(), tmp_path)
    assert answer.how == f"removing wgrad of {UP}"
    assert [(r.match, r.recipe, r.wgrad, r.fwd) for r in answer.works.fp8.rules] == [(UP, None, "bf16", None)]


def test_two_that_only_break_it_together(trainer, undrawn, cfg, tmp_path):
    trainer(when(f"{LAYERS[1]}.dgrad", f"{UP}.fwd"))
    answer = bisect.bisect(cfg(), tmp_path)
    assert {one.words for one in answer.sets[0]} == {f"dgrad of {LAYERS[1]}", f"fwd of {UP}"}
    assert len(answer.sets) == 1 and len(answer.out) == 1  # the one of fewer FLOPs goes
    assert answer.out[0].name == UP and "together with" in answer.sentence


def test_two_of_which_each_breaks_it(trainer, undrawn, cfg, tmp_path):
    first, second = when(f"{LAYERS[0]}.fwd"), when(f"{UP}.dgrad", harm=0.5)
    trainer(lambda *at: max(first(*at), second(*at)))
    answer = bisect.bisect(cfg(), tmp_path)
    assert {one.words for one in answer.out} == {f"fwd of {LAYERS[0]}", f"dgrad of {UP}"}
    assert len(answer.sets) == 2


def test_one_that_shows_late_and_one_that_shows_later(trainer, undrawn, cfg, tmp_path):
    early, late = when(f"{UP}.fwd", after=20, harm=0.6), when(f"{LAYERS[0]}.fwd", after=55, harm=0.6)
    trainer(lambda *at: max(early(*at), late(*at)))
    answer = bisect.bisect(cfg(), tmp_path)
    assert {one.words for one in answer.out} == {f"fwd of {UP}", f"fwd of {LAYERS[0]}"}


def test_nothing_is_broken(trainer, undrawn, cfg, tmp_path):
    trained = trainer(when("nobody"))
    answer = bisect.bisect(cfg(), tmp_path)
    assert answer.status == "sound" and len(trained) == 2 and answer.works is None
    assert "nothing is broken: loss" in answer.sentence and not (tmp_path / "works.yaml").exists()


def test_a_feature_and_a_backend(trainer, undrawn, cfg, tmp_path):
    trainer(lambda c, on, step: 0.4 if c.optimizer.states == "fp8" else 0.0)
    answer = bisect.bisect(cfg("optimizer.states=fp8", "optimizer.update=backward"), tmp_path)
    assert [one.words for one in answer.out] == ["optimizer states in fp8"]
    assert answer.works.optimizer.states == "fp32" and answer.works.optimizer.update == "backward"
    assert not answer.works.fp8.rules and answer.works.fp8.recipe == "tensorwise"


def test_a_run_that_raises_or_is_not_finite_is_broken(trainer, undrawn, cfg, tmp_path):
    trainer(lambda c, on, step: "no kernel" if f"{UP}.fwd" in on and step > 5 else 0.0)
    answer = bisect.bisect(cfg(), tmp_path)
    assert [one.words for one in answer.out] == [f"fwd of {UP}"] and answer.steps == 6
    assert any("TrainError: no kernel" in line.outcome.failure for line in answer.lines)
    trainer(lambda c, on, step: math.inf if f"{UP}.dgrad" in on and step > 30 else 0.0)
    answer = bisect.bisect(cfg(), tmp_path / "b")
    assert [one.words for one in answer.out] == [f"dgrad of {UP}"]


def test_harm_of_many_gets_a_coarser_answer(trainer, undrawn, cfg, tmp_path):
    trainer(lambda c, on, step: 0.004 * sum(r == "tensorwise" and "fwd" in name for name, r in on.items()))
    answer = bisect.bisect(cfg(), tmp_path)
    assert answer.status == "diffuse" and answer.how == "rowwise everywhere"
    assert {rule.recipe for rule in answer.works.fp8.rules} == {"rowwise"} and len(answer.works.fp8.rules) <= 6
    trainer(lambda c, on, step: 0.004 * sum("dgrad" in name for name in on))
    assert bisect.bisect(cfg(), tmp_path / "b").how == "dgrad everywhere in high precision"
    trainer(lambda c, on, step: 0.3 if len(on) > 10 else 0.0)
    answer = bisect.bisect(cfg(), tmp_path / "c")
    assert answer.status == "unsolved" and answer.works is None


def test_by_time(trainer, undrawn, cfg, tmp_path):
    trainer(lambda c, on, step: 0.5 if f"{UP}.fwd" in on and c.train.compile else 0.0)
    answer = bisect.bisect(cfg("train.compile=true"), tmp_path, by="time")
    assert {one.words for one in answer.sets[0]} == {"compile", f"fwd of {UP}"}
    assert [one.words for one in answer.out] == ["compile"] and not answer.works.train.compile


def test_it_goes_on_where_it_was_cut_off(trainer, undrawn, cfg, tmp_path):
    harm = when(f"{UP}.fwd")
    calls = []

    def cut_off(*at):
        calls.append(at)
        if len(calls) == 400:
            raise KeyboardInterrupt
        return harm(*at)

    trainer(cut_off)
    with pytest.raises(KeyboardInterrupt):
        bisect.bisect(cfg(), tmp_path)
    trainer(harm)
    answer = bisect.bisect(cfg(), tmp_path)
    assert bisect.bisect(cfg(), tmp_path).trained == 0
    again = bisect.bisect(cfg(), tmp_path, fresh=True)
    assert again.sentence == answer.sentence and 0 < answer.trained < again.trained


def test_from_a_checkpoint(trainer, undrawn, cfg, tmp_path):
    start = tmp_path / "first" / "milestones" / "step_50"
    start.mkdir(parents=True)
    trainer(when(f"{UP}.fwd"))
    answer = bisect.bisect(cfg("optimizer.states=fp8"), tmp_path / "a", start=start)
    assert answer.lines[0].outcome.begins == 50 and len(answer.lines[0].outcome.losses) == 30
    assert answer.candidates == ALL  # states that high precision's checkpoint has not are off
    with pytest.raises(BisectError, match="there is no such folder"):
        bisect.bisect(cfg(), tmp_path / "b", start=tmp_path / "none")
    with pytest.raises(BisectError, match="no checkpoint of a run: those are called step_N"):
        bisect.bisect(cfg(), tmp_path / "b", start=tmp_path)
    for moving in ("fp8.adapt=true", "fp8.rules=[{match: '**', recipe: 'off', first: 3}]"):
        with pytest.raises(BisectError, match="a search compares fixed plans"):
            bisect.bisect(cfg(moving), tmp_path)
    with pytest.raises(BisectError, match="steps=31: the run has 30"):
        bisect.bisect(cfg(), tmp_path / "b", start=start, steps=31)


def test_what_cannot_be_searched(trainer, undrawn, cfg, tmp_path):
    trainer(lambda c, on, step: math.inf if step > 3 else 0.0)
    with pytest.raises(BisectError, match="high precision itself fails at step 4"):
        bisect.bisect(cfg(), tmp_path)
    with pytest.raises(BisectError, match="nothing in it could break a run"):
        bisect.bisect(cfg("fp8.recipe=off"), tmp_path / "b")
    with pytest.raises(BisectError, match="the losses of phase preference do not measure what is learned"):
        bisect.bisect(cfg("train.phase=preference", "preference={}"), tmp_path / "b")


def test_recipes_of_a_plan_file_or_a_measurement_become_rules(trainer, undrawn, cfg, tmp_path):
    trainer(when(f"{UP}.fwd"))
    rules = "fp8.rules=[{match: '**.up_proj', recipe: rowwise}]"
    measured = bisect.bisect(cfg("fp8.recipe=auto", rules), tmp_path)
    assert measured.status == "found" and measured.works.fp8.recipe == "off"
    assert len(measured.works.fp8.rules) > len(LAYERS) - 1


def test_the_command(trainer, undrawn, tmp_path, monkeypatch, capsys):
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
        (["--steps", "81"], "the run has 80 from where it begins"),
        (["--from", "nowhere"], "there is no such folder"),
        (["fp8.recipe=off"], "nothing in it could break a run"),
    ):
        assert main(["bisect", "run.yaml", *words, "--out", "c"]) in (1, 2)
        assert message in capsys.readouterr().err
