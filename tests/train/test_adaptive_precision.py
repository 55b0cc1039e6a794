"""Precision that schedules itself: an outlier planted at step 30 moves its layer within one check and back when it has
left, without one nothing moves; spans of rules; resumed, opened, on two ranks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import fp8, train
from octavo.cli.main import main
from octavo.config import Config, ConfigError, load_config_text, override, to_yaml
from octavo.config.sections.fp8_adapt import AdaptSection
from octavo.fp8.adapting import Limits
from octavo.fp8.planning import Schedule, Span
from octavo.models.tiny import tiny
from octavo.report.evidence import trust_table
from octavo.report.run import run_page
from octavo.train import artifacts
from octavo.train.loop import loop
from octavo.train.run_dir import run_dir
from octavo.train.run_dir.run_dir import read_rows
from octavo.train.setup import planning
from octavo.train.step.precision_schedule import PrecisionSchedule
from tests import ranks
from tests.rl.forks import both

pytestmark = pytest.mark.usefixtures("bare_forward")

LAYER = "model.layers.1.mlp.down_proj"
EVERY, BEGIN, END = 5, 30, 40
WORDS = ("the", "a", "of", "sea", "ship", "wind", "old", "man", "light", "night", "cold", "deep", "went", "came", "saw")


class Outlier(train.Callback):
    """From step BEGIN to END one value of the layer's input is huge, at the last token of each row: it is in no loss,
    and no other token sees it, so that in high precision nothing changes."""

    def __init__(self, begin: int = BEGIN, end: int = END, report: str = "") -> None:
        self.steps, self.on, self.report = range(begin, end + 1), False, report

    def begin(self, run: train.Run) -> None:
        run.model.get_submodule(LAYER).register_forward_pre_hook(self.plant)

    def plant(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.on:
            return None
        x = args[0].clone()
        x[..., -1, 0] = 1e8
        return (x,)

    def before_step(self, run: train.Run, number: int, batches: Any) -> None:
        self.on = number in self.steps

    def end(self, run: train.Run, result: Any) -> None:
        if self.report:
            found = {
                "places": run.job.precision_schedule.to_json(),
                "recipe": str(run.model.get_submodule(LAYER).recipe),
            }
            Path(f"{self.report}.{run.world.rank}").write_text(json.dumps(found))


class Said:
    """A console that remembers."""

    is_terminal = False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: object = "", *_: object, **__: object) -> None:
        self.lines.append(str(text))


Make = Callable[..., Config]


@pytest.fixture(scope="module")
def make(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(*overrides, dir=) -> plain text on a mini Qwen3 in tensorwise that adapts, 60 steps."""
    home = tmp_path_factory.mktemp("adapting")
    draw = random.Random(0)
    rows = [json.dumps({"text": " ".join(draw.choice(WORDS) for _ in range(60))}) for _ in range(300)]
    (home / "rows.jsonl").write_text("\n".join(rows))

    def build(*overrides: str, dir: str = "run", model: str = "text") -> Config:
        text = f"""
model: {{path: {place / model}}}
fp8: {{recipe: tensorwise, adapt: {{every: {EVERY}, patience: 2}}}}
data: {{train: [{{path: {home / "rows.jsonl"}}}], cache: {home / "cache"}}}
train: {{phase: pretrain, steps: 60, seq_length: 32, micro_batch: 2, global_batch: 4, lr: 2e-3}}
run: {{dir: {home / dir}, health_every: 0, tensorboard: false, hf: false, threads: 1, save_every: 20, keep: 9}}
"""
        return load_config_text(text, overrides)

    return build


@pytest.fixture(scope="module")
def planted(make: Make) -> tuple[Config, list[str]]:
    """The run with the outlier, uninterrupted, and what it said."""
    cfg, said = make(dir="planted"), Said()
    train.run(cfg, callbacks=[Outlier()], console=said)
    return cfg, said.lines


def rows_of(cfg: Config) -> list[dict[str, Any]]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


