"""Random launch scripts are read by `octavo import` and run by bash, and the words of their last command compared.

Each script consists of assignments, conditions, functions, loops, here-documents, subshells and quotes over a few
variables, and ends with a command that prints them. A word that import resolves must equal bash's; if import leaves a
word open or unsure, it must list a line of the script. Damaged scripts are read, or rejected with a message that names
the file, in bounded time.

    python -m tests.fuzz.test_shell --cases 5000 --seed 1
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from octavo.importers.errors import TranslateError
from octavo.importers.shell import interpreter as shell_script
from tests.fuzz import mutate
from tests.fuzz.bounded import Finding, Hang, bounds, command

SECONDS, WALL_SECONDS = 5, 60  # of processor time; by the clock
NAMES = ("A", "B", "C", "D")
SHOW = '\ntorchrun train.py --a "<$A>" --b "<$B>" --c "<$C>" --d "<$D>" --f "<${F[*]}>" --n "<${#F[@]}>" --z $A _ $B\n'
UNKNOWN = ('[ -n "$UNSET" ]', "[ -f /nowhere ]", "[ -d / ]", "cd / 2>/dev/null", "grep -q x /dev/null", "mkdir -p /")
KNOWN = ("true", "false", ":", "! true", "[ 1 = 1 ]", "[ 1 -gt 2 ]", "test -z ''", "[[ abc == a* ]]", "[[ x != x ]]")

Made = Callable[[random.Random, int], str]


def _word(rng: random.Random) -> str:
    name = rng.choice(NAMES)
    return rng.choice(
        (
            *(
                "1",
                "7",
                "x",
                "2e-5",
                "x#y",
                "''",
                '""',
                "a=b",
                "'p q'",
                '"r  s"',
                "don\\'t",
                "e\\ f",
                '"$"',
                "a'b'\"c\"",
                ".",
            ),
            *(f"${name}", f"${{{name}}}", f'"${name}"', f'"${{{name}}} k"', f"'${name}'", f"${name}$B", f'x"${name}"y'),
            *(
                f"${{{name}:-7}}",
                "${NOPE-$A}",
                f'"${{{name}:-"q  r"}}"',
                f"${{{name}:+s}}",
                f"${{#{name}}}",
                "\\\n5",
            ),
            *(f"${{{name}%x*}}", f"${{{name}##*a}}", f"${{{name}%%=*}}", "$(echo 6)", "`echo 8`", f"$(echo ${name})"),
            *(
                f"$((1 + {rng.randrange(9)}))",
                f"$((${{#{name}}} + 1))",
                "$(expr 6 / 2)",
                '"${F[@]}"',
                "${F[1]}",
                "${F[*]}",
                "$1",
            ),
        )
    )


def _assign(rng: random.Random, depth: int) -> str:
    name = rng.choice(NAMES)
    return rng.choice(
        (
            *(f"{name}={_word(rng)}",) * 5,
            f"{name}+={_word(rng)}",
            f'{name}="\n  --x {_word(rng).replace(chr(34), "")} \\\n  --y"' if rng.random() < 0.3 else f"{name}=9",
            f"export {name}={_word(rng)}",
            f"F=({_word(rng)} {_word(rng)} # one\n {_word(rng)})",
            f"F+=({_word(rng)})",
            f"(({name} = 3 * 4))",
            f"(({name}++))",
            f"let {name}=5+1",
            f": ${{{name}:=4}}",
            f"unset {name}",
            f"read {name} <<< '5 5'",
            f"eval '{name}=3'",
            f"printf -v {name} %s 6",
            f"{name}=8 true",
            f"{name}=1 B=2",
            f"echo {name}=1",
            f"declare {name}=2",
            "shift",
            "set -- k l",
        )
    )


def _condition(rng: random.Random) -> str:
    name = rng.choice(NAMES)
    compared = (f'[ "${name}" = {_word(rng)} ]', f"[[ ${name} == *x* ]]", f'[ -z "${name}" ]', f"[ ${name} -ge 5 ]")
    return rng.choice((*KNOWN, *UNKNOWN, *compared))


def _both(rng: random.Random, depth: int) -> str:
    parts = [_condition(rng)]
    for _ in range(rng.randrange(1, 3)):
        parts += [rng.choice(("&&", "||", "&&\n")), rng.choice((_small(rng, depth), _condition(rng)))]
    return " ".join(parts)


def _small(rng: random.Random, depth: int) -> str:
    return rng.choice(
        (_assign(rng, depth), "{ " + _assign(rng, depth) + "; }", "( " + _assign(rng, depth) + " )", "f 5")
    )


def _if(rng: random.Random, depth: int) -> str:
    text = f"if {_condition(rng)}; then\n{_body(rng, depth)}\n"
    if rng.random() < 0.4:
        text += f"elif {_condition(rng)}\nthen {_body(rng, depth)}\n"
    if rng.random() < 0.5:
        text += f"else\n{_body(rng, depth)}\n"
    return text + "fi"


def _case(rng: random.Random, depth: int) -> str:
    subject = rng.choice((f"${rng.choice(NAMES)}", '"$UNSET"', "x", "$1"))
    patterns = [rng.choice(("x", "1|7", "*", "?", '"$B"', "[0-9]*", "'*'", "(x)")) for _ in range(rng.randrange(1, 4))]
    clauses = "".join(
        f"  {p.strip(')') if p == '(x)' else p}) {_body(rng, depth)} {rng.choice((';;',) * 9 + (';&',))}\n"
        for p in patterns
    )
    return f"case {subject} in\n{clauses}esac"


def _loop(rng: random.Random, depth: int) -> str:
    name = rng.choice(NAMES)
    return rng.choice(
        (
            f"for {name} in {_word(rng)} {_word(rng)}; do {_body(rng, depth)}; done",
            f"for {name} in 1 2\ndo\n{_body(rng, depth)}\nbreak\ndone",
            f'while [ -n "$UNSET" ]; do {_body(rng, depth)}; break; done',
            f"while read {name}; do {_body(rng, depth)}; done <<< 'p q'",
            f"until true; do {_body(rng, depth)}; done",
            f"for (( {name}=0; {name}<2; {name}++ )); do {_body(rng, depth)}; done",
        )
    )


def _aside(rng: random.Random, depth: int) -> str:
    return rng.choice(
        (
            f"( {_body(rng, depth)} )",
            f"{{ {_body(rng, depth)}\n}}",
            f"{{ {_body(rng, depth)}\n}} | cat",
            f"echo x | {_assign(rng, depth)}",
            f"{_assign(rng, depth)} &",
            f"! {_assign(rng, depth)}",
        )
    )


def _document(rng: random.Random, depth: int) -> str:
    name = rng.choice(NAMES)
    return rng.choice(
        (
            f"cat <<EOF >/dev/null\n{name}=11\ndon't ( \nEOF",
            f"cat <<'EOF' >/dev/null\n{name}=12 $(\n\"\nEOF",
            f"cat <<-EOF >/dev/null\n\t{name}=13\n\tEOF\n",
            f"cat <<E1 <<\"E2\" >/dev/null; {name}=14\n{name}=15\nE1\nE2 x\n{name}=16'\nE2",
            f"cat <<< \"{name}=17\" >/dev/null",
            f"cat >/dev/null <<\\EOF\n{name}=18\n EOF\nEOF",
            f"cat <<EOF >/dev/null\n{name}=19\\\nEOF\nEOF",
        )
    )  # fmt: skip


def _function(rng: random.Random, depth: int) -> str:
    name = rng.choice(("f", "g"))
    head = rng.choice((f"{name}() {{", f"function {name} {{", f"{name} ()\n{{"))
    inner = rng.choice(
        (
            "local A=2",
            "local B",
            "A=$1",
            "B=$2",
            "shift",
            "C=$#",
            "",
            _both(rng, depth) + "\n[ -f /nowhere ] && return",
            "return",
        )
    )
    text = f"{head}\n{inner}\n{_body(rng, depth)}\n}}"
    return text + rng.choice(("", f"\n{name} {_word(rng)} {_word(rng)}", f"\n{name} 1", f"\nA=5 {name} 2"))


MAKERS: tuple[tuple[int, Made], ...] = (
    (8, _assign), (4, _both), (3, _if), (2, _case), (2, _loop), (2, _aside), (2, _document), (2, _function)
)  # fmt: skip


def _body(rng: random.Random, depth: int) -> str:
    makers = MAKERS if depth < 3 else MAKERS[:2]
    count = rng.choice((1, 1, 2))
    chosen = rng.choices([made for _, made in makers], [often for often, _ in makers], k=count)
    return "\n".join(made(rng, depth + 1) for made in chosen)


def script(rng: random.Random) -> str:
    lines = ["f() { C=$1; }", "A=1", "B='x y'", *(_body(rng, 0) for _ in range(rng.randrange(1, 6)))]
    if rng.random() < 0.3:
        lines.insert(2, "# a comment with an apostrophe ' and a \\")
    return "\n".join(lines) + SHOW


def run_bash(text: str) -> list[str] | None:
    """Return the words of the last command as bash expands them, or None if bash does not reach it."""
    show = {"BASH_FUNC_torchrun%%": "() { printf '%s\\0' \"$@\" >&9; }", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.sh"
        file.write_text(text)
        out = Path(folder) / "words"
        start = (
            f"ulimit -t 1 -s 1024; exec 9>{out} </dev/null >/dev/null 2>&1; . {file}"  # some scripts do not terminate
        )
        done = subprocess.run(["bash", "-c", start], env=show, cwd="/", check=False)
        if done.returncode < 0:
            return None
        printed = out.read_bytes().decode(errors="surrogateescape")
    return printed.split("\0")[:-1] or None


def difference(text: str) -> str | None:
    """Return the difference between import and bash that import does not list, or None."""
    try:
        read = shell_script.read(text, {}, "a.sh")
    except TranslateError as error:  # functions that call each other
        return None if "are nested here" in str(error) else f"refused: {error}"
    words = next(
        (command.words[1:] for command in reversed(read.commands) if command.words[0].text == "torchrun"), None
    )
    bash = run_bash(text)
    if bash is None:  # infinite recursion, or the script exited before
        return None
    if words is None:
        return f"import has no command, bash has {bash}"
    for at, word in enumerate(words):
        if word.open or word.unsure:
            if not read.unread and word.unsure:
                return f"{word} is unsure, but no line is listed"
            continue
        if at >= 14 and any(word.open or word.unsure for word in words[14:]):  # not quoted: any number of words
            return None
        if at >= len(bash) or word.text != bash[at]:
            listed = [(line, what) for line, what, _ in read.unread]
            return f"import has {word.text!r}, bash {bash[at : at + 1]}; listed: {listed}"
    whole = not any(word.open or word.unsure for word in words)
    return f"import has {len(words)} words, bash {len(bash)}" if whole and len(bash) != len(words) else None


def _compare_script(rng: random.Random, tally: Counter[str]) -> str | None:
    text = script(rng)
    what = difference(text)
    tally["compared"] += 1
    return f"{what}\n{text}" if what else None


def _read_damaged(rng: random.Random, tally: Counter[str]) -> str | None:
    text = mutate.damage(rng, script(rng).encode() * rng.choice((1, 1, 50))).decode(errors="replace")
    if rng.random() < 0.3:
        piece = rng.choice(
            ("(", "${A:-", "$((", "`", '"$(', "if true; then\n", "A+=(x)\n", "{", "case x in x)", "<<E ", "A[", "\\")
        )
        text = text[: rng.randrange(len(text) + 1)] + piece * rng.choice((3, 60, 20_000)) + text
    try:
        shell_script.read(text, {}, "a.sh")
        tally["read"] += 1
    except TranslateError as error:
        tally["refused"] += 1
        if "a.sh" not in str(error) or len(str(error)) > 400:
            return f"the sentence is {error!s:.300}"
    except BaseException as other:
        if isinstance(other, KeyboardInterrupt | Hang):
            raise
        return f"{type(other).__name__}: {other!s:.200}"
    return None


def run(seed: int, cases: int, only: int | None = None, tally: Counter[str] | None = None) -> list[Finding]:
    """Run the cases and return the findings; ``tally`` counts compared, read and rejected scripts."""
    findings: list[Finding] = []
    tally = Counter() if tally is None else tally
    for number in range(cases) if only is None else [only]:
        rng = random.Random(f"{seed} {number}")
        kind = _read_damaged if number % 3 == 2 else _compare_script
        case = f"case {number} of seed {seed}"
        with (
            bounds(case, findings, WALL_SECONDS, cpu=SECONDS)
            if kind is _read_damaged
            else bounds(case, [], WALL_SECONDS)
        ):
            if why := kind(rng, tally):
                findings.append(Finding(case, why))
    return findings


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_import_matches_bash_or_lists_the_line() -> None:
    tally: Counter[str] = Counter()
    assert run(5, 120, tally=tally) == []
    assert tally["compared"] == 80 and tally["read"] and tally["refused"]


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    try:
        command(partial(run, tally=counts), cases=1000, seed=5, whole=True)
    finally:
        print(*(f"{what}: {n}" for what, n in sorted(counts.items())), sep="\n")
