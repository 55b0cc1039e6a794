"""Reasoning in rows, with templates like published ones: located, learned, masked or rejected."""

import json

import pytest

from octavo.data import IGNORE, BadSample, Encoder, LabelledEncoder, LongSample, PairEncoder, PromptEncoder
from octavo.data.encoding.thinking import split_reasoning
from octavo.data.loaders.token_counts import _encoder_fingerprint, count_tokens
from octavo.data.skip_report import CONTROL_TOKENS, REASONING_LEFT_OUT
from octavo.data.tasks.splitting import split
from tests.data.chat_templates import TEMPLATES

ENDED = "<|im_end|>"


def row(*answers, **more):
    """Make a row of messages: a question before each answer, which is a text or (reasoning, text)."""
    turns = []
    for number, answer in enumerate(answers, 1):
        turns.append({"role": "user", "content": f"q{number}"})
        thought, text = answer if isinstance(answer, tuple) else (None, answer)
        turns.append({"role": "assistant", "content": text, "reasoning_content": thought})
    return {"messages": turns, **more}


def learned(encoder, sample):
    """Return the spans of a sample that have labels, as text; they are its answers without those that are context."""
    spoken = [encoder.tokenizer.decode(sample.input_ids[start:end]) for start, end in sample.answers if end]
    labelled = encoder.tokenizer.decode(sample.input_ids[sample.labels != IGNORE])
    assert labelled == "".join(spoken)
    return spoken


def block(number, opened=True):
    return f"<think>\nr{number}\n</think>\n\na{number}" if opened else f"r{number}\n</think>\n\na{number}"


APART = [("r1", "a1"), ("r2", "a2")]
WITHIN = [block(1), block(2)]
RAW = [block(1, opened=False), block(2, opened=False)]
NO_THINKING, PRESERVE = {"enable_thinking": False}, {"preserve_thinking": True}
# template, its arguments, and the learned spans of a row with: one answer with reasoning, one without, two with,
# two without. None: rejected, because a model writes no reasoning after this prompt.
TABLE = [
    ("qwen3_vl", {}, [block(1)], ["a1"], [block(1), block(2)], ["a1", "a2"]),
    ("qwen3_5", {}, [block(1, False)], ["a1"], [block(2, False)], ["a1", "a2"]),
    ("qwen3_6", {}, [block(1, False)], ["a1"], [block(2, False)], ["a1", "a2"]),
    ("qwen3_6", PRESERVE, [block(1, False)], ["a1"], [block(1, False), block(2, False)], ["a1", "a2"]),
    ("qwen3_5", NO_THINKING, None, ["a1"], None, ["a1", "a2"]),
    ("qwen3_6", NO_THINKING, None, ["a1"], None, ["a1", "a2"]),
    ("qwen3", {}, [block(1)], ["a1"], [block(2)], ["a1", "a2"]),
    ("qwen3", NO_THINKING, None, ["a1"], None, ["a1", "a2"]),
]  # fmt: skip


@pytest.mark.parametrize(("template", "args", "one", "bare", "two", "both"), TABLE)
def test_learned_spans_of_every_template(folder, encoder, template, args, one, bare, two, both):
    """For every layout of reasoning, with and without a known shape; prefixes fail for two turns of Qwen3.5."""
    text_encoder, context = encoder(template, args), encoder(template, args, mask_reasoning=True)
    forms = [WITHIN] if template == "qwen3_vl" else [APART, WITHIN, RAW]
    last = ["a1", "a2"] if two is not None and len(two) == 2 else ["a2"]
    for answers in forms * 3:
        for count, wanted, words in ((1, one, ["a1"]), (2, two, last)):
            source = folder.read([row(*answers[:count])])
            if wanted is None:
                with pytest.raises(BadSample, match=r"has reasoning, but prompts end with a closed thinking block"):
                    text_encoder.encode(source[0])
            else:
                sample = text_encoder.encode(source[0])
                assert learned(text_encoder, sample) == [f"{text}{ENDED}" for text in wanted]
                assert sample.lost == count - len(wanted)
                assert [action for action, _ in sample.notes] == [REASONING_LEFT_OUT] * (count - len(wanted))
            assert learned(context, context.encode(source[0])) == [f"{text}{ENDED}" for text in words]
    for count, wanted in ((1, bare), (2, both)):
        for _ in range(3):
            sample = text_encoder.encode(folder.read([row(*["a1", "a2"][:count])])[0])
            assert learned(text_encoder, sample) == [f"{text}{ENDED}" for text in wanted] and not sample.notes
            written = text_encoder.tokenizer.decode(sample.input_ids)
            assert written.count("<think>") == {"qwen3_vl": 0}.get(template, count if args == PRESERVE else 1)


