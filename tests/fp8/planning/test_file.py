"""Plans as files: the same plan comes back, edits are obeyed, and what does not fit is told with its place."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.base import recipe_specs
from octavo.fp8.measuring.machine import Machine
from octavo.fp8.planning import changed_casts, document, outdated_casts
from tests.fp8.changed_recipe import change_recipe
from tests.fp8.planning.layers import Block, Custom


class Net(nn.Module):
    def __init__(self, width=32, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.odd = Custom(width, width)
        self.lm_head = nn.Linear(width, 64)


@pytest.fixture
def saved(tmp_path):
    policy = fp8.Policy(
        "rowwise", rules=[{"match": "layers.1.up_proj", "recipe": "off"}, {"match": "**.q_proj", "wgrad": "bf16"}]
    )
    plan = fp8.plan(Net(), policy)
    return plan, fp8.save_plan(plan, tmp_path / "deep" / "plan.json")


def fates(plan):
    return {r.name: (r.recipe, {g: s.backend.name for g, s in r.selections.items()}) for r in plan.rows}


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def line_of(path, piece):
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if piece in line)


def test_plan_round_trips_through_file(saved):
    plan, path = saved
    with torch.device("meta"):
        model = Net()
    again = fp8.load_plan(path, model)
    assert fates(again) == fates(plan) and again.share == plan.share
    reasons = {r.name: r.reason for r in again.rows}
    line = line_of(path, '"match": "layers.*.q_proj"')
    assert reasons["layers.0.q_proj"] == f"plan.json, line {line} (rule **.q_proj)"
    twice = fp8.load_plan(fp8.save_plan(again, path.with_name("again.json")), model)
    assert next(r.reason for r in twice.rows if r.name == "layers.0.q_proj").endswith(f", line {line} (rule **.q_proj)")
    assert reasons["lm_head"] == "lm_head stays in high precision" and "subclass" in reasons["odd"]
    fp8.apply(Net(), again)


def test_memory_settings_round_trip(tmp_path):
    parts = {"foundation": {"param": False, "activations": "bf16"}}
    policy = fp8.Policy("rowwise", activations="fp8", param=True, components=parts)
    path = fp8.save_plan(
        fp8.plan(Net(), policy, {"foundation": ("layers.0.**",), "image_encoder": ("**",)}), tmp_path / "p"
    )
    loaded = fp8.load_plan(path, Net()).policy
    assert (loaded.param_of("image_encoder"), loaded.param_of("foundation")) == (True, False)
    assert (loaded.activations_of("image_encoder"), loaded.activations_of("foundation")) == ("fp8", "bf16")
    path = fp8.save_plan(fp8.plan(Net(), fp8.Policy("rowwise", weight_codes="recast")), tmp_path / "q")
    assert fp8.load_plan(path, Net()).policy.weight_codes == "recast"
    with pytest.raises(fp8.PlanError, match="'weight_codes' must be keep, recast or both"):
        fp8.load_plan(edit(path, '"recast"', '"recats"'), Net())


def test_plan_file_is_readable(saved):
    _, path = saved
    text = path.read_text()
    lines = [x for x in text.splitlines() if '"match": ' in x and '"recipe"' in x]
    assert len(lines) == 4  # the projections of q in one line, those of up one by one, since they differ
    assert '{"match": "layers.*.q_proj", "recipe": "rowwise", "format": "e4m3", "wgrad": "bf16", "backend": ' in text
    assert "Edit only layers" in text and json.loads(text)["machine"]["gpu"] == "cpu"
    assert max(map(len, text.splitlines())) < 400


def test_edits_apply_and_later_lines_override(saved):
    _, path = saved
    edit(
        path, '"match": "layers.0.up_proj", "recipe": "rowwise"', '"match": "layers.0.up_proj", "recipe": "tensorwise"'
    )
    edit(path, '"layers": [\n', '"layers": [\n    {"match": "**.q_proj", "recipe": "blockwise"},\n')
    plan = fp8.load_plan(path, Net())
    short = {r.name: r.recipe.name if r.recipe else None for r in plan.rows}
    assert short["layers.0.up_proj"] == "tensorwise" and short["layers.0.q_proj"] == "rowwise"
    text = path.read_text().replace("\n  ]\n}", ',\n    {"match": "layers.2.**", "recipe": "off"}\n  ]\n}')
    path.write_text(text)
    plan = fp8.load_plan(path, Net())
    assert not any(r.fp8 for r in plan.rows if r.name.startswith("layers.2"))
    row = next(r for r in plan.rows if r.name == "layers.2.q_proj")
    assert row.reason == f"plan.json, line {line_of(path, 'layers.2.**')}: off"


def test_unmatched_layers_stay_in_high_precision(saved):
    _, path = saved
    found = json.loads(path.read_text())
    found["layers"] = [x for x in found["layers"] if "q_proj" in x["match"]]
    path.write_text(json.dumps(found))
    plan = fp8.load_plan(path, Net())
    assert next(r for r in plan.rows if r.name == "layers.0.up_proj").reason == "not in the plan file"


EDITS = [
    (
        '"recipe": "rowwise"',
        '"recipe": "rowise"',
        f"recipe 'rowise' does not exist. Did you mean 'rowwise'. Use one of off, {', '.join(recipe_specs.NAMES)}.$",
    ),
    ('"recipe": "rowwise", "format": "e4m3"', '"recipe": "off", "fwd": "fp8"', "fwd, wgrad has no effect if the"),
    ('"recipe": "rowwise"', '"recipe": "auto"', "recipe 'auto' is not allowed in a plan"),
    ('"recipe": "rowwise", "format": "e4m3"', '"recipe": "mxfp8", "format": "hybrid"', "mxfp8.*hybrid"),
    ('"recipe": "rowwise"', '"recpie": "rowwise"', "is not a line of a plan"),
    ('"format": "e4m3"', '"fromat": "e4m3"', "unknown keys 'fromat'"),
    ('"layers.*.q_proj"', '"layers.*.k_proj"', r"'layers.\*.k_proj' matches no linear layer.*layers.\*.q_proj"),
    ('"layers.*.q_proj"', '"odd"', "requests FP8, but none of its 1 layers can run in FP8 .odd: .* is a subclass"),
    ('"layers.*.q_proj"', '"odd"', "requests FP8, but none of its 1 layers can run in FP8 .odd: Custom is a subclass"),
    ('"layers.*.q_proj"', '"a..b"', "empty segment"),
    ('"backend": "reference"', '"backend": "warp"', "There is no backend 'warp'"),
    ('"backend": "reference"', '"backend": {"forward": "torch"}', "a name for each of fwd, dgrad, wgrad"),
]


@pytest.mark.parametrize(("old", "new", "message"), EDITS, ids=[m[:30] for _, _, m in EDITS])
def test_invalid_edit_is_reported_with_line(saved, old, new, message):
    _, path = saved
    where = line_of(path, '"match": "layers.*.q_proj"')
    start, _, rest = path.read_text().partition('"layers": [')
    path.write_text(f'{start}"layers": [{rest.replace(old, new, 1)}')
    with pytest.raises(fp8.PlanError, match=rf"plan.json, line {where}: (.|\n)*{message}"):
        fp8.load_plan(path, Net())


def test_trailing_comma_is_reported_with_line(saved):
    _, path = saved
    path.write_text(path.read_text().replace("}\n  ]\n}", "},\n  ]\n}"))
    last = len(path.read_text().splitlines()) - 1
    with pytest.raises(
        fp8.PlanError, match=rf"plan.json, line ({last}|{last - 1}), column \d+: .*no comma after the last"
    ):
        fp8.load_plan(path, Net())


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        (lambda: Net(width=48), r"layers.\*.q_proj: 3 linear of 32 x 32 in the file, 3 linear of 48 x 48 in the model"),
        (lambda: Net(layers=2), r"layers.\*.q_proj: 3 linear of 32 x 32 in the file, 2 linear of 32 x 32 in the model"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), r"lm_head: 1 lm_head of 64 x 32 in the file, nothing in the model"),
    ],
)
def test_different_model_is_rejected_with_difference(saved, model, difference):
    with pytest.raises(fp8.PlanError, match=rf"plan.json was made for a different model: .*{difference}"):
        fp8.load_plan(saved[1], model())


def test_different_gpu_is_rejected_with_difference(saved, monkeypatch):
    plan, path = saved
    found = json.loads(path.read_text())
    found["machine"] |= {"gpu": "NVIDIA L4", "capability": "8.9"}
    found["layers"][0]["backend"] = "deepgemm"
    path.write_text(json.dumps(found))
    with pytest.raises(fp8.PlanError, match=r"made for NVIDIA L4 \(compute capability 8.9\), but this is a CPU"):
        fp8.load_plan(path, Net())
    again = fp8.load_plan(path, Net(), other_machine=True)
    assert fates(again) == fates(plan) and any("made for NVIDIA L4" in n for n in again.notes)
    here = Machine(gpu="NVIDIA L4", capability="9.0")  # one name, two architectures, as boards before their release
    monkeypatch.setattr(Machine, "detect", lambda device: here)
    with pytest.raises(fp8.PlanError, match=r"capability 8.9\), but this is NVIDIA L4 \(compute capability 9.0\)"):
        fp8.load_plan(path, Net())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not a plan"),
        ("[1]", "is not a plan"),
        ("[" * 100_000, "p.json nests brackets deeper than 64"),
        ('{"octavo_plan": ' + "9" * 5000 + "}", "p.json contains a number of 5000 digits"),
        ('{"octavo_plan": "\\ud800"}', "p.json holds half a character"),
        ('{"policy": {}, "rows": []}', "is the plan.json of an older run, which cannot be loaded"),
        ('{"octavo_plan": 2}', "is not a plan of this version of Octavo: octavo_plan is 2, and this version reads 1"),
        ('{"octavo_plan": 1}', "'machine' must be a GPU with .*, it is missing"),
    ],
)
def test_invalid_plan_file_is_reported(tmp_path, text, message):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(fp8.PlanError, match=message):
        fp8.load_plan(tmp_path / "p.json", Net())
    with pytest.raises(fp8.PlanError, match="none.json is missing"):
        fp8.load_plan(tmp_path / "none.json", Net())
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(fp8.PlanError, match="pipe.json is a named pipe"):
        fp8.load_plan(tmp_path / "pipe.json", Net())


def test_plan_with_too_many_lines_is_rejected(saved):
    """Each would be held against each layer."""
    _, path = saved
    found = json.loads(path.read_text())
    found["layers"] *= 5000
    path.write_text(json.dumps(found))
    with pytest.raises(fp8.PlanError, match="lines in layers; at most 4,096 are allowed"):
        fp8.load_plan(path, Net())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("machine", []), ("machine.gpu", None), ("machine.capability", "abc"), ("machine.capability", [9, 0]),
        ("machine.backends", "x"), ("machine.more", 1), ("model", 3), ("model.0", "x"), ("model.0.shape", 3),
        ("model.0.name", ["x"]), ("model.0.layers", 0), ("components", "x"), ("components", {"foundation": "**"}),
        ("tokens", "x"), ("tokens", {"foundation": -3}), ("tokens", {"foundation": 2.5}), ("micro_steps", "x"),
        ("micro_steps", 0), ("micro_steps", None), ("fuse_blocks", "on"), ("sisters", "x"), ("layers", {}),
    ],
)  # fmt: skip
def test_damaged_key_is_reported(saved, where, value):
    _, path = saved
    found = json.loads(path.read_text())
    inner, parts = found, [int(p) if p.isdecimal() else p for p in where.split(".")]
    for part in parts[:-1]:
        inner = inner[part]
    inner[parts[-1]] = value
    path.write_text(json.dumps(found))
    with pytest.raises(fp8.PlanError, match=rf"plan.json: '{parts[0]}' must be .*, (found|it is)"):
        fp8.load_plan(path, Net())


def test_plan_without_lines_is_rejected(saved):
    _, path = saved
    path.write_text(json.dumps({**json.loads(path.read_text()), "layers": []}))
    with pytest.raises(fp8.PlanError, match="no lines in layers, so nothing would run in FP8. Use fp8.recipe: off"):
        fp8.load_plan(path, Net())


def test_saving_plan_to_folder_is_rejected(saved):
    plan, path = saved
    for target in ("", path.parent):
        with pytest.raises(fp8.PlanError, match="cannot be saved to .* which is a folder"):
            fp8.save_plan(plan, target)
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_plan_json_of_run_is_plan_file(tmp_path):
    plan = fp8.plan(Net(), "blockwise")
    (tmp_path / "plan.json").write_text(json.dumps(document(plan, plan), indent=2))
    assert fates(fp8.load_plan(tmp_path / "plan.json", Net())) == fates(plan)


def test_high_precision_context():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 32)
    stock = model.layers[0].up_proj(x)
    fp8.apply(model, fp8.plan(model, "delayed"))
    layer = model.layers[0].up_proj
    quantized = layer(x)
    assert not torch.equal(quantized, stock)
    before = {k: v.clone() for k, v in fp8.scaling_state(model).items()}
    with fp8.high_precision(model):
        assert torch.equal(layer(x), stock) and type(layer) is nn.Linear
        layer(x.requires_grad_()).sum().backward()
    assert isinstance(layer, fp8.Linear) and all(torch.equal(before[k], v) for k, v in fp8.scaling_state(model).items())
    with pytest.raises(ZeroDivisionError), fp8.high_precision(model):
        raise ZeroDivisionError
    assert isinstance(layer, fp8.Linear)


def test_high_precision_keeps_added_subclass():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 32)
    stock = model.layers[0].up_proj(x)
    fp8.apply(model, fp8.plan(model, "blockwise"))
    layer = model.layers[0].up_proj
    layer.__class__ = type("Wrapped", (type(layer),), {})
    quantized = layer(x)
    with fp8.high_precision(model):
        assert torch.equal(layer(x), stock) and isinstance(layer, fp8.Linear)
    assert torch.equal(layer(x), quantized)


FILES = Path(__file__).parent / "files"


class Attention(nn.Module):
    """As the files of version 0.4.0 know it."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 256), nn.Linear(32, 128), nn.Linear(32, 128, bias=False)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 384, bias=False), nn.Linear(32, 384, bias=False)


