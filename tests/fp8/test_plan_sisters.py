"""Sisters in the plan: what was measured of them together decides, on fake machines whose times are known; and the
plan file keeps it."""

import importlib
import json

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8 import fusion
from octavo.fp8.measuring.cases import HIGH, Case
from octavo.fp8.measuring.timing import Timed
from octavo.fp8.proof.prediction import predict

measure = importlib.import_module("octavo.fp8.measuring.bench")
GPU = fp8.Machine("Fake H200", "9.0", "999.1", "2.11", "13.0", {"reference": "1"})
TOKENS = {"foundation": 64}


class Attention(nn.Module):
    def __init__(self, q=256, kv=128, k=32):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(k, q), nn.Linear(k, kv), nn.Linear(k, kv, bias=False)

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x) * self.v_proj(x)], -1)


class Mlp(nn.Module):
    def __init__(self, k=32, n=384):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)

    def forward(self, x):
        return self.gate_proj(x) * self.up_proj(x)


class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(), "mlp": Mlp()}) for _ in range(layers))


def times(high, cast, joined, launch=0.0):
    """A machine: BF16 takes ``high`` an output, FP8 half of it and ``cast`` more for each cast of an input; as one GEMM
    ``joined`` times what apart takes, and ``launch`` less for each GEMM that is saved."""

    def seconds(case, name):
        outputs = case.outputs or (case.n,)
        if name == HIGH:
            return high * sum(outputs)
        apart = high * sum(outputs) / 2 + cast
        return apart * joined - launch * (len(outputs) - 1) if name.endswith(", joined") else apart

    return seconds


def measured(model, policy, seconds, seen=None, **more):
    def timer(case, calls, device):
        if seen is not None:
            seen.append(case)
        return {name: Timed(seconds(case, name.removesuffix(", cold")), 0.0, 0.0, 4) for name in calls}

    return fp8.measure(model, policy, None, TOKENS, timer=timer, machine=GPU, **more)


def planned(seconds, model=None, **policy):
    model = model or Net()
    policy = fp8.Policy(**{"recipe": "blockwise", **policy})
    found = measured(model, policy, seconds)
    plan = fp8.plan(model, policy, tokens=TOKENS, measurements=found)
    for row in plan.rows:  # no planned layer, and no group of them, is slower than high precision
        assert row.times is None or row.times.planned <= row.times.high
    for group in plan.groups:
        assert group.choice.planned <= group.choice.high * (1 if group.choice.layout == "alone" else 0.98)
    return model, plan


def fused(plan):
    return [g.names for g in plan.groups if g.fused]


def test_sisters_are_cases_of_their_own():
    model = Net()
    seen = []
    measured(model, "blockwise", times(1e-3, 0.0, 1.0), seen)
    assert Case("sisters", 64, 512, 32, True, outputs=(256, 128, 128), biases=(0, 1)) in seen
    assert sum(c.kind == "sisters" for c in seen) == 2 and len(set(seen)) == len(seen)
    assert "sisters M=64 N=256+128+128 K=32 fp32 bias" in map(str, seen)
    model.layers[0]["attn"].k_proj.requires_grad_(False)  # of which one has no wgrad: not the same case
    cases = measure.cases_of_sisters(model, measure.cases_of(model, fp8.topology(model), TOKENS))
    assert [names[0] for names in cases] == ["layers.0.mlp.gate_proj", "layers.1.attn.q_proj", "layers.1.mlp.gate_proj"]