def losses(cfg: Config) -> list[float]:
    return [row["loss"] for row in rows_of(cfg)]


def moves(cfg: Config) -> list[dict[str, Any]]:
    return read_rows(Path(cfg.run.dir) / run_dir.ADAPT)


def short(found: list[dict[str, Any]], gemm: str) -> list[tuple[int, str, str]]:
    return [(row["step"], row["kind"], row["to"]) for row in found if row["gemm"] == gemm]


def test_an_outlier_moves_its_layer_within_one_check_and_back_when_it_has_left(planted):
    cfg, said = planted
    found = moves(cfg)
    assert {row["layer"] for row in found} == {LAYER} and {row["gemm"] for row in found} == {"fwd", "wgrad"}
    assert short(found, "fwd") == [
        (30, "leaves", "rowwise"), (35, "leaves", "blockwise"), (40, "leaves", "bf16"),
        (50, "returns", "blockwise"), (60, "returns", "rowwise"),
    ]  # fmt: skip
    assert short(found, "wgrad") == [(30, "leaves", "rowwise"), (50, "returns", "tensorwise")]
    assert found[0]["figure"] == "underflow of x" and found[0]["value"] > 0.99 and found[0]["threshold"] == 0.01
    told = [line for line in said if LAYER in line]
    assert len(told) == len(found) and "step 30" in told[0] and "tensorwise to rowwise: underflow of x" in told[0]


def test_rows_proof_and_plan_follow_each_plan(planted):
    cfg, _ = planted
    share = {row["step"]: row["fp8_share"] for row in rows_of(cfg)}
    lowest = min(share.values())
    assert 0.9 < lowest < 1 and {step for step, one in share.items() if one < 1} == set(range(41, 51))
    proof = json.loads((Path(cfg.run.dir) / "proof.json").read_text())
    assert [span["steps"] for span in proof["spans"]] == [[1, 30], [31, 35], [36, 40], [41, 50], [51, None]]
    assert all(span["share"] == pytest.approx(span["planned"]) and span["pending"] == [] for span in proof["spans"])
    assert proof["missing"] == []
    plan = json.loads((Path(cfg.run.dir) / "plan.json").read_text())
    (row,) = (row for row in plan["rows"] if row["name"] == LAYER)
    assert row["recipe"]["fwd"] == "rowwise" and "adapt: fwd rowwise since step 60" in row["reason"]
    assert all(
        line["recipe"] == "tensorwise" and "fwd" not in line for line in plan["layers"] if line["recipe"] != "off"
    )


def test_a_run_that_is_cut_off_and_resumed_makes_the_same_moves_to_the_bit(planted, make):
    """From step 40 of a copy: moves, proof and figures behind it are dropped and come again."""
    cfg, _ = planted
    home = Path(make(dir="resumed").run.dir)
    shutil.copytree(cfg.run.dir, home)
    again = make(f"run.resume={home}/checkpoints/step_40", dir="resumed")
    train.run(again, callbacks=[Outlier()])
    assert losses(again) == losses(cfg) and moves(again) == moves(cfg)
    assert [row["fp8_share"] for row in rows_of(again)] == [row["fp8_share"] for row in rows_of(cfg)]
    states = [Path(one.run.dir) / "checkpoints" / "step_60" / "state.json" for one in (cfg, again)]
    assert len({json.dumps(json.loads(file.read_text())["counters"]["adapt"]) for file in states}) == 1
    spans = json.loads((home / "proof.json").read_text())["spans"]
    assert [span["steps"] for span in spans][-2:] == [[41, 50], [51, None]] and spans[0]["steps"][0] == 1


def test_without_a_fault_nothing_moves_and_no_bit_changes(make):
    adapts, plain = make("train.steps=15", dir="healthy"), make("train.steps=15", "fp8.adapt=false", dir="plain")
    train.run(adapts)
    train.run(plain)
    assert losses(adapts) == losses(plain) and not (Path(adapts.run.dir) / run_dir.ADAPT).exists()
    assert "fp8_share" not in rows_of(plain)[0] and rows_of(adapts)[0]["fp8_share"] == 1.0
    assert "spans" not in json.loads((Path(adapts.run.dir) / "proof.json").read_text())


