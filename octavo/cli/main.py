"""The entry point: finds the command, imports its file alone, turns what goes wrong into a sentence and an exit code.

Exit codes:
0    done
1    the work failed, or the verdict is bad
2    wrong usage or configuration; where 1 is a verdict, work that failed
3    the verdict is undecided (compare, demo)
4    done, but keys that decide numbers have no translation (import)
130  interrupted; 143 and 129: ended by SIGTERM and SIGHUP

Octavo's own errors are written for users and printed as they are; anything else is a defect and keeps its traceback.
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

import octavo
from octavo.base.encryption.reader import read_in_version_1
from octavo.base.safe_read import first_line, printable
from octavo.cli.stop_signals import Stopped, stop_signals

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130

#: commands whose exit code 1 means the verdict fail, and nothing else; 3 is undecided, of compare and demo
VERDICTS = ("compare", "demo", "verify")

#: commands that catch SIGTERM and SIGHUP themselves: a rank that leaves in the middle of a collective leaves the others
#: waiting, so training ends between steps or at once
OWN_SIGNALS = ("train",)

#: commands that read nothing which may be encrypted
KEYLESS = ("bench", "doctor", "tiny", "digits", "examples", "text", "schema", "demo", "convert", "import")

#: command -> what it does, in the order a newcomer meets them; each is octavo/cli/<command>.py
COMMANDS: dict[str, str] = {
    "demo": "the whole story on real handwriting: train a tiny Qwen3-VL in FP8 beside high precision, write the report",
    "train": "run one training job from a YAML file",
    "plan": "show which layer would run in which recipe and why; reads no weights",
    "compare": "train high precision and FP8 on the same data and seeds; exit code = the verdict",
    "bisect": "find which layer, GEMM or feature breaks a run, by short runs; leaves a configuration that works",
    "report": "write the page of a run, or of several side by side",
    "eval": "evaluate a run, a model folder or an adapter on held-out data",
    "generate": "ask a trained model about an image",
    "merge": "fold an adapter into a model folder, in BF16 or FP8; measures what of it FP8 keeps",
    "export": "write a run or a model folder in BF16 or FP8, as servers load it",
    "verify": "examine a model or adapter folder; a verdict for transformers, vLLM and SGLang",
    "encrypt": "encrypt a model, data or a run directory; every command reads what is encrypted, given the key",
    "decrypt": "write what is encrypted in plain; what was changed is refused",
    "convert": "convert between Hugging Face folders and DCP checkpoints (MindSpeed-MM), bit for bit",
    "seal": "write the permuted twin of a model, a data set or an adapter, by a key that training never sees",
    "unseal": "give back weights or an adapter that were trained sealed, for the plain model",
    "bench": "time kernels, layers and steps beside high precision and other libraries",
    "doctor": "what this machine can run, what it cannot, and the fix",
    "tiny": "write a small checkpoint of a real architecture",
    "digits": "write the embedded dataset of handwritten digits",
    "examples": "copy the example configurations into a folder",
    "text": "write a dataset of plain text: source and documentation of the installed Python",
    "import": "translate a configuration of another framework, and say what became of every key",
    "schema": "print the JSON schema of the configuration, for editors",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``octavo ARGV...`` and returns the exit code. Never calls ``sys.exit`` itself."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch is loaded: threads that spin while they wait cost a small model ten times its work beside others.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with nullcontext() if arguments and arguments[0] in OWN_SIGNALS else stop_signals():
            return _dispatch(arguments)
    except SystemExit as stop:  # argparse: --help (0) or wrong usage (2)
        return stop.code if isinstance(stop.code, int) else WRONG
    except KeyboardInterrupt:
        if argv is None:  # the process ends: one more Ctrl-C ends it at once, and not in a traceback of what it closes
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        print("octavo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Stopped as stop:
        with suppress(OSError):  # after SIGHUP the terminal is gone
            print(f"octavo: ended by {stop.name}", file=sys.stderr, flush=True)
        return 128 + stop.number
    except BrokenPipeError:
        # the reader (head, less) has left; give the interpreter nothing to flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        shown = "\n".join(map(printable, sentence.split("\n")))  # names of files and fields are others' words
        print(f"octavo {arguments[0]}: {shown}", file=sys.stderr)
        return WRONG if _is_config_error(error) or arguments[0] in VERDICTS else FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return DONE if words else WRONG
    name, rest = words[0], words[1:]
    if name in ("-V", "--version"):
        print(f"octavo {octavo.__version__}")
        return DONE
    if name not in COMMANDS:
        return _unknown(name)
    from octavo.cli import arguments

    command = importlib.import_module(f"{__package__}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"octavo {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if name not in KEYLESS:
        arguments.add_key(parser)
    arguments.check_paths(rest)
    # key=value may stand before and after options
    args = parser.parse_intermixed_args(rest)
    arguments.check_targets(name, args)
    arguments.use_key(args)
    code = int(command.run(args))
    if old := read_in_version_1():
        others = f" and {len(old) - 1} more are" if len(old) > 1 else " is"
        print(
            f"note: {printable(old[0])}{others} encrypted in version 1 of the form, which binds no names: exchanged "
            "files are not seen. Encrypt anew: octavo encrypt SRC DST --old-key KEY --key-file KEY",
            file=sys.stderr,
        )
    return code


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    head = f"octavo {octavo.__version__}: FP8 training of vision-language models that proves itself"
    usage = "usage: octavo COMMAND [arguments]     octavo COMMAND --help"
    return "\n".join([head, "", usage, "", *lines, "", "start with: octavo demo"])


def _unknown(name: str) -> int:
    import difflib

    if name.startswith("-"):
        print(f"octavo: there is no option {name} before the command; see octavo --help", file=sys.stderr)
        return WRONG
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if name.endswith((".yaml", ".yml")):
        hint = f"to run this file: octavo train {name}"
    else:
        hint = f"did you mean `octavo {close[0]}`?" if close else "there are: " + ", ".join(COMMANDS)
    print(f"octavo: there is no command {name!r}; {hint}", file=sys.stderr)
    return WRONG


#: what the machine refuses, and what helps; any other OSError is a defect
_REFUSALS = {
    errno.EACCES: "choose a folder that you may use",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some of your quota, or choose another disk",
    errno.ENOTDIR: "a part of the path is a file; choose a folder",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "it is in the way; choose another name",
    errno.EIO: "the disk, or its server, fails; see to it, then continue with run.resume=auto",
    errno.ESTALE: "the file system was lost; see to its server, then continue with run.resume=auto",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its links lead in a circle; choose another path",
}

#: how gloo and NCCL say that a peer is gone, out of whichever collective was under way (a gradient's, a norm's)
_LOST = (
    ("gloo/transport", "Connection closed by peer"),
    ("gloo/transport", "Connection reset by peer"),
    ("gloo/transport", "Broken pipe"),
    ("gloo/transport", "Timed out waiting"),
    ("NCCL", "remote process exited"),
)


def _sentence(error: Exception) -> str | None:
    """What to tell the user, or None for a defect, which keeps its traceback.

    Octavo's own error classes name what was asked, what was found and the fix; a full disk, a locked folder, a
    full GPU and a lost peer are the machine's word.
    """
    if type(error).__module__.split(".")[0] == "octavo":
        return str(error)
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return f"{error.strerror}: {error.filename or 'a file'}; {_REFUSALS[error.errno]}"
    if isinstance(error, RuntimeError | MemoryError):  # torch is there, or nothing asked for much
        from octavo.train.loop.out_of_memory import SMALLER, what_is_full

        if (full := what_is_full(error)) is not None:
            return f"{full}; {SMALLER}"
    if isinstance(error, RuntimeError) and any(all(part in str(error) for part in parts) for parts in _LOST):
        return (
            "another process of this run died or no longer answers; its own message, further up or in its log, has the "
            "cause. Start all of them again with the same torchrun command and run.resume=auto, which continues from "
            f"the last checkpoint. ({first_line(error)})"
        )
    return None


def _is_config_error(error: Exception) -> bool:
    from octavo.cli.arguments import UsageError
    from octavo.config.yaml.problems import ConfigError

    return isinstance(error, (ConfigError, UsageError))


if __name__ == "__main__":
    sys.exit(main())
