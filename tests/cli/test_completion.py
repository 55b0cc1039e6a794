"""`octavo completion`: the shells themselves complete with the scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.base.model_families import tiny_families
from octavo.cli.bench import SUITES
from octavo.cli.main import COMMANDS, main
from octavo.cli.plan import SHAPES
from octavo.config import RECIPES

# words before the cursor, the last one unfinished -> what the shell must offer
CASES = (
    (("",), set(COMMANDS)),
    (("ex",), {"export", "examples"}),
    (("plan", "--shape", ""), set(SHAPES)),
    (("plan", "run.yaml", "--shape", "llama"), {"llama2_7b"}),
    (("train", "run.yaml", "--fp8-recipe", ""), {*RECIPES, "auto"}),
    (("export", "run", "--format", "fp8-b"), {"fp8-block"}),
    (("tiny", ""), set(tiny_families())),
    (("bench", ""), {"all", "report", *SUITES}),
    (("completion", ""), {"bash", "zsh", "fish"}),
    (("compare", "run.yaml", "--see"), {"--seeds"}),
    (("train", "my"), {"my run.yaml"}),
    (("encrypt", "--key-file", "my"), {"my run.yaml"}),
)  # fmt: skip
FISH = (
    ("octavo ex", {"export", "examples"}),
    ("octavo plan --shape llama", {"llama2_7b"}),
    ("octavo completion f", {"fish"}),
    ("octavo export run --format fp8-b", {"fp8-block"}),
)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    """Write the script of each shell in a folder with one other file; the process must not import torch."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "my run.yaml").touch()
    code = (
        "import sys, contextlib; from octavo.cli.main import main\n"
        "for shell in ('bash', 'zsh', 'fish'):\n"
        "    with open(f'{sys.argv[1]}/octavo.{shell}', 'w') as out, contextlib.redirect_stdout(out):\n"
        "        assert main(['completion', shell]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    return {shell: folder / f"octavo.{shell}" for shell in ("bash", "zsh", "fish")}


def run_shell(shell: str, script: str, folder: Path, *words: str) -> list[str]:
    """Run a script in a shell without the user's files, and return its lines."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    options = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *options, "-c", script, shell, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not done.returncode and not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash_completes(scripts, words, expected):
    script = (
        'source ./octavo.bash; COMP_WORDS=(octavo "$@"); COMP_CWORD=$#; _octavo; '
        '(( ${#COMPREPLY[@]} )) && printf "%s\\n" "${COMPREPLY[@]}"; true'
    )
    assert set(run_shell("bash", script, scripts["bash"].parent, *words)) - {"--help", "--version"} == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_parse_their_scripts(scripts, shell):
    assert run_shell(shell, f"{shell} -n ./octavo.{shell}", scripts[shell].parent) == []


@pytest.mark.parametrize(("words", "expected"), FISH)
def test_fish_completes(scripts, words, expected):
    lines = run_shell("fish", f"source ./octavo.fish; complete -C '{words}'", scripts["fish"].parent)
    assert {line.split("\t")[0] for line in lines} == expected


def test_zsh_registers_the_function(scripts):
    script = "source ./octavo.zsh 2>/dev/null; print -r -- $_comps[octavo]"
    assert "_octavo" in " ".join(run_shell("zsh", script, scripts["zsh"].parent))


def test_unknown_shell_is_named(capsys):
    assert main(["completion", "bsh"]) == 2
    assert "'bsh' is none of bash, zsh, fish. Did you mean 'bash'?" in capsys.readouterr().err
