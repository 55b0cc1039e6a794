"""A composed model: features of an image encoder replace the embeddings of image tokens in a decoder of transformers.

Positions count tokens, of images and text alike, as the decoder was trained. In memory and on disk the parts have the
names of transformers' vision-language families: `model.visual`, `model.language_model`, `lm_head`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, torch_compilable_check

from octavo.models.custom.composed.configuration import TOWERS, OctavoVlmConfig
from octavo.models.custom.image_features import ImageFeatures

if TYPE_CHECKING:
    from transformers.cache_utils import Cache
    from transformers.core_model_loading import WeightRenaming


def renamings() -> list[WeightRenaming]:
    """Return no rules: names on disk are the names in memory."""
    return []


class OctavoVlmPreTrainedModel(PreTrainedModel):
    config_class = OctavoVlmConfig
    config: OctavoVlmConfig
    base_model_prefix = "model"
    input_modalities = ["image", "text"]
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class OctavoVlmModel(OctavoVlmPreTrainedModel):
    """Image encoder with its merger, and decoder, without the output projection."""

    def __init__(self, config: OctavoVlmConfig) -> None:
        super().__init__(config)
        self.visual = TOWERS[config.vision.model_type].model._from_config(config.vision)
        self.language_model = AutoModel.from_config(config.text)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: object) -> ImageFeatures:
        """Return the features of images; `pooler_output` is a tuple with [tokens, width] of each image.

        pixel_values    [patches of all images, values of a patch]
        image_grid_thw  [images, 3]: frames, rows and columns of patches
        """
        output = self.visual(pixel_values.type(self.visual.dtype), grid_thw=image_grid_thw)
        tokens = image_grid_thw.prod(-1) // self.config.vision.spatial_merge_size**2
        return ImageFeatures(output.last_hidden_state, output.pooler_output.split(tokens.tolist()))

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
        mm_token_type_ids: Tensor | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Return the decoder's output. `pixel_values` and `image_grid_thw` are as in `get_image_features`, for the
        images whose tokens are in `input_ids` [B, T], in order; `mm_token_type_ids`, which processors return, are
        ignored. Raises ValueError if the numbers of tokens and features differ."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        # Features take the places of image tokens, in order.
        if pixel_values is not None:
            if input_ids is None or image_grid_thw is None:
                raise ValueError("images are placed by input_ids: pass input_ids and image_grid_thw with pixel_values")
            rows = self.get_image_features(pixel_values, image_grid_thw).rows()
            is_placeholder = input_ids == self.config.image_token_id
            torch_compilable_check(
                is_placeholder.sum() == len(rows),
                lambda: f"{int(is_placeholder.sum())} image tokens for {len(rows)} image features",
            )
            inputs_embeds = inputs_embeds.masked_scatter(is_placeholder[..., None], rows.to(inputs_embeds))
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class OctavoVlmForConditionalGeneration(OctavoVlmPreTrainedModel, GenerationMixin):
    """The generating model."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def __init__(self, config: OctavoVlmConfig) -> None:
        super().__init__(config)
        self.model = OctavoVlmModel(config)
        self.lm_head = nn.Linear(config.text.hidden_size, config.text.vocab_size, bias=False)
        self.post_init()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, **_: object) -> ImageFeatures:
        return self.model.get_image_features(pixel_values, image_grid_thw)

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
        mm_token_type_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] of all tokens or of `logits_to_keep` (a number of last tokens, or indices), and with
        `labels` the loss; for other arguments see `OctavoVlmModel.forward`."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        # by position: transformers 5.24 renamed `past_key_values` to `cache`
        return CausalLMOutputWithPast(loss, logits, output.past_key_values, output.hidden_states, output.attentions)
