"""Finding the answers in what a chat template renders, whatever the template does."""

import jinja2
import pytest

from octavo.data.template import TemplateProblem, answer_spans, rendered

MESSAGES = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Hello Hello?"},
    {"role": "assistant", "content": "Bye"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does: an empty thinking block before the last answer only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>"
    "\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING = "{{ messages | length }}: {% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %} ...{% else %} "
    "{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise('roles must alternate') }}"
    "{% endif %}{{ m.content }}</s>{% endfor %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def renderer(template):
    def stop(message):
        raise jinja2.TemplateError(message)

    compiled = jinja2.Environment(keep_trailing_newline=True).from_string(template)
    return lambda given, prompt: compiled.render(messages=list(given), add_generation_prompt=prompt, **{"raise": stop})


def answers(template, messages=MESSAGES):
    text = rendered(messages, renderer(template))
    spans = answer_spans(text, messages, renderer(template), ["<|im_end|>", "</s>"])
    return [text[start:end] for start, end in spans]


def test_answers_with_their_end_of_turn_and_without_glue():
    assert answers(CHATML) == ["Hello<|im_end|>", "Bye<|im_end|>"]


def test_a_last_answer_that_is_rendered_differently():
    assert answers(THINKING) == ["Hello<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"]


def test_without_an_end_token_the_line_break_is_the_end():
    assert answers(NO_END) == ["Hello\n", "Bye\n"]


def test_white_space_in_answers_stays():
    messages = [MESSAGES[0], {"role": "assistant", "content": " a \n b "}]
    assert answers(CHATML, messages) == [" a \n b <|im_end|>"]
    assert answers(THINKING, [*messages, *MESSAGES[2:]])[0] == " a \n b <|im_end|>"


def test_templates_whose_answers_cannot_be_found():
    with pytest.raises(
        TemplateProblem, match=r"message 2 so that its answer cannot be found: .*'1: .* at character 0, in"
    ):
        answers(COUNTING)
    with pytest.raises(TemplateProblem, match=r"the conversation up to its end reads .*use a template whose earlier"):
        answers(FORGETFUL)


def test_roles_that_a_template_refuses():
    with pytest.raises(
        TemplateProblem, match=r"refuses the roles user, user, assistant \(TemplateError: roles must alt"
    ):
        answers(STRICT, [MESSAGES[0], *MESSAGES[:2]])
