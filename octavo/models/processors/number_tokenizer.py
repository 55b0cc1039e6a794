"""A tokenizer that writes numbers: each token is the word that the caller gives it, and nothing is learnt of text."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %} {% endif %}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{{ message['content'] | join(' ', attribute='text') }}{% endif %}{% endfor %}"
)
"""Contents behind each other: whoever writes the words has written the template's as well."""
_USUAL = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token", "mask_token")


def numbered_tokenizer(
    words: Mapping[str, int], control: Mapping[str, int], like: PreTrainedTokenizerBase
) -> PreTrainedTokenizerFast:
    """A tokenizer of words between spaces.

    words    word -> its number, of all tokens
    control  those that are control tokens, which stand alone wherever they are written
    like     the tokenizer whose names of control tokens (`eos_token`, `image_token`, ...) this one takes over
    """
    tokenizer = Tokenizer(WordLevel(dict(words), unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    ordered = sorted(control, key=control.__getitem__)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ordered])
    named = {name: str(token) for name, token in like.special_tokens_map.items() if isinstance(token, str)}
    named = {name: token for name, token in named.items() if token in control}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: token for name, token in named.items() if name in _USUAL},
        extra_special_tokens={n: token for n, token in named.items() if n not in (*_USUAL, "unk_token")},
        model_max_length=like.model_max_length,
        padding_side=like.padding_side,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast
