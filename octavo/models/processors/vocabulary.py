"""Checks that a tokenizer belongs to its model: token ids have embedding rows, and letters have tokens.

A token id outside the embedding raises `IndexError` in a forward on a CPU, and aborts the process on a GPU. The tokens
of every conversation are therefore checked before weights are read. Other ids of the vocabulary may be outside: in
Gemma 3 1B, `<image_soft_token>`, which no text contains. Rows with such a token are rejected one by one
(`octavo.data`).
"""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.base.seal_note import NOTE
from octavo.models.errors import ForeignTokenizerError, ModelError
from octavo.models.folder import chat
from octavo.models.folder.folder import find_file

_CONVERSATION = (("user", "What is this?"), ("assistant", "A word."))
_LETTERS = string.ascii_letters + string.digits


def check_vocabulary(processor: Any, rows: int, folder: Path) -> None:
    """Check that the tokens of the chat template and of padding, which every conversation has, have embedding rows.

    processor  or tokenizer
    rows       of the embedding table

    Raises ModelError, naming the token.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    used = {} if tokenizer.pad_token_id is None else {tokenizer.pad_token_id: "the tokenizer pads with it"}
    used |= dict.fromkeys(_template_ids(processor), "the chat template writes it in every conversation")
    outside = max((number for number in used if number >= rows), default=None)
    if outside is not None:
        text = safe_read.printable(str(tokenizer.convert_ids_to_tokens(outside)))
        raise ForeignTokenizerError(
            f"{folder}: the token {outside} ({text}) is outside the model's embedding of {rows} rows, but "
            f"{used[outside]}. Use the tokenizer that belongs to the model."
        )


def _template_ids(processor: Any) -> list[int]:
    """Return the tokens of a short conversation by the chat template; empty if there is no template or it rejects
    it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if not getattr(processor, "chat_template", None):
        return []
    for parts in (False, True):
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in _CONVERSATION
        ]
        try:
            written = chat.render(processor, turns)
        except ModelError:  # it expects contents in the other form, or a different order of roles
            continue
        return list(tokenizer(written, add_special_tokens=False)["input_ids"])
    return []


def largest_id(processor: Any) -> int:
    """Return the largest token id that a text can contain, or -1 if there is none. Tokens of media, which some families
    do not look up, are excluded."""
    tokenizer = getattr(processor, "tokenizer", processor)
    media = frozenset(getattr(processor, "image_token_ids", None) or ())
    return max((number for number in tokenizer.get_vocab().values() if number not in media), default=-1)


def missing_letters(processor: Any, folder: Path) -> str:
    """Return the ASCII letters and digits that have no token and are dropped from texts or become the unknown token.
    Empty for a sealed model, whose vocabulary has different words."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if os.path.lexists(find_file(folder, NOTE)):
        return ""
    ids = tokenizer(list(_LETTERS), add_special_tokens=False)["input_ids"]
    # Word tokenizers put a space before a text, which is a token even if nothing follows.
    known_ids = [[number for number in numbers if number != tokenizer.unk_token_id] for numbers in ids]
    return "".join(a for a, numbers in zip(_LETTERS, known_ids, strict=True) if not tokenizer.decode(numbers).strip())
