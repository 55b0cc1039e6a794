"""An image encoder for images of one size, of a composed model: what its folder has, and which of its features the
projector receives.

    CLIP      class token and patches; the class token is dropped
    SigLIP    patches (also SigLIP 2 of a fixed size)
    DINOv2    class token, registers if it has them, and patches, of which the patches are kept; positions are
              interpolated to the size of its images
    DINOv3    class token, registers and patches, of which the patches are kept; its positions are rotary

Features are the tower's hidden states after the layer before the last (LLaVA's choice), without the tower's last norm.
With LLaVA's projector and at most one token to drop, the composed model has the shape of LLaVA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from octavo.base.model_families import leading_tokens
from octavo.base.wording import did_you_mean
from octavo.models.compose import grid
from octavo.models.compose.image_settings import ImageSettings, read_image_settings
from octavo.models.custom.composed import (
    IMAGE_TOKEN,
    PROJECTORS,
    TOWERS,
    OctavoLlavaConfig,
    OctavoLlavaForConditionalGeneration,
)
from octavo.models.errors import ModelError
from octavo.models.folder.folder import check_sizes, read_json, silence_transformers, wrap_errors
from octavo.models.weights.assembly import check_loading_report

FEATURE_LAYER = -2
"""The hidden state that is the feature: -2 is the output of the layer before the last."""


@dataclass(frozen=True)
class _Tower:
    """How one kind of tower is built and read.

    positions   the parameter with learned positions, "" if there is none; `antialias`: how they are interpolated
    processor   its image processor
    whole       the `model_type` of a model of which it is a part
    """

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    positions: str
    processor: str
    whole: str = ""
    antialias: bool = False


_TOWERS: Mapping[str, _Tower] = {
    "clip_vision_model": _Tower(
        CLIPVisionConfig, CLIPVisionModel, "embeddings.position_embedding.weight", "CLIPImageProcessor", "clip"
    ),
    "siglip_vision_model": _Tower(
        SiglipVisionConfig, SiglipVisionModel, "embeddings.position_embedding.weight", "SiglipImageProcessor", "siglip"
    ),
    "dinov2": _Tower(Dinov2Config, Dinov2Model, "embeddings.position_embeddings", "BitImageProcessor"),
    "dinov2_with_registers": _Tower(
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
        "embeddings.position_embeddings",
        "BitImageProcessor",
        antialias=True,
    ),
    "dinov3_vit": _Tower(DINOv3ViTConfig, DINOv3ViTModel, "", "DINOv3ViTImageProcessor"),
}
"""`model_type` of a tower -> how it is built."""
_SETTINGS = {
    # A pooling head, and the token of masked patches, which no feature passes.
    "vision_use_head": False,
    "use_mask_token": False,
    # DINO drops blocks and moves positions at random in training, also while it is frozen.
    "drop_path_rate": 0.0,
    "pos_embed_shift": None,
    "pos_embed_jitter": None,
    "pos_embed_rescale": None,
}
"""Settings of a tower's configuration that composed models change."""

_UNSUPPORTED = {
    **dict.fromkeys(
        ("siglip2", "siglip2_vision_model"),
        "NaFlex images have any size, and the projector receives features of one size; use a SigLIP 2 of a fixed size",
    ),
    "dinov3_convnext": "it has no patches; use a DINOv3 with model_type dinov3_vit",
}
"""`model_type` -> why it cannot be composed, as the end of a sentence."""


