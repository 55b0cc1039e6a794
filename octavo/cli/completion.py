"""Prints a script that completes commands, options, choices and files in a shell.

octavo completion bash > ~/.octavo.bash && echo 'source ~/.octavo.bash' >> ~/.bashrc
octavo completion zsh > ~/.octavo.zsh && echo 'source ~/.octavo.zsh' >> ~/.zshrc
mkdir -p ~/.config/fish/completions && octavo completion fish > ~/.config/fish/completions/octavo.fish

The script contains all words, so that completing does not start Python. Write the file again after an update of Octavo.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

SHELLS = ("bash", "zsh", "fish")


@dataclass
class Words:
    """What may follow a command: flags, options with the words of their values, and the words of its first argument.
    An empty value means a path."""

    flags: list[str] = field(default_factory=list)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    description: str = ""
    help: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")


def run(args: argparse.Namespace) -> int:
    commands = {name: words_of_parser(name, parser) for name, parser in args.parsers.items()}
    print(_fish_script(commands) if args.shell == "fish" else _bash_script(commands, args.shell == "zsh"))
    return 0


def words_of_parser(name: str, parser: argparse.ArgumentParser) -> Words:
    """Return the words that may follow a command."""
    known = _closed_lists()
    words = Words(description=(parser.description or "").strip().split("\n")[0])
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if not action.option_strings:
            words.first = words.first or choices or known.get((name, action.dest), ())
        for option in action.option_strings:
            words.help[option] = (action.help or "").replace("%%", "%") if action.help != argparse.SUPPRESS else ""
            if action.nargs == 0:
                words.flags.append(option)
            else:
                words.options[option] = choices or known.get((name, option), ())
    return words


def _closed_lists() -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the closed lists that parsers do not declare as choices: (command, option or argument) -> words."""
    from octavo.cli.bench import SUITES
    from octavo.cli.plan import SHAPES
    from octavo.config import RECIPES

    return {
        ("plan", "--shape"): SHAPES,
        ("compare", "--recipes"): (*RECIPES[1:], "auto"),
        ("bench", "suite"): ("all", *SUITES, "report"),
    }


def _bash_script(commands: Mapping[str, Words], zsh: bool) -> str:
    """Return the script for bash; zsh runs it by its own bashcompinit."""
    cases = []
    for name, words in commands.items():
        values = [
            f"        {option}) words={shlex.quote(' '.join(choices))} ;;"
            for option, choices in words.options.items()
            if choices
        ]
        first = shlex.quote(" ".join(words.first))
        cases += [
            f"    {name})",
            '      case "$before" in',
            *values,
            f'        *) [ "$COMP_CWORD" -eq 2 ] && words={first} ;;',
            "      esac",
            f"      options={shlex.quote(' '.join([*words.flags, *words.options]))} ;;",
        ]
    head = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines = [
        "# Completion of octavo, printed by: octavo completion " + ("zsh" if zsh else "bash"),
        *head,
        "_octavo() {",
        '  local now="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words="" options="" line=""',
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f"    words={shlex.quote(' '.join([*commands, '--help', '--version']))}",
        '    COMPREPLY=($(compgen -W "$words" -- "$now"))',
        "    return",
        "  fi",
        '  case "${COMP_WORDS[1]}" in',
        *cases,
        "    *) return ;;",
        "  esac",
        '  if [ "${now#-}" != "$now" ]; then',
        '    COMPREPLY=($(compgen -W "$options" -- "$now"))',
        '  elif [ -z "$words" ]; then',
        "    COMPREPLY=()",  # names of files contain spaces; mapfile is missing in the bash of macOS
        '    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "$now")',
        "  else",
        '    COMPREPLY=($(compgen -W "$words" -- "$now"))',
        "  fi",
        "}",
        "complete -o filenames -F _octavo octavo",
    ]
    return "\n".join(lines)


def _fish_script(commands: Mapping[str, Words]) -> str:
    """Return the script for fish, which completes files by itself where no words are given."""
    lines = ["# Completion of octavo, printed by: octavo completion fish", "complete -c octavo -e"]
    for name, words in commands.items():
        lines.append(f"complete -c octavo -n __fish_use_subcommand -f -a {name} -d {_quote(words.description)}")
        start = f"complete -c octavo -n '__fish_seen_subcommand_from {name}'"
        if words.first:
            first = f"'__fish_seen_subcommand_from {name}; and test (count (commandline -opc)) -eq 2'"
            lines.append(f"complete -c octavo -n {first} -f -a {_quote(' '.join(words.first))}")
        for option in (*words.flags, *words.options):
            key = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            value = ""
            if option in words.options:
                choices = words.options[option]
                value = f" -x -a {_quote(' '.join(choices))}" if choices else " -r -F"
            lines.append(f"{start} {key}{value} -d {_quote(words.help[option])}")
    return "\n".join(lines)


def _quote(text: str) -> str:
    """Quote for fish, where only a backslash and a single quote are special inside single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
