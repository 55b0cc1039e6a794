"""Writes octavo/data/builtin/uci_digits/digits.npz, the data set of `octavo digits`, from scikit-learn.

    python benchmarks/digits_data.py octavo/data/builtin/uci_digits/digits.npz

`levels` [1797, 8, 8] uint8, 0 to 16, and `labels` [1797] uint8 are equal to `load_digits().images` and `.target`, as
tests/data/test_digits.py checks. Needs scikit-learn, which is not a dependency of Octavo.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(target: Path) -> None:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    levels, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    assert (levels == bunch.images).all() and (labels == bunch.target).all()
    np.savez_compressed(target, levels=levels, labels=labels)
    print(f"{target}: {len(labels)} digits, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
