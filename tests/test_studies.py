"""Studies: what they say follows from what their units found, and units are trained once."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def _found() -> Iterator[None]:
    """The files of a study find each other as the command lets them."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "studies"))
    yield
    sys.path.remove(str(ROOT / "benchmarks" / "studies"))


def _module(name: str) -> Any:
    return importlib.import_module(name)


def test_a_row_says_what_its_interval_allows() -> None:
    row = _module("study").row
    assert row("d", "w", [0.001, 0.0011, 0.0009], 0.0015)["status"] == "pass"
    assert row("d", "w", [0.01, 0.011, 0.009], 0.0015)["status"] == "fail"
    wide = row("d", "w", [0.01, -0.009, 0.002], 0.0025)
    assert wide["status"] == "undecided" and wide["needed"] > 100
    assert row("d", "w", [0.01, -0.004, 0.006], 0.0025)["needed"] is None  # the estimate is beyond the bar
    assert row("d", "w", [0.001], 0.0015)["status"] == "undecided"
    assert row("d", "w", [0.001, 0.0011], 0.0015, ["seed 3 diverged"])["status"] == "fail"
    assert row("d", "w", [0.001, math.inf], 0.0015)["failed"] == ["1 of 2 gaps are not finite"]
    tables = _module("tables")
    assert tables.verdict(wide).startswith("undecided: ") and "to" in tables.interval(wide)
    assert tables.interval(row("d", "w", [], 0.1, ["seed 3 diverged"])) == "seed 3 diverged"


def test_equality_has_a_bar_on_both_sides() -> None:
    study, tables = _module("study"), _module("tables")

    def status(*gaps: float) -> Any:
        return study.row("d", "w", gaps, 0.0005, both_sides=True)["status"]

    assert status(0.0001, -0.0001, 0.0002) == status(0.0, 0.0) == "pass"
    assert status(0.0009, 0.001, 0.0011) == status(-0.0009, -0.001, -0.0011) == "fail"
    assert status(-0.0004, -0.0005, -0.0006) == status(0.001, -0.001, 0.0) == "undecided"
    assert status(0.0001, math.nan) == "fail"
    line = study.row("d", "w", [-0.0004, -0.0005, -0.0003], 0.0005, both_sides=True)
    assert line["needed"] > 3 and "| +-0.05 % |" in tables.rows({"rows": [line]})
    assert study.row("d", "w", [-0.0009, -0.001, -0.0011], 0.0005)["status"] == "pass"  # one side: better is no harm
    one, both = (study.Design("d", 8, 0.0004, "s", 0.0005, sides).estimate() for sides in (False, True))
    assert both["chance"] == pytest.approx(2 * one["chance"] - 1) and both["units_for_80"] > one["units_for_80"]
    told = importlib.import_module("benchmarks.studies.__main__").told
    assert "is inside +-0.05 %" in told(both) and "passes below 0.05 %" in told(one)


def test_the_place_of_a_study_that_was_not_run_stays(tmp_path: Path) -> None:
    written, page = _module("tables").written, "<!-- table: {} -->\nNot run yet.\n<!-- end -->"
    assert written(page.format("rl power"), tmp_path) == page.format("rl power")
    for wrong, why in (("no_such power", "no_such.py"), ("rl no_such", "table 'no_such'")):
        with pytest.raises(SystemExit, match=why):
            written(page.format(wrong), tmp_path)


def test_gaps_of_forks_are_of_the_same_steps() -> None:
    study, outcome = _module("study"), _module("unit").Outcome
    high = outcome("high", 0, (4.0, 3.0, 2.0, 1.0), {"own": 2.0})
    fork = outcome("fork", 2, (2.2, 1.0), {"own": 2.1})
    assert study.gap(fork, high, 3, 3) == pytest.approx(0.1)
    assert study.gap(fork, high, 3, 4) == pytest.approx(3.2 / 3 - 1)
    assert study.held(fork, high) == pytest.approx(0.05)
    assert study.gap(fork, high, 1, 4) != study.gap(fork, high, 1, 4)  # NaN: the fork has no steps 1 and 2


