"""One engine for several ranks of a trainer: rank 0 has it, and passes on the others' prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.generation import Completion, Prompt, Sampling
from octavo.generation.engines import Generation, Manifest, Pieces, RolloutEngine
from octavo.generation.engines.wire import decode_completions, decode_prompts, encode_completions, encode_prompts
from octavo.parallel import World


class RankedEngine:
    """The engine of rank 0, for all ranks. `engine`: None on other ranks. `update` and `generate` are collectives; an
    error of the engine is raised on every rank."""

    shares_weights = False

    def __init__(self, engine: RolloutEngine | None, world: World) -> None:
        self.engine, self.world = engine, world

    def update(self, version: int, manifest: Manifest, pieces: Pieces) -> str:
        """See :meth:`RolloutEngine.update`; the arguments of other ranks are not read."""
        return str(self.world.run_on_main(lambda: self._engine.update(version, manifest, pieces)))

    def generate(self, version: int, prompts: Sequence[Prompt], sampling: Sampling, group: int = 1) -> Generation:
        """See :meth:`RolloutEngine.generate`: each rank passes its prompts, or none, and gets their completions. The
        result is a collective, too."""
        by_rank = [decode_prompts(part) for part in self.world.gather_bytes(encode_prompts(prompts))]
        every = [prompt for part in by_rank for prompt in part]
        begun: list[Generation] = []
        self.world.run_on_main(lambda: begun.append(self._engine.generate(version, every, sampling, group)))
        first = sum(len(part) for part in by_rank[: self.world.rank])
        return _Shared(begun[0] if begun else None, range(first, first + len(prompts)), self.world)

    def release(self) -> int:
        return 0 if self.engine is None else self.engine.release()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()

    @property
    def _engine(self) -> RolloutEngine:
        assert self.engine is not None, "only rank 0 calls it"
        return self.engine


class _Shared:
    """Completions of all ranks, which rank 0 has; a rank takes what belongs to its prompts."""

    def __init__(self, generation: Generation | None, places: range, world: World) -> None:
        self.generation, self.places, self.world = generation, places, world

    def result(self, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Completion]:
        generated: list[Completion] = []

        def wait() -> None:
            assert self.generation is not None, "only rank 0 calls it"
            generated.extend(self.generation.result(progress))

        self.world.run_on_main(wait)
        everything = decode_completions(self.world.gather_bytes(encode_completions(generated))[0])
        return [replace(c, prompt=c.prompt - self.places.start) for c in everything if c.prompt in self.places]
