"""An entry of `rl.rewards`: a reward with its weight and arguments.

    exact_match                                                a built-in function (`builtin.py`)
    {reward: format, pattern: "<think>.*</think>.*", weight: 0.5}
    rewards.py:score                                           a function of a file
    {reward: rewards.py:score, arguments: {bonus: 2}}          with keyword arguments of any name
    {reward: ./reward_model, load_in_fp8: rowwise}             a folder with a sequence classification model
    {reward: "python:score", weight: 0.5}                      a function that a program passes to `octavo.run`

Paths are relative to the configuration's folder.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.base.safe_read import printable, read_text
from octavo.config.sections.text_types import python_name
from octavo.rl.rewards import python_functions
from octavo.rl.rewards.builtin import BUILTIN

COMMON = ("reward", "name", "weight")
OF_FUNCTIONS = ("arguments",)
OF_MODELS = ("load_in_fp8", "batch")
_ENDS = 1 << 20  # bytes at the start and end of a file that its digest covers
_BUILTIN_FILE = Path(__file__).with_name("builtin.py")


class RewardError(ValueError):
    """A reward cannot be used, or did not return numbers. `bad`: (row, name of the reward, reason) of each such row."""

    def __init__(self, message: str, bad: Sequence[tuple[int, str, str]] = ()) -> None:
        super().__init__(message)
        self.bad = list(bad)

    @property
    def quotes(self) -> bool:
        """Whether the message may quote a row or a completion."""
        return bool(self.bad)

    @property
    def told(self) -> str:
        """The message without quotes of rows or completions, for runs whose files are encrypted."""
        names = ", ".join(sorted({name for _, name, _ in self.bad}))
        return f"reward {printable(names)} returned no number for {len({row for row, *_ in self.bad})} completions"


@dataclass(frozen=True)
class Entry:
    """One reward. `kind`: builtin, function, python or model; `path`: the file of the function, folder of the model, or
    `python:NAME`; `source`: the file's text, read once; `arguments`: keyword arguments of a function, settings of a
    model."""

    name: str
    reward: str
    kind: str
    path: Path
    weight: float = 1.0
    arguments: dict[str, Any] = field(default_factory=dict)
    function: str = ""
    source: str = ""

    def digest(self, imported: Mapping[str, str]) -> dict[str, Any]:
        """Return the reward as JSON: text, weight, arguments, and the SHA-256 of its file or folder. `imported`: file
        -> SHA-256 of each file that the function's file imported."""
        if self.kind == "builtin":
            content = ""
        elif self.kind == "model":
            content = _folder(self.path)
        else:
            content = _hash(self.source + "".join(f"\0{name}\0{imported[name]}" for name in sorted(imported)))
        return {
            "name": self.name,
            "reward": self.reward,
            "weight": self.weight,
            "arguments": self.arguments,
            "sha256": content,
        }


def read_entries(values: Sequence[Any], directory: Path) -> list[Entry]:
    """Parse the entries of a configuration. Raises `RewardError`, which names the entry, its value and the fix."""
    if not values:
        raise RewardError(
            f"rl.rewards is empty; name at least one of {', '.join(BUILTIN)}, FILE.py:FUNCTION or a folder"
        )
    entries = [_entry(value, directory) for value in values]
    for number, entry in enumerate(entries):
        if entry.name in [other.name for other in entries[:number]]:
            raise RewardError(
                f"rl.rewards has two named {entry.name!r}; give one of them another: {{reward: {entry.reward}, name: "
                f"{entry.name}_2}}"
            )
    return entries


def _entry(spec: Any, directory: Path) -> Entry:
    # `reward` decides the kind: the name of a built-in, FILE.py:FUNCTION, else a model folder.
    raw: Any = {"reward": spec} if isinstance(spec, str) else spec
    if not isinstance(raw, Mapping) or not isinstance(raw.get("reward"), str) or not raw["reward"]:
        raise RewardError(
            f"rl.rewards has the entry {_shown(spec)}; expected a name, or {{reward: NAME, weight: 1.0, ...}}"
        )
    reward, weight = raw["reward"], raw.get("weight", 1.0)
    if type(weight) not in (int, float) or not math.isfinite(weight):
        raise RewardError(f"reward {reward} has the weight {_shown(weight)}; expected a finite number")
    name = raw.get("name")
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"[\w.:-]{1,64}", name)):
        raise RewardError(f"reward {reward} has the name {_shown(name)}; expected up to 64 letters, digits and _ . : -")
    arguments: dict[str, Any] = {str(key): value for key, value in raw.items() if key not in COMMON}
    if reward in BUILTIN:
        return _builtin(reward, name or reward, float(weight), arguments)
    if python_name(reward) is not None:
        return _python_function(reward, name, float(weight), arguments)
    file, colon, function = reward.rpartition(":")
    if colon and file.endswith(".py"):
        path = (directory / file).resolve()
        if not function.isidentifier():
            raise RewardError(f"reward {reward}: {function!r} is not the name of a function; write FILE.py:FUNCTION")
        arguments = _function_arguments(reward, arguments)
        if not path.exists():
            raise RewardError(
                f"reward {_shown(reward)}: there is no file {printable(path)}; paths are relative to the folder of the "
                "configuration, on the command line to the working directory"
            )
        source = read_text(path, RewardError, encoding="utf-8-sig")
        return Entry(name or function, reward, "function", path, float(weight), arguments, function, source)
    path = (directory / reward).resolve()
    if not (path / "config.json").is_file():
        raise RewardError(
            f"there is no reward {_shown(reward)}: not one of {', '.join(BUILTIN)}, not FILE.py:FUNCTION, and {path} "
            "is not a model folder (it has no config.json)"
        )
    _refuse_unknown(reward, arguments, OF_MODELS)
    return Entry(name or path.name, reward, "model", path, float(weight), _json(reward, arguments))


