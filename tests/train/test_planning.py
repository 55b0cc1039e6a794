"""A configuration as a policy and a plan, without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from octavo import data, fp8, models, parallel, train
from octavo.config import override
from octavo.fp8.measuring import Machine
from octavo.fp8.measuring.timing import Timing
from octavo.train.setup import planning, token_counts
from octavo.train.setup.planning import plan_for, policy_from

pytestmark = pytest.mark.usefixtures("bare_forward")


def test_every_level_of_the_fp8_section_reaches_the_policy(make):
    cfg = make(
        "fp8.recipe=tensorwise",
        "fp8.format=e4m3",
        "fp8.dgrad=bf16",
        "fp8.image_encoder={recipe: rowwise, wgrad: bf16}",
        'fp8.rules=[{match: "**.layers.0.**", recipe: off}, {match: "**.down_proj", wgrad: bf16}]',
        "fp8.backend=reference",
    )
    policy = policy_from(cfg)
    assert (policy.recipe, policy.format, policy.fwd, policy.dgrad, policy.wgrad) == (
        "tensorwise", "e4m3", "fp8", "bf16", "fp8"
    )  # fmt: skip
    assert policy.backend == "reference"
    assert policy.components == {"image_encoder": fp8.ComponentPolicy(recipe="rowwise", wgrad="bf16")}
    assert policy.rules == (fp8.Rule("**.layers.0.**", recipe="off"), fp8.Rule("**.down_proj", wgrad="bf16"))


def test_the_plan_reads_no_weights(make, place: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    shutil.copytree(place / "tiny", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    plan, family, notes = plan_for(make(f"model.path={bare}"))
    assert family.name == "qwen3_vl"
    assert {plan.share_of(c) for c in ("foundation", "image_encoder", "image_projector")} == {1.0}
    assert any("norms in high precision" in note for note in notes)


def test_off_gives_a_plan_with_every_row_off(make):
    plan, _, _ = plan_for(make("fp8.recipe=off"))
    assert plan.rows and not any(row.fp8 for row in plan.rows)


def test_frozen_layers_are_planned_without_a_weight_gradient(make):
    plan, _, _ = plan_for(make("model.freeze=[image_encoder]"))
    frozen = {row.component: row.row.frozen for row in plan.rows}
    assert frozen["image_encoder"] and not frozen["foundation"]


def test_tensorwise_says_that_its_amax_is_local(make):
    _, _, notes = plan_for(make("fp8.recipe=tensorwise"), ranks=2)
    assert any("amax is local to each" in note for note in notes)


def test_delayed_on_ranks_says_that_histories_are_shared(make):
    _, _, notes = plan_for(make("fp8.recipe=delayed"), ranks=2)
    assert any("amax histories are reduced over all ranks after each step" in note for note in notes)


def test_a_rule_that_matches_nothing_is_the_plan_error(make):
    with pytest.raises(fp8.PlanError, match="matches no linear layer"):
        plan_for(make('fp8.rules=[{match: "**.nowhere.**", recipe: off}]'))


GPU = Machine("Fake H200", "9.0", "1", "2.11", "13.0", {})


def known_times(case, calls, device):
    """FP8 wins for the decoder's MLP alone, and tensorwise by most."""
    out = {}
    for name in calls:
        seconds = 1.0
        if name != "high precision":
            wins = case.k >= 2 * case.n or case.n >= 2 * case.k
            seconds = (0.5 if name.startswith("tensorwise") else 0.7) if wins else 1.3
        out[name] = Timing(seconds, 0.0, 0.0, 4)
    return out


@pytest.fixture
def fake_gpu(monkeypatch):
    """A machine with a GPU whose times are known, as far as planning sees; gives the cases that were measured."""
    seen = []

    def measured(cfg, model, family, device, counted, progress=None, cache=None):
        def timer(case, calls, device):
            seen.append(case)
            return known_times(case, calls, device)

        return fp8.measure(
            model, policy_from(cfg), family.components, counted.counts, device="cpu", timer=timer, machine=GPU
        )

    monkeypatch.setattr(planning, "measure_recipes", measured)
    return seen


def plan_on_a_gpu(cfg, saved=None):
    processor = models.load_processor(cfg.model.path)

    def count(family, model):
        return token_counts.count_tokens(cfg, processor, family, model.config)

    world = parallel.World(device=torch.device("cuda"))
    plans, *rest = planning.plan_run(cfg, world, count, saved, lambda text: None)
    return plans.main, *rest


