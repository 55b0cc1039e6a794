"""config.json of a composed model: transformers' configurations of its image encoder and of its decoder, and the token
of images. The layout is Octavo's own (`model_type: octavo_vlm`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

IMAGE_TOKEN = "<image>"
"""The token that features of an image replace, in all composed models."""


class Tower(NamedTuple):
    """The classes of an image encoder, and the field with the width of its merger's output."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    width: str


TOWERS: Mapping[str, Tower] = {
    tower.config.model_type: tower
    for tower in (
        Tower(Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel, "hidden_size"),
        Tower(Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel, "out_hidden_size"),
        Tower(Qwen3VLVisionConfig, Qwen3VLVisionModel, "out_hidden_size"),
    )
}
"""`model_type` of an image encoder -> its classes. Its merger (a norm, 2 x 2 patches to one, two linear layers) is the
projector."""


@strict
class OctavoVlmConfig(PreTrainedConfig):
    """Configuration of the full model.

    Raises ValueError for an image encoder that is not in :data:`TOWERS`, one whose merger has another width than the
    decoder, and one with features for the decoder's first layers (DeepStack), which decoders of text do not take.
    """

    model_type = "octavo_vlm"
    sub_configs = {"text_config": AutoConfig, "vision_config": AutoConfig}
    has_no_defaults_at_init = True  # its parts have none, so transformers compares a saved file with nothing

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        if self.vision_config is None or self.text_config is None:
            raise ValueError("a composed model needs vision_config and text_config")
        if isinstance(self.vision_config, dict):
            kind = str(self.vision_config.get("model_type"))
            if kind not in TOWERS:
                raise ValueError(f"vision_config has model_type {kind:.80}; expected one of {', '.join(TOWERS)}")
            fields = {key: value for key, value in self.vision_config.items() if key != "model_type"}
            self.vision_config = TOWERS[kind].config(**fields)
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = bool(self.text.tie_word_embeddings)
        width, wanted = getattr(self.vision, TOWERS[self.vision.model_type].width), self.text.hidden_size
        if width != wanted:
            raise ValueError(f"vision_config has a merger of width {width}, and the decoder has width {wanted}")
        if getattr(self.vision, "deepstack_visual_indexes", None):
            raise ValueError("vision_config has deepstack_visual_indexes, but the decoder takes no such features")

    @property
    def text(self) -> PreTrainedConfig:
        """`text_config`, converted to an object by `__post_init__`."""
        return cast(PreTrainedConfig, self.text_config)

    @property
    def vision(self) -> PreTrainedConfig:
        """`vision_config`, converted to an object by `__post_init__`."""
        return cast(PreTrainedConfig, self.vision_config)
