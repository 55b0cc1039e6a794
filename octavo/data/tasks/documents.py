"""Documents: rows of plain text, with or without images, whose whole text is learned (`train.phase: pretrain`).

    {"text": "Once upon a time ..."}
    {"image": "cat.jpg", "text": "A cat on a mat."}                                        a caption
    {"text": "See <image> and <image>.", "images": ["a.png", "b.png"]}                     images in their places
    {"texts": ["A cat: ", null, " and a dog: ", null], "images": [null, "a.png", null, "b.png"]}

A single image without a placeholder in the text comes before the text. `texts` and `images` have the same length, and
one of the two is null at each place; texts are concatenated unchanged, so they contain the spaces and line breaks
between them. Without the key `image` or `images`, "<image>" is ordinary text. A document has no roles and needs no chat
template: the tokenizer's special tokens (such as a BOS) are added around it, and the end token after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.data.encoding.encode import Encoder, TokenizerInput
from octavo.data.encoding.processor_calls import Encoding, Outputs, ProcessorRequest, media_spans
from octavo.data.encoding.sample import IGNORE, Sample, control_notes, extra_inputs
from octavo.data.errors import BadSample, DataError, Mismatch
from octavo.data.formats.media_kinds import IMAGE
from octavo.data.rows.audio_refs import SOUND
from octavo.data.rows.conversations import (
    PLACEHOLDER,
    Conversation,
    ImageRef,
    Name,
    RowProblem,
    Text,
    Turn,
    bad_sample_context,
    check_image_count,
    find_images,
    has_lone_surrogate,
    image_names,
    quote_value,
    require_object,
    split_at_images,
)
from octavo.data.rows.image_refs import InlineImage
from octavo.data.rows.media import is_null_file, parse_file
from octavo.data.rows.video_refs import VIDEO
from octavo.data.tasks.prompts import parse_answered

EXPECTED = "a row of plain text has 'text', or 'texts' and 'images' as lists of one length"


@dataclass(frozen=True)
class Document(Conversation):
    """A document: one turn that is learned whole, with its images in their places."""

    @property
    def text(self) -> str:
        """All its text, without its images."""
        return self.turns[0].text


def is_document(raw: object) -> bool:
    """Return True if a row has a key of plain text."""
    return isinstance(raw, dict) and ("text" in raw or "texts" in raw)


def parse_document(raw: Any, format: str, *, file: str | Path, row: int, images: Path) -> Document | Conversation:
    """One decoded row: a `Document` for format `text`, else a `Conversation`. Raises `BadSample`."""
    if format != "text":
        return parse_answered(raw, format, file=file, row=row, images=images)
    with bad_sample_context(raw, file, row) as identity:
        if not is_document(require_object(raw)) or ("text" in raw and "texts" in raw):
            raise RowProblem(f"has the keys {quote_value(sorted(map(str, raw)))}; {EXPECTED}")
        parts, names = _read_interleaved(raw) if "texts" in raw else _read_single_text(raw)
        # Refused rather than ignored: a document would train without the medium that its text is about.
        if medium := next((kind for kind in (SOUND, VIDEO) if kind.listed_files(raw)), None):
            raise RowProblem(
                f"is a text with a {medium.noun}, which plain text does not support; write it as turns, for sft"
            )
        turn = Turn("assistant", tuple(parts))
        if not turn.text.strip():
            raise RowProblem(
                "has a text without characters, so there is nothing to learn; remove it, or set "
                "data.on_bad_sample: skip"
            )
        if has_lone_surrogate(turn.text):
            raise RowProblem("its text contains a lone surrogate (half of a UTF-16 pair); fix it")
        return Document((turn,), find_images(names, images), str(file), row, identity)


def _read_single_text(raw: dict[str, Any]) -> tuple[Sequence[Text | ImageRef], list[Name]]:
    text = raw["text"]
    if not isinstance(text, str):
        raise RowProblem(f"'text' is {quote_value(text)}; expected a text")
    names = image_names(raw, "sharegpt")
    if not any(key in raw for key in IMAGE.keys):
        return [Text(text)], names
    places = text.count(PLACEHOLDER)
    if len(names) == 1 and not places:
        return [ImageRef(0), Text(text)], names
    check_image_count(places, len(names))
    return split_at_images(text, iter(range(len(names)))), names


def _read_interleaved(raw: dict[str, Any]) -> tuple[Sequence[Text | ImageRef], list[Name]]:
    texts, images = raw["texts"], raw.get("images")
    if not isinstance(texts, list) or not isinstance(images, list) or len(texts) != len(images):
        sizes = ", ".join(
            f"'{key}' {f'has {len(value)} places' if isinstance(value, list) else f'is {quote_value(value)}'}"
            for key, value in (("texts", texts), ("images", images))
        )
        raise RowProblem(f"{sizes}; they must be lists of one length")
    parts: list[Text | ImageRef] = []
    names: list[Name] = []
    for place, (text, image) in enumerate(zip(texts, images, strict=True), 1):
        name = None if is_null_file(image) else parse_file(image, InlineImage)
        if (
            (text is None) == is_null_file(image)
            or (text is None) == (name is None)
            or not isinstance(text, str | None)
        ):
            raise RowProblem(
                f"place {place} has the text {quote_value(text)} and the image {quote_value(image)}; expected one of "
                "the two, as text or file name, and null for the other"
            )
        if name is not None:
            parts.append(ImageRef(len(names)))
            names.append(name)
        elif text is not None:
            parts.append(Text(text))
    return parts, names


class DocumentEncoder(Encoder):
    """Encodes documents, and conversations mixed with them. Loss is computed on all text of a document and its end
    token, but not on images and the marks around them. `on_long` applies to documents that are too long."""

    def __init__(self, processor: Any, seq_length: int, **options: Any) -> None:
        super().__init__(processor, seq_length, **options)
        self.end_id = self.tokenizer.eos_token_id
        if self.end_id is None:
            raise DataError(
                "the tokenizer has no end token (eos_token), which ends every document; name one in "
                "tokenizer_config.json"
            )
        self.image_placeholder = processor.image_token if self.calls.takes_images else ""
        self.unlearned_ids = set(self.image_ids)
        if self.image_marks is not None:
            self.image_placeholder = self.image_placeholder.join(self.image_marks)
            self.unlearned_ids |= set(self.tokenizer.convert_tokens_to_ids(list(self.image_marks)))

    def _check_template(self) -> None:
        """Documents need no template."""

    def encoding(self, row: Conversation | Sample, context: int | None = 0) -> Encoding[Sample]:
        """Generator that encodes a row as a `Sample`; rows of joined documents are samples already. Raises as
        `Encoder.encode` does."""
        return row if isinstance(row, Sample) else (yield from super().encoding(row, context))

    def collect_notes(self, document: Document) -> list[tuple[str, str]]:
        """Return the (action, reason) notes about a document that is joined with others. Raises `BadSample` if it
        cannot be joined: for an image, or text that spells a media placeholder."""
        try:
            if document.images:
                raise Mismatch(
                    "has an image, but the first rows of this data set have none, so its documents are joined; set "
                    "data.join: false"
                )
            return control_notes(self._control_tokens(document))
        except Mismatch as cause:
            raise BadSample(document.source, document.row, str(cause), document.id) from cause

    def _encode(self, row: Conversation, context: int | None) -> Encoding[Sample]:
        if not isinstance(row, Document):
            super()._check_template()
            return (yield from super()._encode(row, context))
        if row.images and not self.calls.takes_images:
            raise Mismatch("has an image, but the model is text-only; use a vision-language model or other data")
        document = self._clip(row)
        control = self._control_tokens(document)
        if not document.images:
            outputs: Outputs = {"input_ids": self.tokenize([document.turns[0].text])[0]}
        else:
            text = self._with_placeholders(document)
            self._reachable_characters(document, text, None)
            outputs = yield ProcessorRequest(text, document.images)
            outputs |= self._with_end_token(outputs)
        labels = np.array(outputs["input_ids"], dtype=np.int64)
        labels[np.isin(labels, list(self.unlearned_ids))] = IGNORE
        for start, end in media_spans(outputs):
            labels[start:end] = IGNORE
        return self._sample(document, outputs, labels, (), control)

    def tokenizer_input(self, row: Conversation) -> TokenizerInput:
        if not isinstance(row, Document):
            super()._check_template()
            return super().tokenizer_input(row)
        if row.images and not self.calls.takes_images:
            raise Mismatch("has an image, but the model is text-only; use a vision-language model or other data")
        document = self._clip(row)
        text = self._with_placeholders(document)
        return TokenizerInput(text, document.images, not (document.images and self.calls.starts_with_bos(text)), True)

    def _with_placeholders(self, document: Document) -> str:
        """Return the text of a document with a placeholder for each image."""
        parts = document.turns[0].parts
        return "".join(part.text if isinstance(part, Text) else self.image_placeholder for part in parts)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts; each is followed by the end token."""
        outputs = self.tokenizer(list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False)
        return [ids if ids and ids[-1] == self.end_id else [*ids, self.end_id] for ids in outputs["input_ids"]]

    def _with_end_token(self, outputs: Outputs) -> Outputs:
        """Return the per-token outputs of a processor, extended by the end token; {} if it is there already."""
        if outputs["input_ids"][-1] == self.end_id:
            return {}
        kinds = [name for name, per in extra_inputs(self.processor).items() if per == "token"]
        ends = {"input_ids": self.end_id, "mm_token_type_ids": 0, **dict.fromkeys(kinds, 0)}
        return {key: [*outputs[key], end] for key, end in ends.items() if outputs.get(key) is not None}