def test_file_of_0_4_0_with_fused_siblings():
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(), "mlp": Mlp()}) for _ in range(2))
    plan = fp8.load_plan(FILES / "plan-0.4.0.json", model)
    assert [r.name for r in plan.rows if not r.fp8] == ["layers.1.mlp.up_proj"]
    assert (
        "plan-0.4.0.json is from version 0.4.0, which ran q_proj k_proj v_proj of layers.*.attn, gate_proj up_proj of "
        "layers.0.mlp as one GEMM; now each layer runs a separate GEMM on a shared cast"
    ) in plan.notes
    x = torch.randn(4, 32)
    attention = fp8.apply(model, plan).layers[0]["attn"]
    assert torch.equal(attention.k_proj(x), fp8.linear(x, attention.k_proj.weight, attention.k_proj.bias))


def test_plan_json_of_0_4_0_run(tmp_path):
    assert [g["fused"] for g in json.loads((FILES / "run-0.4.0.json").read_text())["groups"]] == [True]
    model = nn.ModuleDict({"attn": Attention()})
    plan = fp8.load_plan(FILES / "run-0.4.0.json", model)
    assert all(r.fp8 for r in plan.rows) and any("now each layer runs a separate GEMM" in note for note in plan.notes)
    again = fp8.load_plan(fp8.save_plan(plan, tmp_path / "new.json"), model)
    assert fates(again) == fates(plan) and not any("0.4.0" in note for note in again.notes)


