"""Reads a launch script without running it: its variables, and the words of each command with their lines.

Commands that a shell would certainly execute are applied to variables: assignments, ``${NAME:-default}``, arrays of
flags, arithmetic, sourced files, function calls, conditions that the script's own values decide, and loops over known
words. Changes in subshells and pipes are undone. Commands that depend on anything only known at run time
(``[ -n "$X" ] && LR=1``, ``if``, ``case``, ``while``) are ignored: variables keep their values, which become
``unsure``, and the line is listed. Commands that a shell would skip are listed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from octavo.importers.errors import TranslateError
from octavo.importers.shell import conditions
from octavo.importers.shell.builtins import BUILTINS, ON_CONDITION, RUN, VALUE, Builtins, Command, Exit, Frame, Script
from octavo.importers.shell.expansion import LEVELS, STEPS, glob
from octavo.importers.shell.parser import DECLARATIONS, Parser
from octavo.importers.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Assignment,
    Case,
    Condition,
    Function,
    Group,
    If,
    Item,
    Literal,
    Loop,
    Node,
    Parameter,
    Pipeline,
    ShellWord,
    Simple,
)
from octavo.importers.shell.values import Word, flag_words
from octavo.importers.shell.words import DEPTH, WORDS

__all__ = ["Command", "Look", "Script", "Word", "read"]

#: maximum depth of files that source each other, and maximum number of sourced files
_DEEP, _FILES = 4, 64
_CANDIDATES = 4  # maximum definitions of a function that conditions choose from
#: returns the text of a file that a script sources, by its path; None: it is not on this machine
Look = Callable[[str], str | None]
_PREFIXES = ("nohup", "exec", "command", "builtin", "env", "time")
_QUIET = ("echo", "printf", ":", "true", "false")
_IN_CONDITION = "it is in a condition or a loop that is not evaluated; it is ignored"
_NOT_CARRIED = "a shell skips it, by the script's own values"


class _Reader(Builtins):
    def __init__(self, text: str, known: Mapping[str, str], source: str, look: Look | None) -> None:
        super().__init__(text, known, source)
        self.look = look
        self.budget = [WORDS]
        self.defined: dict[int, Function] = {}
        self.depth = 0
        self.level = 0
        self.files = 0

    def run(self) -> Script:
        text = self.reading[0][1].replace("\r\n", "\n")
        program = Parser(text, self.source, self.budget).program()
        with suppress(Exit):
            self.items(program.items)
        for function in self.defined.values():
            self.script.unread.append((function.line, function.heading, "a function that is never called"))
        if program.stopped:
            self.script.unread.append(program.stopped)
        self.script.unread = sorted(dict.fromkeys(self.script.unread), key=lambda entry: entry[0])
        arrays = [
            v.items if v.items is not None else flag_words(v.pieces)
            for v in self.variables.values()
            if v.items or v.pieces
        ]
        self.script.arrays = [words for words in arrays if words and words[0].text.startswith("--")]
        return self.script

    # ---- what is not taken

    @contextmanager
    def isolated(self) -> Iterator[list[str]]:
        """Undo all changes made within the block: a subshell, or commands that are ignored. Afterwards the list has the
        names that had changed. ``exit`` and ``return`` only end the block."""
        names: list[str] = []
        mark, exports = len(self.journal), len(self.script.exports)
        state = (self.all_exported, self.splits, self.positional)
        self.journals += 1
        try:
            yield names
        except Exit as left:
            if not left.whole and self.within:
                self.frames[-1].returned = True
        self.journals -= 1
        names.extend(self.undo(mark))
        if not self.journals:
            self.journal.clear()
        self.all_exported, self.splits, self.positional = state[0], state[1] and self.splits, state[2]
        changed = dict.fromkeys(name for name, _ in self.script.exports[exports:])
        self.script.exports += [(name, self.exportable(name)) for name in changed]

    def run_uncertain(self, items: Sequence[Item], line: int, why: str, loop: Loop | None = None) -> bool:
        """Apply commands that may be executed: variables keep their values, but become unsure. Returns whether any
        changed."""
        before = self.changes
        undone, self.undone = self.undone, {}
        self.within.append(why)
        with self.isolated() as names:
            if loop is not None:
                self.mark_unknown([loop.name] if loop.name else [])
                self.changed_by(self.text(loop.arithmetic).text)
            self.items(items)
        self.within.pop()
        self.mark_unsure(names, line)
        for name, others in self.undone.items():
            former = self.functions.get(name, ((), False))[0]
            candidates = list(former)
            for function in (function for other, _ in others for function in other):
                if not any(function is known for known in candidates):
                    candidates.append(function)
            self.know(name, tuple(candidates[:_CANDIDATES]), False)
        self.undone = undone
        return self.changes > before

    def skip(self, items: Sequence[Item], line: int, text: str) -> None:
        """Skip commands that a shell would not execute, and list them if they would have changed something."""
        before, count = self.changes, len(self.script.commands)
        self.quiet += 1
        self.dropped += 1
        with self.isolated():
            self.items(items)
        self.quiet -= 1
        self.dropped -= 1
        if self.changes > before or len(self.script.commands) > count:
            self.report_unread(line, text, _NOT_CARRIED)
        del self.script.commands[count:]
        self.changes = before

    # ---- commands

    def items(self, items: Sequence[Item]) -> bool | None:
        status: bool | None = True
        for number, item in enumerate(items):
            self.now = self.line(item.line)
            if self.frames[-1].returned and not self.within:  # either all of the rest is executed, or none of it
                self.run_uncertain(items[number:], self.now, "a condition")
                return None
            if item.background:
                with self.isolated():
                    self.item(item)
                status = True
            else:
                status = self.item(item)
        return status

    def item(self, item: Item) -> bool | None:
        node = item.node
        if self.within and not self.quiet and isinstance(node, Simple | AndOr | Pipeline):
            name = (
                node.words[0].literal
                if isinstance(node, Simple) and node.words and isinstance(node.words[0], ShellWord)
                else ""
            )
            if name not in _QUIET:
                self.report_unread(item.line, item.text, _IN_CONDITION)
            self.quiet += 1
            status = self.node(node, item)
            self.quiet -= 1
            return status
        return self.node(node, item)

    def node(self, node: Node, item: Item) -> bool | None:
        """Execute a command. Returns whether it succeeds, None if unknown."""
        self.level += 1
        if self.level > LEVELS:
            raise TranslateError(
                f"{self.source}:{self.now}: over {LEVELS} commands are nested here. Write the command that trains out."
            )
        try:
            return self.node_of(node, item)
        finally:
            self.level -= 1

    def node_of(self, node: Node, item: Item) -> bool | None:
        self.spent.steps += 1  # bounds loops and recursion
        if self.spent.steps > STEPS:
            raise TranslateError(
                f"{self.source}:{self.now}: over {STEPS} commands are executed up to here. Give the script that starts "
                "the training."
            )
        if isinstance(node, Simple):
            return self.simple(node, item)
        if isinstance(node, AndOr):
            return self.and_or(node, item)
        if isinstance(node, Pipeline):
            return self.pipeline(node, item)
        if isinstance(node, Group):
            return self.group(node)
        if isinstance(node, If):
            return self.branches(node)
        if isinstance(node, Case):
            return self.cases(node)
        if isinstance(node, Loop):
            return self.loop(node)
        if isinstance(node, Condition):
            return conditions.evaluate_condition(self, node)
        if isinstance(node, ArithmeticCommand):
            return self.arithmetic(self.text(node.expression), item)
        self.define(node)
        return True

    def group(self, node: Group) -> bool | None:
        if not node.subshell:
            return self.items(node.items)
        with self.isolated():
            return self.items(node.items)
        return None  # exit ended it

    def pipeline(self, node: Pipeline, item: Item) -> bool | None:
        status: bool | None = None
        for number, command in enumerate(node.commands, 1):
            if len(node.commands) == 1 or (self.last_here and number == len(node.commands)):
                status = self.node(command, item)
            else:
                with self.isolated():
                    status = self.node(command, item)
        return status if status is None or not node.negated else not status

    def and_or(self, node: AndOr, item: Item) -> bool | None:
        status = self.node(node.first, item)
        for sign, following in node.rest:
            one = Item(following, item.line, item.text)
            if status is None:
                self.quiet += 1
                changed = self.run_uncertain([one], self.now, "a condition")
                self.quiet -= 1
                if changed:
                    self.report_unread(item.line, item.text, ON_CONDITION)
            elif status == (sign == "&&"):
                status = self.node(following, one)
            else:
                self.skip([one], item.line, item.text)
        return status

    def branches(self, node: If) -> bool | None:
        judged: bool | None = False
        status: bool | None = None
        # True: an earlier branch was taken; None: one of them may have been.
        for (condition, body), heading in zip(node.clauses, node.headings, strict=True):
            line = node.line
            if judged is True:
                self.skip([*condition, *body], line, heading)
                continue
            if judged is None:
                self.report_unread(line, heading, "the condition is not judged")
                self.run_uncertain([*condition, *body], self.line(line), "a condition")
                continue
            judged = self.items(condition)
            if judged is False:
                self.skip(body, line, heading)
            elif judged:
                status = self.items(body)
            else:
                self.report_unread(line, heading, "the condition is not judged")
                self.run_uncertain(body, self.line(line), "a condition")
        if judged is None:
            self.run_uncertain(node.otherwise, self.line(node.line), "a condition")
            return None
        if judged:
            self.skip(node.otherwise, node.line, "else")
            return status
        return self.items(node.otherwise)

    def cases(self, node: Case) -> bool | None:
        subject = self.text(node.subject)
        known: bool | None = None if subject.open or subject.unsure or len(subject.text) > 1000 else False
        if known is None:
            self.report_unread(node.line, node.heading, "the condition is not judged")
        status: bool | None = True
        for patterns, body, falls in node.clauses:
            if known is True:
                self.skip(body, node.line, node.heading)
                continue
            globs = [] if known is None else [glob(self, pattern, 2, self.cased) for pattern in patterns]
            self.spend(10 * len(subject.text))
            fits = [None if pattern is None else bool(pattern.fullmatch(subject.text)) for pattern in globs]
            if known is False and not falls and not any(fit is not False for fit in fits):
                self.skip(body, node.line, node.heading)
            elif known is False and not falls and True in fits:
                known, status = True, self.items(body)
            else:
                if known is False:
                    self.report_unread(node.line, node.heading, "its patterns are not followed")
                known, status = None, None
                self.run_uncertain(body, self.line(node.line), "a condition")
        return status

    def loop(self, node: Loop) -> bool | None:
        words = [field for word in node.words or () for field in self.fields(word)]
        known = node.words is not None and not any(w.open or w.unsure or set("*?[") & set(w.text) for w in words)
        if known and not node.leaves and not self.within:
            for word in words:
                self.assign(str(node.name), [word])
                self.items(node.body)
            return None if words else True
        self.report_unread(node.line, node.heading, "a loop, which is not followed")
        self.run_uncertain([*node.condition, *node.body], self.line(node.line), "a loop", node)
        return None

    # ---- functions and files

    def define(self, node: Function) -> None:
        self.know(node.name, (node,), True)
        self.changes += 1
        if not self.reading[-1][2] and not self.dropped:
            self.defined[id(node)] = node

    def know(self, name: str, candidates: tuple[Function, ...], certain: bool) -> None:
        if self.journals:
            self.journal.append((self.functions, name, self.functions.get(name)))
        self.functions[name] = (candidates, certain)

    def call(self, name: str, words: list[Word], item: Item) -> bool | None:
        functions, certain = self.functions[name]
        active = any(frame.function is function for frame in self.frames for function in functions)
        if not self.dropped:
            for function in functions:
                self.defined.pop(id(function), None)
        if (active and (self.within or self.dropped)) or len(self.frames) > DEPTH:
            self.run_unknown(item, "a function that is not followed")
            return None
        positional, self.positional = self.positional, words
        status: bool | None = None
        if certain:
            with self.frame(name, functions[0]):
                status = self.node(functions[0].body, Item(functions[0].body, item.line, item.text))
        else:  # it may be any of these, or none
            self.report_unread(item.line, item.text, "a function that a condition defines")
            self.quiet += 1
            for function in functions:
                with self.frame(name, function):
                    self.run_uncertain([Item(function.body, item.line, item.text)], self.now, "a condition")
            self.quiet -= 1
        self.positional = positional
        return status

    @contextmanager
    def frame(self, name: str, function: Function | None = None) -> Iterator[None]:
        frame = Frame({}, self.journals, False, name, function)
        self.frames.append(frame)
        try:
            yield
        except Exit as left:
            if left.whole:
                raise
        finally:
            self.frames.pop()
            for local, former in frame.former.items():
                self.store(local, former)

    def source_file(self, words: list[Word], item: Item) -> bool | None:
        """Read a file in place of the line that sources it. Its lines are reported under that line."""
        name = words[0].text if words else ""
        text = None
        if self.look is not None and words and not words[0].open and len(self.reading) <= _DEEP and self.files < _FILES:
            text = self.look(name)
        if text is None or any(text == before for _, before, _ in self.reading):  # also a file that sources itself
            self.run_unknown(item, "another file, which is not read")
            return None
        self.files += 1
        program = Parser(text.replace("\r\n", "\n"), name, self.budget, 0, True).program()
        positional, often = self.positional, self.set_positional
        if len(words) > 1:
            self.positional = words[1:]
        status: bool | None = None
        self.reading.append((name, text, self.line(item.line)))
        with self.frame(""):
            status = self.items(program.items)
        if program.stopped:
            self.report_unread(*program.stopped)
        self.reading.pop()
        # A file that is sourced with arguments gets its own ones, which end with it unless `set` changed them.
        if len(words) > 1 and self.set_positional == often:
            self.positional = positional
        return status

    # ---- simple commands

    def simple(self, node: Simple, item: Item) -> bool | None:
        if not node.words:
            for assignment in node.assignments:
                self.assignment(assignment)
            parts = [part for assignment in node.assignments if assignment.value for part in assignment.value.parts]
            plain = all(isinstance(p, Literal) or (isinstance(p, Parameter) and not p.argument) for p in parts)
            return True if plain else None
        words: list[Word | Assignment] = [*self.several(word for word in node.words if isinstance(word, ShellWord))]
        words += [word for word in node.words if isinstance(word, Assignment)]
        exits = False
        environment: dict[str, Word] = {a.name: self.text(a.value) for a in node.assignments}
        while words and isinstance(first := words[0], Word) and not first.open and first.text in _PREFIXES:
            exits |= first.text == "exec"
            words = words[1:]
            if words and isinstance(words[0], Word) and words[0].text.startswith("-"):  # command -v, env -i
                return None
            while (
                first.text == "env"
                and words
                and isinstance(words[0], Word)
                and (value := VALUE.fullmatch(words[0].text))
            ):
                environment[value[1]] = Word(value[2], words[0].line, words[0].open, words[0].unsure)
                words = words[1:]
        if not words or not isinstance(words[0], Word):
            return None
        status = self.command(words[0].text, words, environment, node, item)
        if exits:
            raise Exit(True)
        return status

    def command(
        self, name: str, words: list[Word | Assignment], environment: dict[str, Word], node: Simple, item: Item
    ) -> bool | None:
        plain = [word for word in words[1:] if isinstance(word, Word)]
        if not isinstance(words[0], Word) or words[0].open:
            name = ""
        if name in self.functions or name in ("source", ".", "eval"):
            with self.with_environment(environment):
                if name in self.functions:
                    return self.call(name, plain, item)
                return self.evaluate_words(plain, item) if name == "eval" else self.source_file(plain, item)
        if name in DECLARATIONS:
            return self.declare(name, words[1:], item)
        if name == "return" and len(self.frames) == 1:
            return None  # a shell prints an error and continues
        if name in ("exit", "return"):
            raise Exit(name == "exit")
        if name in ("true", ":", "echo"):
            return True
        if name == "false":
            return False
        if name in ("[", "test"):
            if name == "[" and (not plain or plain[-1].text != "]"):
                return None
            return conditions.evaluate_test(plain[:-1] if name == "[" else plain)
        if (builtin := getattr(self, f"_{name}", None)) and name in BUILTINS:
            return builtin(plain, item)
        first = words[0]
        command = Command([first, *plain], environment, len(self.script.exports), tuple(self.within))  # type: ignore[list-item]
        self.script.commands.append(command)
        return None

    @contextmanager
    def with_environment(self, environment: dict[str, Word]) -> Iterator[None]:
        """Set the variables of ``A=1 function`` while it runs."""
        former = {name: self.variables.get(name) for name in environment}
        for name, word in environment.items():
            self.assign(name, [word])
        assigned = {name: self.variables.get(name) for name in environment}
        try:
            yield
        finally:
            for name, value in former.items():
                if name not in self.forced and name not in self.readonly:
                    changed = self.variables.get(name) is not assigned[name]
                    self.store(name, value)
                    # bash keeps the variables that a function exports, and restores those that it assigns.
                    self.mark_unsure([name] if changed else [], self.now)

    def evaluate_words(self, words: list[Word], item: Item) -> bool | None:
        """Execute the words of ``eval`` if they are known."""
        text = " ".join(word.text for word in words)
        if any(word.open or word.unsure for word in words) or len(self.frames) + self.depth > DEPTH:
            self.run_unknown(item, RUN)
            return None
        self.spend(len(text))
        program = Parser(text, self.source, self.budget, self.now, True).program()
        if program.stopped:
            self.report_unread(item.line, item.text, program.stopped[2])
        self.depth += 1
        status = self.items(program.items)
        self.depth -= 1
        return status


def read(text: str, known: Mapping[str, str], source: str, look: Look | None = None) -> Script:
    """Read a script.

    known   values of variables from the user, which win over the script's own
    look    finds files that it sources

    Raises TranslateError for a quote that never ends, and for a script beyond the bounds on its size.
    """
    return _Reader(text, known, source, look).run()
