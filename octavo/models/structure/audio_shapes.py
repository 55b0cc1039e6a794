"""Shapes of audio inputs of a family, computed from the configuration.

A sound is a log-mel spectrogram of `bins` x `frames`, a hundred frames per second. Qwen2-Audio pads every sound to 30
seconds and masks the padding; two convolutions and a pooling turn four frames into one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from octavo.models.errors import ModelError

MIN_TOKENS = 2
"""Tokens of the shortest sound. For Qwen2-Audio, transformers treats a batch without two adjacent placeholders as the
legacy format, in which each placeholder is a full sound."""


@dataclass(frozen=True)
class Audio:
    """The shapes of a family's audio inputs.

    bins       mel bins
    frames     frames of a sound, including padding
    positions  tokens of each sound in the tower, including padding; `features`: tokens of the tower's output
    least      tokens of the shortest sound in the decoder
    """

    bins: int
    frames: int
    positions: int
    features: int
    least: int = MIN_TOKENS

    def tokens(self, frames: int) -> int:
        """Return the number of decoder tokens, and placeholders in the text, of a sound of `frames` frames."""
        return ((frames - 1) // 2 - 1) // 2 + 1

    def shortest(self, tokens: int) -> int:
        """Return the number of frames of the shortest sound with `tokens` tokens; inverts `tokens`."""
        return 4 * tokens - 1

    def smallest(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return silence [1, bins, frames], as input of the tower."""
        return torch.zeros(1, self.bins, self.frames, device=device, dtype=dtype)


def audio_of(config: PreTrainedConfig) -> Audio:
    """Return the audio shapes of a configuration. Raises ModelError for a family that Octavo does not know."""
    sound = getattr(config, "audio_config", None)
    if sound is None:
        raise ModelError(f"model_type {config.model_type!r} does not take audio")
    if config.model_type == "qwen2_audio":
        places = sound.max_source_positions
        return Audio(sound.num_mel_bins, 2 * places, places, places // 2)
    raise ModelError(f"Octavo does not know the audio inputs of model_type {config.model_type!r}")
