"""What a Hugging Face model is made of: families, their components and their repeating blocks.

A family maps `named_modules` names to the four components that the configuration speaks of:

    image_encoder    the vision tower without what maps into the language model's width
    image_projector  that map: merger, DeepStack mergers, multi_modal_projector
    foundation       the language model: embeddings, decoder blocks, final norm
    lm_head          the output projection (tied or not)

Nothing is patched: a `Family` is a description next to the model. Vision-language families are known by
`config.model_type`; a text-only decoder is recognised by its structure (token embeddings, one list of equal
blocks, an output projection), so that a family nobody listed works too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.fp8.policy import matches
from octavo.models.errors import ModelError
from octavo.models.skeleton import empty
from octavo.models.trained import TRAINED

COMPONENTS = ("image_encoder", "image_projector", "foundation", "lm_head")
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
    """

    name: str
    components: Mapping[str, tuple[str, ...]]
    layer_globs: tuple[str, ...]
    has_vision: bool
    language_model: str
    tower: str = ""
    image_token_id: int | None = None

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


def _below(*names: str) -> tuple[str, ...]:
    """Each module and everything in it."""
    return tuple(f"{name}.**" for name in names)


_TEXT = {"foundation": _below("model.language_model"), "lm_head": ("lm_head",)}


def _vision(name: str, tower: str, blocks: str, encoder: tuple[str, ...], projector: tuple[str, ...]) -> Family:
    components = {"image_encoder": _below(*encoder), "image_projector": _below(*projector), **_TEXT}
    layers = (f"{tower}.{blocks}.*", "model.language_model.layers.*")
    return Family(name, components, layers, True, "model.language_model", tower)


def _qwen_vl(name: str, encoder: tuple[str, ...] = (), projector: tuple[str, ...] = ()) -> Family:
    """`encoder`, `projector`: what the third generation has beside the second's modules."""
    encoder = tuple(f"model.visual.{part}" for part in ("patch_embed", "blocks", "rotary_pos_emb", *encoder))
    projector = tuple(f"model.visual.{part}" for part in ("merger", *projector))
    return _vision(name, "model.visual", "blocks", encoder, projector)


_THIRD = (("pos_embed",), ("deepstack_merger_list",))
_VISION = {
    "qwen3_vl": _qwen_vl("qwen3_vl", *_THIRD),
    "qwen3_vl_moe": _qwen_vl("qwen3_vl_moe", *_THIRD),
    "qwen2_5_vl": _qwen_vl("qwen2_5_vl"),
    "internvl": _vision(
        "internvl", "model.vision_tower", "encoder.layer", ("model.vision_tower",), ("model.multi_modal_projector",)
    ),
    "nvila_lite": _vision(
        "nvila_lite", "model.vision_tower", "encoder.layers", ("model.vision_tower",), ("model.mm_projector",)
    ),
}
assert tuple(_VISION) == TRAINED

VALUE_HEAD = "value_head"
"""A module that training may put beside a model's own (:mod:`octavo.train.critic`): of no component."""


def describe(model_or_config: PreTrainedModel | PreTrainedConfig) -> Family:
    """Describe a model, or the model that a configuration would build (on the meta device).

    Raises ModelError for a model that is neither a described vision-language family nor a text-only decoder,
    and where the modules are not where the family says (a transformers version with other names).
    """
    if isinstance(model_or_config, PreTrainedConfig):
        return describe(empty(model_or_config))
    config = getattr(model_or_config, "config", None)
    if config is None:
        raise ModelError(
            f"{type(model_or_config).__name__} has no `config`: Octavo describes Hugging Face models; load the folder "
            "with octavo.models.load."
        )
    if config.model_type in _VISION:
        family = replace(_VISION[config.model_type], image_token_id=config.image_token_id)
        if hasattr(model_or_config, "score"):  # of a reward model
            family = replace(family, components={**family.components, "lm_head": ("score",)})
    else:
        family = _text(model_or_config)
    _check(model_or_config, family)
    return family


def _text(model: PreTrainedModel) -> Family:
    """A decoder by structure: token embeddings below the base model, one list of equal blocks, an output projection."""
    config = model.config
    described = ", ".join(TRAINED)
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise ModelError(
            f"model_type {config.model_type!r} takes images or audio, and Octavo describes no such family; described: "
            f"{described}, and any text-only decoder."
        )
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head = head if head is not None else getattr(model, "score", None)  # of a classifier, such as a reward model
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    base = model.base_model_prefix
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and len({type(block) for block in module}) == 1
    ]
    top = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if head is None or embeddings is None or not base or not hasattr(model, base) or len(top) != 1:
        raise ModelError(
            f"{type(model).__name__} (model_type {config.model_type!r}) is neither a described vision-language family "
            f"({described}) nor a text-only decoder: found output projection {head is not None}, token embeddings "
            f"{embeddings is not None}, lists of blocks {top}. One list of equal blocks between token embeddings and "
            "an output projection is needed."
        )
    return Family(
        name=config.model_type,
        components={"foundation": _below(base), "lm_head": (names[id(head)],)},
        layer_globs=(f"{top[0]}.*",),
        has_vision=False,
        language_model=base,
    )


def _check(model: PreTrainedModel, family: Family) -> None:
    names = [name for name, _ in model.named_modules()]
    for what, globs in {**family.components, "blocks": family.layer_globs}.items():
        if not any(matches(glob, name) for name in names for glob in globs):
            raise ModelError(
                f"{type(model).__name__}: nothing named {' or '.join(globs)} was found for {what}; this transformers "
                "version names the modules of this family in another way. Use a supported version (>= 5.17)."
            )
    homes = ((name, name.rpartition(".")[0]) for name, _ in model.named_parameters())
    stray = [name for name, home in homes if home != VALUE_HEAD and family.component_of(home) is None]
    if stray:
        raise ModelError(
            f"{type(model).__name__}: {len(stray)} parameters belong to no component of family {family.name!r}, first "
            f"{stray[0]!r}; Octavo does not know this variant of the family."
        )


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
