"""The part of a micro-batch on one rank when several ranks share its rows.

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
from octavo.train.estimate.memory.activations import ForwardBytes
from octavo.train.setup.token_counts import Tokens


def make_layout(cfg: Config, ranks: int) -> Layout:
    """Return the layout of this many ranks; the default layout for one rank.

    Raises TrainError if the axes do not multiply to the number of ranks.
    """
    try:
        return Layout() if ranks == 1 else Layout.from_section(ranks, cfg.parallel)
    except WorldError as error:
        raise TrainError(str(error)) from error


def shard_forward(forward: ForwardBytes, tokens: Tokens, context: int) -> tuple[ForwardBytes, Tokens]:
    """Return (bytes that one context rank keeps of a forward, its tokens); images are not split."""
    if context == 1:
        return forward, tokens
    shared = tokens.shared(context)

    def scale_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
        counts = {name: (shared.counts.get(name, 1), tokens.counts.get(name, context)) for name in sizes}
        return {name: _share(size, *counts[name]) for name, size in sizes.items()}

    local = replace(  # 16-bit copies of weights and the positions are on every rank, and are not divided
        forward,
        blocks=scale_sizes(forward.blocks),
        outside=scale_sizes(forward.outside),
        largest=scale_sizes(forward.largest),
        recomputed=scale_sizes(forward.recomputed),
        logits=-(-forward.logits // context),
    )
    return local, shared


def _share(size: int, part: int, whole: int) -> int:
    """Return ``size`` x ``part`` / ``whole``, rounded up."""
    return -(-size * part // max(1, whole))


def key_value_bytes(cfg: Config, config: Any, layout: Layout, tokens: Tokens, width: int) -> int:
    """Return the bytes of keys and values over all tokens of a row.

    All layers keep theirs until backward, or one layer if blocks are recomputed in full; the fp32 gradients of one
    layer are added. ``tokens`` are the tokens of one rank, and ``width`` is the bytes of an element in the computing
    dtype.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    ulysses = ulysses_size(layout.context, cfg.parallel.ulysses, text.num_attention_heads)
    if layout.context == ulysses:
        return 0
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = 1 if cfg.train.recompute.foundation == "full" else text.num_hidden_layers
    elements = 2 * tokens.counts.get("foundation", 0) * layout.context * math.lcm(heads, ulysses) // ulysses * size
    return elements * (layers * width + 4)
