"""The record of a machine is complete and serializable, and never stops a run."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo
from octavo.base import env_vars, environment

ROOT = Path(__file__).resolve().parents[2]


def test_record_is_json_and_complete():
    record = environment.describe()
    assert json.loads(json.dumps(record)) == record
    assert record["octavo"]["version"] == octavo.__version__
    assert record["torch"]["version"] and record["torch"]["threads"] == 1
    assert record["cpu"]["usable_cores"] >= 1 and record["memory_bytes"] > 2**28
    assert record["packages"]["transformers"]
    assert record["unread"] == {}


def test_settings_are_recorded_and_secrets_are_not(monkeypatch):
    """Only listed names are recorded, so that no key or password of the environment is included."""
    names = [name for group in env_vars.VARIABLES.values() for name in group]
    assert len(set(names)) == len(names)
    assert not re.findall(r"\w*(?:TOKEN(?!IZERS)|KEY|SECRET|PASS|PROXY|ENDPOINT|URI|URL)\w*", " ".join(names))
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "PYTORCH_ALLOC_CONF_",
        "LD_PRELOAD",
        "SOMETHING",
    ):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    record = environment.describe()
    assert "hunter2" not in json.dumps(record)
    assert record["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert record["variables"].keys() <= set(names) and record["settings"].keys() == env_vars.SETTINGS.keys()
    assert record["settings"]["torch.threads"] == 1 and len(record["settings"]["gc.threshold"]) == 3


def test_documentation_lists_all_recorded_variables():
    page = (ROOT / "docs/switches.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([\w.]+)`", page))
    recorded = {name for group in env_vars.VARIABLES.values() for name in group} | env_vars.SETTINGS.keys()
    assert recorded <= documented, sorted(recorded - documented)
    kinds = r"(?:CUDA|NCCL|TORCH|PYTORCH|OMP|KMP|MKL|GLOO|MALLOC|HF|NVIDIA|CUBLAS\w*|RAYON)_[A-Z0-9_]+"
    others = {word for word in documented if re.fullmatch(kinds, word)} - recorded
    assert not others, f"docs/switches.md names variables that environment.json does not record: {sorted(others)}"


def test_unreadable_parts_are_named_with_their_cause(monkeypatch):
    def broken():
        raise OSError("no such luck")

    for name in ("git_state", "_cpu", "_gpus", "versions", "_driver"):
        monkeypatch.setattr(environment, name, broken)
    record = environment.describe()
    assert record["unread"]["gpus"] == "OSError: no such luck"
    assert set(record["unread"]) == {"git", "cpu", "gpus", "packages", "driver"}
    assert record["gpus"] == [] and record["packages"] == {} and record["cpu"] is None
    json.dumps(record)


def test_module_does_not_import_torch():
    code = "import sys, octavo.base.environment; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_package_version_comes_from_the_module():
    """The version is defined once, so that run files, pages and the wheel agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "octavo.version.__version__"}


def test_version_ranges_match_the_dependencies():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ranges = dict(re.fullmatch(r"([\w.-]+?)((?:>=|<).*)", line).groups() for line in listed)
    assert ranges == environment.REQUIRED


@pytest.mark.parametrize(
    "found, needed, fits",
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.14.0a0+git123", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("2.11", ">=2.11,<2.14", True),
        ("11.0", ">=10", True),
        ("5.17.0.dev0", ">=5.17", True),
        ("", ">=1", False),
    ],
)
def test_version_ranges(found, needed, fits):
    assert environment.is_in_range(found, needed) is fits


def test_unknown_version_range_is_rejected():
    with pytest.raises(ValueError, match=r"'~=2.0'; only >= and < are understood"):
        environment.is_in_range("2.1", "~=2.0")


def test_package_problems(monkeypatch):
    assert environment.package_problems() == []
    versions = {"torch": "2.10.1", "transformers": None}
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: versions[name] if name in versions else real(name))
    torch, transformers = environment.package_problems()
    assert (torch.package, torch.installed, torch.fix) == ("torch", "2.10.1", "pip install 'torch>=2.11'")
    assert (transformers.installed, transformers.needed) == ("not installed", ">=5.17,<5.25")


def test_git_state(tmp_path, monkeypatch):
    from octavo import version

    package = tmp_path / "octavo"
    package.mkdir()
    monkeypatch.setattr(version, "__file__", str(package / "__init__.py"))
    assert environment.git_state() == {}  # installed, not a checkout
    (package / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    state = environment.git_state()
    assert re.fullmatch("[0-9a-f]{40}", state["commit"]) and state["dirty"] is False
    (package / "__init__.py").write_text("x = 1\n")
    assert environment.git_state()["dirty"] is True


def test_driver_without_nvidia_smi(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    if not Path("/proc/driver/nvidia/version").exists():
        assert environment._driver() is None
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(environment, "_run_command", lambda command: "580.10.02\n580.10.02\n")
    assert environment._driver() in ("580.10.02",) or Path("/proc/driver/nvidia/version").exists()


def test_failed_command_is_reported():
    with pytest.raises(OSError, match="git ended with"):
        environment._run_command(["git", "-C", "/", "rev-parse", "HEAD"])
