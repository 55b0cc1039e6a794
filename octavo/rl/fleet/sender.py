"""Sends the trainer's weights to an engine in other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from octavo.generation.engines import Manifest, Pieces, RolloutEngine, Weights
from octavo.generation.errors import GenerationError
from octavo.parallel import World
from octavo.rl.fleet.tensors import NO_CASTS, rollout_tensors
from octavo.train.setup.frozen_base import FrozenCast


class WeightSender:
    """Sends the weights of a model, once for each version. `send` is a collective of all ranks, which share the engine;
    rank 0 sends.

    casts       parameters that the engine has as codes (:func:`octavo.train.setup.frozen_base.frozen_casts`)
    has_base    whether the engine reads weights that are not trained from the model's folder (LoRA); they are not sent
    after_send  called with (version, bytes, seconds)
    """

    def __init__(
        self,
        engine: RolloutEngine,
        model: nn.Module,
        world: World,
        casts: Mapping[str, FrozenCast],
        has_base: bool,
        after_send: Callable[[int, int, float], None] = lambda version, size, seconds: None,
    ) -> None:
        self.engine, self.model, self.world = engine, model, world
        self.casts = casts if world.is_main else NO_CASTS  # other ranks only help to gather
        self._weights, self._version, self._after_send = Weights(sends_fixed=not has_base), -1, after_send

    def send(self, version: int, doing: Callable[[str], None] = lambda text: None) -> None:
        """Send the current weights as `version`, unless this version was sent. Raises GenerationError if the
        engine has other weights afterwards."""
        if version == self._version:
            return
        doing("sending weights")
        began = time.perf_counter()
        manifest: Manifest = Manifest(())
        pieces: Pieces = {}
        if self.world.is_main:
            manifest, pieces = self._weights.pack(version, self._tensors)
        else:
            self._weights.skip(self._tensors)
        digest = self.engine.update(version, manifest, pieces)
        if self.world.is_main and digest != manifest.digest:
            raise GenerationError(f"the engine has other weights than the trainer after step {version}.")
        self._version = version
        self._after_send(version, sum(piece.nbytes for piece in pieces.values()), time.perf_counter() - began)

    def _tensors(self, is_fixed: bool) -> Iterator[tuple[str, Tensor]]:
        return rollout_tensors(self.model, self.casts, is_fixed)