def test_policy_of_0_4_0_notes_meaning_of_auto():
    plan = fp8.plan(nn.ModuleDict({"attn": Attention()}), fp8.Policy(fuse="auto"))
    assert [note for note in plan.notes if note.startswith("fuse: auto means off")] and not plan.blocks
    assert not any("auto" in note for note in fp8.plan(Net(), fp8.Policy(fuse="on")).notes)
    with pytest.raises(fp8.PlanError, match="fuse='maybe' does not exist; use 'off' or 'on'"):
        fp8.Policy(fuse="maybe")


@pytest.mark.parametrize(
    "sisters",
    [
        [1, 2],
        [{"match": "**", "fuse": True}],
        [{"match": "**", "fuse": "maybe"}],
        [{"match": 5, "fuse": "on"}],
        [{"match": "layers..mlp", "fuse": "on"}],
        [{"match": "**", "fuse": "on", "names": 3}],
        [{"match": "**", "fuse": "on", "more": 1}],
    ],
)
def test_invalid_siblings_of_0_4_0_are_rejected(saved, sisters):
    _, path = saved
    path.write_text(json.dumps({**json.loads(path.read_text()), "sisters": sisters}))
    with pytest.raises(fp8.PlanError, match=r"plan.json: 'sisters' must be a list of lines with .*, found"):
        fp8.load_plan(path, Net())