def test_where_one_gemm_wins_it_is_planned_and_runs():
    model, plan = planned(times(1e-3, 0.01, 0.8), recipe="auto")
    assert len(fused(plan)) == 4 and plan.policy.fuse == "auto"
    assert "joined 212.80 ms (blockwise e4m3 on reference, joined)" in plan.groups[0].reason
    assert any(".view(-1)" in note for note in plan.notes)
    text = plan.table()
    assert "one GEMM: layers.{0,1}.attn.q_proj + k_proj + v_proj, 2 groups (measured together: BF16" in text
    kept = json.loads(json.dumps(plan.to_json()))["groups"][0]
    assert kept["fused"] and kept["measured"]["joined_ms"] == pytest.approx(212.8)
    assert kept["measured"]["planned_ms"] < kept["measured"]["apart_ms"] < kept["measured"]["bf16_ms"]
    assert "spans all outputs" in kept["measured"]["candidates"]["rowwise e4m3 on reference, joined"]
    step = predict(plan)  # the layers' parts add up to what the groups take
    assert step.linear_planned == pytest.approx(sum(g.choice.planned for g in plan.groups))
    fp8.apply(model, plan)
    assert fusion.fused(model) == tuple(fused(plan))


@pytest.mark.parametrize("joined", [1.3, 1.0, 0.985])
def test_where_one_gemm_loses_or_ties_they_run_apart(joined):
    model, plan = planned(times(1e-3, 0.01, joined))
    assert not fused(plan) and all(r.fp8 for r in plan.rows)
    for group in plan.groups:  # each chose FP8 for itself: what they share is known from what they took together
        assert group.choice.layout == "alone" and group.choice.alone == pytest.approx(group.choice.apart)
    fp8.apply(model, plan)
    assert not fusion.fused(model)
    assert "GEMMs of their own: layers.{0,1}.mlp.gate_proj + up_proj" in plan.table()


def test_k_and_v_that_lose_alone_win_with_q():
    """k and v alone pay a cast each and lose; on the cast of q they win, and as one GEMM by more."""
    seconds = times(1e-3, 0.08, 0.9)
    for fuse, one in (("off", False), ("auto", True)):
        _, plan = planned(seconds, fuse=fuse)
        rows = {r.name: r for r in plan.rows}
        k = rows["layers.0.attn.k_proj"]
        assert k.times.fp8 > k.times.high > k.times.planned  # loses alone
        assert k.fp8 and rows["layers.0.attn.q_proj"].fp8
        assert (("layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.0.attn.v_proj") in fused(plan)) == one
        assert plan.groups[0].choice.layout == ("joined" if one else "apart")
        assert plan.groups[0].choice.alone == pytest.approx(1e-3 * (128 + 256) + 0.08)
    # as one GEMM alone: apart they lose whatever they share
    _, plan = planned(lambda c, n: times(1e-3, 0.3, 1.0)(c, n) - 0.2 * n.endswith(", joined"))
    assert {g.names[0] for g in plan.groups} == {
        f"layers.{i}.{n}" for i in (0, 1) for n in ("attn.q_proj", "mlp.gate_proj")
    }
    assert all(g.fused for g in plan.groups)


def test_what_each_chooses_for_itself_stays_where_sharing_wins_nothing():
    def seconds(case, name):  # a machine on which FP8 is fast for q alone
        high = 1e-3 * sum(case.outputs or (case.n,))
        if name == HIGH:
            return high
        return high * (0.5 if case.outputs == () and case.n == 256 else 1.5)

    _, plan = planned(seconds)
    assert [r.name for r in plan.rows if r.fp8] == ["layers.0.attn.q_proj", "layers.1.attn.q_proj"]
    assert (
        "not all of them run in FP8; measured together: BF16 512.00 ms, each for itself 384.00 ms"
        in plan.groups[0].reason
    )
    mlp = plan.groups[1]  # where all stay in high precision, what was measured is shown as well
    assert not mlp.fused and mlp.reason.startswith("measured together: BF16 768.00 ms, each for itself 768.00 ms")
    assert {g.choice.layout for g in plan.groups} == {"alone"}


def test_on_asks_of_one_gemm_only_that_it_beats_high_precision():
    assert len(fused(planned(times(1e-3, 0.01, 1.1), fuse="on")[1])) == 4
    _, plan = planned(times(1e-3, 0.01, 2.5), fuse="on")
    assert not fused(plan) and all(r.fp8 for r in plan.rows)
    assert any("fuse is on, and no group" in note for note in plan.notes)


