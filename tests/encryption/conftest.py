"""A key of this test's own, as a user would give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.base import encryption
from octavo.base.encryption.key import write_new

SECRET = bytes(range(32))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> encryption.Key:
    """The key of the known answer, in the environment."""
    monkeypatch.delenv(encryption.FILE, raising=False)
    monkeypatch.setenv(encryption.VALUE, SECRET.hex())
    return encryption.find_key()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The file of another key."""
    write_new(tmp_path / "other.key")
    return tmp_path / "other.key"
