"""What of a micro-batch a rank holds where several share its rows, and what of experts it gathers.

Ranks of `parallel.context` hold equal parts of a row's tokens, so activations and logits fall by as much. A layer's
keys and values are whole on each of them while it attends, but for the heads that `parallel.ulysses` gives to others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config import Config
from octavo.parallel import Layout, WorldError, ulysses_of
from octavo.train.errors import TrainError
from octavo.train.estimate.memory.activations import FakeForward
from octavo.train.setup.token_counts import Tokens


def layout_of(cfg: Config, ranks: int) -> Layout:
    """The layout of so many ranks; that of one rank has nothing to share. Raises TrainError for axes that do not
    multiply to that many."""
    try:
        return Layout() if ranks == 1 else Layout.of(ranks, cfg.parallel)
    except WorldError as error:
        raise TrainError(str(error)) from error


def part(whole: FakeForward, tokens: Tokens, context: int) -> tuple[FakeForward, Tokens]:
    """What one of so many ranks keeps of a forward, and its tokens; images stay whole."""
    if context == 1:
        return whole, tokens
    shared = tokens.shared(context)

    def shares(sizes: Mapping[str, int]) -> dict[str, int]:
        counts = {name: (shared.counts.get(name, 1), tokens.counts.get(name, context)) for name in sizes}
        return {name: _share(size, *counts[name]) for name, size in sizes.items()}

    here = replace(  # 16-bit copies of weights and the positions are on every rank, so they are not divided
        whole,
        blocks=shares(whole.blocks),
        outside=shares(whole.outside),
        largest=shares(whole.largest),
        recomputed=shares(whole.recomputed),
        logits=-(-whole.logits // context),
    )
    return here, shared


def _share(size: int, part: int, whole: int) -> int:
    """What of so many bytes a part has, rounded up."""
    return -(-size * part // max(1, whole))


def keys(cfg: Config, config: Any, layout: Layout, tokens: Tokens, width: int) -> int:
    """Bytes of keys and values over all tokens of a row: of every layer until backward, of one where blocks are
    recomputed in full, and of one their gradients in fp32. ``tokens`` are those of one rank; ``width``: bytes of an
    element that is computed with."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    ulysses = ulysses_of(layout.context, cfg.parallel.ulysses, text.num_attention_heads)
    if layout.context == ulysses:
        return 0
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = 1 if cfg.train.recompute.foundation == "full" else text.num_hidden_layers
    each = 2 * tokens.counts.get("foundation", 0) * layout.context * math.lcm(heads, ulysses) // ulysses * size
    return each * (layers * width + 4)