def test_without_measurements_on_fuses_and_auto_does_not():
    on = fp8.plan(Net(), fp8.Policy(fuse="on"))
    assert len(fused(on)) == 4 and {g.reason for g in on.groups} == {"fuse: on"}
    auto = fp8.plan(Net(), "blockwise")
    assert {g.reason for g in auto.groups} == {"fuse: auto, and nothing was measured"} and not fused(auto)
    row = fp8.plan(Net(), fp8.Policy("rowwise", fuse="on"))
    assert not fused(row) and all("spans all outputs" in g.reason for g in row.groups)
    assert "spans all outputs of a layer" in row.table()
    part = fp8.plan(Net(), fp8.Policy(fuse="on", rules=[fp8.Rule("layers.0.attn.k_proj", recipe="off")]))
    assert [g.reason for g in part.groups if not g.fused] == ["not all of them run in FP8"]
    assert not fp8.plan(Net(), fp8.Policy(recipe="off", fuse="on")).groups


def test_the_plan_is_made_on_the_meta_device_and_checked_when_it_is_applied():
    with torch.device("meta"):
        plan = fp8.plan(Net(), fp8.Policy(fuse="on"))
    model = Net()
    model.layers[0]["mlp"].up_proj.requires_grad_(False)
    with pytest.raises(
        fp8.PlanError, match=r"gate_proj and .*up_proj were planned to run as one GEMM and cannot: froz"
    ):
        fp8.apply(model, plan)
    assert len(fusion.fused(fp8.apply(Net(), plan))) == 4


def test_tied_sisters_are_never_one():
    model = Net()
    for layer in model.layers:
        layer["mlp"].up_proj.weight = layer["mlp"].gate_proj.weight
    _, plan = planned(times(1e-3, 0.01, 0.5), model)
    assert {g.reason.partition(";")[0] for g in plan.groups if not g.fused} == {"tied weights"} and len(
        fused(plan)
    ) == 2


def test_a_cache_made_without_fusing_is_added_to(tmp_path):
    model, cache, seen = Net(), fp8.Cache(tmp_path / "m.json"), []
    seconds = times(1e-3, 0.01, 0.8)
    off = measured(model, fp8.Policy(fuse="off"), seconds, cache=cache)
    assert not any(e.layout == "joined" for m in off.cases.values() for e in m.entries.values())
    auto = measured(model, "blockwise", seconds, seen, cache=cache)
    assert {c.kind for c in seen} == {"sisters"}
    seen.clear()
    assert measured(model, "blockwise", seconds, seen, cache=cache) == auto and not seen
    assert measured(model, fp8.Policy(fuse="off"), seconds, seen, cache=cache) == off and not seen


def test_a_candidate_that_did_not_run_as_one_is_out(monkeypatch):
    monkeypatch.setattr(fusion.Group, "output", lambda self, member, x: None)
    _, plan = planned(times(1e-3, 0.01, 0.5))
    assert not fused(plan)
    found = plan.groups[0].to_json()["measured"]["candidates"]["blockwise e4m3 on reference, joined"]
    assert found == "its layers did not run as one"


# The file


def file_of(tmp_path, **policy):
    plan = fp8.plan(Net(), fp8.Policy(**{"fuse": "on", **policy}))
    return plan, fp8.save_plan(plan, tmp_path / "plan.json")


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_file_keeps_what_runs_as_one(tmp_path):
    plan, path = file_of(tmp_path, rules=[fp8.Rule("layers.1.mlp.up_proj", recipe="off")])
    again = fp8.load_plan(path, Net())
    assert fused(again) == fused(plan) and len(fused(plan)) == 3
    assert [g.reason.partition(",")[0] for g in again.groups] == ["plan.json"] * 4
    assert fp8.load_plan(fp8.save_plan(again, tmp_path / "b.json"), Net()).groups[0].fused
    lines = json.loads(path.read_text())["sisters"]
    assert [(x["match"], x["names"], x["fuse"]) for x in lines] == [
        ("layers.*.attn", "q_proj k_proj v_proj", "on"),
        ("layers.0.mlp", "gate_proj up_proj", "on"),
        ("layers.1.mlp", "gate_proj up_proj", "off"),
    ]
    fp8.apply(model := Net(), again)
    assert len(fusion.fused(model)) == 3
    _, off = file_of(tmp_path, fuse="off")
    assert not fused(fp8.load_plan(off, Net()))