def _function_arguments(reward: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the keyword arguments of a function from the settings of its entry. Raises RewardError."""
    _refuse_unknown(reward, settings, OF_FUNCTIONS)
    if not isinstance(arguments := settings.get("arguments", {}), Mapping):
        raise RewardError(f"reward {reward} has the arguments {_shown(arguments)}; expected a mapping of names")
    if clash := sorted({"completions", "self"} & arguments.keys()):
        raise RewardError(f"reward {reward} has the argument {clash[0]!r}, which Octavo passes; remove it")
    return _json(reward, {**arguments})


def _python_function(reward: str, name: str | None, weight: float, settings: Mapping[str, object]) -> Entry:
    if not python_functions.is_held(reward):
        raise RewardError(
            f"reward {_shown(reward)} is a function that a Python program passed to octavo.run, and it is not in this "
            "process; continue in that program, or write FILE.py:FUNCTION"
        )
    arguments, source = _function_arguments(reward, settings), python_functions.source_of(reward)
    return Entry(name or str(python_name(reward)), reward, "python", Path(reward), weight, arguments, reward, source)


def _builtin(reward: str, name: str, weight: float, arguments: dict[str, Any]) -> Entry:
    function, needed = BUILTIN[reward]
    known = [key for key in inspect.signature(function).parameters if key not in ("completions", "answer")]
    _refuse_unknown(reward, arguments, known)
    for key in needed:
        if not isinstance(arguments.get(key), str) or not arguments[key]:
            raise RewardError(f"reward {reward} has the {key} {_shown(arguments.get(key))}; give it a text: "
                              f"{{reward: {reward}, {key}: ...}}")  # fmt: skip
    if "pattern" in arguments:
        try:
            re.compile(arguments["pattern"])
        except re.error as cause:
            raise RewardError(
                f"reward {reward}: the pattern {_shown(arguments['pattern'])} is not a regular expression ({cause})"
            ) from cause
    tolerance = arguments.get("tolerance", 0.0)
    if type(tolerance) not in (int, float) or not 0 <= tolerance < math.inf:
        raise RewardError(f"reward {reward} has the tolerance {_shown(tolerance)}; expected a number from 0")
    if reward == "math" and find_spec("math_verify") is None:
        raise RewardError("reward math needs math-verify, which is not installed: pip install 'octavo[math]'")
    source = _BUILTIN_FILE.read_text(encoding="utf-8")
    return Entry(name, reward, "builtin", _BUILTIN_FILE, weight, arguments, reward, source)


def _refuse_unknown(reward: str, arguments: Mapping[str, object], known: Sequence[str]) -> None:
    if unknown := sorted(set(arguments) - set(known)):
        takes = ", ".join(["name", "weight", *known])
        raise RewardError(f"reward {reward} has the argument {unknown[0]!r}, which it does not take; it takes {takes}")


def _json(reward: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(arguments, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as cause:
        raise RewardError(f"reward {reward} has arguments that JSON cannot hold ({cause})") from cause


def _hash(content: str | bytes) -> str:
    return sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _folder(path: Path) -> str:
    """Return a digest of a folder: name, size, and the first and last megabyte of each file. Gigabytes of weights are
    not read at every start; a model that was trained further differs in every tensor."""
    total = sha256()
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        size = file.stat().st_size
        total.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogateescape"))
        with file.open("rb") as content:
            total.update(content.read(_ENDS))
            content.seek(max(_ENDS, size - _ENDS))
            total.update(content.read(_ENDS))
    return total.hexdigest()


def _shown(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."
