"""The configuration of NVILA: a SigLIP tower, a projector that merges neighboring patches, and a decoder.

    nvila_lite   3 x 3 patches to a token; an image becomes tiles and a thumbnail
    nvila        2 x 2 patches to a token; an image enters the tower at several scales (dynamic S2)

The fields have the names that the one-folder checkpoints use; missing fields default to the published values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from transformers import AutoConfig, PreTrainedConfig, SiglipVisionConfig

#: projector -> side of the block of patches that becomes one token
PROJECTORS = {"mlp_downsample": 2, "mlp_downsample_2x2_fix": 2, "mlp_downsample_3x3_fix": 3}
_PUBLISHED = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14,
}  # fmt: skip
"""The default tower of both models."""
_NEWLINE = 198  # "\n" of Qwen2's tokenizer
MAX_TILES = 64
"""The maximum number of tiles of an image, in addition to the configuration's limit: every image is compared with all
grids up to it."""


class NvilaLiteConfig(PreTrainedConfig):
    """NVILA-Lite: tiles.

    text_config, vision_config   of the decoder (Qwen2 or Llama) and of the tower (SigLIP), as configurations or dicts;
                                 `num_hidden_layers` of the tower counts its last layer, whose output is unused
    projector_type               one of `PROJECTORS`
    image_token_id, video_token_id   placeholders of media; they may be outside the table of embeddings
    newline_token_id             the token whose embedding ends a tile
    newlines                     the number of them after each tile, or with `s2_scales` after each image: one from the
                                 encoder and one from the prompt
    min_tiles, max_tiles         of an image, without the thumbnail; max_tiles 1: each image is one tile
    s2_scales                    side in pixels of the square of each scale, the last one cut to the image's aspect
                                 ratio (dynamic S2); empty for tiles

    Raises ValueError for an unknown projector, for scales that are not multiples of a tile, for limits that exclude
    every number of tiles, and for values that are not integers.
    """

    model_type = "nvila_lite"
    sub_configs = {"text_config": AutoConfig, "vision_config": SiglipVisionConfig}
    _projector: ClassVar[str] = "mlp_downsample_3x3_fix"
    _newlines: ClassVar[int] = 2
    _scales: ClassVar[tuple[int, ...]] = ()

    def __init__(
        self,
        text_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        vision_config: Mapping[str, Any] | PreTrainedConfig | None = None,
        projector_type: str | None = None,
        image_token_id: int = 151649,
        video_token_id: int = 151650,
        newline_token_id: int = _NEWLINE,
        newlines: int | None = None,
        min_tiles: int = 1,
        max_tiles: int = 12,
        s2_scales: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.text_config = _text_config(text_config)
        self.vision_config = _vision_config(vision_config)
        self.projector_type = projector_type or self._projector
        if self.projector_type not in PROJECTORS:
            raise ValueError(
                f"the projector {self.projector_type!r} is not supported; it must be one of {', '.join(PROJECTORS)}"
            )
        _check_integers(
            image_token_id=image_token_id, newline_token_id=newline_token_id, min_tiles=min_tiles, max_tiles=max_tiles,
            newlines=0 if newlines is None else newlines, s2_scales=() if s2_scales is None else s2_scales,
        )  # fmt: skip
        self.image_token_id, self.video_token_id = image_token_id, video_token_id
        self.newline_token_id = newline_token_id
        self.newlines = self._newlines if newlines is None else newlines
        self.min_tiles, self.max_tiles = min_tiles, max_tiles
        if not 1 <= min_tiles <= max_tiles <= MAX_TILES:
            raise ValueError(
                f"min_tiles is {min_tiles} and max_tiles {max_tiles}; they must be from 1 to {MAX_TILES} and in order"
            )
        self.s2_scales = tuple(self._scales if s2_scales is None else s2_scales)
        side = self.tile_side
        if self.s2_scales and (self.s2_scales[0] != side or any(scale % side for scale in self.s2_scales)):
            raise ValueError(
                f"s2_scales is {self.s2_scales}; it must begin with one tile, {side} pixels, and contain multiples of "
                "it"
            )
        tied = bool(getattr(self.text_config, "tie_word_embeddings", False))  # the decoder decides, not the top level
        super().__init__(**{**kwargs, "tie_word_embeddings": tied})

    @property
    def tile_side(self) -> int:
        """Side of a tile in pixels."""
        return cast(int, self.vision_config.image_size)

    @property
    def patch_side(self) -> int:
        """Side of a patch in pixels."""
        return cast(int, self.vision_config.patch_size)

    @property
    def merge(self) -> int:
        """Side of the block of patches that becomes one token."""
        return PROJECTORS[self.projector_type]

    @property
    def projector_input(self) -> int:
        """Channels of a patch at the projector's input."""
        return int(self.vision_config.hidden_size) * max(1, len(self.s2_scales))

    def tile_tokens(self, rows: int, columns: int) -> int:
        """Return tokens out of the projector for a tile of rows x columns patches."""
        return -(-rows // self.merge) * -(-columns // self.merge)


class NvilaConfig(NvilaLiteConfig):
    """NVILA: 2 x 2 patches to a token, and images at three scales, whose features are concatenated."""

    model_type = "nvila"
    _projector: ClassVar[str] = "mlp_downsample_2x2_fix"
    _newlines: ClassVar[int] = 1
    _scales: ClassVar[tuple[int, ...]] = (448, 896, 1344)

    def __init__(self, **fields: Any) -> None:  # otherwise transformers generates one from the annotations
        super().__init__(**fields)


def _check_integers(**fields: Any) -> None:
    for name, value in fields.items():
        for one in value if name == "s2_scales" and isinstance(value, list | tuple) else [value]:
            if type(one) is not int or one < 0:
                raise ValueError(f"{name} is {value!r:.80}; it must be an integer of at least 0")
    if fields["newlines"] > MAX_TILES:
        raise ValueError(f"newlines is {fields['newlines']}; it must be at most {MAX_TILES}")


def _text_config(config: Mapping[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig:
    if isinstance(config, PreTrainedConfig):
        return config
    fields = dict(config or {})
    return AutoConfig.for_model(fields.pop("model_type", "qwen2"), **fields)


def _vision_config(config: Mapping[str, Any] | PreTrainedConfig | None) -> SiglipVisionConfig:
    if isinstance(config, PreTrainedConfig):
        return cast(SiglipVisionConfig, config)
    fields = {"vision_use_head": False, **(_PUBLISHED if config is None else config)}
    kind = fields.pop("model_type", SiglipVisionConfig.model_type)
    if kind != SiglipVisionConfig.model_type:
        raise ValueError(f"the tower is a {kind!r}; Octavo's NVILA supports only {SiglipVisionConfig.model_type!r}")
    return SiglipVisionConfig(**fields)
