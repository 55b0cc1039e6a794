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

    def find(self) -> tuple[Path, bool]:
        """The folder, and whether it is complete."""
        if named := os.environ.get(self.variable):
            folder = Path(named).absolute()
            return folder, (folder / self.part).is_file()
        folder = REPOSITORY / self.folder
        return folder, (folder / self.stamp).is_file()


REQUIREMENTS = {
    "real": Requirement(
        "the model SmolLM2", "make real", "build/smollm2", "config.json", "OCTAVO_SMOLLM2", "config.json"
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
    folder, complete = needed.find()
    if complete:
        return folder
    message = f"{needed.what} is not in {folder}; {needed.target} builds it, or {needed.variable} names another folder"
    if name in names:
        pytest.fail(f"OCTAVO_REQUIRE={name}: {message}", pytrace=False)
    pytest.skip(message)
