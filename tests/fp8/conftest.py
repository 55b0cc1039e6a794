"""Shared by the tests of FP8: collecting cycles looks at what a test made, not at everything that was imported."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _nothing_older() -> None:
    """The accountant of kept bytes, and many tests of what dies when, call ``gc.collect``. With torch, transformers and
    all tests in one process that takes half a second; without what was there before the module, a few milliseconds."""
    gc.collect()
    gc.freeze()
