"""The interface between a trainer and an engine that generates completions for it.

A trainer asks for completions of a version of its weights: the number of its steps. An engine in other processes
receives them by :meth:`RolloutEngine.update` and refuses other versions, so that no completion is ever of weights
that the trainer does not expect. Arguments and results are NumPy arrays and plain data, which any transport can send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.generation.engines.manifest import Manifest, Pieces
from octavo.generation.errors import GenerationError
from octavo.generation.request import Completion, Prompt, Sampling


class StaleWeightsError(GenerationError):
    """An engine was asked for another version of the weights than the one that it has."""


class Generation(Protocol):
    """Completions, which an engine may still be generating."""

    def result(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Completion]:
        """Wait for the completions and return them, ordered by (prompt, sample). `progress` is called with
        (finished, total). Raises GenerationError as :meth:`octavo.generation.Engine.generate` does."""


class RolloutEngine(Protocol):
    """Generates completions for a trainer."""

    shares_weights: bool
    """Whether it generates with the trainer's own tensors, so that there is nothing to send."""

    def update(self, version: int, manifest: Manifest, pieces: Pieces) -> str:
        """Take the weights of a version, and return the manifest's digest as the engine computed it from what it
        received. `pieces` has the bytes that the engine did not get before. Raises GenerationError if the engine has
        other weights afterwards."""

    def generate(self, version: int, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1) -> Generation:
        """Generate `group` completions of each prompt with the weights of a version, next to other work of this process
        if the engine can. An update waits for what was begun before. Raises StaleWeightsError for a version that the
        engine does not have."""

    def release(self) -> int:
        """Free what is kept between calls, besides the weights. Returns its bytes in the trainer's memory."""

    def close(self) -> None:
        """End processes and connections of the engine."""
