"""Processors without torchvision: text and PIL images in, the model's tensors out.

The stock processors want a video processor, which wants torchvision; without it AutoProcessor fails, or quietly
returns only the tokenizer. Here the same classes are used through thin subclasses whose `__init__` has no
`video_processor`, with the image processors in their PIL form. A text-only model gets `TextProcessor`, which takes
the same calls and refuses images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, BatchFeature, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from octavo.models.errors import ModelError
from octavo.models.folder import read_json
from octavo.models.skeleton import VISION_FAMILIES


class _WithoutVideo:
    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **_: Any):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template)  # type: ignore[call-arg]


class Qwen3VLImageTextProcessor(_WithoutVideo, Qwen3VLProcessor):
    """Qwen3VLProcessor for images and text (dense and MoE)."""


class Qwen25VLImageTextProcessor(_WithoutVideo, Qwen2_5_VLProcessor):
    """Qwen2_5_VLProcessor for images and text."""


class InternVLImageTextProcessor(InternVLProcessor):
    """InternVLProcessor for images and text."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
        **_: Any,
    ):
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template=chat_template)


class TextProcessor:
    """A tokenizer behind a processor's call, for text-only models.

    `processor(text=..., images=None)` and `processor.apply_chat_template(messages)`; an image is a ModelError.
    """

    image_processor = None
    image_token = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def __call__(self, text: str | Sequence[str] | None = None, images: Any = None, **kwargs: Any) -> BatchFeature:
        if images is not None and len(images):
            raise ModelError(
                f"{len(images)} images were given to a text-only model. Use a vision-language model, or rows without "
                "images."
            )
        kwargs.pop("return_mm_token_type_ids", None)
        encoded = self.tokenizer(text, **kwargs)
        encoded.pop("token_type_ids", None)
        return BatchFeature(dict(encoded))

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """The tokenizer's chat template."""
        return self.tokenizer.apply_chat_template(conversation, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """The tokenizer's decode."""
        return self.tokenizer.decode(*args, **kwargs)

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]:
        """The tokenizer's batch_decode."""
        return self.tokenizer.batch_decode(*args, **kwargs)

    def save_pretrained(self, directory: str | Path) -> None:
        """The tokenizer's save_pretrained."""
        self.tokenizer.save_pretrained(directory)


# model_type -> (processor, image processor)
_PROCESSORS: dict[str, tuple[type[ProcessorMixin], type]] = {
    "qwen3_vl": (Qwen3VLImageTextProcessor, Qwen2VLImageProcessorPil),
    "qwen3_vl_moe": (Qwen3VLImageTextProcessor, Qwen2VLImageProcessorPil),
    "qwen2_5_vl": (Qwen25VLImageTextProcessor, Qwen2VLImageProcessorPil),
    "internvl": (InternVLImageTextProcessor, GotOcr2ImageProcessorPil),
}


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder. Raises ModelError when there is none, or it needs code from the folder."""
    folder = Path(path)
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json and no tokenizer_config.json. Copy them from the model.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(f"{folder}: the tokenizer has no pad and no eos token. Name one in tokenizer_config.json.")
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere; any id serves
    return tokenizer


def load_processor(
    path: str | Path, max_pixels: int | None = None, min_pixels: int | None = None
) -> ProcessorMixin | TextProcessor:
    """The processor of a local model folder, chosen by `config.json`'s model_type; needs no torchvision.

    max_pixels, min_pixels   limits of one image after resizing. Qwen: the area in pixels, kept to whole tokens.
                             InternVL: the number of tiles, rounded down (max) and up (min) to at least one.

    Raises ModelError for a folder without processor files, limits below one token or tile, min above max, and limits
    for a text-only model.
    """
    folder = Path(path)
    raw = read_json(folder / "config.json")
    tokenizer = load_tokenizer(folder)
    limits = {"max_pixels": max_pixels, "min_pixels": min_pixels}
    given = {key: value for key, value in limits.items() if value is not None}
    if raw.get("model_type") not in _PROCESSORS:
        if "vision_config" in raw:
            raise ModelError(
                f"{folder}: no processor for model_type {raw.get('model_type')!r}; families with images: "
                f"{', '.join(VISION_FAMILIES)}."
            )
        if given:
            raise ModelError(f"{', '.join(given)} given, but {folder} is a text-only model. Remove the limit.")
        return TextProcessor(tokenizer)
    processor_class, image_class = _PROCESSORS[raw["model_type"]]
    if not (folder / "preprocessor_config.json").exists() and not (folder / "processor_config.json").exists():
        raise ModelError(f"{folder} has no preprocessor_config.json: copy the processor files from the original model.")
    try:
        image_processor = image_class.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ModelError(f"{folder}: the image processor cannot be loaded: {reason}") from error
    _limit(image_processor, given)
    internvl = processor_class is InternVLImageTextProcessor
    more = {"image_seq_length": _image_seq_length(folder, raw)} if internvl else {}
    return processor_class(image_processor, tokenizer, chat_template=_chat_template(folder, tokenizer), **more)


def _image_seq_length(folder: Path, raw: dict) -> int:
    file = folder / "processor_config.json"
    entry = read_json(file) if file.exists() else {}
    return int(entry.get("image_seq_length", raw.get("image_seq_length", 256)))


def _chat_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    for name in ("chat_template.jinja", "chat_template.json"):
        file = folder / name
        if file.exists():
            return file.read_text(encoding="utf-8") if name.endswith("jinja") else read_json(file).get("chat_template")
    return tokenizer.chat_template


def _limit(image_processor: Any, given: dict[str, int]) -> None:
    if not given:
        return
    low, high = given.get("min_pixels"), given.get("max_pixels")
    if low is not None and high is not None and low > high:
        raise ModelError(f"min_pixels {low} is above max_pixels {high}. Swap them or remove one.")
    if isinstance(image_processor, Qwen2VLImageProcessorPil):
        unit, what = (image_processor.patch_size * image_processor.merge_size) ** 2, "token"
    else:
        unit, what = image_processor.size["height"] * image_processor.size["width"], "tile"
    for key, value in given.items():
        if value < unit:
            raise ModelError(f"{key} {value} is less than one {what} of this model. Give at least {unit}.")
    if isinstance(image_processor, Qwen2VLImageProcessorPil):
        size = dict(image_processor.size)
        if high is not None:
            size |= {"longest_edge": high, "shortest_edge": min(size["shortest_edge"], high)}
        if low is not None:
            size |= {"shortest_edge": low, "longest_edge": max(size["longest_edge"], low)}
        image_processor.size = type(image_processor.size)(**size)
    else:
        if high is not None:
            image_processor.max_patches = high // unit
            image_processor.min_patches = min(image_processor.min_patches, image_processor.max_patches)
        if low is not None:
            image_processor.min_patches = -(-low // unit)
            image_processor.max_patches = max(image_processor.max_patches, image_processor.min_patches)
