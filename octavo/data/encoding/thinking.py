"""Thinking: the reasoning that an assistant writes before its answer, and which part of it is learned.

    {"role": "assistant", "reasoning_content": "2 and 3 make 5.", "content": "5"}
    {"role": "assistant", "content": "<think>\\n2 and 3 make 5.\\n</think>\\n\\n5"}          the same
    {"role": "assistant", "content": "2 and 3 make 5.\\n</think>\\n\\n5"}                    as a model writes it if
                                                                                      its prompt ends with <think>
Templates differ: some take reasoning as a separate field, some write a text unchanged, many leave out the reasoning of
earlier turns, and some drop fields that they do not expect. So each template is tried once, and the rendering of every
row is compared with the row. Loss is computed on what a model must write after its generation prompt: reasoning, the
closing mark, the answer and its end token. An empty block is learned only on request, and an answer whose reasoning was
left out is only context: models that learn such answers stop thinking.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from octavo.data.encoding.loss_mask import (
    REASONING_FIELDS,
    Message,
    Render,
    TemplateProblem,
    message_texts,
    render_messages,
)
from octavo.data.rows.conversations import Conversation, Text, Turn

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # marks that templates write around reasoning
_CLOSES = tuple(closes for _, closes in TAGS)
_ANY_TAG = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair))
_PROBE_QUESTION, _PROBE_REASONING, _PROBE_ANSWER = "octavo asks", "octavo thinks", "octavo says"


class Thinking:
    """The form in which one chat template writes reasoning.

    render          renders messages with the template (`octavo.data.encoding.loss_mask.Render`)
    parts           whether contents are lists of parts
    mask_empty      no loss on an empty thinking block before an answer
    mask_reasoning  no loss on reasoning and the marks around it: they are context of the answer
    """

    def __init__(self, render: Render, parts: bool, mask_empty: bool = True, mask_reasoning: bool = False) -> None:
        self.render, self.parts = render, parts
        self.mask_empty, self.mask_reasoning = mask_empty, mask_reasoning

    @cached_property
    def takes_reasoning(self) -> bool:
        """True if the template reads the reasoning of a turn from a separate field."""
        answer = {**self._message("assistant", _PROBE_ANSWER), **dict.fromkeys(REASONING_FIELDS, _PROBE_REASONING)}
        try:
            return _PROBE_REASONING in render_messages([self._message("user", _PROBE_QUESTION), answer], self.render)
        except TemplateProblem:
            return False

    @cached_property
    def closes_prompts(self) -> bool:
        """True if prompts end with a closed thinking block, after which a model writes no reasoning."""
        question = [self._message("user", _PROBE_QUESTION)]
        try:
            opening = render_messages(question, self.render, True).removeprefix(render_messages(question, self.render))
        except TemplateProblem:
            return False
        return opening.rstrip().endswith(_CLOSES)

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.parts else text}

    def normalize_reasoning(self, conversation: Conversation) -> Conversation:
        """Return the conversation with its reasoning in the form that the template reads. Raises `TemplateProblem` if
        the template does not support reasoning, and for turns whose reasoning cannot be separated from their text."""
        if not any(turn.role == "assistant" and _has_reasoning(turn) for turn in conversation.turns):
            return conversation
        turns = tuple(split_reasoning(turn, number) for number, turn in enumerate(conversation.turns, 1))
        for number, turn in enumerate(turns, 1):
            _check_words(turn, number, self.takes_reasoning)
        if self.takes_reasoning:
            return replace(conversation, turns=turns)
        for number, turn in enumerate(conversation.turns, 1):
            if turn.reasoning is not None:
                raise TemplateProblem(
                    f"the chat template does not support reasoning, but turn {number} has it in a separate field; use "
                    "the template of a reasoning model, write the reasoning into the content between <think> and "
                    "</think>, or remove it"
                )
        return conversation

    def check(self, whole: str, messages: Sequence[Message]) -> None:
        """Check that a conversation rendered as `whole` contains all its words and reasoning. Only the reasoning of
        answers before the last question may be missing, because templates leave it out by design. Raises
        `TemplateProblem`."""
        question = _last_question(messages)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                self._written_reasoning(whole, message, number, number < question)

    def learned_spans(
        self, whole: str, spans: Sequence[tuple[int, int]], messages: Sequence[Message], wanted: Sequence[bool]
    ) -> tuple[list[tuple[int, int]], int]:
        """Return the learned span of each answer, which is empty if its reasoning was left out, and the number of such
        answers, for a conversation rendered as `whole`. `spans` are its last answers; those that are not `wanted` are
        context. Raises `TemplateProblem`."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        question = _last_question(messages)
        learned, lost = [], 0
        for number, (start, end), learn in zip(answers[-len(wanted) :], spans, wanted, strict=False):
            if not learn:
                learned.append((start, start))
                continue
            reasoning = self._written_reasoning(whole[start:end], messages[number], number, number < question)
            if reasoning is None:
                learned.append((start, start))
                lost += 1
                continue
            begin = self._find_loss_start(whole, start, end, reasoning)
            if reasoning:
                self._check_learnable(begin > start, number)
            learned.append((begin, end))
        return learned, lost

    def _written_reasoning(self, written: str, message: Message, number: int, earlier: bool) -> str | None:
        """Return the reasoning of an answer that is in its rendering `written`, "" if the answer has none, or None if
        it was left out. Raises `TemplateProblem` if words are missing, or reasoning of an answer that is not an
        `earlier` one."""
        reasoning, texts = message.get(REASONING_FIELDS[0]), message_texts(message)
        if reasoning is None and any(
            map(_ANY_TAG.search, texts)
        ):  # within its text, which the template writes or removes
            turn = split_reasoning(Turn("assistant", tuple(map(Text, texts))))
            reasoning, texts = turn.reasoning, [part.text for part in turn.parts if isinstance(part, Text)]
        for piece in (piece.strip() for text in texts for piece in _ANY_TAG.split(text)):
            if piece not in written:
                raise TemplateProblem(f"the chat template drops words of message {number + 1}: {piece[:60]!r}")
        words = texts[0].strip() if texts else ""
        before = written[: written.rfind(words)] if words in written else written
        if not reasoning or reasoning.strip() in before:
            return reasoning or ""
        if not earlier:
            raise TemplateProblem(
                f"the chat template drops the reasoning of message {number + 1}, although no question follows: "
                f"{reasoning[:60]!r}; fix the template, or remove the reasoning"
            )
        return None

    def _check_learnable(self, masked: bool, number: int) -> None:
        """Check that written reasoning can be learned, or masked, as configured. Raises `TemplateProblem`."""
        if self.mask_reasoning and not masked:
            marks = " or ".join(opens for opens, _ in TAGS)
            raise TemplateProblem(
                f"data.mask_reasoning is true, but the chat template writes the reasoning of message {number + 1} "
                f"without the mark {marks}, so its end is unknown"
            )
        if self.closes_prompts and not self.mask_reasoning:
            raise TemplateProblem(
                f"message {number + 1} has reasoning, but prompts end with a closed thinking block, after which a "
                "model writes none; set enable_thinking: true in data.template_args, or data.mask_reasoning: true, or "
                "remove the reasoning"
            )

    def _find_loss_start(self, whole: str, start: int, end: int, reasoning: str) -> int:
        """Return the position at which the loss of the answer at `start` begins. `reasoning` is its rendered
        reasoning."""
        answer = whole[start:end]
        for opens, closes in TAGS:
            first = len(answer) - len(answer.lstrip())
            if answer.startswith(opens, first):
                first += len(opens)
            elif not whole[max(0, start - 64) : start].rstrip().endswith(opens):
                continue
            inner = answer.find(reasoning.strip(), first)  # the reasoning may mention its closing mark
            close = answer.find(closes, max(first, inner + len(reasoning.strip())))
            if close < 0:
                continue
            after = close + len(closes)
            after += len(answer[after:]) - len(answer[after:].lstrip("\n"))
            empty = not answer[first:close].strip()
            return start + after if (self.mask_empty if empty else self.mask_reasoning) else start
        return start


