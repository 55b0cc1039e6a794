"""How much of the code one forward of a linear layer passes through (docs/architecture.md)."""

from __future__ import annotations

import pytest

from benchmarks import hot_path

BOUNDS = {  # files, changes of file
    "tensorwise": (9, 25),
    "rowwise": (9, 25),
    "blockwise": (9, 25),
    "mxfp8": (9, 26),  # the reference decodes its scales in another file than it multiplies in
    "delayed": (10, 28),  # its histories are a file of their own
}


@pytest.mark.parametrize("recipe", BOUNDS)
def test_a_forward_is_read_in_one_sitting(recipe: str) -> None:
    found = hot_path.measure(recipe)
    files, changes = BOUNDS[recipe]
    assert len(found["forward"]["files"]) <= files and found["forward"]["changes"] <= changes
    assert found["forward"]["files"][0] == "fp8/dense/linear.py" and found["forward_lines"] <= 20
