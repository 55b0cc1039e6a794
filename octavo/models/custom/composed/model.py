"""A composed model: features of an image encoder replace the embeddings of image tokens in a decoder of transformers.

Positions count tokens, of images and text alike, as the decoder was trained; where its rotary embedding has three axes,
tokens of an image have their row and column. In memory and on disk the parts have the names of transformers'
vision-language families: of Qwen-VL where images have any size (`model.visual`, whose merger is the projector), of
LLaVA where they have one (`model.vision_tower`, `model.multi_modal_projector`); in both `model.language_model` and
`lm_head`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from octavo.models.custom.causal_output import cache_argument, causal_output
from octavo.models.custom.composed.configuration import (
    PROJECTORS,
    TOWERS,
    ComposedConfig,
    OctavoLlavaConfig,
    OctavoVlmConfig,
)
from octavo.models.custom.composed.positions import Size, has_three_axes, positions_of_rows
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
    """Image encoder, projector and decoder, without the output projection.

    images_have_one_size  whether positions of image tokens need no `image_grid_thw`
    rope_deltas           for decoders with three axes: by how much positions after the last forward or `generate`
                          without a cache differ from a count of tokens [B, 1]; None if it had no images
    """

    language_model: PreTrainedModel
    images_have_one_size = False
    rope_deltas: Tensor | None = None

    @property
    def get_rope_index(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The function for positions on three axes, as in transformers' Qwen-VL, or None if the decoder has one axis.

        It takes `input_ids` [B, T], `image_grid_thw` [images, 3] and `attention_mask` [B, T], and returns positions
        [3, B, T] and the offsets that become `rope_deltas`."""
        return self._rope_index if has_three_axes(self.config.text) else None

    def _rope_index(
        self, input_ids: Tensor, image_grid_thw: Tensor | None = None, attention_mask: Tensor | None = None, **_: object
    ) -> tuple[Tensor, Tensor]:
        is_image = input_ids == self.config.image_token_id
        return positions_of_rows(is_image, self._image_sizes(image_grid_thw), attention_mask)

    def _image_sizes(self, image_grid_thw: Tensor | None) -> Iterator[Size]:
        """Return the sizes of images, in tokens."""
        raise NotImplementedError

    def _continue_positions(
        self, input_ids: Tensor | None, grid: Tensor | None, mask: Tensor | None, cache: Cache | None, has_images: bool
    ) -> Tensor | None:
        """Return positions [3, B, T] of tokens after those in the cache, or None where they count tokens."""
        past = 0 if cache is None else cache.get_seq_length()
        before = self.rope_deltas if past else None
        if input_ids is None or not has_images and before is None:
            self.rope_deltas = None
            return None
        positions, offsets = self._rope_index(input_ids, grid, None if mask is None else mask[:, past:])
        if before is not None:  # of the prompts, of which each may have become several rows
            before = before.repeat_interleave(len(input_ids) // len(before), 0)
            positions, offsets = positions + before, offsets + before
        self.rope_deltas = offsets
        return positions + (past if mask is None else mask[:, :past].sum(1, keepdim=True))

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
        if position_ids is None and self.get_rope_index is not None:
            has_images = pixel_values is not None
            position_ids = self._continue_positions(
                input_ids, image_grid_thw, attention_mask, past_key_values, has_images
            )
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **cache_argument(self.language_model, past_key_values),
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

    def _image_sizes(self, image_grid_thw: Tensor | None) -> Iterator[Size]:
        if image_grid_thw is None:
            return iter(())
        merge = self.config.vision.spatial_merge_size
        return ((t, h // merge, w // merge) for t, h, w in image_grid_thw.tolist())


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

    images_have_one_size = True

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

    def _image_sizes(self, image_grid_thw: Tensor | None) -> Iterator[Size]:
        side = self.config.side // self.config.merge
        return repeat((1, side, side))


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

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, object]) -> Tensor:
        """Return positions for `generate`, which adds one for each token after the prompt: [B, T], or [4, B, T] with
        the three axes after the count of tokens."""
        counts = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        ids = cast("Tensor | None", model_kwargs.get("input_ids"))
        ids = inputs_tensor if ids is None or not ids.shape[1] else ids
        cache = cast("Cache | None", model_kwargs.get("cache", model_kwargs.get("past_key_values")))
        past = 0 if cache is None else cache.get_seq_length()
        is_image = ids == self.config.image_token_id
        if self.model.get_rope_index is None or ids.is_floating_point() or ids.shape[1] < counts.shape[1]:
            return counts
        if past and self.model.rope_deltas is not None and not is_image[:, past:].any():
            axes = (counts + self.model.rope_deltas).expand(3, -1, -1)
        elif is_image.any():
            axes, self.model.rope_deltas = self.model.get_rope_index(
                ids, model_kwargs.get("image_grid_thw"), model_kwargs.get("attention_mask")
            )
        else:
            self.model.rope_deltas = None
            return counts
        return torch.cat([counts.expand(len(ids), -1)[None], axes])


class OctavoVlmForConditionalGeneration(OctavoVlmPreTrainedModel, ComposedForConditionalGeneration):
    """The generating model for images of any size."""

    model_class = OctavoVlmModel


class OctavoLlavaForConditionalGeneration(OctavoLlavaPreTrainedModel, ComposedForConditionalGeneration):
    """The generating model for images of one size."""

    model_class = OctavoLlavaModel