def test_auto_is_measured_with_the_tokens_of_the_data(make, fake_gpu):
    cfg = make("fp8.recipe=auto")
    plan, family, notes, prediction = plan_on_a_gpu(cfg)
    counts = plan.tokens
    assert set(counts) == set(family.components) and all(counts.values())
    assert counts["image_projector"] * 4 == pytest.approx(counts["image_encoder"], abs=64)
    assert {c.m for c in fake_gpu} <= set(counts.values()) and plan.micro_steps == 2
    assert plan.rows and any(r.fp8 for r in plan.rows)
    for row in plan.rows:
        assert row.times is None or row.times.planned <= row.times.high
        assert not row.fp8 or (row.recipe.name == "tensorwise" and row.times.planned < row.times.high)
    assert prediction.gain > 0 and {"attention", "lm_head"} <= prediction.estimated.keys()
    assert any("measured on Fake H200" in n for n in notes)


def test_token_counts_match_the_loader(make):
    cfg = make("data.workers=1")
    processor = models.load_processor(cfg.model.path)
    model, family = planning.meta_model(cfg)
    found = token_counts.count_tokens(cfg, processor, family, model.config)
    small = cfg.model_copy(update={"train": cfg.train.model_copy(update={"global_batch": cfg.train.micro_batch})})
    loader = data.train_loader(small, processor)
    batches = [batch for _ in range(token_counts.MICRO_BATCHES) for batch in next(loader)]
    loader.close()
    mean = sum(b["input_ids"].numel() for b in batches) / len(batches)
    patches = sum(len(b["pixel_values"]) for b in batches) / len(batches)
    assert 0 <= found.counts["foundation"] - mean < 17 and 0 <= found.counts["image_encoder"] - patches < 17
    assert found.counts["lm_head"] == found.counts["foundation"] and found.row == pytest.approx(mean / 2, abs=1)


def test_tokens_of_a_model_without_images(make, place):
    cfg = make(f"model.path={place / 'text'}")
    model, family = planning.meta_model(cfg)
    given = token_counts.complete_tokens(cfg, family, {"foundation": 256})
    assert given.counts == {"foundation": 256, "lm_head": 256} and given.row == 128
    text = model.config
    want = 3.5 * 2 * 256 * 128 * text.head_dim * text.num_attention_heads * text.num_hidden_layers
    assert token_counts.attention_flops(model.config, given) == want
    unknown = "tokens were given for image_encoder, but qwen3 has no such component; it has foundation, lm_head"
    with pytest.raises(train.TrainError, match=unknown):
        token_counts.complete_tokens(cfg, family, {"foundation": 1, "image_encoder": 1})
    with pytest.raises(train.TrainError, match="tokens are missing for foundation"):
        token_counts.complete_tokens(cfg, family, {})


def test_auto_by_component_measures_that_component_alone(make, fake_gpu):
    cfg = make("fp8.recipe=off", "fp8.foundation={recipe: auto}")
    plan, _, _, _ = plan_on_a_gpu(cfg)
    assert {r.component for r in plan.rows if r.fp8} == {"foundation"}
    assert {c.m for c in fake_gpu} == {plan.tokens["foundation"]}


def test_auto_without_gpu_notes_that_nothing_was_measured(make, fake_gpu):
    plan, _, notes = plan_for(make("fp8.recipe=auto"))
    assert {r.recipe.name for r in plan.rows if r.fp8} == {"blockwise"} and not fake_gpu
    assert any("nothing was measured" in n and "docs/plan.md" in n for n in notes)
    named, _, _ = plan_for(make("fp8.recipe=auto", "fp8.candidates=[rowwise]"))
    assert {r.recipe.name for r in named.rows if r.fp8} == {"rowwise"}


def test_resumed_auto_run_keeps_its_plan(make):
    cfg = make("fp8.recipe=auto", "train.steps=3", "run.save_every=1", "data.eval=[]")
    first = train.run(cfg)
    kept = json.loads((first.dir / "plan.json").read_text())
    assert kept["octavo_plan"] == 1 and any("nothing was measured" in n for n in kept["notes"])
    assert {r["recipe"]["name"] for r in kept["rows"] if r["recipe"]} == {"blockwise"}
    for line in kept["layers"]:  # as if it had been measured elsewhere
        if line["recipe"] == "blockwise":
            line["recipe"] = "rowwise"
    kept["machine"] |= {"gpu": "NVIDIA L4", "capability": "8.9"}
    (first.dir / "plan.json").write_text(json.dumps(kept))
    model, _, _ = train.load_run(first.dir)
    assert {m.recipe.name for m in model.modules() if isinstance(m, fp8.Linear)} == {"rowwise"}
    plan, _, _, _ = plan_on_a_gpu(cfg, first.dir / "plan.json")
    assert {r.recipe.name for r in plan.rows if r.fp8} == {"rowwise"}
    assert any("made for NVIDIA L4" in n for n in plan.notes)


