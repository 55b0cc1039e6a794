"""A key of this test's own, as a user would give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import vault

SECRET = bytes(range(32))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> vault.Key:
    """The key of the known answer, in the environment."""
    monkeypatch.delenv(vault.FILE, raising=False)
    monkeypatch.setenv(vault.VALUE, SECRET.hex())
    return vault.find()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The file of another key."""
    vault.write_new(tmp_path / "other.key")
    return tmp_path / "other.key"
