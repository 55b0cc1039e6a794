"""The tokenizer of a sealed model, whose tokens are numbers, `t17 t4005`, instead of words.

A plain tokenizer with permuted ids would reveal the permutation. So token n of the sealed vocabulary is the word `tn`.
Only control tokens keep their names, since config.json and the processor name their ids anyway: the tokens that end
answers, and the placeholders of images. The chat template only concatenates contents: the owner of the key seals
questions before, including the plain model's template (:func:`seal_text`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from octavo import models
from octavo.models.folder.folder import read_json
from octavo.sealing.errors import SealError
from octavo.sealing.inputs import find_token_ids, permute_token_ids
from octavo.sealing.key import Key
from octavo.sealing.structure import read_structure

_WORD = re.compile(r"t(\d+)")
TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %} {% endif %}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{{ message['content'] | join(' ', attribute='text') }}{% endif %}{% endfor %}"
)
"""Concatenates contents, because sealed text already includes the plain model's template."""
_STOCK_NAMES = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token", "mask_token")


def sealed_word(number: int) -> str:
    """Return the word of a token of the sealed vocabulary."""
    return f"t{number}"


def named_tokens(tokenizer: Any, model: str | Path) -> dict[int, str]:
    """Return the tokens of a plain model that keep their names: control tokens, and those in config.json, such as
    NVILA's line break."""
    control = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    also = {number: tokenizer.decode([number]) for number in find_token_ids(read_json(Path(model) / "config.json"))}
    return {number: name for number, name in {**also, **control}.items() if name}


def write_tokenizer(source: Path, folder: Path, vocab: np.ndarray) -> None:
    """Write the tokenizer of a twin: a word for each row of the embedding table, and the plain model's control tokens
    at their sealed ids."""
    plain: Any = models.load_tokenizer(source)
    names = {int(permute_token_ids(np.asarray([n]), vocab)[0]): name for n, name in named_tokens(plain, source).items()}
    beyond = [number for number in names if number >= len(vocab)]
    words = {names.get(number, sealed_word(number)): number for number in [*range(len(vocab)), *beyond]}
    build_word_tokenizer(words, {name: number for number, name in names.items()}, plain).save_pretrained(folder)


def build_word_tokenizer(
    words: Mapping[str, int], control: Mapping[str, int], like: PreTrainedTokenizerBase
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words separated by spaces.

    words    word -> id, of all tokens
    control  word -> id of control tokens, which are recognized without spaces
    like     the tokenizer from which the names of control tokens (`eos_token`, `image_token`, ...) are copied
    """
    tokenizer = Tokenizer(WordLevel(dict(words), unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ordered = sorted(control, key=control.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ordered])
    named = {name: str(token) for name, token in like.special_tokens_map.items() if isinstance(token, str)}
    named = {name: token for name, token in named.items() if token in control}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: token for name, token in named.items() if name in _STOCK_NAMES},
        extra_special_tokens={n: token for n, token in named.items() if n not in (*_STOCK_NAMES, "unk_token")},
        model_max_length=like.model_max_length,
        padding_side=like.padding_side,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def seal_text(text: str, model: str | Path, key: Key) -> str:
    """Return a question as words of the sealed model, in the plain model's chat template, up to the start of the
    answer.
    `model`: the plain folder."""
    processor: Any = models.load_processor(model)
    turns = [{"role": "user", "content": text}]
    written = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = np.asarray(processor.tokenizer(written, add_special_tokens=False)["input_ids"])
    names = named_tokens(processor.tokenizer, model)
    moved = permute_token_ids(ids, _vocabulary_order(model, key))
    return " ".join(names.get(int(plain), sealed_word(int(number))) for plain, number in zip(ids, moved, strict=True))


def unseal_text(words: str, model: str | Path, key: Key) -> str:
    """Return the plain text of a sealed model's words. Raises SealError for an unknown word."""
    tokenizer: Any = models.load_tokenizer(model)
    numbers = {name: number for number, name in named_tokens(tokenizer, model).items()}
    vocab = _vocabulary_order(model, key)
    ids = []
    for token in re.findall(r"\n|\S+", words):
        if token in numbers:
            ids.append(numbers[token])
        elif token == "\n":
            continue  # between words
        elif (match := _WORD.fullmatch(token)) and int(match[1]) < len(vocab):
            ids.append(int(vocab[int(match[1])]))
        else:
            raise SealError(f"{token!r:.60} is not a word of a sealed model: they are t0 to t{len(vocab) - 1}")
    return str(tokenizer.decode(ids))


def _vocabulary_order(model: str | Path, key: Key) -> np.ndarray:
    return read_structure(models.empty(model)).draw(key)["vocab"]
