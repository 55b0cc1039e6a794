"""The process in which reward functions run. It uses only the standard library, so that it starts quickly and its
memory contains only what a user's file imports.

    python worker.py FD PID FOLDER      FD: a socket to the trainer, PID: the trainer, FOLDER: the folder of the file

It consists of two processes in a separate process group. The first only watches the trainer and the second process, so
that both end when the trainer is killed, even if the second hangs (a regular expression search holds the GIL). The
second reads lines of JSON and answers each with one line:

    {"path", "source", "functions"}                              the text of the file, run once
        -> {"needs": function -> required parameters, "imported": file -> SHA-256 of each file of the folder that it
            imported} | {"error"} | {"raised"}
    {"function", "completions", "columns", "arguments"}
        -> {"values": [number, or a text that describes the returned value]} | {"error"} | {"raised"}
    {"function", ..., "by_row": true} -> the same with one call per row, after a call for the batch has raised

A line and its answer have the same "turn", so that a line which a function writes to the socket is not a valid answer.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import json
import os
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from itertools import islice
from typing import Any, NoReturn

POLL_S = 0.5  # seconds between checks of the trainer
SHOWN = 300  # characters of an error's text, or of a value that is not a number


def main(handle: int, trainer: int, folder: str) -> None:
    child = os.fork()
    if child:
        os.close(handle)
        _watch(child, trainer)
    sys.path[0] = folder  # a user's `import table` must find the user's file
    sys.dont_write_bytecode = True
    # Children of user code must not keep the socket open, or the trainer would not notice when this process ends.
    os.register_at_fork(after_in_child=lambda: os.dup2(os.open(os.devnull, os.O_RDWR), handle))
    _serve(socket.socket(fileno=handle))


def _watch(child: int, trainer: int) -> NoReturn:
    while os.getppid() == trainer:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(trainer: socket.socket) -> None:
    functions: dict[str, Callable[..., Any]] = {}
    path, answer, served_by = "", dict[str, Any](), os.getpid()
    for line in trainer.makefile("rb"):
        request = json.loads(line)
        try:
            if "source" in request:
                path = request["path"]
                functions = _load(path, request["source"], request["functions"])
                needs = {name: sorted(required_parameters(function)) for name, function in functions.items()}
                answer = {"needs": needs, "imported": _imported_files(os.path.dirname(path))}
            else:
                answer = {"values": call_function(functions[request["function"]], request, path)}
        except InvalidResult as cause:
            answer = {"error": str(cause)}
        # including sys.exit() in a function; the trainer notices a process that ends
        except BaseException as cause:
            answer = {"raised": describe_error(cause, path)}
        if os.getpid() != served_by:  # a child forked by the function returned: only the parent answers
            os._exit(0)
        trainer.sendall(json.dumps({"turn": request["turn"], **answer}).encode() + b"\n")


class InvalidResult(Exception):
    """The result of a function is unusable; the message follows the name of the function."""


class _SourceLoader(SourceFileLoader):
    """Finds and runs one module from the given text, so that the code that runs is the code that was hashed."""

    def __init__(self, path: str, source: str) -> None:
        super().__init__("reward_functions", path)
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec")


def _load(path: str, source: str, names: list[str]) -> dict[str, Callable[..., Any]]:
    sys.meta_path.insert(0, _SourceLoader(path, source))
    module = importlib.import_module("reward_functions")
    for name in names:
        if not callable(getattr(module, name, None)):
            public = [
                key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
            ]
            raise InvalidResult(f"has no function {name!r}; it has {', '.join(public) or 'none'}")
    return {name: getattr(module, name) for name in names}


def _imported_files(folder: str) -> dict[str, str]:
    """Return file -> SHA-256 of each imported file below the folder, except libraries that are installed there."""
    inside = os.path.join(folder, "")
    installed = tuple(os.path.join(lib, "") for lib in sysconfig.get_paths().values() if lib.startswith(inside))
    digests = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or not file.startswith(inside) or file.startswith(installed):
            continue
        if name not in ("__main__", "reward_functions") and os.path.isfile(file):
            with open(file, "rb") as content:
                digests[file[len(inside) :]] = hashlib.sha256(content.read()).hexdigest()
    return digests


def call_function(function: Callable[..., Any], request: dict[str, Any], path: str) -> list[Any]:
    """Return a number for each completion of a request, or a text that describes the value. `path` is the function's
    file, for the line of an error. Raises InvalidResult, and what the function raises unless it is called by row."""
    completions, columns = request["completions"], request["columns"]
    accepted = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        columns = {name: columns[name] for name in columns if name in {parameter.name for parameter in accepted}}
    if missing := sorted(required_parameters(function) - {*columns, *request["arguments"]}):
        have = ", ".join(sorted(request["columns"])) or "none"
        raise InvalidResult(f"takes {', '.join(missing)}, but the columns of the rows are {have}")
    if not request.get("by_row"):
        return _call(function, completions, columns | request["arguments"])
    values = []
    for row in range(len(completions)):
        row_columns = {name: column[row : row + 1] for name, column in columns.items()}
        try:
            values += _call(function, completions[row : row + 1], row_columns | request["arguments"])
        except InvalidResult as cause:
            values.append(str(cause))
        except Exception as cause:
            values.append(describe_error(cause, path))
    return values


def required_parameters(function: Callable[..., Any]) -> set[str]:
    """Return the parameters without a default, except the completions."""
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in rest} - {"completions"}


def _call(function: Callable[..., Any], completions: list[str], arguments: dict[str, Any]) -> list[Any]:
    """Call a function and return its values. It receives copies, so that changes of its lists do not affect the
    expected number of values."""
    count = len(completions)
    returned = function(completions=[*completions], **copy.deepcopy(arguments))
    if isinstance(returned, str | bytes | dict | set | frozenset) or not hasattr(returned, "__iter__"):
        raise InvalidResult(f"returned {_short(returned)} instead of a list of {count} numbers")
    values = [_number(value) for value in islice(returned, count + 1)]  # a generator may be endless
    if len(values) != count:
        number = len(returned) if hasattr(returned, "__len__") else len(values)
        many = f"more than {count}" if number == count + 1 and not hasattr(returned, "__len__") else str(number)
        raise InvalidResult(f"returned {many} values for {count} completions")
    return values


def _number(value: Any) -> float | str:
    """Convert the value to a number, also for NumPy and torch scalars, or return a text that describes it."""
    if not isinstance(value, str | bytes) and hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    return f"returned {_short(value)}, which is not a number"


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def describe_error(cause: BaseException, path: str) -> str:
    """Describe an exception with the last line of the user's file in its traceback, or return the text of a `plain`
    error.

    The class of the exception may be the user's: its text may raise, be very long, or not be a text."""
    kind = type.__dict__["__name__"].__get__(type(cause))  # a metaclass may override __name__
    try:
        text = str.__getitem__(str(cause), slice(8 * SHOWN))  # a subclass of str may override slicing
        if getattr(cause, "plain", False):
            return text[:SHOWN]
        text = " ".join(f"{kind}: {text}".split())[:SHOWN]
    except BaseException as second:
        another = type.__dict__["__name__"].__get__(type(second))
        text = f"{kind}, whose text cannot be read: reading it raises {another}"
    frames = traceback.walk_tb(BaseException.__dict__["__traceback__"].__get__(cause))
    lines = [number for frame, number in frames if frame.f_code.co_filename == path]
    line = SyntaxError.__dict__["lineno"].__get__(cause) if isinstance(cause, SyntaxError) else None
    line = line if isinstance(line, int) else lines[-1] if lines else None
    return f"raised {text} (line {line})" if line else f"raised {text}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
