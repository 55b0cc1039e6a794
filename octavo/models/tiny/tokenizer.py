"""Small tokenizers, trained when a checkpoint is written, with a family's special tokens and a similar chat template.

Byte-level BPE: every string can be encoded, and frequent words of the texts become single tokens. A line break directly
after a word belongs to that word, so that "user\\n" is one token and a conversation stays short.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octavo.models.tiny.special_tokens import SpecialTokens

_BYTES = 256
_WORDS = 192  # maximum of merges; about 450 tokens with bytes and special tokens

DEFAULT_TEXTS = (
    *("system\n", "user\n", "assistant\n") * 40,
    *("first?", "second?", "third?", "fourth?", "First?", "Second?", "Third?", "Fourth?") * 20,
    *("top left?", "top right?", "bottom left?", "bottom right?") * 20,
    *("Which digit is first, second, third, fourth?", "What is the digit at the top left of the image?") * 8,
    *(" 0 1 2 3 4 5 6 7 8 9", "0\n1\n2\n3\n4\n5\n6\n7\n8\n9") * 8,
    *("zero one two three four five six seven eight nine",) * 4,
    *("You are a helpful assistant.", "Describe the picture. The answer is yes or no.", "[INST] [/INST] <<SYS>>\n") * 4,
)


def train_tokenizer(special: SpecialTokens, texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts` and on built-in texts, in which role names and digits become single
    tokens.

    Equal texts give an equal tokenizer. Ids: 256 bytes, the merges, then the special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[^\s]+\n?|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, behavior="isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [*DEFAULT_TEXTS, *(texts or ())]
    # Additional texts outweigh the built-in ones: the merge budget is small and frequency decides.
    trainer = trainers.BpeTrainer(
        vocab_size=_BYTES + _WORDS,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    tokenizer.add_special_tokens(list(special.tokens))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special.eos,
        pad_token=special.pad,
        bos_token=special.bos,
        extra_special_tokens=dict(special.names),
        model_max_length=4096,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = special.template
    return fast
