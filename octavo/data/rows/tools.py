"""Tools: what an assistant may call, what it calls, and what comes back, as chat templates take them.

    {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {...}}}],
     "messages": [{"role": "user", "content": "Rain in Bern?"},
                  {"role": "assistant", "content": null, "tool_calls":
                      [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]},
                  {"role": "tool", "name": "weather", "content": "dry"},
                  {"role": "assistant", "content": "No."}]}

A call may have an `id`, and what comes back its `tool_call_id`; some templates ask for them. `tools`, a call's
`arguments` and all calls may be written as text of JSON, as tables without a type for them do. In
ShareGPT turns they are `function_call` (JSON of one call or several) and `observation`.
"""

from __future__ import annotations

from typing import Any

from octavo.base.safe_read import Unreadable, parse_json
from octavo.data.errors import RowProblem, shown
from octavo.data.rows.missing_values import check_numbers

Call = dict[str, Any]
"""{"type": "function", "function": {"name": text, "arguments": object}}, and "id" where the row has one"""


def tools_of(given: Any) -> tuple[dict[str, Any], ...]:
    """The tools that a row offers, of what it has as `tools`. Raises `RowProblem`."""
    found = _json(given, "'tools'")
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise RowProblem(f"'tools' is {shown(given)}; expected a list of objects, one for each tool")
    check_numbers(found, "'tools'")
    return tuple(found)


def calls_of(given: Any, where: str) -> tuple[Call, ...]:
    """The calls of a turn. Raises `RowProblem`."""
    if given in (None, "", []):
        return ()
    found = _json(given, where)
    return tuple(_call(call, where) for call in (found if isinstance(found, list) else [found]))


def _call(given: Any, where: str) -> Call:
    inner = given.get("function", given) if isinstance(given, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    arguments = _json(inner.get("arguments", {}), f"arguments of {where}") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise RowProblem(f"{where} has the call {shown(given)}; expected a function's name and its arguments")
    check_numbers(arguments, f"a call of {where}")
    identity = given.get("id")
    if not isinstance(identity, str | None):
        raise RowProblem(f"{where} has a call with the id {shown(identity)}; expected text")
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if identity is None else {**found, "id": identity}


def _json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, where, Unreadable, None)
    except Unreadable as cause:
        raise RowProblem(str(cause)) from cause
