"""Preferences: two answers to one prompt of which the first is better (pairs), or one that is good or bad (labelled).

Pairs are `chosen` and `rejected`, as TRL, LLaMA-Factory and rows of messages write them:

    {"prompt": TEXT or turns, "chosen": ANSWER, "rejected": ANSWER}                        TRL, explicit prompt
    {"chosen": [turns], "rejected": [turns]}                                               TRL, implicit prompt
    {"conversations" or "messages": [turns], "chosen": ANSWER, "rejected": ANSWER}         LLaMA-Factory
    {"instruction", "input"?, "system"?, "chosen": TEXT, "rejected": TEXT}                 LLaMA-Factory (alpaca)

An ANSWER is a text, an assistant turn or a list of turns; turns have role/content or from/value. Where `chosen` and
`rejected` are whole conversations, what they share at the beginning is the prompt, and a `prompt` beside them repeats
it. `images` and `videos` as in `prompts.py`.

Labelled rows, for KTO, have `prompt`, `completion` and `label` (true: good), or a conversation and `label`; as
LLaMA-Factory writes them `instruction`, `input`, `output`, and `kto_tag` for `label`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.data.batching.collate import EMPTY_LENGTH, collate, micro_batches
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
    conversation_of,
    shown,
)
from octavo.data.rows.foreign import check_row
from octavo.data.rows.image_refs import ImageFile
from octavo.data.rows.video_refs import VideoFile, VideoRef
from octavo.data.tasks.prompts import as_messages, read_prompt_turns

PROMPT_KEYS = ("prompt", "messages", "conversations", "conversation", "instruction")
EXPECTED = "expected 'prompt' or turns in 'messages' or 'conversations', with answers in 'chosen' and 'rejected'"
WRITTEN = {"true": True, "false": False, "1": True, "0": False}
TurnsAndNames = tuple[Sequence[Turn], Sequence[Name]]  # what a conversation says, and the names of its images


@dataclass(frozen=True)
class PairRow:
    """Two conversations with one beginning. `given`: how many of their answers belong to it."""

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
    """Both conversations encoded; labels are on the answers behind the shared prompt alone."""

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
    """A conversation whose last answer is good (`label`) or bad; the `given` ones before it belong to the prompt."""

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
    """A `Sample` with labels on its last answer alone, and whether that is a good one."""

    label: bool = True


class _AnswersOnly(Encoder):
    def __init__(self, processor: Any, seq_length: int, **options: Any) -> None:
        super().__init__(processor, seq_length, **options)
        if self.train_on_prompt:
            raise DataError("data.train_on_prompt is true, and preferences are about answers; leave it out")


class PairEncoder(_AnswersOnly):
    """Encodes pairs. A pair is left out where one of its two is; so is one whose difference lies behind the cut."""

    def encoding(self, row: PairRow) -> Encoding[Pair]:  # type: ignore[override]
        """Raises as `Encoder.encode` does."""
        chosen = yield from super().encoding(row.chosen, row.context_answers)
        rejected = yield from super().encoding(row.rejected, row.context_answers)
        if np.array_equal(chosen.input_ids, rejected.input_ids):
            why = f"chosen and rejected are the same {len(chosen.input_ids)} tokens"
            if chosen.cut:
                raise LongSample(chosen.file, chosen.row, f"{why}; {self.limit}", chosen.id)
            why += ": where their texts differ, the chat template or the tokenizer takes it away"
            raise BadSample(chosen.file, chosen.row, why, chosen.id)
        return Pair(chosen, rejected)


class LabelledEncoder(_AnswersOnly):
    """Encodes labelled conversations."""

    def encoding(self, row: LabelledRow) -> Encoding[LabelledSample]:  # type: ignore[override]
        """Raises as `Encoder.encode` does."""
        sample = yield from super().encoding(row.conversation, row.context_answers)
        return LabelledSample(**vars(sample), label=row.label)


class HeldOutEncoder(_AnswersOnly):
    """Encodes rows of preferences, and conversations, by the answers that they hold to be right: of a pair the chosen
    one; a labelled answer that is bad has no labels."""

    def encoding(self, row: PairRow | LabelledRow | Conversation) -> Encoding[Sample]:  # type: ignore[override]
        """Raises as `Encoder.encode` does."""
        if isinstance(row, PairRow):
            return (yield from super().encoding(row.chosen, row.context_answers))
        if isinstance(row, Conversation):
            return (yield from super().encoding(row))
        sample = yield from super().encoding(row.conversation, row.context_answers)
        return sample if row.label else replace(sample, labels=np.full_like(sample.labels, IGNORE), answers=())


def preference_kind_of(raw: Any) -> str | None:
    """`pairs` or `labelled`, as the keys of a row say; None: neither."""
    keys = raw.keys() if isinstance(raw, dict) else ()
    if "chosen" in keys and "rejected" in keys:
        return "pairs"
    return "labelled" if isinstance(raw, dict) and isinstance(_label(raw), bool) else None


def _label(raw: dict[str, Any]) -> Any:
    """What a row says of its answer: true or false, which a table of texts (CSV) writes as words or as 1 and 0."""
    label = raw.get("label", raw.get("kto_tag"))
    return WRITTEN.get(label.strip().lower(), label) if isinstance(label, str) else label


def parse_pair(raw: Any, format: str, *, file: str | Path, row: int, images: Path) -> PairRow:
    """One decoded row as a `PairRow`; what it is follows from its keys, `format` is not asked. Raises `BadSample`."""
    with bad_sample_context(raw, file, row) as identity:
        if not isinstance(raw, dict) or "chosen" not in raw or "rejected" not in raw:
            raise RowProblem(f"has {_keys(raw)}; {EXPECTED}")
        check_row(raw)
        whole = {side: as_messages(raw[side], "assistant") for side in ("chosen", "rejected")}
        if not all(map(_is_conversation, whole.values())):
            prompt = _prompt(raw)
            whole = {side: prompt + answer for side, answer in whole.items()}
        made = {side: read_prompt_turns(raw, messages) for side, messages in whole.items()}
        for turns, _ in made.values():
            check_turns(turns)
        given = _shared_answers(*made.values())
        chosen, rejected = (_conversation(raw, told, str(file), row, identity, images) for told in made.values())
        return PairRow(chosen, rejected, given)


def parse_labelled(raw: Any, format: str, *, file: str | Path, row: int, images: Path) -> LabelledRow:
    """One decoded row as a `LabelledRow`; `format` is not asked. Raises `BadSample`."""
    with bad_sample_context(raw, file, row) as identity:
        label = _label(raw) if isinstance(raw, dict) else None
        if not isinstance(label, bool):
            found = f"the label {shown(label)}" if label is not None else _keys(raw)
            raise RowProblem(f"has {found}; expected 'label', true or false, beside 'prompt' and 'completion' or turns")
        check_row(raw)
        answer = "output" if "instruction" in raw and "completion" not in raw else "completion"
        said = as_messages(raw[answer], "assistant") if answer in raw else []
        turns, names = read_prompt_turns(raw, said if _is_conversation(said) else _prompt(raw) + said)
        check_turns(turns)
        if turns[-1].role != "assistant":
            raise RowProblem(f"ends with a turn of the {turns[-1].role}; the answer that is labelled must end it")
        for kind, what in ((ImageRef, "an image"), (VideoRef, "a video")):
            if any(isinstance(part, kind) for part in turns[-1].parts):
                raise RowProblem(f"has {what} in the answer that is labelled, and answers are text; remove it")
        given = sum(turn.role == "assistant" for turn in turns) - 1
        return LabelledRow(_conversation(raw, (turns, names), str(file), row, identity, images), given, label)


def _conversation(
    raw: Any, told: TurnsAndNames, file: str, row: int, identity: str | None, images: Path
) -> Conversation:
    return conversation_of(raw, *told, images, file=file, row=row, identity=identity, sounds=False)


def collate_pairs(pairs: Sequence[Pair], pad_id: int) -> dict[str, Any]:
    """A batch of 2 B rows (`collate`): the chosen ones, then the rejected ones in the same order. No pairs give two
    rows that teach nothing."""
    if pairs:
        return collate([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_id)
    empty = collate([], pad_id)
    return {key: value if key == "meta" else value.expand(2, EMPTY_LENGTH).clone() for key, value in empty.items()}


def labelled_batches(
    rows: Sequence[tuple[int, Any]], micro_batch: int, pad_id: int, *, longest: int, before: Any = None
) -> list[dict[str, Any]]:
    """What a step of labelled rows is to a `Loader`: batches of B conversations with `desirable` [B] bool, and under
    `crossed` a batch of as many with the same prompts and answers to other ones.

    KTO estimates its KL term by the crossed ones. The answer is that of the row before it in the step, whose last row
    comes before its first, of those that are not left out: however many ranks share it. Of this rank's first one that
    is `before` (None: no other rank has one, and it is this rank's last). Tokens over `longest` are cut. A row that is
    alone in the step has nothing crossed to it: an answer without labels.
    """
    mine = [sample for _, sample in rows if sample is not None]
    others = [before or sample for sample in mine[-1:]] + mine[:-1]
    alone = before is None and len(mine) == 1
    paired = [(n, sample and (sample, _crossed(sample, others.pop(0), longest, alone))) for n, sample in rows]
    return micro_batches(paired, micro_batch, pad_id, _collate_labelled)


def collate_labelled(samples: Sequence[LabelledSample], pad_id: int, *, longest: int) -> dict[str, Any]:
    """Some rows as one batch of `labelled_batches`."""
    batches = labelled_batches([*enumerate(samples)], max(len(samples), 1), pad_id, longest=longest)
    return batches[0] if batches else _collate_labelled([], pad_id)


def _collate_labelled(pairs: Sequence[tuple[LabelledSample, Sample]], pad_id: int) -> dict[str, Any]:
    batch = collate([sample for sample, _ in pairs], pad_id)
    good = torch.tensor([sample.label for sample, _ in pairs], dtype=torch.bool)
    return batch | {"desirable": good, "crossed": collate([crossed for _, crossed in pairs], pad_id)}


def _crossed(sample: Sample, other: Sample, most: int, alone: bool) -> Sample:
    """The prompt of one with the answer of another, at most `most` tokens."""
    start, theirs = _answer_start(sample), _answer_start(other)
    answer = other.input_ids[theirs:]
    ids = np.concatenate([sample.input_ids[:start], answer])[:most]
    labels = np.concatenate([np.full_like(ids[:start], IGNORE), other.labels[theirs:]])[:most]
    if alone:
        labels[:] = IGNORE
    kinds = None
    if sample.mm_token_type_ids is not None:
        kinds = np.concatenate([sample.mm_token_type_ids[:start], np.zeros_like(answer)])[:most]
    return replace(
        sample, input_ids=ids, labels=labels, mm_token_type_ids=kinds, answers=((start, len(ids)),), control=(),
        extra=with_answer_tokens(sample.extra, start, len(ids) - start),
    )  # fmt: skip


def _answer_start(sample: Sample) -> int:
    return int(np.flatnonzero(sample.labels != IGNORE)[0])


def _is_conversation(messages: Sequence[Any]) -> bool:
    """Whether turns are a conversation from its beginning, not an answer."""
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") in ("user", "system")


def _prompt(raw: dict[str, Any]) -> list[Any]:
    keys = [key for key in PROMPT_KEYS if key in raw]
    if len(keys) != 1:
        found = f"both {keys[0]!r} and {keys[1]!r}" if keys else f"answers and no prompt ({_keys(raw)})"
        raise RowProblem(f"has {found}; {EXPECTED}")
    if keys != ["instruction"]:
        return as_messages(raw[keys[0]], "user")
    return alpaca_messages(raw)


def _shared_answers(chosen: TurnsAndNames, rejected: TurnsAndNames) -> int:
    """How many answers lie in what two conversations share, each of which goes on with an answer of its own."""
    first, second = chosen[0], rejected[0]
    shared = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    images = sum(isinstance(part, ImageRef) for turn in first[:shared] for part in turn.parts)
    if differ := [pair for pair in zip(chosen[1][:images], rejected[1][:images], strict=True) if len({*pair}) == 2]:
        raise RowProblem(
            f"has the image {shown(differ[0][0])} in the prompt of chosen and {shown(differ[0][1])} in that of "
            "rejected; both must answer one prompt"
        )
    if len(first) == len(second) == shared:
        raise RowProblem("has the same answer as chosen and rejected, so there is nothing to prefer")
    behind = [turns[shared].role if shared < len(turns) else "nothing" for turns in (first, second)]
    if shared == 0 or behind != ["assistant"] * 2:
        raise RowProblem(
            f"has a chosen and a rejected that share {shared} turn(s) and go on with {behind[0]} and {behind[1]}; both "
            "must answer one prompt, with a turn of the assistant"
        )
    return sum(turn.role == "assistant" for turn in first[:shared])


def _keys(raw: Any) -> str:
    return f"the keys {shown(sorted(map(str, raw)))}" if isinstance(raw, dict) else shown(raw)
