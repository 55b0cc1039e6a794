"""The entry point: imports the module of the command, and turns errors into a message and an exit code.

Exit codes:
0    success
1    failure, or the verdict is fail
2    wrong usage or configuration; for commands with a verdict also other failures
3    the verdict is undecided (compare, demo)
4    success, but keys that affect training results could not be translated (import)
130  interrupted; 143 and 129: ended by SIGTERM and SIGHUP

Octavo's own errors are written for users and printed without a traceback. Any other error is a bug and keeps its
traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import ModuleType
from typing import NoReturn

import octavo
from octavo.base.encryption.reader import pop_version_1_files
from octavo.base.safe_read import first_line, printable
from octavo.base.wording import did_you_mean, nearest
from octavo.cli.stop_signals import SIGNALS, Stopped, stop_signals

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130

#: exit code of a command that a signal ended -> name of the signal
STOPPED = {128 + number: signal.Signals(number).name for number in SIGNALS}

#: commands whose exit code 1 means the verdict fail; their other failures have exit code 2
VERDICTS = ("compare", "demo", "verify")

#: commands that handle SIGTERM and SIGHUP themselves: training must end between steps, because a rank that ended during
#: a collective would leave the others waiting
OWN_SIGNALS = ("train",)

#: commands that read no encrypted files
KEYLESS = ("bench", "doctor", "tiny", "digits", "examples", "text", "schema", "demo", "convert", "import", "completion")

#: command -> description, in the order in which new users need them; each is implemented in octavo/cli/<command>.py
COMMANDS: dict[str, str] = {
    "demo": "train a tiny Qwen3-VL on handwritten digits in FP8 and in high precision, and write a report",
    "train": "run a training job from a YAML file",
    "plan": "show the recipe and kernel of every layer, and the reasons; reads no weights",
    "compare": "train in high precision and in FP8 on the same data and seeds; the exit code is the verdict",
    "bisect": "find the layer, GEMM or feature that breaks a run, and write a configuration that works",
    "report": "write an HTML page about a run, or a comparison of several runs",
    "eval": "evaluate a run, a model folder or an adapter on held-out data",
    "generate": "generate answers to prompts with text, images and videos",
    "merge": "merge an adapter into a model folder, in BF16 or FP8; measures how much of it survives FP8",
    "export": "export a run or a model folder in BF16 or FP8, for inference servers",
    "verify": "check a model or adapter folder, with a verdict for transformers, vLLM and SGLang",
    "encrypt": "encrypt a model, data or a run directory; all commands can read it with the key",
    "decrypt": "decrypt files; modified files are rejected",
    "convert": "convert between Hugging Face folders and DCP checkpoints (MindSpeed-MM) without loss",
    "seal": "write a sealed (permuted) copy of a model, dataset or adapter; training does not need the key",
    "unseal": "restore weights or an adapter from sealed training, for the plain model",
    "bench": "benchmark kernels, layers and steps against high precision and other libraries",
    "doctor": "show what this machine can run, what it cannot, and how to fix it",
    "compose": "compose a vision-language model from an image encoder, a new projector and a decoder",
    "tiny": "write a tiny checkpoint of a real architecture, with random weights",
    "digits": "write the built-in dataset of handwritten digits",
    "examples": "copy the example configurations into a folder",
    "text": "write a dataset of plain text from the source and documentation of the installed Python",
    "import": "translate a configuration of another framework, with a report on every key",
    "schema": "print the JSON schema of the configuration, for editors",
    "completion": "print a script that completes commands and options in bash, zsh or fish",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``octavo ARGV...`` and return the exit code. Never calls ``sys.exit`` itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Set before torch is loaded: on a shared machine, threads that spin while they wait make a small model ten times
    # slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with nullcontext() if arguments and arguments[0] in OWN_SIGNALS else stop_signals():
            return _dispatch(arguments)
    except SystemExit as stop:  # argparse: --help (0) or wrong usage (2); runs in parallel: a signal
        if stop.code in STOPPED:
            _report_end(STOPPED[stop.code])
        return stop.code if isinstance(stop.code, int) else WRONG
    except KeyboardInterrupt:
        if argv is None:  # the process is ending: a second Ctrl-C must end it at once, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("octavo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Stopped as stop:
        _report_end(stop.name)
        return 128 + stop.number
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; the interpreter must not flush into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        message = _user_message(error)
        if message is None:
            raise
        escaped = "\n".join(map(printable, message.split("\n")))  # names of files and fields are untrusted
        print(f"octavo {arguments[0]}: {escaped}", file=sys.stderr)
        if code := getattr(error, "exit_code", 0):  # a signal stopped a run of this command
            return int(code)
        return WRONG if _is_config_error(error) or arguments[0] in VERDICTS else FAILED


def _report_end(name: str) -> None:
    with suppress(OSError):  # after SIGHUP the terminal may be closed
        print(f"octavo: ended by {name}", file=sys.stderr, flush=True)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return DONE if words else WRONG
    name, rest = words[0], words[1:]
    if name in ("-V", "--version"):
        print(f"octavo {octavo.__version__}")
        return DONE
    if name not in COMMANDS:
        return _report_unknown_command(name)
    from octavo.cli import arguments

    command, parser = _load_command(name)
    arguments.check_paths(rest)
    # key=value may come before and after options
    args = parser.parse_intermixed_args(rest)
    if name == "completion":  # only this file loads commands by their names
        args.parsers = {other: _load_command(other)[1] for other in COMMANDS}
    arguments.check_targets(name, args)
    arguments.use_key(args)
    code = int(command.run(args))
    if old_files := pop_version_1_files():
        others = f" and {len(old_files) - 1} more are" if len(old_files) > 1 else " is"
        print(
            f"note: {printable(old_files[0])}{others} encrypted in version 1 of the format, which does not bind files "
            "to their names, so swapped files are not detected. Encrypt again: octavo encrypt SRC DST --old-key KEY "
            "--key-file KEY",
            file=sys.stderr,
        )
    return code


def _load_command(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    """Import the module of a command, and return it with its parser."""
    from octavo.cli import arguments

    command = importlib.import_module(f"{__package__}.{name}")
    parser = _Parser(
        prog=f"octavo {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if name not in KEYLESS:
        arguments.add_key(parser)
    return command, parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {description}" for name, description in COMMANDS.items()]
    head = f"octavo {octavo.__version__}: FP8 training of vision-language models that proves itself"
    usage = "usage: octavo COMMAND [arguments]     octavo COMMAND --help"
    return "\n".join([head, "", usage, "", *lines, "", "start with: octavo demo"])


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest word of a closed list."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            words = [str(word) for word in action.choices]
            hint = _translate(value, words) or did_you_mean(value, words)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(words)}.{hint}")

    def error(self, message: str) -> NoReturn:
        """End with a message; for an option that does not exist with the nearest one."""
        if message.startswith("unrecognized arguments: "):
            options = (word.partition("=")[0] for word in message.split()[2:] if word.startswith("--"))
            if hint := did_you_mean(next(options, None), self._option_string_actions):
                message = f"{message}.{hint}"
        super().error(message)


def _translate(value: object, words: Sequence[str]) -> str:
    """Return the question for a word of another trainer: a component's name, or a recipe's."""
    from octavo.config.sections import foreign_words

    component = foreign_words.component_of(str(value))
    recipe = foreign_words.value_of(("fp8", "recipe"), value)
    if component in words:
        return f" Did you mean {component!r}?"
    if recipe is not None and recipe[0] in words:
        return f" Did you mean {recipe[0]!r} ({recipe[1]})?"
    return ""


def _report_unknown_command(name: str) -> int:
    if name.startswith("-"):
        print(f"octavo: there is no option {name} before the command; see octavo --help", file=sys.stderr)
        return WRONG
    close = nearest(name, COMMANDS)
    if name.endswith((".yaml", ".yml")):
        hint = f"to run this file: octavo train {name}"
    else:
        hint = f"did you mean `octavo {close}`?" if close else "commands are: " + ", ".join(COMMANDS)
    print(f"octavo: there is no command {name!r}; {hint}", file=sys.stderr)
    return WRONG


#: errors of the operating system and their fixes; any other OSError is a bug
_FIXES = {
    errno.EACCES: "choose a folder that you have access to",
    errno.EROFS: "choose a folder that is writable",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of your quota, or choose another disk",
    errno.ENOTDIR: "part of the path is a file; choose a folder",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "it already exists; choose another name",
    errno.EIO: "the disk or its server has failed; repair it, then continue with run.resume=auto",
    errno.ESTALE: "the file system is no longer available; check its server, then continue with run.resume=auto",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its symbolic links form a loop; choose another path",
}

#: parts of the messages of gloo and NCCL for a lost peer
_LOST_PEER = (
    ("gloo/transport", "Connection closed by peer"),
    ("gloo/transport", "Connection reset by peer"),
    ("gloo/transport", "Broken pipe"),
    ("gloo/transport", "Timed out waiting"),
    ("NCCL", "remote process exited"),
)


def _user_message(error: Exception) -> str | None:
    """Return the message for the user, or None for a bug, which keeps its traceback.

    Octavo's error classes have complete messages; errors of the machine (a full disk, a locked folder, a full GPU, a
    lost peer) get one here.
    """
    if type(error).__module__.split(".")[0] == "octavo":
        return str(error)
    if isinstance(error, OSError) and error.errno in _FIXES:
        return f"{error.strerror}: {error.filename or 'a file'}; {_FIXES[error.errno]}"
    if isinstance(error, RuntimeError | MemoryError):  # imports torch
        from octavo.train.loop.out_of_memory import SMALLER, describe_full_memory

        if (full := describe_full_memory(error)) is not None:
            return f"{full}; {SMALLER}"
    if isinstance(error, RuntimeError) and any(all(part in str(error) for part in parts) for parts in _LOST_PEER):
        return (
            "another process of this run died or no longer responds; its message, further up or in its log, has the "
            "cause. Restart all processes with the same torchrun command and run.resume=auto, which continues from "
            f"the last checkpoint. ({first_line(error)})"
        )
    return None


def _is_config_error(error: Exception) -> bool:
    from octavo.cli.arguments import UsageError
    from octavo.config.yaml.problems import ConfigError

    return isinstance(error, (ConfigError, UsageError))


if __name__ == "__main__":
    sys.exit(main())