def test_missing_siblings_of_0_4_0_are_ignored(saved):
    _, path = saved
    away = {"match": "nowhere.**", "fuse": "on"}
    other = {"match": "layers.*", "names": "gate_proj", "fuse": "on"}
    here = {"match": "layers.*", "names": "up_proj down_proj", "fuse": "on", "why": "fuse: on", "ms": {"bf16": None}}
    for sisters, count in (([away, {**here, "fuse": "off"}], 1), ([away, other, here], 2)):
        path.write_text(json.dumps({**json.loads(path.read_text()), "sisters": sisters}))
        notes = fp8.load_plan(path, Net()).notes
        ignored = [n for n in notes if "in sisters, from version 0.4.0, matches no layer of this model and is ign" in n]
        assert len(ignored) == count and "'nowhere.**'" in ignored[0]
        ran = [n for n in notes if "as one GEMM" in n]
        assert len(ran) == count - 1 and all("ran up_proj down_proj of layers.* as one GEMM" in n for n in ran)


def test_plan_keeps_its_casts_if_a_later_version_changes_them(tmp_path, monkeypatch):
    rules = [{"match": "layers.0.**", "wgrad": "bf16"}, {"match": "layers.1.**", "recipe": "rowwise", "steps": [1, 2]}]
    policy = fp8.Policy("blockwise", rules=rules)
    plan = fp8.plan(Net(), policy)
    path = fp8.save_plan(plan, tmp_path / "plan.json", fp8.schedule(Net(), plan, 4).spans)
    written = path.read_text()
    change_recipe(monkeypatch)
    assert fp8.plan(Net(), policy) != plan, "a new plan has the casts of this version"
    loaded = fp8.load_plan(path, Net())
    assert fates(loaded) == fates(plan) and fates(fp8.schedule(Net(), loaded, 4).at(1)) != fates(plan)
    assert loaded.changes == (
        "plan.json keeps the casts that it was saved with: blockwise (e4m3): wgrad x e4m3 128x128 pow2 (now "
        "e4m3 128x1 pow2)",
    )
    assert "CastTable" not in repr(loaded.policy) and "casts" not in loaded.policy.to_json()
    fp8.save_plan(loaded, path, fp8.schedule(Net(), loaded, 4).spans)
    assert json.loads(path.read_text())["casts"] == json.loads(written)["casts"]
    assert fates(fp8.load_plan(path, Net())) == fates(plan)


