"""The parts of a Hugging Face model: families, their components and their repeating blocks.

A family maps `named_modules` names to the components that a run's configuration refers to:

    image_encoder    the vision tower without the projection into the language model's width
    image_projector  that projection: merger, DeepStack mergers, multi_modal_projector
    audio_encoder    the audio tower without its projection
    audio_projector  its projection
    foundation       the language model: embeddings, decoder blocks, final norm
    lm_head          the output projection (tied or not)

Nothing is patched: a `Family` is a description derived from the model's structure
(:mod:`octavo.models.structure.structure`), so unlisted families are described too. Whether a family trains is decided
in :mod:`octavo.models.structure.support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.base.wording import count_noun
from octavo.fp8.policy import matches
from octavo.models.errors import ModelError
from octavo.models.structure.skeleton import empty, is_audio_config, is_vision_config
from octavo.models.structure.structure import (
    VALUE_HEAD,
    Undescribed,
    audio_token,
    find_text_parts,
    find_tower_parts,
    image_token,
)

COMPONENTS = ("image_encoder", "image_projector", "audio_encoder", "audio_projector", "foundation", "lm_head")
WITHOUT_HEAD = COMPONENTS[:-1]


@dataclass(frozen=True)
class Family:
    """The description of one model.

    name             the family, e.g. "qwen3_vl"; for a text-only decoder its `model_type`
    components       component -> globs over `named_modules` names; missing components have no entry
    layer_globs      the repeating blocks: the units of FSDP2 sharding and of activation checkpointing
    has_vision       whether the model takes images
    language_model   module name of the decoder whose forward takes `inputs_embeds`
    tower            module name of the vision tower ("" without vision)
    image_token_id   the placeholder id whose embedding an image feature replaces, or None for a model without vision
    audio_tower, audio_token_id   tower and placeholder of audio; `has_audio`: whether the model takes audio
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
        """Return the component of the module of this name, or None for a container of several components."""
        for component, globs in self.components.items():
            if any(matches(glob, module_name) for glob in globs):
                return component
        return None

    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the repeating blocks, (name, module), in `named_modules` order; blocks without parameters never run
        and are skipped."""
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
    media = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    takes_images, takes_audio = is_vision_config(config), is_audio_config(config)
    # A model with a tower that transformers does not list as generating text, such as CLIP, is not a text-only decoder.
    if media and not takes_images and not takes_audio:
        raise Undescribed(model_or_config, f"it takes {' and '.join(media)}, but does not generate text")
    if takes_images or takes_audio:
        parts = find_tower_parts(model_or_config, takes_images, takes_audio)
    else:
        parts = find_text_parts(model_or_config)
    family = Family(
        name=config.model_type,
        components=parts.components,
        layer_globs=tuple(f"{blocks}.*" for blocks in parts.blocks),
        has_vision=takes_images,
        language_model=parts.decoder,
        tower=parts.tower,
        image_token_id=image_token(config) if takes_images else None,
        audio_tower=parts.audio_tower,
        audio_token_id=audio_token(config) if takes_audio else None,
    )
    _check_complete(model_or_config, family)
    return family


def _check_complete(model: PreTrainedModel, family: Family) -> None:
    """Raise Undescribed unless every parameter has a component."""
    owners = ((name, name.rpartition(".")[0]) for name, _ in model.named_parameters())
    unassigned = [name for name, owner in owners if owner != VALUE_HEAD and family.component_of(owner) is None]
    if unassigned:
        raise Undescribed(model, f"{count_noun(len(unassigned), 'parameter')} in no component, first {unassigned[0]!r}")


_HIGH_PRECISION: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str, str], ...] = (
    (nn.Embedding, "embeddings", "a table look-up, not a matrix product"),
    ((nn.Conv2d, nn.Conv3d), "patch embedding", "runs once per image and sets every later scale"),
    (nn.LayerNorm, "norms", "a reduction whose error every later layer inherits"),
)


def high_precision_modules(model: nn.Module) -> dict[str, str]:
    """Return kind -> reason for the kinds of modules, other than linear layers, that a model keeps in high precision.

    Printed with the plan, which lists only linear layers. Source: NUMERICS, "Stays in high precision".
    """
    reasons: dict[str, str] = {}
    for module in model.modules():
        for types, kind, reason in _HIGH_PRECISION:
            if isinstance(module, types):
                reasons[kind] = reason
        name = type(module).__name__
        if "RMSNorm" in name:
            reasons["norms"] = _HIGH_PRECISION[2][2]
        elif "RotaryEmbedding" in name:
            reasons["rotary"] = "angles up to the sequence length need fp32: cos and sin are computed there"
        elif name.endswith("Attention"):
            reasons["attention scores"] = "softmax of q k: FP8 attention on stock architectures diverges"
        elif "Router" in name:
            reasons["router"] = "a small product that decides which expert runs"
    return reasons
