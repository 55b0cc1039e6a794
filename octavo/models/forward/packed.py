"""Packing: several samples concatenated in one row, and a forward in which tokens see only their own sample.

    packed = models.Packed(model, family)
    positions = packed.positions(edges, ids, images, kinds, grid)       # from 0 in each sample
    with packed.forward(edges, positions):
        model(input_ids=ids, position_ids=positions, ..., use_cache=False)

transformers' own handling of packed rows is not used: it derives a mask from jumps of position ids, and silently omits
it if there is a cache, a mask, or positions of three axes. Here samples are separated by
:mod:`octavo.models.attention.segments`, and after the forward the layers that used them are counted.
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
from octavo.models.attention.segments import PACKING_FIX, PackedForward, RowShare, Segments, current_forward
from octavo.models.errors import ModelError
from octavo.models.forward.paged import position_axes, prompt_positions
from octavo.models.processors.frames import VIDEO_INPUTS
from octavo.models.structure.describe import Family

_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "linear")
_OF_LENGTH = ("longrope", "dynamic")  # rotary angles that depend on the longest sample of a call


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why samples of a model cannot share a row, as the end of a sentence; None if they can."""
    if (why := _why_not(model.config)) is not None:
        return why
    if not getattr(type(model), "_supports_attention_backend", False):
        return f"{type(model).__name__} computes attention in its own way, not through transformers' registry"
    return None


def _why_not(config: PreTrainedConfig) -> str | None:
    if getattr(config, "audio_config", None) is not None:
        return f"model_type {config.model_type!r} takes sound, which packs do not contain in this version"
    if attends_both_ways(config.model_type):
        return (
            f"tokens of an image see later ones in model_type {config.model_type!r}, and attention within the "
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
        return f"model_type {config.model_type!r} has layers of {', '.join(other)}, which see only a part of a sample"
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True) and not kinds:
        return f"model_type {config.model_type!r} sees only {text.sliding_window} tokens back (sliding_window)"
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in _OF_LENGTH:
        return f"model_type {config.model_type!r} uses {kind} rotary, whose angles depend on the longest sample"
    return None


class Packed:
    """Packed forwards of a model, whose attention is replaced by a function of Octavo. ``share``: this rank's share of
    the tokens of each row, if several ranks share rows.

    Raises ModelError for a model whose samples would not be separate: recurrent or windowed layers, attention that is
    not in transformers' registry, or that uses another kernel than torch's.
    """

    def __init__(self, model: PreTrainedModel, family: Family, share: RowShare | None = None) -> None:
        if (why := why_not_packed(model)) is not None:
            raise ModelError(f"samples cannot be packed: {why}. {PACKING_FIX}")
        if not attention.uses_octavo_attention(model.get_submodule(family.language_model)):
            attention.use_attention(model, component="foundation")
        self.model, self.family, self.share = model, family, share
        self.axes = position_axes(model, family)
        self.layers = model.config.get_text_config().num_hidden_layers

    def positions(
        self, edges: Sequence[int], ids: Tensor, images: Sequence[int] = (), kinds: Tensor | None = None,
        grid: Tensor | None = None, videos: Mapping[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Positions of the tokens in their samples, int64: [1, T], or for rotary of three axes [4, 1, T], in which row
        0 counts tokens and rows 1 to 3 are the model's ``get_rope_index`` of each sample by itself.

        ids [1, T] · images: the number in each sample; padding has none · kinds [1, T]: 1 for placeholders of images,
        2 of videos · grid [images, 3] · videos: the number in each sample (`counts`), and the inputs of
        :data:`octavo.models.processors.frames.VIDEO_INPUTS`; all in host memory.
        """
        plain = _plain(edges, ids.device)
        if self.axes == 1:
            return plain
        rows, first_image, first_clip = [], 0, 0
        videos = videos or {}
        counts = videos.get("counts", ())
        # The last sample may be padding, which is missing in `images` and `counts`.
        for number, (a, b) in enumerate(pairwise(edges)):
            count = images[number] if number < len(images) else 0
            sizes = None if grid is None or not count else grid[first_image : first_image + count]
            sample_kinds = None if kinds is None else kinds[0, a:b]
            clips = counts[number] if number < len(counts) else 0
            of_clips = slice(first_clip, first_clip + clips)
            inputs = {name: videos[name][of_clips] for name in VIDEO_INPUTS if clips and name in videos}
            rows.append(prompt_positions(self.model, self.family, ids[0, a:b], sample_kinds, sizes, inputs)[0])
            first_image, first_clip = first_image + count, first_clip + clips
        return torch.cat([plain[None], torch.cat(rows, 1)[:, None]])

    @contextmanager
    def forward(self, edges: Sequence[int], positions: Tensor | None) -> Iterator[None]:
        """A context for one forward of the model on a row of samples that end at ``edges``, which begin with 0 and end
        with T; for a shared row the forward takes this rank's tokens and their positions. ``positions``: for the whole
        row.

        Raises ModelError for positions that do not fit the samples, and after the forward if a layer of the decoder did
        not use the segments.
        """
        self._check(edges, positions)
        device = next(self.model.parameters()).device
        now = PackedForward(Segments.of(edges, device, self.share))
        token = current_forward.set(now)
        try:
            yield
        finally:
            current_forward.reset(token)
        if len(now.seen) != self.layers:
            raise ModelError(
                f"{len(now.seen)} of the {self.layers} layers of {type(self.model).__name__} attended within samples: "
                f"the others mixed them, or use another attention function. {PACKING_FIX}"
            )

    def _check(self, edges: Sequence[int], positions: Tensor | None) -> None:
        wanted = [1, edges[-1]] if self.axes == 1 else [4, 1, edges[-1]]
        if positions is None or list(positions.shape) != wanted:
            shape = "none" if positions is None else list(positions.shape)
            raise ModelError(
                f"positions of a pack have the shape {wanted} for {self.family.name}, found {shape}: compute them with "
                "Packed.positions"
            )
        rising = list(edges) == sorted(set(edges)) and edges[0] == 0
        if not rising or not torch.equal((positions if self.axes == 1 else positions[0]).cpu(), _plain(edges)):
            raise ModelError(
                f"positions of a pack count from 0 in each sample (in row 0, if there are four), and samples end at "
                f"{list(edges)[:8]}: compute them with Packed.positions"
            )


def _plain(edges: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """0, 1, 2, ... in each sample: [1, T]."""
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(edges)])[None]