def test_file_without_casts_has_those_of_0_5_0(tmp_path):
    rules = [{"match": "layers.0.**", "format": "hybrid"}, {"match": "layers.1.**", "recipe": "rowwise"}]
    path = fp8.save_plan(fp8.plan(Net(), fp8.Policy("blockwise", rules=rules)), tmp_path / "plan.json")
    document = json.loads(path.read_text())
    del document["casts"]
    path.write_text(json.dumps(document))
    loaded = fp8.load_plan(path, Net())
    recipes = {(row.recipe.name, row.recipe.format): row.recipe for row in loaded.rows if row.recipe is not None}
    assert set(recipes) == {("blockwise", "e4m3"), ("blockwise", "hybrid"), ("rowwise", "e4m3")}
    for form in ("e4m3", "hybrid"):
        assert replace(recipes["blockwise", form], name="blockwise_1d") == fp8.recipe("blockwise_1d", form)
    assert recipes["rowwise", "e4m3"] == fp8.recipe("rowwise")
    assert all(f"blockwise ({form}): wgrad x e4m3 128x1" in loaded.changes[0] for form in ("e4m3", "hybrid"))
    fork = fp8.schedule(Net(), fp8.plan(Net(), "blockwise"), 4)
    changes = ["blockwise (e4m3): wgrad x e4m3 128x1 pow2 (now e4m3 128x128 pow2)"]
    assert changed_casts(document, path, fork) == changes == outdated_casts(document, path)[1:]


def test_edited_words_have_the_casts_of_the_file(tmp_path, monkeypatch):
    before = {r.name: r.recipe for r in fp8.plan(Net(), "blockwise").rows}
    path = fp8.save_plan(fp8.plan(Net(), fp8.Policy("rowwise")), tmp_path / "plan.json")
    path.write_text(path.read_text().replace('"recipe": "rowwise"', '"recipe": "blockwise"'))
    change_recipe(monkeypatch)
    assert {r.name: r.recipe for r in fp8.load_plan(path, Net()).rows} == before


def test_file_without_casts_has_those_of_this_version(saved):
    plan, path = saved
    found = json.loads(path.read_text())
    del found["casts"]
    path.write_text(json.dumps(found))
    assert fates(fp8.load_plan(path, Net())) == fates(plan)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fwd": "e4m3 row pow2 @', '"fwd": "e4m3 rows pow2 @', "'rowwise e4m3': fwd: 'e4m3 rows pow2' is not a cast"),
        ('"rowwise e4m3"', '"rowwise"', "'rowwise' is not a recipe and a format"),
    ],
)
def test_damaged_casts_are_reported_with_file_and_key(saved, old, new, message):
    _, path = saved
    edit(path, old, new)
    with pytest.raises(fp8.PlanError, match=f"plan.json: 'casts' {message}(.|\n)*Restore it; without 'casts' recipes"):
        fp8.load_plan(path, Net())
