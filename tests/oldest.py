"""What `make test-oldest` installs: of each dependency the lowest version that pyproject.toml names.

    python tests/oldest.py [TORCH]

A requirement a line. torch is the version of tests/constraints.txt, which is at hand where the others are tested,
unless another is given: indexes keep the CPU's build of few versions, and CUDA's is 3 GB. With it what runs the tests,
in any version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

TOOLS = ("pytest", "hypothesis")
CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def pinned(name: str) -> str:
    """The version that tests/constraints.txt gives a package."""
    return re.search(rf"^{name}==(\S+)$", CONSTRAINTS.read_text(), re.M)[1]


def lowest(pyproject: Path, torch: str | None = None) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    found = []
    for requirement in project["dependencies"]:
        name, low = re.fullmatch(r"([\w.-]+)>=([\d.]+)(?:,<[\d.]+)?", requirement).groups()
        found.append(f"{name}=={low if name != 'torch' else torch or pinned('torch')}")
    dev = project["optional-dependencies"]["dev"]
    return [*found, *(requirement for requirement in dev if re.match(r"[\w-]+", requirement)[0] in TOOLS)]


if __name__ == "__main__":
    print("\n".join(lowest(Path(__file__).parents[1] / "pyproject.toml", *sys.argv[1:])))
