"""Hugging Face models described, never modified: families and components, loading, processors, small checkpoints."""

from octavo.models.attention.attention import attend, kernels_here, use_attention, use_kernel, without_masks
from octavo.models.errors import ModelError
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.models.forward.packed import Packed, why_not_packed
from octavo.models.forward.paged import Attend, CacheShape, attention_by, axes, cache_shape, positions, why_not_paged
from octavo.models.processors import frames
from octavo.models.processors.frames import OF_VIDEOS, as_images, positions_of_rows
from octavo.models.processors.generate import generate, ignored_settings, question
from octavo.models.processors.processors import TextProcessor, load_for_chat, load_processor, load_tokenizer, pixels_by
from octavo.models.processors.video import VIDEO_SETTINGS, videos_described
from octavo.models.processors.vocabulary import largest_id, missing_letters
from octavo.models.structure.audio_shapes import audio_of
from octavo.models.structure.describe import VALUE_HEAD, WITHOUT_HEAD, Family, describe, stays
from octavo.models.structure.dropout import switch_off_dropout, switched_off
from octavo.models.structure.freeze import freeze, freeze_all
from octavo.models.structure.shapes import random_model, shape_model
from octavo.models.structure.skeleton import empty, read_config, why_too_long
from octavo.models.structure.support import why_not_trained
from octavo.models.structure.vision_shapes import Vision, vision_of
from octavo.models.tiny.configs import tiny_config
from octavo.models.weights.assembly import frozen_names
from octavo.models.weights.deferred import Deferred, defer
from octavo.models.weights.iterate import stream
from octavo.models.weights.loading import load, load_split, parameter_count, refuse_integers, split
from octavo.models.weights.random_init import Drawn, draw, fresh

__all__ = [
    "OF_VIDEOS", "VALUE_HEAD", "VIDEO_SETTINGS", "WITHOUT_HEAD", "Attend", "CacheShape", "Deferred", "Drawn",
    "Family", "ModelError", "Packed", "Quantization", "TextProcessor", "Vision", "as_images", "attend",
    "attention_by", "audio_of", "axes", "cache_shape", "defer", "describe", "draw", "empty", "frames", "freeze",
    "freeze_all", "fresh", "frozen_names", "generate", "ignored_settings", "kernels_here", "largest_id", "load",
    "load_for_chat", "load_processor", "load_split", "load_tokenizer", "missing_letters", "parameter_count",
    "pixels_by", "positions", "positions_of_rows", "question", "random_model", "read_config", "read_quantization",
    "refuse_integers", "shape_model", "split", "stays", "stream", "switch_off_dropout", "switched_off",
    "tiny_config", "use_attention", "use_kernel", "videos_described", "vision_of", "why_not_packed",
    "why_not_paged", "why_not_trained", "why_too_long", "without_masks",
]  # fmt: skip