def test_a_measured_plan_comes_back(tmp_path):
    _, plan = planned(times(1e-3, 0.01, 0.8))
    path = fp8.save_plan(plan, tmp_path / "plan.json")
    assert json.loads(path.read_text())["sisters"][0]["ms"]["joined"] == pytest.approx(212.8)
    with pytest.raises(fp8.PlanError, match="made for Fake H200"):
        fp8.load_plan(path, Net())
    assert fused(fp8.load_plan(path, Net(), other_machine=True)) == fused(plan)


def test_edits_of_sisters_are_obeyed(tmp_path):
    _, path = file_of(tmp_path)
    edit(path, '  "sisters": [\n', '  "sisters": [\n    {"match": "**", "fuse": "on"},\n')
    edit(path, '"names": "gate_proj up_proj", "fuse": "on"', '"names": "gate_proj up_proj", "fuse": "off"')
    plan = fp8.load_plan(path, Net())
    assert {n[0] for n in fused(plan)} == {"layers.0.attn.q_proj", "layers.1.attn.q_proj"}
    # one layer taken out of FP8: the others of the line still run as one
    edit(path, '  "layers": [\n', '  "layers": [\n    {"match": "**", "recipe": "blockwise"},\n')
    text = path.read_text()
    path.write_text(text.replace("\n  ]\n}", ',\n    {"match": "layers.0.attn.k_proj", "recipe": "off"}\n  ]\n}'))
    plan = fp8.load_plan(path, Net())
    assert {n[0] for n in fused(plan)} == {"layers.1.attn.q_proj"}
    assert plan.groups[0].reason == "not all of them run in FP8"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"layers.*.attn"', '"layers.*.atn"', r"names no module .*q_proj k_proj v_proj; .*layers\.\*\.attn"),
        ('"fuse": "on"', '"fuse": "yes"', "is no line of sisters"),
        ('"fuse": "on"', '"fsue": "on"', "is no line of sisters"),
        ('"names": "q_proj', '"name": "q_proj', "unknown 'name'"),
        ('"names": "q_proj k', '"names": "q_prj k', "names no module"),
        ('"layers.*.attn"', '"a..b"', "empty segment"),
        ('"layers.*.attn"', "3", "match is a glob"),
    ],
)
def test_a_line_of_sisters_that_cannot_be_met_is_told_with_its_place(tmp_path, old, new, message):
    _, path = file_of(tmp_path)
    where = next(i for i, line in enumerate(path.read_text().splitlines(), 1) if '"layers.*.attn"' in line)
    edit(path, old, new)
    with pytest.raises(fp8.PlanError, match=rf"plan.json, line {where}: (.|\n)*{message}"):
        fp8.load_plan(path, Net())


def test_one_gemm_asked_of_a_recipe_that_cannot_is_told(tmp_path):
    _, path = file_of(tmp_path)
    path.write_text(path.read_text().replace('"recipe": "blockwise"', '"recipe": "rowwise"'))
    with pytest.raises(
        fp8.PlanError, match=r"plan.json, line \d+: .*cannot run as one GEMM: one scale of w.*fuse to off"
    ):
        fp8.load_plan(path, Net())
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "sisters": {}}))
    with pytest.raises(fp8.PlanError, match="no usable 'sisters'"):
        fp8.load_plan(path, Net())
    del found["sisters"]  # a file of before there were any
    path.write_text(json.dumps(found))
    assert {g.reason for g in fp8.load_plan(path, Net()).groups} == {"not in the plan file"}
