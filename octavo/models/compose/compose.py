"""Writes a model of images and text from an image encoder, a fresh projector and a decoder, as a Hugging Face folder.

An image encoder for images of one size with LLaVA's projector gives the shape of LLaVA (`model_type: llava`), which
transformers loads without Octavo. Registers and other projectors give a shape of Octavo's own (`octavo_llava`), and so
do image encoders for images of any size (`octavo_vlm`). In all, features of an image pass a projector of two linear
layers and replace the embeddings of as many image tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo import fp8
from octavo.base import atomic_write, target_folder
from octavo.base.wording import did_you_mean
from octavo.models.compose.encoder import check_weights, read_encoder
from octavo.models.compose.foundation import read_foundation
from octavo.models.compose.tile import FEATURE_LAYER
from octavo.models.custom.composed import PROJECTORS
from octavo.models.errors import ModelError
from octavo.models.folder.folder import check_weight_files, silence_transformers, wrap_errors
from octavo.models.processors.processors import load_processor
from octavo.models.structure.describe import describe

INIT_STD = 0.02
"""Standard deviation of a projector's weights if neither the user nor the decoder names one."""
_TRIAL_TOKENS = 8


@dataclass(frozen=True)
class Parts:
    """What a model is composed of.

    image_encoder  folder of CLIP, SigLIP, DINOv2, DINOv3 or a Qwen-VL
    foundation     folder of a decoder
    projector      a name in `PROJECTORS` (default: LLaVA's, or the merger of a Qwen-VL)
    image_size     pixels of an image, in each direction (default: the image encoder's)
    feature_layer  the hidden state of the image encoder that is the feature, as LLaVA's `vision_feature_layer`
    chat_template  file with a template that takes images (default: the decoder's own, to which images are added)
    init_std       standard deviation of the projector's weights (default: the decoder's initializer_range)
    seed           of the random weights
    init           components with random weights besides the projector: `image_encoder`, whose folder then needs none
    """

    image_encoder: Path
    foundation: Path
    projector: str | None = None
    image_size: int | None = None
    feature_layer: int = FEATURE_LAYER
    chat_template: Path | None = None
    init_std: float | None = None
    seed: int = 0
    init: Collection[str] = ()


@dataclass(frozen=True)
class Composed:
    """A written model: its folder, parameters by component, kind of projector, tokens and size of an image if they are
    fixed, and why it has its shape."""

    directory: Path
    parameters: Mapping[str, int]
    projector: str
    image_tokens: int | None
    image_size: int | None
    why: str


