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
from octavo.models.errors import ForeignTokenizerError, ModelError, VocabularySizeError
from octavo.models.folder import chat
from octavo.models.folder.folder import check_weight_files, find_file
from octavo.models.structure.skeleton import empty, stock_config

_CONVERSATION = (("user", "What is this?"), ("assistant", "A word."))
_LETTERS = string.ascii_letters + string.digits


def check_vocabulary(processor: Any, rows: int, folder: Path) -> None:
    """Check that the tokens of the chat template and of padding, which every conversation has, have embedding rows.

    processor  or tokenizer
    rows       of the embedding table

    Raises ForeignTokenizerError, naming the token, or VocabularySizeError if tokens have no row because config.json
    belongs to other weights.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    check_rows_on_disk(len(tokenizer), rows, folder)
    used = {} if tokenizer.pad_token_id is None else {tokenizer.pad_token_id: "the tokenizer pads with it"}
    used |= dict.fromkeys(_template_ids(processor), "the chat template writes it in every conversation")
    outside = max((number for number in used if number >= rows), default=None)
    if outside is not None:
        text = safe_read.printable(str(tokenizer.convert_ids_to_tokens(outside)))
        raise ForeignTokenizerError(
            f"{folder}: the token {outside} ({text}) is outside the model's embedding of {rows} rows, but "
            f"{used[outside]}. Use the tokenizer that belongs to the model."
        )


def check_rows_on_disk(tokens: int, rows: int, folder: Path) -> None:
    """Raise VocabularySizeError if a tokenizer has more tokens than config.json has rows, and the embedding on disk
    has another number of rows than the model of config.json."""
    if tokens <= rows:
        return
    try:
        headers = check_weight_files(folder)
    except ModelError:  # no weights, as for a model that is initialized; damage is reported when they are loaded
        return
    config = stock_config(folder)
    # With too few rows the token of padding has none either, and the model cannot be built.
    config.pad_token_id = config.get_text_config().pad_token_id = None
    model = empty(config)
    embeddings = model.get_input_embeddings()
    (name,) = [name for name, module in model.named_modules() if module is embeddings]
    wanted, leaf = model.get_parameter(f"{name}.weight").shape[0], f".{name.rpartition('.')[2]}.weight"
    # Names on disk may have another prefix than in memory. Other parts of a model may have tables of the same name.
    tables = [(header, e) for header in headers for e in header.entries if f".{e.name}".endswith(leaf)]
    if tables and wanted not in {entry.shape[0] for _, entry in tables}:
        header, entry = tables[0]
        raise VocabularySizeError(
            f"{folder}/config.json describes an embedding of {wanted} rows (vocab_size), but {entry.name!r} in "
            f"{header.file} has {entry.shape[0]}. Use the config.json that belongs to these weights."
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
