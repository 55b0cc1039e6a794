"""Chat templates that loop, fill memory or fail are reported quickly, with the file, by every command."""

from __future__ import annotations

import os
import shutil
import signal
import threading

import pytest
from transformers import ProcessorMixin

from octavo import models
from octavo.cli.main import main
from octavo.models.folder import chat

LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
LATER = "{% if messages|length > 30 %}" + LOOP + "{% endif %}" + PLAIN


@pytest.fixture
def folder(checkpoint, tmp_path, monkeypatch):
    """A folder without a template; no template is cached."""
    monkeypatch.setattr(chat, "_checked", set())
    shutil.copytree(checkpoint("llama"), tmp_path / "m")

    def write(template: str):
        (tmp_path / "m" / "chat_template.jinja").write_text(template)
        return tmp_path / "m"

    return write


@pytest.mark.parametrize(
    "template, message",
    [
        (LOOP, "does not terminate: a few words took more than 1 s of processor time"),
        (
            "{{ (7 + messages|length) ** (10 ** 9) }}",
            "does not terminate",
        ),  # in C: no Python runs that could be stopped
        ("{{ 'a' * 10**11 }}", "needs more than 64 MiB of memory for a few words"),
        ("{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "64 MiB"),
        ("{{ '%99999999999d' % 1 }}", "64 MiB"),
        ("{% for i in range(50000) %}{{ 'a' * 50 }}{% endfor %}", "characters or more for a few words"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", "rejects every conversation that was tried (Recursion"),
        ("{% for %}", "(TemplateSyntaxError: Expected an expression"),
        ("{{ raise_exception('n\x1bo') }}", r"(TemplateError: n\x1bo)"),
        ("{{ messages[0].x.y }}", "(UndefinedError: 'dict object' has no attribute 'x')"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "(RecursionError"),
        ("x" * (1 << 20), "characters; the limit is 1,048,576"),
    ],
    ids=lambda text: text[:20],
)
def test_a_template_that_cannot_be_used(folder, monkeypatch, template, message):
    monkeypatch.setattr(chat, "SECONDS", 1)
    monkeypatch.setattr(chat, "MEMORY", 64 << 20)
    with pytest.raises(models.ModelError) as caught:
        models.load_processor(folder(template))
    assert message in str(caught.value) and "chat_template.jinja: the chat template " in str(caught.value)
    with pytest.raises(ChildProcessError):  # nobody is left behind
        os.waitpid(-1, os.WNOHANG)


def test_template_that_rejects_some_conversations_is_accepted(folder):
    strict = "{% if messages[0].role == 'system' or messages|length > 2 %}{{ raise_exception('no') }}{% endif %}"
    models.load_processor(folder(strict + PLAIN))


def test_a_template_is_tried_once(folder, monkeypatch):
    where = folder(PLAIN)
    models.load_processor(where)
    monkeypatch.setattr(os, "fork", None)
    models.load_processor(where)
    monkeypatch.setattr(chat, "_checked", set())
    with pytest.raises(TypeError):
        models.load_processor(where)


def test_template_that_loops_later_hits_deadline_and_keeps_other_timers(folder, monkeypatch):
    processor = models.load_processor(folder(LATER))
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        messages = [{"role": "user", "content": "a"}]
        assert processor.apply_chat_template(messages, tokenize=False) == "a</s>"
        with pytest.raises(models.ModelError, match="does not terminate: this conversation took more than 0.5 s"):
            processor.apply_chat_template(messages * 40, tokenize=False)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    aside = threading.Thread(target=processor.apply_chat_template, args=(messages,), kwargs={"tokenize": False})
    aside.start()
    aside.join()


FEW = "{% if messages|length == 3 %}%s{% endif %}" + PLAIN  # which the trial does not have
LONG = (
    "{{ 'ab ' * 400000 }}",
    "{% for i in range(60000) %}{{ 'a' * 20 }}{% endfor %}",
    "{{ messages[1].content * 400 }}",
)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
@pytest.mark.parametrize("later", LONG)
def test_every_rendering_has_a_length_limit(checkpoint, tmp_path, family, later):
    """For a template that writes long texts only for some rows, with and without tools, and for prompts."""
    shutil.copytree(checkpoint(family), tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(FEW.replace("%s", later))
    processor = models.load_processor(tmp_path / "m")
    content = "x" * 3000
    content = [{"type": "text", "text": content}] if processor.image_processor is not None else content
    turns = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
    message = "the chat template writes [0-9,]+ characters or more for a conversation of"
    for options in ({}, {"tools": [{"name": "f"}]}, {"add_generation_prompt": True}):
        with pytest.raises(models.ModelError, match=message):
            processor.apply_chat_template(turns, tokenize=False, **options)
    with pytest.raises(models.ModelError, match=message):
        chat.render(processor, turns)
    assert processor.apply_chat_template(turns[:1], tokenize=False)


def test_long_conversation_is_rendered_in_full(folder):
    """The limit grows with the length of texts and of tools with their indentation."""
    indented = "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}" + PLAIN
    processor = models.load_processor(folder(indented))
    turns = [{"role": "user", "content": "é" * 3_000_000}]
    assert len(processor.apply_chat_template(turns, tokenize=False)) > 3_000_000
    tools = [{"name": f"f{number}", "parameters": {"a": [number] * 9}} for number in range(20_000)]
    assert len(processor.apply_chat_template(turns, tokenize=False, tools=tools)) > 3_000_000


@pytest.mark.parametrize("half", (r"{{ '\ud800' }}", r"{{ '\udfff' if tools else '' }}", "{{ messages[0].content }}"))
def test_lone_surrogate_is_an_error(folder, half):
    """The template may write it, in the trial or later, or it may be in the conversation."""
    where = folder("{% if messages|length == 5 or tools %}" + half + "{% endif %}" + PLAIN)
    processor = models.load_processor(where)
    turns = [{"role": "user", "content": "a\ud83d"}] * 5
    for options in ({}, {"tools": [{"name": "f"}]}):
        with pytest.raises(models.ModelError, match=r"a lone surrogate \(.u(d800|dfff|d83d)\)"):
            processor.apply_chat_template(turns, tokenize=False, **options)
    with pytest.raises(models.ModelError, match="a lone surrogate"):
        models.generate(models.load(where), processor, turns)
    with pytest.raises(models.ModelError, match="rejects every conversation that was tried .ModelError: .*a lone surr"):
        models.load_processor(folder(r"{{ '\ud800' }}" + PLAIN))


def test_prompt_rejected_by_template_is_an_error(folder):
    refusing = "{% if messages[0].content == '?' %}{{ raise_exception('no ?') }}{% endif %}"
    where = folder(refusing + PLAIN)
    with pytest.raises(models.ModelError, match="the chat template rejects the roles user .TemplateError: no ?"):
        models.generate(models.load(where), models.load_processor(where), [{"role": "user", "content": "?"}])


ASKING = (
    "{% if not mood is defined %}{% set mood = 'calm' %}{% endif %}{% macro said(m) %}{{ tone }}{{ m.content }}"
    "{% endmacro %}{% for m in messages %}{{ said(m) }}{% endfor %}{{ mood }}{{ bos_token }}"
)


def test_variables_reach_every_rendering(folder):
    """Renderings of short texts, with tools, and of prompts; variables that are not set have the template's
    defaults."""
    processor = models.load_processor(folder(ASKING), template_args={"tone": ">", "mood": "loud"})
    messages = [{"role": "user", "content": "a"}]
    assert processor.apply_chat_template(messages, tokenize=False) == ">aloud<s>"
    assert processor.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}]) == ">aloud<s>"
    assert processor.apply_chat_template(messages, tokenize=False, mood="low") == ">alow<s>"
    words = processor.tokenizer.decode(models.encode_conversation(processor, messages)["input_ids"][0])
    assert words == ">aloud<s>"
    assert models.load_processor(folder(ASKING)).apply_chat_template(messages, tokenize=False) == "acalm<s>"


def test_generate_adds_template_variables_to_those_of_a_run(folder, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("octavo.generation.answers", lambda _, processor, *__, **___: seen.append(processor) or [["a"]])
    ask = ["generate", str(folder(ASKING)), "--prompt", "a"]
    assert main([*ask, "--template-arg", "tone=true", "--template-arg", "mood=low key"]) == 0
    assert seen[0].template_args == {"tone": True, "mood": "low key"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tones": 1}, "not accept the variable tones (data.template_args), which it does not read. Did you mean to"),
        ({"thinking": True}, "which it does not read. It reads mood, tone."),
        ({"messages": []}, "the variable messages (data.template_args), which is reserved for Octavo. Remove it."),
        ({"bos_token": "x"}, "which is reserved for Octavo"),
        ({"m": 1}, "which it does not read"),
    ],
)
def test_variables_that_a_template_does_not_read(folder, args, message):
    with pytest.raises(models.ModelError) as caught:
        models.load_processor(folder(ASKING), template_args=args)
    assert message in str(caught.value)


def test_variables_that_make_a_template_loop(folder, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1)
    endless = "{% for i in range(n or 1) %}{% for j in range(n or 1) %}{% endfor %}{% endfor %}" + PLAIN
    models.load_processor(folder(endless))
    with pytest.raises(models.ModelError, match="does not terminate: a few words took more than 1 s of processor time"):
        models.load_processor(folder(endless), template_args={"n": 90000})


@pytest.mark.parametrize("command", ["train", "generate", "eval"])
def test_commands_report_template_errors(folder, tmp_path, capsys, command):
    where = folder("{{ 'a' * 10**11 }}")
    (tmp_path / "a.json").write_text('[{"messages": [{"role": "user", "content": "a"}]}]')
    (tmp_path / "x.yaml").write_text(
        f"model: {{path: {where}}}\ndata: {{train: [{{path: a.json}}], eval: [{{path: a.json}}]}}\n"
        f"train: {{steps: 1}}\nrun: {{dir: {tmp_path}/run}}\n"
    )
    arguments = {
        "train": [tmp_path / "x.yaml"],
        "generate": [where, "--prompt", "a"],
        "eval": [where, "--config", tmp_path / "x.yaml"],
    }[command]
    assert main([command, *map(str, arguments)]) == 1
    assert "chat_template.jinja: the chat template needs more than 1024 MiB" in capsys.readouterr().err


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What <b>is</b> 'this'?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "élan {{ 1 }}"}]},
]
ODD = [
    {"role": "assistant", "content": [{"type": "image", "url": "a.png"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "assistant", "content": "x", "reasoning_content": "y"},
    {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]},
]


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "qwen3", "llama"])
def test_written_folder_equals_save_pretrained(checkpoint, family, monkeypatch):
    """Roles, texts and image placeholders use the direct path with the same result; everything else uses
    transformers."""
    processor = models.load_processor(checkpoint(family))
    seeing = processor.image_processor is not None
    turns = [turn if seeing or type(turn["content"]) is str else {**turn, "content": "one é"} for turn in TURNS]
    owner = processor if seeing else processor.tokenizer
    stock = ProcessorMixin.apply_chat_template if seeing else type(owner).apply_chat_template
    options = [{"add_generation_prompt": requested, "tokenize": False} for requested in (False, True)]
    wanted = [stock(owner, turns[:count], **how) for count in (1, 2, 3) for how in options]

    went = []
    monkeypatch.setattr(owner if not seeing else ProcessorMixin, "apply_chat_template", lambda *a, **k: went.append(a))
    assert [processor.apply_chat_template(turns[:count], **how) for count in (1, 2, 3) for how in options] == wanted
    assert not went
    for invalid in ODD:
        processor.apply_chat_template([invalid], tokenize=False)
    for how in ({}, {"tokenize": True}, {"tokenize": False, "tools": []}, {"tokenize": False, "name": "x"}):
        processor.apply_chat_template(turns, **how)
    processor.apply_chat_template([turns, turns], tokenize=False)
    assert len(went) == len(ODD) + 5
