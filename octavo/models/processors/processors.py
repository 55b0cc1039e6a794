"""The processor of a model folder: text and PIL images in, the model's tensors out.

Models that take images get a processor of :mod:`octavo.models.processors.stock`. A text-only model gets
`TextProcessor`, which has the same methods and rejects images.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer, BatchFeature, MptConfig, PreTrainedTokenizerBase, ProcessorMixin

from octavo.base import safe_read
from octavo.base.model_families import RECORDS, trained_families, trains_on, video_families
from octavo.base.wording import count_noun
from octavo.models.custom.nvila.three_folders import add_media_tokens, find_template
from octavo.models.errors import ModelError, NoEndTokenError
from octavo.models.folder.chat import (
    FILES,
    check_rendering,
    check_template,
    deadline,
    render_plain,
    set_template_args,
)
from octavo.models.folder.folder import (
    check_companions,
    check_sizes,
    find_file,
    open_plain,
    parts_of,
    read_json,
    wrap_errors,
)
from octavo.models.folder.normalizers import check_growth
from octavo.models.processors.video import load_video_processor
from octavo.models.processors.vocabulary import check_vocabulary
from octavo.models.structure.skeleton import stock_config


class TextProcessor:
    """A tokenizer with the interface of a processor, for text-only models.

    `processor(text=..., images=None)` and `processor.apply_chat_template(messages)`; an image raises ModelError.
    """

    image_processor = None
    image_token = None
    embedding_rows: int | None = None
    template_args: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template

    def __call__(self, text: str | Sequence[str] | None = None, images: Any = None, **kwargs: Any) -> BatchFeature:
        if images is not None and len(images):
            raise ModelError(
                f"a text-only model received {count_noun(len(images), 'image')}. Use a vision-language model, or rows "
                "without images."
            )
        kwargs.pop("return_mm_token_type_ids", None)
        encoded = self.tokenizer(text, **kwargs)
        encoded.pop("token_type_ids", None)
        return BatchFeature(dict(encoded))

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render the tokenizer's chat template with the variables `template_args`, under a deadline. Raises ModelError
        for a rendering that tokenizers reject (`chat.check_rendering`)."""
        with deadline():
            text = render_plain(self.tokenizer, self.tokenizer, conversation, kwargs, self.template_args)
            if text is not None:
                return check_rendering(text, conversation, kwargs)
            rendering = self.tokenizer.apply_chat_template(conversation, **{**self.template_args, **kwargs})
            return check_rendering(rendering, conversation, kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Decode one sequence with the tokenizer."""
        return cast(str, self.tokenizer.decode(*args, **kwargs))

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]:
        """Decode several sequences with the tokenizer."""
        return self.tokenizer.batch_decode(*args, **kwargs)

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the tokenizer."""
        self.tokenizer.save_pretrained(directory)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder. Raises ModelError if there is none, if it needs code from the folder, if
    one of its files cannot be read, and for a tokenizer that multiplies texts (`check_growth`)."""
    model_folder = Path(path)
    if os.path.lexists(model_folder / "config.json") or parts_of(model_folder):
        stock_config(model_folder)  # raises for a wrong config.json, which transformers would blame on the tokenizer
    check_companions(model_folder)
    folder = find_file(
        model_folder, "tokenizer_config.json"
    ).parent  # for a model in three folders, that of the decoder
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json and no tokenizer_config.json. Copy them from the model.")
    overrides: dict[str, Any] = {}
    if (folder / "config.json").exists():  # transformers reads the tokenizer's class from it
        check_sizes(folder / "config.json")
        if read_json(folder / "config.json").get("model_type") == MptConfig.model_type:
            # transformers' MptConfig refuses numbers that LLM-Foundry writes (clip_qkv: 6), and AutoTokenizer needs
            # only the class of the configuration.
            overrides["config"] = MptConfig()
    with wrap_errors(lambda: f"{_faulty_tokenizer_file(folder)}: the tokenizer cannot be loaded"):
        with open_plain(folder) as plain:
            tokenizer = AutoTokenizer.from_pretrained(
                plain, local_files_only=True, trust_remote_code=False, **overrides
            )
        tokenizer.name_or_path = str(folder)
    check_growth(tokenizer, folder)
    if parts_of(model_folder):
        add_media_tokens(tokenizer)
    if type(tokenizer.model_max_length) not in (int, float) or not tokenizer.model_max_length > 0:
        raise ModelError(
            f"{folder}/tokenizer_config.json has model_max_length={tokenizer.model_max_length!r:.80}; it must be a "
            "number of tokens."
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise NoEndTokenError(
                f"{folder}: the tokenizer has no pad and no eos token. Name one in tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere, so any id works
    return tokenizer


def _faulty_tokenizer_file(folder: Path) -> Path:
    """Return the file that keeps a tokenizer from being loaded: tokenizer.json if it is missing or does not load
    without the others, else tokenizer_config.json, whose settings are applied to it."""
    file = folder / "tokenizer.json"
    if not file.exists() and not any(folder.glob("vocab*")) and not any(folder.glob("*.model")):
        return file
    if file.exists():
        try:
            Tokenizer.from_buffer(safe_read.read_bytes(file, ModelError))
        except BaseException as error:  # panics of Rust code are no subclasses of Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return file
    settings = folder / "tokenizer_config.json"
    return settings if settings.exists() else file


def load_for_chat(path: str | Path) -> Any:
    """Load the object that renders conversations for a model folder: its processor if Octavo has one for the family and
    its files exist, else its tokenizer, whose chat template is checked like a processor's. Raises ModelError as
    :func:`load_processor`."""
    folder = Path(path)
    config = stock_config(folder)
    raw = config.to_dict() if parts_of(folder) else read_json(folder / "config.json")
    media = any(find_file(folder, name).exists() for name in ("preprocessor_config.json", "processor_config.json"))
    if media and trains_on(raw.get("model_type"), "images", "sound"):
        return load_processor(folder)
    tokenizer = load_tokenizer(folder)
    check_template(tokenizer, folder)
    check_vocabulary(tokenizer, config.get_text_config().vocab_size, folder)
    return tokenizer


def image_backend(processor: ProcessorMixin | TextProcessor) -> str | None:
    """Return the library with which a processor resizes images: `torchvision`, `pil`, or None for text-only models."""
    image_processor = processor.image_processor
    return None if image_processor is None else image_processor.backend


def load_processor(
    path: str | Path,
    max_pixels: int | None = None,
    min_pixels: int | None = None,
    template_args: Mapping[str, object] | None = None,
    video: Mapping[str, object] | None = None,
) -> ProcessorMixin | TextProcessor:
    """Load the processor of a local model folder, chosen by `config.json`'s model_type: AutoProcessor's class, but with
    Pillow if torchvision is missing (`image_backend` returns which), and always with Pillow for videos.

    max_pixels, min_pixels   limits of one image after resizing. Qwen: the area in pixels, rounded to whole tokens.
                             InternVL: the number of tiles, rounded down (max) and up (min) to at least one.
                             Mistral 3, SmolVLM: only max; its square root limits the longest edge.

    template_args            variables of the chat template, for each of its renderings

    video                    settings of videos (:data:`octavo.models.processors.video.VIDEO_SETTINGS`), or None if no
    videos are configured

    Raises ModelError for a folder without processor files, or whose files contradict config.json, limits below one
    token or tile, min above max, limits for a text-only model and for families of fixed sizes (LLaVA-OneVision, Gemma
    3), a chat template that does not terminate or rejects every conversation (`check_template`), variables that it does
    not read (`chat.set_template_args`), and a tokenizer whose ids are outside the model's embedding
    (`check_vocabulary`).
    """
    folder = Path(path)
    processor = _load_processor(folder, max_pixels, min_pixels, video)
    set_template_args(processor, template_args or {}, folder)
    rows: int = stock_config(folder).get_text_config().vocab_size
    cast(TextProcessor, processor).embedding_rows = rows  # processors of all families get the attribute
    check_vocabulary(processor, rows, folder)
    return processor


@contextmanager
def _import_errors(what: str, package: str) -> Iterator[None]:
    """Convert import errors of a package that was built for a different torch to ModelError."""
    try:
        yield
    except (ImportError, RuntimeError, OSError) as cause:
        raise ModelError(
            f"transformers' {what} cannot be imported ({type(cause).__name__}: {str(cause).strip()[:200]}). "
            f"If it names {package}: install the build for this torch, or remove it; Octavo does not need it."
        ) from cause


def _load_processor(
    folder: Path, max_pixels: int | None, min_pixels: int | None, video: Mapping[str, Any] | None
) -> ProcessorMixin | TextProcessor:
    config = stock_config(folder)
    raw = config.to_dict() if parts_of(folder) else read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if video is not None and model_type not in video_families():
        raise ModelError(
            f"data.video is set, but Octavo does not support videos for model_type {model_type!r}, only for "
            f"{', '.join(video_families())}. Remove it, or use a model of these families."
        )
    tokenizer = load_tokenizer(folder)
    pixel_limits = {"max_pixels": max_pixels, "min_pixels": min_pixels}
    limits = {key: value for key, value in pixel_limits.items() if value is not None}
    # Modules of processors are imported here: their imports of torchaudio, torchvision and Pillow may fail or be slow.
    if trains_on(model_type, "sound"):
        with _import_errors("feature extractors of sound", "torchaudio"):
            from octavo.models.processors import audio

        if limits:
            raise ModelError(f"{', '.join(limits)} is set, but {folder} is a model without images. Remove the limit.")
        return audio.load(folder, tokenizer, _chat_template(folder, tokenizer))
    if not trains_on(model_type, "images"):
        if "vision_config" in raw:
            raise ModelError(
                f"{folder}: no processor for model_type {model_type!r}; families with images: "
                f"{', '.join(trained_families('images'))}."
            )
        if limits:
            raise ModelError(f"{', '.join(limits)} is set, but {folder} is a text-only model. Remove the limit.")
        return TextProcessor(tokenizer)
    from PIL import Image

    with _import_errors("image processors", "torchvision"):
        from octavo.models.processors import image
        from octavo.models.processors import stock as stock_processors

    record = RECORDS[raw["model_type"]]
    processor_class: Any = stock_processors.PROCESSORS[record.processor]
    images = find_file(folder, "preprocessor_config.json")
    if not images.exists() and not (folder / "processor_config.json").exists():
        raise ModelError(f"{folder} has no preprocessor_config.json: copy the processor files from the original model.")
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        if (file := find_file(folder, name)).exists():
            check_sizes(file)
    settings = image.settings_file(folder)
    with wrap_errors(f"{settings}: the image processor cannot be loaded"):
        with open_plain(images.parent) as plain:
            image_processor = processor_class.image_class.from_pretrained(plain, local_files_only=True)
        deviations = image_processor.image_std
        if 0 in (deviations if isinstance(deviations, list | tuple) else [deviations]):
            raise ModelError(f"{settings} has image_std={deviations}; pixels are divided by it, so it must not be 0.")
    image.check_image_options(folder, processor_class, image_processor)
    image.set_size_limits(image_processor, record.image_cut, limits)
    with wrap_errors(f"{settings}: the image processor cannot take an image"):
        batch = image_processor(images=[Image.new("RGB", (64, 64))])
    image.check_small_image(folder, raw, image_processor, batch, record.image_cut)
    template = _chat_template(folder, tokenizer)
    with wrap_errors(f"{folder}: the processor cannot be loaded"):
        shuffled = record.image_cut == "shuffled_tiles"
        options = {"image_seq_length": _image_seq_length(folder, raw)} if shuffled else {}
        options |= image.computed_options(folder, processor_class)
        processor = processor_class(image_processor, tokenizer, chat_template=template, **options)
    image.check_agreement(folder, raw, processor, record.image_cut)
    if record.video is not None:
        length = getattr(processor, "image_seq_length", 0)
        processor.videos = processor.video_processor = load_video_processor(
            folder, record, image_processor, video or {}, length
        )
    return processor


def _image_seq_length(folder: Path, raw: Mapping[str, Any]) -> int:
    file = folder / "processor_config.json"
    entry = read_json(file) if file.exists() else {}
    stated = entry.get("image_seq_length", raw.get("image_seq_length", 256))
    if type(stated) is not int or stated < 1:
        raise ModelError(
            f"{file} (or config.json) has image_seq_length={stated!r:.80}; it must be an integer of at least 1."
        )
    return stated


def _chat_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    for name in FILES[:2]:
        file = find_file(folder, name)
        if file.exists():
            jinja = name.endswith("jinja")
            return safe_read.read_text(file, ModelError) if jinja else read_json(file).get("chat_template")
    template = find_template(folder, tokenizer) if parts_of(folder) else None
    return tokenizer.chat_template if template is None else template
