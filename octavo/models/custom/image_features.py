"""The result of `get_image_features` in the families that Octavo implements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput


@dataclass
class ImageFeatures(ModelOutput):
    """The fields of transformers' `BaseModelOutputWithPooling`, whose `pooler_output` is declared as a tensor only.

    last_hidden_state   features of patches, from the tower
    pooler_output       features in the language model's width: [n, tokens, H], or a [tokens, H] for each image
    """

    last_hidden_state: Tensor | None = None
    pooler_output: Tensor | tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    def rows(self) -> Tensor:
        """Return the features of all images, concatenated: [tokens of all images, H]."""
        assert self.pooler_output is not None
        features = self.pooler_output
        return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(features)
