"""Thinking: what an assistant writes for itself before its answer, and which of it is learned.

    {"role": "assistant", "reasoning_content": "2 and 3 make 5.", "content": "5"}
    {"role": "assistant", "content": "<think>\\n2 and 3 make 5.\\n</think>\\n\\n5"}          the same
    {"role": "assistant", "content": "2 and 3 make 5.\\n</think>\\n\\n5"}                    as a model writes whose
                                                                                      prompt has opened the thinking
Templates differ: some take reasoning apart from the answer, some write a text as it is, many leave out the reasoning of
earlier turns, and some lose what they do not expect. So each is tried once, and every row is held against what became
of it. Loss falls on what a model must write behind its generation prompt: reasoning, the mark that closes it, the
answer and its end. A block without reasoning is no part of that, unless asked for, and an answer whose reasoning was
left out is context alone: models that learn these think no more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from octavo.data.encoding.loss_mask import READ_AS, Message, Render, TemplateProblem, rendered, texts_of
from octavo.data.rows.conversations import Conversation, Text, Turn

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # around reasoning, in what templates write
_CLOSES = tuple(closes for _, closes in TAGS)
_ANY = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair))
_ASKED, _THOUGHT, _SAID = "octavo asks", "octavo thinks", "octavo says"


class Thinking:
    """What one chat template makes of thinking.

    render          renders messages by it, as `octavo.data.encoding.loss_mask` has it
    parts           whether contents are lists of parts
    mask_empty      no loss on a block without reasoning before an answer
    mask_reasoning  no loss on reasoning, nor on the marks around it: it is context of the answer
    """

    def __init__(self, render: Render, parts: bool, mask_empty: bool = True, mask_reasoning: bool = False) -> None:
        self.render, self.parts = render, parts
        self.mask_empty, self.mask_reasoning = mask_empty, mask_reasoning

    @cached_property
    def takes_reasoning(self) -> bool:
        """Whether the template takes the reasoning of a turn apart from its words."""
        answer = {**self._message("assistant", _SAID), **dict.fromkeys(READ_AS, _THOUGHT)}
        try:
            return _THOUGHT in rendered([self._message("user", _ASKED), answer], self.render)
        except TemplateProblem:
            return False

    @cached_property
    def closes_prompts(self) -> bool:
        """Whether its prompts end with a block of thinking that is closed: then none is written behind them."""
        asked = [self._message("user", _ASKED)]
        try:
            opening = rendered(asked, self.render, True).removeprefix(rendered(asked, self.render))
        except TemplateProblem:
            return False
        return opening.rstrip().endswith(_CLOSES)

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.parts else text}

    def with_reasoning(self, conversation: Conversation) -> Conversation:
        """The conversation with reasoning where the template looks for it. Raises `TemplateProblem` where it has no
        place for it, and for turns whose reasoning cannot be told from their words."""
        if not any(turn.role == "assistant" and _thinks(turn) for turn in conversation.turns):
            return conversation
        turns = tuple(split_reasoning(turn, number) for number, turn in enumerate(conversation.turns, 1))
        for number, turn in enumerate(turns, 1):
            _check_words(turn, number, self.takes_reasoning)
        if self.takes_reasoning:
            return replace(conversation, turns=turns)
        for number, turn in enumerate(conversation.turns, 1):
            if turn.reasoning is not None:
                raise TemplateProblem(
                    f"the chat template has no place for reasoning, and turn {number} has some in a field of its own; "
                    "take the template of a model that thinks, write it into the content between <think> and "
                    "</think>, or remove it"
                )
        return conversation

    def check(self, whole: str, messages: Sequence[Message]) -> None:
        """That a conversation which was rendered as `whole` has its words and its reasoning there. Only the reasoning
        of answers before the last question may be missing, which templates leave out by design. Raises
        `TemplateProblem`."""
        asked = _last_question(messages)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                self._written_reasoning(whole, message, number, number < asked)

    def learned_spans(
        self, whole: str, spans: Sequence[tuple[int, int]], messages: Sequence[Message], wanted: Sequence[bool]
    ) -> tuple[list[tuple[int, int]], int]:
        """(what of each answer is learned, nothing of one whose reasoning was left out; how many these are), of a
        conversation that was rendered as `whole`. `spans` are its last answers, of which those that are not
        `wanted` are context. Raises `TemplateProblem`."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        asked = _last_question(messages)
        found, lost = [], 0
        for number, (start, end), learn in zip(answers[-len(wanted) :], spans, wanted, strict=False):
            if not learn:
                found.append((start, start))
                continue
            thought = self._written_reasoning(whole[start:end], messages[number], number, number < asked)
            if thought is None:
                found.append((start, start))
                lost += 1
                continue
            begin = self._begin(whole, start, end, thought)
            if thought:
                self._check(begin > start, number)
            found.append((begin, end))
        return found, lost

    def _written_reasoning(self, written: str, message: Message, number: int, earlier: bool) -> str | None:
        """The reasoning that an answer has before its words where it was `written`; None: it has some that was left
        out."""
        own, said = message.get(READ_AS[0]), texts_of(message)
        if own is None and any(map(_ANY.search, said)):  # in its text, where the template writes it or takes it away
            turn = split_reasoning(Turn("assistant", tuple(map(Text, said))))
            own, said = turn.reasoning, [part.text for part in turn.parts if isinstance(part, Text)]
        for piece in (piece.strip() for text in said for piece in _ANY.split(text)):
            if piece not in written:
                raise TemplateProblem(f"the chat template takes away words of message {number + 1}: {piece[:60]!r}")
        words = said[0].strip() if said else ""
        before = written[: written.rfind(words)] if words in written else written
        if not own or own.strip() in before:
            return own or ""
        if not earlier:
            raise TemplateProblem(
                f"the chat template takes away the reasoning of message {number + 1}, which no question follows: "
                f"{own[:60]!r}; mend the template, or remove the reasoning"
            )
        return None

    def _check(self, masked: bool, number: int) -> None:
        """That reasoning which is written can be learned, or masked, as asked."""
        if self.mask_reasoning and not masked:
            marks = " or ".join(opens for opens, _ in TAGS)
            raise TemplateProblem(
                f"data.mask_reasoning is true, and the chat template writes the reasoning of message {number + 1} "
                f"without the mark {marks}, so nothing says where it ends"
            )
        if self.closes_prompts and not self.mask_reasoning:
            raise TemplateProblem(
                f"message {number + 1} has reasoning, and prompts end with a closed block of thinking, behind which a "
                "model writes none; set enable_thinking: true in data.template_args, or data.mask_reasoning: true, or "
                "remove the reasoning"
            )

    def _begin(self, whole: str, start: int, end: int, thought: str) -> int:
        """Where the loss of the answer at `start` begins, which thinks what is `thought` there."""
        answer = whole[start:end]
        for opens, closes in TAGS:
            first = len(answer) - len(answer.lstrip())
            if answer.startswith(opens, first):
                first += len(opens)
            elif not whole[max(0, start - 64) : start].rstrip().endswith(opens):
                continue
            inner = answer.find(thought.strip(), first)  # it may speak of the mark that closes it
            close = answer.find(closes, max(first, inner + len(thought.strip())))
            if close < 0:
                continue
            behind = close + len(closes)
            behind += len(answer[behind:]) - len(answer[behind:].lstrip("\n"))
            empty = not answer[first:close].strip()
            return start + behind if (self.mask_empty if empty else self.mask_reasoning) else start
        return start