def test_units_without_another_side_or_of_one_seed_are_no_more_gaps() -> None:
    study, outcome = _module("study"), _module("unit").Outcome
    one, two = {"own": 2.2, "high": 2.0}, {"own": 2.0, "high": 2.0}
    ours = [outcome("a-seed-0", 0, (), one), outcome("b-seed-0", 0, (), two), outcome("a-seed-1", 0, (), one)]
    assert study.same_weights(ours) == pytest.approx([0.05, 0.1])
    there = {of.name: of for of in ours} | {"high-seed-1": outcome("high-seed-1", 0, (), two)}
    assert study.pooled(there, ["a-seed-0", "a-seed-1"], study.beside_high) == ([ours[2]], [])
    there["high-seed-1"] = replace(there["high-seed-1"], failure="diverged")
    assert study.pooled(there, ["a-seed-0", "a-seed-1"], study.beside_high) == ([], [])


def test_a_folder_is_one_studys_and_a_checkpoint_a_done_units(tmp_path: Path) -> None:
    units = _module("units")
    with units.alone(tmp_path / "new"), pytest.raises(SystemExit, match="another study"), units.alone(tmp_path / "new"):
        pass
    begin = tmp_path / "units/high-seed-0/run/milestones/step_8"
    begin.mkdir(parents=True)
    run = SimpleNamespace(fork=str(begin), start_from=None)
    fork = SimpleNamespace(cfg=SimpleNamespace(run=run, model=SimpleNamespace(path="model")))
    hf = tmp_path / "units/high-seed-0/run/hf"
    hf.mkdir()
    run = SimpleNamespace(fork=None, start_from=None)
    adapted = SimpleNamespace(cfg=SimpleNamespace(run=run, model=SimpleNamespace(path=str(hf))))
    assert units._next([adapted]) is None
    assert units._next([fork]) is None  # high precision was cut off after its checkpoint, and begins anew
    (tmp_path / "units/high-seed-0/unit.json").write_text("{}")
    assert units._next([fork]) is fork and units._next([adapted]) is adapted


def test_effects_of_a_planted_table() -> None:
    found = _module("tower").effects({"neither": 0.9, "tower": 0.88, "decoder": 0.89, "both": 0.86})
    assert found == pytest.approx({"tower": -0.025, "decoder": -0.015, "interaction": -0.005})
    assert _module("tower").words("neither") == []
    assert len(_module("tower").words("both")) == 3


