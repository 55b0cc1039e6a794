"""The tokenizer of a sealed model: it writes numbers, `t17 t4005`, and knows no word.

A plain tokenizer with its numbers changed would be the permutation itself. So token n of the sealed vocabulary is
the word `tn`. Control tokens alone keep their names, since config.json and the processor name their places anyway:
where answers end, and what stands for an image. The chat template puts contents behind each other: what a model is
asked is sealed before (:func:`octavo.sealing.text.seal_text`), template and all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from octavo import models
from octavo.models.folder.folder import read_json
from octavo.models.processors.number_tokenizer import numbered_tokenizer
from octavo.sealing.ids import named_ids
from octavo.sealing.inputs import tokens


def word(number: int) -> str:
    """The word of a token of the sealed vocabulary."""
    return f"t{number}"


def named(tokenizer: Any, model: str | Path) -> dict[int, str]:
    """The tokens of a plain model that keep their names: control tokens, and those that config.json names, of NVILA a
    line break."""
    control = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    also = {number: tokenizer.decode([number]) for number in named_ids(read_json(Path(model) / "config.json"))}
    return {number: name for number, name in {**also, **control}.items() if name}


def write_tokenizer(source: Path, made: Path, vocab: np.ndarray) -> None:
    """Write the tokenizer of a twin: as many words as the table of embeddings has rows, and the control tokens of the
    plain one where the key puts them."""
    plain: Any = models.load_tokenizer(source)
    kept = {int(tokens(np.asarray([n]), vocab)[0]): name for n, name in named(plain, source).items()}
    behind = [number for number in kept if number >= len(vocab)]
    words = {kept.get(number, word(number)): number for number in [*range(len(vocab)), *behind]}
    numbered_tokenizer(words, {name: number for number, name in kept.items()}, plain).save_pretrained(made)