def split_reasoning(turn: Turn, number: int = 0) -> Turn:
    """Split the reasoning of an assistant turn, the `number`-th, from its text, as templates do that look for it in the
    text. A text that mentions the marks but does not begin with reasoning has none (""). Reasoning that a row has both
    in a field and in its text is kept once. Raises `TemplateProblem` if the two differ."""
    if turn.role != "assistant":
        return turn
    opened, reasoning, words = _split_block(turn)
    in_field = None if turn.reasoning is None else _strip_marks(turn.reasoning)
    if in_field is None and reasoning is None:
        return replace(turn, reasoning="") if any(closes in turn.text for closes in _CLOSES) else turn
    if in_field is not None and reasoning is not None and reasoning.strip() not in ("", in_field.strip()):
        if opened:
            raise TemplateProblem(
                f"turn {number} has reasoning in a separate field and different reasoning at the beginning of its "
                "text; keep one of them"
            )
        reasoning = None  # the words only mention the closing mark
    if reasoning is not None:
        turn = replace(turn, parts=(Text(words), *turn.parts[1:]))
    return replace(turn, reasoning=reasoning if in_field is None else in_field)


def _split_block(turn: Turn) -> tuple[bool, str | None, str]:
    """Return whether the text of a turn begins with an opening mark, the reasoning that it begins with or None, and the
    text after it."""
    text = turn.parts[0].text if turn.parts and isinstance(turn.parts[0], Text) else ""
    for opens, closes in TAGS:
        reasoning, closed, words = text.partition(closes)
        before, opened, inner = reasoning.partition(opens)
        if closed and not (opened and before.strip()):
            return bool(opened), (inner if opened else reasoning).strip("\n"), words.lstrip("\n")
    return False, None, text


def _strip_marks(reasoning: str) -> str:
    """Remove the marks around reasoning, which some rows include."""
    for opens, closes in TAGS:
        inner = reasoning.strip().removeprefix(opens).removesuffix(closes)
        if inner != reasoning.strip():
            return inner.strip("\n")
    return reasoning


def _check_words(turn: Turn, number: int, separate_field: bool) -> None:
    """Check that a turn has text after its reasoning, and, if the template takes reasoning `separate_field`, no further
    thinking block. Raises `TemplateProblem`."""
    if turn.role != "assistant":
        return
    if not turn.text.strip() and not turn.calls:
        raise TemplateProblem(f"turn {number} is an assistant turn without text after its reasoning")
    opened = next((opens for opens, _ in TAGS if turn.text.lstrip().startswith(opens)), None)
    if separate_field and opened:
        raise TemplateProblem(
            f"turn {number} has text that begins with {opened}: reasoning without an end, or a second thinking block; "
            "write it as one block, or remove the row"
        )


def _last_question(messages: Sequence[Message]) -> int:
    return max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _has_reasoning(turn: Turn) -> bool:
    return turn.reasoning is not None or _ANY_TAG.search(turn.text) is not None
