"""What attention keeps for backward where ranks share a row (`parallel.context`), beside what a forward of a rank's own
tokens keeps.

A rank attends by T / C tokens and 1 / U of the heads, as many queries as it has tokens; but where C > 1 ranks gather
keys and values it keeps those of all T tokens, H_k / U heads of them (repeated, where U does not divide H_k).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from octavo import models
from octavo.config import Config
from octavo.parallel import ulysses_of
from octavo.train.memory_plan.activations import FakeForward
from octavo.train.tokens import Tokens


def more_keys(cfg: Config, config: Any, tokens: Tokens, width: int) -> int:
    """Bytes a layer of the decoder keeps more than its own keys and values; ``tokens``: of this rank, ``width``: bytes
    of a value."""
    size = cfg.parallel.context
    if size == 1:
        return 0
    shape = models.cache_shape(config)
    ranks = ulysses_of(size, cfg.parallel.ulysses, shape.queries)
    own = tokens.counts.get("foundation", 0)
    kept = size * own * math.lcm(shape.heads, ranks) // ranks
    return 2 * shape.dim * width * max(0, kept - own * shape.heads)


def with_keys(found: FakeForward, cfg: Config, config: Any, tokens: Tokens, width: int) -> FakeForward:
    """A forward with what its layers keep besides; where they run again nothing of it outlives a layer."""
    more = more_keys(cfg, config, tokens, width)
    if not more or cfg.train.recompute.foundation == "full":
        return found
    layers = config.get_text_config().num_hidden_layers
    blocks = {**found.blocks, "foundation": found.blocks.get("foundation", 0) + layers * more}
    return replace(found, blocks=blocks, largest={**found.largest, "foundation": found.largest["foundation"] + more})
