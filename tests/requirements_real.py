"""What tests on a pretrained model and in vLLM need, and what happens where it is missing.

``require("real")`` and ``require("server")`` return the folder of the requirement. Without it the test is skipped with
one line, or fails with that line if ``OCTAVO_REQUIRE`` names the requirement, as ``real,server`` in .ci/run does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


class Requirement(NamedTuple):
    """A folder that `target` builds, or that the environment variable names."""

    what: str
    target: str
    folder: str  # below the repository
    stamp: str  # what `target` writes last
    variable: str
    part: str  # what a folder named by the variable must have
    data: str = ""  # what the folder next to it whose name ends in -data must have, or "" if there is none

    def find(self) -> tuple[Path, str]:
        """The folder, and what is missing, as the beginning of a sentence; "" if it is complete."""
        named = os.environ.get(self.variable)
        folder = Path(named).absolute() if named else REPOSITORY / self.folder
        if not (folder / (self.part if named else self.stamp)).is_file():
            return folder, f"{self.what} is not in {folder}"
        data = folder.with_name(f"{folder.name}-data")
        if self.data and not (data / self.data).is_file():
            return folder, f"the data of {self.what} is not in {data}"
        return folder, ""


REQUIREMENTS = {
    "real": Requirement(
        "the model SmolLM2", "make real", "build/smollm2", "config.json", "OCTAVO_SMOLLM2", "config.json", "about.json"
    ),
    "server": Requirement("vLLM", "make server", "build/server", ".installed", "OCTAVO_SERVER", "bin/python"),
}


def required() -> set[str]:
    """The names in OCTAVO_REQUIRE. Raises pytest.UsageError for other names: a typing error would skip the tests."""
    names = {name.strip() for name in os.environ.get("OCTAVO_REQUIRE", "").split(",")} - {""}
    if names - set(REQUIREMENTS):
        unknown = ", ".join(sorted(names - set(REQUIREMENTS)))
        raise pytest.UsageError(f"OCTAVO_REQUIRE names {unknown}; it knows {', '.join(REQUIREMENTS)}.")
    return names


def require(name: str) -> Path:
    """The folder of a requirement. Skips the test if it is missing, or fails it if `required` names it."""
    needed, names = REQUIREMENTS[name], required()
    folder, missing = needed.find()
    if not missing:
        return folder
    message = f"{missing}; {needed.target} builds it, or {needed.variable} names another folder"
    if name in names:
        pytest.fail(f"OCTAVO_REQUIRE={name}: {message}", pytrace=False)
    pytest.skip(message)
