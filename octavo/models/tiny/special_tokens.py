"""Special tokens and chat templates of small checkpoints that several families share, similar to the published ones.
Those of a single family are defined with its dimensions.

The templates write the same roles, special tokens and line breaks as the published ones, without tools or thinking.
Every answer ends with the end token, which GLM's template omits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens of a family, in the order of their ids, and its chat template.

    names: attribute -> token, stored in the tokenizer's `extra_special_tokens` for processors.
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


def chatml_template(image: str, video: str = "") -> str:
    """Return a template of ChatML turns; `image`, `video`: the texts for an image and for a video."""
    parts = _TEXT_PARTS.replace("IMAGE", image)
    if video:
        of_video = "{% elif part['type'] == 'video' or 'video' in part %}"
        parts = parts.replace(_TEXT, f"{of_video}{{{{ '{video}' }}}}{_TEXT}")
    return f"{{% for message in messages %}}{_ROLE}{parts}{{{{ '<|im_end|>' }}}}{{% endfor %}}{_GENERATE}"


def role_template(image: str, **turns: str) -> str:
    """Return a template with a pattern for the turns of each role, in which `TEXT` is replaced by words and images."""
    parts = _TEXT_PARTS.replace("IMAGE", image)
    written = []
    for role, turn in turns.items():
        before, after = (f"{{{{ {part!r} }}}}" if part else "" for part in turn.split("TEXT"))
        written.append(f"if message['role'] == '{role}' %}}{before}{parts}{after}")
    unknown = "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    return "{% for message in messages %}{% " + "{% el".join(written) + unknown + "{% endfor %}"


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

QWEN = SpecialTokens(CHATML_TOKENS, chatml_template(""), eos="<|im_end|>", pad="<|endoftext|>")  # also for MPT
QWEN_VL = SpecialTokens(
    CHATML_TOKENS + _QWEN_VISION,
    chatml_template("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
)
