"""A composed model: features of an image encoder replace the embeddings of image tokens in a decoder of transformers.

Positions count tokens, of images and text alike, as the decoder was trained. In memory and on disk the parts have the
names of transformers' vision-language families: of Qwen-VL where images have any size (`model.visual`, whose merger is
the projector), of LLaVA where they have one (`model.vision_tower`, `model.multi_modal_projector`); in both
`model.language_model` and `lm_head`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from octavo.models.custom.causal_output import causal_output
from octavo.models.custom.composed.configuration import (
    PROJECTORS,
    TOWERS,
    ComposedConfig,
    OctavoLlavaConfig,
    OctavoVlmConfig,
)
from octavo.models.custom.image_features import ImageFeatures

if TYPE_CHECKING:
    from transformers.cache_utils import Cache
    from transformers.core_model_loading import WeightRenaming


def renamings() -> list[WeightRenaming]:
    """Return no rules: names on disk are the names in memory."""
    return []


class ComposedPreTrainedModel(PreTrainedModel):
    config_class = ComposedConfig
    config: ComposedConfig
    base_model_prefix = "model"
    input_modalities = ["image", "text"]
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class ComposedModel(ComposedPreTrainedModel):
    """Image encoder, projector and decoder, without the output projection."""

    language_model: PreTrainedModel

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: object
    ) -> ImageFeatures:
        raise NotImplementedError

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
            features = self.get_image_features(pixel_values, image_grid_thw)
            inputs_embeds = features.insert(inputs_embeds, input_ids, self.config.image_token_id)
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class OctavoVlmPreTrainedModel(ComposedPreTrainedModel):
    config_class = OctavoVlmConfig
    config: OctavoVlmConfig


class OctavoVlmModel(OctavoVlmPreTrainedModel, ComposedModel):
    """A composed model for images of any size."""

    def __init__(self, config: OctavoVlmConfig) -> None:
        super().__init__(config)
        self.visual = TOWERS[config.vision.model_type].model._from_config(config.vision)
        self.language_model = AutoModel.from_config(config.text)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: object
    ) -> ImageFeatures:
        """Return the features of images; `pooler_output` is a tuple with [tokens, width] of each image.

        pixel_values    [patches of all images, values of a patch]
        image_grid_thw  [images, 3]: frames, rows and columns of patches
        """
        if image_grid_thw is None:
            raise ValueError("pixel_values were passed without image_grid_thw; pass both")
        output = self.visual(pixel_values.type(self.visual.dtype), grid_thw=image_grid_thw)
        tokens = image_grid_thw.prod(-1) // self.config.vision.spatial_merge_size**2
        return ImageFeatures(output.last_hidden_state, output.pooler_output.split(tokens.tolist()))


class Projector(nn.Module):
    """Converts features of an image [n, patches, C] to embeddings of the decoder [n, tokens, H], as its kind in
    :data:`PROJECTORS` defines. Merged features are concatenated row by row."""

    def __init__(self, config: OctavoLlavaConfig) -> None:
        super().__init__()
        self.kind = PROJECTORS[config.projector]
        self.side = config.side
        width, hidden = config.vision.hidden_size, config.text.hidden_size
        merged = width * self.kind.merge**2
        inner = merged if self.kind.widens else hidden
        if self.kind.norm:
            self.norm = nn.LayerNorm(width if self.kind.norm == "each" else merged, eps=self.kind.eps)
        self.linear_1 = nn.Linear(merged, inner)
        self.linear_2 = nn.Linear(inner, hidden)

    def forward(self, features: Tensor) -> Tensor:
        if self.kind.norm == "each":
            features = self.norm(features)
        if (m := self.kind.merge) > 1:
            n = self.side // m
            features = features.unflatten(1, (n, m, n, m)).transpose(2, 3).flatten(3).flatten(1, 2)
        if self.kind.norm == "merged":
            features = self.norm(features)
        return self.linear_2(F.gelu(self.linear_1(features)))


class OctavoLlavaPreTrainedModel(ComposedPreTrainedModel):
    config_class = OctavoLlavaConfig
    config: OctavoLlavaConfig


class OctavoLlavaModel(OctavoLlavaPreTrainedModel, ComposedModel):
    """A composed model for images of one size."""

    def __init__(self, config: OctavoLlavaConfig) -> None:
        super().__init__(config)
        self.vision_tower = AutoModel.from_config(config.vision)
        self.multi_modal_projector = Projector(config)
        self.language_model = AutoModel.from_config(config.text)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: object
    ) -> ImageFeatures:
        """Return the features of images [n, 3, height, width]; `pooler_output` is [n, tokens, width]. Raises
        ValueError if `image_grid_thw` is passed, which belongs to images of any size."""
        if image_grid_thw is not None:
            raise ValueError("image_grid_thw was passed, and all images have one size; use the model's own processor")
        states = self.vision_tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
        features = states[self.config.vision_feature_layer][:, self.config.leading_tokens :]
        return ImageFeatures(features, self.multi_modal_projector(features))


class ComposedForConditionalGeneration(ComposedPreTrainedModel, GenerationMixin):
    """The generating model."""

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    model_class: type[ComposedModel]

    def __init__(self, config: ComposedConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.text.hidden_size, config.text.vocab_size, bias=False)
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: object
    ) -> ImageFeatures:
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
        # transformers reads the names of inputs from this signature; what follows is the same in every family.
        return causal_output(self, output, labels, logits_to_keep, **kwargs)


class OctavoVlmForConditionalGeneration(OctavoVlmPreTrainedModel, ComposedForConditionalGeneration):
    """The generating model for images of any size."""

    model_class = OctavoVlmModel


class OctavoLlavaForConditionalGeneration(OctavoLlavaPreTrainedModel, ComposedForConditionalGeneration):
    """The generating model for images of one size."""

    model_class = OctavoLlavaModel