def test_empty_block_is_learned_if_configured(folder, encoder):
    source = folder.read([row("a1", "a2")])
    for template, block in (("qwen3_5", "\n</think>\n\n"), ("qwen3", "<think>\n\n</think>\n\n")):
        text_encoder = encoder(template, mask_empty_think=False)
        assert learned(text_encoder, text_encoder.encode(source[0])) == [f"a1{ENDED}", f"{block}a2{ENDED}"]
    whole = encoder("qwen3_5", train_on_prompt=True)
    sample = whole.encode(source[0])
    assert (sample.labels[1:] == sample.input_ids[1:]).all()


def test_answers_without_end_token_are_located(folder, encoder):
    """GLM's template empties earlier thinking blocks, so neither prefixes nor end tokens locate answers."""
    text_encoder = encoder("glm")
    for _ in range(3):
        sample = text_encoder.encode(folder.read([row(*APART)])[0])
        assert learned(text_encoder, sample) == ["\n<think>r2</think>\na2"] and sample.lost == 1
        assert learned(text_encoder, text_encoder.encode(folder.read([row("a1", "a2")])[0])) == ["a1", "a2"]
    shut = encoder("glm", NO_THINKING)
    assert learned(shut, shut.encode(folder.read([row("a1", "a2")])[0])) == ["a1", "a2"]


def test_reasoning_equal_to_the_answer_is_located(folder, encoder):
    """Words of the question or the answer are not mistaken for reasoning."""
    for template in ("qwen3", "qwen3_5"):
        text_encoder = encoder(template)
        sample = text_encoder.encode(folder.read([row(("q1", "a1"), "a2")])[0])
        assert learned(text_encoder, sample) == [f"a2{ENDED}"]
        sample = text_encoder.encode(folder.read([row(("5", "5"), ("6", "6"))])[0])
        assert sample.lost == 1 and learned(text_encoder, sample)[0].endswith(f"6\n</think>\n\n6{ENDED}")


def test_long_reasoning_is_rejected_before_rendering(folder, encoder, monkeypatch):
    """Reasoning that cannot fit is cut; reasoning that a template omits takes no space."""
    text_encoder, seen, long = encoder("qwen3_5"), [], "r" * 100_000
    render = text_encoder.thinking.render
    monkeypatch.setattr(
        text_encoder, "_render", lambda *given, **more: seen.append(str(given)) or render(*given, **more)
    )
    with pytest.raises(LongSample, match="tokens long, seq_length is 512"):
        text_encoder.encode(folder.read([row((long, "a1"))])[0])
    assert max(map(len, seen)) < 3 * 512 * text_encoder.max_token_chars
    for answer in ((long, "a1"), f"<think>{long}</think>a1"):
        assert learned(text_encoder, text_encoder.encode(folder.read([row(answer, "a2")])[0])) == [f"a2{ENDED}"]


def test_reasoning_dropped_by_template_is_reported(folder, encoder):
    """Qwen3-Omni's template does not recognize contents in parts as questions, and silently drops reasoning."""
    within, apart = folder.read([row(block(1))], "a.json"), folder.read([row(("r1", "a1"))], "b.json")
    with pytest.raises(BadSample, match="drops the reasoning of message 2, although no question follows: 'r1'"):
        encoder("omni").encode(within[0])
    for template in ("omni", "qwen3_vl"):
        with pytest.raises(BadSample, match="does not support reasoning, but turn 2 has it in a separate field"):
            encoder(template).encode(apart[0])
    with pytest.raises(BadSample, match="no token to learn in its answers, because .* the reasoning of 1; set data"):
        raw = {"messages": [*row(("r1", "a1"))["messages"], {"role": "user", "content": "q2"}]}
        encoder("qwen3_5").encode(folder.read([raw], "c.json")[0])


