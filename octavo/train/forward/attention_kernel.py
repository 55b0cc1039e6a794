"""Selects the attention kernel (`model.attention`): the named one, or the fastest that works on this device.

`auto` runs every kernel forward and backward on the shapes of the model's parts (heads, groups, head size, causal or
not, rows of `train.seq_length`), and on a GPU takes the one with the smallest total time among those whose errors are
within BF16's tolerance (:mod:`octavo.models.attention.kernel_choice`). On other devices nothing is timed, and the first
that works is taken. A call that the kernel does not support, such as rows of unequal length with a mask, falls back to
the next one that does, as in torch's own choice. A resumed run keeps its kernel.

Vision tower and language model may have different kernels (`{image_encoder: varlen, foundation: cudnn}`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from octavo import models
from octavo.config import Config
from octavo.fp8 import measuring
from octavo.models.attention.kernel_choice import COMPONENTS, Choice, Heads, choose, heads_of
from octavo.parallel import World
from octavo.train.errors import TrainError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STOCK = "sdpa"


def requested_kernels(cfg: Config, parts: tuple[Heads, ...]) -> dict[str | None, tuple[str, tuple[Heads, ...]]]:
    """Return the value of `model.attention` and the parts of each component; the key None stands for all components.
    Raises TrainError for a component that the model does not have."""
    words = cfg.model.attention.kernels
    by_component = {COMPONENTS[part.part]: part for part in parts}
    if len(set(words.values())) == 1:
        return {None: (words["foundation"], parts)}
    if "image_encoder" not in by_component:
        if words["image_encoder"] == STOCK:  # the default
            return {None: (words["foundation"], parts)}
        raise TrainError(
            f"model.attention.image_encoder: {words['image_encoder']}, but this model has no image_encoder. Use "
            f"model.attention: {words['foundation']}"
        )
    return {component: (words[component], (part,)) for component, part in by_component.items()}


def choices(cfg: Config, parts: tuple[Heads, ...], device: torch.device) -> list[Choice]:
    """Choose the kernel of each component. Returns an empty list if torch chooses at each call. Raises TrainError."""
    try:
        chosen = {
            component: choose(word, heads, device, measuring.time_calls)
            for component, (word, heads) in requested_kernels(cfg, parts).items()
        }
    except models.ModelError as error:
        raise TrainError(str(error)) from error
    return [replace(choice, component=component) for component, choice in chosen.items() if choice is not None]


def decide(cfg: Config, world: World, saved: Any) -> tuple[Choice, ...]:
    """Return the choices of a run, which rank 0 makes. Collective call.

    ``saved`` is the kernel of a resumed run, or its kernels by component, or None for a new run.
    """
    words = set(cfg.model.attention.kernels.values())
    if words == {STOCK}:
        return ()
    if "auto" in words and saved is not None:
        before = saved.items() if isinstance(saved, dict) else [(None, saved)]
        return tuple(Choice(kernel, "as this run began", component=component) for component, kernel in before)

    def work() -> list[dict[str, Any]]:
        parts = heads_of(models.read_config(cfg.model.path), cfg.train.seq_length)
        return [{**asdict(choice), "rejected": dict(choice.rejected)} for choice in choices(cfg, parts, world.device)]

    return tuple(Choice(**choice) for choice in world.run_on_main(work))


def saved_choices(chosen: Sequence[Choice]) -> Any:
    """Return the value to checkpoint for :func:`decide`, or None if there are no choices."""
    if not chosen:
        return None
    one = len(chosen) == 1 and chosen[0].component is None
    return chosen[0].kernel if one else {str(choice.component): choice.kernel for choice in chosen}


def use_kernels(model: PreTrainedModel, chosen: Sequence[Choice]) -> None:
    """Set the attention kernels of a model. Raises TrainError for a model whose attention cannot be replaced."""
    for choice in chosen:
        try:
            models.use_kernel(model, choice.kernel, choice.component)
        except (models.ModelError, ImportError, ValueError) as error:
            raise TrainError(
                f"model.attention: {choice.kernel} cannot be used: {error}. Use model.attention: {STOCK}"
            ) from error
