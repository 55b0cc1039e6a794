"""Small tokenizers trained on the spot, with a family's special tokens and a chat template of its shape.

Byte-level BPE: every string has a code, and words of the given texts become single tokens. A line break directly
after a word belongs to that word, so that "user\\n" is one token and a conversation stays short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_BYTES = 256
_WORDS = 192  # merges at most: "small vocabulary" is about 450 with the bytes and the special tokens

_ROLE = "{{ '<|im_start|>' + message['role'] + '\n' }}"
_TEXT_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}{{ 'IMAGE' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def _chatml(image: str) -> str:
    parts = _TEXT_PARTS.replace("IMAGE", image)
    return f"{{% for message in messages %}}{_ROLE}{parts}{{{{ '<|im_end|>' }}}}{{% endfor %}}{_GENERATE}"


# NVILA: contents are texts, and a conversation without a system turn gets one.
_NVILA = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}" + _GENERATE
)

# Llama 2: the system text goes inside the first user turn; an answer ends with </s>.
_LLAMA = (
    "{% set state = namespace(system='') %}{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join('') %}{% endif %}"
    "{% if message['role'] == 'system' %}{% set state.system = '<<SYS>>\n' + text + '\n<</SYS>>\n\n' %}"
    "{% elif message['role'] == 'user' %}{{ bos_token + '[INST] ' + state.system + text + ' [/INST]' }}"
    "{% set state.system = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + text + eos_token }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}{% endfor %}"
)

DEFAULT_TEXTS = (
    *("system\n", "user\n", "assistant\n") * 40,
    *("first?", "second?", "third?", "fourth?", "First?", "Second?", "Third?", "Fourth?") * 20,
    *("top left?", "top right?", "bottom left?", "bottom right?") * 20,
    *("Which digit is first, second, third, fourth?", "What is the digit at the top left of the image?") * 8,
    *(" 0 1 2 3 4 5 6 7 8 9", "0\n1\n2\n3\n4\n5\n6\n7\n8\n9") * 8,
    *("zero one two three four five six seven eight nine",) * 4,
    *("You are a helpful assistant.", "Describe the picture. The answer is yes or no.", "[INST] [/INST] <<SYS>>\n") * 4,
)


@dataclass(frozen=True)
class Special:
    """Special tokens of a family, in the order of their ids, and its chat template.

    names: attribute -> token, kept in the tokenizer's `extra_special_tokens` so that processors find them.
    """

    tokens: tuple[str, ...]
    template: str
    eos: str
    pad: str
    bos: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

QWEN = Special(_CHATML_TOKENS, _chatml(""), eos="<|im_end|>", pad="<|endoftext|>")  # MPT's too
QWEN_VL = Special(
    _CHATML_TOKENS + _QWEN_VISION,
    _chatml("<|vision_start|><|image_pad|><|vision_end|>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
)
INTERNVL = Special(
    (*_CHATML_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    _chatml("<IMG_CONTEXT>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    names={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
NVILA = Special(
    (*_CHATML_TOKENS, "[BOS]", "[PAD]", "<vila/sentinel>", "<image>", "<vila/video>"),
    _NVILA,
    eos="<|im_end|>",
    pad="[PAD]",
)
LLAMA = Special(("<unk>", "<s>", "</s>"), _LLAMA, eos="</s>", pad="<unk>", bos="<s>")


def train_tokenizer(special: Special, texts: Iterable[str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts` and built-in ones, which make role names and digits single tokens.

    Equal texts give an equal tokenizer. Ids: 256 bytes, the merges, then the special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[^\s]+\n?|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, behavior="isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [*DEFAULT_TEXTS, *(texts or ())]
    # Questions asked for by name outweigh the built-in texts: the merge budget is small and frequency decides.
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
