"""The vision tower: SigLIP up to its second-to-last layer, whose outputs are the patch features.

The output of the last layer is unused, so it and the modules after it are not computed and get no gradient. Their
weights are still saved with the checkpoint: they are buffers under their original names, so that they are not trained,
planned, sharded or counted.
"""

from __future__ import annotations

from typing import cast

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


class UnusedWeights(nn.Module):
    """Holds the weights of a module and of its children as buffers with the same names; no forward reads them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters(recurse=False):
            self.register_buffer(name, parameter.detach().clone())
        for name, child in module.named_children():
            if any(True for _ in child.parameters()):
                self.add_module(name, UnusedWeights(child))


class Encoder(nn.Module):
    """The layers of the tower; the last one has only its weights."""

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__()
        layers = [SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers[:-1], UnusedWeights(layers[-1])])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if not isinstance(layer, UnusedWeights):
                hidden = layer(hidden, None)
        return hidden


class Tower(SiglipPreTrainedModel):
    """Tiles [n, 3, height, width] -> features of their patches [n, rows, columns, C]."""

    config: SiglipVisionConfig  # type: ignore[assignment]  # transformers' towers also redefine these two
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]

    def __init__(self, config: SiglipVisionConfig) -> None:
        super().__init__(config)
        self.embeddings = SiglipVisionEmbeddings(config)
        self.encoder = Encoder(config)
        self.post_layernorm = UnusedWeights(nn.LayerNorm(config.hidden_size))
        if config.vision_use_head:
            self.head = UnusedWeights(SiglipMultiheadAttentionPoolingHead(config))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.patch_embedding

    def forward(self, pixel_values: Tensor) -> Tensor:
        height, width = pixel_values.shape[-2:]
        side, patch = self.config.image_size, cast(int, self.config.patch_size)
        hidden = self.embeddings(pixel_values, interpolate_pos_encoding=(height, width) != (side, side))
        return self.encoder(hidden).unflatten(1, (height // patch, width // patch))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize like SigLIP; unused weights are set to zero, so that a saved folder always has them."""
        super()._init_weights(module)
        if isinstance(module, UnusedWeights):
            for buffer in module.buffers(recurse=False):
                init.zeros_(buffer)
