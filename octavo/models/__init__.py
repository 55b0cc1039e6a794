"""Hugging Face models: descriptions of families and components, loading, processors, small checkpoints."""

from octavo.models.attention.attention import attend, available_kernels, disable_masks, use_attention, use_kernel
from octavo.models.errors import ModelError
from octavo.models.folder.quantization import Quantization, read_quantization
from octavo.models.forward.packed import Packed, why_not_packed
from octavo.models.forward.paged import CacheShape, cache_shape, prompt_positions, replace_attention, why_not_paged
from octavo.models.processors import frames
from octavo.models.processors.frames import VIDEO_INPUTS, as_images, batch_positions
from octavo.models.processors.generate import encode_conversation, generate, ignored_settings
from octavo.models.processors.processors import TextProcessor, image_backend, load_processor, load_tokenizer
from octavo.models.processors.video import VIDEO_SETTINGS, describe_videos
from octavo.models.processors.vocabulary import largest_id, missing_letters
from octavo.models.structure.audio_shapes import audio_of
from octavo.models.structure.describe import VALUE_HEAD, WITHOUT_HEAD, Family, describe, high_precision_modules
from octavo.models.structure.dropout import disable_dropout, disabled_dropout
from octavo.models.structure.freeze import freeze, freeze_all
from octavo.models.structure.shapes import random_model, shape_model
from octavo.models.structure.skeleton import empty, read_config, why_too_long
from octavo.models.structure.support import why_not_trained
from octavo.models.structure.vision_shapes import Vision, vision_of
from octavo.models.tiny.configs import tiny_config
from octavo.models.weights.assembly import frozen_casts
from octavo.models.weights.deferred import DeferredModel, load_deferred
from octavo.models.weights.iterate import iter_weights
from octavo.models.weights.loading import check_no_integers, load, load_split, parameter_count, split_model
from octavo.models.weights.random_init import DeferredInit, init_deferred, init_model

__all__ = [
    "VALUE_HEAD", "VIDEO_INPUTS", "VIDEO_SETTINGS", "WITHOUT_HEAD", "CacheShape", "DeferredInit", "DeferredModel",
    "Family", "ModelError", "Packed", "Quantization", "TextProcessor", "Vision", "as_images", "attend", "audio_of",
    "available_kernels", "batch_positions", "cache_shape", "check_no_integers", "describe", "describe_videos",
    "disable_dropout", "disable_masks", "disabled_dropout", "empty", "encode_conversation", "frames", "freeze",
    "freeze_all", "frozen_casts", "generate", "high_precision_modules", "ignored_settings", "image_backend",
    "init_deferred", "init_model", "iter_weights", "largest_id", "load", "load_deferred", "load_processor",
    "load_split", "load_tokenizer", "missing_letters", "parameter_count", "prompt_positions", "random_model",
    "read_config", "read_quantization", "replace_attention", "shape_model", "split_model", "tiny_config",
    "use_attention", "use_kernel", "vision_of", "why_not_packed", "why_not_paged", "why_not_trained", "why_too_long",
]  # fmt: skip