@pytest.mark.parametrize("kind", ["residual", "product"])
def test_planted_outliers_change_no_function(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from octavo.models.tiny.configs import tiny_config

    planting = _module("long_tail")
    monkeypatch.setattr(planting, "CHANNELS", (5, 17))  # of 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    tokens, seen = torch.randint(0, 256, (2, 9)), []
    block = model.model.layers[0]
    watched = block.mlp.down_proj if kind == "product" else block.self_attn.q_proj
    watched.register_forward_pre_hook(lambda module, given: seen.append(float(given[0].abs().max())))
    with torch.no_grad():
        before = model(tokens).logits
        planting.plant(SimpleNamespace(model=model), kind, 4096)
        after = model(tokens).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert seen[1] > 100 * seen[0]


def test_the_study_of_mpt_judges_forks_and_whole_trainings(tmp_path: Path) -> None:
    """Outcomes with gaps that are known, and the units that would make them, untrained."""
    mpt, outcome = _module("mpt"), _module("unit").Outcome
    planned = mpt.units(tmp_path)
    assert len(planned) == 5 * mpt.SEEDS and planned[0].keeps and planned[1].begins == mpt.DEPTH
    model = json.loads((tmp_path / "mpt/config.json").read_text())
    assert model["learned_pos_emb"] and not model["no_bias"] and model["max_seq_len"] == 128
    found = {}
    for unit in planned:
        share = 1.0 if unit.name.startswith("high") else 1.001
        losses = tuple(2.0 * share for _ in range(mpt.STEPS - unit.begins))
        found[unit.name] = outcome(unit.name, unit.begins, losses, {"own": 2.0 * share, "high": 2.0})
    rows = mpt.judge(tmp_path, found)["rows"]
    assert [row["what"] for row in rows] == ["blockwise"] * 5 + ["delayed"] * 5
    assert all(row["units"] == 4 and row["estimate"] == pytest.approx(0.001) for row in rows)


def test_the_studies_of_wgrad_compare_two_recipes_in_each_seed(tmp_path: Path) -> None:
    """Outcomes with differences that are known, and the units that would make them, untrained."""
    from octavo.data.builtin import digits

    outcome, units = _module("unit").Outcome, _module("units")
    worse = {"blockwise_1d": 1.001, "blockwise": 1.0012}
    digits.write(tmp_path / "digits")
    for name, number in {"wgrad": 48, "lora": 7, "rl": 16}.items():
        module = _module(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "digits").symlink_to(tmp_path / "digits")
        planned = module.units(tmp_path / name)
        assert len(planned) == number and len({unit.name for unit in planned}) == number
        made = {tmp_path / name / "units" / unit.name for unit in planned if unit.keeps}
        found = {}
        for unit in planned:
            recipe = next((of for of in worse if f"-{of}-" in unit.name), "")
            parts = unit.cfg.fp8.image_encoder if unit.name.startswith("both") else unit.cfg.fp8
            assert parts.recipe == (recipe or "off") and bool(unit.plant) == ("one_cast" in unit.name)
            needs = units._needs(unit.cfg)
            assert not made.isdisjoint(path for need in needs for path in need.parents) or not needs
            assert bool(needs) == (not unit.keeps and not unit.name.startswith("both"))
            share = worse.get(recipe, 1.0)
            losses = (2.0 * (share if name == "wgrad" else 1.0),) * (unit.cfg.train.steps - unit.begins)
            held = {"own": 2.0 * share, "high": 2.0, "own_right": 0.9}
            found[unit.name] = outcome(unit.name, unit.begins, losses, held, {"rewards": [0.5] * 120})
        rows = {(row["design"], row["what"]): row for row in module.judge(tmp_path, found)["rows"]}
        pairs = [row for (_, what), row in rows.items() if what == "blockwise compared with blockwise_1d"]
        assert {row["units"] for row in pairs} == {module.SEEDS} and all(row["status"] == "pass" for row in pairs)
        del found[next(unit.name for unit in planned if "-blockwise_1d-seed-1" in unit.name)]
        fewer = module.judge(tmp_path, found)["rows"][0]
        assert fewer["units"] == module.SEEDS - 1 and "failed" not in fewer
        if name == "wgrad":
            equal = rows["forks after step 200", "blockwise compared with blockwise_1d"]
            assert equal["both_sides"] and equal["estimate"] == pytest.approx(1.0012 / 1.001 - 1)


def _forks(jobs: int, _: Any, begin: Callable[..., None], given: tuple[Any, ...], **more: int) -> ProcessPoolExecutor:
    """A study's pool, whose processes have imported what this one has."""
    return ProcessPoolExecutor(jobs, get_context("fork"), begin, given)


@pytest.mark.long
def test_units_are_trained_once_and_failures_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units, pretraining, texts = _module("units"), _module("pretraining"), _module("texts")
    monkeypatch.setattr(texts, "LAYERS", {"qwen3": 1, "qwen3_moe": 1, "mpt": 1})
    monkeypatch.setattr(texts, "HELD", 200)
    monkeypatch.setattr(texts, "CONFIG", texts.CONFIG.replace("warmup: 20", "warmup: 0"))
    for name, value in {
        "STEPS": 20, "DEPTHS": (8, 16), "THIRD": 4, "WINDOW": 4, "FORK_SEEDS": 2,
        "PAIRS": 2, "RECIPES": ("blockwise",),
    }.items():  # fmt: skip
        monkeypatch.setattr(pretraining, name, value)
    planned = pretraining.units(tmp_path)
    assert [unit.name for unit in planned[:2]] == ["high-seed-0", "fork-8-blockwise-seed-0"]
    told: list[str] = []
    moe = _module("moe")
    monkeypatch.setattr(moe, "STEPS", 4)
    monkeypatch.setattr(moe, "DEPTH", 2)
    monkeypatch.setattr(moe, "SEEDS", 1)
    for file in (tmp_path / "text/train.jsonl", tmp_path / "held_out.jsonl"):  # 20 steps read a few rows
        file.write_text("".join(file.read_text("utf-8").splitlines(keepends=True)[:40]), "utf-8")
    shutil.copytree(tmp_path / "text", tmp_path / "moe" / "text")  # what is there is not gathered again
    routed = moe.units(tmp_path / "moe")[:2]
    short = ("train.lr=1000", "train.steps=4", "run.milestones=[]")
    wild = _module("unit").Unit("wild", units.bare(planned[0].cfg, tmp_path, "wild", 0, *short))
    with monkeypatch.context() as quicker:
        quicker.setattr(units, "ProcessPoolExecutor", _forks)
        found = units.train_all(tmp_path, [*planned, wild], 2, 1.0, told.append)
    assert found.keys() == {unit.name for unit in planned} | {"wild"} and len(told) == len(found)
    judged = pretraining.judge(tmp_path, found)
    assert all(one["units"] >= 2 and "estimate" in one for one in judged["rows"])
    assert {len(gaps) for gaps in judged["growth"]["blockwise"]["gaps"]} == {2}
    whole = found["whole-blockwise-seed-1"]
    assert whole.held.keys() == {"own", "high", "averaged_own", "averaged_high"} and whole.cpu_seconds > 0
    assert whole.held["own"] != whole.held["high"] and whole.held["own"] != whole.held["averaged_own"]
    # Its loss explodes, and after that it may return by chance: the next steps say nothing.
    assert found["wild"].failure or max(found["wild"].losses) > 100 * max(whole.losses)
    # What is trained is read; what is missing, and that alone, would be trained, were there hours left.
    shutil.rmtree(tmp_path / "units" / "whole-blockwise-seed-1")
    again = units.train_all(tmp_path, planned, 1, 0.0, told.append)
    assert again == {name: one for name, one in found.items() if name not in ("wild", "whole-blockwise-seed-1")}
    assert told[-1] == "0 CPU hours are spent; 1 units are left"
    other = replace(planned[0], cfg=units.bare(planned[0].cfg, tmp_path, "high-seed-0", 0, "train.lr=1e-2"))
    with pytest.raises(SystemExit, match="trained with other train"):
        units.train_all(tmp_path, [other], 1, 1.0, told.append)
    # Routers: of two forwards in one precision none flips; in FP8 some do. In a process as studies start them.
    seen = units.train_all(tmp_path / "moe", routed, 1, 1.0, told.append)
    flips = [seen[unit.name].more["flips"] for unit in routed]
    assert all(0 <= share < 0.5 for share in flips) and flips[1] > 0
    assert json.loads((tmp_path / "moe/units/high-seed-0/unit.json").read_text())["more"]["busiest"][0] >= 1


def test_task_is_run_once_and_continues_from_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units, unit = _module("units"), _module("unit").Unit
    archive = tmp_path / "archive"
    task = unit("count", None, task=("json", "dumps"))
    monkeypatch.setattr(_module("judging"), "call", lambda what, home: {"ran": what[0], "home": home.name})
    units._train(tmp_path, task)
    outcome = units.read(tmp_path, task)
    assert outcome.more == {"ran": "json", "home": tmp_path.name} and not outcome.failure and not outcome.losses
    archive.mkdir()
    shutil.move(tmp_path / "units/count/unit.json", archive / "count.json")
    assert units.read(tmp_path, task) is None
    assert units.read(tmp_path, task, archive).more == outcome.more
    lines: list[str] = []
    assert set(units.train_all(tmp_path, [task], 1, 1.0, lines.append, archive)) == {"count"} and not lines
    with pytest.raises(SystemExit, match="was trained with other task"):
        units.read(tmp_path, unit("count", None, task=("json", "loads")), archive)


def test_rounded_operands_are_the_arithmetic_of_the_recipe() -> None:
    import torch

    from octavo import fp8

    operands = _module("smollm2_operands")
    torch.manual_seed(0)
    x, dy = torch.randn(3, 40, 96, requires_grad=True), torch.randn(3, 40, 96)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(96, 160, bias=False), torch.nn.Linear(160, 96)])
            torch.nn.init.zeros_(self.layers[1].bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](x).relu())

    class Outer(torch.nn.Module):  # names of layers hold ".layers.", as a decoder's do
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    def results(model: torch.nn.Module) -> list[torch.Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y, [x, *(p for p in model.parameters() if p.dim() == 2)], dy)]

    model = Outer()
    model.model.layers[1].bias = None
    plain = results(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    operands.apply(model, fp8.recipe("blockwise"), "everything")
    planted = results(model)
    with operands.off(model):
        assert all(torch.equal(one, other) for one, other in zip(results(model), plain, strict=True))
    other = Outer()
    other.model.layers[1].bias = None
    other.load_state_dict(state)
    fp8.apply(other, fp8.plan(other, fp8.Policy(recipe="off", rules=(fp8.Rule("**.layers.*", recipe="blockwise"),))))
    assert all(torch.equal(one, two) for one, two in zip(planted, results(other), strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(planted, plain, strict=True))
    singles = [Outer() for _ in range(3)]
    for single, what in zip(singles, ("weights", "activations", "gradients"), strict=True):
        single.model.layers[1].bias = None
        single.load_state_dict(state)
        operands.apply(single, fp8.recipe("blockwise"), what)
    y = [results(single)[0] for single in singles]
    assert torch.equal(y[2], plain[0]) and not torch.equal(y[0], plain[0]) and not torch.equal(y[1], plain[0])


def test_gaps_of_the_real_model_pair_seeds_and_windows() -> None:
    smollm2, equal = _module("smollm2"), _module("smollm2_equal")
    outcome = _module("unit").Outcome
    high = outcome("high-seed-0", 0, (), {}, {"40": {"own": [2.0, 2.0]}})
    ours = outcome("x-seed-0", 0, (), {}, {"40": {"own": [2.1], "high": [2.0, 2.2]}})
    there = {"high-seed-0": high, "x-seed-0": ours, "x-seed-1": replace(ours, name="x-seed-1")}
    assert smollm2.gaps(there, "x", "high", 40) == pytest.approx([0.05])  # of one seed, of the windows both have
    assert smollm2.gaps(there, "x", "high", 40, "high") == pytest.approx([0.05])
    assert smollm2.gaps(there, "x", "high", 25) == []
    assert smollm2.gaps(there | {"x-seed-0": replace(ours, failure="diverged")}, "x", "high", 40) == []
    same = equal.summarize({"losses": [2.2, 2.2, 2.2]}, [2.0, 2.0, 2.0, 9.0])
    assert same["gap"] == pytest.approx(0.1) and same["error"] == pytest.approx(0.0) and same["windows"] == 3
    assert len(smollm2.LAYERS) == 20


def test_another_machine_continues_the_statements_of_power(tmp_path: Path) -> None:
    command = importlib.import_module("benchmarks.studies.__main__")
    saved = [{"written": "before", "trained": 0, "designs": [{"units": 4}]}]
    assert command._written(tmp_path / "a.json", saved, [{"units": 4}], 30) == saved
    changed = command._written(tmp_path / "b.json", saved, [{"units": 5}], 30)
    assert changed[:1] == saved and changed[1]["trained"] == 30 and changed[1]["designs"] == [{"units": 5}]
    assert command._written(tmp_path / "b.json", [], [{"units": 5}], 31) == changed
    assert command._read_power("smollm2")[0]["trained"] == 30 and command._read_power("no-such-study") == []
