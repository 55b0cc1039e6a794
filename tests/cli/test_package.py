"""The wheel contains every module and every file that they read, and runs in another environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from octavo import train
from octavo.cli.main import main
from octavo.data.builtin import digits
from octavo.report import ReportError
from octavo.report.demo import demo

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def test_examples_are_copied_and_not_overwritten(tmp_path, capsys):
    assert main(["examples", str(tmp_path / "copy")]) == 0
    copied = {file.relative_to(tmp_path / "copy"): file.read_bytes() for file in (tmp_path / "copy").rglob("*.*")}
    assert copied == {
        file.relative_to(ROOT / "examples"): file.read_bytes()
        for file in (ROOT / "examples").rglob("*.*") if file.suffix != ".pyc"
    }  # fmt: skip
    assert f"wrote {len(copied)} files" in capsys.readouterr().out
    assert main(["examples", str(tmp_path / "copy")]) == 2
    assert "exists and is not empty; choose a new folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if (ROOT / name).exists() and not name.startswith(("docs/", "tests/", "benchmarks/")):
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "clone" / name, follow_symlinks=False)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "clone")]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    return next(folder.glob("octavo-*.whl"))


def tracked() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout: tracked files are unknown")
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name]


@pytest.mark.long
def test_wheel_of_tracked_files_runs_in_another_folder(wheel, tmp_path):
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in tracked() if name.startswith("octavo/") and name != "octavo/examples"}
    files |= {f"octavo/{name}" for name in tracked() if name.startswith("examples/")}
    assert len(files) > 400 and files <= inside
    assert {name.partition("/")[0] for name in inside} == {"octavo", wheel.name.rpartition("-py3")[0] + ".dist-info"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside)
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for words in (["--help"], ["examples", "copy"], ["schema"]):
        run = [sys.executable, str(tmp_path / "site" / "bin" / "octavo"), *words]
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert (tmp_path / "copy" / "tiny" / "qwen3_text.yaml").is_file()
    where = [sys.executable, "-c", "import octavo.report.demo.demo as demo; print(demo.__file__)"]
    assert str(tmp_path) in subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True).stdout


# The demo with few digits and steps.
SMALL_DEMO = """
import octavo
from octavo.cli import main
from octavo.data.builtin import digits
from octavo.report.demo import demo
from rich.console import Console

if __name__ == "__main__":
    print(octavo.__file__, main.__file__, sep="\\n")
    write = digits.write
    digits.write = lambda directory, console=None: write(directory, train=64, test=16)
    demo.run("demo", steps=4, console=Console(width=200))
"""


@pytest.mark.long
def test_small_demo_runs_from_a_wheel_in_an_empty_environment(wheel, tmp_path, monkeypatch):
    """The environment has only the wheel; dependencies come from this environment, and nothing is downloaded. Real
    digits, a real model, real runs of a few steps; a second demo reads everything and trains nothing."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    install = [*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, env=env, check=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    # Added as a plain path, so that .pth files in it are not read: they may point to an editable Octavo.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    assert python.with_name("octavo").is_file()
    (tmp_path / "small.py").write_text(SMALL_DEMO)
    done = subprocess.run([str(python), "small.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    printed = done.stdout
    assert done.returncode == 0 and "Traceback" not in done.stderr, printed + done.stderr
    assert [Path(line).is_relative_to(site) for line in printed.splitlines()[:2]] == [True, True]
    for name in ("demo.yaml", "report/report.html", "answer.png"):
        assert (tmp_path / "demo" / name).stat().st_size > 100, printed + done.stderr
    assert "planned layers ran in FP8: " in printed and printed.count("report.html") == 2

    def refuse(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(train, "run", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(digits, "write", lambda *_, **__: None)
    verdict = demo.run("demo", steps=4)
    assert f"{verdict.claims[0].status.upper()}: " in printed and [c.name for c in verdict.claims] == ["accuracy"]
    fp8 = verdict.data["arms"][1]
    assert fp8["proof"]["shares"]["image_encoder"] == fp8["proof"]["shares"]["foundation"] == 1.0
    assert fp8["health"] and all(0.9 < layer["dw_cosine"] <= 1 for layer in fp8["health"])
    assert verdict.data["arms"][0]["health"] == [] and fp8["eval"]["questions"] == 64
    names = {check.name: check.status for check in verdict.checks}
    for check in ("fp8_gemms", "same_data", "same_machine", "nan_codes", "sqnr_e4m3", "dw_cosine", "underflow"):
        assert names[check] == "pass", check
    json.loads((tmp_path / "demo" / "report" / "report.json").read_text())
    with pytest.raises(ReportError, match=r"train\.steps was 4, is now 5"):
        demo.run("demo", steps=5)
