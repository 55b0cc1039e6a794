"""Ladders of plans, layers that switch between plans, and trials of recipes that do not change a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.adapting import (
    GemmState,
    Limits,
    RecipeTrials,
    apply_moves,
    build_ladders,
    casts_to_try,
    decide,
    finer_recipes,
    gemm_costs,
)
from octavo.fp8.observe import recorder
from octavo.fp8.proof import Proof
from tests.fp8.changed_recipe import change_recipe


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        self.lm_head = nn.Linear(128, 32, bias=False)

    def forward(self, x):
        return self.lm_head(self.down(torch.relu(self.up(x))))


def make_fp8_net(recipe="tensorwise", **policy):
    model = Net()
    plan = fp8.plan(model, fp8.Policy(recipe, **policy))
    return fp8.apply(model, plan), plan


def batch(factor: float = 1.0):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    x[:, 0] *= factor
    return x


def step(model, x):
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def is_equal(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def test_ladders_end_in_high_precision() -> None:
    assert finer_recipes("tensorwise") == ("rowwise", "blockwise") and finer_recipes("rowwise") == ("blockwise",)
    assert finer_recipes("blockwise") == finer_recipes("mxfp8") == ()
    assert (
        finer_recipes("tensorwise", ["blockwise"])
        == finer_recipes("rowwise", ["rowwise", "blockwise"])
        == ("blockwise",)
    )
    assert finer_recipes("blockwise", []) == ()
    plan = fp8.plan(Net(), fp8.Policy("tensorwise", wgrad="bf16", rules=(fp8.Rule("down", "mxfp8", wgrad="fp8"),)))
    found = build_ladders(plan)
    assert found["up", "fwd"] == ("tensorwise", "rowwise", "blockwise", "bf16") and ("up", "wgrad") not in found
    assert found["down", "wgrad"] == ("mxfp8", "bf16") and not any(layer == "lm_head" for layer, _ in found)
    assert build_ladders(fp8.plan(Net(), fp8.Policy("delayed"))) == {}


def test_gemm_cost_is_share_of_linear_flops() -> None:
    model = Net()
    model.up.weight.requires_grad_(False)
    work = gemm_costs(fp8.plan(model, "blockwise"))
    assert work["up", "fwd"].flops == pytest.approx(1 / 5) and ("up", "wgrad") not in work
    assert sum(cost.flops for cost in work.values()) == pytest.approx(1.0)
    assert all(cost.time is None for cost in work.values())


def test_gemm_cost_of_measured_plan_has_time() -> None:
    plan = fp8.plan(Net(), "blockwise")
    times = [SimpleNamespace(high=3.0, planned=2.4), SimpleNamespace(high=1.0, planned=1.6), None]
    rows = tuple(replace(row, times=found) for row, found in zip(plan.rows, times, strict=True))
    work = gemm_costs(replace(plan, rows=rows))
    assert work["up", "fwd"].time == pytest.approx(0.6 / 3 / 4.0) and work["down", "fwd"].time == 0.0


def test_plan_with_moves_has_recipes_and_reasons() -> None:
    plan = fp8.plan(Net(), "tensorwise")
    why = "sqnr of x 9.0 dB, at least 25.0 dB"
    places = {("up", "fwd"): GemmState(2, "blockwise", step=30, why=why), ("up", "wgrad"): GemmState(3, "bf16")}
    moved = apply_moves(plan, build_ladders(plan), places)
    up, down = moved.rows[0], moved.rows[1]
    assert up.recipe is not None and up.recipe.summary() == "tensorwise hybrid fwd=blockwise wgrad=bf16"
    assert "adapt: fwd blockwise since step 30 (sqnr of x 9.0 dB" in up.reason and set(up.selections) == {
        "fwd",
        "dgrad",
    }
    assert down is plan.rows[1] and moved.share == pytest.approx(1 - 1 / 6)
    high = apply_moves(
        plan, build_ladders(plan), {("up", gemm): GemmState(3, "bf16") for gemm in ("fwd", "dgrad", "wgrad")}
    )
    assert high.rows[0].recipe is None and high.share == pytest.approx(0.5)
    assert apply_moves(plan, build_ladders(plan), {}) is plan


def test_moves_have_the_casts_of_a_loaded_plan(tmp_path, monkeypatch) -> None:
    """A checkpoint has the names of the moves, and its plan the casts of these names."""
    plan, model = fp8.plan(Net(), "tensorwise"), Net()
    places = {("up", "wgrad"): GemmState(2, "blockwise")}
    moved, tried = apply_moves(plan, build_ladders(plan), places), casts_to_try(plan, build_ladders(plan), places)
    path = fp8.save_plan(plan, tmp_path / "plan.json")
    change_recipe(monkeypatch)
    loaded = fp8.load_plan(path, model)
    again = apply_moves(loaded, build_ladders(loaded), places)
    assert [row.recipe for row in again.rows] == [row.recipe for row in moved.rows]
    assert casts_to_try(loaded, build_ladders(loaded), places) == tried


def test_switched_layer_equals_newly_converted_layer(tmp_path) -> None:
    model, plan = make_fp8_net()
    before, parameters = step(model, batch()), list(model.parameters())
    words = {("up", "fwd"): "blockwise", ("up", "wgrad"): "bf16", ("down", "dgrad"): "rowwise"}
    moved = apply_moves(
        plan, build_ladders(plan), {key: GemmState(build_ladders(plan)[key].index(w), w) for key, w in words.items()}
    )
    assert fp8.switch_plan(model, plan, moved) == ("up", "down")
    file = fp8.save_plan(moved, tmp_path / "moved.json")  # a plan file has the words of mixed recipes
    fresh = Net()
    again = fp8.load_plan(file, fresh)
    assert [row.recipe for row in again.rows] == [row.recipe for row in moved.rows]
    turned = step(model, batch())
    assert is_equal(turned, step(fp8.apply(fresh, again), batch())) and not is_equal(turned, before)
    with fp8.count_gemms() as counts:
        step(model, batch())
    Proof(moved).observe(counts, {"foundation": 1})
    with pytest.raises(fp8.ProofError, match="wgrad planned on"):
        Proof(plan).observe(counts, {"foundation": 1})
    assert fp8.switch_plan(model, moved, plan) == ("up", "down") and is_equal(step(model, batch()), before)
    assert fp8.switch_plan(model, plan, plan) == () and all(
        a is b for a, b in zip(parameters, model.parameters(), strict=True)
    )


def test_layer_of_later_fp8_plan_runs_in_high_precision_first() -> None:
    policy = fp8.Policy("blockwise", rules=(fp8.Rule("**", "off", steps=(1, 2)), fp8.Rule("up", "off", steps=(4, 5))))
    model = Net()
    main = fp8.plan(model, policy)
    plans = fp8.schedule(model, main, 10)
    assert [(s.first, s.last, s.plan.share) for s in plans.spans] == [
        (1, 2, 0.0), (3, 3, 1.0), (4, 5, pytest.approx(0.5)), (6, 10, 1.0)
    ]  # fmt: skip
    assert plans.at(3) is plans.at(10) is plans.main and plans.parts == {"foundation"} and len(plans.plans) == 3
    stock, x = Net(), batch()
    fp8.apply(model, plans.at(1), plans.plans)
    assert is_equal(step(model, x), step(stock, x))
    with fp8.count_gemms() as counts:
        step(model, x)
    proof = Proof(plans.at(1), parts=["foundation"])
    proof.observe(counts, {"foundation": 1})
    fp8.switch_plan(model, plans.at(2), plans.at(3))
    plain = Net()
    assert is_equal(step(model, x), step(fp8.apply(plain, main), x))
    with fp8.count_gemms() as counts:
        step(model, x)
    with pytest.raises(fp8.ProofError, match="planned in high precision, 1 fwd ran on"):
        Proof(plans.at(1), parts=["foundation"]).observe(counts, {"foundation": 1})
    proof.switch_plan(plans.at(3), 3)
    assert proof.pending == {"foundation"}
    proof.observe(counts, {"foundation": 1})
    found = proof.report()
    assert [(s["steps"], s["share"], s["planned"]) for s in found["spans"]] == [
        ([1, 2], 0.0, 0.0),
        ([3, None], 1.0, 1.0),
    ]
    assert found["pending"] == [] and 0 < found["share"] < 1


def test_unsupported_switch_is_rejected_before_any_change() -> None:
    model, plan = make_fp8_net("delayed")
    other = fp8.plan(Net(), "blockwise")
    with pytest.raises(fp8.PlanError, match="amax histories"):
        fp8.switch_plan(model, plan, other)
    model = Net()
    off = fp8.plan(model, fp8.Policy("off"))
    fp8.apply(model, off)
    with pytest.raises(fp8.PlanError, match="not an FP8 layer"):
        fp8.switch_plan(model, off, other)
    model, plan = make_fp8_net("blockwise", components={"lm_head": "blockwise"})
    with pytest.raises(fp8.PlanError, match="head"):
        fp8.switch_plan(model, plan, fp8.plan(Net(), "rowwise"))
    assert model.up.recipe.name == "blockwise"
    for policy, why in (
        ({"recipe": "delayed"}, "amax histories"),
        ({"recipe": "rowwise", "param": True}, "codes of one"),
    ):
        timed = fp8.Policy(**policy, rules=(fp8.Rule("up", "off", steps=(1, 2)),))
        plans = fp8.schedule(model := Net(), fp8.plan(model, timed), 9)
        with pytest.raises(fp8.PlanError, match=why):
            fp8.apply(model, plans.at(1), plans.plans)
        assert type(model.down) is nn.Linear


@pytest.mark.parametrize("steps", [(0, 3), (4, 3), (1,), (1, True), ("1", 2)])
def test_invalid_steps_of_rules_are_rejected(steps) -> None:
    with pytest.raises(fp8.PlanError, match="must be the first and the last step"):
        fp8.Rule("**", "off", steps=steps)


def test_rule_with_span_that_matches_nothing_is_rejected_in_every_step() -> None:
    with pytest.raises(fp8.PlanError, match="'nope' matches no linear layer"):
        fp8.plan(Net(), fp8.Policy("blockwise", rules=(fp8.Rule("nope", "off", steps=(5, 6)),)), step=1)


def test_schedule_round_trips_through_plan_file(tmp_path) -> None:
    policy = fp8.Policy("rowwise", rules=(fp8.Rule("up", "blockwise"), fp8.Rule("**", "off", steps=(1, 3))))
    model = Net()
    plans = fp8.schedule(model, fp8.plan(model, policy), 8)
    file = fp8.save_plan(plans.main, tmp_path / "plan.json", plans.spans)
    again = fp8.schedule(model, fp8.load_plan(file, model), 8)
    shown = [[(s.first, s.last, [row.recipe for row in s.plan.rows]) for s in found.spans] for found in (plans, again)]
    assert shown[0] == shown[1] and len(shown[0]) == 2
    file.write_text(file.read_text().replace("[1, 3]", '"now"'))
    with pytest.raises(fp8.PlanError, match="steps must be the first and the last step"):
        fp8.load_plan(file, model)


# --- trials ---


@pytest.mark.parametrize("policy", [{}, {"fwd": "bf16", "wgrad": "bf16"}])
def test_trials_change_no_bit_and_match_health(policy) -> None:
    model, plan = make_fp8_net(**policy)
    x, ladder = batch(3.0), build_ladders(plan)
    before = step(model, x)
    trials = RecipeTrials(casts_to_try(plan, ladder, {}))
    with trials.attach(), fp8.health() as health:
        assert is_equal(step(model, x), before)
    found, table = trials.metrics(lambda sums: sums), health.table().get("up", {})
    roles = {("fwd", "x"): "x", ("fwd", "w"): "w", ("dgrad", "dy"): "dy", ("wgrad", "x"): "x_wgrad"}
    checked = 0
    for (gemm, of), role in roles.items():
        for figure in found.get(("up", gemm), {}).get(0, ()):
            if figure.of == of and figure.name in ("sqnr", "underflow"):
                assert figure.value == table[role][figure.name]
                checked += 1
    assert checked == (0 if policy else 6)  # the first layer has no dgrad
    if not policy:
        (cosine,) = [f.value for f in found["up", "wgrad"][0] if f.name == "cosine"]
        assert cosine == pytest.approx(table["dw_cosine"], abs=1e-7)
    assert not recorder.is_watching()


def test_high_precision_gemm_is_tried_in_recipe_below() -> None:
    model, plan = make_fp8_net()
    ladder = build_ladders(plan)
    places = {key: GemmState(len(ladder[key]) - 1, "bf16", step=1) for key in ladder}
    fp8.switch_plan(model, plan, apply_moves(plan, ladder, places))
    stock, x = Net(), batch(1e6)
    trials = RecipeTrials(casts_to_try(plan, ladder, places))
    with trials.attach():
        assert is_equal(step(model, x), step(stock, x))
    found = trials.metrics(lambda sums: sums)
    assert set(found["up", "fwd"]) == {2} and {f.name for f in found["up", "wgrad"][2]} >= {"cosine", "sqnr"}
    _, said = decide(10, places, found, ladder, gemm_costs(plan), Limits(patience=1, budget=1.0))
    back = {(d.layer, d.gemm) for d in said if d.kind == "returns"}
    assert ("down", "wgrad") in back
    # Blocks of x have 128 columns in both.
    assert ("up", "fwd") not in back and ("up", "wgrad") not in back


def test_outlier_moves_only_affected_gemms() -> None:
    model, plan = make_fp8_net()
    ladder, places, log = build_ladders(plan), {}, []
    for number in range(1, 14):
        trials = RecipeTrials(casts_to_try(plan, ladder, places))
        with trials.attach():
            step(model, batch(1e7 if 2 <= number <= 4 else 1.0))
        places, said = decide(number, places, trials.metrics(lambda s: s), ladder, gemm_costs(plan), Limits(patience=2))
        log += [(number, d.gemm, d.kind, d.before, d.after) for d in said]
        assert {d.layer for d in said} <= {"up"}
    assert log == [
        (2, "fwd", "leaves", "tensorwise", "rowwise"), (2, "wgrad", "leaves", "tensorwise", "rowwise"),
        (3, "fwd", "leaves", "rowwise", "blockwise"), (4, "fwd", "refused", "blockwise", "bf16"),
        (6, "fwd", "returns", "blockwise", "rowwise"), (6, "wgrad", "returns", "rowwise", "tensorwise"),
        (8, "fwd", "returns", "rowwise", "tensorwise"),
    ]  # fmt: skip
    assert places == {}


def test_muted_backwards_and_recomputation_report_product_once() -> None:
    model, plan = make_fp8_net()
    seen = []

    class Listener:
        def on_product(self, layer, gemm, a, b):
            seen.append((layer, gemm, tuple(a.shape), tuple(b.shape)))

    with recorder.attach(observer=Listener()):
        y = torch.utils.checkpoint.checkpoint(model, batch().requires_grad_(), use_reentrant=False)
        with recorder.mute_reports():
            y.sum().backward(retain_graph=True)
        y.sum().backward()
    assert sorted(seen) == sorted(
        [
            *(
                ("up", gemm, (64, n), shape)
                for gemm, n, shape in (("fwd", 128, (256, 128)), ("dgrad", 256, (256, 128)))
            ),
            ("up", "wgrad", (64, 256), (64, 128)),
            *(
                ("down", gemm, (64, n), shape)
                for gemm, n, shape in (("fwd", 256, (128, 256)), ("dgrad", 128, (128, 256)))
            ),
            ("down", "wgrad", (64, 128), (64, 256)),
        ]
    )