def test_a_checkpoint_opens_in_the_plan_of_its_step(planted):
    target = artifacts.inspect_target(planted[0].run.dir)
    for step, recipe in ((20, "tensorwise hybrid"), (40, "tensorwise hybrid fwd=bf16 wgrad=rowwise")):
        model = target.open(step=step).model
        assert str(model.get_submodule(LAYER).recipe) == recipe
    assert str(target.open(recipe="rowwise").model.get_submodule(LAYER).recipe) == "rowwise e4m3"


def test_the_page_shows_the_share_in_fp8_and_the_moves(planted, tmp_path):
    page, _ = run_page.write_page(run_page.read_runs([planted[0].run.dir]), tmp_path / "page.html")
    text = page.read_text()
    assert "Linear FLOPs in FP8" in text and "7 changes of GEMMs between recipes and high precision" in text
    assert LAYER in text and "underflow of x" in text and "tensorwise" in text


def test_rules_with_spans_hold_in_their_steps_alone(make):
    """The first steps of a run in high precision are those of one that always is; then FP8; then high again."""
    rules = 'fp8.rules=[{match: "**", recipe: off, first: 4}, {match: "**", recipe: off, last: 0.3}]'
    cfg = make(rules, "fp8.adapt=false", "train.steps=10", "run.save_every=2", dir="spans")
    high = make("fp8.recipe=off", "fp8.adapt=false", "train.steps=10", dir="high")
    said = Said()
    train.run(cfg, console=said)
    train.run(high)
    assert losses(cfg)[:4] == losses(high)[:4] and losses(cfg)[4] != losses(high)[4]
    assert [row["fp8_share"] for row in rows_of(cfg)] == [0.0] * 4 + [1.0] * 3 + [0.0] * 3
    assert any("steps 1 to 4: 0 of 15 linear layers in FP8" in line for line in said.lines)
    assert any("step 5: rules switch 14 layers; 100.0 % of linear FLOPs" in line for line in said.lines)
    proof = json.loads((Path(cfg.run.dir) / "proof.json").read_text())
    assert [(s["steps"], s["share"]) for s in proof["spans"]] == [([1, 4], 0.0), ([5, 7], 1.0), ([8, None], 0.0)]
    again = make(rules, "fp8.adapt=false", "train.steps=10", f"run.resume={cfg.run.dir}/checkpoints/step_6", dir="on")
    train.run(again)
    assert losses(again) == losses(cfg)[6:]  # by the plan.json of the run, whose lines have steps
    train.run(override(cfg, [f"run.resume={cfg.run.dir}/checkpoints/step_8"]))
    proof = json.loads((Path(cfg.run.dir) / "proof.json").read_text())
    assert [s["steps"] for s in proof["spans"]] == [[1, 4], [5, 7], [8, 8], [9, None]]
    model = artifacts.inspect_target(cfg.run.dir).open().model
    assert type(model.get_submodule(LAYER)).__name__ == "Linear" and not isinstance(
        model.get_submodule(LAYER), fp8.Linear
    )


def test_the_plan_on_paper_tells_the_spans_and_keeps_them_in_a_file(make, tmp_path, capsys):
    cfg = make("fp8.rules=[{match: '**', recipe: off, first: 10}]", "fp8.adapt=true")
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(cfg))
    assert main(["plan", str(file), "--save", str(tmp_path / "plan.json")]) == 0
    told = capsys.readouterr().out
    assert "steps 1 to 10: 0 of 15 linear layers in FP8" in told and "steps 11 to 60: 14 of 15" in told
    assert "note: fp8.adapt: GEMMs are judged every 25 steps" in told
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert any(line.get("steps") == [1, 10] and line["recipe"] == "off" for line in saved["layers"])
    assert main(["plan", str(file), "train.steps=null", "train.epochs=9"]) == 0  # steps that are counted first
    assert "steps 1 to 10: 0 of 15 linear layers in FP8" in capsys.readouterr().out


