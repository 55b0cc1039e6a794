"""A key, and small checkpoints of families, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.sealing import Key
from tests.models.conftest import checkpoint  # noqa: F401

SECRET = bytes(range(32))


@pytest.fixture(scope="session")
def key() -> Key:
    return Key(SECRET)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The same key in a file of its owner's."""
    file = tmp_path / "seal.key"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return file