def test_a_plan_file_decides_and_its_run_resumes(make, tmp_path):
    plan, _, _ = plan_for(make("fp8.recipe=rowwise"))
    file = fp8.save_plan(plan, tmp_path / "plan.json")
    text = file.read_text()
    at = text.index('"recipe": "rowwise"')
    file.write_text(text[:at] + '"recipe": "tensorwise"' + text[at + len('"recipe": "rowwise"') :].replace(
        '"format": "e4m3"', '"format": "hybrid"', 1))  # fmt: skip
    cfg = make(f"fp8.plan={file}", "train.steps=2", "train.warmup=0", "run.save_every=1", "data.eval=[]")
    first = train.run(cfg)
    proof = json.loads((first.dir / "proof.json").read_text())
    assert proof["fp8_gemms"] > 0
    rows = json.loads((first.dir / "plan.json").read_text())["rows"]
    assert {r["recipe"]["name"] for r in rows if r["recipe"]} == {"rowwise", "tensorwise"}
    file.unlink()  # the run has its own
    (first.dir / "result.json").unlink()
    again = train.run(override(cfg, [f"run.resume={first.dir}/checkpoints/step_1"]))
    assert again.losses() == first.losses()


def test_copied_checkpoint_contains_its_plan(make, tmp_path, monkeypatch):
    cfg = make("fp8.recipe=auto", "train.steps=2", "train.warmup=0", "run.save_every=1", "data.eval=[]")
    first = train.run(cfg)
    shutil.copytree(first.dir / "checkpoints" / "step_1", tmp_path / "away" / "step_1")
    over = [f"run.resume={tmp_path / 'away' / 'step_1'}", f"run.dir={tmp_path / 'second'}"]
    console = Console(record=True, width=400, force_terminal=False)
    second = train.run(override(cfg, over), console=console)
    assert "a resumed run uses its saved plan" in console.export_text()
    assert second.losses()[2] == first.losses()[2]
    ours, theirs = (json.loads((r.dir / "plan.json").read_text()) for r in (second, first))
    assert ours["layers"][0].keys() == theirs["layers"][0].keys() and len(ours["rows"]) == len(theirs["rows"])
    monkeypatch.setattr(
        "octavo.train.setup.resume.read_state", lambda path: {"counters": {}}
    )  # as an older run wrote it
    with pytest.raises(train.TrainError, match=r"is neither in that checkpoint nor in .*Copy the run's plan.json"):
        train.run(override(cfg, [*over[:1], f"run.dir={tmp_path / 'third'}"]))


def test_resumed_run_uses_its_saved_plan(make):
    """Version 0.4.0 left the projector in high precision under `recipe: blockwise`; its runs go on so."""
    cfg = make("train.steps=2", "train.warmup=0", "run.save_every=1", "data.eval=[]")
    first = train.run(cfg)
    assert json.loads((first.dir / "proof.json").read_text())["shares"]["image_projector"] == 1.0
    file = first.dir / "plan.json"
    plan = json.loads(file.read_text())
    for line in plan["layers"]:
        if ".merger." in line["match"] or ".deepstack_merger_list." in line["match"]:
            match = line["match"]
            line.clear()
            line.update(match=match, recipe="off", why="the projector stays unless asked")
    file.write_text(json.dumps(plan))
    (first.dir / "result.json").unlink()
    train.run(override(cfg, [f"run.resume={first.dir}/checkpoints/step_1"]))
    proof = json.loads((first.dir / "proof.json").read_text())
    assert proof["shares"]["image_projector"] == 0.0 and proof["shares"]["foundation"] == 1.0
    assert json.loads(file.read_text()) == plan
    loaded = train.load_run(first.dir, log=lambda text: None)[0]
    assert not any(isinstance(m, fp8.Linear) for name, m in loaded.named_modules() if "merger" in name)


def test_plan_notes_that_an_fp8_forward_raises_the_loss_of_pretrained_weights(make):
    def offers(*words: str) -> bool:
        return any(planning.FORWARD_SETTING in note for note in plan_for(make(*words))[2])

    assert offers("fp8.recipe=blockwise") and offers("fp8.image_encoder.recipe=off")
    for word in (planning.FORWARD_SETTING, "fp8.recipe=off", "model.init=random", "fp8.param=true"):
        assert not offers(word), word
    towers_off = ("fp8.image_encoder.recipe=off", "fp8.image_projector.recipe=off")
    assert offers(*towers_off)
    base = (*towers_off, "lora.rank=4", "model.load_in_fp8=blockwise")
    assert any("LoRA on an FP8 base" in note for note in plan_for(make(*base))[2])
    assert not offers(*base, planning.FORWARD_SETTING)
