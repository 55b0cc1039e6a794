"""LLaVA-OneVision-1.5: features of RICE-ViT replace the embeddings of image tokens in transformers' Qwen3.

Positions count tokens, of images and text alike: rotary has one axis. On disk the language model has Qwen3's names and
the tower is `visual`; in memory both are below `model`, as in transformers' vision-language families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, Qwen3Model
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from octavo.models.custom.causal_output import cache_argument, causal_output
from octavo.models.custom.image_features import ImageFeatures
from octavo.models.custom.onevision.configuration import LLaVAOneVision1_5_Config
from octavo.models.custom.onevision.tower import RiceViT

if TYPE_CHECKING:
    from transformers.cache_utils import Cache


def renamings() -> list[WeightRenaming]:
    """Return rules from names on disk to names in memory; transformers reverses them to save."""
    return [
        WeightRenaming(r"^visual\.", "model.visual."),
        WeightRenaming(r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
    ]


class LLaVAOneVision1_5_PreTrainedModel(PreTrainedModel):
    config_class = LLaVAOneVision1_5_Config
    config: LLaVAOneVision1_5_Config
    base_model_prefix = "model"
    input_modalities = ["image", "video", "text"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen3DecoderLayer", "RiceBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class LLaVAOneVision1_5_Model(LLaVAOneVision1_5_PreTrainedModel):
    """Tower, projector and decoder, without the output projection."""

    def __init__(self, config: LLaVAOneVision1_5_Config) -> None:
        super().__init__(config)
        self.visual = RiceViT(config.vision)
        self.language_model = Qwen3Model(config.text)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: object) -> ImageFeatures:
        """Return the tower's output (`RiceViT.forward`), with `pooler_output` as a tuple: [tokens, width] of each
        image."""
        output = self.visual(pixel_values, image_grid_thw)
        tokens = image_grid_thw.prod(-1) // self.config.vision.spatial_merge_size**2
        return ImageFeatures(output.last_hidden_state, output.pooler_output.split(tokens.tolist()))

    def get_video_features(self, pixel_values_videos: Tensor, video_grid_thw: Tensor, **_: object) -> ImageFeatures:
        """See `get_image_features`: the frames of a video are images."""
        return self.get_image_features(pixel_values_videos, video_grid_thw)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the decoder's output. `pixel_values` and `image_grid_thw` are as in `RiceViT.forward`, for the images
        whose tokens are in `input_ids` [B, T], in order; `mm_token_type_ids`, which processors return, are ignored.
        Raises ValueError if the numbers of tokens and features differ."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        # Images and videos have tokens of different ids, so either may be placed first.
        if pixel_values is not None:
            images = self.get_image_features(pixel_values, _required(image_grid_thw, "pixel_values", "image_grid_thw"))
            inputs_embeds = images.insert(inputs_embeds, input_ids, self.config.image_token_id)
        if pixel_values_videos is not None:
            grid = _required(video_grid_thw, "pixel_values_videos", "video_grid_thw")
            videos = self.get_video_features(pixel_values_videos, grid)
            inputs_embeds = videos.insert(inputs_embeds, input_ids, self.config.video_token_id)
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **cache_argument(self.language_model, past_key_values),
            **kwargs,
        )


def _required(grid: Tensor | None, pixels: str, name: str) -> Tensor:
    if grid is None:
        raise ValueError(f"{pixels} were passed without {name}; pass both, as the image processor returns them")
    return grid


class LLaVAOneVision1_5_ForConditionalGeneration(LLaVAOneVision1_5_PreTrainedModel, GenerationMixin):
    """The generating model; the class name is the one in `architectures` of config.json."""

    def __init__(self, config: LLaVAOneVision1_5_Config) -> None:
        super().__init__(config)
        self.model = LLaVAOneVision1_5_Model(config)
        self.lm_head = nn.Linear(config.text.hidden_size, config.text.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: object) -> ImageFeatures:
        return self.model.get_image_features(pixel_values, image_grid_thw)

    def get_video_features(self, pixel_values_videos: Tensor, video_grid_thw: Tensor, **_: object) -> ImageFeatures:
        return self.model.get_video_features(pixel_values_videos, video_grid_thw)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] of all tokens or of `logits_to_keep` (a number of last tokens, or indices), and with
        `labels` the loss; for other arguments see `LLaVAOneVision1_5_Model.forward`."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            pixel_values_videos=pixel_values_videos,
            video_grid_thw=video_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            **kwargs,
        )
        # transformers reads the names of inputs from this signature; what follows is the same in every family.
        return causal_output(self, output, labels, logits_to_keep, **kwargs)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **kwargs: Any
    ) -> Any:
        if expand_size > 1 and any(kwargs.get(key) is not None for key in ("pixel_values", "pixel_values_videos")):
            raise ValueError(
                f"{expand_size} sequences per prompt with images are not supported: patches would be repeated row by "
                f"row. Pass the prompt {expand_size} times, or use Octavo's generation engine."
            )
        stock: Any = super()  # a static method in transformers 5.17
        return stock._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs
        )
