"""What cannot fit into a sequence is known before it costs anything.

A row of 20 MB takes a minute and gigabytes to be rendered and made tokens, and rendering grows with the square of the
turns. But a turn takes a token at least, an image as many as its size says, and a token stands for no more characters
than the longest of the vocabulary has: counting these is enough to know of most such rows that they are too long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from octavo.data.rows.conversations import Conversation, ImageRef, Text, Turn
from octavo.data.rows.video_refs import VideoRef


def beginning(
    conversation: Conversation, tokens: int, longest: int, image_tokens: Callable[[Path, bool], int],
    video_tokens: Sequence[int] = (),
) -> Conversation:  # fmt: skip
    """The conversation itself where it may fit into `tokens`; else a beginning of it that does not fit either.

    `longest`: characters of the longest token. `image_tokens(path, False)` is asked of rows with several images, in
    order, until there is no room; one image alone is bounded by its own limit. `video_tokens`: of each video.
    """
    room, turns, seen, shown = tokens * longest, [], 0, 0
    several = len(conversation.images) > 1
    for turn in conversation.turns[: tokens + 1]:
        parts = []
        for part in turn.parts:
            if isinstance(part, Text):
                part = Text(part.text[: room + 1])
                room -= len(part.text)
            elif isinstance(part, VideoRef):
                room -= longest * (video_tokens[shown] if shown < len(video_tokens) else 1)
                shown += 1
            elif not isinstance(part, ImageRef):  # a sound, of which a row is never cut
                room -= longest
            else:
                room -= longest * (image_tokens(conversation.images[seen], False) if several else 1)
                seen += 1
            parts.append(part)
            if room < 0:
                break
        turns.append(replace(turn, parts=tuple(parts)))
        if room < 0:
            break
    if room >= 0 and len(turns) <= tokens:
        return conversation
    return replace(
        conversation, turns=tuple(turns), images=conversation.images[:seen], videos=conversation.videos[:shown]
    )


def with_short_reasoning(conversation: Conversation, most: int) -> Conversation:
    """The conversation with at most `most` + 1 characters of reasoning a turn: a longer one fits nowhere, whatever
    follows. How much all turns have says nothing: templates leave out that of earlier ones."""
    if all(len(turn.reasoning or "") <= most for turn in conversation.turns):
        return conversation

    def short(turn: Turn) -> Turn:
        return turn if turn.reasoning is None else replace(turn, reasoning=turn.reasoning[: most + 1])

    return replace(conversation, turns=tuple(map(short, conversation.turns)))
