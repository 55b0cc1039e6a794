"""Finds the command of a script that trains, and converts its words to flags."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.config.yaml.document import scalar
from octavo.config.yaml.problems import Place
from octavo.importers.errors import TranslateError
from octavo.importers.shell.interpreter import Command, Script, Word
from octavo.importers.source.keys import SourceKey

_LAUNCHER = re.compile(
    r"(.*/)?(torchrun|deepspeed|accelerate|swift|megatron|llamafactory-cli|axolotl|composer|msrun|python[0-9.]*)"
)
_TRAINS = re.compile(r"(.*/)?\w*(train|sft|pretrain|finetune|pt|rlhf|trainer|dpo)\w*(\.py)?")
#: commands whose words are flags from the first on; the others start a script
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


#: maximum flags of one command; the largest framework has under 1,000
_FLAGS = 5_000


def find_training_command(script: Script, source: str) -> Command:
    """Return the one command that trains, or flags without a command: from a file of flags, or from arrays of flags
    that no command uses. A command within a condition is only used if there is no other. Raises TranslateError for none
    and for several."""
    trainings = [
        command
        for command in script.commands
        if _LAUNCHER.fullmatch(command.words[0].text) and _is_training(command.words)
    ]
    certain = [command for command in trainings if not command.enclosing]
    conditional = [command for command in trainings if command.enclosing and "a loop" not in command.enclosing]
    chosen = certain or conditional
    if len(chosen) == 1:
        return chosen[0]
    if not chosen and (flags_only := _flags_without_command(script)):
        return flags_only
    if not chosen:
        seen = ", ".join(dict.fromkeys(command.words[0].text for command in script.commands[:8])) or "no command"
        stopped = next((f" Line {line}: {why}." for line, _, why in script.unread if "stops reading" in why), "")
        raise TranslateError(
            f"{source}: no command that trains was found in this script (it has: {seen}).{stopped} Looked for "
            "torchrun, deepspeed, accelerate, swift, megatron, llamafactory-cli, axolotl, composer or python with a "
            "training script; a file of flags only (--lr 1e-4 ...) is read too."
        )
    lines = ", ".join(str(command.words[0].line or "of a file that it sources") for command in chosen)
    raise TranslateError(
        f"{source}: it starts {len(chosen)} trainings (lines {lines}), and a configuration describes one. Keep one of "
        "them."
    )


def _flags_without_command(script: Script) -> Command | None:
    """Return the flags of a file that has nothing else, or of its arrays and texts of flags (``ARGS=(--lr 1e-4)``)."""
    commands = script.commands
    if commands and all(command.words[0].text.startswith("-") for command in commands):
        if len(commands) == 1 and not commands[0].words[0].text.startswith("--"):
            return None
        words = [word for command in commands for word in command.words]
        return Command(words, commands[-1].environment, commands[-1].exports)
    if not commands and script.arrays:
        return Command([word for words in script.arrays for word in words], {}, len(script.exports))
    return None


def config_argument(words: Sequence[Word]) -> Word | None:
    """Return the configuration that a command trains from: ``axolotl train FILE``, ``composer train.py FILE``."""
    for word, following in zip(words, words[1:], strict=False):
        if _TRAINS.fullmatch(word.text) and following.text.endswith((".yaml", ".yml", ".json")):
            return following
    return None


def _is_training(words: Sequence[Word]) -> bool:
    script = next((at for at, word in enumerate(words) if word.text.endswith(".py")), 0)
    plain = [word.text for word in words[1 : max(12, script + 1)] if not word.text.startswith("-")]
    return not any(word in _OTHER for word in plain[:1]) and any(_TRAINS.fullmatch(word) for word in plain)


def parse_flags(words: Sequence[Word], source: str) -> list[SourceKey]:
    """Return every flag with its value: one word, several as a list, or true without one. ``key=value`` and
    ``+key=value`` are overrides; other words before the first flag belong to the command. Raises TranslateError for
    too many flags."""
    entries: list[SourceKey] = []
    at, script = 0, _script_index(words)
    while at < len(words):
        word = words[at]
        at += 1
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            values = [Word(value, word.line, word.open)] if equals else []
            while (
                not equals
                and at < len(words)
                and at != script
                and not _begins_flag(words[at].text)
                and not _all_arguments(words[at])
            ):
                values.append(words[at])
                at += 1
            # The value of a flag is known only as far as all its words are.
            missing = tuple(dict.fromkeys(name for part in values for name in part.open))
            unsure = tuple(dict.fromkeys(line for part in (word, *values) for line in part.unsure))
            bare = word.bare and not values
            read = [scalar(part.text) for part in values if part.text or part.open or equals]
            shown = "" if bare else True if not values else "" if not read else read[0] if len(read) == 1 else read
            entries.append(
                SourceKey(name.replace("-", "_"), shown, Place(source, word.line or None), missing, (), unsure, bare)
            )
        elif override := _OVERRIDE.fullmatch(word.text):
            place = Place(source, word.line or None)
            entries.append(SourceKey(override[2], scalar(override[3]), place, word.open, (), word.unsure))
    if len(entries) > _FLAGS:
        raise TranslateError(f"{source}: {len(entries)} flags are in its command, over {_FLAGS}. Give a launch script.")
    return entries


def unknown_words(words: Sequence[Word]) -> list[Word]:
    """Return words that are only known when the script runs and that belong to no flag: words before the first flag,
    and the arguments of the script (``"$@"``)."""
    first = next((at for at, word in enumerate(words) if word.text.startswith("--")), len(words))
    return [word for at, word in enumerate(words) if word.open and at and (at < first or _all_arguments(word))]


def _all_arguments(word: Word) -> bool:
    """Whether a word is ``$@``: any number of words, and not the value of the flag before it."""
    return word.text in ("$@", "$*", "${@}", "${*}")


def _script_index(words: Sequence[Word]) -> int | None:
    """Return the index of the script that a launcher starts, after the launcher's own flags."""
    if words[0].text.rpartition("/")[2] in _NO_SCRIPT:
        return None
    return next((at for at, word in enumerate(words) if word.text.endswith(".py")), None)


def _begins_flag(text: str) -> bool:
    """Whether a word begins another flag, or an override after the last flag."""
    if text.startswith("-") and len(text) > 1 and not _NUMBER.fullmatch(text):
        return True
    override = _OVERRIDE.fullmatch(text)
    return override is not None and (bool(override[1]) or "." in override[2])


def read_environment(script: Script, command: Command, source: str) -> list[SourceKey]:
    """Return the environment variables that a script sets for the command, as ``$NAME``."""
    return [
        SourceKey(f"${name}", scalar(word.text), Place(source, word.line or None), word.open, (), word.unsure)
        for name, word in script.environment(command).items()
    ]
