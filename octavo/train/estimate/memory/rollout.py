"""Memory that the phase rl needs besides an update: while it generates completions, and for a frozen copy.

A step of the phase rl has two parts. During the **rollout** there are no gradients and no activations, but there are
the key-value cache (`kv_cache`: its pages and the state of each sequence) and the tensors of the generation engine; see
:mod:`octavo.generation.memory`. During the **update** the cache is freed. Memory held between steps is held in both.

The number of sequences generated at a time is `rl.slots`. Without that setting it is all sequences of a step or, where
a card is named, as many as fit. A run on a GPU applies the same rule to the memory that is free at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo import fp8, generation, models
from octavo.config import Config
from octavo.config.sections.rl import RlSection
from octavo.train.errors import TrainError
from octavo.train.estimate.memory import states
from octavo.train.setup import frozen_base
from octavo.train.setup.token_counts import Tokens


@dataclass(frozen=True)
class Rollout:
    """Memory during a rollout.

    ``kinds`` maps each kind to its bytes. ``sequences`` are generated at a time, out of ``of`` in a step of one rank.
    ``token`` is the number of bytes that a token takes in the cache.
    """

    kinds: Mapping[str, int]
    sequences: int
    of: int
    token: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": dict(self.kinds),
            "total": self.total,
            "sequences": self.sequences,
            "of": self.of,
            "bytes_per_cached_token": self.token,
        }


class Rollouts:
    """Rollouts of one model under configurations that differ only in memory settings.

    ``usable`` is the number of bytes of a card that they must fit into; None sets no limit.
    """

    def __init__(self, config: Any, usable: int | None) -> None:
        self.config, self.usable = config, usable
        self._found: dict[Any, generation.Bytes] = {}

    def of(
        self, cfg: Config, standing: Mapping[str, int], tokens: Tokens, dtype: torch.dtype, transient: int, ranks: int
    ) -> Rollout:
        """Return the rollout of one rank.

        ``standing`` is the memory held throughout a step. ``dtype`` is the model's computing dtype. ``transient`` is
        the largest temporary memory of one weight or block in any forward.
        """
        rl = cfg.rl
        assert rl is not None
        completions = max(1, rl.prompts * rl.group // ranks)
        prompt = max(1, tokens.row - rl.max_new_tokens)
        patches = tokens.counts.get("image_encoder", 0) // tokens.rows
        excluded = (0,) if patches else ()  # the id of the image token does not matter here
        sampling = generation.Sampling(
            rl.max_new_tokens, rl.temperature, rl.top_p, rl.top_k, rl.min_p, excluded=excluded
        )

        in_place = (
            self.usable is not None and not rl.invariant
        )  # the kernels on a GPU read the pages directly, without gathering
        check_pages(rl, prompt, generation.PAGE)

        def shape(sequences: int) -> generation.Shape:
            return generation.Shape(sequences, prompt, rl.max_new_tokens, rl.group, patches=patches, limit=rl.pages)

        def predicted(sequences: int) -> generation.Bytes:
            key = (shape(sequences), rl.kv, dtype, sampling)
            if key not in self._found:
                self._found[key] = generation.predict(self.config, shape(sequences), rl.kv, dtype, sampling, in_place)
            return self._found[key]

        still = sum(standing.values()) + transient
        slots = min(rl.slots or completions, completions)
        if rl.slots is None and rl.pages is not None:
            slots = generation.most_that_fit(slots, lambda count: shape(count).needed_pages <= shape(count).pages) or 1
        if rl.slots is None and self.usable is not None:
            room = self.usable - still
            slots = generation.most_that_fit(slots, lambda count: predicted(count).total <= room) or 1
        chosen = predicted(slots)
        kinds = {**standing, "kv_cache": chosen.held, "workspace": chosen.total - chosen.held + transient}
        return Rollout(kinds, slots, completions, generation.bytes_of_token(self.config, rl.kv, dtype))


def check_pages(rl: RlSection, prompt: int, page: int, name: str = "") -> None:
    """Raise TrainError if `rl.pages` cannot hold one completion of a prompt of ``prompt`` tokens."""
    need = generation.pages_needed(prompt, rl.max_new_tokens, page)
    if rl.pages is not None and need > rl.pages:
        raise TrainError(
            f"rl.pages is {rl.pages}, pages of {page} tokens, and one completion of {name or 'a prompt'}, {prompt} "
            f"tokens, with {rl.max_new_tokens} new ones (rl.max_new_tokens) may need {need}. Raise rl.pages (with "
            "rl.kv: fp8 they take half the bytes), lower rl.max_new_tokens, or leave rl.pages out"
        )


def copied(config: Any, family: models.Family, plan: fp8.Plan) -> Callable[[Config, fp8.Plan, int], int]:
    """Return a function that counts the bytes of a frozen copy of the model.

    They are the weights as a run keeps them (see `frozen_base.quantize_frozen_weights`) and the FP8 codes of weights
    that stay in high precision.
    """
    model = models.empty(config).requires_grad_(False)
    frozen_base.quantize_frozen_weights(model, plan)
    parameters = states.held(model, family)
    frozen = states.frozen_of(parameters)

    def count(cfg: Config, plan: fp8.Plan, ranks: int) -> int:
        codes = states.codes(plan, (), ranks, frozen) if ranks == 1 else 0
        return states.weights(cfg, parameters, ranks) + codes

    return count
