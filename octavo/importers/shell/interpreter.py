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
from octavo.importers.shell.builtins import (
    BUILTINS,
    ON_CONDITION,
    RUN,
    VALUE,
    Builtins,
    Command,
    Frame,
    Script,
    ShellExit,
)
from octavo.importers.shell.expansion import MAX_NESTING, MAX_STEPS, glob_pattern
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
    SimpleCommand,
)
from octavo.importers.shell.values import Word, flag_words
from octavo.importers.shell.words import MAX_DEPTH, MAX_WORDS

__all__ = ["Command", "FindFile", "Script", "Word", "read"]

#: maximum depth of files that source each other, and maximum number of sourced files
_MAX_SOURCE_DEPTH, _MAX_SOURCED_FILES = 4, 64
_MAX_CANDIDATES = 4  # maximum definitions of a function that conditions choose from
#: returns the text of a sourced file by its path, or None if it is not on this machine
FindFile = Callable[[str], str | None]
_PREFIXES = ("nohup", "exec", "command", "builtin", "env", "time")
_QUIET = ("echo", "printf", ":", "true", "false")
_IN_CONDITION = "it is in a condition or a loop that is not evaluated; it is ignored"
_NOT_CARRIED = "a shell skips it, by the script's own values"


class _Interpreter(Builtins):
    def __init__(self, text: str, known: Mapping[str, str], source: str, find_file: FindFile | None) -> None:
        super().__init__(text, known, source)
        self.find_file = find_file
        self.budget = [MAX_WORDS]
        self.defined: dict[int, Function] = {}
        self.depth = 0
        self.level = 0
        self.files = 0

    def run(self) -> Script:
        text = self.open_files[0][1].replace("\r\n", "\n")
        program = Parser(text, self.source, self.budget).parse_program()
        with suppress(ShellExit):
            self.run_items(program.items)
        for function in self.defined.values():
            self.script.unread.append((function.line, function.heading, "a function that is never called"))
        if program.stopped:
            self.script.unread.append(program.stopped)
        self.script.unread = sorted(dict.fromkeys(self.script.unread), key=lambda entry: entry[0])
        variables = [variable for variable in self.variables.values() if variable.items or variable.pieces]
        arrays = [v.items if v.items is not None else flag_words(v.pieces) for v in variables]
        self.script.arrays = [words for words in arrays if words and words[0].text.startswith("--")]
        return self.script

    # ---- commands that may not be executed

    @contextmanager
    def isolate(self) -> Iterator[list[str]]:
        """Undo the changes made in the block; the list then has their names. ``exit`` and ``return`` end the block."""
        names: list[str] = []
        mark, exports = len(self.journal), len(self.script.exports)
        state = (self.all_exported, self.ifs_is_default, self.positional)
        self.open_journals += 1
        try:
            yield names
        except ShellExit as exit_request:
            if not exit_request.ends_script and self.enclosing:
                self.frames[-1].may_have_returned = True
        self.open_journals -= 1
        names.extend(self.undo(mark))
        if not self.open_journals:
            self.journal.clear()
        self.all_exported, self.ifs_is_default, self.positional = state[0], state[1] and self.ifs_is_default, state[2]
        changed = dict.fromkeys(name for name, _ in self.script.exports[exports:])
        self.script.exports += [(name, self.exported_value(name)) for name in changed]

    def run_uncertain(self, items: Sequence[Item], line: int, why: str, loop: Loop | None = None) -> bool:
        """Apply commands that may be executed: variables become unsure. Returns True if any changed."""
        before = self.num_changes
        undone, self.undone_functions = self.undone_functions, {}
        self.enclosing.append(why)
        with self.isolate() as names:
            if loop is not None:
                self.mark_unknown([loop.name] if loop.name else [])
                self.mark_assigned_unknown(self.expand_text(loop.arithmetic).text)
            self.run_items(items)
        self.enclosing.pop()
        self.mark_unsure(names, line)
        for name, others in self.undone_functions.items():
            previous = self.functions.get(name, ((), False))[0]
            candidates = list(previous)
            for function in (function for other, _ in others for function in other):
                if not any(function is known for known in candidates):
                    candidates.append(function)
            self.store_function(name, tuple(candidates[:_MAX_CANDIDATES]), False)
        self.undone_functions = undone
        return self.num_changes > before

    def skip(self, items: Sequence[Item], line: int, text: str) -> None:
        """Skip commands that a shell would not execute, and list them if they would have changed something."""
        before, count = self.num_changes, len(self.script.commands)
        self.quiet_depth += 1
        self.skip_depth += 1
        with self.isolate():
            self.run_items(items)
        self.quiet_depth -= 1
        self.skip_depth -= 1
        if self.num_changes > before or len(self.script.commands) > count:
            self.report_unread(line, text, _NOT_CARRIED)
        del self.script.commands[count:]
        self.num_changes = before

    # ---- commands

    def run_items(self, items: Sequence[Item]) -> bool | None:
        status: bool | None = True
        for number, item in enumerate(items):
            self.current_line = self.report_line(item.line)
            # After a possible return, either all remaining commands are executed or none.
            if self.frames[-1].may_have_returned and not self.enclosing:
                self.run_uncertain(items[number:], self.current_line, "a condition")
                return None
            if item.background:
                with self.isolate():
                    self.run_item(item)
                status = True
            else:
                status = self.run_item(item)
        return status

    def run_item(self, item: Item) -> bool | None:
        node = item.node
        if self.enclosing and not self.quiet_depth and isinstance(node, SimpleCommand | AndOr | Pipeline):
            first = node.words[0] if isinstance(node, SimpleCommand) and node.words else None
            name = first.literal if isinstance(first, ShellWord) else ""
            if name not in _QUIET:
                self.report_unread(item.line, item.text, _IN_CONDITION)
            self.quiet_depth += 1
            status = self.run_node(node, item)
            self.quiet_depth -= 1
            return status
        return self.run_node(node, item)

    def run_node(self, node: Node, item: Item) -> bool | None:
        """Execute a command. Returns True if it succeeds, False if it fails, None if unknown."""
        self.level += 1
        if self.level > MAX_NESTING:
            message = f"over {MAX_NESTING} commands are nested here. Write out the training command."
            raise TranslateError(f"{self.source}:{self.current_line}: {message}")
        try:
            return self.dispatch_node(node, item)
        finally:
            self.level -= 1

    def dispatch_node(self, node: Node, item: Item) -> bool | None:
        self.usage.steps += 1  # bounds loops and recursion
        if self.usage.steps > MAX_STEPS:
            message = f"over {MAX_STEPS} commands are executed up to here. Give the script that starts the training."
            raise TranslateError(f"{self.source}:{self.current_line}: {message}")
        if isinstance(node, SimpleCommand):
            return self.run_simple(node, item)
        if isinstance(node, AndOr):
            return self.run_and_or(node, item)
        if isinstance(node, Pipeline):
            return self.run_pipeline(node, item)
        if isinstance(node, Group):
            return self.run_group(node)
        if isinstance(node, If):
            return self.run_if(node)
        if isinstance(node, Case):
            return self.run_case(node)
        if isinstance(node, Loop):
            return self.run_loop(node)
        if isinstance(node, Condition):
            return conditions.evaluate_condition(self, node)
        if isinstance(node, ArithmeticCommand):
            return self.run_arithmetic(self.expand_text(node.expression), item)
        self.define_function(node)
        return True

    def run_group(self, node: Group) -> bool | None:
        if not node.subshell:
            return self.run_items(node.items)
        with self.isolate():
            return self.run_items(node.items)
        return None  # exit ended it

    def run_pipeline(self, node: Pipeline, item: Item) -> bool | None:
        status: bool | None = None
        for number, command in enumerate(node.commands, 1):
            if len(node.commands) == 1 or (self.lastpipe and number == len(node.commands)):
                status = self.run_node(command, item)
            else:
                with self.isolate():
                    status = self.run_node(command, item)
        return status if status is None or not node.negated else not status

    def run_and_or(self, node: AndOr, item: Item) -> bool | None:
        status = self.run_node(node.first, item)
        for sign, following in node.rest:
            following_item = Item(following, item.line, item.text)
            if status is None:
                self.quiet_depth += 1
                changed = self.run_uncertain([following_item], self.current_line, "a condition")
                self.quiet_depth -= 1
                if changed:
                    self.report_unread(item.line, item.text, ON_CONDITION)
            elif status == (sign == "&&"):
                status = self.run_node(following, following_item)
            else:
                self.skip([following_item], item.line, item.text)
        return status

    def run_if(self, node: If) -> bool | None:
        matched: bool | None = False
        status: bool | None = None
        # True: an earlier branch was taken; None: one of them may have been.
        for (condition, body), heading in zip(node.clauses, node.headings, strict=True):
            line = node.line
            if matched is True:
                self.skip([*condition, *body], line, heading)
                continue
            if matched is None:
                self.report_unread(line, heading, "the condition is not matched")
                self.run_uncertain([*condition, *body], self.report_line(line), "a condition")
                continue
            matched = self.run_items(condition)
            if matched is False:
                self.skip(body, line, heading)
            elif matched:
                status = self.run_items(body)
            else:
                self.report_unread(line, heading, "the condition is not matched")
                self.run_uncertain(body, self.report_line(line), "a condition")
        if matched is None:
            self.run_uncertain(node.otherwise, self.report_line(node.line), "a condition")
            return None
        if matched:
            self.skip(node.otherwise, node.line, "else")
            return status
        return self.run_items(node.otherwise)

    def run_case(self, node: Case) -> bool | None:
        subject = self.expand_text(node.subject)
        known: bool | None = None if subject.open or subject.unsure or len(subject.text) > 1000 else False
        if known is None:
            self.report_unread(node.line, node.heading, "the condition is not matched")
        status: bool | None = True
        for patterns, body, falls_through in node.clauses:
            if known is True:
                self.skip(body, node.line, node.heading)
                continue
            globs = [] if known is None else [glob_pattern(self, p, 2, self.case_sensitive) for p in patterns]
            self.charge(10 * len(subject.text))
            matches = [None if pattern is None else bool(pattern.fullmatch(subject.text)) for pattern in globs]
            if known is False and not falls_through and not any(fit is not False for fit in matches):
                self.skip(body, node.line, node.heading)
            elif known is False and not falls_through and True in matches:
                known, status = True, self.run_items(body)
            else:
                if known is False:
                    self.report_unread(node.line, node.heading, "its patterns are not followed")
                known, status = None, None
                self.run_uncertain(body, self.report_line(node.line), "a condition")
        return status

    def run_loop(self, node: Loop) -> bool | None:
        words = [field for word in node.words or () for field in self.expand_word(word)]
        known = node.words is not None and not any(w.open or w.unsure or set("*?[") & set(w.text) for w in words)
        if known and not node.has_break and not self.enclosing:
            for word in words:
                self.assign(str(node.name), [word])
                self.run_items(node.body)
            return None if words else True
        self.report_unread(node.line, node.heading, "a loop, which is not followed")
        self.run_uncertain([*node.condition, *node.body], self.report_line(node.line), "a loop", node)
        return None

    # ---- functions and files

    def define_function(self, node: Function) -> None:
        self.store_function(node.name, (node,), True)
        self.num_changes += 1
        if not self.open_files[-1][2] and not self.skip_depth:
            self.defined[id(node)] = node

    def store_function(self, name: str, candidates: tuple[Function, ...], certain: bool) -> None:
        if self.open_journals:
            self.journal.append((self.functions, name, self.functions.get(name)))
        self.functions[name] = (candidates, certain)

    def call_function(self, name: str, words: list[Word], item: Item) -> bool | None:
        functions, certain = self.functions[name]
        active = any(frame.function is function for frame in self.frames for function in functions)
        if not self.skip_depth:
            for function in functions:
                self.defined.pop(id(function), None)
        if (active and (self.enclosing or self.skip_depth)) or len(self.frames) > MAX_DEPTH:
            self.mark_all_unsure(item, "a function that is not followed")
            return None
        positional, self.positional = self.positional, words
        status: bool | None = None
        if certain:
            with self.push_frame(name, functions[0]):
                status = self.run_node(functions[0].body, Item(functions[0].body, item.line, item.text))
        else:  # it may be any of these, or none
            self.report_unread(item.line, item.text, "a function that a condition defines")
            self.quiet_depth += 1
            for function in functions:
                with self.push_frame(name, function):
                    self.run_uncertain([Item(function.body, item.line, item.text)], self.current_line, "a condition")
            self.quiet_depth -= 1
        self.positional = positional
        return status

    @contextmanager
    def push_frame(self, name: str, function: Function | None = None) -> Iterator[None]:
        frame = Frame({}, self.open_journals, False, name, function)
        self.frames.append(frame)
        try:
            yield
        except ShellExit as exit_request:
            if exit_request.ends_script:
                raise
        finally:
            self.frames.pop()
            for local, previous in frame.saved.items():
                self.store_variable(local, previous)

    def source_file(self, words: list[Word], item: Item) -> bool | None:
        """Read a file in place of the line that sources it. Its lines are reported under that line."""
        name = words[0].text if words else ""
        text = None
        within_limits = len(self.open_files) <= _MAX_SOURCE_DEPTH and self.files < _MAX_SOURCED_FILES
        if within_limits and self.find_file is not None and words and not words[0].open:
            text = self.find_file(name)
        if text is None or any(text == before for _, before, _ in self.open_files):  # also a file that sources itself
            self.mark_all_unsure(item, "another file, which is not read")
            return None
        self.files += 1
        program = Parser(text.replace("\r\n", "\n"), name, self.budget, 0, True).parse_program()
        positional, set_count = self.positional, self.set_positional
        if len(words) > 1:
            self.positional = words[1:]
        status: bool | None = None
        self.open_files.append((name, text, self.report_line(item.line)))
        with self.push_frame(""):
            status = self.run_items(program.items)
        if program.stopped:
            self.report_unread(*program.stopped)
        self.open_files.pop()
        # A file that is sourced with arguments gets its own ones, which end with it unless `set` changed them.
        if len(words) > 1 and self.set_positional == set_count:
            self.positional = positional
        return status

    # ---- simple commands

    def run_simple(self, node: SimpleCommand, item: Item) -> bool | None:
        if not node.words:
            for assignment in node.assignments:
                self.run_assignment(assignment)
            parts = [part for assignment in node.assignments if assignment.value for part in assignment.value.parts]
            plain = all(isinstance(p, Literal) or (isinstance(p, Parameter) and not p.argument) for p in parts)
            return True if plain else None
        words: list[Word | Assignment] = []
        words += self.expand_words(word for word in node.words if isinstance(word, ShellWord))
        words += [word for word in node.words if isinstance(word, Assignment)]
        replaces_shell = False
        environment: dict[str, Word] = {a.name: self.expand_text(a.value) for a in node.assignments}
        while words and isinstance(first := words[0], Word) and not first.open and first.text in _PREFIXES:
            replaces_shell |= first.text == "exec"
            words = words[1:]
            if words and isinstance(words[0], Word) and words[0].text.startswith("-"):  # command -v, env -i
                return None
            while first.text == "env" and words and isinstance(entry := words[0], Word):
                if not (value := VALUE.fullmatch(entry.text)):
                    break
                environment[value[1]] = Word(value[2], entry.line, entry.open, entry.unsure)
                words = words[1:]
        if not words or not isinstance(words[0], Word):
            return None
        status = self.run_command(words[0].text, words, environment, node, item)
        if replaces_shell:
            raise ShellExit(True)
        return status

    def run_command(
        self, name: str, words: list[Word | Assignment], environment: dict[str, Word], node: SimpleCommand, item: Item
    ) -> bool | None:
        plain = [word for word in words[1:] if isinstance(word, Word)]
        if not isinstance(words[0], Word) or words[0].open:
            name = ""
        if name in self.functions or name in ("source", ".", "eval"):
            with self.set_environment(environment):
                if name in self.functions:
                    return self.call_function(name, plain, item)
                return self.run_eval(plain, item) if name == "eval" else self.source_file(plain, item)
        if name in DECLARATIONS:
            return self.run_declaration(name, words[1:], item)
        if name == "return" and len(self.frames) == 1:
            return None  # a shell prints an error and continues
        if name in ("exit", "return"):
            raise ShellExit(name == "exit")
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
        command = Command([first, *plain], environment, len(self.script.exports), tuple(self.enclosing))  # type: ignore[list-item]
        self.script.commands.append(command)
        return None

    @contextmanager
    def set_environment(self, environment: dict[str, Word]) -> Iterator[None]:
        """Set the variables of ``A=1 function`` while it runs."""
        previous = {name: self.variables.get(name) for name in environment}
        for name, word in environment.items():
            self.assign(name, [word])
        assigned = {name: self.variables.get(name) for name in environment}
        try:
            yield
        finally:
            for name, value in previous.items():
                if name not in self.forced and name not in self.readonly:
                    changed = self.variables.get(name) is not assigned[name]
                    self.store_variable(name, value)
                    # bash keeps the variables that a function exports, and restores those that it assigns.
                    self.mark_unsure([name] if changed else [], self.current_line)

    def run_eval(self, words: list[Word], item: Item) -> bool | None:
        """Execute the words of ``eval`` if they are known."""
        text = " ".join(word.text for word in words)
        if any(word.open or word.unsure for word in words) or len(self.frames) + self.depth > MAX_DEPTH:
            self.mark_all_unsure(item, RUN)
            return None
        self.charge(len(text))
        program = Parser(text, self.source, self.budget, self.current_line, True).parse_program()
        if program.stopped:
            self.report_unread(item.line, item.text, program.stopped[2])
        self.depth += 1
        status = self.run_items(program.items)
        self.depth -= 1
        return status


def read(text: str, known: Mapping[str, str], source: str, find_file: FindFile | None = None) -> Script:
    """Read a script.

    Args:
        known: variables set by the user, which override assignments in the script.
        source: the name of the script in messages.
        find_file: returns the text of a sourced file.

    Raises TranslateError for an unterminated quote, and for a script that exceeds the limits on its size.
    """
    return _Interpreter(text, known, source, find_file).run()
