"""Special tokens and chat templates of small checkpoints, in the shape of their families'.

Templates are our own: roles, marks and line breaks as the published ones write them, without tools or thinking. An
answer ends with the end token everywhere, which GLM's leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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


_ROLE = "{{ '<|im_start|>' + message['role'] + '\n' }}"
_TEXT = "{% elif 'text' in part %}"
_TEXT_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}{{ 'IMAGE' }}"
    + _TEXT + "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)  # fmt: skip
_GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def _chatml(image: str, video: str = "") -> str:
    parts = _TEXT_PARTS.replace("IMAGE", image)
    if video:
        of_video = "{% elif part['type'] == 'video' or 'video' in part %}"
        parts = parts.replace(_TEXT, f"{of_video}{{{{ '{video}' }}}}{_TEXT}")
    return f"{{% for message in messages %}}{_ROLE}{parts}{{{{ '<|im_end|>' }}}}{{% endfor %}}{_GENERATE}"


def _by_role(image: str, **turns: str) -> str:
    """A template that writes each turn by its role: `TEXT` stands for its words and images."""
    parts = _TEXT_PARTS.replace("IMAGE", image)
    written = []
    for role, turn in turns.items():
        before, after = (f"{{{{ {part!r} }}}}" if part else "" for part in turn.split("TEXT"))
        written.append(f"if message['role'] == '{role}' %}}{before}{parts}{after}")
    unknown = "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    return "{% for message in messages %}{% " + "{% el".join(written) + unknown + "{% endfor %}"


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

_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

QWEN = Special(_CHATML_TOKENS, _chatml(""), eos="<|im_end|>", pad="<|endoftext|>")  # MPT's too
QWEN_VL = Special(
    _CHATML_TOKENS + _QWEN_VISION,
    _chatml("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
)
INTERNVL = Special(
    (*_CHATML_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    _chatml("<IMG_CONTEXT>", "<video>\\n"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    names={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
QWEN2_AUDIO = Special(  # its template asks for sounds where others ask for images
    (*_CHATML_TOKENS, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    _chatml("<|audio_bos|><|AUDIO|><|audio_eos|>\n").replace("image", "audio"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
)
LLAMA = Special(("<unk>", "<s>", "</s>"), _LLAMA, eos="</s>", pad="<unk>", bos="<s>")
MISTRAL3 = Special(
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]",
     "[IMG_END]", "<pad>"),
    "{{ bos_token }}" + _by_role(
        system="[SYSTEM_PROMPT]TEXT[/SYSTEM_PROMPT]", user="[INST]TEXT[/INST]", assistant="TEXT</s>", image="[IMG]"
    ),
    eos="</s>", pad="<pad>", bos="<s>",
)  # fmt: skip
LLAVA_ONEVISION = Special(
    (*_CHATML_TOKENS, "<image>", "<video>"),
    _chatml("<image>\n"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    names={"image_token": "<image>", "video_token": "<video>"},
)
_CELLS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
SMOLVLM = Special(
    ("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
     *_CELLS),
    "<|im_start|>" + _by_role(
        system="System: TEXT<end_of_utterance>\n", user="User: TEXT<end_of_utterance>\n",
        assistant="Assistant:TEXT<end_of_utterance>\n", image="<image>",
    ) + "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    eos="<end_of_utterance>", pad="<|im_end|>", bos="<|im_start|>",
    names={
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
    },
)  # fmt: skip
GEMMA3 = Special(
    ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
     "<image_soft_token>"),
    "{{ bos_token }}" + _by_role(
        system="<start_of_turn>user\nTEXT<end_of_turn>\n", user="<start_of_turn>user\nTEXT<end_of_turn>\n",
        assistant="<start_of_turn>model\nTEXT<end_of_turn>\n", image="<start_of_image>",
    ) + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    eos="<end_of_turn>", pad="<pad>", bos="<bos>",
    names={
        "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    },
)  # fmt: skip
GLM4V = Special(
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>",
     "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
    "[gMASK]<sop>" + _by_role(
        system="<|system|>\nTEXT", user="<|user|>\nTEXT", assistant="<|assistant|>\nTEXT<|endoftext|>",
        image="<|begin_of_image|><|image|><|end_of_image|>",
    ) + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    eos="<|endoftext|>", pad="<|endoftext|>",
    names={"image_token": "<|image|>", "video_token": "<|video|>"},
)  # fmt: skip
ERNIE4_5_VL = Special(
    ("<unk>", "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>",
     "<|IMAGE_PLACEHOLDER|>", "<|VIDEO_START|>", "<|VIDEO_END|>", "<|VIDEO_PLACEHOLDER|>"),
    "{{ bos_token }}" + _by_role(
        system="TEXT\n", user="User: TEXT\n", assistant="Assistant:TEXT<|end_of_sentence|>",
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ) + "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    eos="<|end_of_sentence|>", pad="<unk>", bos="<|begin_of_sentence|>",
    names={
        f"{kind}_{name}": f"<|{kind.upper()}_{mark}|>"
        for kind in ("image", "video")
        for name, mark in (("token", "PLACEHOLDER"), ("start_token", "START"), ("end_token", "END"))
    },
)  # fmt: skip

# NVILA: contents are texts, and a conversation without a system turn gets one.
_NVILA = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}" + _GENERATE
)
NVILA = Special(
    (*_CHATML_TOKENS, "[BOS]", "[PAD]", "<vila/sentinel>", "<image>", "<vila/video>"),
    _NVILA,
    eos="<|im_end|>",
    pad="[PAD]",
)
