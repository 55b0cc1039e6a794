"""Packing: several samples concatenated in a row, and a forward in which tokens attend only within their sample.

    packed = models.Packed(model, family)
    positions = packed.positions(edges, ids, images, kinds, grid)       # from 0 in each sample
    with packed.forward(edges, positions):
        model(input_ids=ids, position_ids=positions, ..., use_cache=False)

transformers' own handling of packed rows is not used: it derives a mask from jumps in position ids, and silently omits
it if there is a cache, a mask, or positions with three axes. Here samples are separated by
:mod:`octavo.models.attention.segments`, and after the forward the number of layers that used them is checked.
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
_LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")  # rotary angles that depend on the longest sample of a call


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return why samples of a model cannot share a row, as the end of a sentence, or None if they can."""
    if (why := _why_not(model.config)) is not None:
        return why
    if not getattr(type(model), "_supports_attention_backend", False):
        return f"{type(model).__name__} computes attention in its own way, not through transformers' registry"
    return None


def _why_not(config: PreTrainedConfig) -> str | None:
    if getattr(config, "audio_config", None) is not None:
        return f"model_type {config.model_type!r} takes audio, which packs do not support in this version"
    if attends_both_ways(config.model_type):
        return (
            f"tokens of an image attend to later ones in model_type {config.model_type!r}, but attention within the "
            "samples of a pack is causal"
        )
    text = config.get_text_config()
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    if states := sorted({kind for kind in kinds if kind in _RECURRENT}):
        return (
            f"model_type {config.model_type!r} has layers of type {', '.join(states)}, whose state continues from one "
            "sample into the next"
        )
    if windowed := sorted({kind for kind in kinds if kind not in ("full_attention", "attention")}):
        layers = ", ".join(windowed)
        return f"model_type {config.model_type!r} has layers of type {layers}, which attend to only part of a sample"
    # Where kinds are listed they decide: configurations keep sliding_window even if no layer uses it.
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True) and not kinds:
        return f"model_type {config.model_type!r} attends to only {text.sliding_window} earlier tokens (sliding_window)"
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in _LENGTH_DEPENDENT_ROPE:
        return (
            f"model_type {config.model_type!r} uses {kind} rotary embeddings, whose angles depend on the longest sample"
        )
    return None


class Packed:
    """Packed forwards of a model, whose attention is replaced by a function of Octavo. ``share``: this rank's share of
    the tokens of each row, if several ranks share rows.

    Raises ModelError for a model whose samples would not be separate: recurrent or windowed layers, or attention that
    is not in transformers' registry or does not use torch's kernels.
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
        """Return the positions of the tokens in their samples, int64: [1, T], or for rotary embeddings with three axes
        [4, 1, T], in which row 0 counts tokens and rows 1 to 3 are the model's ``get_rope_index`` for each sample.

        ids [1, T] · images: the number in each sample; padding has none · kinds [1, T]: 1 for placeholders of images,
        2 of videos · grid [images, 3] · videos: the number in each sample (`counts`), and the inputs of
        :data:`octavo.models.processors.frames.VIDEO_INPUTS`; all in host memory.
        """
        token_counts = _plain(edges, ids.device)
        if self.axes == 1:
            return token_counts
        rows, first_image, first_clip = [], 0, 0
        videos = videos or {}
        counts = videos.get("counts", ())
        # The last sample may be padding, which has no entry in `images` and `counts`.
        for number, (a, b) in enumerate(pairwise(edges)):
            count = images[number] if number < len(images) else 0
            sizes = None if grid is None or not count else grid[first_image : first_image + count]
            sample_kinds = None if kinds is None else kinds[0, a:b]
            clips = counts[number] if number < len(counts) else 0
            clip_slice = slice(first_clip, first_clip + clips)
            inputs = {name: videos[name][clip_slice] for name in VIDEO_INPUTS if clips and name in videos}
            rows.append(prompt_positions(self.model, self.family, ids[0, a:b], sample_kinds, sizes, inputs)[0])
            first_image, first_clip = first_image + count, first_clip + clips
        return torch.cat([token_counts[None], torch.cat(rows, 1)[:, None]])

    @contextmanager
    def forward(self, edges: Sequence[int], positions: Tensor | None) -> Iterator[None]:
        """Context for one forward of the model on a row of samples with ``edges``, from 0 to T; for a shared row the
        forward takes this rank's tokens and their positions. ``positions``: for the full row.

        Raises ModelError for positions that do not fit the samples, and after the forward if a layer of the decoder did
        not use the segments.
        """
        self._check(edges, positions)
        device = next(self.model.parameters()).device
        running = PackedForward(Segments.from_edges(edges, device, self.share))
        token = current_forward.set(running)
        try:
            yield
        finally:
            current_forward.reset(token)
        if len(running.seen) != self.layers:
            raise ModelError(
                f"{len(running.seen)} of the {self.layers} layers of {type(self.model).__name__} attended within "
                f"samples: the others mixed them, or use a different attention function. {PACKING_FIX}"
            )

    def _check(self, edges: Sequence[int], positions: Tensor | None) -> None:
        expected = [1, edges[-1]] if self.axes == 1 else [4, 1, edges[-1]]
        if positions is None or list(positions.shape) != expected:
            shape = "none" if positions is None else list(positions.shape)
            raise ModelError(
                f"positions of a pack must have shape {expected} for {self.family.name}, got {shape}: compute them "
                "with Packed.positions"
            )
        valid_edges = list(edges) == sorted(set(edges)) and edges[0] == 0
        if not valid_edges or not torch.equal((positions if self.axes == 1 else positions[0]).cpu(), _plain(edges)):
            raise ModelError(
                "positions of a pack must count from 0 in each sample (in row 0, if there are four), and samples end "
                f"at {list(edges)[:8]}: compute them with Packed.positions"
            )


def _plain(edges: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return 0, 1, 2, ... in each sample: [1, T]."""
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(edges)])[None]
