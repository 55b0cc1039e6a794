"""Weights drawn by a family's own rules, a part of the model at a time, so that nobody holds all of them.

transformers initialises modules one by one, the innermost first, by the `_init_weights` of the model that they are in;
a module may set parameters of its children. So a part is a block, or what has no block in it, and is drawn whole. Parts
come in transformers' order: the numbers are those of `initialize_weights` of a model that is whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.models.errors import ModelError


def parts(model: PreTrainedModel, blocks: Collection[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, fp32 values on the CPU) of every parameter of a model on the meta device, tied ones apart.

    Numbers are of a generator of this seed; the process' own is left alone. Raises ModelError for a parameter that the
    family leaves undrawn, and for a module that sets parameters of another part.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        yield from _below("", model, model, frozenset(blocks))


def _below(
    name: str, module: nn.Module, owner: PreTrainedModel, blocks: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    owner = module if isinstance(module, PreTrainedModel) else owner
    inside = any(block.startswith(f"{name}.") if name else True for block in blocks)
    if not inside or name in blocks:
        yield from _part(name, module, owner, recurse=True)
        return
    for leaf, child in module.named_children():
        yield from _below(f"{name}.{leaf}" if name else leaf, child, owner, blocks)
    yield from _part(name, module, owner, recurse=False)


def _part(name: str, module: nn.Module, owner: PreTrainedModel, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    """Draw a module with all in it, or it alone."""
    homes = [(path, m) for path, m in module.named_modules() if recurse or m is module]
    values: dict[str, Tensor] = {}
    for path, home in homes:
        for leaf, parameter in home._parameters.items():
            if parameter is not None:
                drawn = nn.Parameter(torch.full(parameter.shape, torch.nan), requires_grad=False)
                home._parameters[leaf] = values[".".join(filter(None, (name, path, leaf)))] = drawn
    others = {} if recurse else {n: p._version for n, p in module.named_parameters() if p.is_meta}
    _initialise(module, owner) if recurse else owner._init_weights(module)
    touched = next((n for n, p in module.named_parameters() if p.is_meta and p._version != others.get(n)), None)
    if touched is not None:
        raise ModelError(
            f"{type(module).__name__} initialises {touched}, which is of another part of the model. Begin with a "
            "checkpoint"
        )
    for full, value in values.items():
        if value.isnan().any():
            raise ModelError(
                f"transformers draws no values for {full} of {owner.config.model_type!r}. Begin with a checkpoint"
            )
    yield from ((full, value.data) for full, value in values.items())
    for _, home in homes:
        for leaf, parameter in home._parameters.items():
            if parameter is not None:
                home._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def _initialise(module: nn.Module, owner: PreTrainedModel) -> None:
    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)
