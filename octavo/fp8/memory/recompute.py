"""Activation checkpointing: which parts of a block are recomputed in its backward (Chen et al. 2016).

    activation_checkpointing(blocks, "selective")    # (name, block) pairs; call it once for each part of the model

``full``       a block saves its input and reruns its forward.
``selective``  the norms of a block (including those in its attention) and its MLP save their inputs and are rerun; its
               attention is not. These parts save much memory for little work: an MLP saves four tensors of its inner
               width for two GEMMs, and a norm saves more than its input without any GEMM. Work that is quadratic in the
               sequence length is not repeated.

Saved bytes of a decoder layer (4096, 12288, 32 heads, 8 of k and v, QK-norm, BF16), counted by
:mod:`octavo.fp8.memory.accounting`, and recomputed work as a share of the FLOPs of its linear layers in the forward;
"stock" is the model of transformers, "FP8 saved" is ``Policy(activations="fp8")``::

                 bytes per token       FLOPs recomputed
                 stock      FP8 saved  stock                       FP8
    none         210.3 KiB  66.4 KiB    0 %                         0 %
    selective     62.1 KiB  45.7 KiB   52 % (gate and up)          78 % (down, too)
    full           8.0 KiB   8.0 KiB   74 % (not down), scores    100 %, scores

A norm that produces FP8 codes for the next layers, or saves its input in FP8, is not recomputed: it would then save its
input in 16 bits. An MLP that saves gate and up in FP8 is recomputed, because its input is smaller.

Recomputed forwards have the same values, codes and dropout, are counted separately (``recompute`` in
:mod:`octavo.fp8.observe.counts`), and a retained graph can run backward again. The class of a module is replaced by a
subclass, as in :mod:`octavo.fp8.dense.swap`: parameters, names and hooks stay, and hooks (such as FSDP2's) are not part
of the recomputed region. Evaluation and forwards without gradients do not change.
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
    """Make blocks recompute parts of their forward in backward, in place; return the names of these parts.

    Call it after :func:`octavo.fp8.apply` and before the blocks are sharded or compiled.

    Args:
        blocks: (name, block) pairs, such as decoder layers: modules whose children are norms, attention and an MLP.
        how: "none" (no change), "selective" or "full".

    Raises ValueError for other values of ``how``, without blocks, if a block already recomputes (here or by
    transformers), or if "selective" finds nothing to recompute in it.
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
    """Return the norms and the MLP of a block: all children except attention, and the norms of attention."""
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
    """Return True if a module saves more than its input; torch's LayerNorm and the norms of this package do not."""
    if next(module.parameters(), None) is None:
        return False
    return not (_is_norm(module) and isinstance(module, (SwappedModule, nn.LayerNorm)))


def _is_norm(module: nn.Module) -> bool:
    """Return True if all parameters of a module are vectors, as in a norm."""
    parameters = list(module._parameters.values())
    return not module._modules and len(parameters) > 0 and all(p is None or p.dim() == 1 for p in parameters)


_CACHES = ("past_key_values", "cache")  # argument names of transformers before 5.24, and since


class Recomputed(nn.Module):
    """Recomputes the forward in backward, from the inputs of the module."""

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
        """Copy or pickle the module with its plain class, and restore the recomputing class afterwards."""
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
