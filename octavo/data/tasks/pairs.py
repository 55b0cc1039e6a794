"""Preferences: two answers to one prompt, the first of which is better (pairs), or one answer that is good or bad
(labelled).

Pairs have `chosen` and `rejected`, as in TRL, LLaMA-Factory and rows of messages:

    {"prompt": TEXT or turns, "chosen": ANSWER, "rejected": ANSWER}                        TRL, explicit prompt
    {"chosen": [turns], "rejected": [turns]}                                               TRL, implicit prompt
    {"conversations" or "messages": [turns], "chosen": ANSWER, "rejected": ANSWER}         LLaMA-Factory
    {"instruction", "input"?, "system"?, "chosen": TEXT, "rejected": TEXT}                 LLaMA-Factory (alpaca)

An ANSWER is a text, an assistant turn or a list of turns; turns have role/content or from/value. If `chosen` and
`rejected` are whole conversations, their common beginning is the prompt, and a `prompt`, which would repeat it, is
ignored.
`images` and `videos` are read as in `prompts.py`.

Labelled rows, for KTO, have `prompt`, `completion` and `label` (true: good), or a conversation and `label`; in the form
of LLaMA-Factory `instruction`, `input`, `output`, and `kto_tag` for `label`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.data.batching.collate import EMPTY_LENGTH, collate, make_micro_batches
from octavo.data.encoding.encode import Encoder
from octavo.data.encoding.processor_calls import Encoding
from octavo.data.encoding.sample import IGNORE, Sample, with_answer_tokens
from octavo.data.errors import BadSample, DataError, LongSample
from octavo.data.rows.conversations import (
    Conversation,
    ImageRef,
    Name,
    RowProblem,
    Turn,
    alpaca_messages,
    bad_sample_context,
    check_turns,
    make_conversation,
    quote_value,
)
from octavo.data.rows.foreign import check_row
from octavo.data.rows.image_refs import ImageFile
from octavo.data.rows.video_refs import VideoFile, VideoRef
from octavo.data.tasks.prompts import as_messages, read_prompt_turns

PROMPT_KEYS = ("prompt", "messages", "conversations", "conversation", "instruction")
EXPECTED = "expected 'prompt' or turns in 'messages' or 'conversations', with answers in 'chosen' and 'rejected'"
LABEL_WORDS = {"true": True, "false": False, "1": True, "0": False}
TurnsAndNames = tuple[Sequence[Turn], Sequence[Name]]  # turns of a conversation, and the names of its images


@dataclass(frozen=True)
class PairRow:
    """Two conversations with a common prompt. `context_answers`: the number of answers in that prompt."""

    chosen: Conversation
    rejected: Conversation
    context_answers: int = 0

    @property
    def images(self) -> tuple[ImageFile, ...]:
        return self.chosen.images

    @property
    def videos(self) -> tuple[VideoFile, ...]:
        return self.chosen.videos


@dataclass(frozen=True)
class Pair:
    """Both conversations, encoded; only the answers after the common prompt have labels."""

    chosen: Sample
    rejected: Sample

    @property
    def file(self) -> str:
        return self.chosen.file

    @property
    def row(self) -> int:
        return self.chosen.row

    @property
    def id(self) -> str | None:
        return self.chosen.id

    @property
    def nbytes(self) -> int:
        return self.chosen.nbytes + self.rejected.nbytes

    @property
    def notes(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys([*self.chosen.notes, *self.rejected.notes]))


@dataclass(frozen=True)
class LabelledRow:
    """A conversation whose last answer is good (`label`) or bad; the `context_answers` before it belong to the
    prompt."""

    conversation: Conversation
    context_answers: int
    label: bool

    @property
    def images(self) -> tuple[ImageFile, ...]:
        return self.conversation.images

    @property
    def videos(self) -> tuple[VideoFile, ...]:
        return self.conversation.videos


@dataclass(frozen=True)
class LabelledSample(Sample):
    """A `Sample` with labels only on its last answer; `label`: whether that answer is good."""

    label: bool = True


class _AnswerEncoder(Encoder):
    def __init__(self, processor: Any, seq_length: int, **options: Any) -> None:
        super().__init__(processor, seq_length, **options)
        if self.train_on_prompt:
            raise DataError("data.train_on_prompt is true, but preferences compare answers; remove it")


class PairEncoder(_AnswerEncoder):
    """Encodes pairs. A pair is left out if one of the two is, or if they are equal up to the cut."""

    def encoding(self, row: PairRow) -> Encoding[Pair]:  # type: ignore[override]
        """Generator that encodes a pair. Raises as `Encoder.encode` does."""
        chosen = yield from super().encoding(row.chosen, row.context_answers)
        rejected = yield from super().encoding(row.rejected, row.context_answers)
        if np.array_equal(chosen.input_ids, rejected.input_ids):
            reason = f"chosen and rejected are the same {len(chosen.input_ids)} tokens"
            if chosen.cut:
                raise LongSample(chosen.file, chosen.row, f"{reason}; {self.limit_text}", chosen.id)
            reason += ": the chat template or the tokenizer removes the difference of their texts"
            raise BadSample(chosen.file, chosen.row, reason, chosen.id)
        return Pair(chosen, rejected)


class LabelledEncoder(_AnswerEncoder):
    """Encodes labelled conversations."""

    def encoding(self, row: LabelledRow) -> Encoding[LabelledSample]:  # type: ignore[override]
        """Generator that encodes a labelled row. Raises as `Encoder.encode` does."""
        sample = yield from super().encoding(row.conversation, row.context_answers)
        return LabelledSample(**vars(sample), label=row.label)


class HeldOutEncoder(_AnswerEncoder):
    """Encodes preferences and conversations with their right answers: the chosen one of a pair; a bad labelled answer
    gets no labels."""

    def encoding(self, row: PairRow | LabelledRow | Conversation) -> Encoding[Sample]:  # type: ignore[override]
        """Generator that encodes a row. Raises as `Encoder.encode` does."""
        if isinstance(row, PairRow):
            return (yield from super().encoding(row.chosen, row.context_answers))
        if isinstance(row, Conversation):
            return (yield from super().encoding(row))
        sample = yield from super().encoding(row.conversation, row.context_answers)
        return sample if row.label else replace(sample, labels=np.full_like(sample.labels, IGNORE), answers=())


def row_preference_kind(raw: object) -> str | None:
    """`pairs` or `labelled`, by the keys of a row; None: neither."""
    keys = raw.keys() if isinstance(raw, dict) else ()
    if "chosen" in keys and "rejected" in keys:
        return "pairs"
    return "labelled" if isinstance(raw, dict) and isinstance(_read_label(raw), bool) else None


def _read_label(raw: dict[str, Any]) -> Any:
    """Return the label of a row: true or false, which a table of texts (CSV) writes as words or as 1 and 0."""
    label = raw.get("label", raw.get("kto_tag"))
    return LABEL_WORDS.get(label.strip().lower(), label) if isinstance(label, str) else label


def parse_pair(raw: object, format: str, *, file: str | Path, row: int, images: Path) -> PairRow:
    """One decoded row as a `PairRow`; its structure follows from its keys, `format` is unused. Raises `BadSample`."""
    with bad_sample_context(raw, file, row) as identity:
        if not isinstance(raw, dict) or "chosen" not in raw or "rejected" not in raw:
            raise RowProblem(f"has {_describe_keys(raw)}; {EXPECTED}")
        check_row(raw)
        conversations = {side: as_messages(raw[side], "assistant") for side in ("chosen", "rejected")}
        if not all(map(_is_conversation, conversations.values())):
            prompt = _read_prompt(raw)
            conversations = {side: prompt + answer for side, answer in conversations.items()}
        sides = {side: read_prompt_turns(raw, messages) for side, messages in conversations.items()}
        for turns, _ in sides.values():
            check_turns(turns)
        shared = _count_shared_answers(*sides.values())
        chosen, rejected = (_conversation(raw, side, str(file), row, identity, images) for side in sides.values())
        return PairRow(chosen, rejected, shared)


def parse_labelled(raw: object, format: str, *, file: str | Path, row: int, images: Path) -> LabelledRow:
    """One decoded row as a `LabelledRow`; `format` is unused. Raises `BadSample`."""
    with bad_sample_context(raw, file, row) as identity:
        label = _read_label(raw) if isinstance(raw, dict) else None
        if not isinstance(raw, dict) or not isinstance(label, bool):
            problem = f"the label {quote_value(label)}" if label is not None else _describe_keys(raw)
            raise RowProblem(f"has {problem}; expected 'label', true or false, with 'prompt' and 'completion' or turns")
        check_row(raw)
        answer = "output" if "instruction" in raw and "completion" not in raw else "completion"
        answer_turns = as_messages(raw[answer], "assistant") if answer in raw else []
        turns, names = read_prompt_turns(
            raw, answer_turns if _is_conversation(answer_turns) else _read_prompt(raw) + answer_turns
        )
        check_turns(turns)
        if turns[-1].role != "assistant":
            raise RowProblem(
                f"ends with a turn of the {turns[-1].role}; the answer that is labelled must be the last turn"
            )
        for kind, what in ((ImageRef, "an image"), (VideoRef, "a video")):
            if any(isinstance(part, kind) for part in turns[-1].parts):
                raise RowProblem(f"has {what} in the answer that is labelled, but answers are text; remove it")
        context = sum(turn.role == "assistant" for turn in turns) - 1
        return LabelledRow(_conversation(raw, (turns, names), str(file), row, identity, images), context, label)


def _conversation(
    raw: object, turns: TurnsAndNames, file: str, row: int, identity: str | None, images: Path
) -> Conversation:
    return make_conversation(raw, *turns, images, file=file, row=row, identity=identity, sounds=False)


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> dict[str, Any]:
    """Collate pairs to a batch of 2 B rows (`collate`): the chosen ones, then the rejected ones in the same order.
    Without pairs it is two rows without labels."""
    if pairs:
        return collate([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_id)
    empty = collate([], pad_id)
    return {key: value if key == "meta" else value.expand(2, EMPTY_LENGTH).clone() for key, value in empty.items()}


def labelled_batches(
    rows: Sequence[tuple[int, Any]], micro_batch: int, pad_id: int, *, longest: int, before: Any = None
) -> list[dict[str, Any]]:
    """Make the batches of a step of labelled rows (the `gather` of their `Loader`): batches of B conversations with
    `desirable` [B] bool, and under
    `crossed` a batch of the same size, with the same prompts and the answers to other prompts.

    KTO estimates its KL term from the crossed batch. The crossed answer comes from the previous row of the step that is
    not left out (for the first row, from the last one), for any number of ranks that share the step. `before` is the
    sample before this rank's first row, or None if no other rank has one; then it is this rank's last row. Tokens over
    `longest` are cut. If a step has only one row, its crossed answer has no labels.
    """
    samples = [sample for _, sample in rows if sample is not None]
    # The source of each crossed answer: this rank's rows shifted by one.
    answer_sources = [before or sample for sample in samples[-1:]] + samples[:-1]
    is_single = before is None and len(samples) == 1
    paired = [
        (n, sample and (sample, _cross_answer(sample, answer_sources.pop(0), longest, is_single))) for n, sample in rows
    ]
    return make_micro_batches(paired, micro_batch, pad_id, _collate_labelled)


def collate_labelled(samples: Sequence[LabelledSample], pad_id: int, *, longest: int) -> dict[str, Any]:
    """Collate rows as one batch of `labelled_batches`."""
    batches = labelled_batches([*enumerate(samples)], max(len(samples), 1), pad_id, longest=longest)
    return batches[0] if batches else _collate_labelled([], pad_id)


def _collate_labelled(pairs: Sequence[tuple[LabelledSample, Sample]], pad_id: int) -> dict[str, Any]:
    batch = collate([sample for sample, _ in pairs], pad_id)
    good = torch.tensor([sample.label for sample, _ in pairs], dtype=torch.bool)
    return batch | {"desirable": good, "crossed": collate([crossed for _, crossed in pairs], pad_id)}


def _cross_answer(sample: Sample, answer_source: Sample, max_length: int, single: bool) -> Sample:
    """Return the prompt of `sample` with the answer of `answer_source`, at most `max_length` tokens; `single`: without
    labels."""
    start, answer_start = _answer_start(sample), _answer_start(answer_source)
    answer = answer_source.input_ids[answer_start:]
    ids = np.concatenate([sample.input_ids[:start], answer])[:max_length]
    labels = np.concatenate([np.full_like(ids[:start], IGNORE), answer_source.labels[answer_start:]])[:max_length]
    if single:
        labels[:] = IGNORE
    kinds = None
    if sample.mm_token_type_ids is not None:
        kinds = np.concatenate([sample.mm_token_type_ids[:start], np.zeros_like(answer)])[:max_length]
    return replace(
        sample, input_ids=ids, labels=labels, mm_token_type_ids=kinds, answers=((start, len(ids)),), control=(),
        extra=with_answer_tokens(sample.extra, start, len(ids) - start),
    )  # fmt: skip


def _answer_start(sample: Sample) -> int:
    return int(np.flatnonzero(sample.labels != IGNORE)[0])


def _is_conversation(messages: Sequence[Any]) -> bool:
    """Return True if messages are a whole conversation, not only an answer."""
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") in ("user", "system")


def _read_prompt(raw: dict[str, Any]) -> list[Any]:
    keys = [key for key in PROMPT_KEYS if key in raw]
    if len(keys) != 1:
        problem = f"both {keys[0]!r} and {keys[1]!r}" if keys else f"answers and no prompt ({_describe_keys(raw)})"
        raise RowProblem(f"has {problem}; {EXPECTED}")
    if keys != ["instruction"]:
        return as_messages(raw[keys[0]], "user")
    return alpaca_messages(raw)


def _count_shared_answers(chosen: TurnsAndNames, rejected: TurnsAndNames) -> int:
    """Return the number of answers in the common beginning of two conversations. Raises `RowProblem` unless each
    continues with a different answer of the assistant."""
    first, second = chosen[0], rejected[0]
    shared = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    images = sum(isinstance(part, ImageRef) for turn in first[:shared] for part in turn.parts)
    if different_images := [
        pair for pair in zip(chosen[1][:images], rejected[1][:images], strict=True) if len({*pair}) == 2
    ]:
        raise RowProblem(
            f"has the image {quote_value(different_images[0][0])} in the prompt of chosen and "
            f"{quote_value(different_images[0][1])} in the prompt of rejected; both must answer the same prompt"
        )
    if len(first) == len(second) == shared:
        raise RowProblem("has the same answer as chosen and rejected, so there is nothing to prefer")
    following = [turns[shared].role if shared < len(turns) else "nothing" for turns in (first, second)]
    if shared == 0 or following != ["assistant"] * 2:
        raise RowProblem(
            f"has a chosen and a rejected that share {shared} turn(s) and continue with {' and '.join(following)}; "
            "both must answer the same prompt with an assistant turn"
        )
    return sum(turn.role == "assistant" for turn in first[:shared])


def _describe_keys(raw: object) -> str:
    return f"the keys {quote_value(sorted(map(str, raw)))}" if isinstance(raw, dict) else quote_value(raw)
