"""Memory of phase rl during a rollout, and of a frozen reference copy.

A step of the phase rl has two parts. During the **rollout** there are no gradients and no activations, but there are
the key-value cache (`kv_cache`: its pages and the state of each sequence) and the tensors of the generation engine; see
:mod:`octavo.generation.memory`. During the **update** the cache is freed. Memory held between steps is held in both.

The number of sequences generated at a time is `rl.slots`. By default all sequences of a step are
generated at once, or as many as fit if a card is given. A run on a GPU applies the same rule to its free memory.
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

    ``kinds`` maps each kind to its bytes. ``sequences`` of the ``of`` sequences in a step of one rank are generated at
    a time. ``token`` is the number of bytes per cached token.
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
    """Estimates the rollouts of one model under configurations that differ only in memory settings.

    ``usable`` is the number of bytes that a rollout must fit into, or None for no limit.
    """

    def __init__(self, config: Any, usable: int | None) -> None:
        self.config, self.usable = config, usable
        self._cache: dict[Any, generation.Bytes] = {}

    def estimate(
        self, cfg: Config, persistent: Mapping[str, int], tokens: Tokens, dtype: torch.dtype, transient: int, ranks: int
    ) -> Rollout:
        """Return the memory of a rollout on one rank.

        ``persistent`` is the memory held throughout a step. ``dtype`` is the model's computing dtype. ``transient`` is
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

        def predict(sequences: int) -> generation.Bytes:
            key = (shape(sequences), rl.kv, dtype, sampling)
            if key not in self._cache:
                self._cache[key] = generation.predict(self.config, shape(sequences), rl.kv, dtype, sampling, in_place)
            return self._cache[key]

        held = sum(persistent.values()) + transient
        slots = min(rl.slots or completions, completions)
        if rl.slots is None and rl.pages is not None:
            slots = generation.most_that_fit(slots, lambda count: shape(count).needed_pages <= shape(count).pages) or 1
        if rl.slots is None and self.usable is not None:
            free = self.usable - held
            slots = generation.most_that_fit(slots, lambda count: predict(count).total <= free) or 1
        selected = predict(slots)
        kinds = {**persistent, "kv_cache": selected.held, "workspace": selected.total - selected.held + transient}
        return Rollout(kinds, slots, completions, generation.bytes_of_token(self.config, rl.kv, dtype))


def check_pages(rl: RlSection, prompt: int, page: int, name: str = "") -> None:
    """Raise TrainError if `rl.pages` cannot hold one completion of a prompt of ``prompt`` tokens."""
    need = generation.pages_needed(prompt, rl.max_new_tokens, page)
    if rl.pages is not None and need > rl.pages:
        raise TrainError(
            f"rl.pages is {rl.pages} pages of {page} tokens, but one completion of {name or 'a prompt'} with {prompt} "
            f"tokens and up to {rl.max_new_tokens} new tokens (rl.max_new_tokens) may need {need} pages. Raise "
            "rl.pages (rl.kv: fp8 halves their size), lower rl.max_new_tokens, or remove rl.pages"
        )


def make_copy_counter(config: Any, family: models.Family, plan: fp8.Plan) -> Callable[[Config, fp8.Plan, int], int]:
    """Return a function that counts the bytes of a frozen copy of the model.

    A copy has the weights as a run keeps them (see `frozen_base.quantize_frozen_weights`) and the FP8 codes of weights
    that stay in high precision.
    """
    model = models.empty(config).requires_grad_(False)
    frozen_base.quantize_frozen_weights(model, plan)
    parameters = states.list_parameters(model, family)
    frozen = states.frozen_names(parameters)

    def count(cfg: Config, plan: fp8.Plan, ranks: int) -> int:
        codes = states.code_bytes(plan, (), ranks, frozen) if ranks == 1 else 0
        return states.weight_bytes(cfg, parameters, ranks) + codes

    return count
