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

from octavo.data.conversations import Conversation, Text, Turn
from octavo.data.template import READ_AS, Message, Render, TemplateProblem, rendered, words_of

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # around reasoning, in what templates write
_CLOSES = tuple(closes for _, closes in TAGS)
_ANY = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair))
_ASKED, _THOUGHT, _SAID = "octavo asks", "octavo thinks", "octavo says"


class Thinking:
    """What one chat template makes of thinking.

    render          renders messages by it, as `octavo.data.template` has it
    parts           whether contents are lists of parts
    mask_empty      no loss on a block without reasoning before an answer
    mask_reasoning  no loss on reasoning, nor on the marks around it: it is context of the answer
    """

    def __init__(self, render: Render, parts: bool, mask_empty: bool = True, mask_reasoning: bool = False) -> None:
        self.render, self.parts = render, parts
        self.mask_empty, self.mask_reasoning = mask_empty, mask_reasoning

    @cached_property
    def apart(self) -> bool:
        """Whether the template takes the reasoning of a turn apart from its words."""
        answer = {**self._message("assistant", _SAID), **dict.fromkeys(READ_AS, _THOUGHT)}
        try:
            return _THOUGHT in rendered([self._message("user", _ASKED), answer], self.render)
        except TemplateProblem:
            return False

    @cached_property
    def shut(self) -> bool:
        """Whether its prompts end with a block of thinking that is closed: then none is written behind them."""
        asked = [self._message("user", _ASKED)]
        try:
            opening = rendered(asked, self.render, True).removeprefix(rendered(asked, self.render))
        except TemplateProblem:
            return False
        return opening.rstrip().endswith(_CLOSES)

    def _message(self, role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.parts else text}

    def taken(self, conversation: Conversation) -> Conversation:
        """The conversation with reasoning where the template looks for it. Raises `TemplateProblem` where it has no
        place for it."""
        if not any(turn.role == "assistant" and _thinks(turn) for turn in conversation.turns):
            return conversation
        if self.apart:
            return replace(conversation, turns=tuple(map(parted, conversation.turns)))
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
                self._thought(whole, message, number, number < asked)

    def learned(
        self, whole: str, spans: Sequence[tuple[int, int]], messages: Sequence[Message], given: int = 0
    ) -> tuple[list[tuple[int, int]], int]:
        """(what of each answer is learned, how many are not, since their reasoning was left out), of a conversation
        that was rendered as `whole`. `spans` are its answers behind the `given` first ones. Raises `TemplateProblem`.
        """
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"][given:]
        asked = _last_question(messages)
        found, lost = [], 0
        for number, (start, end) in zip(answers, spans, strict=False):
            thought = self._thought(whole[start:end], messages[number], number, number < asked)
            if thought is None:
                lost += 1
                continue
            begin = self._begin(whole, start, end)
            if thought:
                self._check(begin > start, number)
            found.append((begin, end))
        return found, lost

    def _thought(self, written: str, message: Message, number: int, earlier: bool) -> str | None:
        """The reasoning that an answer has before its words where it was `written`; None: it has some that was left
        out."""
        reasoning, words = message.get(READ_AS[0]), words_of(message)
        if not reasoning and not _ANY.search(words):
            return ""
        own = reasoning
        if reasoning is None:  # in its text, where the template writes it or takes it away
            turn = parted(Turn("assistant", (Text(words),)))
            own, words = turn.reasoning or "", turn.text
        for piece in _ANY.split(words):
            if piece.strip() not in written:
                raise TemplateProblem(f"the chat template takes away words of message {number + 1}: {piece[:60]!r}")
        before = written[: written.rfind(words.strip())] if words.strip() in written else written
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
        if self.shut and not self.mask_reasoning:
            raise TemplateProblem(
                f"message {number + 1} has reasoning, and prompts end with a closed block of thinking, behind which a "
                "model writes none; leave enable_thinking out of data.template_args, set data.mask_reasoning: true, or "
                "remove the reasoning"
            )

    def _begin(self, whole: str, start: int, end: int) -> int:
        """Where the loss of the answer at `start` begins."""
        answer = whole[start:end]
        for opens, closes in TAGS:
            first = len(answer) - len(answer.lstrip())
            if answer.startswith(opens, first):
                first += len(opens)
            elif not whole[max(0, start - 64) : start].rstrip().endswith(opens):
                continue
            close = answer.find(closes, first)
            if close < 0:
                continue
            behind = close + len(closes)
            behind += len(answer[behind:]) - len(answer[behind:].lstrip("\n"))
            empty = not answer[first:close].strip()
            return start + behind if (self.mask_empty if empty else self.mask_reasoning) else start
        return start


def parted(turn: Turn) -> Turn:
    """An assistant's turn with its reasoning apart from its words, as templates part them that look for it in a text.
    Where a text speaks of the marks and does not begin with reasoning, it has none ("")."""
    first = turn.parts[0] if turn.parts else None
    if turn.role != "assistant" or turn.reasoning is not None or not isinstance(first, Text):
        return turn
    for opens, closes in TAGS:
        thought, closed, words = first.text.partition(closes)
        before, opened, inner = thought.partition(opens)
        if closed and not (opened and before.strip()):
            parts = (Text(words.lstrip("\n")), *turn.parts[1:])
            return replace(turn, parts=parts, reasoning=(inner if opened else thought).strip("\n"))
    return replace(turn, reasoning="") if any(closes in turn.text for closes in _CLOSES) else turn


def _last_question(messages: Sequence[Message]) -> int:
    return max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)


def _thinks(turn: Turn) -> bool:
    return turn.reasoning is not None or any(closes in turn.text for closes in _CLOSES)
