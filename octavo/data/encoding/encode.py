"""Encodes conversations as tokens, labels and pixels, with the model's processor and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from octavo.data.encoding import truncate, video
from octavo.data.encoding.loss_mask import (
    Answers,
    Message,
    Render,
    TemplateProblem,
    check_system,
    check_tools,
    messages,
    render_messages,
)
from octavo.data.encoding.processor_calls import (
    Encoding,
    Expansion,
    ProcessorCalls,
    ProcessorRequest,
    as_array,
    media_spans,
    processor_error,
    run_together,
)
from octavo.data.encoding.sample import IGNORE, IMAGE_MARKS, Sample, extra_inputs, image_token_ids, inputs_of_row
from octavo.data.encoding.thinking import Thinking
from octavo.data.errors import BadSample, DataError, LongSample, MediaProblem, Mismatch
from octavo.data.rows.audio_refs import MISSING_FILE_TEXT, AudioRef
from octavo.data.rows.audio_refs import PLACEHOLDER as SOUND
from octavo.data.rows.conversations import Conversation, ImageRef, Text, Turn
from octavo.data.rows.image_refs import ImageFile, size
from octavo.data.rows.video_refs import VIDEO, VideoRef

COUNTED_CHARS = 1 << 16  # up to this many characters a text that is too long is tokenized, to report its exact length
NOTHING_LEFT = "nothing to learn is left after the cut"
REASONING_FIX = (
    ", because the chat template omits the reasoning of %s; set data.split_turns: true, or end the row with those "
    "answers"
)
C = TypeVar("C", bound=Conversation)


class TokenizerInput(NamedTuple):
    """A row as text in which each image is one token and videos are expanded.

    special  the tokenizer adds special tokens
    ended    the end token follows
    """

    text: str
    images: tuple[ImageFile, ...]
    special: bool
    ended: bool


class Encoder:
    """Encodes conversations with a processor (`.tokenizer`, `.apply_chat_template`, `(text=, images=)`).

    A processor without `.image_processor` and `.sound_limits` is text-only. Loss is computed on assistant turns with
    their end-of-turn token, except empty thinking blocks (`mask_empty_think`) and, with `mask_reasoning`, all
    reasoning; with `train_on_prompt` on every token except image placeholders.

    A row longer than `seq_length` is dropped (`on_long="drop"`, raises `LongSample`), cut (`"cut"`: never inside an
    image or a video; one that does not fit is removed with its pixels) or rejected (`"error"`, raises `DataError`).
    Text far beyond the limit is never rendered (:func:`clip_conversation`). `reserve` tokens of `seq_length`
    are kept free for tokens that are generated after a row.

    `system` is prepended to conversations without a system turn. Images over `max_image_megapixels` are rejected before
    they are decoded; the processor limits the size that the model sees. `file_limits` are the limits of video files.
    """

    on_long_options, rows_kind = "drop or cut", "conversations"  # for messages: alternatives to error, what it encodes

    def __init__(
        self,
        processor: Any,
        seq_length: int,
        *,
        on_long: str = "drop",
        train_on_prompt: bool = False,
        system: str | None = None,
        max_image_megapixels: float = 100.0,
        reserve: int = 0,
        mask_empty_think: bool = True,
        mask_reasoning: bool = False,
        file_limits: video.FileLimits | None = None,
    ) -> None:
        if on_long not in ("drop", "cut", "error"):
            raise DataError(f"on_long is {on_long!r}; it must be drop, cut or error")
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.seq_length, self.reserve, self.on_long = seq_length - reserve, reserve, on_long
        self.limit_text = f"seq_length is {seq_length}" + (
            f", {reserve} of it are reserved for the answer" if reserve else ""
        )
        fewer = " or reserve fewer tokens (rl.max_new_tokens; octavo eval: --max-new-tokens)" if reserve else ""
        self.length_fix = f"raise train.seq_length{fewer}"
        if self.seq_length < 1:
            raise DataError(f"{self.limit_text}, so no token is left for a prompt; {self.length_fix}")
        self.train_on_prompt, self.system = train_on_prompt, system
        self.max_image_megapixels = max_image_megapixels
        self.calls = ProcessorCalls(processor, max_image_megapixels, file_limits)
        self.multimodal = self.calls.multimodal
        self._check_template()
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(f"{type(self.tokenizer).__name__} returns no character offsets, which the loss mask needs; "
                            "add a tokenizer.json to the model folder")  # fmt: skip
        self.image_ids = image_token_ids(processor) if self.multimodal else frozenset()
        self._is_image = np.zeros(max(self.image_ids, default=0) + 2, dtype=bool)  # the last entry: all larger ids
        self._is_image[list(self.image_ids)] = True
        vocabulary = self.tokenizer.get_vocab()
        self.max_token_chars = max(map(len, vocabulary))
        # Templates write these marks around the placeholder; the processors of some versions do not name them.
        pairs = (pair for pair in IMAGE_MARKS if self.multimodal and all(mark in vocabulary for mark in pair))
        self.image_marks: tuple[str, str] | None = next(pairs, None)
        self.opening_id = None if self.image_marks is None else vocabulary[self.image_marks[0]]
        added = self.tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        self.ends = tuple(sorted(control | {str(token) for token in added}))
        self.answers = Answers(self.ends)
        self.thinking = Thinking(self._render, self.multimodal, mask_empty_think, mask_reasoning)
        self.control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self.marks = self._placeholder_marks() if self.multimodal else frozenset()

    def _check_template(self) -> None:
        """Check that there is a chat template. Raises `DataError`."""
        if all(getattr(part, "chat_template", None) is None for part in (self.processor, self.tokenizer)):
            raise DataError("the model's processor has no chat template, so conversations cannot be formatted; "
                            "add chat_template.jinja to the model folder")  # fmt: skip

    @property
    def places(self) -> tuple[int, ...]:
        """The ids of tokens that a model reads as an image placeholder. No answer may contain them."""
        marks = self.tokenizer.convert_tokens_to_ids(sorted(self.marks))
        return tuple(sorted({*self.image_ids, *(mark for mark in marks if mark is not None)}))

    @property
    def pad_id(self) -> int:
        """The token that pads short rows. It is masked, so any token works."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in ids if token is not None), 0)

    def encode(self, row: Any) -> Any:
        """Encode one row; the result is what `encoding` returns. Raises `BadSample` or its subclass `LongSample`, or
        `DataError` for a row that is too long with on_long="error"."""
        [encoded] = self.encode_all([row])
        if isinstance(encoded, DataError):
            raise encoded
        return encoded

    def encode_all(self, rows: Sequence[Any]) -> list[Any]:
        """Encode several rows with one processor call. The result of a row that `encode` would reject is the error."""
        return run_together([self.encoding(row) for row in rows], self.calls)

    def encoding(self, conversation: Any, context: int | None = 0) -> Encoding[Any]:
        """Generator that encodes one conversation as a `Sample`. The first `context` answers (or
        `conversation.context_answers`, if that is more) belong to the prompt and have no labels. If `context` is None,
        the whole conversation is a prompt, and the generation prompt is appended. Raises the errors of `encode`."""
        try:
            sample = yield from self._encode(conversation, context)
        except (TemplateProblem, MediaProblem, Mismatch) as cause:
            raise BadSample(conversation.source, conversation.row, str(cause), conversation.id) from cause
        self._check_ids(sample)
        if len(sample.input_ids) <= self.seq_length:
            return sample
        return self._shorten(sample)

    def _encode(self, conversation: Conversation, context: int | None) -> Encoding[Sample]:
        conversation, control, turns, render, text, videos = self._render_row(conversation, context)
        files = (conversation.images, conversation.sounds, videos)
        # Without media, one call returns the tokens and their offsets. With media, the length of the text is checked
        # first, so that the images of a row that is left out are never opened.
        outputs = None if any(files) else (yield ProcessorRequest(text))
        reach = self._reachable_characters(conversation, text, outputs)
        before = max(context or 0, conversation.context_answers)
        wanted = [turn.learned for turn in conversation.turns if turn.role == "assistant"][before:]
        spans, lost = ([], 0) if context is None else self._learned_spans(text, turns, render, reach, wanted)
        if outputs is None:
            outputs = yield ProcessorRequest(text, *files)
        ids = as_array(outputs["input_ids"], np.int64)
        image_mask = self._image_mask(ids)
        if videos and outputs.get("text_replacement_offsets") is None:
            raise Mismatch(
                "this version of transformers does not return the positions of videos in a text; install a newer "
                "version"
            )
        shift = Expansion.of_outputs(outputs, text, self.calls.image_token, image_mask)
        for start, end in media_spans(outputs):
            image_mask[start:end] = True
        answers = [(0, 0)] * before + [shift.tokens(start, end) for start, end in spans]
        labels = np.full_like(ids, IGNORE)
        if self.train_on_prompt:
            labels[:] = ids
        for start, end in answers:
            labels[start:end] = ids[start:end]
        labels[image_mask] = IGNORE
        sample = self._sample(conversation, outputs, labels, tuple(answers), control, lost, videos)
        if context is not None and not (sample.labels != IGNORE).any() and len(ids) <= self.seq_length:
            raise Mismatch("has no token to learn in its answers" + (REASONING_FIX % lost if lost else ""))
        return sample

    def _learned_spans(
        self, text: str, turns: Sequence[Message], render: Render, reach: int | None, wanted: Sequence[bool]
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the character spans of the learned parts of answers in a rendered text, and the number of answers that
        cannot be learned (`Sample.lost`). `wanted` has a flag for each of the last answers: whether to learn it.
        Earlier answers are context."""
        self.thinking.check(text, turns)
        context = sum(turn["role"] == "assistant" for turn in turns) - len(wanted)
        spans = self.answers.spans(text, turns, render, reach, context)
        return self.thinking.learned_spans(text, spans, turns, wanted)

    def tokenizer_input(self, row: Any) -> TokenizerInput:
        """Return the text of a row that is tokenized, without opening an image. Raises the errors of `encode`, and
        errors of the template, an image or the processor."""
        conversation, *_, text, videos = self._render_row(row, 0)
        remaining_videos = iter(videos)
        if videos:
            place = re.escape(self.processor.video_token)
            text = re.sub(place, lambda _: self.processor.video_text(next(remaining_videos)), text)
        return TokenizerInput(
            text, conversation.images, self.multimodal and not self.calls.starts_with_bos(text), False
        )

    def _render_row(
        self, conversation: Conversation, context: int | None
    ) -> tuple[Conversation, tuple[str, ...], list[Message], Render, str, tuple[video.FrameSelection, ...]]:
        """Return the conversation, clipped to what may fit; the control tokens in its text; its messages; the function
        that renders messages; the rendered text; and its videos."""
        if conversation.images and not self.calls.takes_images:
            what = "takes no images" if self.multimodal else "is text-only"
            raise Mismatch(f"has an image, but the model {what}; use a vision-language model or other data")
        if any(isinstance(part, AudioRef) for turn in conversation.turns for part in turn.parts):
            if self.calls.sound_limits is None:
                raise Mismatch(
                    "has a sound, but the model takes no audio; use an audio model (qwen2_audio) or other data"
                )
            if not conversation.sounds:
                raise Mismatch("has a sound, which is not supported in this phase; use train.phase: sft")
        videos = self._inspect_videos(conversation)
        conversation = self._clip(self.thinking.normalize_reasoning(conversation), videos)
        control = self._control_tokens(conversation)
        turns = messages(conversation, parts=self.multimodal, system=self.system)
        render = partial(self._render, tools=conversation.tools) if conversation.tools else self._render
        text = render_messages(turns, render, context is None)
        if len(text) > max(self.seq_length * self.max_token_chars, COUNTED_CHARS) and self.on_long != "cut":
            # Any tokenization of the text is too long, and counting the tokens would take seconds or more.
            long = (
                f"is over {self.seq_length} tokens long ({len(text)} characters with its template), {self.limit_text}"
            )
            self._refuse_long(conversation, long)
        check_system(text, turns, render, context is None)
        if conversation.tools or any(turn.calls for turn in conversation.turns):
            check_tools(conversation, text, render_messages(turns, self._render, context is None))
        return conversation, control, turns, render, text, videos[: len(conversation.videos)]

    def _inspect_videos(self, conversation: Conversation) -> tuple[video.FrameSelection, ...]:
        """Select the frames of a row's videos. Raises `Mismatch` if the model takes no videos."""
        if not conversation.videos:
            return ()
        if self.calls.videos is None:
            raise Mismatch("has a video, and videos are not supported for this model; use Qwen3-VL, Qwen2.5-VL or "
                           "InternVL, or other data")  # fmt: skip
        selections: list[video.FrameSelection] = []
        for file in conversation.videos:
            selection = video.select_frames(file, self.calls.videos, self.calls.file_limits)
            if selection.tokens > self.seq_length:
                frames = f"{len(selection.indices)} frames of {selection.size[1]} x {selection.size[0]} pixels"
                where = f"has a video of {selection.tokens} tokens ({frames}), {self.limit_text}"
                self._refuse_long(conversation, f"{where}; lower data.video.fps, max_frames or max_pixels")
            selections.append(selection)
            if sum(selection.tokens for selection in selections) > self.seq_length and self.on_long == "cut":
                break  # later videos are cut off in any case
        return tuple(selections)

    def _sample(
        self, row: Conversation, outputs: dict[str, Any], labels: np.ndarray, answers: tuple[tuple[int, int], ...],
        control: tuple[str, ...], lost: int = 0, videos: Sequence[video.FrameSelection] = (),
    ) -> Sample:  # fmt: skip
        """Make the sample of a row from the outputs of the processor."""
        ids = as_array(outputs["input_ids"], np.int64)
        labels[:1] = IGNORE  # nothing predicts the first token
        frames = (
            sum(len(selection.indices) for selection in videos)
            if getattr(self.processor, "frames_are_images", False)
            else 0
        )
        kinds, pixels, grid = (outputs.get(k) for k in ("mm_token_type_ids", "pixel_values", "image_grid_thw"))
        return Sample(
            ids,
            labels,
            None if kinds is None else as_array(kinds, np.int64),
            None if pixels is None else as_array(pixels, np.float32),
            None if grid is None else as_array(grid, np.int64),
            images=len(row.images) + frames,
            answers=answers,
            length=len(ids),
            control=control,
            lost=lost,
            extra=inputs_of_row(outputs, extra_inputs(self.processor))
            if pixels is not None or row.sounds or videos
            else {},
            places=media_spans(outputs) if frames else media_spans(outputs, "image"),
            films=() if frames else media_spans(outputs, "video"),
            file=row.source,
            row=row.row,
            id=row.id,
            sounds=len(row.sounds),
            videos=len(videos),
        )

    def _render(self, turns: Sequence[Message], add_generation_prompt: bool, tools: Sequence[object] = ()) -> str:
        options = {"tools": list(tools)} if tools else {}  # some templates fail for an empty list of tools
        return self.processor.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )

    def _placeholder_marks(self) -> frozenset[str]:
        """Return the texts that a model reads as a media placeholder. No other text may contain them."""
        ids = [*self.image_ids, *([] if self.opening_id is None else [self.opening_id])]
        named = (getattr(self.processor, name, None) for name in ("image_token", "video_token", "audio_token"))
        return frozenset(self.tokenizer.convert_ids_to_tokens(ids)) | frozenset(filter(None, named))

    def _control_tokens(self, conversation: Conversation) -> tuple[str, ...]:
        """Return the control tokens in the texts of a conversation, which the tokenizer would produce from them. Raises
        `Mismatch` for a text that contains a media placeholder."""
        texts = [part.text for turn in conversation.turns for part in turn.parts if isinstance(part, Text)]
        texts += [turn.reasoning for turn in conversation.turns if turn.reasoning]
        calls = [turn.calls for turn in conversation.turns if turn.calls]
        texts += [json.dumps(entry, ensure_ascii=False) for entry in (*calls, conversation.tools) if entry]
        for mark in sorted(self.marks):
            if any(mark in text for text in texts):
                raise Mismatch(f"its text contains the model's placeholder {mark!r}; remove it")
        if self.calls.sound_limits is not None and any(SOUND in text for text in texts):
            raise Mismatch(MISSING_FILE_TEXT)
        if self.calls.takes_images and any(VIDEO.placeholder in text for text in texts):
            raise Mismatch(VIDEO.missing_file_text)
        return tuple(dict.fromkeys(token for text in texts for token in self.control.findall(text)))

    def _clip(self, conversation: C, videos: Sequence[video.FrameSelection] = ()) -> C:
        """Reject a conversation that cannot fit, or with on_long="cut" remove the part far beyond the cut."""
        conversation = clip_reasoning(conversation, self.seq_length * self.max_token_chars)
        video_tokens = [selection.tokens for selection in videos]
        clipped = clip_conversation(
            conversation, self.seq_length, self.max_token_chars, self.image_tokens, video_tokens
        )
        if clipped is conversation:
            return conversation
        characters = sum(len(turn.text) for turn in conversation.turns)
        holds = f"{len(conversation.turns)} turns, {characters} characters, {len(conversation.images)} images"
        where = f"is over {self.seq_length} tokens long ({holds}), {self.limit_text}"
        if self.on_long != "cut" or conversation.sounds:
            self._refuse_long(conversation, where)
        if len(clipped.images) == 1 < len(conversation.images) and "row" in extra_inputs(self.processor).values():
            why = truncate.why_not_one_image(len(conversation.images))
            raise LongSample(conversation.source, conversation.row, f"{where}; {why}", conversation.id)
        if not self.train_on_prompt and all(turn.role != "assistant" for turn in clipped.turns):
            raise LongSample(conversation.source, conversation.row, f"{where}; {NOTHING_LEFT}", conversation.id)
        return clipped

    def image_tokens(self, path: ImageFile, alone: bool = True) -> int:
        """Return the number of tokens of an image by the size in its header. `alone` is True for the only image of a
        row, which some families split into tiles."""
        width, height = size(path, self.max_image_megapixels)
        count = getattr(self.processor, "image_tokens", None)
        try:
            if count is not None:
                return int(count((height, width), alone))
            return int(self.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0])
        except Exception as cause:
            raise processor_error(cause) from cause

    def _reachable_characters(
        self, conversation: Conversation, text: str, outputs: dict[str, Any] | None
    ) -> int | None:
        """Return the number of characters of a rendered text that are within seq_length, or None if all are.

        Images are counted as one token each, before they are opened. Raises the errors of `_refuse_long`.
        """
        if outputs is None and len(text) <= self.seq_length:
            return None  # short; with images its length is checked after the processor's call
        offsets = outputs["offset_mapping"] if outputs else self.calls.tokens([text])["offset_mapping"][0]
        if len(offsets) <= self.seq_length:
            return None
        if self.on_long != "cut" or conversation.sounds:
            images = " without its images and sounds" if outputs is None else ""
            self._refuse_long(conversation, self._length_text(len(offsets), images))
        return max(end for _, end in offsets[: self.seq_length])

    def _length_text(self, tokens: int, but: str = "") -> str:
        return f"is {tokens} tokens long{but}, {self.limit_text}"

    def _refuse_long(self, row: Conversation | Sample, where: str) -> NoReturn:
        file = row.file if isinstance(row, Sample) else row.source
        if row.sounds and self.on_long == "cut":
            where += "; a row with sound is not cut"
        if self.on_long == "error":
            raise DataError(f"{file}, row {row.row}: {where}; {self.length_fix}, lower data.max_pixels, "
                            f"or set data.on_long to {self.on_long_options}")  # fmt: skip
        raise LongSample(file, row.row, where, row.id)

    def _check_ids(self, sample: Sample) -> None:
        """Check that every token except media placeholders has a row in the model's embedding. Raises `BadSample`."""
        rows, ids = getattr(self.processor, "embedding_rows", None), sample.input_ids
        if rows is None or not len(ids) or ids.max() < rows:
            return
        unknown_ids = ids[(ids >= rows) & ~self._image_mask(ids)]
        if len(unknown_ids):
            text = self.tokenizer.convert_ids_to_tokens(int(unknown_ids[0]))
            raise BadSample(
                sample.file, sample.row,
                f"has the token {unknown_ids[0]} ({text!r:.80}), but the model's embedding has {rows} rows; use the "
                "tokenizer of the model", sample.id,
            )  # fmt: skip

    def _shorten(self, sample: Sample) -> Sample:
        where = self._length_text(len(sample.input_ids))
        if self.on_long != "cut" or sample.sounds:
            self._refuse_long(sample, where)
        images = truncate.media_runs(
            sample, self._image_mask(sample.input_ids), getattr(self.processor, "image_token_id", None),
            getattr(self.processor, "start_image_token_id", None),
        )  # fmt: skip
        try:
            short = truncate.cut(sample, self.seq_length, images, self.opening_id)
        except Mismatch as cause:
            raise LongSample(sample.file, sample.row, f"{where}; {cause}", sample.id) from cause
        if not (short.labels != IGNORE).any():
            why = f"{truncate.cut_position(images, self.seq_length)}{NOTHING_LEFT}"
            raise LongSample(sample.file, sample.row, f"{where}; {why}", sample.id)
        return short

    def _image_mask(self, ids: np.ndarray) -> np.ndarray:
        """Return a mask [T] bool of image tokens. The lookup table is ten times faster than np.isin."""
        return self._is_image[np.minimum(ids, len(self._is_image) - 1)]


