"""Activation checkpointing: what a block saves for its backward, and what runs again there (Chen et al. 2016).

    recompute(blocks, "selective")        # (name, block) pairs; another call for another part of the model

``full``       a block saves its input and runs its forward again.
``selective``  a block's norms (those in its attention, too) and its MLP save their inputs and run again; its attention,
               projections and scores, stays. What goes is wide and soon made: an MLP holds four tensors of its inner
               width for two GEMMs, a norm more than its input for none. Nothing is run again whose work grows with
               the square of the sequence.

What a decoder layer (4096, 12288, 32 heads, 8 of k and v, QK-norm, BF16) saves, counted by
:mod:`octavo.fp8.memory.accounting`, and what it runs again, as a share of the FLOPs of its linear layers in the
forward; stock as transformers ships it, FP8 saved as under ``Policy(activations="fp8")``::

                 bytes a token         FLOPs run again
                 stock      FP8 saved  stock                       FP8
    none         210.3 KiB  66.7 KiB    0 %                         0 %
    selective     62.1 KiB  45.8 KiB   52 % (gate and up)          78 % (down, too)
    full           8.0 KiB   8.0 KiB   74 % (not down), scores    100 %, scores

A norm that leaves FP8 codes for the next layers, or saves its input in FP8, is not run again: it would then save
that input in 16 bits. An MLP that saves gate and up in FP8 is: its input takes less.

Forwards that run again give the same values, codes and dropout, are counted separately (``recompute`` in
:mod:`octavo.fp8.observe.counts`), and a graph that is retained can be gone through again. The class of a module is
exchanged for a subclass, as in :mod:`octavo.fp8.dense.swap`: parameters, names and hooks stay, and hooks (FSDP2's, for
one) stay outside of what runs again. In evaluation and without gradient nothing changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from octavo.fp8.dense.swap import SwappedModule
from octavo.fp8.invariance import checkpoint_contexts

CHOICES = ("none", "selective", "full")
_ATTENTION = re.compile(r"(^|_)(attn|attention)$", re.IGNORECASE)


def activation_checkpointing(blocks: Iterable[tuple[str, nn.Module]], how: str) -> tuple[str, ...]:
    """Let blocks run parts of their forward again in backward, in place, and return the names of these parts.

    Call it after :func:`octavo.fp8.apply` and before the blocks are sharded or compiled.

    Args:
        blocks: (name, block), such as decoder layers: modules with norms, an attention and an MLP as children.
        how: "none" (nothing is changed), "selective" or "full".

    Raises ValueError where ``how`` is none of these, there are no blocks, a block recomputes already (here or by
    transformers), or it has nothing that "selective" could run again.
    """
    if how not in CHOICES:
        raise ValueError(f"recompute takes one of {', '.join(CHOICES)}; found {how!r}")
    if how == "none":
        return ()
    blocks = list(blocks)
    if not blocks:
        raise ValueError(f"recompute: {how} was asked for no blocks at all; give none, or the blocks of the model")
    for name, block in blocks:
        if getattr(block, "gradient_checkpointing", False) or any(isinstance(m, Recomputed) for m in block.modules()):
            raise ValueError(f"{name} recomputes its forward already; ask for it once, here or of transformers")
    regions = blocks if how == "full" else [region for name, block in blocks for region in _select_regions(name, block)]
    for _, module in regions:
        module.__class__ = _recomputed_class(type(module))
    return tuple(name for name, _ in regions)


def _select_regions(name: str, block: nn.Module) -> list[tuple[str, nn.Module]]:
    """The norms and the MLP of a block: all children but its attention, and of that the norms."""
    selected = []
    for child_name, child in block.named_children():
        if _ATTENTION.search(child_name):
            inner = [(f"{name}.{child_name}.{path}", m) for path, m in child.named_modules() if _is_norm(m)]
        else:
            inner = [(f"{name}.{child_name}", child)]
        selected += [(path, module) for path, module in inner if _saves_much(module)]
    if all(_is_norm(module) for _, module in selected):
        raise ValueError(
            f"{name} ({type(block).__name__}) has no MLP next to its attention that could run again: its children are "
            f"{', '.join(n for n, _ in block.named_children()) or 'none'}. Use recompute: full, or none"
        )
    return selected


def _saves_much(module: nn.Module) -> bool:
    """Whether a module saves more than its input: torch's LayerNorm does not, nor do the norms of this package."""
    if next(module.parameters(), None) is None:
        return False
    return not (_is_norm(module) and isinstance(module, (SwappedModule, nn.LayerNorm)))


def _is_norm(module: nn.Module) -> bool:
    """A module of nothing but vectors: the weight of a norm and perhaps its bias."""
    held = list(module._parameters.values())
    return not module._modules and len(held) > 0 and all(p is None or p.dim() == 1 for p in held)


_CACHES = ("past_key_values", "cache")  # what transformers calls them before 5.24, and from there on


class Recomputed(nn.Module):
    """A forward that runs again in backward, from the module's inputs."""

    _plain: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = partial(self._plain.forward, self, **kwargs)
        if not self.training or not torch.is_grad_enabled():
            return plain(*args)
        if any(kwargs.get(name) is not None for name in _CACHES):
            raise RuntimeError(
                f"a {self._plain.__name__} that recomputes its forward got a cache of keys and values, which the "
                "second run would fill once more. Train with use_cache=False"
            )
        options: dict[str, Any] = {"context_fn": checkpoint_contexts} if torch._C._len_torch_function_stack() else {}
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=not _is_norm(self), **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the module without recomputation; the class is exchanged afterwards."""
        twin = self._plain.__new__(self._plain)
        twin.__dict__ = self.__dict__
        reduced = twin.__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        return (_rebuild, reduced[:2], *reduced[2:])


def _rebuild(make: Any, args: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = make(*args)
    module.__class__ = _recomputed_class(type(module))
    return module


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputed_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _classes:
        names = {"__module__": __name__, "_plain": plain}
        _classes[plain] = type(f"Recomputed{plain.__name__}", (Recomputed, plain), names)
    return _classes[plain]
