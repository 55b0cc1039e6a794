"""Where the parts of a Hugging Face model are, found in the model itself.

    decoder    ``get_decoder()``: what takes embeddings of tokens, images' among them
    head       ``get_output_embeddings()`` of the model, else of its decoder; of a model that gives scores its ``score``
    towers     ``get_encoder(modality="image")`` and, of a model that takes sound, ``get_encoder(modality="audio")``
    projector  what of the model lies in none of these, single parameters (``image_newline``) included; and of the tower
               those children that map into the decoder's width: by the names in :data:`PROJECTORS`, or, where tower and
               decoder differ in width, because their last linear layer puts out the decoder's; experts for images.
               Sound has a projector of its own: it runs over fewer tokens than its tower, and is what one trains beside
               a frozen tower
    blocks     the outermost lists of modules in tower and decoder

What transformers does not tell in these ways is refused with the rule that it broke (:class:`Undescribed`). A text-only
decoder is one list of blocks between token embeddings and an output projection.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from octavo.models.errors import ModelError

VALUE_HEAD = "value_head"
"""A module that training may put beside a model's own (:mod:`octavo.train.forward.critic`): of no component."""

PROJECTORS: Mapping[str, str] = {
    "merger": "Qwen, GLM and others map patches into the decoder's width inside the tower",
    "merger_list": "Qwen3-Omni's name of the next",
    "deepstack_merger_list": "features for the first layers of the decoder",
    "connector": "Granite-Docling's",
    "downsample": "GLM's convolution in front of the merger, which its width alone does not tell from the tower",
    "downsampler1": "Step's two convolutions behind the blocks",
    "downsampler2": "the second of them",
    "vision_adapter": "Llama 4's shuffle of pixels, in front of the projection",
    "head_linear": "Ovis maps to words of its own, which a table turns into embeddings",
    "head_norm": "the norm of that",
}
"""What vision towers call those of their children that lead into the language model, and why by name: released models
of a family differ in widths, and a component must not. SigLIP's ``head`` and MiniCPM's ``vit_merger`` are not of them.
"""

AUDIO_PROJECTORS: Mapping[str, str] = {
    "proj": "Qwen2.5-Omni maps sound into the decoder's width inside the tower",
    "proj1": "Qwen3-Omni does so in two layers",
    "proj2": "the second of them",
    "post_proj_norm": "the norm behind Muse's",
}
"""The same of towers for sound."""

_OTHERS = {
    "tower": "a second tower",
    "vision_model": "a second tower",
    "vqmodel": "parts that make images",
    "generation": "parts that make images",
}
_AUDIO = ("audio", "speech")


class Undescribed(ModelError):
    """A model whose parts the rules do not find; ``why`` is the rule that it broke, as the end of a sentence."""

    def __init__(self, model: nn.Module, why: str) -> None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        super().__init__(f"{type(model).__name__} (model_type {kind!r}) cannot be described by its structure: {why}.")
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


def parts_of_text(model: PreTrainedModel) -> Parts:
    """The parts of a text-only decoder. Raises Undescribed."""
    _refuse_two(model)
    head, base = _head(model, model), model.base_model_prefix
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    lists = block_lists(model, "")
    if head is None or embeddings is None or not base or not hasattr(model, base) or len(lists) != 1:
        raise Undescribed(
            model,
            f"found output projection {head is not None}, token embeddings {embeddings is not None}, lists of blocks "
            f"{lists}, and a text-only decoder is one list between token embeddings and an output projection",
        )
    return Parts({"foundation": (f"{base}.**",), "lm_head": (_names(model)[id(head)],)}, tuple(lists), base)


def parts_of_towers(model: PreTrainedModel, sees: bool, hears: bool) -> Parts:
    """The parts of a model of text and images, or sound, or both. Raises Undescribed."""
    _refuse_two(model)
    names = _names(model)
    decoder, base = names.get(id(model.get_decoder()), ""), names[id(model.base_model)]
    if sees:  # whatever its configuration says
        hears = names.get(id(model.get_encoder(modality="audio")), "") not in ("", base)
    asked = {"image": (sees, "vision"), "audio": (hears, "audio")}
    towers = {of: _tower(model, names, of, word, base) for of, (there, word) in asked.items() if there}
    if decoder in ("", base) or any(_inside(t, decoder) or _inside(decoder, t) for t in towers.values()):
        beside = " and ".join(towers.values())
        raise Undescribed(
            model, f"its decoder is no module of its own beside the tower {beside}: found {decoder or base}"
        )
    found = _head(model, model.get_submodule(decoder))
    if found is None:
        raise Undescribed(model, "no output projection: neither the model nor its decoder names one")
    head = names[id(found)]
    rest = covering(model, base, {decoder, *towers.values(), head, VALUE_HEAD})
    components: dict[str, tuple[str, ...]] = {}
    lists: dict[str, list[str]] = {}
    for of, tower in towers.items():
        mapping = _mapping(model, tower, decoder, PROJECTORS if of == "image" else AUDIO_PROJECTORS)
        own = [glob for glob in rest if not sees or _of_sound(glob) == (of == "audio")]
        _refuse(model, own)
        components[f"{of}_encoder"] = covering(model, tower, mapping)
        experts = _experts_of_images(model, decoder) if of == "image" else ()
        components[f"{of}_projector"] = (*(f"{name}.**" for name in mapping), *own, *experts)
        lists[tower] = block_lists(model, tower, mapping)
    if not hears and (sound := tuple(glob for glob in rest if _of_sound(glob))):
        components["audio_encoder"] = sound
    components |= {"foundation": covering(model, decoder, {head}), "lm_head": (head,)}
    lists[decoder] = block_lists(model, decoder)
    if lacking := [name for name, blocks in lists.items() if not blocks and name != towers.get("audio")]:
        raise Undescribed(model, f"no list of blocks in {lacking[0]}")
    return Parts(
        {name: globs for name, globs in components.items() if globs},
        tuple(name for blocks in lists.values() for name in blocks),
        decoder, towers.get("image", ""), towers.get("audio", ""),
    )  # fmt: skip


