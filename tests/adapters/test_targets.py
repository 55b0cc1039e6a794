"""Targets of adapters: components, globs, suffixes, unadaptable layers and patterns without a match."""

from __future__ import annotations

import pytest
import torch

from octavo import models
from octavo.adapters import AdapterError
from octavo.adapters.targets import resolve_targets
from octavo.models import tiny_config
from tests.adapters.conftest import FAMILIES


def empty(name: str) -> tuple[torch.nn.Module, models.Family]:
    model = models.empty(tiny_config(name, "mini"))
    return model, models.describe(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_component_target_selects_its_linear_layers(name: str) -> None:
    model, family = empty(name)
    text = resolve_targets(model, family, ["foundation"])
    assert text and all(family.component_of(n) == "foundation" for n in text)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    rest = [n for n in linear if n not in text]
    assert all(family.component_of(n) != "foundation" for n in rest)
    if family.has_vision:
        every = resolve_targets(model, family, ["foundation", "image_encoder", "image_projector"])
        assert sorted(every) == sorted(n for n in linear if n != "lm_head" and "patch_embed" not in n)
        assert every == tuple(sorted(every, key=linear.index))  # in model order


def test_globs_suffixes_and_modules_select_layers() -> None:
    model, family = empty("qwen3_vl")
    of = lambda *t, exclude=(): resolve_targets(model, family, t, exclude)  # noqa: E731
    q = of("**.q_proj")
    assert q and q == of("q_proj") == of("self_attn.q_proj") == of("**.layers.*.self_attn.q_*")
    assert of("model.language_model.layers.0") == of("**.layers.0.**")
    assert of(q[0]) == (q[0],)
    assert of("q_proj", "**.q_proj", exclude=[q[0]]) == q[1:]
    assert not set(of("foundation", exclude=["**.mlp"])) & set(of("**.language_model.**.mlp"))
    assert of("**") == of("foundation", "image_encoder", "image_projector")  # lm_head is passed by
    assert of("**", exclude=["image_encoder", "image_projector"]) == of("foundation")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("lm_head", "lm_head.*chunks"),
        ("**.lm_head", "lm_head"),
        ("embed_tokens", "embedding"),
        ("**.embed_tokens", "look-up"),
        ("**.patch_embed.**", "patch_embed"),
        ("patch_embed.proj", "patch_embed"),
    ],
)
def test_unadaptable_layers_are_rejected_with_reason(target: str, says: str) -> None:
    model, family = empty("qwen3_vl")
    with pytest.raises(AdapterError, match=says):
        resolve_targets(model, family, [target])


@pytest.mark.parametrize(
    ("targets", "exclude", "says"),
    [
        (["**.q_prj"], [], "matches nothing.*q_proj"),
        (["fundation"], [], "nearest names: foundation"),
        (["**.input_layernorm"], [], "contains no linear layer"),
        (["a..b"], [], "empty segment"),
        (["x**.q_proj"], [], "stand alone"),
        (["**.q_proj"], ["**.q_proj"], "no layer is left.*Exclude less"),
        (["**.q_proj"], ["**.w_proj"], "exclude: .*matches no layer"),
        (["foundation"], ["foundation"], "no layer is left.*Exclude less"),
    ],
)
def test_unmatched_target_raises(targets: list[str], exclude: list[str], says: str) -> None:
    model, family = empty("qwen3_vl")
    with pytest.raises(AdapterError, match=says):
        resolve_targets(model, family, targets, exclude)


def test_missing_component_raises() -> None:
    model, family = empty("llama")
    with pytest.raises(AdapterError, match="no linear layers in image_encoder; it has foundation"):
        resolve_targets(model, family, ["image_encoder"])


def test_experts_are_adapted_without_their_router() -> None:
    model, family = empty("qwen3_vl_moe")
    names = resolve_targets(model, family, ["foundation"])
    experts = [n for n in names if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert experts and tuple(experts) == resolve_targets(model, family, ["**.experts"])
    assert resolve_targets(model, family, ["experts"]) == tuple(experts)
    assert resolve_targets(model, family, ["experts.down_proj"]) == tuple(experts[1::2])
    assert not set(experts) & set(resolve_targets(model, family, ["foundation"], ["**.experts"]))
    with pytest.raises(AdapterError, match="router"):
        resolve_targets(model, family, ["**.mlp.gate"])
