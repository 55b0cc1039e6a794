"""Tools that an assistant may call, its calls, and their results, as chat templates take them.

    {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {...}}}],
     "messages": [{"role": "user", "content": "Rain in Bern?"},
                  {"role": "assistant", "content": null, "tool_calls":
                      [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]},
                  {"role": "tool", "name": "weather", "content": "dry"},
                  {"role": "assistant", "content": "No."}]}

A call may have an `id`, and its result the `tool_call_id`; some templates require them. `tools`, the `arguments` of a
call and all calls may be JSON text, which tables without a type for them use. ShareGPT turns write them as
`function_call` (JSON of one call or several) and `observation`.
"""

from __future__ import annotations

from typing import Any

from octavo.base.safe_read import Unreadable, parse_json
from octavo.data.errors import RowProblem, quote_value
from octavo.data.rows.missing_values import check_numbers

Call = dict[str, Any]
"""{"type": "function", "function": {"name": text, "arguments": object}}, and "id" if the row has one"""


def parse_tools(value: object) -> tuple[dict[str, object], ...]:
    """Return the tools under the key `tools` of a row. Raises `RowProblem`."""
    tools = _parse_text(value, "'tools'")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowProblem(f"'tools' is {quote_value(value)}; expected a list of objects, one for each tool")
    check_numbers(tools, "'tools'")
    return tuple(tools)


def parse_calls(value: object, where: str) -> tuple[Call, ...]:
    """Return the calls of a turn. Raises `RowProblem`."""
    if value in (None, "", []):
        return ()
    calls = _parse_text(value, where)
    return tuple(_parse_call(call, where) for call in (calls if isinstance(calls, list) else [calls]))


def _parse_call(value: object, where: str) -> Call:
    fields = value if isinstance(value, dict) else {}
    inner = fields.get("function", fields)
    name = inner.get("name") if isinstance(inner, dict) else None
    arguments = _parse_text(inner.get("arguments", {}), f"arguments of {where}") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise RowProblem(f"{where} has the call {quote_value(value)}; expected a function's name and its arguments")
    check_numbers(arguments, f"a call of {where}")
    identity = fields.get("id")
    if not isinstance(identity, str | None):
        raise RowProblem(f"{where} has a call with the id {quote_value(identity)}; expected text")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else {**call, "id": identity}


def _parse_text(value: object, where: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, where, Unreadable, None)
    except Unreadable as cause:
        raise RowProblem(str(cause)) from cause