@dataclass(frozen=True)
class TileEncoder:
    """An image encoder, read without its weights.

    folder         of its weights
    config         with the image size of the composed model
    stored_size    pixels of an image, in each direction, for which the folder has positions
    processor      the contents of preprocessor_config.json for the composed model
    feature_layer  the hidden state that is the feature
    projector      a name in `PROJECTORS`
    """

    folder: Path
    config: PreTrainedConfig
    stored_size: int
    processor: Mapping[str, object]
    feature_layer: int
    projector: str

    @property
    def kind(self) -> _Tower:
        return _TOWERS[self.config.model_type]

    @property
    def leading(self) -> int:
        """Tokens before the patches."""
        return leading_tokens(self.config)

    @property
    def is_llava(self) -> bool:
        """Whether LLaVA's class has this projector, and drops as many leading tokens."""
        return self.projector == "mlp2" and self.leading <= 1

    @property
    def select_strategy(self) -> Literal["default", "full"]:
        """LLaVA's word for dropping one leading token ("default") or none."""
        return "default" if self.leading else "full"

    @property
    def merge(self) -> int:
        """Patches that the projector merges, in each direction."""
        return PROJECTORS[self.projector].merge

    @property
    def tokens(self) -> int:
        """Features of an image."""
        return cast(int, (self.config.image_size // self.config.patch_size // self.merge) ** 2)

    @property
    def why(self) -> str:
        """Why the composed model has its shape, as the end of a sentence."""
        features = f"{self.config.model_type} gives each image {self.tokens} features"
        if self.is_llava:
            return f"LLaVA's shape (model_type llava), because {features}"
        reasons = [f"LLaVA's class has no projector {self.projector}"] * (self.projector != "mlp2")
        reasons += [f"{self.config.model_type} has registers"] * (self.leading > 1)
        return f"Octavo's shape (model_type octavo_llava), because {' and '.join(reasons)}"

    def build(
        self, text: PreTrainedConfig, image_token_id: int
    ) -> LlavaForConditionalGeneration | OctavoLlavaForConditionalGeneration:
        """Return the composed model without weights."""
        with torch.device("meta"):
            if self.is_llava:
                return LlavaForConditionalGeneration(self._llava_config(text, image_token_id))
            config = OctavoLlavaConfig(
                vision_config=self.config,
                text_config=text,
                image_token_id=image_token_id,
                projector=self.projector,
                vision_feature_layer=self.feature_layer,
            )
            return OctavoLlavaForConditionalGeneration(config)

    def _llava_config(self, text: PreTrainedConfig, image_token_id: int) -> LlavaConfig:
        return LlavaConfig(
            vision_config=self.config,
            text_config=text,
            image_token_index=image_token_id,
            image_seq_length=self.tokens,
            vision_feature_layer=self.feature_layer,
            vision_feature_select_strategy=self.select_strategy,
            tie_word_embeddings=text.tie_word_embeddings,
        )

    def place(self, model: PreTrainedModel, dtype: torch.dtype, seed: int | None) -> None:
        """Give the model's tower the weights of the folder, or with a seed random ones. Raises ModelError."""
        inner = cast(nn.Module, model.model)
        if seed is None:
            inner.vision_tower = self.load(dtype)
            return
        config = type(self.config).from_dict(self.config.to_dict())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner.vision_tower = self.kind.model._from_config(config).to(dtype)

    @staticmethod
    def projector_of(model: PreTrainedModel) -> nn.Module:
        """Return the projector of the composed model."""
        return model.get_submodule("model.multi_modal_projector")

    def processor_files(self) -> dict[str, dict[str, object]]:
        """Return the files of the composed model's processor."""
        # The processor counts patches; merged ones count as one larger patch.
        entries: dict[str, object] = {
            "processor_class": "LlavaProcessor",
            "image_token": IMAGE_TOKEN,
            "patch_size": self.config.patch_size * self.merge,
            "vision_feature_select_strategy": self.select_strategy if self.is_llava else "full",
            "num_additional_image_tokens": self.leading if self.is_llava else 0,
        }
        return {"preprocessor_config.json": dict(self.processor), "processor_config.json": entries}

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the tower with its weights, on the CPU. Raises ModelError, naming what is missing or mis-shaped."""
        config = type(self.config).from_dict({**self.config.to_dict(), "image_size": self.stored_size})
        with wrap_errors(f"{self.folder} cannot be loaded as {config.model_type!r}"), silence_transformers():
            loaded = self.kind.model.from_pretrained(
                self.folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
            )
        tower, info = cast(tuple[PreTrainedModel, dict[str, Iterable[object]]], loaded)
        unexpected = [name for name in map(str, info["unexpected_keys"]) if not _is_left_out(name)]
        check_loading_report(self.folder, {**info, "unexpected_keys": unexpected})
        self._resize_positions(tower)
        return tower

    def _resize_positions(self, tower: PreTrainedModel) -> None:
        if self.stored_size == self.config.image_size or not self.kind.positions:
            tower.config.image_size = self.config.image_size
            return
        name, _, attribute = self.kind.positions.rpartition(".")
        owner = tower.get_submodule(name)
        stored = cast(Tensor, getattr(owner, attribute)).detach()
        side = self.config.image_size // self.config.patch_size
        first = min(self.leading, 1)  # the class token has a position, registers have none
        resized = resize_positions(stored.flatten(0, -2), first, side, self.kind.antialias)
        setattr(owner, attribute, torch.nn.Parameter(resized.view(*stored.shape[:-2], *resized.shape)))
        tower.config.image_size = self.config.image_size


def resize_positions(positions: Tensor, leading: int, side: int, antialias: bool = False) -> Tensor:
    """Return learned positions [leading + n^2, C] for side^2 patches, interpolated as transformers' towers do it
    (bicubic, in fp32, DINOv2 with registers with antialiasing). Positions of leading tokens do not change."""
    patches = positions[leading:]
    before = round(len(patches) ** 0.5)
    grid = patches.float().view(1, before, before, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False, antialias=antialias)
    rows = grid.permute(0, 2, 3, 1).flatten(0, 2).to(positions.dtype)
    return torch.cat([positions[:leading], rows])


def _is_left_out(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in ("text_model", "logit_scale", "logit_bias", "text_projection", "visual_projection") or (
        "head" in parts[:2] or parts[-1] in ("position_ids", "mask_token")
    )


def read_tile_encoder(
    folder: Path,
    settings: Mapping[str, object],
    image_size: int | None,
    feature_layer: int,
    projector: str,
    problems: list[str],
) -> TileEncoder | None:
    """Read the configuration of a tower's folder, and adapt the settings of its image processor. Adds a sentence to
    `problems` for each thing that keeps it from being composed, and returns None if there is any."""
    before = len(problems)
    try:
        config = _read_config(folder)
    except ModelError as error:
        problems.append(str(error))
        return None
    images, size = None, image_size
    try:
        images = read_image_settings(folder, settings, _TOWERS[config.model_type].processor)
    except ModelError as error:
        problems.append(str(error))
    else:
        size = size or _size_of(folder, config, images, problems)
    if size is not None and (why := _why_no_grid(size, config.patch_size, projector, image_size is not None)):
        problems.append(why)
    layers = config.num_hidden_layers
    if not -layers - 1 <= feature_layer <= layers or feature_layer == 0:  # transformers takes 0 for an absent value
        problems.append(
            f"--feature-layer {feature_layer}: {folder} has {layers} layers; name one of -{layers + 1} to -1, or 1 to "
            f"{layers}"
        )
    if getattr(config, "num_channels", 3) != 3:
        problems.append(f"{folder / 'config.json'}: num_channels is {config.num_channels}; images have 3")
    if len(problems) > before or size is None or images is None:
        return None
    stored, config.image_size = config.image_size, size
    for setting, value in _SETTINGS.items():
        if hasattr(config, setting):
            setattr(config, setting, value)
    try:
        adapted = images.of_size(size)
    except ModelError as error:
        problems.append(str(error))
        return None
    return TileEncoder(folder, config, stored, adapted, feature_layer, projector)


def _size_of(folder: Path, config: PreTrainedConfig, images: ImageSettings, problems: list[str]) -> int | None:
    """Return the size of images in each direction, if the user names none. Adds a sentence to `problems` where the
    folder names none, or more than one."""
    # A DINO interpolates its positions, and is published for larger images than its processor makes.
    size = images.size if config.model_type.startswith("dino") else cast(int, config.image_size)
    if len(images.sizes) > 1:
        problems.append(
            f"{images.file} makes images that are not square, and an image encoder takes squares; name one size with "
            "--image-size"
        )
    elif images.size not in (None, size):
        problems.append(
            f"{images.file} makes images of {images.size} pixels, but {folder / 'config.json'} takes {size}; "
            "name one of them with --image-size"
        )
    elif size is None:
        problems.append(f"{images.file} has no size of images; name one with --image-size")
    return size


def _why_no_grid(size: int, patch: int, projector: str, is_chosen: bool) -> str:
    """Return why an image of `size` pixels cannot be cut into the patches of a tower, or merged by the projector; "" if
    it can. Published towers may leave out the last pixels of an image; a size that the user has chosen may not."""
    side, merge = size // patch, PROJECTORS[projector].merge
    if side and (size % patch == 0 or not is_chosen) and side % merge == 0:
        return ""
    step = patch * merge
    sizes = " and ".join(str(near) for near in (size // step * step, (size // step + 1) * step) if near)
    nearest = f"the nearest {'sizes are' if ' and ' in sizes else 'size is'} {sizes}"
    if not side or size % patch and is_chosen:
        return f"an image of {size} pixels cannot be cut into patches of {patch}; {nearest}"
    return (
        f"--projector {projector} merges 2 x 2 patches, and an image of {size} pixels has {side} x {side} of {patch}; "
        f"{nearest}: --image-size {(size // step + 1) * step}"
    )


def _read_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a tower, also if the folder has a whole CLIP or SigLIP. Raises ModelError."""
    file = folder / "config.json"
    raw = read_json(file)
    check_sizes(file)
    named = str(raw.get("model_type"))
    wholes = {tower.whole: name for name, tower in _TOWERS.items() if tower.whole}
    kind = wholes.get(named, named)
    if kind not in _TOWERS:
        why = _UNSUPPORTED.get(kind, "")
        if not why:
            names = (*wholes, *_TOWERS, *grid.WHOLE, *TOWERS)
            why = f"the image encoders are {', '.join(names)}.{did_you_mean(named, names)}"
        raise ModelError(f"{file}: model_type {named!r:.80} cannot be composed: {why.removesuffix('.')}")
    part = raw.get("vision_config", {}) if named in wholes else raw
    fields: Mapping[str, object] = part if isinstance(part, dict) else {}
    # A whole CLIP lists only what differs from the defaults.
    defaults = _TOWERS[kind].config().to_dict() if named in wholes else {}
    for name in ("hidden_size", "patch_size", "num_hidden_layers", "image_size"):
        value = fields.get(name, defaults.get(name))
        if type(value) is not int or value < 1:
            raise ModelError(f"{file}: {name} is {value!r:.80}; an image encoder needs a number above 0")
    with wrap_errors(f"{file} cannot be used"):
        config = _TOWERS[kind].config.from_dict({key: value for key, value in fields.items() if key != "model_type"})
    if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
        raise ModelError(
            f"{file}: num_attention_heads is {config.num_attention_heads}, which does not divide hidden_size "
            f"{config.hidden_size}"
        )
    return config
