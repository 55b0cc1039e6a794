"""config.json of LLaVA-OneVision-1.5: the fields of the published folders, and checks of fields that must agree.

The language model has the fields of Qwen3 under a different `model_type`, which is kept so that a saved folder has the
published layout. Output projection and embeddings are separate tensors at all published sizes, including 4B, although
Qwen3-4B ties them. They are never tied here, independently of the folder.

The `vocab_size` at the top of published files (152064) is not the size of any tensor; the embedding table has the rows
of `text_config`.
"""

from __future__ import annotations

from typing import Any, cast

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, Qwen3Config


@strict
class RiceConfig(PreTrainedConfig):
    """RICE-ViT: patches of `patch_size` pixels, `spatial_merge_size` squared of which become one token.

    text_hidden_size  width of the language model, which is the projector's output width

    Raises ValueError if `embed_dim` is not `hidden_size`, for patches of several frames (`temporal_patch_size`), and
    for heads that cannot be split into two halves for each of two rotary axes.
    """

    model_type = "rice_vit"
    base_config_key = "vision_config"
    attribute_map = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}

    depth: int = 24
    hidden_size: int = 1024
    embed_dim: int = 1024
    intermediate_size: int = 4096
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 1
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    text_hidden_size: int = 4096
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.embed_dim != self.hidden_size:
            raise ValueError(
                f"vision_config gives embed_dim {self.embed_dim} and hidden_size {self.hidden_size}: both are the "
                "width of the tower. Correct config.json."
            )
        if self.temporal_patch_size != 1:
            raise ValueError(
                f"vision_config has temporal_patch_size {self.temporal_patch_size}, but RICE-ViT takes single "
                "frames. Set it to 1 in config.json."
            )
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision_config has {self.num_heads} heads for a width of {self.hidden_size}: each head must have a "
                "multiple of 4 features, two per axis of its rotary embedding. Correct config.json."
            )


@strict
class LLaVAOneVision1_5_TextConfig(Qwen3Config):
    """Qwen3Config under the name that published folders give it."""

    model_type = "LLaVAOneVision1_5_text"
    base_config_key = "text_config"


@strict
class LLaVAOneVision1_5_Config(PreTrainedConfig):
    """Configuration of the full model. Raises ValueError if the widths of projector and language model differ."""

    model_type = "llavaonevision1_5"
    sub_configs = {"text_config": LLaVAOneVision1_5_TextConfig, "vision_config": RiceConfig}

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652  # not in every published folder
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        for key, config_class in self.sub_configs.items():
            value = getattr(self, key)
            if not isinstance(value, PreTrainedConfig):
                setattr(self, key, config_class(**(value or {})))
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = self.text.tie_word_embeddings = False
        width, wanted = self.text.hidden_size, self.vision.text_hidden_size
        if width != wanted:
            raise ValueError(
                f"text_config gives hidden_size {width} and vision_config text_hidden_size {wanted}: both are the "
                "width of the language model. Correct config.json."
            )

    @property
    def text(self) -> Qwen3Config:
        """`text_config`, converted to an object by `__post_init__`."""
        return cast(Qwen3Config, self.text_config)

    @property
    def vision(self) -> RiceConfig:
        """`vision_config`, converted to an object by `__post_init__`."""
        return cast(RiceConfig, self.vision_config)
