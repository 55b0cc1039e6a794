"""The tower: SigLIP up to its last layer but one, whose output is the feature of a patch.

The last layer and what follows it would be computed for nobody and get no gradient. Their weights belong to the
checkpoint all the same, which is saved back whole: they are kept as buffers under their own names, so that nothing
trains, plans, shards or counts them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig
from transformers import initialization as init
from transformers.models.siglip.modeling_siglip import (
    SiglipEncoderLayer,
    SiglipMultiheadAttentionPoolingHead,
    SiglipPreTrainedModel,
    SiglipVisionEmbeddings,
)


class Unread(nn.Module):
    """The weights of a module, by name, and of the modules in it; no forward reads them."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        for name, parameter in of.named_parameters(recurse=False):
            self.register_buffer(name, parameter.detach().clone())
        for name, child in of.named_children():
            if any(True for _ in child.parameters()):
                self.add_module(name, Unread(child))


class Encoder(nn.Module):
    """The layers of the tower; the last one is there by its weights alone."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        made = [SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([*made[:-1], Unread(made[-1])])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if not isinstance(layer, Unread):
                hidden = layer(hidden, None)
        return hidden


class Tower(SiglipPreTrainedModel):
    """Tiles [n, 3, height, width] -> features of their patches [n, rows, columns, C]."""

    config: SiglipVisionConfig
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = SiglipVisionEmbeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = Unread(nn.LayerNorm(config.hidden_size))
        if config.vision_use_head:
            self.head = Unread(SiglipMultiheadAttentionPoolingHead(config))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embedding

    def forward(self, pixel_values: Tensor) -> Tensor:
        height, width = pixel_values.shape[-2:]
        side, patch = self.config.image_size, self.config.patch_size
        hidden = self.embeddings(pixel_values, interpolate_pos_encoding=(height, width) != (side, side))
        return self.encoder(hidden).unflatten(1, (height // patch, width // patch))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As SigLIP; weights that nobody reads begin as zeros, so that a folder never lacks them."""
        super()._init_weights(module)
        if isinstance(module, Unread):
            for buffer in module._buffers.values():
                init.zeros_(buffer)
