"""The part of a micro-batch that a rank holds where several ranks share its rows, and the experts that it gathers.

Ranks of `parallel.context` hold equal parts of a row's tokens, so activations and logits shrink accordingly. During
attention each of them holds a layer's whole keys and values, except for the heads that `parallel.ulysses` gives to
other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.config import Config
from octavo.parallel import Layout, WorldError, ulysses_size
from octavo.train.errors import TrainError
from octavo.train.estimate.memory.activations import FakeForward
from octavo.train.setup.token_counts import Tokens


def layout_of(cfg: Config, ranks: int) -> Layout:
    """Return the layout of this many ranks; a single rank shares nothing.

    Raises TrainError if the axes do not multiply to the number of ranks.
    """
    try:
        return Layout() if ranks == 1 else Layout.from_section(ranks, cfg.parallel)
    except WorldError as error:
        raise TrainError(str(error)) from error


def part(whole: FakeForward, tokens: Tokens, context: int) -> tuple[FakeForward, Tokens]:
    """Return what one of several ranks keeps of a forward, and its tokens; images stay whole."""
    if context == 1:
        return whole, tokens
    shared = tokens.shared(context)

    def shares(sizes: Mapping[str, int]) -> dict[str, int]:
        counts = {name: (shared.counts.get(name, 1), tokens.counts.get(name, context)) for name in sizes}
        return {name: _share(size, *counts[name]) for name, size in sizes.items()}

    here = replace(  # 16-bit copies of weights and the positions are on every rank, and are not divided
        whole,
        blocks=shares(whole.blocks),
        outside=shares(whole.outside),
        largest=shares(whole.largest),
        recomputed=shares(whole.recomputed),
        logits=-(-whole.logits // context),
    )
    return here, shared


def _share(size: int, part: int, whole: int) -> int:
    """The bytes of one part, rounded up."""
    return -(-size * part // max(1, whole))


def keys(cfg: Config, config: Any, layout: Layout, tokens: Tokens, width: int) -> int:
    """Bytes of keys and values over all tokens of a row.

    Every layer's are kept until backward, or only one layer's where blocks are recomputed in full; one layer's fp32
    gradients are added. ``tokens`` counts the tokens of one rank, and ``width`` is the bytes of an element in the
    computing dtype.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    ulysses = ulysses_size(layout.context, cfg.parallel.ulysses, text.num_attention_heads)
    if layout.context == ulysses:
        return 0
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = 1 if cfg.train.recompute.foundation == "full" else text.num_hidden_layers
    each = 2 * tokens.counts.get("foundation", 0) * layout.context * math.lcm(heads, ulysses) // ulysses * size
    return each * (layers * width + 4)
