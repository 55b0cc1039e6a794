"""Chat templates that are in VILA's code, by name, but not in the folders of its models.

    qwen2       ChatML; a conversation without a system turn gets one (NVILA's; config.json names it, if anything does)
    vicuna_v1   VILA 1.5 over Vicuna (3B, 13B)
    llama_3     VILA 1.5 over Llama 3 (8B); the last answer ends with a different token

VILA selects one of the last two by the name of the model folder, Octavo by the tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection

_TURNS = (
    "{%% set stated = messages[0]['role'] == 'system' %%}{{ bos_token | default('', true) }}"
    "{{ %s + (messages[0]['content'] if stated else '%s') + %s }}"
    "{%% for message in (messages[1:] if stated else messages) %%}"
)
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user\\'s questions."
)
_LLAMA = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
_QWEN2 = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_UNKNOWN = "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}{% endfor %}"
_HEADER = "'<|start_header_id|>' + %s + '<|end_header_id|>\n\n'"

TEMPLATES = {
    "qwen2": _QWEN2,
    "vicuna_v1": _TURNS
    % ("''", _VICUNA, "' '")
    + "{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + '</s>' }}"
    + _UNKNOWN
    + "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "llama_3": _TURNS % (_HEADER % "'system'", _LLAMA, "'<|eot_id|>'")
    + "{% if message['role'] in ['user', 'assistant'] %}{{ "
    + _HEADER % "message['role']"
    + " + message['content'] }}"
    "{{ '<|end_of_text|>' if loop.last and message['role'] == 'assistant' else '<|eot_id|>' }}"
    + _UNKNOWN
    + "{% if add_generation_prompt %}{{ "
    + _HEADER % "'assistant'"
    + " }}{% endif %}",
}
"""Name -> template for contents that are texts."""


def vila_1_5_template(vocabulary: Collection[str]) -> str:
    """Return the name of the template of a VILA 1.5 model with this vocabulary."""
    return "llama_3" if "<|eot_id|>" in vocabulary else "vicuna_v1"
