"""How audio enters the tower of a family, computed from the configuration.

A sound is a log-mel spectrogram of `bins` x `frames`, a hundred frames a second. Qwen2-Audio pads every sound to 30
seconds and masks the padding; two convolutions and a pooling turn four frames into one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from octavo.models.errors import ModelError

MIN_TOKENS = 2
"""Tokens of the shortest sound. For Qwen2-Audio, transformers takes a batch without two adjacent placeholders for the
legacy form, in which each placeholder is a whole sound."""


@dataclass(frozen=True)
class Audio:
    """How the sounds of one family enter its tower.

    bins       mel bins
    frames     frames of a sound, including padding
    positions  tokens of each sound in the tower, including padding; `features`: the same for the tower's output
    least      tokens of the shortest sound in the decoder
    """

    bins: int
    frames: int
    positions: int
    features: int
    least: int = MIN_TOKENS

    def tokens(self, frames: int) -> int:
        """Return tokens in the decoder of a sound of this many frames: its placeholders in the text."""
        return ((frames - 1) // 2 - 1) // 2 + 1

    def shortest(self, tokens: int) -> int:
        """Return frames of the shortest sound of this many tokens: the inverse of `tokens`."""
        return 4 * tokens - 1

    def smallest(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return silence [1, bins, frames], as input of the tower."""
        return torch.zeros(1, self.bins, self.frames, device=device, dtype=dtype)


def audio_of(config: PreTrainedConfig) -> Audio:
    """Return how audio enters the tower of a configuration's family. Raises ModelError for a family that Octavo does
    not know."""
    sound = getattr(config, "audio_config", None)
    if sound is None:
        raise ModelError(f"model_type {config.model_type!r} takes no sound")
    if config.model_type == "qwen2_audio":
        places = sound.max_source_positions
        return Audio(sound.num_mel_bins, 2 * places, places, places // 2)
    raise ModelError(f"Octavo does not know how sound enters the tower of model_type {config.model_type!r}")
