"""The process in which reward functions run. A script of the standard library alone: it starts in a moment, and what a
user's file imports is all that it holds.

    python worker.py FD PID FOLDER      FD: a socket to the trainer, PID: the trainer, FOLDER: of the functions' file

It is two processes in a group of their own. The first runs nothing but a look at the trainer and at the second, so that
both end with a trainer that was killed, whatever code the second hangs in (a regular expression holds Python's lock as
long as it searches). The second reads lines of JSON and answers each with one:

    {"path", "source", "functions"}                              the file's text, run once
        -> {"needs": function -> what it must be given, "beside": file -> SHA-256, of what it imported of its folder}
           | {"error"} | {"raised"}
    {"function", "completions", "columns", "arguments"}
        -> {"values": [number or text that says what it is]} | {"error"} | {"raised"}
    {"function", ..., "apart": true} -> the same, of each row alone: what a trainer asks where a batch raised

A line and its answer have the same "turn", so that what a function writes to the socket is not taken for an answer.
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

LOOK = 0.5  # seconds between looks at the trainer
SHOWN = 300  # characters of an error or of a value that is no number


def main(handle: int, trainer: int, folder: str) -> None:
    child = os.fork()
    if child:
        os.close(handle)
        _watch(child, trainer)
    sys.path[0] = folder  # not this script's folder: a user's `import table` means the user's
    sys.dont_write_bytecode = True
    # what the functions' file forks holds no line to the trainer, which then sees this process end
    os.register_at_fork(after_in_child=lambda: os.dup2(os.open(os.devnull, os.O_RDWR), handle))
    _serve(socket.socket(fileno=handle))


def _watch(child: int, trainer: int) -> NoReturn:
    while os.getppid() == trainer:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        time.sleep(LOOK)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve(trainer: socket.socket) -> None:
    functions: dict[str, Callable[..., Any]] = {}
    path, answer, asked_of = "", dict[str, Any](), os.getpid()
    for line in trainer.makefile("rb"):
        asked = json.loads(line)
        try:
            if "source" in asked:
                path = asked["path"]
                functions = _load(path, asked["source"], asked["functions"])
                needs = {name: sorted(_needed(one)) for name, one in functions.items()}
                answer = {"needs": needs, "beside": _beside(os.path.dirname(path))}
            else:
                answer = {"values": _values(functions[asked["function"]], asked, path)}
        except _Wrong as cause:
            answer = {"error": str(cause)}
        # sys.exit() in a function as well; what ends the process for good is seen from outside
        except BaseException as cause:
            answer = {"raised": _told(cause, path)}
        if os.getpid() != asked_of:  # a fork that came back: who was asked answers
            os._exit(0)
        trainer.sendall(json.dumps({"turn": asked["turn"], **answer}).encode() + b"\n")


class _Wrong(Exception):
    """What a function does that is no answer; the sentence that follows its name."""


class _Given(SourceFileLoader):
    """Finds and runs one module, whose text was handed over: what is run is what was hashed."""

    def __init__(self, path: str, source: str) -> None:
        super().__init__("reward_functions", path)
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec")


def _load(path: str, source: str, names: list[str]) -> dict[str, Callable[..., Any]]:
    sys.meta_path.insert(0, _Given(path, source))
    module = importlib.import_module("reward_functions")
    for name in names:
        if not callable(getattr(module, name, None)):
            there = [key for key, one in vars(module).items() if inspect.isfunction(one) and not key.startswith("_")]
            raise _Wrong(f"has no function {name!r}; it has {', '.join(there) or 'none'}")
    return {name: getattr(module, name) for name in names}


def _beside(folder: str) -> dict[str, str]:
    """SHA-256 of each file below the folder that was imported, by its name there; not of libraries installed below."""
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


def _values(function: Callable[..., Any], asked: dict[str, Any], path: str) -> list[Any]:
    completions, columns = asked["completions"], asked["columns"]
    accepted = inspect.signature(function).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in accepted):
        columns = {name: columns[name] for name in columns if name in {one.name for one in accepted}}
    if lacks := sorted(_needed(function) - {*columns, *asked["arguments"]}):
        have = ", ".join(sorted(asked["columns"])) or "none"
        raise _Wrong(f"takes {', '.join(lacks)}, and the columns of the rows are {have}")
    if not asked.get("apart"):
        return _called(function, completions, columns | asked["arguments"])
    values = []
    for row in range(len(completions)):
        alone = {name: column[row : row + 1] for name, column in columns.items()}
        try:
            values += _called(function, completions[row : row + 1], alone | asked["arguments"])
        except _Wrong as cause:
            values.append(str(cause))
        except Exception as cause:
            values.append(_told(cause, path))
    return values


def _needed(function: Callable[..., Any]) -> set[str]:
    """Parameters without a default, beside the completions."""
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    there = inspect.signature(function).parameters.values()
    return {one.name for one in there if one.default is one.empty and one.kind not in rest} - {"completions"}


def _called(function: Callable[..., Any], completions: list[str], arguments: dict[str, Any]) -> list[Any]:
    """The values of a call. The function gets copies, and what it returns is counted against the completions that it
    was asked about: one that empties or sorts its list would be counted against what it left of it."""
    count = len(completions)
    returned = function(completions=[*completions], **copy.deepcopy(arguments))
    if isinstance(returned, str | bytes | dict | set | frozenset) or not hasattr(returned, "__iter__"):
        raise _Wrong(f"returned {_short(returned)} where a list of {count} numbers belongs")
    values = [_number(one) for one in islice(returned, count + 1)]  # a generator may never end
    if len(values) != count:
        number = len(returned) if hasattr(returned, "__len__") else len(values)
        many = f"more than {count}" if number == count + 1 and not hasattr(returned, "__len__") else str(number)
        raise _Wrong(f"returned {many} values for {count} completions")
    return values


def _number(value: Any) -> float | str:
    """A number, NumPy's and torch's too; of anything else what it is."""
    if not isinstance(value, str | bytes) and hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    return f"returned {_short(value)}, which is no number"


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _told(cause: BaseException, path: str) -> str:
    """What a function raised, and the last line of its file that it came through; a `plain` sentence as it is.

    The error is the user's too: its text may raise, never fit, or be no text, and all of that is said."""
    kind = type.__dict__["__name__"].__get__(type(cause))  # a metaclass may have another idea of the name
    try:
        text = str.__getitem__(str(cause), slice(8 * SHOWN))  # of a subclass of str plain text
        if getattr(cause, "plain", False):
            return text[:SHOWN]
        text = " ".join(f"{kind}: {text}".split())[:SHOWN]
    except BaseException as second:
        another = type.__dict__["__name__"].__get__(type(second))
        text = f"{kind}, whose text cannot be read: it raises {another}"
    frames = traceback.walk_tb(BaseException.__dict__["__traceback__"].__get__(cause))
    lines = [number for frame, number in frames if frame.f_code.co_filename == path]
    line = SyntaxError.__dict__["lineno"].__get__(cause) if isinstance(cause, SyntaxError) else None
    line = line if isinstance(line, int) else lines[-1] if lines else None
    return f"raised {text} (line {line})" if line else f"raised {text}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
