"""Whole-number sums of shell scripts, ``$((64 / n))`` and ``$(expr 16 / $n)``: worked out, not run."""

from __future__ import annotations

import ast
import re

#: letters of a sum, and the largest number that one is followed to
_LENGTH, _LARGEST = 200, 1 << 62
#: what a shell and Python read differently: n++, 16#ff
_OTHERWISE = re.compile(r"\+\+|--|[#_]")


def reckon(text: str) -> int | None:
    """The value of a sum of whole numbers with + - * / % and brackets, as a shell has it: division goes towards zero.
    None for anything else."""
    if len(text) > _LENGTH or _OTHERWISE.search(text):
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        found = -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.BinOp):
        found = _of_two(node.op, _value(node.left), _value(node.right))
    else:
        raise ValueError("no sum")
    if abs(found) > _LARGEST:
        raise ValueError("too large")
    return found


def _of_two(sign: ast.operator, left: int, right: int) -> int:
    if isinstance(sign, ast.Add):
        return left + right
    if isinstance(sign, ast.Sub):
        return left - right
    if isinstance(sign, ast.Mult):
        return left * right
    if isinstance(sign, ast.Div | ast.Mod):
        whole = abs(left) // abs(right) * (1 if left * right >= 0 else -1)
        return whole if isinstance(sign, ast.Div) else left - right * whole
    raise ValueError("no sum")
