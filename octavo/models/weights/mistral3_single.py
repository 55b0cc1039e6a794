"""An image of one feature, alone in its batch, which Mistral 3's model takes for none.

Its `get_image_features` squeezes the first dimension of what the projector gives, [features, width], so as to be rid of
one of batches; where there is a single feature, that is the one which goes, and what is split afterwards is the width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def keep_single_features(model: nn.Module) -> None:
    """Let the projector give such a feature as [1, 1, width]. Of other families, and of more features, nothing is
    changed."""
    if getattr(model.config, "model_type", None) == "mistral3":
        for name, module in model.named_modules():
            if name.endswith("multi_modal_projector"):
                module.register_forward_hook(_as_batch)


def _as_batch(projector: nn.Module, args: tuple[Any, ...], features: Tensor) -> Tensor | None:
    return features[None] if len(features) == 1 else None
