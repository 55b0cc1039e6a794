"""How sound of a family comes to its tower, by the configuration alone.

Sound is a picture of `bins` x `frames`: how loud each band of pitch is, a hundred times a second. Qwen2-Audio pads
every sound to the same half minute and masks what is none; two convolutions and a pooling make one token of four
frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from octavo.models.errors import ModelError

LEAST = 2
"""Tokens of the shortest sound: of Qwen2-Audio, transformers takes a batch without two placeholders side by side for
one that is written in the old way, each placeholder for a whole sound."""


@dataclass(frozen=True)
class Hearing:
    """One family's way.

    bins       bands of pitch
    frames     of a sound, padding included
    positions  tokens through the tower of each sound, padding included; `features`: out of it, likewise
    least      tokens in the decoder of the shortest sound
    """

    bins: int
    frames: int
    positions: int
    features: int
    least: int = LEAST

    def tokens(self, frames: int) -> int:
        """Tokens in the decoder of a sound of so many frames: what stands in the text."""
        return ((frames - 1) // 2 - 1) // 2 + 1

    def shortest(self, tokens: int) -> int:
        """Frames of the shortest sound of so many tokens: the opposite of `tokens`."""
        return 4 * tokens - 1

    def smallest(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Silence [1, bins, frames], as the tower takes it."""
        return torch.zeros(1, self.bins, self.frames, device=device, dtype=dtype)


def hearing_of(config: PreTrainedConfig) -> Hearing:
    """The way of a configuration's family. Raises ModelError for one that Octavo does not know."""
    sound = getattr(config, "audio_config", None)
    if sound is None:
        raise ModelError(f"model_type {config.model_type!r} takes no sound")
    if config.model_type == "qwen2_audio":
        places = sound.max_source_positions
        return Hearing(sound.num_mel_bins, 2 * places, places, places // 2)
    raise ModelError(f"how sound comes to the tower of model_type {config.model_type!r} is not known to Octavo")