def test_templates_with_other_defaults(folder, encoder):
    """Small Qwen3.5 models think only if requested; Qwen3.8's template keeps all reasoning."""
    one, two = (folder.read([row(*APART[:count])], f"{count}.json")[0] for count in (1, 2))
    small = TEMPLATES["qwen3_5"].replace("enable_thinking is false", "enable_thinking is not true")
    with pytest.raises(BadSample, match="closed thinking block, .* set enable_thinking: true in data.template_args"):
        encoder(small).encode(one)
    text_encoder = encoder(small, {"enable_thinking": True})
    assert learned(text_encoder, text_encoder.encode(one)) == [block(1, False) + ENDED]
    text_encoder = encoder(TEMPLATES["qwen3_6"].replace("is defined and preserve_thinking is true", "is not false"))
    assert learned(text_encoder, text_encoder.encode(two)) == [block(1, False) + ENDED, block(2, False) + ENDED]


def test_template_reads_reasoning_under_another_name(folder, encoder):
    text_encoder = encoder(TEMPLATES["qwen3_5"].replace("m.reasoning_content", "m.thinking"))
    for answers in (APART, RAW):
        assert learned(text_encoder, text_encoder.encode(folder.read([row(*answers)])[0])) == [
            f"{block(2, False)}{ENDED}"
        ]


def test_raw_output_gets_no_second_block(folder, encoder):
    """A template that looks for both marks would write an empty block before "r1</think>a1"."""
    both = TEMPLATES["qwen3_5"].replace("'</think>' in text", "'<think>' in text and '</think>' in text")
    text_encoder = encoder(both)
    sample = text_encoder.encode(folder.read([row("r1</think>a1")])[0])
    assert learned(text_encoder, sample) == [f"r1\n</think>\n\na1{ENDED}"]
    assert text_encoder.tokenizer.decode(sample.input_ids).count("<think>") == 1


def test_answer_may_mention_the_marks(folder, encoder):
    reply = "Models write <think>x</think> first."
    text_encoder = encoder("qwen3_5")
    assert learned(text_encoder, text_encoder.encode(folder.read([row(reply)])[0])) == [reply + ENDED]
    text_encoder = encoder("qwen3_vl", mask_reasoning=True)
    assert learned(text_encoder, text_encoder.encode(folder.read([row(reply)])[0])) == [reply + ENDED]
    turns = [{"role": "user", "content": "Is it <think>?"}, {"role": "assistant", "content": "Look, </think> ends it."}]
    with pytest.raises(
        BadSample, match="without the mark <think>"
    ):  # the mark in the question is not one of the answer
        text_encoder.encode(folder.read([{"messages": turns}])[0])
    blind = TEMPLATES["qwen3_5"].replace("m.reasoning_content is string", "false")  # it splits such text
    with pytest.raises(BadSample, match="drops words of message 2: 'Models write'"):
        encoder(blind).encode(folder.read([row(reply)])[0])


def test_duplicate_reasoning_is_written_once(folder, encoder):
    """Reasoning both in a field and between marks, as servers return it, and a field that includes the marks."""
    forms = [("r1", block(1)), ("r1", block(1, False)), ("<think>\nr1\n</think>", "a1"), ("r1", "<think>\n</think>a1")]
    for template in ("qwen3", "qwen3_5"):
        text_encoder = encoder(template)
        for answer in forms:
            sample = text_encoder.encode(folder.read([row(answer)])[0])
            assert learned(text_encoder, sample) == [f"{block(1, template == 'qwen3')}{ENDED}"]
    with pytest.raises(BadSample, match="turn 2 has reasoning in a separate field and different reasoning at"):
        text_encoder.encode(folder.read([row(("r2", block(1)))])[0])
    reply = "x</think> is a mark"
    assert learned(text_encoder, text_encoder.encode(folder.read([row(("r1", reply))])[0])) == [
        f"r1\n</think>\n\n{reply}{ENDED}"
    ]


def test_unterminated_or_unanswered_reasoning_is_rejected(folder, encoder):
    """A completion that was cut off while thinking would be learned as an answer after an empty block."""
    text_encoder = encoder("qwen3_5")
    for answer in ("<think>\nr1", ("r1", "<think>r2"), "<think>r1</think><think>r2</think>a1"):
        with pytest.raises(BadSample, match="turn 2 has text that begins with <think>: reasoning without an end, or"):
            text_encoder.encode(folder.read([row(answer)])[0])
    for template in ("qwen3_5", "qwen3_vl"):
        with pytest.raises(BadSample, match="turn 2 is an assistant turn without text after its reasoning"):
            encoder(template).encode(folder.read([row("<think>r1</think>\n")])[0])


