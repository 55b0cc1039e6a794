"""The package: a wheel of what is tracked has every module and every file that they read, and runs elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from octavo.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def test_examples_are_copied_and_nothing_is_overwritten(tmp_path, capsys):
    assert main(["examples", str(tmp_path / "mine")]) == 0
    copied = {file.relative_to(tmp_path / "mine"): file.read_bytes() for file in (tmp_path / "mine").rglob("*.*")}
    assert copied == {
        file.relative_to(ROOT / "examples"): file.read_bytes()
        for file in (ROOT / "examples").rglob("*.*") if file.suffix != ".pyc"
    }  # fmt: skip
    assert f"wrote {len(copied)} files" in capsys.readouterr().out
    assert main(["examples", str(tmp_path / "mine")]) == 2
    assert "is there and not empty; name a new folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_wheel_of_what_is_tracked_runs_elsewhere(tmp_path):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout: nothing says which files belong to the project")
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    tracked = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).exists() and not name.startswith(("docs/", "tests/", "benchmarks/")):
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "clone" / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "clone")]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    wheel = next(tmp_path.glob("octavo-*.whl"))
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in tracked if name.startswith("octavo/") and name != "octavo/examples"}
    files |= {f"octavo/{name}" for name in tracked if name.startswith("examples/")}
    assert len(files) > 400 and files <= inside
    assert {name.partition("/")[0] for name in inside} == {"octavo", wheel.name.rpartition("-py3")[0] + ".dist-info"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for words in (["--help"], ["examples", "mine"], ["schema"]):
        run = [sys.executable, str(tmp_path / "site" / "bin" / "octavo"), *words]
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (tmp_path / "mine" / "tiny" / "qwen3_text.yaml").is_file()
    where = [sys.executable, "-c", "import octavo.report.trial.demo as demo; print(demo.__file__)"]
    assert str(tmp_path) in subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