def compose(parts: Parts, target: Path, log: Callable[[str], None] = lambda text: None) -> Composed:
    """Write the composed model to `target` and describe it. `log` is called with what is being done.

    All parts are read without their weights first. The weights of the whole model are in memory once, in the decoder's
    dtype. Raises ModelError with every problem of the parts at once, before weights are read; nothing is written then,
    and nothing is left of a folder that could not be completed.
    """
    problems: list[str] = []
    target_folder.check_target(target, ModelError)
    nearest = next(folder for folder in (target.absolute(), *target.absolute().parents) if folder.exists())
    if target.is_file():
        problems.append(f"{target} is a file; name a folder that is new or empty")
    elif not os.access(nearest, os.W_OK):
        problems.append(f"{target} cannot be written: {nearest} is not writable")
    elif not target_folder.is_free(target):
        problems.append(f"{target} is not empty, and nothing is overwritten; name another folder")
    projector = parts.projector
    if projector is not None and projector not in PROJECTORS:
        known = f"the projectors are {', '.join(PROJECTORS)}"
        problems.append(f"--projector {projector}: {known}.{did_you_mean(projector, PROJECTORS)}")
        projector = None
    if parts.init_std is not None and not 0 < parts.init_std < 1:
        problems.append(f"--init-std {parts.init_std}: it must be above 0 and below 1")
    if unknown := [name for name in parts.init if name != "image_encoder"]:
        problems.append(f"--init {unknown[0]}: only image_encoder can have random weights")
    encoder = read_encoder(parts.image_encoder, parts.image_size, parts.feature_layer, projector, problems)
    tokens = None if encoder is None else encoder.tokens
    foundation = read_foundation(parts.foundation, parts.chat_template, tokens, problems)
    for part, check in ((encoder if not parts.init else None, check_weights), (foundation, check_weight_files)):
        try:
            if part is not None:
                check(part.folder)
        except ModelError as error:
            problems.append(str(error).removesuffix("."))
    if problems or encoder is None or foundation is None:
        raise ModelError("\n".join(problems))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}; name another folder") from error
    with wrap_errors(f"{encoder.folder} and {foundation.folder} cannot be composed"):
        model: PreTrainedModel = encoder.build(foundation.config, foundation.image_token_id)
    dtype = foundation.dtype()
    log(f"reading {foundation.folder}")
    decoder = foundation.load(dtype, log)
    _place_decoder(model, decoder)
    log(f"reading {encoder.folder}")
    encoder.place(model, dtype, parts.seed if parts.init else None)
    std = parts.init_std or getattr(foundation.config, "initializer_range", None) or INIT_STD
    if not 0 < std < 1:  # in the decoder's configuration; the user's was checked
        std = INIT_STD
    _draw(encoder.projector_of(model), dtype, std, parts.seed)
    if bad := fp8.find_nonfinite(model.named_parameters()):
        raise ModelError(
            f"{encoder.folder}: {bad[0]} has NaN or infinity in {str(dtype).removeprefix('torch.')}, the dtype of "
            "the decoder; download or write the weights again, or use a decoder of another dtype"
        )
    with wrap_errors(f"{type(decoder).__name__} of {foundation.folder} cannot be composed"):
        _check_answers(model, decoder)
    with atomic_write.new_folder(target, ModelError, replace=False) as folder:
        log(f"writing {target}")
        with silence_transformers():
            model.save_pretrained(folder)
            foundation.tokenizer.save_pretrained(folder)
        _write_processor(folder, encoder.processor_files())
        load_processor(folder)  # raises if the files contradict each other
        atomic_write.sync_tree(folder)
    size = encoder.config.image_size if encoder.tokens is not None else None
    return Composed(target, _count(model), encoder.projector, encoder.tokens, size, encoder.why)


def _place_decoder(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Give the model its decoder and head, which it shares. Raises ModelError for a decoder that transformers would
    build from another class, and for a head with a bias, which the model's class does not have."""
    head = decoder.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            f"{type(decoder).__name__} cannot be composed: its head has a bias, and a composed model has none"
        )
    inner, body = cast(nn.Module, model.model), decoder.get_decoder()
    if type(body) is not type(inner.language_model):
        raise ModelError(
            f"{type(decoder).__name__} cannot be composed: its decoder is {type(body).__name__}, and transformers "
            f"builds {type(inner.language_model).__name__} from the same configuration"
        )
    inner.language_model, model.lm_head = body, head
    model.config.dtype = decoder.dtype
    model.generation_config = decoder.generation_config


def _draw(projector: nn.Module, dtype: torch.dtype, std: float, seed: int) -> None:
    """Give a projector new weights: normal ones, biases of zero, and norms that scale by one."""
    projector.to_empty(device="cpu").to(dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in projector.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(0 if name.endswith("bias") else 1)


def _check_answers(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ModelError unless a text has the decoder's logits: some decoders scale or limit them after the head, which
    the composed model does not do."""
    model.eval()
    ids = torch.arange(1, 1 + _TRIAL_TOKENS)[None]
    with torch.no_grad():
        expected, composed = decoder.eval()(input_ids=ids).logits, model(input_ids=ids).logits
    if not torch.equal(expected, composed):
        raise ModelError(
            f"{type(decoder).__name__} cannot be composed: in {type(model).__name__} a text has other logits (by up to "
            f"{float((expected - composed).abs().max()):.3g}), so that class leaves out a step of this decoder"
        )


def _write_processor(folder: Path, files: Mapping[str, Mapping[str, object]]) -> None:
    """Write the files of the processor, and name its class in the tokenizer's."""
    for name, content in files.items():
        _write_json(folder / name, content)
    file = folder / "tokenizer_config.json"
    named = {"processor_class": files["processor_config.json"]["processor_class"]}
    _write_json(file, {**json.loads(file.read_text(encoding="utf-8")), **named})


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _count(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of parameters of each component; 0 for a head that is tied to the embeddings."""
    family = describe(model)
    counts = dict.fromkeys(("image_encoder", "image_projector", "foundation", "lm_head"), 0)
    for name, parameter in model.named_parameters():
        counts[family.component_of(name.rpartition(".")[0]) or "foundation"] += parameter.numel()
    return counts
