"""Reward functions that a program passes to `octavo.run`: called in the trainer's process, without a time limit.

A configuration names them `python:NAME`; :func:`hold` makes them available under these names while a run lasts. They
are called, and their results are checked, as the functions of a file are (`worker.py`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from octavo import checkpoint
from octavo.config.sections.text_types import python_path
from octavo.rl.rewards.worker import InvalidResult, call_function, describe_error, required_parameters
from octavo.rl.rewards.worker_client import FunctionRaised, WorkerError

Function = Callable[..., Sequence[float]]


def name_of(function: Callable[..., object]) -> str:
    """Return the name of a function; `lambda` for one without a name, the class for an object that can be called."""
    function = _unwrap(function)
    name = str(getattr(function, "__name__", type(function).__name__))
    return "lambda" if name == "<lambda>" else name


def _unwrap(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function that `functools.partial` completes."""
    while isinstance(function, partial):
        function = function.func
    return function


def check_functions(rewards: object) -> list[str]:
    """Return a sentence for each problem of the argument `rewards` of `octavo.run`, in order; none: they can be
    used."""
    if not isinstance(rewards, list | tuple):
        example = name_of(rewards) if callable(rewards) else "score"
        return [f"expected a list of functions, such as [{example}], found {_shown(rewards)}"]
    if not rewards:
        return ["it is empty; pass at least one function, or leave it out and name rewards in rl.rewards"]
    problems, positions = [], dict[str, int]()
    for number, function in enumerate(rewards):
        where = f"entry {number}"
        if isinstance(function, str):
            problems.append(
                f"{where} is the text {function!r}; write it under rl.rewards, with python:NAME for functions"
            )
        elif not callable(function):
            problems.append(f"{where} is {_shown(function)}, which cannot be called; pass a function of completions")
        elif (why := _why_not_usable(function)) is not None:
            problems.append(f"{where}, {name_of(function)}, {why}")
        elif (first := positions.setdefault(name_of(function), number)) != number:
            problems.append(f"the entries {first} and {number} are both named {name_of(function)}; rename one of them")
    return problems


def _why_not_usable(function: Function) -> str | None:
    if inspect.iscoroutinefunction(_unwrap(function)):
        return "is a coroutine function; pass one that returns its numbers"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "has no signature that Python can read; wrap it in a function of completions and columns"
    if "completions" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return f"takes ({', '.join(parameters)}); its first parameter must be named completions"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not _is_importable(_unwrap(function)):
        return f"is not in a module that can be imported, which {ranks} ranks need: move it to a file, and import it"
    return None


def _is_importable(function: Callable[..., object]) -> bool:
    """Return True for a function at the top level of a module other than the program: each rank then runs the same
    source, whose digest ranks compare."""
    module = inspect.getmodule(function)
    if module is None or module.__name__ == "__main__":
        return False
    return getattr(module, getattr(function, "__qualname__", ""), None) is function


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


_HELD: dict[str, Function] = {}  # `python:NAME` -> the function of the run in progress


@contextmanager
def hold(functions: Sequence[Function]) -> Iterator[None]:
    """Make functions available as `python:NAME` in this block, in place of all others."""
    before = {**_HELD}
    _replace({python_path(name_of(function)): function for function in functions})
    try:
        yield
    finally:
        _replace(before)


def _replace(functions: Mapping[str, Function]) -> None:
    _HELD.clear()
    _HELD.update(functions)


def is_held(reward: str) -> bool:
    """Return True if this process has the function with this name (`python:NAME`)."""
    return reward in _HELD


def source_of(reward: str) -> str:
    """Return the source of a function's module if it can be imported, else of the function, or of the class of an
    object; "" where Python has none."""
    function = _unwrap(_HELD[reward])
    try:
        if _is_importable(function):
            return inspect.getsource(inspect.getmodule(function) or function)
        return inspect.getsource(function if hasattr(function, "__name__") else type(function))
    except (OSError, TypeError):  # written at a prompt, or not in Python
        return ""


class PythonFunction:
    """A function `python:NAME`, called in this process. `needs`: its required parameters except completions."""

    def __init__(self, reward: str) -> None:
        self._function = _HELD[reward]
        self.needs = sorted(required_parameters(self._function))
        code = getattr(_unwrap(self._function), "__code__", None)
        self._file = "" if code is None else code.co_filename

    def call(
        self, completions: list[str], columns: dict[str, list[object]], arguments: Mapping[str, object]
    ) -> list[object]:
        """Call the function for a batch. Returns a number for each completion, or a text that describes its value.

        If it raises, it is called again for each row, as in a worker. Raises WorkerError for a result of the wrong
        form, and FunctionRaised if it raises for the batch but for none of its rows.
        """
        request = {"completions": completions, "columns": columns, "arguments": arguments}
        # The function may draw random numbers or set a seed, which must not change the run.
        with checkpoint.rng.preserve():
            try:
                return call_function(self._function, request, self._file)
            except InvalidResult as cause:
                raise WorkerError(str(cause)) from cause
            except Exception as cause:
                text = describe_error(cause, self._file)
                by_row = call_function(self._function, {**request, "by_row": True}, self._file)
                if not any(isinstance(value, str) for value in by_row):
                    raise FunctionRaised(f"{text}, for the batch but for none of its rows") from cause
                return by_row
