"""From the words of a command to flags: which command of a script trains, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.config.document import scalar
from octavo.config.problems import Place
from octavo.translate.given import Given, TranslateError
from octavo.translate.shell import Script, Word

_LAUNCHER = re.compile(
    r"(.*/)?(torchrun|deepspeed|accelerate|swift|megatron|llamafactory-cli|axolotl|composer|msrun|python[0-9.]*)"
)
_TRAINS = re.compile(r"(.*/)?\w*(train|sft|pretrain|finetune|pt|rlhf|trainer|dpo)\w*(\.py)?")
#: of these the words are flags from the first on; the others start a script
_NO_SCRIPT = ("swift", "megatron", "llamafactory-cli", "axolotl")
_OTHER = {
    "export",
    "infer",
    "eval",
    "deploy",
    "sample",
    "app",
    "web-ui",
    "preprocess",
    "merge-lora",
    "chat",
    "inference",
}
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-\.?[0-9][\w.+-]*")


def command_of(script: Script, source: str) -> list[Word]:
    """The words of the one command that trains, or of flags that stand alone. Raises TranslateError for none and for
    several."""
    found = [words for words in script.commands if _LAUNCHER.fullmatch(words[0].text) and _trains(words)]
    if not found and len(script.commands) == 1 and script.commands[0][0].text.startswith("--"):
        return script.commands[0]
    if not found and script.commands and all(words[0].text.startswith("-") for words in script.commands):
        return [word for words in script.commands for word in words]
    if len(found) == 1:
        return found[0]
    if not found:
        seen = ", ".join(dict.fromkeys(words[0].text for words in script.commands[:8])) or "no command"
        raise TranslateError(
            f"{source}: no command that trains was found in this script (it has: {seen}). Looked for torchrun, "
            "deepspeed, accelerate, swift, megatron, llamafactory-cli, axolotl, composer or python with a training "
            "script; a file of flags alone (--lr 1e-4 ...) is read too."
        )
    lines = ", ".join(str(words[0].line or "of a file that it sources") for words in found)
    raise TranslateError(
        f"{source}: it starts {len(found)} trainings (lines {lines}), and a configuration is of one. Keep one of them."
    )


def configuration(words: Sequence[Word]) -> Word | None:
    """The file of keys that a command trains from: ``axolotl train FILE``, ``composer train.py FILE``."""
    for word, following in zip(words, words[1:], strict=False):
        if _TRAINS.fullmatch(word.text) and following.text.endswith((".yaml", ".yml", ".json")):
            return following
    return None


def _trains(words: Sequence[Word]) -> bool:
    plain = [word.text for word in words[1:12] if not word.text.startswith("-")]
    return not any(word in _OTHER for word in plain[:1]) and any(_TRAINS.fullmatch(word) for word in plain)


def flags(words: Sequence[Word], source: str) -> list[Given]:
    """Every flag with its value: one word, several as a list, or true where it has none. ``key=value`` and
    ``+key=value`` are overrides; other words before the first flag are the command's own."""
    found: list[Given] = []
    at, script = 0, _script(words)
    while at < len(words):
        word = words[at]
        at += 1
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            values = [Word(value, word.line, word.open)] if equals else []
            while not equals and at < len(words) and at != script and not _begins(words[at].text):
                values.append(words[at])
                at += 1
            missing = tuple(dict.fromkeys(name for part in values for name in part.open))
            read = [scalar(part.text) for part in values if part.text or part.open or equals]
            shown = True if not values else "" if not read else read[0] if len(read) == 1 else read
            found.append(Given(name.replace("-", "_"), shown, Place(source, word.line or None), missing))
        elif override := _OVERRIDE.fullmatch(word.text):
            found.append(Given(override[2], scalar(override[3]), Place(source, word.line or None), word.open))
    return found


def _script(words: Sequence[Word]) -> int | None:
    """Where the script stands that a launcher starts, among the launcher's own flags."""
    if words[0].text.rpartition("/")[2] in _NO_SCRIPT:
        return None
    return next((at for at, word in enumerate(words) if word.text.endswith(".py")), None)


def _begins(text: str) -> bool:
    """Whether a word begins another flag, or an override behind the last flag."""
    if text.startswith("-") and len(text) > 1 and not _NUMBER.fullmatch(text):
        return True
    override = _OVERRIDE.fullmatch(text)
    return override is not None and (bool(override[1]) or "." in override[2])


def environment(script: Script, source: str) -> list[Given]:
    """What a script gives to the environment, as ``$NAME``."""
    return [
        Given(f"${name}", scalar(word.text), Place(source, word.line or None), word.open)
        for name, word in script.exported.items()
    ]
