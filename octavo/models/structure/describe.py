"""What a Hugging Face model is made of: families, their components and their repeating blocks.

A family maps `named_modules` names to the components that the configuration speaks of:

    image_encoder    the vision tower without what maps into the language model's width
    image_projector  that map: merger, DeepStack mergers, multi_modal_projector
    audio_encoder    the tower of sound, likewise
    audio_projector  its map
    foundation       the language model: embeddings, decoder blocks, final norm
    lm_head          the output projection (tied or not)

Nothing is patched: a `Family` is a description next to the model, found in its structure
(:mod:`octavo.models.structure.structure`), so that a family nobody listed is described too. Whether one trains is
another question (:mod:`octavo.models.structure.support`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.fp8.policy import matches
from octavo.models.errors import ModelError
from octavo.models.structure.skeleton import empty, is_audio_config, is_vision_config
from octavo.models.structure.structure import (
    VALUE_HEAD,
    Undescribed,
    audio_token,
    image_token,
    parts_of_text,
    parts_of_towers,
)

COMPONENTS = ("image_encoder", "image_projector", "audio_encoder", "audio_projector", "foundation", "lm_head")
WITHOUT_HEAD = COMPONENTS[:-1]


@dataclass(frozen=True)
class Family:
    """The description of one model.

    name             the family, e.g. "qwen3_vl"; for a text-only decoder its `model_type`
    components       component -> globs over `named_modules` names; a component the model lacks is absent
    layer_globs      the repeating blocks: what FSDP2 shards and activation checkpointing recomputes, one by one
    has_vision       whether images go in
    language_model   module name of the decoder whose forward takes `inputs_embeds`
    tower            module name of the vision tower ("" without vision)
    image_token_id   the placeholder id whose embedding an image feature replaces (None without vision)
    audio_tower, audio_token_id   the same of sound; `has_audio`: whether sound goes in
    """

    name: str
    components: Mapping[str, tuple[str, ...]]
    layer_globs: tuple[str, ...]
    has_vision: bool
    language_model: str
    tower: str = ""
    image_token_id: int | None = None
    audio_tower: str = ""
    audio_token_id: int | None = None

    @property
    def has_audio(self) -> bool:
        return bool(self.audio_tower)

    def component_of(self, module_name: str) -> str | None:
        """The component that holds the module of this name, or None for a container above components."""
        for component, globs in self.components.items():
            if any(matches(glob, module_name) for glob in globs):
                return component
        return None

    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The repeating blocks, (name, module), in `named_modules` order; a block without parameters never runs."""
        globs = self.layer_globs
        named = [(name, m) for name, m in model.named_modules() if any(matches(glob, name) for glob in globs)]
        return [(name, m) for name, m in named if next(m.parameters(), None) is not None]


def describe(model_or_config: PreTrainedModel | PreTrainedConfig) -> Family:
    """Describe a model, or the model that a configuration would build (on the meta device).

    Raises Undescribed, a ModelError, for a model whose parts the rules of :mod:`octavo.models.structure.structure` do
    not find.
    """
    if isinstance(model_or_config, PreTrainedConfig):
        return describe(empty(model_or_config))
    config = getattr(model_or_config, "config", None)
    if config is None:
        raise ModelError(
            f"{type(model_or_config).__name__} has no `config`: Octavo describes Hugging Face models; load the folder "
            "with octavo.models.load."
        )
    taken = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    seeing, hearing = is_vision_config(config), is_audio_config(config)
    if taken and not seeing and not hearing:
        raise Undescribed(model_or_config, f"it takes {' and '.join(taken)}, and is no model that writes text to it")
    several = seeing or hearing
    parts = parts_of_towers(model_or_config, seeing, hearing) if several else parts_of_text(model_or_config)
    family = Family(
        name=config.model_type,
        components=parts.components,
        layer_globs=tuple(f"{blocks}.*" for blocks in parts.blocks),
        has_vision=seeing,
        language_model=parts.decoder,
        tower=parts.tower,
        image_token_id=image_token(config) if seeing else None,
        audio_tower=parts.audio_tower,
        audio_token_id=audio_token(config) if hearing else None,
    )
    _check(model_or_config, family)
    return family


def _check(model: PreTrainedModel, family: Family) -> None:
    """That every parameter has a component."""
    homes = ((name, name.rpartition(".")[0]) for name, _ in model.named_parameters())
    stray = [name for name, home in homes if home != VALUE_HEAD and family.component_of(home) is None]
    if stray:
        raise Undescribed(model, f"{len(stray)} parameters belong to no component, first {stray[0]!r}")


_STAYS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str, str], ...] = (
    (nn.Embedding, "embeddings", "a table look-up, not a matrix product"),
    ((nn.Conv2d, nn.Conv3d), "patch embedding", "runs once per image and sets every later scale"),
    (nn.LayerNorm, "norms", "a reduction whose error every later layer inherits"),
)


def stays(model: nn.Module) -> dict[str, str]:
    """What holds or makes values in high precision besides linear layers: kind -> reason, only kinds the model has.

    Printed beside the plan, which itself lists linear layers. Source: NUMERICS, "Stays in high precision".
    """
    found: dict[str, str] = {}
    for module in model.modules():
        for types, kind, reason in _STAYS:
            if isinstance(module, types):
                found[kind] = reason
        name = type(module).__name__
        if "RMSNorm" in name:
            found["norms"] = _STAYS[2][2]
        elif "RotaryEmbedding" in name:
            found["rotary"] = "angles up to the sequence length need fp32: cos and sin are computed there"
        elif name.endswith("Attention"):
            found["attention scores"] = "softmax of q k: FP8 attention on stock architectures diverges"
        elif "Router" in name:
            found["router"] = "a small product that decides which expert runs"
    return found
