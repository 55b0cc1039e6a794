"""``octavo.load``: a Hugging Face model with its linear layers in FP8, and with a PEFT adapter, for users of Python."""

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
    say: Callable[[str], None] = lambda text: None,
) -> PreTrainedModel:
    """A model from a local Hugging Face folder, in eval mode.

    With FP8 codes in it the whole model is frozen, since codes are never trained: adapters, or a component that is
    unfrozen by name, train beside them, and a forward in training in which nothing does is a ModelError.

    Args:
        path: the folder, or a name of the Hugging Face hub (org/name): BF16 or fp32 weights, or FP8 codes (DeepSeek's
            blocks, compressed-tensors).
        load_in_fp8: ``"rowwise"`` (or True), ``"blockwise"`` or ``"tensorwise"``: the linear layers and experts of the
            language model become frozen FP8 weights while they are read; a mapping says it for each of foundation,
            image_encoder and image_projector. None: as the folder has them, codes untouched.
        adapter: a PEFT folder to attach; only its adapters ask for a gradient then. None: none.
        dtype: of what is not FP8; None: BF16.
        device: where the model ends up.
        recipe: an FP8 recipe (or a policy) to plan and apply at once, for whole FP8 layers; None: stock layers, where
            frozen weights compute as their dequantized values.
        keep_fp8: False: codes in the folder become values in ``dtype``.
        say: gets what a person should know, such as which of two sets of weights was taken.

    Raises ModelError, PlanError and AdapterError, each with what was found and the fix.
    """
    # Imported here, so that `import octavo` needs no torch.
    import torch

    from octavo import adapters, fp8, models
    from octavo.base import hub
    from octavo.fp8.weights import frozen_weights

    if hub.is_name(str(path)):
        path = hub.model_folder(str(path), None, None, say)
    model = models.load(
        path,
        dtype=dtype or torch.bfloat16,
        device=device,
        load_in_fp8=load_in_fp8,
        keep_fp8=keep_fp8,
        say=say,
    )
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, recipe, models.describe(model).components))
    if adapter is not None:
        adapters.load(model, adapter, say)
    elif next(frozen_weights(model), None) is not None:
        models.freeze_all(model)
    return model
