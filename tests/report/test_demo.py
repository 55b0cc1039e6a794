"""The demo's own parts: the embedded configuration, the question, the pictures. cli/test_package.py runs a demo."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from octavo.report import ReportError
from octavo.report.trial import demo
from octavo.report.trial.demo import Answer, DemoAnswers


@pytest.fixture
def image() -> Image.Image:
    return Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert("RGB")


@pytest.fixture
def interview(image: Image.Image) -> DemoAnswers:
    return DemoAnswers(image, (Answer("First?", "7", "7"), Answer("Second?", "", "1")), gemms=168)


def test_embedded_configuration_uses_paths_of_the_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("octavo.data.builtin.digits.write", lambda directory, **_: None)
    monkeypatch.setattr("octavo.models.tiny.tiny.write", lambda *_, **__: None)
    monkeypatch.setattr(demo, "_tokenizer_texts", lambda file: [])
    cfg = demo.write_inputs(tmp_path / "demo", steps=40, console=None)
    assert cfg.train.steps == 40 and cfg.fp8.recipe == demo.RECIPE
    assert cfg.model.path == str(tmp_path / "demo" / "model"), "paths are those of the folder, not of the package"
    assert cfg.data.eval[0].path == str(tmp_path / "demo" / "digits" / "test.json")


def test_changed_configuration_is_kept(tmp_path: Path, monkeypatch) -> None:
    test_embedded_configuration_uses_paths_of_the_folder(tmp_path, monkeypatch)
    file = tmp_path / "demo" / "demo.yaml"
    file.write_text(file.read_text().replace("lr: 2e-3", "lr: 5e-4"))
    assert demo.write_inputs(tmp_path / "demo", steps=40, console=None).train.lr == 5e-4


def test_tokenizer_texts_come_from_conversations(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "<image>First?"}, {"from": "gpt", "value": "7"}]}
    (tmp_path / "train.json").write_text(json.dumps([row]))
    assert demo._tokenizer_texts(tmp_path / "train.json") == ["First?", "7"]


@pytest.mark.parametrize("steps", [0, -1])
def test_zero_steps_are_rejected(tmp_path: Path, steps: int) -> None:
    with pytest.raises(ReportError, match=f"steps={steps}: the demo needs at least one step"):
        demo.run(tmp_path / "demo", steps=steps)
    assert not (tmp_path / "demo").exists()


def test_image_renders_with_and_without_colour(image: Image.Image) -> None:
    coloured = demo.render_image(image, colour=True)
    lines = coloured.plain.splitlines()
    assert len(lines) == 16 and all(line == "▀" * 32 for line in lines)
    assert "rgb(255,255,255)" in str(coloured.spans[-1].style)
    plain = demo.render_image(image, colour=False).plain.splitlines()
    assert len(plain) == 16 and {len(line) for line in plain} == {32}
    assert plain[0].strip() == "" and plain[-1] == "▓▓" * 15 + "██"


def test_questions_follow_earlier_answers_of_the_model(tmp_path: Path, monkeypatch) -> None:
    heard: list[list[dict]] = []

    def answers(model, processor, conversations, sampling):
        ((messages, _),) = conversations
        heard.append([dict(m) for m in messages])
        return [[str(len(heard))]]

    Image.new("L", (16, 16), 200).save(tmp_path / "a.png")
    messages = [{"from": "human", "value": "<image>First?"}, {"from": "gpt", "value": "1"},
            {"from": "human", "value": "Second?"}, {"from": "gpt", "value": "9"}]  # fmt: skip
    (tmp_path / "test.json").write_text(json.dumps([{"image": "a.png", "conversations": messages}]))
    monkeypatch.setattr("octavo.generation.answers", answers)
    monkeypatch.setattr("octavo.train.load_run", lambda run: (None, None, None))
    found = demo.ask_model(tmp_path, tmp_path / "test.json", 0)
    assert [(a.question, a.answer, a.truth, a.right) for a in found.answers] == [
        ("First?", "1", "1", True),
        ("Second?", "2", "9", False),
    ]
    assert [part["type"] for part in heard[0][0]["content"]] == ["image", "text"]
    assert [m["role"] for m in heard[1]] == ["user", "assistant", "user"]
    assert heard[1][1]["content"][0]["text"] == "1"


def test_answers_are_saved_and_printed(interview: DemoAnswers, tmp_path: Path) -> None:
    demo.save_figure(interview, tmp_path / "answer.png")
    assert Image.open(tmp_path / "answer.png").size[0] > 800
    out = io.StringIO()
    demo.print_answers(Console(file=out, width=100), interview, tmp_path)
    assert "First?" in out.getvalue() and "right" in out.getvalue()
    assert "(nothing)" in out.getvalue() and "wrong" in out.getvalue()
    assert "Computed with 168 FP8 GEMMs; saved as" in out.getvalue()
