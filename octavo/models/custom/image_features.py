"""The result of `get_image_features` in the families that Octavo implements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput
from transformers.utils import torch_compilable_check


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

    def insert(self, embeds: Tensor, ids: Tensor | None, token: int) -> Tensor:
        """Return embeddings [B, T, H] in which the embeddings of a token are replaced by the features, in order. Raises
        ValueError without `ids` [B, T], and if the numbers of tokens and features differ."""
        if ids is None:
            raise ValueError("images are placed by input_ids: pass input_ids, not inputs_embeds, with images")
        rows, is_placeholder = self.rows(), ids == token
        torch_compilable_check(
            is_placeholder.sum() == len(rows),
            lambda: f"{int(is_placeholder.sum())} placeholder tokens {token} for {len(rows)} image features",
        )
        return embeds.masked_scatter(is_placeholder[..., None], rows.to(embeds))
