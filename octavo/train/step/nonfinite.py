"""Checks that weights are finite, and finds the layer that produced the first value that is not finite. The search runs
when a run cannot continue, so it may cost two more steps. All ranks return the same result."""

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


def check_weights_finite(model: nn.Module, world: World, when: str) -> None:
    """Raise the same TrainError on every rank if a weight is not finite. One pass over the weights and one
    synchronization with the device; a collective."""
    bad = fp8.find_nonfinite(model.named_parameters())
    if all_bad := [name for names in world.gather_objects(bad) for name in names]:
        first = next(name for name, _ in model.named_parameters() if name in all_bad)
        raise TrainError(
            f"{when} the weight {first} itself is not finite (weights that are not: {len(set(all_bad))}), so training "
            "cannot continue. No checkpoint and no model is written; existing ones remain. Lower train.lr, set "
            "train.clip, or look at the data of the previous steps"
        )


def find_first_source(model: nn.Module, run: Callable[[], Any], world: World | None = None) -> str:
    """Return a sentence that names the module in which NaN or Inf first appears when `run` (forwards and backwards) is
    repeated with finite weights. Collective call.

    Checks each module's output in the order of the forward, then each module's gradient in the order of the backward.
    A module is not at fault for bad inputs, so the innermost module with good inputs and a bad output is named. If only
    one rank finds a module, all ranks name it.
    """
    answers = (world or World()).gather_objects(_find_local_source(model, run))
    return str(min(answers)[1])


def _find_local_source(model: nn.Module, run: Callable[[], Any]) -> tuple[int, str]:
    """Return (priority, sentence) of this rank; a smaller priority is a more precise result."""
    culprits: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if not culprits and not _is_finite(output) and _is_finite(args) and _is_finite(kwargs):
            culprits.append(f"the forward of {names[module] or type(module).__name__} ({type(module).__name__})")

    def backward(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        if not culprits and not _is_finite(grad_inputs) and _is_finite(grad_outputs):
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
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)]
    if bad:
        return 1, f"the gradient of {bad[-1]} is not finite, though every activation is"
    return 2, "no layer produced one when the step was repeated: the loss itself overflows"


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _is_finite(value: Any) -> bool:
    """True if every floating-point tensor in the value is finite."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return True
        return bool(torch.isfinite(plain(value)).all())
    if isinstance(value, dict):
        return all(_is_finite(entry) for entry in value.values())
    if isinstance(value, list | tuple):
        return all(_is_finite(entry) for entry in value)
    return True