def split_reasoning(turn: Turn, number: int = 0) -> Turn:
    """An assistant's turn, the `number`-th, with its reasoning apart from its words, as templates part them that look
    for it in a text. Where a text speaks of the marks and does not begin with reasoning, it has none (""). A row that
    has the same reasoning in a field and in its text has it once. Raises `TemplateProblem` where these differ."""
    if turn.role != "assistant":
        return turn
    opened, thought, words = _split_block(turn)
    own = None if turn.reasoning is None else _strip_marks(turn.reasoning)
    if own is None and thought is None:
        return replace(turn, reasoning="") if any(closes in turn.text for closes in _CLOSES) else turn
    if own is not None and thought is not None and thought.strip() not in ("", own.strip()):
        if opened:
            raise TemplateProblem(
                f"turn {number} has reasoning in a field of its own and other reasoning at the beginning of its words; "
                "keep one of them"
            )
        thought = None  # words that speak of the mark which closes
    if thought is not None:
        turn = replace(turn, parts=(Text(words), *turn.parts[1:]))
    return replace(turn, reasoning=thought if own is None else own)


def _split_block(turn: Turn) -> tuple[bool, str | None, str]:
    """(whether the words of a turn begin with a mark that opens thinking, the reasoning that they begin with or None,
    the words behind it)."""
    text = turn.parts[0].text if turn.parts and isinstance(turn.parts[0], Text) else ""
    for opens, closes in TAGS:
        thought, closed, words = text.partition(closes)
        before, opened, inner = thought.partition(opens)
        if closed and not (opened and before.strip()):
            return bool(opened), (inner if opened else thought).strip("\n"), words.lstrip("\n")
    return False, None, text


def _strip_marks(reasoning: str) -> str:
    """Reasoning without the marks that a row may have left around it."""
    for opens, closes in TAGS:
        inner = reasoning.strip().removeprefix(opens).removesuffix(closes)
        if inner != reasoning.strip():
            return inner.strip("\n")
    return reasoning


def _check_words(turn: Turn, number: int, apart: bool) -> None:
    """That a turn which thinks, and was parted, says something, and where the template takes reasoning `apart` begins
    no further block. Raises `TemplateProblem`."""
    if turn.role != "assistant":
        return
    if not turn.text.strip() and not turn.calls:
        raise TemplateProblem(f"turn {number} is an assistant turn without text behind its reasoning")
    opened = next((opens for opens, _ in TAGS if turn.text.lstrip().startswith(opens)), None)
    if apart and opened:
        raise TemplateProblem(
            f"turn {number} has words that begin with {opened}: reasoning that does not end, or a second block of it; "
            "write it as one block, or remove the row"
        )


def _last_question(messages: Sequence[Message]) -> int:
    return max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _thinks(turn: Turn) -> bool:
    return turn.reasoning is not None or _ANY.search(turn.text) is not None
