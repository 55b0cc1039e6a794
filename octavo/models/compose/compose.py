"""Writes a model of images and text from an image encoder, a fresh projector and a decoder, as a Hugging Face folder.

The folder has the shape of LLaVA (`model_type: llava`), which transformers loads without Octavo: the image encoder's
features of an image pass a projector of two linear layers and replace the embeddings of as many image tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel

from octavo.base import atomic_write, target_folder
from octavo.base.wording import did_you_mean
from octavo.models.compose.encoder import FEATURE_LAYER, ImageEncoder, read_encoder
from octavo.models.compose.foundation import Foundation, read_foundation
from octavo.models.compose.template import IMAGE_TOKEN
from octavo.models.errors import ModelError
from octavo.models.folder.folder import silence_transformers
from octavo.models.processors.processors import load_processor

PROJECTORS = ("mlp2",)
"""Kinds of projectors: `mlp2` has two linear layers with GELU between them, as LLaVA-1.5."""
_TRIAL_TOKENS = 8


@dataclass(frozen=True)
class Parts:
    """What a model is composed of.

    image_encoder  folder of CLIP, SigLIP or DINOv2
    foundation     folder of a decoder
    projector      one of :data:`PROJECTORS`
    image_size     pixels of an image, in each direction (default: the image encoder's)
    feature_layer  the hidden state of the image encoder that is the feature, as LLaVA's `vision_feature_layer`
    chat_template  file with a template that takes images (default: the decoder's own, to which images are added)
    init_std       standard deviation of the projector's weights (default: the decoder's initializer_range)
    seed           of the random weights
    init           components with random weights besides the projector: `image_encoder`, whose folder then needs none
    """

    image_encoder: Path
    foundation: Path
    projector: str = PROJECTORS[0]
    image_size: int | None = None
    feature_layer: int = FEATURE_LAYER
    chat_template: Path | None = None
    init_std: float | None = None
    seed: int = 0
    init: Collection[str] = ()


@dataclass(frozen=True)
class Composed:
    """A written model: its folder, parameters by component, and tokens of an image."""

    directory: Path
    parameters: Mapping[str, int]
    image_tokens: int
    image_size: int
    why: str


def compose(parts: Parts, target: Path, log: Callable[[str], None] = lambda text: None) -> Composed:
    """Write the composed model to `target` and describe it. `log` is called with what is being done.

    All parts are read without their weights first. The weights of the whole model are in memory once, in the decoder's
    dtype. Raises ModelError with every problem of the parts at once, before weights are read; nothing is written then,
    and nothing is left of a folder that could not be completed.
    """
    problems: list[str] = []
    if not target_folder.is_free(target):
        problems.append(f"{target} is not empty, and nothing is overwritten; name another folder")
    if parts.projector not in PROJECTORS:
        known = f"the projectors are {', '.join(PROJECTORS)}"
        problems.append(f"--projector {parts.projector}: {known}{did_you_mean(parts.projector, PROJECTORS)}")
    if parts.init_std is not None and not 0 < parts.init_std < 1:
        problems.append(f"--init-std {parts.init_std}: it must be above 0 and below 1")
    if unknown := [name for name in parts.init if name != "image_encoder"]:
        problems.append(f"--init {unknown[0]}: only image_encoder can have random weights")
    encoder = read_encoder(parts.image_encoder, parts.image_size, parts.feature_layer, problems)
    tokens = None if encoder is None else encoder.tokens
    foundation = read_foundation(parts.foundation, parts.chat_template, tokens, problems)
    if problems or encoder is None or foundation is None:
        raise ModelError("\n".join(problems))
    dtype = foundation.dtype()
    log(f"reading {foundation.folder}")
    decoder = foundation.load(dtype, log)
    if parts.init:
        tower = encoder.draw(dtype, parts.seed)
    else:
        log(f"reading {encoder.folder}")
        tower = encoder.load(dtype)
    std = decoder.config.initializer_range if parts.init_std is None else parts.init_std
    model = _assemble(_make_config(encoder, foundation), tower, decoder, std, parts.seed)
    with atomic_write.new_folder(target, ModelError, replace=False) as folder:
        log(f"writing {target}")
        with silence_transformers():
            model.save_pretrained(folder)
            foundation.tokenizer.save_pretrained(folder)
        _write_processor(folder, encoder, model.config)
        load_processor(folder)  # raises if the files contradict each other
        atomic_write.sync_tree(folder)
    inner = model.model
    counts = {
        "image_encoder": _count(inner.vision_tower),
        "image_projector": _count(inner.multi_modal_projector),
        "foundation": _count(inner.language_model),
        "lm_head": 0 if model.config.tie_word_embeddings else _count(model.lm_head),
    }
    kind = encoder.config.model_type
    why = f"LLaVA's shape (model_type llava), because {kind} gives each image {encoder.tokens} features"
    return Composed(target, counts, encoder.tokens, encoder.config.image_size, why)


def _make_config(encoder: ImageEncoder, foundation: Foundation) -> LlavaConfig:
    text = foundation.config
    return LlavaConfig(
        vision_config=encoder.config,
        text_config=text,
        image_token_index=foundation.image_token_id,
        image_seq_length=encoder.tokens,
        vision_feature_layer=encoder.feature_layer,
        vision_feature_select_strategy=encoder.select_strategy,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def _assemble(
    config: LlavaConfig, tower: PreTrainedModel, decoder: PreTrainedModel, std: float, seed: int
) -> LlavaForConditionalGeneration:
    """Return the model with the weights of tower and decoder, which it shares. Raises ModelError for a decoder that
    answers differently in it."""
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    inner, body = model.model, decoder.get_decoder()
    if type(body) is not type(inner.language_model):
        raise ModelError(
            f"{type(decoder).__name__} cannot be composed: its decoder is {type(body).__name__}, and transformers "
            f"builds {type(inner.language_model).__name__} from the same configuration"
        )
    inner.vision_tower, inner.language_model, model.lm_head = tower, body, decoder.get_output_embeddings()
    projector = inner.multi_modal_projector.to_empty(device="cpu").to(decoder.dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for parameter in projector.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * (std if parameter.dim() > 1 else 0)
            parameter.copy_(drawn)
    model.config.dtype = decoder.dtype
    model.generation_config = decoder.generation_config
    model.eval()
    _check_answers(model, decoder)
    return model


def _check_answers(model: LlavaForConditionalGeneration, decoder: PreTrainedModel) -> None:
    """Raise ModelError unless a text has the decoder's logits: some decoders scale or limit them after the head, which
    LLaVA's class does not do."""
    ids = torch.arange(1, 1 + _TRIAL_TOKENS)[None]
    with torch.no_grad():
        expected, composed = decoder.eval()(input_ids=ids).logits, model(input_ids=ids).logits
    if not torch.equal(expected, composed):
        raise ModelError(
            f"{type(decoder).__name__} cannot be composed: in LLaVA's model class a text has other logits (by up to "
            f"{float((expected - composed).abs().max()):.3g}), so the class leaves out a step of this decoder"
        )


def _write_processor(folder: Path, encoder: ImageEncoder, config: LlavaConfig) -> None:
    """Write the files of the processor, and name its class in the tokenizer's."""
    entries: dict[str, object] = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "patch_size": encoder.config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": encoder.leading,
    }
    _write_json(folder / "preprocessor_config.json", encoder.processor)
    _write_json(folder / "processor_config.json", entries)
    file = folder / "tokenizer_config.json"
    _write_json(file, {**json.loads(file.read_text(encoding="utf-8")), "processor_class": "LlavaProcessor"})


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _count(module: object) -> int:
    return sum(parameter.numel() for parameter in cast(nn.Module, module).parameters())
