"""Weights that are not finite, which end a run; and which layer made the first value that is not finite, asked when a
run cannot go on, so that it may cost two more steps. All ranks come to one answer."""

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
    """Raise TrainError where a weight is not finite, on every rank the same. One pass over the weights and one wait for
    the device; a collective."""
    bad = fp8.find_nonfinite(model.named_parameters())
    if all_bad := [name for names in world.gather_objects(bad) for name in names]:
        first = next(name for name, _ in model.named_parameters() if name in all_bad)
        raise TrainError(
            f"{when} the weight {first} itself is not finite (weights that are not: {len(set(all_bad))}), and nothing "
            "can be learnt from that. No checkpoint and no model is written of it; those that are there stay. Lower "
            "train.lr, set train.clip, or look at the data of the steps before"
        )


def first_source(model: nn.Module, run: Callable[[], Any], world: World | None = None) -> str:
    """One sentence naming where NaN or Inf first appears when `run` (forwards and backwards) is repeated. A collective.

    The weights are finite. Looked at in this order: each module's output in the order of the forward; the loss's way
    back, each module's gradient in the order of the backward. Inputs that are already bad are not a module's own fault,
    so the innermost module with good inputs and a bad output is named. What one rank alone finds, all say.
    """
    answers = (world or World()).gather_objects(_first_here(model, run))
    return str(min(answers)[1])


def _first_here(model: nn.Module, run: Callable[[], Any]) -> tuple[int, str]:
    """(how little it says, the sentence) of this rank."""
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
        # Backward hooks make outputs views, which a model that edits them in place refuses: do without.
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
