"""Several samples behind each other in one row: a forward in which no token sees another sample's.

    packed = models.Packed(model, family)
    positions = packed.positions(edges, ids, images, kinds, grid)       # each sample's own, from 0
    with packed.forward(edges, positions):
        model(input_ids=ids, position_ids=positions, ..., use_cache=False)

What transformers does by itself where a row holds several samples is not relied on: a mask from jumps of position ids,
which is left out, without a word, where there is a cache, a mask, or positions of three axes. Here samples are told
apart by :mod:`octavo.models.attention.segments`, and afterwards it is counted that every layer was told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.base.model_families import attends_both_ways
from octavo.models.attention import attention
from octavo.models.attention.segments import INSTEAD, PackedForward, Segments, Share, under_way
from octavo.models.errors import ModelError
from octavo.models.forward.paged import axes, positions
from octavo.models.processors.frames import OF_VIDEOS
from octavo.models.structure.describe import Family

_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "linear")
_OF_LENGTH = ("longrope", "dynamic")  # rotary angles that depend on the longest sample of a call


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why samples of a model cannot share a row, as the end of a sentence; None where they can."""
    if (why := _why_not(model.config)) is not None:
        return why
    if not getattr(type(model), "_supports_attention_backend", False):
        return f"{type(model).__name__} computes attention in its own way, not through transformers' registry"
    return None


def _why_not(config: PreTrainedConfig) -> str | None:
    if getattr(config, "audio_config", None) is not None:
        return f"model_type {config.model_type!r} takes sound, which packs do not hold in this version"
    if attends_both_ways(config.model_type):
        return (
            f"tokens of an image see those behind them in model_type {config.model_type!r}, and attention within the "
            "samples of a pack is causal"
        )
    text = config.get_text_config()
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    if states := sorted({kind for kind in kinds if kind in _RECURRENT}):
        return (
            f"model_type {config.model_type!r} has layers of {', '.join(states)}, whose state runs on from one sample "
            "into the next"
        )
    if other := sorted({kind for kind in kinds if kind not in ("full_attention", "attention")}):
        return f"model_type {config.model_type!r} has layers of {', '.join(other)}, which see a part of a sample alone"
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True) and not kinds:
        return f"model_type {config.model_type!r} sees {text.sliding_window} tokens back alone (sliding_window)"
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in _OF_LENGTH:
        return f"model_type {config.model_type!r} turns queries by {kind}, whose angles depend on the longest sample"
    return None


class Packed:
    """Packed forwards of a model, which computes attention by a function of Octavo's from here on. ``share``: of the
    tokens of each row, where several ranks have them.

    Raises ModelError for one whose samples would not be separate: recurrent or windowed layers, attention that is not
    in transformers' registry, or that runs by another kernel than torch's.
    """

    def __init__(self, model: PreTrainedModel, family: Family, share: Share | None = None) -> None:
        if (why := why_not_packed(model)) is not None:
            raise ModelError(f"samples cannot be packed: {why}. {INSTEAD}")
        if not attention.is_ours(model.get_submodule(family.language_model)):
            attention.use_attention(model, component="foundation")
        self.model, self.family, self.share = model, family, share
        self.axes = axes(model, family)
        self.layers = model.config.get_text_config().num_hidden_layers

    def positions(
        self, edges: Sequence[int], ids: Tensor, images: Sequence[int] = (), kinds: Tensor | None = None,
        grid: Tensor | None = None, videos: Mapping[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Where each token stands in its own sample, int64: [1, T], or for rotary of three axes [4, 1, T], whose row 0
        counts tokens and rows 1 to 3 are the model's own ``get_rope_index`` of that sample alone.

        ids [1, T] · images: of each sample, those of padding left out · kinds [1, T], 1 where a token stands for an
        image, 2 for a video · grid [images, 3] · videos: how many each sample has (`counts`), and what of
        :data:`octavo.models.processors.frames.OF_VIDEOS` counts these; all in host memory.
        """
        plain = _plain(edges, ids.device)
        if self.axes == 1:
            return plain
        rows, seen, shown = [], 0, 0
        videos = videos or {}
        counts = videos.get("counts", ())
        for number, (a, b) in enumerate(pairwise(edges)):
            count = images[number] if number < len(images) else 0
            own = None if grid is None or not count else grid[seen : seen + count]
            of = None if kinds is None else kinds[0, a:b]
            clips = counts[number] if number < len(counts) else 0
            more = {name: videos[name][shown : shown + clips] for name in OF_VIDEOS if clips and name in videos}
            rows.append(positions(self.model, self.family, ids[0, a:b], of, own, more)[0])
            seen, shown = seen + count, shown + clips
        return torch.cat([plain[None], torch.cat(rows, 1)[:, None]])

    @contextmanager
    def forward(self, edges: Sequence[int], positions: Tensor | None) -> Iterator[None]:
        """Inside, one forward of the model takes a row of samples that end at ``edges`` (0 and T with them), of a
        shared row this rank's tokens and their positions; ``positions`` are those of the whole row.

        Raises ModelError for positions that are not those of the samples, and afterwards where not every layer of the
        decoder attended within them.
        """
        self._check(edges, positions)
        device = next(self.model.parameters()).device
        now = PackedForward(Segments.of(edges, device, self.share))
        token = under_way.set(now)
        try:
            yield
        finally:
            under_way.reset(token)
        if len(now.seen) != self.layers:
            raise ModelError(
                f"{len(now.seen)} of the {self.layers} layers of {type(self.model).__name__} attended within samples: "
                f"the others mixed them, or attend by a function of their own. {INSTEAD}"
            )

    def _check(self, edges: Sequence[int], positions: Tensor | None) -> None:
        wanted = [1, edges[-1]] if self.axes == 1 else [4, 1, edges[-1]]
        if positions is None or list(positions.shape) != wanted:
            found = "none" if positions is None else list(positions.shape)
            raise ModelError(
                f"positions of a pack have the shape {wanted} for {self.family.name}, found {found}: take those of "
                "Packed.positions"
            )
        rising = list(edges) == sorted(set(edges)) and edges[0] == 0
        if not rising or not torch.equal((positions if self.axes == 1 else positions[0]).cpu(), _plain(edges)):
            raise ModelError(
                f"positions of a pack count from 0 in each sample (in row 0, where there are four), and samples end at "
                f"{list(edges)[:8]}: take those of Packed.positions"
            )


def _plain(edges: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """0, 1, 2, ... in each sample: [1, T]."""
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(edges)])[None]
