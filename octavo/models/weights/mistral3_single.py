"""A workaround for batches of a single image feature, which Mistral 3's model loses.

Its `get_image_features` squeezes the first dimension of the projector's output, [features, width], to remove a batch
dimension. With a single feature this removes the feature's dimension instead, and the width is split afterwards.
"""

from __future__ import annotations

from torch import Tensor, nn


def keep_single_features(model: nn.Module) -> None:
    """Make the projector of Mistral 3 return a single feature as [1, 1, width]. Other families and several features are
    not changed."""
    if getattr(model.config, "model_type", None) == "mistral3":
        for name, module in model.named_modules():
            if name.endswith("multi_modal_projector"):
                module.register_forward_hook(_keep_batch_dim)


def _keep_batch_dim(projector: nn.Module, args: tuple[object, ...], features: Tensor) -> Tensor | None:
    return features[None] if len(features) == 1 else None