def test_masked_reasoning_may_mention_its_closing_mark(folder, encoder):
    for template in ("qwen3", "qwen3_5"):
        text_encoder = encoder(template, mask_reasoning=True)
        sample = text_encoder.encode(folder.read([row(("so </think> is a mark", "a1"))])[0])
        assert learned(text_encoder, sample) == [f"a1{ENDED}"]


def test_words_dropped_by_template_are_reported(folder, encoder):
    """Llama's template drops the text next to a call; Qwen3-VL's drops all system turns except the first."""
    call = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    turns = [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "blue"}, *row("a1")["messages"]]
    source = folder.read([{"messages": turns, "tools": [TOOL]}])
    silent = TEMPLATES["qwen3_vl"].replace("said(m.content)", "said('' if m.tool_calls else m.content)")
    text_encoder = encoder("qwen3_vl")
    assert len(learned(text_encoder, text_encoder.encode(source[0]))) == 2
    with pytest.raises(BadSample, match="the chat template drops words of message 2: 'I look.'"):
        encoder(silent).encode(source[0])
    late = {"messages": [*row("a1")["messages"], {"role": "system", "content": "Be brief."}, *row("a2")["messages"]]}
    for kind, read in ((Encoder, "conversations"), (PromptEncoder, "prompts")):
        with pytest.raises(BadSample, match="would drop message 3, a system message; put its"):
            encoder("qwen3_vl", kind=kind).encode(folder.read([late], kind=read)[0])
    text_encoder = encoder("qwen3")
    assert len(learned(text_encoder, text_encoder.encode(folder.read([late])[0]))) == 2


def test_reasoning_without_marks_cannot_be_masked(folder, encoder):
    plain = TEMPLATES["qwen3_5"].replace("<think>\\n", "Thoughts: ").replace("\\n</think>\\n\\n", " Answer: ")
    source = folder.read([row(("r1", "a1"))])
    text_encoder = encoder(plain)
    assert learned(text_encoder, text_encoder.encode(source[0])) == [f"r1 Answer: a1{ENDED}"]
    with pytest.raises(BadSample, match=r"data.mask_reasoning is true, .* without the mark <think> or \[THINK\]"):
        encoder(plain, mask_reasoning=True).encode(source[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reasoning_content": 7}, "turn 2 has the reasoning_content 7; expected text"),
        ({"reasoning_content": "r", "thinking": "s"}, "turn 2 has different reasoning in reasoning_content and"),
        ({"role": "user", "reasoning_content": "r"}, "turn 2, of the user, has reasoning_content; only an assistant's"),
        ({"reasoning": "\ud800"}, "its text holds half a character"),
        ({"content": " ", "reasoning": "r"}, "turn 2 is an assistant turn without text"),
    ],
)  # fmt: skip
def test_bad_reasoning_is_rejected(folder, change, message):
    good = row("a1", "a2")["messages"]
    with pytest.raises(BadSample, match=rf"row 1: .*{message}"):
        folder.read([{"messages": good}, {"messages": [good[0], {**good[1], **change}, *good[2:]]}])[1]


