"""A configuration as a policy and a plan, without weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo import fp8
from octavo.train.planning import plan_for, policy_from


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
    assert plan.share_of("foundation") == plan.share_of("image_encoder") == 1.0
    assert plan.share_of("image_projector") == 0.0
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
