"""Finds the parts of a Hugging Face model by its structure.

    decoder    ``get_decoder()``: takes embeddings of tokens, including image tokens
    head       ``get_output_embeddings()`` of the model, else of its decoder; ``score`` of a model that returns scores
    towers     ``get_encoder(modality="image")`` and, for a model that takes audio, ``get_encoder(modality="audio")``
    projector  every module outside these, including single parameters (``image_newline``); the children of the tower
               that map into the decoder's width: either by the names in :data:`PROJECTORS` or, where tower and decoder
               differ in width, because the output of their last linear layer has the decoder's width; experts for
               images. Audio has a separate projector: it runs over fewer tokens than its tower, and is usually trained
               with a frozen tower
    blocks     the outermost lists of modules in tower and decoder

A model that violates one of these rules is rejected with that rule (:class:`Undescribed`). A text-only decoder is one
list of blocks between token embeddings and an output projection.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.models.errors import ModelError

VALUE_HEAD = "value_head"
"""A module that training may add to a model (:mod:`octavo.train.forward.critic`); it belongs to no component."""

PROJECTORS: Mapping[str, str] = {
    "merger": "Qwen, GLM and others map patches into the decoder's width inside the tower",
    "merger_list": "Qwen3-Omni's name for deepstack_merger_list",
    "deepstack_merger_list": "features for the first layers of the decoder",
    "connector": "Granite-Docling's",
    "downsample": "GLM's convolution before the merger, which the rule by width does not recognise",
    "downsampler1": "the first of Step's two convolutions after the blocks",
    "downsampler2": "the second of them",
    "vision_adapter": "Llama 4's pixel shuffle before the projection",
    "head_linear": "Ovis maps to visual words, which a table turns into embeddings",
    "head_norm": "the norm of head_linear",
}
"""Names of children of vision towers that map into the language model, each with the reason for a rule by name:
released models of a family differ in widths, but must have the same components. SigLIP's ``head`` and MiniCPM's
``vit_merger`` are not projectors.
"""

AUDIO_PROJECTORS: Mapping[str, str] = {
    "proj": "Qwen2.5-Omni maps audio into the decoder's width inside the tower",
    "proj1": "the first of Qwen3-Omni's two layers for that",
    "proj2": "the second of them",
    "post_proj_norm": "the norm after Muse's projection",
}
"""Names of children of audio towers that map into the language model."""

_UNSUPPORTED = {
    "tower": "a second tower",
    "vision_model": "a second tower",
    "vqmodel": "parts that make images",
    "generation": "parts that make images",
}
_AUDIO = ("audio", "speech")


class Undescribed(ModelError):
    """Raised for a model whose parts the rules do not find; ``why`` is the violated rule, as the end of a sentence."""

    def __init__(self, model: nn.Module, why: str) -> None:
        config = getattr(model, "config", None)
        kind, folder = getattr(config, "model_type", None), getattr(config, "name_or_path", "")
        where = f"{folder}/config.json: " if folder else ""
        super().__init__(
            f"{where}{type(model).__name__} (model_type {kind!r}) cannot be described by its structure: {why}."
        )
        self.why = why


@dataclass(frozen=True)
class Parts:
    """``components``: component -> globs over `named_modules` names; ``blocks``: names of the lists of blocks;
    ``decoder``, ``tower`` and ``audio_tower``: names of modules ("" for no tower)."""

    components: Mapping[str, tuple[str, ...]]
    blocks: tuple[str, ...]
    decoder: str
    tower: str = ""
    audio_tower: str = ""


def find_text_parts(model: PreTrainedModel) -> Parts:
    """Find the parts of a text-only decoder. Raises Undescribed."""
    _refuse_encoder_decoder(model)
    head, base = _find_head(model, model), model.base_model_prefix
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    lists = block_lists(model, "")
    if head is None or embeddings is None or not base or not hasattr(model, base) or len(lists) != 1:
        raise Undescribed(
            model,
            f"a text-only decoder has one list of blocks between token embeddings and an output projection; found "
            f"output projection {head is not None}, token embeddings {embeddings is not None}, lists {lists}",
        )
    return Parts({"foundation": (f"{base}.**",), "lm_head": (_module_names(model)[id(head)],)}, tuple(lists), base)


def find_tower_parts(model: PreTrainedModel, takes_images: bool, takes_audio: bool) -> Parts:
    """Find the parts of a model of text and images, or audio, or both. Raises Undescribed."""
    _refuse_encoder_decoder(model)
    names = _module_names(model)
    decoder, base = names.get(id(model.get_decoder()), ""), names[id(model.base_model)]
    if takes_images:  # a model of images may have an audio tower that its configuration does not mention
        takes_audio = names.get(id(model.get_encoder(modality="audio")), "") not in ("", base)
    modalities = {"image": (takes_images, "vision"), "audio": (takes_audio, "audio")}
    towers = {kind: _find_tower(model, names, kind, word, base) for kind, (takes, word) in modalities.items() if takes}
    if decoder in ("", base) or any(_is_inside(t, decoder) or _is_inside(decoder, t) for t in towers.values()):
        tower_names = " and ".join(towers.values())
        raise Undescribed(
            model, f"its decoder is not a separate module next to the tower {tower_names}: found {decoder or base}"
        )
    head_module = _find_head(model, model.get_submodule(decoder))
    if head_module is None:
        raise Undescribed(model, "no output projection: neither the model nor its decoder names one")
    head = names[id(head_module)]
    rest = cover_globs(model, base, {decoder, *towers.values(), head, VALUE_HEAD})
    components: dict[str, tuple[str, ...]] = {}
    lists: dict[str, list[str]] = {}
    for kind, tower in towers.items():
        mapping = _projector_children(model, tower, decoder, PROJECTORS if kind == "image" else AUDIO_PROJECTORS)
        projector = [glob for glob in rest if not takes_images or _is_audio(glob) == (kind == "audio")]
        _refuse_other_modules(model, projector)
        components[f"{kind}_encoder"] = cover_globs(model, tower, mapping)
        experts = _image_experts(model, decoder) if kind == "image" else ()
        components[f"{kind}_projector"] = (*(f"{name}.**" for name in mapping), *projector, *experts)
        lists[tower] = block_lists(model, tower, mapping)
    if not takes_audio and (audio := tuple(glob for glob in rest if _is_audio(glob))):
        components["audio_encoder"] = audio
    components |= {"foundation": cover_globs(model, decoder, {head}), "lm_head": (head,)}
    lists[decoder] = block_lists(model, decoder)
    if without_blocks := [name for name, blocks in lists.items() if not blocks and name != towers.get("audio")]:
        raise Undescribed(model, f"no list of blocks in {without_blocks[0]}")
    return Parts(
        {name: globs for name, globs in components.items() if globs},
        tuple(name for blocks in lists.values() for name in blocks),
        decoder, towers.get("image", ""), towers.get("audio", ""),
    )  # fmt: skip


def _find_tower(model: PreTrainedModel, names: Mapping[int, str], modality: str, word: str, base: str) -> str:
    tower = names.get(id(model.get_encoder(modality=modality)), "")
    if tower in ("", base):
        raise Undescribed(model, f'no {word} tower: get_encoder(modality="{modality}") finds none')
    return tower


def _image_experts(model: nn.Module, decoder: str) -> tuple[str, ...]:
    """Return the globs of the experts for images in the decoder's blocks (Ernie). Like the projector they receive
    tokens only if there are images, so they are planned, checked and frozen with it."""
    names = (name for name, _ in model.named_modules() if _is_inside(name, decoder) and name.endswith(".vision_moe"))
    return tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) + ".**" for name in names))


def cover_globs(model: nn.Module, root: str, excluded: Collection[str]) -> tuple[str, ...]:
    """Return the globs of all modules in ``root`` except those in ``excluded`` and their children; a single glob if
    ``root`` contains none of ``excluded``."""
    if root in excluded:
        return ()
    if root and not any(_is_inside(name, root) for name in excluded):
        return (f"{root}.**",)
    module = model.get_submodule(root)
    # A module with direct parameters, outside its children, needs a glob that matches only the module itself.
    itself = (root,) if root and next(module.parameters(recurse=False), None) is not None else ()
    children = (f"{root}.{name}" if root else name for name, _ in module.named_children())
    return (*itself, *(glob for child in children for glob in cover_globs(model, child, excluded)))


def block_lists(model: nn.Module, root: str, excluded: Iterable[str] = ()) -> list[str]:
    """Return the names of the outermost lists in ``root``, outside ``excluded``, whose entries all have child
    modules."""
    names: list[str] = []
    for name, module in model.named_modules():
        if not _is_inside(name, root) or any(_is_inside(name, other) for other in (*names, *excluded)):
            continue
        if isinstance(module, nn.ModuleList) and len(module) and all(any(entry.children()) for entry in module):
            names.append(name)
    return names


def behind_features(model: nn.Module, tower: str) -> frozenset[str]:
    """Return the names of a vision tower's parameters that no loss depends on, because the features of images are taken
    before them (LLaVA's `vision_feature_layer`): in its last blocks, and in the modules after its blocks."""
    feature_layer = getattr(getattr(model, "config", None), "vision_feature_layer", None)
    lists = block_lists(model, tower) if tower else []
    if feature_layer is None or not lists:
        return frozenset()
    blocks = lists[-1]
    count = len(cast(nn.ModuleList, model.get_submodule(blocks)))
    # Like transformers' tuple of hidden states: the first is the input of the blocks, so there is one more.
    layers = [feature_layer] if isinstance(feature_layer, int) else feature_layer
    used = max(index if index >= 0 else count + 1 + index for index in layers)
    children = [name for name, _ in model.get_submodule(tower).named_children()]
    with_blocks = blocks.removeprefix(f"{tower}.").partition(".")[0]
    unused = [f"{blocks}.{number}." for number in range(used, count)]
    unused += [f"{tower}.{name}." for name in children[children.index(with_blocks) + 1 :]]
    return frozenset(name for name, _ in model.named_parameters() if name.startswith(tuple(unused)))


def image_token(config: PreTrainedConfig) -> int | None:
    """Return the token whose embedding an image feature replaces; None if the configuration has no such field."""
    token = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if token is None else token


def audio_token(config: PreTrainedConfig) -> int | None:
    """Return the token whose embedding an audio feature replaces; None if the configuration has no such field."""
    token = getattr(config, "audio_token_id", None)
    return getattr(config, "audio_token_index", None) if token is None else token


def _projector_children(model: nn.Module, tower: str, decoder: str, known: Collection[str]) -> list[str]:
    """Return the children of a tower that map into the decoder, in the tower's order: those with a name in `known`, and
    those with the decoder's width."""
    module, text = model.get_submodule(tower), cast(PreTrainedModel, model.get_submodule(decoder))
    widths = [_output_width(model.get_submodule(name)) for name in block_lists(model, tower)]
    decoder_width = cast(Tensor, text.get_input_embeddings().weight).shape[-1]
    lists = {id(model.get_submodule(name)) for name in block_lists(model, tower)}
    return [
        f"{tower}.{name}"
        for name, child in module.named_children()
        # If blocks of the tower have the decoder's width, the width does not identify a projector.
        if name in known
        or (id(child) not in lists and decoder_width not in widths and _output_width(child) == decoder_width)
    ]


def _output_width(module: nn.Module) -> int | None:
    """Return the output width of the last linear layer in a module, or None if it has none."""
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return linears[-1].out_features if linears else None


def _is_audio(glob: str) -> bool:
    return any(word in glob for word in _AUDIO)


def _refuse_other_modules(model: nn.Module, rest: Iterable[str]) -> None:
    """Raise Undescribed for modules outside towers and decoder that are not a projector."""
    for glob in rest:
        name = glob.removesuffix(".**")
        last = name.rpartition(".")[2]
        if (what := next((what for word, what in _UNSUPPORTED.items() if word in last), None)) is not None:
            raise Undescribed(model, f"{what}, {name}, which is neither encoder nor projector")


def _refuse_encoder_decoder(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise Undescribed(model, "it is an encoder-decoder model, and Octavo trains only decoders")


def _find_head(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    for owner in (model, decoder):
        get_head = getattr(owner, "get_output_embeddings", None)
        head: nn.Module | None = None if get_head is None else get_head()
        if head is not None:
            return head
    return getattr(model, "score", None)  # the head of a classifier, such as a reward model


def _module_names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


def _is_inside(name: str, root: str) -> bool:
    """Return whether a module is `root` or is inside it."""
    return not root or name == root or name.startswith(f"{root}.")