def test_turns_with_weight_zero_are_context(folder, encoder):
    """With the keys of OpenAI and others; such an answer gets no separate row."""
    for template, last in (("qwen3_vl", "a3"), ("qwen3_5", "r3\n</think>\n\na3")):
        text_encoder, third = encoder(template), "a3" if template == "qwen3_vl" else ("r3", "a3")
        for key, value in (("weight", 0), ("loss", False), ("train", 0.0)):
            given = row("a1", "a2", third)
            given["messages"][1][key], given["messages"][3][key] = value, 1
            sample = text_encoder.encode(folder.read([given])[0])
            assert learned(text_encoder, sample) == [f"a2{ENDED}", last + ENDED] and sample.answers[0] == (0, 0)
            rows = split(folder.read([given]))
            assert [learned(text_encoder, text_encoder.encode(rows[n])) for n in range(len(rows))] == [
                [f"a2{ENDED}"],
                [last + ENDED],
            ]
    given = row(("r1", "a1"), "a2")
    given["messages"][1]["weight"] = 0
    for text_encoder in (
        encoder("qwen3_5"),
        encoder("qwen3_6", {**NO_THINKING, **PRESERVE}),
    ):  # and its reasoning is ignored
        sample = text_encoder.encode(folder.read([given], "thinks.json")[0])
        assert learned(text_encoder, sample) == [f"a2{ENDED}"] and not sample.notes
    spoken = [{"from": "human", "value": "q1"}, {**SPOKEN, "loss": False}, *RAW_TURNS]
    for raw, format in (({"conversations": spoken}, "sharegpt"), ({"prompt": spoken, "completion": None}, "prompt")):
        assert learned(text_encoder, text_encoder.encode(folder.read([raw], format=format)[0])) == [f"a2{ENDED}"]
    with pytest.raises(BadSample, match="has no assistant turn that is learned .weight 0., so there is nothing to"):
        folder.read([{"conversations": spoken[:2]}], "none.json")[0]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"from": "gpt", "value": "x", "tool_calls": [{"name": "look"}]}, "has tool_calls, .* calls as a turn of func"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "look"}}, "has function_call, .*tool_calls"),
        ({"role": "assistant", "content": "x", "images": ["a.png"]}, "has images; list files in the row, or write the"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, "has the weight 0.5; expected 1 or 0, true or false"),
    ],
)  # fmt: skip
def test_invalid_weights_of_turns_are_rejected(folder, turn, message):
    question = {"from": "human", "value": "q"} if "from" in turn else {"role": "user", "content": "q"}
    with pytest.raises(BadSample, match=f"turn 2 {message}"):
        folder.read([{"conversations": [question, turn]}])[0]


@pytest.mark.parametrize("where", ["reasoning", "arguments", "tools"])
def test_control_tokens_in_hidden_text_are_noted(folder, encoder, where):
    """Control tokens in reasoning, arguments of calls and tools are tokenized as control tokens, as in text."""

    def spelling(reply):
        turns = row(("r1", "a1"))["messages"]
        if where == "reasoning":
            turns[1]["reasoning_content"] = reply
            return {"messages": turns}
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"at": reply}}]}
        turns[1:1] = [call, {"role": "tool", "content": "x"}] if where == "arguments" else []
        return {"messages": turns, "tools": [{**TOOL, "description": reply if where == "tools" else ""}]}

    text_encoder = encoder("qwen3_5")
    with pytest.raises(BadSample, match=r"its text contains the model's placeholder '<\|image_pad\|>'; remove it"):
        text_encoder.encode(folder.read([spelling("<|image_pad|>")])[0])
    assert [action for action, _ in text_encoder.encode(folder.read([spelling(ENDED)], "b.json")[0]).notes] == [
        CONTROL_TOKENS
    ]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"name": "look", "arguments": {"at": "sea"}}
TURNS = [
    ("system", {"value": "Be brief."}),
    ("human", {"value": "<image><image>Same?"}),
    ("function_call", {"value": json.dumps(CALL), "reasoning_content": "I look."}),
    ("observation", {"value": "<image>blue"}),
    ("gpt", {"value": "Yes.", "reasoning_content": "Both blue."}),
    ("human", {"value": "Sure?"}),
    ("gpt", {"value": "Quite."}),
]


def as_messages(turns):
    """Convert turns to messages with roles and contents."""
    for who, turn in turns:
        role = {"human": "user", "observation": "tool", "system": "system"}.get(who, "assistant")
        thought = {"reasoning": turn["reasoning_content"]} if "reasoning_content" in turn else {}
        message = {"content": turn["value"]} if who != "function_call" else {"content": None, "tool_calls": [CALL]}
        yield {"role": role, **message, **thought}


def test_reasoning_works_with_tools_system_and_images(folder, encoder):
    """In ShareGPT and messages: calls are answers too, and several images of a turn are counted."""
    images = [folder.image(name) for name in ("a.png", "b.png", "c.png")]
    rows = {
        "sharegpt": [{"from": who, **turn} for who, turn in TURNS],
        "messages": list(as_messages(TURNS)),
    }
    parsed = [
        folder.read([{key: turns, "tools": [TOOL], "images": images}], f"{name}.json")[0]
        for (name, turns), key in zip(rows.items(), ("conversations", "messages"), strict=True)
    ]
    assert parsed[0].turns == parsed[1].turns and len(parsed[0].images) == 3
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
    text_encoder = encoder("qwen3_6", {**PRESERVE, "add_vision_id": True})
    for sample in map(text_encoder.encode, parsed):
        assert [text.replace("\n" + call, call) for text in learned(text_encoder, sample)] == [
            f"I look.\n</think>\n\n{call}{ENDED}", f"Both blue.\n</think>\n\nYes.{ENDED}", f"Quite.{ENDED}",
        ]  # fmt: skip
        text = text_encoder.tokenizer.decode(sample.input_ids)
        assert [f"Picture {n}: <|vision_start|>" in text for n in (1, 2, 3, 4)] == [True] * 3 + [False]
        assert count_tokens(text_encoder, parsed[:1]) == [len(sample.input_ids)] and sample.images == 3
    text_encoder = encoder("qwen3_5")  # the reasoning of the first question is left out, so its answer is context
    sample = text_encoder.encode(parsed[0])
    assert learned(text_encoder, sample) == [f"Quite.{ENDED}"] and sample.lost == 2


