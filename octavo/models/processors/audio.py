"""Processors of models that take audio: text and audio samples in, the model's tensors out.

The stock feature extractor computes the spectrogram of a sound (:mod:`octavo.models.structure.audio_shapes`); each
placeholder in the text is repeated for each token of its sound. A class also has the properties of a family that the
data package needs:

    inputs         tensors for the model, and what the first dimension of each counts (octavo.data.encoding.sample)
    sound_limits   samples per second, and numbers of samples of the shortest and longest sound
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers import BatchFeature, PreTrainedTokenizerBase, WhisperFeatureExtractor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

from octavo.base.wording import count_noun
from octavo.models.errors import ForeignTokenizerError, ModelError
from octavo.models.folder.chat import WithDeadline
from octavo.models.folder.folder import check_sizes, open_plain, wrap_errors
from octavo.models.structure.audio_shapes import MIN_TOKENS, audio_of
from octavo.models.structure.skeleton import stock_config


class Qwen2AudioTextProcessor(WithDeadline, Qwen2AudioProcessor):
    """Qwen2AudioProcessor with a call that works in every version of transformers, and pads as the model needs."""

    image_processor = None
    inputs: ClassVar[dict[str, str]] = {"input_features": "sound", "feature_attention_mask": "sound"}

    @property
    def sound_limits(self) -> tuple[int, int, int]:
        hop = self.feature_extractor.hop_length
        frames = next(n for n in range(1, 100) if self._tokens(n) == MIN_TOKENS)
        return self.feature_extractor.sampling_rate, (frames - 1) * hop + 1, self.feature_extractor.n_samples

    def __call__(
        self, text: Sequence[str], audio: Sequence[np.ndarray] | None = None, images: Any = None, **options: Any
    ) -> BatchFeature:
        """Return `input_ids` of texts with expanded placeholders and, if there are sounds, `input_features` [sounds,
        bins, frames] and `feature_attention_mask` [sounds, frames]; lists, unless `options` of the tokenizer set
        `return_tensors`. Raises ModelError for images, and if the numbers of placeholders and sounds differ."""
        if images is not None and len(images):
            raise ModelError(
                f"a model of audio and text, which takes no images, received {count_noun(len(images), 'image')}."
            )
        texts, sounds = [text] if isinstance(text, str) else list(text), [] if audio is None else list(audio)
        num_placeholders = sum(prompt.count(self.audio_token) for prompt in texts)
        if num_placeholders != len(sounds):
            raise ModelError(
                f"the text has {count_noun(num_placeholders, 'placeholder')} {self.audio_token} for "
                f"{count_noun(len(sounds), 'sound')}."
            )
        inputs: dict[str, Any] = {}
        if sounds:
            # "max_length": the tower takes only sounds of full length
            features = self.feature_extractor(
                sounds, sampling_rate=self.feature_extractor.sampling_rate, padding="max_length",
                return_attention_mask=True, return_tensors=options.get("return_tensors"),
            )  # fmt: skip
            masks = features["attention_mask"]
            inputs = {"input_features": features["input_features"], "feature_attention_mask": masks}
            expanded = iter([self.audio_token * self._tokens(int(sum(mask))) for mask in masks])
            texts = [re.sub(re.escape(self.audio_token), lambda _: next(expanded), prompt) for prompt in texts]
        options.pop("return_mm_token_type_ids", None)
        encoded = self.tokenizer(texts, **options)
        encoded.pop("token_type_ids", None)
        return BatchFeature({**encoded, **inputs})

    @staticmethod
    def _tokens(frames: int) -> int:
        return ((frames - 1) // 2 - 1) // 2 + 1


def load(folder: Path, tokenizer: PreTrainedTokenizerBase, template: str | None) -> Qwen2AudioTextProcessor:
    """Load the processor of a folder. Raises ModelError if its files are missing or contradict config.json."""
    file = folder / "preprocessor_config.json"
    if not file.exists() and not (folder / "processor_config.json").exists():
        raise ModelError(f"{folder} has no preprocessor_config.json: copy the processor files from the original model.")
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            check_sizes(folder / name)
    config = stock_config(folder)
    with wrap_errors(f"{folder}: the feature extractor cannot be loaded"):
        with open_plain(folder) as plain_folder:
            extractor = WhisperFeatureExtractor.from_pretrained(plain_folder, local_files_only=True)
        processor = Qwen2AudioTextProcessor(extractor, tokenizer, chat_template=template)
    audio_shape = audio_of(config)
    sizes, expected = (extractor.feature_size, extractor.nb_max_frames), (audio_shape.bins, audio_shape.frames)
    if sizes != expected:
        raise ModelError(
            f"{file} gives spectrograms of {sizes[0]} bins x {sizes[1]} frames, but the tower of config.json takes "
            f"{expected[0]} x {expected[1]}. Take both from one model."
        )
    if processor.audio_token_id != config.audio_token_id:
        raise ForeignTokenizerError(
            f"{folder}: {processor.audio_token} is token {processor.audio_token_id} of the tokenizer, but "
            f"{config.audio_token_id} in config.json (audio_token_index). Take both from one model."
        )
    return processor
