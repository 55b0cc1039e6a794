"""Every input in tests/fuzz/corpus/: the command ends with the expected result, without other effects."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

CORPUS = Path(__file__).with_name("corpus")
KEYS = {
    "kind", "files", "tiny", "command", "exit", "prints", "never_prints", "writes", "never_writes", "leaves_no",
}  # fmt: skip


def _bytes(content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    return base64.b64decode(content["base64"]) if "base64" in content else json.dumps(content["json"]).encode()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Mini checkpoints by family, each written only once."""
    return {"": tmp_path_factory.mktemp("corpus")}


def _write(entry: dict[str, Any], folder: Path, checkpoints: dict[str, Path]) -> None:
    if family := entry.get("tiny"):
        from octavo.models.tiny import tiny

        if family not in checkpoints:
            checkpoints[family] = tiny.write(family, checkpoints[""] / family, size="mini")
        shutil.copytree(checkpoints[family], folder / "tiny")
    for name, content in entry.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_bytes(content))


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.json")), ids=lambda file: file.stem)
def test_former_failing_inputs_are_handled(
    file: Path, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    entry = json.loads(file.read_text(encoding="utf-8"))
    assert entry.keys() <= KEYS and {"kind", "command", "exit"} <= entry.keys()
    _write(entry, tmp_path, checkpoints)
    monkeypatch.chdir(tmp_path)
    code = main(entry["command"])
    captured = capfd.readouterr()
    printed = captured.out + captured.err
    assert code == entry["exit"], printed
    assert "Traceback" not in printed
    for pattern in entry.get("prints", []):
        assert re.search(pattern, printed), (pattern, printed)
    for pattern in entry.get("never_prints", []):
        assert not re.search(pattern, printed), (pattern, printed)
    for name, pattern in entry.get("writes", {}).items():
        assert re.search(pattern, (tmp_path / name).read_text(encoding="utf-8")), (name, pattern)
    for name, pattern in entry.get("never_writes", {}).items():
        path = tmp_path / name
        assert not path.exists() or not re.search(pattern, path.read_text(encoding="utf-8")), (name, pattern)
    assert [name for name in entry.get("leaves_no", []) if (tmp_path / name).exists()] == []