# Rows that cannot fit are detected before they are rendered: rendering and tokenizing a row of 20 MB takes a minute and
# gigabytes of memory. A turn takes at least one token, an image as many as its size implies, and a token covers at most
# as many characters as the longest token of the vocabulary: these bounds find most rows that are too long.


def clip_conversation(
    conversation: C, tokens: int, max_token_chars: int, image_tokens: Callable[[ImageFile, bool], int],
    video_tokens: Sequence[int] = (),
) -> C:  # fmt: skip
    """Return the conversation unchanged if it may fit into `tokens`, else its beginning, which is still too long.

    `max_token_chars` is the number of characters of the longest token. `image_tokens(path, False)` is called for rows
    with several images, in order, until there is no space left; a single image is limited by the processor.
    `video_tokens` are the tokens of each video.
    """
    chars_left, turns, num_images, num_videos = tokens * max_token_chars, [], 0, 0
    has_several_images = len(conversation.images) > 1
    for turn in conversation.turns[: tokens + 1]:
        parts = []
        for part in turn.parts:
            if isinstance(part, Text):
                part = Text(part.text[: chars_left + 1])
                chars_left -= len(part.text)
            elif isinstance(part, VideoRef):
                chars_left -= max_token_chars * (video_tokens[num_videos] if num_videos < len(video_tokens) else 1)
                num_videos += 1
            elif isinstance(part, ImageRef):
                length = image_tokens(conversation.images[num_images], False) if has_several_images else 1
                chars_left -= max_token_chars * length
                num_images += 1
            else:  # a sound; rows with sounds are never cut
                chars_left -= max_token_chars
            parts.append(part)
            if chars_left < 0:
                break
        turns.append(replace(turn, parts=tuple(parts)))
        if chars_left < 0:
            break
    if chars_left >= 0 and len(turns) <= tokens:
        return conversation
    images, videos = conversation.images[:num_images], conversation.videos[:num_videos]
    return replace(conversation, turns=tuple(turns), images=images, videos=videos)


def clip_reasoning(conversation: C, max_chars: int) -> C:
    """Return the conversation with at most `max_chars` + 1 characters of reasoning in each turn: more cannot fit in any
    case. The sum over turns is no bound, because templates leave out the reasoning of earlier turns."""
    if all(len(turn.reasoning or "") <= max_chars for turn in conversation.turns):
        return conversation

    def clip(turn: Turn) -> Turn:
        return turn if turn.reasoning is None else replace(turn, reasoning=turn.reasoning[: max_chars + 1])

    return replace(conversation, turns=tuple(map(clip, conversation.turns)))
