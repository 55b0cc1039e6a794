"""Atomic writes of files; folders are tested in tests/models/test_save.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from octavo.base import atomic_write


@pytest.mark.parametrize("shared", [False, True])
def test_write_text_is_atomic(tmp_path: Path, monkeypatch, shared: bool) -> None:
    file, read = tmp_path / "result.json", []
    atomic_write.write_text(file, "former", shared)

    def full(handle: int) -> None:
        read.append(file.read_text())  # as another process would, in between
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        atomic_write.write_text(file, "new", shared)
    assert read == ["former"] and file.read_text() == "former" and [*tmp_path.iterdir()] == [file]
    atomic_write.write_text(file, "new", shared)
    assert file.read_text() == "new" and [*tmp_path.iterdir()] == [file]
