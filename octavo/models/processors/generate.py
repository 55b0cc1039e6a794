"""Greedy answers from a conversation, whatever generation_config.json asks for.

transformers fills what a call leaves open from the model's own settings, so that a repetition penalty or beams of the
folder would change an answer that is called greedy. Of those settings the tokens that end or pad an answer are kept.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import BatchFeature, GenerationConfig, LogitsProcessorList, PreTrainedModel, ProcessorMixin

from octavo.models.errors import ModelError
from octavo.models.folder import chat
from octavo.models.processors.frames import why_not_stock_times
from octavo.models.processors.processors import TextProcessor
from octavo.models.processors.stop_tokens import stop_ids

#: settings of a model that answers keep, or that do not change them
_KEPT = {"eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "transformers_version"}
_NEUTRAL_AT_1 = {"num_beams", "temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty"}

if TYPE_CHECKING:
    from PIL.Image import Image  # GPU machines measure models without it


def generate(
    model: PreTrainedModel,
    processor: ProcessorMixin | TextProcessor,
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image] = (),
    max_new_tokens: int = 32,
    videos: Sequence[Any] = (),
) -> str:
    """The model's greedy answer to `messages`, decoded without special tokens.

    messages, images, videos  as :func:`question` takes them

    Greedy: :func:`ignored_settings` says what of the model's generation settings has no effect. They are left as they
    were, and so is the model's mode. Raises ModelError as :func:`question` does, when max_new_tokens is below one,
    where the installed transformers gives a video's tokens other times than training does, and where a score is NaN:
    the most likely token would be any.
    """
    if max_new_tokens < 1:
        raise ModelError(f"max_new_tokens is {max_new_tokens}: an answer needs at least one token.")
    batch = question(processor, messages, images, videos=videos).to(model.device)
    if (why := why_not_stock_times(model, batch)) is not None:
        raise ModelError(why)
    own = model.generation_config
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids(own, processor) or None,
        pad_token_id=processor.tokenizer.pad_token_id,
    )
    training = model.training
    model.eval()
    model.generation_config = settings  # else transformers fills in what `settings` leaves open
    try:
        with torch.no_grad():
            ids = model.generate(**batch, generation_config=settings, logits_processor=LogitsProcessorList([_numbers]))
    finally:
        model.generation_config = own
        model.train(training)
    return processor.tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def question(
    processor: ProcessorMixin | TextProcessor,
    messages: Sequence[dict[str, Any]],
    images: Sequence[Image] = (),
    answered: bool = False,
    videos: Sequence[Any] = (),
) -> BatchFeature:
    """A conversation that waits for an answer, as the model's tensors: `input_ids` [1, P] and what images add.
    `answered`: one that ends with its answer.

    messages  `[{"role", "content"}]`, content a string or parts (`{"type": "image"}`, `{"type": "text", "text": ...}`)
    images    one PIL image for each image part, in reading order
    videos    one `octavo.data` Shot for each video part (`{"type": "video"}`), likewise

    Raises ModelError when images and image parts, or videos and theirs, differ in number, when there is nothing to
    answer or no chat template to write it by, and for what the processor refuses.
    """
    if images and isinstance(processor, TextProcessor):
        raise ModelError(
            f"{len(images)} images were given, and the model is text-only. Leave them out, or take a vision-language "
            "model."
        )
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    asked = sum(part.get("type") == "image" for content in contents for part in content)
    if asked != len(images):
        raise ModelError(f"the messages hold {asked} image parts but {len(images)} images were given; they must agree.")
    shown = sum(part.get("type") == "video" for content in contents for part in content)
    if shown != len(videos):
        raise ModelError(f"the messages hold {shown} video parts but {len(videos)} videos were given; they must agree.")
    if videos and getattr(processor, "videos", None) is None:
        raise ModelError(f"{len(videos)} videos were given, and videos of this model are not taken here.")
    if not messages:
        raise ModelError("there are no messages: an answer needs at least one.")
    if not processor.chat_template:
        raise ModelError(
            "the model's folder has no chat template (chat_template.jinja), so a question cannot be written for it. "
            "Add the template of its chat version; a base model has none."
        )
    text = chat.render(processor, messages, add_generation_prompt=not answered)
    # The template has written the special tokens; a tokenizer that adds its own would write <s> twice.
    token = getattr(processor, "image_token", None)
    places = 0 if token is None else text.count(token)
    try:
        if places != len(images):  # transformers 5.17 does not tell
            raise ValueError(f"the text has {places} places for {len(images)} images")
        given = [list(images)] if images and getattr(processor, "images_by_row", False) else list(images)
        films = processor.video_inputs(videos) if videos else {}  # type: ignore[union-attr]
        if videos and (there := text.count(processor.video_token)) != len(videos):  # type: ignore[union-attr]
            raise ValueError(f"the text has {there} places for {len(videos)} videos")
        return processor(text=[text], images=given or None, return_tensors="pt", add_special_tokens=False, **films)
    except ValueError as cause:
        raise ModelError(
            f"the processor refuses the prompt or its images: {cause}. Give each image with --image, not by its "
            "placeholder in the text, and no image thinner than a patch."
        ) from cause


def ignored_settings(model: PreTrainedModel) -> str | None:
    """A sentence about the generation settings of a model's folder that answers, and the questions of an evaluation,
    do not follow; None where there are none."""
    own = getattr(model, "generation_config", None)  # of models that generate
    stated = {} if own is None else own.to_diff_dict()
    odd = {
        name: value
        for name, value in stated.items()
        if name not in _KEPT and not name.startswith("_") and value is not None and value is not False
        if name not in _NEUTRAL_AT_1 or value != 1
    }
    if not odd:
        return None
    shown = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in odd.items())
    return f"the model's generation settings {shown} are ignored: answers are greedy unless sampling is asked for"


def _numbers(ids: Tensor, scores: Tensor) -> Tensor:
    """The scores of the next token, if all are numbers; a model may exclude tokens by -inf."""
    if bool((scores.isnan() | (scores == torch.inf)).any()):
        raise ModelError(
            f"the model gives NaN or infinity as the score of token {ids.shape[1]}: it computes no numbers, and would "
            "answer with any token. Ask an earlier checkpoint (--step), or in high precision (--recipe off)."
        )
    return scores
