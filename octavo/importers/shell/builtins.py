"""Commands of the shell that change variables: assignments, ``export``, ``local``, ``unset``, ``read``, ``(( ))``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.importers.shell.expansion import WORD_COST, Expander
from octavo.importers.shell.syntax import Assignment, Function, Item
from octavo.importers.shell.values import Variable, Word

VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SUM_OF = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:([-+*/%]?)=(?!=)\s*([^=]+?)|(\+\+|--))\s*")
ON_CONDITION = "whether it is executed is only known when the script runs; it is ignored"
RUN = "what it sets is only known when the script runs"
BUILTINS = ("unset", "set", "shift", "read", "mapfile", "readarray", "getopts", "printf", "let", "shopt", "trap")
_NO_FUNCTION = "a shell accepts local only in functions, and sets nothing"


class ShellExit(Exception):
    """``exit``, or ``return`` from a function or a sourced file."""

    def __init__(self, ends_script: bool) -> None:
        super().__init__()
        self.ends_script = ends_script


@dataclass
class Command:
    """One command.

    environment  assignments before it (``A=1 torchrun``)
    exports      number of entries of `Script.exports` before it
    within       the conditions and loops around it, which were not evaluated
    """

    words: list[Word]
    environment: dict[str, Word]
    exports: int
    enclosing: tuple[str, ...] = ()


@dataclass
class Script:
    """The result of reading a script.

    commands  in the order of execution
    exports   changes of the environment: (name, value; None: removed)
    unread    (line, text, why)
    arrays    words of each array that holds flags at the end of the script
    """

    commands: list[Command] = field(default_factory=list)
    exports: list[tuple[str, Word | None]] = field(default_factory=list)
    unread: list[tuple[int, str, str]] = field(default_factory=list)
    arrays: list[list[Word]] = field(default_factory=list)

    def environment(self, command: Command) -> dict[str, Word]:
        """Return the environment of a command, as far as this script sets it."""
        variables: dict[str, Word] = {}
        for name, word in self.exports[: command.exports]:
            if word is None:
                variables.pop(name, None)
            else:
                variables[name] = word
        return variables | command.environment


@dataclass
class Frame:
    """A function or a sourced file that is being executed."""

    saved: dict[str, Variable | None] = field(default_factory=dict)
    open_journals: int = 0
    may_have_returned: bool = False  # whether it may have ended already
    name: str = ""
    function: Function | None = None


class Builtins(Expander):
    """Executes builtins on variables.

    enclosing   the conditions and loops around the current command that are not evaluated
    skip_depth  depth of commands that a shell would skip
    open_files  the files being read: name, text, and the line that sources it
    """

    def __init__(self, text: str, known: Mapping[str, str], source: str) -> None:
        super().__init__(known, source)
        self.script = Script()
        self.exported: dict[str, bool] = {}
        self.all_exported = False
        self.lastpipe = False  # lastpipe: the last command of a pipe runs in the shell itself
        self.set_positional = 0  # how often set gave arguments
        self.frames = [Frame()]
        self.enclosing: list[str] = []
        self.skip_depth = 0
        self.quiet_depth = 0
        self.open_files: list[tuple[str, str, int]] = [("", text, 0)]

    def report_unread(self, line: int, text: str, why: str) -> None:
        if self.quiet_depth:
            return
        _, _, sourced = self.open_files[-1]
        if sourced:
            name = self.open_files[-1][0]
            line, text = sourced, f"{name}: {text}"
        self.script.unread.append((line, text, why))

    def report_line(self, line: int) -> int:
        return self.open_files[-1][2] or line

    def mark_all_unsure(self, item: Item, why: str) -> None:
        """Record a command that is not followed and may set any variable."""
        self.num_changes += 1
        self.report_unread(item.line, item.text, why)
        self.charge(WORD_COST * len(self.variables))
        self.mark_unsure(list(self.variables), self.report_line(item.line))

    def exported_value(self, name: str) -> Word | None:
        variable = self.variables.get(name)
        if variable is None or not self.exported.get(name) or variable.pieces is None:
            return None
        return self.join(variable.pieces, self.current_line) if variable.pieces else Word("", self.current_line)

    def run_arithmetic(self, whole: Word, item: Item) -> bool | None:
        """Evaluate ``(( ))`` and ``let``; a single assignment is followed."""
        match = _SUM_OF.fullmatch(whole.text) if not whole.open else None
        if match is None:
            value, _, unsure = self.evaluate_arithmetic(whole)
            if any(sign in whole.text for sign in ("=", "++", "--")):
                self.report_unread(item.line, item.text, RUN)
            return None if value is None or unsure else value != 0
        name, sign, text = match[1], match[2] or (match[4] or "")[:1], match[3] or "1"
        value, needed, unsure = self.evaluate_arithmetic(
            Word(f"{name} {sign} ({text})" if sign else text, whole.line, (), whole.unsure)
        )
        if value is None:
            self.mark_unknown([name])
            self.report_unread(item.line, item.text, RUN)
        else:
            self.assign_and_export(name, [Word(str(value), self.current_line, (), unsure)])
        return None

    def assign_and_export(self, name: str, pieces: list[Word], append: bool = False) -> None:
        """Assign a variable, and update the environment if it is exported."""
        self.assign(name, pieces, append)
        if self.all_exported or self.exported.get(name):
            self.set_exported(name, True)
            self.script.exports.append((name, self.exported_value(name)))

    def set_exported(self, name: str, exported: bool) -> None:
        if self.open_journals:
            self.journal.append((self.exported, name, self.exported.get(name)))
        self.exported[name] = exported

    def run_assignment(self, node: Assignment, value: list[Word] | None = None) -> None:
        """Execute an assignment. ``value``: its value or elements, if they are already expanded."""
        if node.name in self.readonly:
            return
        if node.index is not None:
            self.mark_unknown([node.name])
            self.report_unread(node.line, f"{node.name}[{node.index}]=...", RUN)
        elif node.elements is not None:
            items = self.expand_words(node.elements) if value is None else value
            if any(re.match(r"\[[^\]]*\]\+?=", word.text) for word in items):
                self.mark_unknown([node.name])
            else:
                self.assign_array(node.name, items, node.append)
        else:
            self.assign_and_export(node.name, self.expand_pieces(node.value) if value is None else value, node.append)

    def run_declaration(self, name: str, words: Sequence[Word | Assignment], item: Item) -> bool | None:
        options = "".join(w.text[1:] for w in words if isinstance(w, Word) and w.text.startswith("-"))
        if "f" in options or "p" in options or any(isinstance(w, Word) and w.text.startswith("+") for w in words):
            return None
        if name == "local" and not any(frame.name for frame in self.frames):
            self.num_changes += 1
            self.report_unread(item.line, item.text, _NO_FUNCTION)
            return None
        if "n" in options:  # a reference to another variable: assignments to it change that one
            self.mark_all_unsure(item, RUN)
        if set(options) & set("nilucA"):
            self.report_unread(item.line, item.text, RUN)
            self.mark_unknown(
                [
                    w.name if isinstance(w, Assignment) else w.text
                    for w in words
                    if not isinstance(w, Word) or w.text.isidentifier()
                ]
            )
            return None
        frame = self.frames[-1]
        # A shell expands all of them before it assigns the first: in local A=1 B=$A, A is the former value.
        values = {
            id(word): self.expand_words(word.elements) if word.elements is not None else self.expand_pieces(word.value)
            for word in words
            if isinstance(word, Assignment)
        }
        for word in words:
            target, value = word, None
            if isinstance(word, Word):
                if word.text.startswith("-"):
                    continue
                value = VALUE.fullmatch(word.text)
                label = value[1] if value else word.text
                if word.open and not value:
                    self.num_changes += 1
                    self.report_unread(item.line, item.text, RUN)
                if not label.isidentifier() or (word.open and not value):
                    continue
            else:
                label = word.name
            if (
                name in ("local", "declare", "typeset")
                and frame.name
                and "g" not in options
                and label not in frame.saved
            ):
                if frame.open_journals == self.open_journals:
                    frame.saved[label] = self.variables.get(label)
                if value is None and isinstance(word, Word) and label not in self.forced:
                    self.store_variable(label, Variable())
            if isinstance(target, Assignment):
                self.run_assignment(target, values[id(target)])
            elif value:
                self.assign_and_export(label, [Word(value[2], target.line, target.open, target.unsure)])
            if name == "export" or "x" in options:
                self.num_changes += 1
                self.set_exported(label, True)
                self.script.exports.append((label, self.exported_value(label)))
            if name == "readonly" or "r" in options:
                if self.open_journals:
                    self.report_unread(item.line, item.text, ON_CONDITION)
                else:
                    self.readonly.add(label)
        return True

    def _unset(self, words: list[Word], item: Item) -> bool | None:
        for word in words:
            if word.open or "[" in word.text:
                self.mark_unknown([word.text.partition("[")[0]] if not word.open else [])
                self.num_changes += 1
                self.report_unread(item.line, item.text, RUN)
            elif word.text in self.forced or word.text in self.readonly or word.text.startswith("-"):
                continue
            elif word.text in self.functions and word.text not in self.variables:
                if self.open_journals:
                    self.journal.append((self.functions, word.text, self.functions[word.text]))
                del self.functions[word.text]
                self.num_changes += 1
            else:
                self.store_variable(word.text, Variable())
                self.set_exported(word.text, False)
                self.script.exports.append((word.text, None))
        return True

    def _set(self, words: list[Word], item: Item) -> bool | None:
        texts = [word.text for word in words]
        if texts and texts[0] in ("-a", "+a"):
            self.all_exported = texts[0] == "-a"
        elif "allexport" in texts:
            self.all_exported = texts[texts.index("allexport") - 1] == "-o"
        if "--" in texts or (texts and texts[0][:1] not in ("-", "+")):
            rest = words[texts.index("--") + 1 :] if "--" in texts else words
            self.positional = None if any(word.open for word in rest) else rest
            self.set_positional += 1
            self.num_changes += 1
            if self.enclosing:
                self.report_unread(item.line, item.text, ON_CONDITION)
        return True

    def _shopt(self, words: list[Word], item: Item) -> bool | None:
        texts = [word.text for word in words]
        if "-s" in texts or "-u" in texts:
            changed = {"nocasematch", "lastpipe"} & set(texts)
            if changed and (self.enclosing or self.skip_depth):
                self.num_changes += 1
                self.report_unread(item.line, item.text, ON_CONDITION)
            elif changed:
                self.case_sensitive = "-u" in texts if "nocasematch" in changed else self.case_sensitive
                self.lastpipe = "-s" in texts if "lastpipe" in changed else self.lastpipe
        return True

    def _trap(self, words: list[Word], item: Item) -> bool | None:
        """A trap that runs at errors or before each command may change anything; one at the end changes nothing."""
        if {word.text.upper().removeprefix("SIG") for word in words[1:]} & {"ERR", "DEBUG", "RETURN"} and words[0].text:
            self.mark_all_unsure(item, RUN)
        return True

    def _shift(self, words: list[Word], item: Item) -> bool | None:
        self.num_changes += 1
        if self.positional is not None and not words and not any(word.open for word in self.positional[:1]):
            self.positional = self.positional[1:]
        else:
            self.positional = None
        return None

    def _read(self, words: list[Word], item: Item) -> bool | None:
        """``read``, ``mapfile``, ``getopts``: input that is only known when the script runs."""
        self.mark_unknown([word.text for word in words if word.text.isidentifier()])
        self.report_unread(item.line, item.text, RUN)
        return None

    _mapfile = _readarray = _getopts = _read

    def _printf(self, words: list[Word], item: Item) -> bool | None:
        if words and words[0].text == "-v":
            return self._read(words[1:2], item)
        return True

    def _let(self, words: list[Word], item: Item) -> bool | None:
        status: bool | None = None
        for word in words:
            status = self.run_arithmetic(word, item)
        return status
