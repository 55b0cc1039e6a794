"""The amount of code that a call of a linear layer executes (docs/architecture.md)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from benchmarks import hot_path

BOUNDS = {  # files, changes of file
    "tensorwise": (9, 25),
    "rowwise": (9, 25),
    "blockwise": (9, 25),
    "mxfp8": (9, 26),  # the reference decodes its scales in another file than it multiplies in
    "delayed": (10, 28),  # its histories are a file of their own
}
CALLS = 110  # of Octavo's own functions in a forward and its backward, blockwise, on the reference; 213 at 0.4.0


@lru_cache
def measured(recipe: str) -> dict[str, Any]:
    return hot_path.measure(recipe)


@pytest.mark.parametrize("recipe", BOUNDS)
def test_forward_passes_few_files_and_lines(recipe: str) -> None:
    results = measured(recipe)
    files, changes = BOUNDS[recipe]
    assert len(results["forward"]["files"]) <= files and results["forward"]["changes"] <= changes
    assert results["forward"]["files"][0] == "fp8/dense/linear.py" and results["forward_lines"] <= 20


def test_layer_makes_few_python_calls() -> None:
    results = measured("blockwise")
    assert results["forward"]["calls"] + results["backward"]["calls"] <= CALLS
