"""``octavo.load``: load a Hugging Face model, optionally with its linear layers in FP8 and a PEFT adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from octavo import fp8


def load(
    path: str | Path,
    load_in_fp8: str | bool | Mapping[str, str | None] | None = None,
    adapter: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    recipe: str | fp8.Policy | None = None,
    keep_fp8: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> PreTrainedModel:
    """Load a model from a local Hugging Face folder, in eval mode.

    A model with FP8 codes is frozen entirely, since codes are never trained. Adapters, or a component that is unfrozen
    by name, can be trained; a training forward without any trainable parameter raises ModelError.

    Args:
        path: the folder, or a name of the Hugging Face hub (org/name): BF16 or fp32 weights, or FP8 codes (DeepSeek's
            blocks, compressed-tensors).
        load_in_fp8: ``"rowwise"`` (or True), ``"blockwise"`` or ``"tensorwise"``: the linear layers and experts of the
            language model become frozen FP8 weights while loading; a mapping sets it separately for foundation,
            image_encoder and image_projector. None keeps the weights as stored, codes unchanged.
        adapter: a PEFT folder to attach; only its adapters then require gradients.
        dtype: the dtype of parameters that are not FP8; BF16 by default.
        device: where to put the model.
        recipe: an FP8 recipe (or a policy) to plan and apply after loading. With None, layers stay standard and
            frozen FP8 weights compute as their dequantized values.
        keep_fp8: if False, convert FP8 codes in the folder to ``dtype``.
        log: called with messages for the user, e.g. which of two sets of weights was chosen.

    Raises ModelError, PlanError or AdapterError; each message names the cause and the fix.
    """
    # Imported here, so that `import octavo` needs no torch.
    import torch

    from octavo import adapters, fp8, models
    from octavo.base import hub
    from octavo.fp8.weights import frozen_weights

    if hub.is_name(str(path)):
        path = hub.model_folder(str(path), None, None, log)
    model = models.load(
        path,
        dtype=dtype or torch.bfloat16,
        device=device,
        load_in_fp8=load_in_fp8,
        keep_fp8=keep_fp8,
        log=log,
    )
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe, models.describe(model).components))
    if adapter is not None:
        adapters.load(model, adapter, log)
    elif next(frozen_weights(model), None) is not None:
        models.freeze_all(model)
    return model
