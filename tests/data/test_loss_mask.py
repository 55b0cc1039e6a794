"""Locates answers in rendered conversations, for many kinds of templates."""

import random

import jinja2
import pytest

from octavo.data.encoding.loss_mask import Answers, TemplateProblem, answer_spans, render_messages

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
# Like Qwen3: an empty thinking block only before the last answer.
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
    text = render_messages(messages, renderer(template))
    spans = answer_spans(text, messages, renderer(template), ["<|im_end|>", "</s>"])
    return [text[start:end] for start, end in spans]


def test_answer_spans_include_end_of_turn_without_glue():
    assert answers(CHATML) == ["Hello<|im_end|>", "Bye<|im_end|>"]


def test_last_answer_rendered_differently_is_located():
    assert answers(THINKING) == ["Hello<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"]


def test_line_break_ends_answer_if_there_is_no_end_token():
    assert answers(NO_END) == ["Hello\n", "Bye\n"]


def test_white_space_in_answers_is_kept():
    messages = [MESSAGES[0], {"role": "assistant", "content": " a \n b "}]
    assert answers(CHATML, messages) == [" a \n b <|im_end|>"]
    assert answers(THINKING, [*messages, *MESSAGES[2:]])[0] == " a \n b <|im_end|>"


def test_unlocatable_answers_are_rejected():
    with pytest.raises(
        TemplateProblem, match=r"message 2 so that its answer cannot be found: .*'1: .* at character 0, in"
    ):
        answers(COUNTING)
    with pytest.raises(TemplateProblem, match=r"the conversation up to its end reads .*use a template whose earlier"):
        answers(FORGETFUL)


def test_roles_rejected_by_template_are_reported():
    with pytest.raises(
        TemplateProblem, match=r"rejects the roles user, user, assistant \(TemplateError: roles must alt"
    ):
        answers(STRICT, [MESSAGES[0], *MESSAGES[:2]])


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{{ '<img>' if p.type == 'image' else p.text }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
LOUD = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
TWICE = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")
BACKWARDS = CHATML.replace("messages %}", "messages | reverse %}")
TAILED = CHATML + "{{ '!' if messages[0].content == 'Hi' and not add_generation_prompt }}"
TEMPLATES = (CHATML, THINKING, COUNTING, FORGETFUL, STRICT, NO_END, STRIPPING, LOUD, TWICE, BACKWARDS, TAILED)
WORDS = ["Hi", "", " padded ", "Hi", "text000001", "assistant\n", "<|im_end|>", "Hi Hi", "ends </s>", "\n", "é", "im"]


def spans_or_problem(answers, *given):
    try:
        return answers(*given)
    except TemplateProblem as problem:
        return str(problem)


@pytest.mark.parametrize("template", TEMPLATES)
def test_spans_by_marks_equal_spans_by_prefixes(template):
    """For any texts, and for templates that strip them."""
    ends, known = ["<|im_end|>", "</s>"], Answers(["<|im_end|>", "</s>"])
    render, draw = renderer(template), random.Random(0)
    for row in range(60):
        roles = ("user", "assistant", "user", "assistant", "system")[: 2 + row % 4]
        turns = [{"role": role, "content": draw.choice(WORDS)} for role in roles]
        try:
            text = render_messages(turns, render)
        except TemplateProblem:
            continue
        for reach, context in ((None, 0), (len(text) // 2, 0), (None, 1)):
            spans = spans_or_problem(known.spans, text, turns, render, reach, context)
            wanted = spans_or_problem(answer_spans, text, turns, render, ends, reach, context)
            # Prefixes find a middle answer such as "im" in its own <|im_end|>, and none of COUNTING.
            if spans != wanted:
                assert template in (THINKING, COUNTING) and "so that its answer cannot be found" in wanted
                expected = [turn["content"] for turn in turns if turn["role"] == "assistant"][context:]
                answers = [text[start:end].removeprefix("<think>\n\n</think>\n\n") for start, end in spans]
                assert answers == [f"{words}<|im_end|>" for words in expected][: len(spans)]


def test_answers_that_end_differently_before_others_are_rejected():
    """A model would learn a wrong end of its answers."""
    template = NO_END.replace("content }}", "content }}{{ '.' if loop.last else ',' }}")
    whole = render_messages(MESSAGES, renderer(template))
    with pytest.raises(TemplateProblem, match="so that its answer cannot be found"):
        Answers(["</s>"]).spans(whole, MESSAGES, renderer(template))


def test_known_role_sequences_are_rendered_once():
    def count_renderings(template, rows):
        calls, answers = [], Answers(["<|im_end|>"])
        for turns in rows:
            whole = render_messages(turns, renderer(template))
            spans = answers.spans(whole, turns, lambda *args: calls.append(args) or renderer(template)(*args))
        return len(calls), [whole[start:end] for start, end in spans]

    rows = [[{**turn, "content": f"{turn['content']} {row}"} for turn in MESSAGES] for row in range(9)]
    assert count_renderings(CHATML, rows) == (
        3 + 4,
        ["Hello 8<|im_end|>", "Bye 8<|im_end|>"],
    )  # the first; the placeholders
    assert count_renderings(LOUD, rows)[0] == 9 * 3 + 4
    seen = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
         {"role": "assistant", "content": [{"type": "text", "text": f"{row}"}]}] for row in range(9)
    ]  # fmt: skip
    assert count_renderings(PARTS, seen) == (1 + 2, ["8<|im_end|>"])
    called = [[*turns[:-1], {**turns[-1], "name": "x"}] for turns in rows]
    assert count_renderings(CHATML, called)[0] == 9 * 3
