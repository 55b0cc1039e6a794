"""NVILA and NVILA-Lite as transformers models: tower, projector and decoder. Tensors have different names on disk.

memory                              on disk, one folder
model.vision_tower.X                vision_tower.vision_model.X
model.mm_projector.X                mm_projector.X
model.language_model.X              llm.model.X
lm_head.weight                      llm.lm_head.weight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput
from transformers.utils import torch_compilable_check

from octavo.models.custom.causal_output import cache_argument
from octavo.models.custom.image_features import ImageFeatures
from octavo.models.custom.nvila.configuration import NvilaConfig, NvilaLiteConfig
from octavo.models.custom.nvila.projector import Projector
from octavo.models.custom.nvila.scales import make_blocks, make_cut, stitch, used_tiles
from octavo.models.custom.nvila.tower import Tower

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

RENAMINGS = (
    (r"^vision_tower\.vision_model\.", "model.vision_tower."),
    (r"^mm_projector\.", "model.mm_projector."),
    (r"^llm\.model\.", "model.language_model."),
    (r"^llm\.lm_head\.", "lm_head."),
)


def renamings() -> list[WeightRenaming]:
    """Return rules from names on disk to names in memory, for transformers' registry."""
    return [WeightRenaming(source_patterns=disk, target_patterns=memory) for disk, memory in RENAMINGS]


class NvilaPreTrainedModel(PreTrainedModel):
    """The base class of NVILA's models."""

    config: NvilaLiteConfig
    base_model_prefix = "model"
    input_modalities = ["image", "text"]
    media_outside = True  # ids of media may be outside the embedding table, because they are never looked up
    supports_gradient_checkpointing = True
    _no_split_modules = ["SiglipEncoderLayer", "Qwen2DecoderLayer", "LlamaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: for custom code, transformers does not initialize modules without direct parameters, so
        SigLIP's attention and MLP would not be initialized as in SigLIP."""
        return False

    def get_parameter(self, target: str) -> Any:
        """Return a parameter, or the buffer of a weight that no forward reads: transformers' loader of compressed
        tensors gets all weights with this method."""
        module, _, name = target.rpartition(".")
        unread = self.get_submodule(module)._buffers.get(name)
        return super().get_parameter(target) if unread is None else unread


class NvilaLiteModel(NvilaPreTrainedModel):
    """Tower, projector and decoder, without an output projection."""

    config_class: type[NvilaLiteConfig] = NvilaLiteConfig

    def __init__(self, config: NvilaLiteConfig) -> None:
        super().__init__(config)
        self.vision_tower = Tower(config.vision_config)
        self.mm_projector = Projector(config.merge, config.projector_input, config.text_config.hidden_size)
        self.language_model = AutoModel.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language_model.set_input_embeddings(value)

    def get_decoder(self) -> PreTrainedModel:
        return self.language_model

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: object
    ) -> ImageFeatures:
        """Return features of tiles [n, 3, height, width].

        `pooler_output`: the embeddings of the images in the text and of the line breaks that end them:
        [n, tokens, H] of tiles; with several scales a [tokens, H] for each image, by its grid
        (:class:`octavo.models.custom.nvila.images.NvilaImages`). Raises ValueError for several scales without grids.
        """
        pixels = pixel_values.to(self.vision_tower.dtype)
        if not self.config.s2_scales:
            patches = self.vision_tower(pixels)
            return ImageFeatures(patches, self.add_line_breaks(self.mm_projector(patches)))
        if image_grid_thw is None:
            raise ValueError("images at several scales require image_grid_thw, which determines their tiles")
        squares = [(scale // self.config.tile_side) ** 2 for scale in self.config.s2_scales[:-1]]
        cuts = [make_cut(grid, squares) for grid in image_grid_thw.tolist()]
        patches = self.vision_tower(pixels[torch.tensor(used_tiles(cuts), device=pixels.device)])
        blocks = make_blocks(patches, cuts, len(self.config.s2_scales))
        # One projector call for the blocks of all images, so that each of its layers runs once per forward.
        tokens = self.mm_projector(torch.cat(blocks)).split([len(block) for block in blocks])
        images = [stitch(one, cut.rows, cut.columns) for one, cut in zip(tokens, cuts, strict=True)]
        return ImageFeatures(patches, tuple(self.add_line_breaks(image[None])[0] for image in images))

    def add_line_breaks(self, features: Tensor) -> Tensor:
        """Return features [n, tokens, H] followed by the embeddings of line breaks, [n, tokens + newlines, H]."""
        count = self.config.newlines
        if not count:
            return features
        table = self.get_input_embeddings()
        ids = torch.full((len(features), count), self.config.newline_token_id, device=features.device)
        return torch.cat([features, table(ids).to(features.dtype)], 1)

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (embeddings of the tokens [B, T, H], whether a token is a placeholder of an image [B, T]). Media have
        ids beyond the table, so row 0 is looked up for them and replaced later."""
        is_placeholder = input_ids == self.config.image_token_id
        embeds: Tensor = self.get_input_embeddings()(input_ids.masked_fill(is_placeholder, 0))
        return embeds, is_placeholder

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if input_ids is None and pixel_values is not None:
            raise ValueError("images are placed by input_ids: pass these, not inputs_embeds, with pixel_values")
        if input_ids is not None:
            inputs_embeds, is_placeholder = self.embed(input_ids)
            if pixel_values is not None:
                features = self.get_image_features(pixel_values, image_grid_thw).rows()
                # Without this check masked_scatter would silently drop surplus features.
                torch_compilable_check(
                    is_placeholder.sum() == len(features),
                    f"the number of image placeholders in the text differs from the {len(features)} image features",
                )
                inputs_embeds = inputs_embeds.masked_scatter(is_placeholder[..., None], features.to(inputs_embeds))
        return self.language_model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **cache_argument(self.language_model, past_key_values),
            **kwargs,
        )


@dataclass
class NvilaOutput(ModelOutput):
    """`loss` if labels were passed, `logits` [B, T, V] and the outputs that generation needs."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class NVILALiteForConditionalGeneration(NvilaPreTrainedModel, GenerationMixin):
    """NVILA-Lite with its output projection: computes logits from text and tiles."""

    config_class: type[NvilaLiteConfig] = NvilaLiteConfig
    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    base_class: type[NvilaLiteModel] = NvilaLiteModel

    def __init__(self, config: NvilaLiteConfig) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> PreTrainedModel:
        return self.model.language_model

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **_: object
    ) -> ImageFeatures:
        return self.model.get_image_features(pixel_values, image_grid_thw)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> NvilaOutput:
        out = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            image_grid_thw=image_grid_thw,
            **kwargs,
        )
        # Generation requests only the logits of the last token; slice(0, None) keeps all.
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return NvilaOutput(loss, logits, out.past_key_values, out.hidden_states, out.attentions)


class NvilaModel(NvilaLiteModel):
    """Tower, projector and decoder of NVILA."""

    config_class = NvilaConfig


class NVILAForConditionalGeneration(NVILALiteForConditionalGeneration):
    """NVILA with its output projection: computes logits from text and images at several scales."""

    config_class = NvilaConfig
    base_class = NvilaModel
