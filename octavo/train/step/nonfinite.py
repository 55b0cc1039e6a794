"""Refuses weights that are not finite, and finds the layer with the first value that is not finite. The search runs
when a run cannot continue, so it may cost two more steps. All ranks get the same answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from octavo import fp8
from octavo.fp8.weights import plain
from octavo.parallel import World
from octavo.train.errors import TrainError


def refuse_weights(model: nn.Module, world: World, when: str) -> None:
    """Raise the same TrainError on every rank if a weight is not finite. One pass over the weights and one
    synchronization with the device; a collective."""
    bad = fp8.find_nonfinite(model.named_parameters())
    if all_bad := [name for names in world.gather_objects(bad) for name in names]:
        first = next(name for name, _ in model.named_parameters() if name in all_bad)
        raise TrainError(
            f"{when} the weight {first} itself is not finite (weights that are not: {len(set(all_bad))}), so training "
            "cannot continue. No checkpoint and no model is written; existing ones remain. Lower train.lr, set "
            "train.clip, or look at the data of the steps before"
        )


def first_source(model: nn.Module, run: Callable[[], Any], world: World | None = None) -> str:
    """A sentence that names where NaN or Inf first appears when `run` (forwards and backwards) is repeated, with finite
    weights. A collective.

    Checks each module's output in the order of the forward, then each module's gradient in the order of the backward.
    A module is not at fault for bad inputs, so the innermost module with good inputs and a bad output is named. If only
    one rank finds a module, all ranks name it.
    """
    answers = (world or World()).gather_objects(_first_here(model, run))
    return str(min(answers)[1])


def _first_here(model: nn.Module, run: Callable[[], Any]) -> tuple[int, str]:
    """(rank of precision, the sentence) of this rank; smaller is more precise."""
    culprits: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not culprits and not _good(output) and _good(args) and _good(kwargs):
            culprits.append(f"the forward of {names[module] or type(module).__name__} ({type(module).__name__})")

    def backward(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        if not culprits and not _good(grad_inputs) and _good(grad_outputs):
            culprits.append(f"the backward of {names[module] or type(module).__name__} ({type(module).__name__})")

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    forward_hooks = [module.register_forward_hook(after, with_kwargs=True) for module in model.modules()]
    backward_hooks = [module.register_full_backward_hook(backward) for module in leaves]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            run()
    except RuntimeError:
        # Backward hooks turn outputs into views, which a model cannot edit in place: run again without them.
        _remove(backward_hooks)
        model.zero_grad()
        run()
    finally:
        _remove([*forward_hooks, *backward_hooks])
    if culprits:
        return 0, f"{culprits[0]} produced the first value that is not finite"
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _good(p.grad)]
    if bad:
        return 1, f"the gradient of {bad[-1]} is not finite, though every activation is"
    return 2, "no layer produced one when the step was repeated: the loss itself overflows"


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _good(value: Any) -> bool:
    """Whether every floating-point tensor inside is finite."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return True
        return bool(torch.isfinite(plain(value)).all())
    if isinstance(value, dict):
        return all(_good(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return all(_good(entry) for entry in value)
    return True