def test_the_steps_of_rules_are_counted_from_both_ends(make):
    def steps(rule: str, total: int = 60) -> tuple[int, int] | None:
        cfg = make(f"fp8.rules=[{{match: '**', recipe: off, {rule}}}]", f"train.steps={total}")
        return planning.policy_from(cfg).rules[0].steps

    assert steps("first: 7") == (1, 7) and steps("last: 0.1") == (55, 60) and steps("last: 0.001") == (60, 60)
    assert steps("last: 0.1", 10) == (10, 10) and steps("last: 0.3", 10) == (8, 10)
    for span in ("first: 7", "last: 0.1"):
        cfg = make(f"fp8.rules=[{{match: '**', recipe: off, {span}}}]", "train.steps=null", "train.epochs=1")
        with pytest.raises(train.TrainError, match=r"a part of the steps.*Set train.steps"):
            planning.policy_from(cfg)


@pytest.mark.parametrize(
    ("recipes", "adapt", "may"),
    [(["blockwise"], None, False), (["delayed"], None, True), (["off", "delayed"], None, True),
     (["blockwise"], AdaptSection(), True)],
)  # fmt: skip
def test_a_step_keeps_amax_histories_where_a_plan_or_a_move_may_have_some(recipes, adapt, may: bool):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    main, *others = (fp8.plan(model, recipe) for recipe in recipes)
    spans = tuple(Span(n + 1, n + 1, plan) for n, plan in enumerate(others))
    assert PrecisionSchedule(Schedule(main, spans), adapt).may_use_delayed_scaling == may


