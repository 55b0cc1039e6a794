"""Calls the model for the engine: the tokens of many sequences in one row, with the attention of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo import fp8, models
from octavo.generation.errors import GenerationError
from octavo.models.forward.paged import Attend, position_axes
from octavo.parallel import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _no_dummy(needed: bool) -> None:
    pass


@dataclass(frozen=True)
class Context:
    """Settings with which a run calls its model.

    autocast     dtype of autocast, or None if it is off
    dtype        dtype of pixels without autocast, or None for the dtype of the parameters
    world        ranks that share the model's parameters and so must run equally many forwards, or None for one process
    dummy_image  called before each forward: whether the vision tower needs a dummy image because other ranks run it
    """

    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    world: World | None = None
    dummy_image: Callable[[bool], None] = _no_dummy


class Caller:
    """Calls a model, inside `fp8.batch_invariant` if `invariant`. Raises GenerationError for a model whose attention
    cannot be replaced."""

    def __init__(self, model: PreTrainedModel, context: Context, invariant: bool = False) -> None:
        if why := models.why_not_paged(model):
            raise GenerationError(f"the generation engine cannot run this model: {why}")
        self.model, self.context, self.invariant = model, context, invariant
        self.family = models.describe(model)
        self.shape = models.cache_shape(model.config)
        self.axes = position_axes(model, self.family)
        self._attention: Attend | None = None
        parameters = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.dtype = context.autocast or context.dtype or parameters

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Let the decoder use the attention passed to :meth:`forward`, in eval mode."""
        training = self.model.training
        self.model.eval()
        try:
            rows = fp8.batch_invariant(self.model) if self.invariant else nullcontext()
            with rows, models.replace_attention(self.model, self.family, self._attend):
                yield
        finally:
            self._attention = None
            self.model.train(training)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        assert self._attention is not None
        with torch.autocast(q.device.type, enabled=False):  # attention sets its dtypes itself
            return self._attention(layer, q, k, v, scale)

    def any_rank(self, needed: bool) -> bool:
        """Return whether any rank needs a forward; then all ranks run one. A collective if ranks share parameters."""
        world = self.context.world
        return needed if world is None or world.size == 1 else world.any(needed)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attend, keep: Tensor | None = None, **images: Tensor
    ) -> Tensor:
        """Return logits [K, V] after the tokens at `keep` [K] (all T tokens if None), for a row of tokens [T] at
        positions [axes, T]."""
        world = self.context.world
        if self.family.has_vision and world is not None and world.size > 1:
            self.context.dummy_image(world.any(bool(images)) and not images)
        else:
            self.context.dummy_image(False)
        self._attention = attention
        trim = {} if keep is None else {"logits_to_keep": keep}
        where = positions[:, None] if self.axes == 3 else positions
        autocast = self.context.autocast
        with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
            out = self.model(input_ids=tokens[None], position_ids=where, use_cache=False, **trim, **images)
        return out.logits[0]

    def run_dummy_forward(self) -> None:
        """Run a forward of one unused token, because other ranks run one and need this rank's shards."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.forward(token, token.expand(self.axes, -1), lambda layer, q, k, v, scale: torch.zeros_like(q))
