"""LLaVA-OneVision-1.5: features of RICE-ViT in the place of image tokens, read by transformers' Qwen3.

Positions count tokens, images' like words': rotary has one axis. On disk the language model has Qwen3's own names and
the tower is `visual`; in memory both lie below `model`, as in transformers' vision-language families.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, Qwen3Model
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, torch_compilable_check

from octavo.models.custom.onevision.configuration import LLaVAOneVision1_5_Config
from octavo.models.custom.onevision.tower import RiceViT


def renamings() -> list[WeightRenaming]:
    """From names on disk to those in memory; transformers turns them round to save."""
    return [
        WeightRenaming(r"^visual\.", "model.visual."),
        WeightRenaming(r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
    ]


class LLaVAOneVision1_5_PreTrainedModel(PreTrainedModel):
    config_class = LLaVAOneVision1_5_Config
    config: LLaVAOneVision1_5_Config
    base_model_prefix = "model"
    input_modalities = ("image", "video", "text")
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
        self.visual = RiceViT(config.vision_config)
        self.language_model = Qwen3Model(config.text_config)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """What the tower gives (`RiceViT.forward`), `pooler_output` as a tuple: [tokens, width] of each image."""
        found = self.visual(pixel_values, image_grid_thw)
        tokens = image_grid_thw.prod(-1) // self.config.vision_config.spatial_merge_size**2
        found.pooler_output = found.pooler_output.split(tokens.tolist())
        return found

    def get_video_features(
        self, pixel_values_videos: Tensor, video_grid_thw: Tensor, **_: Any
    ) -> BaseModelOutputWithPooling:
        """As `get_image_features`: the frames of a video are images."""
        return self.get_image_features(pixel_values_videos, video_grid_thw)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The decoder's output. `pixel_values` and `image_grid_thw` as `RiceViT.forward` takes them, of the images
        whose tokens are in `input_ids` [B, T], in their order; `mm_token_type_ids`, which processors give, tell
        nothing that the ids do not. Raises ValueError where tokens and features differ in number."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            found = self.get_image_features(pixel_values, image_grid_thw)
            inputs_embeds = self._placed(found.pooler_output, inputs_embeds, input_ids, self.config.image_token_id)
        if pixel_values_videos is not None:
            found = self.get_video_features(pixel_values_videos, video_grid_thw)
            inputs_embeds = self._placed(found.pooler_output, inputs_embeds, input_ids, self.config.video_token_id)
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _placed(self, features: tuple[Tensor, ...], embeds: Tensor, ids: Tensor | None, token: int) -> Tensor:
        """Embeddings [B, T, H] with features in the place of a token, in their order."""
        if ids is None:
            raise ValueError("images stand where input_ids say, which inputs_embeds do not; give input_ids")
        rows, here = torch.cat(features), ids == token
        torch_compilable_check(
            here.sum() == len(rows),
            lambda: f"{int(here.sum())} tokens {token} stand for images whose features are {len(rows)}",
        )
        return embeds.masked_scatter(here[..., None], rows.to(embeds))


class LLaVAOneVision1_5_ForConditionalGeneration(LLaVAOneVision1_5_PreTrainedModel, GenerationMixin):
    """The model that answers in text; named as config.json's `architectures` name it."""

    def __init__(self, config: LLaVAOneVision1_5_Config) -> None:
        super().__init__(config)
        self.model = LLaVAOneVision1_5_Model(config)
        text = config.text_config
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        return self.model.get_image_features(*args, **kwargs)

    def get_video_features(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        return self.model.get_video_features(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
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
        """Logits [B, T, V], of all tokens or of `logits_to_keep` (the last so many, or indices), and with `labels` the
        loss; else as `LLaVAOneVision1_5_Model.forward`."""
        found = self.model(
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
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:
        if expand_size > 1 and any(kwargs.get(key) is not None for key in ("pixel_values", "pixel_values_videos")):
            raise ValueError(
                f"{expand_size} sequences of a prompt with images: their patches would be repeated row by row. Give "
                "the prompt so many times, or ask Octavo's generation engine."
            )
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)
