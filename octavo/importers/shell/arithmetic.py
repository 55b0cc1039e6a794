"""Evaluates the integer arithmetic of shell scripts, ``$((64 / n))`` and ``$(expr 16 / $n)``, without running them."""

from __future__ import annotations

import ast
import re

#: maximum characters of an expression, and largest number that is computed
_LENGTH, _LARGEST = 200, 1 << 62
#: syntax that a shell and Python read differently: n++, 16#ff
_OTHERWISE = re.compile(r"\+\+|--|[#_]")


def evaluate(text: str) -> int | None:
    """Return the value of an expression of whole numbers with + - * / % and brackets, by the rules of a shell: division
    rounds towards zero. None for anything else."""
    if len(text) > _LENGTH or _OTHERWISE.search(text):
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        result = -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.BinOp):
        result = _apply(node.op, _value(node.left), _value(node.right))
    else:
        raise ValueError("no sum")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


def _apply(sign: ast.operator, left: int, right: int) -> int:
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