def test_the_defaults_are_the_healthy_column_of_the_trust_table():
    limits = Limits()
    assert AdaptSection().model_dump(exclude={"every", "recipes"}) == asdict(limits)
    assert {"e4m3": limits.sqnr_e4m3, "e5m2": limits.sqnr_e5m2} == trust_table.SQNR_WARN
    assert (limits.underflow, limits.underflow_wgrad) == (trust_table.UNDERFLOW_WARN, trust_table.UNDERFLOW_WARN_WGRAD)
    assert limits.cosine == trust_table.COSINE_MIN


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.compile=true"], "a compiled graph holds the recipes"),
        (["train.cuda_graphs=true"], "a CUDA graph holds the kernels"),
        (["fp8.fuse=on"], "a fused block runs the recipe"),
        (["fp8.param=true"], "weights are codes of one recipe between steps"),
        (["fp8.foundation={param: true, recipe: rowwise}"], "fp8.foundation.param"),
        (["fp8.recipe=delayed"], "the amax histories of delayed scaling"),
        (["lora={}"], "the frozen base of adapters has one recipe"),
        (["train.exchange=fp8"], "ranks exchange the codes of one recipe"),
        (["train.phase=preference"], "compares the policy with a reference or a rollout"),
        (["fp8.adapt={every: 61}"], "none of 60 steps is a check; use at most 60"),
        (["fp8.adapt={recipes: [block, blockwise]}"], "named more than once"),
        (["fp8.adapt={recipes: [delayed]}"], "fp8.adapt.recipes"),
        (["fp8.adapt={time: 0.05}"], "recipe auto measures"),
        (["fp8.recipe=off"], "has no effect where nothing runs in FP8"),
        (["fp8.adapt={every: 5, patiense: 3}"], "did you mean `patience`"),
        (["fp8.rules=[{match: '**', recipe: off, first: 60}]"], "are all of 60 steps"),
        (["fp8.rules=[{match: '**', recipe: off, first: 6, last: 0.1}]"], "write a rule for each"),
        (["fp8.rules=[{match: '**', first: 6}]"], "the rule changes nothing"),
        (["fp8.adapt=false", "fp8.rules=[{match: '**', recipe: off, first: 6}]", "train.compile=true"],
         "or remove the rule's span"),
        (["fp8.lm_head={recipe: rowwise}", "fp8.rules=[{match: '**', recipe: off, first: 6}]"],
         "the head has one recipe for the whole run"),
    ],
)  # fmt: skip
def test_what_cannot_be_beside_it_is_refused_with_the_fix(make, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        make(*overrides)


def test_a_plan_file_in_amax_histories_is_refused_before_a_step(make, tmp_path):
    cfg = make("fp8.adapt=false", "fp8.recipe=delayed")
    model, family = planning.meta_model(cfg)
    plan = planning.plan_model(cfg, model, family)[0]
    file = fp8.save_plan(plan, tmp_path / "plan.json")
    text = file.read_text().replace('"layers": [', '"layers": [{"match": "**", "recipe": "delayed"},')
    file.write_text(text.replace('"recipe": "delayed", "format"', '"recipe": "delayed", "steps": [3, 60], "format"'))
    other = make("fp8.adapt=false", f"fp8.plan={file}", "train.steps=9", dir="histories")
    assert other.fp8.plan is not None
    with pytest.raises(fp8.PlanError, match="cannot switch"):
        train.run(other)


@pytest.mark.long
@pytest.mark.skipif(ranks.START != "fork", reason="ranks are forks")
def test_two_ranks_decide_alike_and_as_one(planted, make):
    """The outlier on both ranks, as in the run of one: the same moves. On one rank alone: still equal on both."""
    for name, where in (("both", (0, 1)), ("alone", (1,))):
        cfg = make(dir=name)
        report = f"{cfg.run.dir}.report"

        def plant(rank: int, where: tuple[int, ...] = where, report: str = report) -> None:
            begin, usual = BEGIN if rank in where else 10**9, loop._ordered_callbacks
            loop._ordered_callbacks = lambda users, *more: usual((*users, Outlier(begin, END, report)), *more)

        for code, said in both(cfg, plant):
            assert code == 0, said
        one, two = (json.loads(Path(f"{report}.{rank}").read_text()) for rank in (0, 1))
        assert one == two and one["places"]
        assert short(moves(cfg), "fwd")[0] == (30, "leaves", "rowwise")
        if name == "both":
            assert [{**row, "value": 0} for row in moves(cfg)] == [{**row, "value": 0} for row in moves(planted[0])]
        assert losses(cfg)[:29] == pytest.approx(losses(planted[0])[:29], rel=3e-3)


@pytest.mark.long
@pytest.mark.parametrize("beside", ["experts", "activations", "recompute"])
def test_experts_saved_activations_and_recomputation_adapt_too(make, tmp_path, beside: str):
    """Thresholds that everything breaks and all moves are refused but into finer recipes; then those that nothing
    breaks bring all back: the proof holds in each span."""
    over = ["train.steps=8", "fp8.adapt={every: 2, patience: 1, sqnr_e4m3: 60, budget: 1}", "run.save_every=4"]
    over += {"experts": [], "activations": ["fp8.activations=fp8"], "recompute": ["train.recompute=full"]}[beside]
    if beside == "experts":
        over.append(f"model.path={tiny.write('qwen3_moe', tmp_path / 'moe', size='mini')}")
    cfg = make(*over, dir=beside)
    train.run(cfg)
    found, proof = moves(cfg), json.loads((Path(cfg.run.dir) / "proof.json").read_text())
    assert {row["to"] for row in found} == {"rowwise", "blockwise", "bf16"}
    assert proof["spans"][-1]["share"] == pytest.approx(proof["spans"][-1]["planned"]) and proof["missing"] == []
    assert rows_of(cfg)[-1]["fp8_share"] == 0.0
    again = make(*over, f"run.resume={cfg.run.dir}/checkpoints/step_4", dir=f"{beside}-on")
    train.run(again)
    assert losses(again) == losses(cfg)[4:] and moves(again) == [row for row in found if row["step"] > 4]
