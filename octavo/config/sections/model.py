"""The section ``model``: the source of the weights, and which of them are loaded as FP8 codes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from octavo.base.env_vars import cache_home
from octavo.base.hub import is_name
from octavo.base.recipe_specs import join_words, parse_kind
from octavo.config.sections.names import COMPONENTS, FROM_LIST, FROZEN, FROZEN_INPUT, Frozen, Section, frozen_word
from octavo.config.sections.text_types import FilePath, Text


class LoadInFp8Section(Section):
    """How the frozen linear layers of each component are loaded: as FP8 codes with one scale for each row, for each
    block of 128 x 128, or for the tensor; absent: in high precision."""

    foundation: Frozen = Field(default=None, description="Linear layers and experts of the language model.")
    image_encoder: Frozen = Field(default=None, description="Linear layers of the vision tower.")
    image_projector: Frozen = Field(default=None, description="Linear layers of the projector (merger).")
    audio_encoder: Frozen = Field(default=None, description="Linear layers of the audio encoder.")
    audio_projector: Frozen = Field(default=None, description="Linear layers of the audio projector.")

    @property
    def kinds(self) -> dict[str, str]:
        """Component -> its kind of frozen weights (row, block, tensor); components in high precision are absent."""
        return {name: parse_kind(word) for name in COMPONENTS if (word := getattr(self, name)) is not None}


def for_foundation(value: Any) -> Any:
    """Return a single word (or `true`) as the setting of the language model; towers stay in high precision unless
    named."""
    word = frozen_word(value)
    return {"foundation": word} if word is None or word in FROZEN else value


_OR_KIND = BeforeValidator(for_foundation, json_schema_input_type=FROZEN_INPUT | LoadInFp8Section | None)


_TWIN_FORM = "expected ORG/NAME, ORG/NAME@REVISION or a folder"


class Fp8TwinSection(Section):
    """Published FP8 weights of the model, by any owner."""

    name: FilePath = Field(
        min_length=1,
        description="Name on the hub, ORG/NAME or ORG/NAME@REVISION (branch, tag or commit; absent: the newest), or a "
        "folder.",
    )
    of: Text | None = Field(
        default=None,
        description="Written by Octavo to config.yaml of a run: the model that the twin was compared with. model.path "
        "is then the twin's folder; any other is refused.",
    )

    @field_validator("name")
    @classmethod
    def _check_revision(cls, name: str) -> str:
        if name.endswith("@") and is_name(name[:-1]):
            why = _TWIN_FORM + ", found {found} with an empty revision; remove the @ for the newest"
            raise PydanticCustomError("no_twin", why, {"found": repr(name)})
        return name


def _twin_of_name(value: object) -> object:
    if value is not None and not isinstance(value, str | Mapping | Fp8TwinSection):
        raise PydanticCustomError("no_twin", _TWIN_FORM + ", found {found}", {"found": f"{value!r:.80}"})
    return {"name": value} if isinstance(value, str) else value


_OR_NAME = BeforeValidator(_twin_of_name, json_schema_input_type=FilePath | Fp8TwinSection | None)


Kernel = Literal[
    "auto", "sdpa", "cudnn", "flash", "efficient", "math", "eager", "flash_attention_2", "flash_attention_3", "varlen",
    "flex",
]  # fmt: skip


class AttentionSection(Section):
    """The attention kernel of each component."""

    image_encoder: Kernel = Field(
        default="sdpa",
        description="Kernel of the vision tower. varlen: torch's flash attention for all images of a batch in one call "
        "(families whose images differ in size; CUDA, 16 bits).",
    )
    foundation: Kernel = Field(
        default="sdpa",
        description="Kernel of the language model. varlen: torch's flash attention for all samples of a pack in one "
        "call, which sdpa also uses where it can (data.packing; CUDA, 16 bits). flex: torch's flex attention for all "
        "samples of a pack, compiled (data.packing; CUDA).",
    )

    @property
    def kernels(self) -> dict[str, str]:
        """Component -> its kernel."""
        return {"image_encoder": self.image_encoder, "foundation": self.foundation}


def _expand_word(value: Any) -> Any:
    """Return a single word as the setting of every component that has the kernel."""
    if value == "flex":
        return {"foundation": value}
    known = isinstance(value, str) and value in get_args(Kernel)
    return dict.fromkeys(AttentionSection.model_fields, value) if known else value


_OR_KERNEL = BeforeValidator(_expand_word, json_schema_input_type=Kernel | AttentionSection)


class ImageEncoderPart(Section):
    """The image encoder of a composed model."""

    path: FilePath = Field(
        min_length=1,
        description="Folder of a CLIP, SigLIP, DINOv2 or Qwen-VL, relative to the configuration file, or a name on the "
        "Hugging Face hub.",
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit of a name on the hub.")
    image_size: int | None = Field(
        default=None,
        ge=1,
        le=1 << 14,
        description="Pixels of an image, in each direction. Absent: the image encoder's.",
    )
    feature_layer: int = Field(
        default=-2, ge=-1000, le=1000, description="Hidden state that is the feature; -2: before the last layer."
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint", description="Weights of the folder, or random ones, for which it needs none."
    )


class ImageProjectorPart(Section):
    """The projector of a composed model, whose weights are random."""

    kind: Literal["mlp2", "norm_mlp2", "merge_mlp2", "pixel_shuffle_mlp2"] | None = Field(
        default=None,
        description="Two linear layers: LLaVA-1.5's (mlp2), after a LayerNorm (norm_mlp2), of 2 x 2 patches merged as "
        "in Qwen2-VL (merge_mlp2) or InternVL (pixel_shuffle_mlp2). Absent: mlp2, or the merger of a Qwen-VL.",
    )
    init_std: float | None = Field(
        default=None, gt=0, lt=1, description="Standard deviation. Absent: the decoder's initializer_range."
    )
    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1, description="Seed of the random weights.")


class FoundationPart(Section):
    """The decoder of a composed model."""

    path: FilePath = Field(
        min_length=1,
        description="Folder of a language model, relative to the configuration file, or a name on the Hugging Face "
        "hub.",
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit of a name on the hub.")
    chat_template: FilePath | None = Field(
        default=None, description="File with a template that takes images. Absent: the decoder's, with images."
    )


_MIB = 1 << 20
COMPOSED_PARTS = ("image_encoder", "image_projector", "foundation")
"""Keys of the parts of a composed model."""


def folder_of_parts(parts: Mapping[str, object]) -> str:
    """Return the folder in the user's cache of a model that is composed of these parts. Its name depends on their
    settings and on the files of their folders, so changed parts make another model."""
    files: list[list[object]] = []
    for part in parts.values():
        named = [part[key] for key in ("path", "chat_template") if part.get(key)] if isinstance(part, Mapping) else []
        for path in map(Path, map(str, named)):
            entries = sorted(path.iterdir()) if path.is_dir() else [path]
            files += [[file.name, file.stat().st_size, _sample_digest(file)] for file in entries if file.is_file()]
    key = json.dumps([dict(parts), files], sort_keys=True, default=str)
    return str(cache_home() / "composed" / hashlib.sha256(key.encode()).hexdigest()[:16])


def _sample_digest(file: Path) -> str:
    """Return a digest of the first and the last MiB of a file, and of 4 KiB at each of 512 places between. It sees each
    change of at least 1/512 of the file at a stretch, so training; a changed norm in a large file can stay unseen. A
    copy or a touched file has the same."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as content:
        for place, count in ((0, _MIB), *((size * n // 512, 4096) for n in range(512)), (max(0, size - _MIB), _MIB)):
            content.seek(place)
            digest.update(content.read(count))
            if size <= _MIB:
                break
    return digest.hexdigest()


class ModelSection(Section):
    """The checkpoint to train."""

    path: FilePath = Field(
        min_length=1,
        description="Folder of a Hugging Face checkpoint (config, tokenizer, processor, safetensors), relative to the "
        "configuration file; if it does not exist, a name on the hub, org/name. With load_in_fp8, the published FP8 "
        "checkpoint of that kind is used if the same owner has one (of another owner: fp8_twin).",
    )
    image_encoder: ImageEncoderPart | None = Field(
        default=None,
        description="Image encoder of a model that is composed of parts before it is trained. model.path is then the "
        "folder of the composed model (absent: a folder of the user's cache), and is written if it does not exist.",
    )
    image_projector: ImageProjectorPart | None = Field(
        default=None, description="Projector of a composed model. Absent: with the default settings."
    )
    foundation: FoundationPart | None = Field(default=None, description="Decoder of a composed model.")
    revision: Text | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a model on the hub; no published FP8 checkpoint replaces it. Absent: the "
        "newest.",
    )
    init: Literal["checkpoint", "random"] = Field(
        default="checkpoint",
        description="Initial weights: those of the folder; or random ones, drawn with run.seed by the family's "
        "initialization, for which config.json, tokenizer and processor are enough.",
    )
    init_std: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Standard deviation of random weights. Absent: initializer_range of config.json.",
    )
    freeze: Annotated[tuple[Text, ...], FROM_LIST] = Field(
        default=(),
        description="Parts that are not trained: image_encoder, image_projector, audio_encoder, audio_projector, "
        "foundation, "
        'lm_head, or globs over module names ("**.layers.0.**"). Each must match something.',
    )
    attention: Annotated[AttentionSection, _OR_KERNEL] = Field(
        default_factory=AttentionSection,
        description="Attention kernel: sdpa (torch chooses at each call); auto (the fastest that works for this model, "
        "timed on this GPU; without a GPU the first that works); one of torch (cudnn, flash, efficient, math), of "
        "transformers (eager), or of a package; varlen (one call for all images, or all samples of a pack); flex (for "
        "packs). One word, or one each for image_encoder and foundation. A kernel that cannot run here is refused.",
    )
    load_in_fp8: Annotated[LoadInFp8Section, _OR_KIND] = Field(
        default_factory=LoadInFp8Section,
        description=f"Quantize the frozen base of LoRA while it is read: {join_words(FROZEN, 'or')} (true: "
        f"{FROZEN[0]}); false: do not. One word means the language model's linear layers; or one word for each "
        "component. Embeddings, lm_head and routers stay in high precision. fp8.recipe, if absent, becomes the recipe "
        "that multiplies by such codes. A checkpoint that is already in FP8 does not need this setting.",
    )
    fp8_twin: Annotated[Fp8TwinSection | None, _OR_NAME] = Field(
        default=None,
        description="With load_in_fp8: published FP8 weights of any owner, in place of quantizing model.path: "
        "ORG/NAME, ORG/NAME@REVISION or a folder. They are taken only if names and shapes of the tensors, "
        "tokenizer and configuration equal model.path's. Absent: weights of another owner are never used.",
    )
    keep_fp8: bool = Field(
        default=True,
        description="For LoRA on a checkpoint that is in FP8: keep its codes as the frozen base; false: dequantize "
        "them. Without LoRA the weights are always dequantized, because they are trained.",
    )

    @model_validator(mode="before")
    @classmethod
    def _add_folder_of_parts(cls, value: object) -> object:
        """Add the folder of a composed model to parts without `path`."""
        if not isinstance(value, Mapping) or "path" in value:
            return value
        parts = {name: value[name] for name in COMPOSED_PARTS if value.get(name) is not None}
        return {**value, "path": folder_of_parts(parts)} if parts else value
