"""Published shapes with random weights on a device: for measuring, where no checkpoint is needed."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.models.folder.folder import quiet
from octavo.models.structure.shapes import shape_config
from octavo.models.structure.skeleton import auto_class


def random_model(
    shape: str | PreTrainedConfig,
    device: str | torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    vision_layers: int | None = None,
) -> PreTrainedModel:
    """A model of a published shape (or a configuration) with random weights, in training mode.

    Args:
        layers: keep only the first so many decoder blocks; None: all.
        vision_layers: the same for the vision tower.

    Raises ModelError for an unknown shape.
    """
    config = shortened(shape_config(shape) if isinstance(shape, str) else copy.deepcopy(shape), layers, vision_layers)
    with quiet(), torch.device(device):
        return auto_class(config).from_config(config, dtype=dtype).train()


def shortened(config: PreTrainedConfig, layers: int | None, vision_layers: int | None = None) -> PreTrainedConfig:
    """The configuration, changed to its first so many blocks of the decoder and of the vision tower (None: all)."""
    if layers is not None:
        _shorten(config.get_text_config(), layers)
    vision = getattr(config, "vision_config", None)
    if vision_layers is not None and vision is not None:
        _shorten(vision, vision_layers)
    return config


def _shorten(config: PreTrainedConfig, layers: int) -> None:
    """Cut a stack to its first blocks; what is listed by block is cut with it."""
    depth = next(name for name in ("num_hidden_layers", "depth", "n_layers") if hasattr(config, name))
    setattr(config, depth, min(layers, getattr(config, depth)))
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    if getattr(config, "deepstack_visual_indexes", None) is not None:
        config.deepstack_visual_indexes = [i for i in config.deepstack_visual_indexes if i < layers]
