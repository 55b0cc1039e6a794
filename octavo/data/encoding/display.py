"""How a frame of video is to be shown: the display matrix that cameras write, turns and mirrors alike.

    x' = a x + c y        [ a b u ]
    y' = b x + d y        [ c d v ]   int32 in the machine's order, a to d with 16 bits behind the point

PyAV's `frame.rotation` is the angle of its first row alone: of a mirror it says 180 degrees, or none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_NEAR = 0.02  # of 1: the sine of about a degree


def matrix_of(frame: Any) -> np.ndarray | None:
    """[[a, b], [c, d]] of a frame, at most 1; None where it has none, or one of zeros, which says nothing."""
    for data in frame.side_data:
        if data.type.name == "DISPLAYMATRIX":
            values = np.frombuffer(bytes(data), np.int32).astype(np.float64)[[0, 1, 3, 4]].reshape(2, 2)
            largest = np.abs(values).max()
            return values / largest if largest else None
    return None


def upright(pixels: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """Pixels [H, W, 3] as the matrix shows them. Raises ValueError for one that is no quarter turn, mirrored or not."""
    if matrix is None:
        return pixels
    signs = np.rint(matrix)
    across, down = signs  # where x and y go: each to one axis, and no two to one
    lone = all((np.abs(signs).sum(axis) == 1).all() for axis in (0, 1))
    if np.abs(matrix - signs).max() > _NEAR or not lone:
        rows = "; ".join(" ".join(f"{value:g}" for value in row) for row in matrix.round(3))
        raise ValueError(f"is to be shown by the matrix ({rows}), which is no quarter turn; write it again upright")
    if across[0]:
        right, below = across[0], down[1]
    else:
        pixels = pixels.transpose(1, 0, 2)
        right, below = down[0], across[1]
    return pixels[:: int(below), :: int(right)]