def _tower(model: PreTrainedModel, names: Mapping[int, str], modality: str, word: str, base: str) -> str:
    tower = names.get(id(model.get_encoder(modality=modality)), "")
    if tower in ("", base):
        raise Undescribed(model, f'no {word} tower: get_encoder(modality="{modality}") finds none')
    return tower


def _experts_of_images(model: nn.Module, decoder: str) -> tuple[str, ...]:
    """Globs of those in the decoder's blocks (Ernie's): like the projector they have tokens where there are images, and
    only there, so they are planned, proven and frozen with it."""
    found = (name for name, _ in model.named_modules() if _inside(name, decoder) and name.endswith(".vision_moe"))
    return tuple(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) + ".**" for name in found))


def covering(model: nn.Module, root: str, apart: Collection[str]) -> tuple[str, ...]:
    """Globs of all modules in ``root`` but those ``apart`` and what is in them; one where none is in it."""
    if root in apart:
        return ()
    if root and not any(_inside(name, root) for name in apart):
        return (f"{root}.**",)
    module = model.get_submodule(root)
    own = (root,) if root and next(module.parameters(recurse=False), None) is not None else ()
    children = (f"{root}.{name}" if root else name for name, _ in module.named_children())
    return (*own, *(glob for child in children for glob in covering(model, child, apart)))


def block_lists(model: nn.Module, root: str, apart: Iterable[str] = ()) -> list[str]:
    """Names of the outermost lists in ``root``, outside ``apart``, whose entries are made of modules themselves."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not _inside(name, root) or any(_inside(name, other) for other in (*found, *apart)):
            continue
        if isinstance(module, nn.ModuleList) and len(module) and all(any(entry.children()) for entry in module):
            found.append(name)
    return found


def image_token(config: Any) -> int | None:
    """The token whose embedding an image feature replaces, where the configuration says it."""
    found = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", None) if found is None else found


def audio_token(config: Any) -> int | None:
    """The token whose embedding a feature of sound replaces, where the configuration says it."""
    found = getattr(config, "audio_token_id", None)
    return getattr(config, "audio_token_index", None) if found is None else found


def _mapping(model: nn.Module, tower: str, decoder: str, known: Collection[str]) -> list[str]:
    """The children of a tower that lead into the decoder, in the tower's order: those of a name that is `known`, and
    those whose width says it."""
    module, text = model.get_submodule(tower), model.get_submodule(decoder)
    widths = [_puts_out(model.get_submodule(name)) for name in block_lists(model, tower)]
    into = text.get_input_embeddings().weight.shape[-1]  # type: ignore[operator, union-attr]
    lists = {id(model.get_submodule(name)) for name in block_lists(model, tower)}
    return [
        f"{tower}.{name}"
        for name, child in module.named_children()
        if name in known or (id(child) not in lists and into not in widths and _puts_out(child) == into)
    ]


def _puts_out(module: nn.Module) -> int | None:
    """The width of the last linear layer in it."""
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return linears[-1].out_features if linears else None


def _of_sound(glob: str) -> bool:
    return any(word in glob for word in _AUDIO)


def _refuse(model: nn.Module, rest: Iterable[str]) -> None:
    """Of what lies outside towers and decoder, refuse what is no projector."""
    for glob in rest:
        name = glob.removesuffix(".**")
        last = name.rpartition(".")[2]
        if (what := next((what for word, what in _OTHERS.items() if word in last), None)) is not None:
            raise Undescribed(model, f"{what}, {name}, which is neither encoder nor projector")


def _refuse_two(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise Undescribed(model, "it is an encoder and a decoder, and Octavo trains decoders")


def _head(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    for owner in (model, decoder):
        head = owner.get_output_embeddings() if hasattr(owner, "get_output_embeddings") else None
        if head is not None:
            return head
    return getattr(model, "score", None)  # of a classifier, such as a reward model


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


def _inside(name: str, root: str) -> bool:
    """Whether a module lies in another, or is it."""
    return not root or name == root or name.startswith(f"{root}.")