def test_prompts_and_pairs_use_template_arguments(folder, encoder):
    prompt = folder.read([{**row("a1"), "answer": "a"}], kind="prompts")[0]
    for args, opening in (((), "<think>\n"), (NO_THINKING, "<think>\n\n</think>\n\n")):
        text_encoder = encoder("qwen3_5", args, PromptEncoder)
        ids = text_encoder.encode(prompt).input_ids
        assert text_encoder.tokenizer.decode(ids).endswith(f"<|im_start|>assistant\n{opening}")
    pair = {"prompt": row("a1")["messages"] + [{"role": "user", "content": "q2"}], "rejected": "b"}
    chosen = {"role": "assistant", "content": "c", "reasoning_content": "r2"}
    text_encoder = encoder("qwen3_5", kind=PairEncoder)
    both = text_encoder.encode(folder.read([{**pair, "chosen": chosen}], "pairs.json", kind="pairs")[0])
    texts = [
        text_encoder.tokenizer.decode(side.input_ids[side.labels != IGNORE]) for side in (both.chosen, both.rejected)
    ]
    assert texts == [f"r2\n</think>\n\nc{ENDED}", f"b{ENDED}"]


ANSWER = {"role": "assistant", "content": "a1", "reasoning": "r1"}
SPOKEN = {"from": "gpt", "value": "a1", "thinking": "r1"}
RAW_TURNS = [{"from": "human", "value": "q2"}, {"from": "gpt", "value": "a2"}]


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"prompt": "q1", "completion": ANSWER}, "conversations"),
        ({"prompt": "q1", "completion": [ANSWER]}, "conversations"),
        ({"prompt": [{"role": "user", "content": "q1"}, ANSWER], "answer": None, "completion": None}, "conversations"),
        ({"prompt": [{"from": "human", "value": "q1"}, SPOKEN], "completion": None}, "conversations"),
        ({"prompt": "q1", "completion": [SPOKEN], "label": True}, "labelled"),
        ({"conversations": [{"from": "human", "value": "q1"}, SPOKEN]}, "conversations"),
    ],
)
def test_every_row_layout_keeps_reasoning(folder, encoder, asked, kind):
    text_encoder = encoder("qwen3_5", kind=LabelledEncoder if kind == "labelled" else Encoder)
    format = "prompt" if "prompt" in asked and kind == "conversations" else "auto"
    sample = text_encoder.encode(folder.read([asked], kind=kind, format=format)[0])
    assert learned(text_encoder, sample) == [f"r1\n</think>\n\na1{ENDED}"]
    if kind == "conversations":  # generated text is compared with the text only
        assert folder.read([asked], kind="prompts", format=format)[0].answer == "a1"


def test_token_counts_depend_on_template_arguments(encoder):
    first, same, other = (encoder("qwen3_5", args) for args in ((), (), NO_THINKING))
    assert _encoder_fingerprint(first) == _encoder_fingerprint(same) != _encoder_fingerprint(other)


def test_reasoning_at_text_start_is_split(folder):
    turn = folder.read([row("<think>r\n</think>\n\n a ")])[0].turns[1]
    assert (split_reasoning(turn).reasoning, split_reasoning(turn).text) == ("r", " a ")
    turn = folder.read([row("[THINK]r[/THINK]a")], "b.json")[0].turns[1]
    assert (split_reasoning(turn).reasoning, split_reasoning(turn).text) == ("r", "a")
    assert split_reasoning(folder.read([row("plain")], "c.json")[0].turns[1]).reasoning is None
