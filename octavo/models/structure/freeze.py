"""Freezes parameters by component or glob, with an error for unknown names, or a full model with frozen FP8 weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from octavo.fp8.policy import covers, nearest
from octavo.models.errors import ModelError
from octavo.models.structure.describe import COMPONENTS, Family


def freeze(model: nn.Module, family: Family, patterns: Sequence[str]) -> list[str]:
    """Set `requires_grad=False` on the parameters that `patterns` name; return their names, each once, in model order.

    A pattern is a component (image_encoder, audio_encoder, foundation, lm_head ...) or a glob on dotted module or
    parameter names; a glob that names a module covers everything inside it (`**.layers.0`). A tied parameter counts
    under each of its names: freezing lm_head freezes the embedding that it shares.

    Raises ModelError, before anything is changed, for a component that the model does not have, a pattern that matches
    nothing (with the nearest names), a malformed pattern, and if nothing would be left to train.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    chosen: set[str] = set()
    for pattern in patterns:
        chosen.update(_match_parameters(pattern, names, family, model))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {id(parameters[name]) for name in chosen}
    trainable = [name for name, p in parameters.items() if p.requires_grad and id(p) not in frozen]
    if patterns and not trainable:
        raise ModelError(
            f"freezing {', '.join(patterns)} leaves no parameter of this {family.name} to train. Freeze less."
        )
    for name in chosen:
        parameters[name].requires_grad_(False)
    return [name for name in names if id(parameters[name]) in frozen]


def freeze_all(model: nn.Module) -> None:
    """Freeze a model with frozen FP8 weights, so that only adapters or components that the caller later attaches or
    unfreezes are trained. Otherwise all parameters that are not FP8 codes (norms, embeddings, the vision tower) would
    be trained while the language model stays fixed. As long as nothing is trainable, a forward in training mode raises
    ModelError."""
    model.requires_grad_(False)
    model.register_forward_hook(_refuse_untrained)


def _refuse_untrained(model: nn.Module, args: object, output: object) -> None:
    if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    if not any(isinstance(value, Tensor) and value.requires_grad for value in values):
        raise ModelError(
            f"this {type(model).__name__} is in training mode, but none of its parameters requires a gradient: its "
            "layers are FP8 codes (load_in_fp8, or a folder in FP8), which are never trained, and all other parameters "
            "were frozen with them. Attach adapters (octavo.adapters, PEFT), unfreeze a part "
            "(model.model.visual.requires_grad_(True)), load in high precision (no load_in_fp8, keep_fp8=False) to "
            "train all weights, or call model.eval() first"
        )


def _match_parameters(pattern: str, names: list[str], family: Family, model: nn.Module) -> list[str]:
    if pattern in COMPONENTS:
        if pattern not in family.components:
            raise ModelError(
                f"freeze: {family.name} has no {pattern}; it has {', '.join(family.components)}. Remove {pattern}."
            )
        return [name for name in names if family.component_of(name.rpartition(".")[0]) == pattern]
    try:
        covered = [name for name in names if covers(pattern, name)]
    except ValueError as error:
        raise ModelError(f"freeze: {error}") from error
    if not covered:
        known = [*family.components, *(name for name, _ in model.named_modules() if name), *names]
        close = nearest(pattern, known)
        hint = f" Nearest names: {', '.join(close)}." if close else ""
        raise ModelError(
            f"freeze: {pattern!r} names neither a component ({', '.join(family.components)}) nor any module or "
            f"parameter of this {family.name}.{hint}"
        )
    return covered
