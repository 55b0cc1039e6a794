"""Words for a sealed model, and its words back: what it is asked, and what it answers, by who holds the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from octavo import models
from octavo.sealing.errors import SealError
from octavo.sealing.inputs import tokens
from octavo.sealing.key import Key
from octavo.sealing.structure import structure
from octavo.sealing.tokenizer import named, word

_WORD = re.compile(r"t(\d+)")


def seal_text(text: str, model: str | Path, key: Key) -> str:
    """A question as the words of the sealed model: in the plain model's chat template, up to where the answer begins.
    `model`: the plain folder."""
    processor: Any = models.load_processor(model)
    turns = [{"role": "user", "content": text}]
    written = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = np.asarray(processor.tokenizer(written, add_special_tokens=False)["input_ids"])
    names = named(processor.tokenizer, model)
    moved = tokens(ids, _vocab(model, key))
    return " ".join(names.get(int(plain), word(int(own))) for plain, own in zip(ids, moved, strict=True))


def unseal_text(words: str, model: str | Path, key: Key) -> str:
    """What the words of a sealed model mean. Raises SealError for one that is none."""
    tokenizer: Any = models.load_tokenizer(model)
    numbers = {name: number for number, name in named(tokenizer, model).items()}
    vocab = _vocab(model, key)
    ids = []
    for one in re.findall(r"\n|\S+", words):
        if one in numbers:
            ids.append(numbers[one])
        elif one == "\n":
            continue  # between words
        elif (found := _WORD.fullmatch(one)) and int(found[1]) < len(vocab):
            ids.append(int(vocab[int(found[1])]))
        else:
            raise SealError(f"{one!r:.60} is no word of a sealed model: they are t0 to t{len(vocab) - 1}")
    return str(tokenizer.decode(ids))


def _vocab(model: str | Path, key: Key) -> np.ndarray:
    return structure(models.empty(model)).draw(key)["vocab"]
