"""Chat templates that treat thinking as published ones do, written for tests. `TEMPLATES`: name -> template.

qwen3_vl   writes what a text holds, and knows no thinking, nor turns of the system behind the first
qwen3      text only: reasoning of answers behind the last question; an empty block before the very last without any
qwen3_5    a block, empty or not, for each answer behind the last question; prompts open one, or close an empty one
qwen3_6    the same, and `preserve_thinking` writes the reasoning of all answers
glm        the same without a word for the end of a turn; earlier answers stand behind an empty block
omni       takes contents that are lists for no questions, and so loses all thinking, in the text or apart
"""

_HEAD = "{{- '<|im_start|>' + m.role + '\\n' }}"
_PARTS = """
{%- macro said(content) %}
{%- if content is string %}{{- content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}{% set seen.images = seen.images + 1 %}
{%- if add_vision_id %}{{- 'Picture ' ~ seen.images ~ ': ' }}{% endif %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endmacro %}
{%- set seen = namespace(images=0) %}
"""
_TOOLS = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
"""  # noqa: E501
# The position of the last question; the result of a tool is not a question.
_LAST = """
{%- set last = namespace(at=messages | length - 1, open=true) %}
{%- for m in messages[::-1] %}
{%- if last.open and m.role == 'user' QUESTION %}
{%- set last.open = false %}{% set last.at = messages | length - 1 - loop.index0 %}{% endif %}
{%- endfor %}
"""
# Reasoning in a separate field, or in the text between its marks.
_PARTED = """
{%- set thought = '' %}
{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
{%- elif '</think>' in text %}
{%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
"""
_CALLS = """
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
"""
_QWEN3_5 = f"""{_PARTS}{_TOOLS}{_LAST.replace("QUESTION", "")}
{{%- if last.open %}}{{{{- raise_exception('no question') }}}}{{% endif %}}
{{%- for m in messages %}}
{{%- set text = said(m.content) | trim %}}
{{%- if m.role == 'tool' %}}{{{{- '<|im_start|>user\\n<tool_response>\\n' + text + '\\n</tool_response>' }}}}
{{%- elif m.role == 'assistant' %}}{_PARTED}
{{%- if WRITES %}}{{{{- '<|im_start|>assistant\\n<think>\\n' + (thought | trim) + '\\n</think>\\n\\n' + text }}}}
{{%- else %}}{{{{- '<|im_start|>assistant\\n' + text }}}}{{% endif %}}{_CALLS}
{{%- else %}}{_HEAD}{{{{- text }}}}{{% endif %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
{{{{- '<|im_start|>assistant\\n<think>\\n' + ('\\n</think>\\n\\n' if enable_thinking is false else '') }}}}
{{%- endif %}}"""
_QWEN3 = f"""{_LAST.replace("QUESTION", "")}
{{%- for m in messages %}}
{{%- set text = m.content %}}
{{%- if m.role == 'assistant' %}}{_PARTED}
{{%- if loop.index0 > last.at and (loop.last or thought) %}}
{{{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}}}
{{%- else %}}{{{{- '<|im_start|>assistant\\n' + text }}}}{{% endif %}}
{{%- else %}}{_HEAD}{{{{- text }}}}{{% endif %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if enable_thinking is defined and enable_thinking is false %}}{{{{- '<think>\\n\\n</think>\\n\\n' }}}}{{% endif %}}
{{%- endif %}}"""
_QWEN3_VL = f"""{_PARTS}{_TOOLS}
{{%- for m in messages %}}{{% if m.role != 'system' or loop.first %}}
{_HEAD}{{{{- said(m.content) }}}}{_CALLS}{{{{- '<|im_end|>\\n' }}}}
{{%- endif %}}{{% endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{% endif %}}"""

_GLM = f"""{_LAST.replace("QUESTION", "")}{_PARTS}
{{%- for m in messages %}}
{{%- set text = said(m.content) %}}
{{%- if m.role == 'assistant' %}}{_PARTED}
{{{{- '<|assistant|>\n<think>' + (thought.strip() if loop.index0 > last.at else '') + '</think>\n' + text.strip() }}}}
{{%- else %}}{{{{- '<|' + m.role + '|>\n' + text }}}}{{% endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|assistant|>' }}}}
{{%- if enable_thinking is defined and not enable_thinking %}}{{{{- '\n<think></think>\n' }}}}{{% endif %}}
{{%- endif %}}"""

TEMPLATES = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3": _QWEN3,
    "qwen3_5": _QWEN3_5.replace("WRITES", "loop.index0 > last.at"),
    "qwen3_6": _QWEN3_5.replace(
        "WRITES", "(preserve_thinking is defined and preserve_thinking is true) or loop.index0 > last.at"
    ),
    "glm": _GLM,
    "omni": _QWEN3_5.replace("{%- if last.open %}{{- raise_exception('no question') }}{% endif %}", "")
    .replace("m.role == 'user'", "m.role == 'user' and m.content is string")
    .replace("WRITES", "loop.index0 > last.at"),
}
