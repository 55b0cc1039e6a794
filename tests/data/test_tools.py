"""Rows in which an assistant calls tools: parsed from every layout, rendered by the template, learned."""

import copy
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from octavo.data import IGNORE, BadSample, Encoder

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"name": "weather", "arguments": {"city": "Bern"}}
TURNS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "name": "weather", "content": "dry"},
    {"role": "assistant", "content": "No."},
]
ROW = {"tools": [TOOL], "messages": TURNS}
SPOKEN = [
    {"from": "human", "value": "Rain?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "dry"},
    {"from": "gpt", "value": "No."},
]
# Like Qwen3: tools first, a thinking block only before the last answer.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{{- m.content if m.content is string else (m.content | map(attribute='text') | join) }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""  # noqa: E501
FORMS = {
    "objects": ROW,
    "texts": {"tools": json.dumps([TOOL]),
              "messages": [TURNS[0], {**TURNS[1], "tool_calls": json.dumps([CALL])}, *TURNS[2:]]},
    "arguments as text": {"tools": [TOOL], "messages": [TURNS[0], {"role": "assistant", "tool_calls": [
        {"function": {"name": "weather", "arguments": json.dumps(CALL["arguments"])}}]}, *TURNS[2:]]},
    "sharegpt": {"tools": json.dumps([TOOL]), "conversations": SPOKEN},
}  # fmt: skip


def encoder(models, family: str = "qwen3", template: str = TEMPLATE) -> Encoder:
    processor = copy.deepcopy(models(family))
    processor.chat_template = processor.tokenizer.chat_template = template
    return Encoder(processor, 512)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_and_answers_are_learned(folder, models, family, form):
    text_encoder = encoder(models, family)
    sample = text_encoder.encode(folder.read([FORMS[form]])[0])
    whole = text_encoder.tokenizer.decode(sample.input_ids)
    assert json.dumps(TOOL["function"]["name"]) in whole and "dry" in whole
    learned = text_encoder.tokenizer.decode(sample.input_ids[sample.labels != IGNORE])
    assert learned == '<call>weather{"city": "Bern"}</call><|im_end|>No.<|im_end|>'


def test_tools_in_tables_equal_tools_in_json(folder, models):
    """Parquet has one type for all turns, with null for missing keys."""
    parquet.write_table(pa.Table.from_pylist([ROW, {"messages": TURNS[:1] + TURNS[3:]}]), folder.path / "x.parquet")
    source, truth = folder.read(folder.path / "x.parquet"), folder.read([ROW])[0]
    assert source[0].turns == truth.turns and source[0].tools == truth.tools and source[1].tools == ()


def test_prompts_and_pairs_support_tools(folder, models):
    prompt_row = {"tools": [TOOL], "prompt": SPOKEN[:3], "answer": "No."}
    prompt = folder.read([prompt_row], kind="prompts")[0].conversation
    assert [turn.role for turn in prompt.turns] == ["user", "assistant", "tool"] and prompt.tools == (TOOL,)
    assert prompt.turns[1].calls[0]["function"] == CALL
    pair = {"tools": [TOOL], "prompt": TURNS[:3], "chosen": "No.", "rejected": "Yes."}
    assert folder.read([pair], kind="pairs")[0].chosen.tools == (TOOL,)
    with pytest.raises(BadSample, match="calls a tool in its last answer"):
        folder.read([{"messages": TURNS[:2]}], kind="prompts")[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": {"a": 1}}, r"'tools' is \{'a': 1\}; expected a list of objects"),
        ({"tools": "[1"}, "'tools' is not JSON"),
        ({"tools": [3]}, "'tools' is .*expected a list of objects"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": None}]}, "content of turn 2 is None"),
        ({"messages": [{**TURNS[1], "role": "user"}]}, "an assistant calls tools"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"name": ""}]}]}, "turn 2 has the call"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}]},
         "turn 2 has the call .* expected a function's name and its arguments"),
        ({"messages": [{**TURNS[2], "name": 7}]}, "names and ids are text"),
        ({"messages": [{**TURNS[2], "tool_call_id": 7}]}, "names and ids are text"),
        ({"messages": [TURNS[0], {"role": "assistant", "tool_calls": [{**CALL, "id": 7}]}]}, "a call with the id 7;"),
    ],
)  # fmt: skip
def test_bad_calls_are_rejected(folder, change, message):
    with pytest.raises(BadSample, match=rf"rows\.json, row 1: .*{message}"):
        folder.read([ROW, {**ROW, **change}])[1]


def test_calls_and_results_keep_their_ids(folder, models):
    """Templates of Mistral's models require ids."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "abc", "type": "function", "function": CALL}]}
    source = folder.read(
        [{"tools": [TOOL], "messages": [TURNS[0], called, {**TURNS[2], "tool_call_id": "abc"}, TURNS[3]]}]
    )
    assert source[0].turns[1].calls[0]["id"] == source[0].turns[2].call == "abc"
    asking = TEMPLATE.replace("'<call>'", "'<call>' + call.id").replace(
        "m.role +", "m.role + (m.name or '') + (m.tool_call_id or '') +"
    )
    text_encoder = encoder(models, template=asking)
    text = text_encoder.tokenizer.decode(text_encoder.encode(source[0]).input_ids)
    assert "<call>abcweather" in text and "<|im_start|>toolweatherabc\ndry" in text


def test_template_without_tools_is_rejected(folder, models):
    silent = TEMPLATE.replace("{%- if tools %}", "{%- if false %}")
    with pytest.raises(BadSample, match="the chat template does not support tools, but the row has some"):
        encoder(models, template=silent).encode(folder.read([ROW])[0])
    silent = TEMPLATE.replace("m.tool_calls or []", "[]")
    with pytest.raises(BadSample, match="does not support tool calls, but an assistant calls 'weather'"):
        encoder(models, template=silent).encode(folder.read([{"messages": TURNS}])[0])
