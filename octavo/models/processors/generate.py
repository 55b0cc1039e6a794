"""Greedy answers to a conversation, independent of the settings in generation_config.json.

transformers takes options that a call does not set from the model's generation settings, so a repetition penalty or
beams of the folder would change a greedy answer. Only the tokens that end or pad an answer come from the settings.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import BatchFeature, GenerationConfig, LogitsProcessorList, PreTrainedModel, ProcessorMixin

from octavo.base.wording import count_noun
from octavo.models.errors import ModelError
from octavo.models.folder import chat
from octavo.models.processors.frames import why_not_stock_times
from octavo.models.processors.processors import TextProcessor
from octavo.models.processors.stop_tokens import stop_ids

#: settings of a model that are used, or that do not affect answers
_KEPT = {"eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "transformers_version"}
_NEUTRAL_AT_1 = {"num_beams", "temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"}

if TYPE_CHECKING:
    from PIL.Image import Image  # only for types: benchmarks on GPU machines have no Pillow
    from transformers._typing import GenerativePreTrainedModel

    from octavo.models.processors.stock import Qwen3VLImageTextProcessor


def generate(
    model: PreTrainedModel,
    processor: ProcessorMixin | TextProcessor,
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image] = (),
    max_new_tokens: int = 32,
    videos: Sequence[Any] = (),
) -> str:
    """Return the model's greedy answer to `messages`, decoded without special tokens.

    messages, images, videos  see :func:`encode_conversation`

    :func:`ignored_settings` lists the generation settings of the model that have no effect. The settings and the mode
    of the model are restored afterwards. Raises ModelError as :func:`encode_conversation` does, when max_new_tokens is
    below one, if the installed transformers assigns different timestamps to video tokens than training did, and if a
    score is NaN, in which case the most likely token would be arbitrary.
    """
    if max_new_tokens < 1:
        raise ModelError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    batch = encode_conversation(processor, messages, images, videos=videos).to(model.device)
    if (why := why_not_stock_times(model, batch)) is not None:
        raise ModelError(why)
    stated = model.generation_config
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids(stated, processor) or None,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    training = model.training
    model.eval()
    model.generation_config = (
        settings  # otherwise transformers takes options that `settings` does not set from the model
    )
    generator = cast("GenerativePreTrainedModel", model)
    check = LogitsProcessorList([_check_scores])
    try:
        with torch.no_grad():
            ids = cast(Tensor, generator.generate(**batch, generation_config=settings, logits_processor=check))
    finally:
        model.generation_config = stated
        model.train(training)
    answer = processor.tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return cast(str, answer).strip()


def encode_conversation(
    processor: ProcessorMixin | TextProcessor,
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image] = (),
    answered: bool = False,
    videos: Sequence[Any] = (),
) -> BatchFeature:
    """Encode a conversation up to an answer as the model's tensors: `input_ids` [1, P] and the inputs of images. With
    `answered` the conversation includes its answer.

    messages  `[{"role", "content"}]`, content a string or parts (`{"type": "image"}`, `{"type": "text", "text": ...}`)
    images    one PIL image for each image part, in reading order
    videos    one `octavo.data` Shot for each video part (`{"type": "video"}`), in reading order

    Raises ModelError when the numbers of images and image parts, or of videos and video parts, differ, when there is no
    message or no chat template, and for errors of the processor.
    """
    if images and isinstance(processor, TextProcessor):
        raise ModelError(
            f"a text-only model received {count_noun(len(images), 'image')}. Leave images out, or use a "
            "vision-language model."
        )
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    parts = sum(part.get("type") == "image" for content in contents for part in content)
    if parts != len(images):
        raise ModelError(
            f"the messages have {count_noun(parts, 'image part')} for {count_noun(len(images), 'image')}; the numbers "
            "must agree."
        )
    parts = sum(part.get("type") == "video" for content in contents for part in content)
    if parts != len(videos):
        raise ModelError(
            f"the messages have {count_noun(parts, 'video part')} for {count_noun(len(videos), 'video')}; the numbers "
            "must agree."
        )
    if videos and getattr(processor, "videos", None) is None:
        raise ModelError(
            f"Octavo does not support videos for this model, which received {count_noun(len(videos), 'video')}."
        )
    if not messages:
        raise ModelError("there are no messages; at least one is required.")
    if not processor.chat_template:
        raise ModelError(
            "the model's folder has no chat template (chat_template.jinja), so the prompt cannot be formatted. "
            "Add the template of its chat version; a base model has none."
        )
    text = chat.render(processor, messages, add_generation_prompt=not answered)
    # add_special_tokens=False: the template has written the special tokens, and <s> must not be added twice.
    token = getattr(processor, "image_token", None)
    num_placeholders = 0 if token is None else text.count(token)
    try:
        if num_placeholders != len(images):  # transformers 5.17 does not check this
            raise ValueError(
                f"the text has {count_noun(num_placeholders, 'placeholder')} for {count_noun(len(images), 'image')}"
            )
        rows = [list(images)] if images and getattr(processor, "images_by_row", False) else list(images)
        inputs: dict[str, Any] = {}
        if videos:
            video_processor = cast("Qwen3VLImageTextProcessor", processor)  # one of those that take videos
            inputs = video_processor.video_inputs(videos)
            if (num_placeholders := text.count(video_processor.video_token)) != len(videos):
                raise ValueError(
                    f"the text has {count_noun(num_placeholders, 'placeholder')} for {count_noun(len(videos), 'video')}"
                )
        return processor(text=[text], images=rows or None, return_tensors="pt", add_special_tokens=False, **inputs)
    except ValueError as cause:
        raise ModelError(
            f"the processor rejects the prompt or its images: {cause}. Pass each image with --image, not by its "
            "placeholder in the text. Images must be at least one patch wide and high."
        ) from cause


def ignored_settings(model: PreTrainedModel) -> str | None:
    """Return a sentence that lists the generation settings of a model's folder that answers and evaluations ignore, or
    None if there are none."""
    settings = getattr(model, "generation_config", None)  # only models that generate have one
    stated = {} if settings is None else settings.to_diff_dict()
    ignored = {
        name: value
        for name, value in stated.items()
        if name not in _KEPT and not name.startswith("_") and value is not None and value is not False
        if name not in _NEUTRAL_AT_1 or value != 1
    }
    if not ignored:
        return None
    shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in ignored.items())
    return f"the model's generation settings {shown} are ignored: answers are greedy unless sampling is enabled"


def _check_scores(ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of the next token; raise ModelError for NaN and infinity. -inf, which excludes tokens, is
    allowed."""
    if bool((scores.isnan() | (scores == torch.inf)).any()):
        raise ModelError(
            f"the score of token {ids.shape[1]} is NaN or infinite: the model's logits are not finite, so its answer "
            "would be arbitrary. Use an earlier checkpoint (--step), or high precision (--recipe off)."
        )
    return scores
