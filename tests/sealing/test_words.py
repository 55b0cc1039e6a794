"""A sealed model generates sealed tokens on the command line; plain inputs are rejected."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octavo import adapters
from octavo.cli.main import main
from octavo.sealing import SealError, seal_model, seal_text, unseal_text
from tests.sealing.test_adapter import attached

ASKED = "Which digit is first?"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "nvila"])
def test_text_round_trip(checkpoint, key, tmp_path, capsys, family):
    """Of a text model; of one that sees, whose turns are parts; of one whose config.json names a line break."""
    source, twin = checkpoint(family), tmp_path / "twin"
    words = seal_text(ASKED, source, key)
    assert "digit" not in words and len(words.split()) > 4
    assert ASKED in unseal_text(words, source, key)
    seal_model(source, twin, key)
    answers = []
    for folder, text in ((source, ASKED), (twin, words)):
        assert main(["generate", str(folder), "--prompt", text, "--max-new-tokens", "5"]) == 0
        answers.append(capsys.readouterr().out.removesuffix("\n"))
    assert unseal_text(answers[1], source, key) == answers[0] != ""
    with pytest.raises(SealError, match="not a word of a sealed model"):
        unseal_text("t1 hello", source, key)


def test_plain_text_for_sealed_model_is_rejected(checkpoint, key, tmp_path, capsys):
    """Words, pixels and rows as they are beside the twin, and an adapter of the twin beside the plain model."""
    source, twin, adapter = checkpoint("qwen3_moe"), tmp_path / "twin", tmp_path / "adapter"
    seal_model(source, twin, key)
    adapters.save(attached(twin), adapter, twin)
    (tmp_path / "picture.png").touch()
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    turns = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "7"}]
    rows.write_text(json.dumps({"messages": turns}))
    data = f"data: {{train: [{{path: {rows}}}], eval: [{{path: {rows}}}]}}\n"
    run.write_text(f"model: {{path: {source}}}\n{data}train: {{steps: 1}}\nrun: {{dir: {tmp_path}}}\n")
    refused(capsys, ["generate", twin, "--prompt", ASKED], "'Which' is not in its vocabulary")
    refused(capsys, ["generate", twin, "--prompt", "t1", "--image", tmp_path / "picture.png"], "is not permuted")
    refused(capsys, ["eval", twin, "--config", run], "plain rows are noise to it")
    for command in (["generate", adapter, "--prompt", "t1"], ["merge", adapter, tmp_path / "merged"]):
        refused(capsys, [*command, "--base", source], "is sealed with the key .* and .* is not sealed")
    assert main(["generate", str(adapter), "--prompt", "t1", "--max-new-tokens", "2"]) == 0
    run.write_text(run.read_text().replace("data: {", "data: {sealed: true, "))
    refused(
        capsys, ["eval", twin, "--config", run, "--answers", "1"], "scored as text, which sealed rows do not contain"
    )


def refused(capsys, words: list[str | Path], said: str) -> None:
    assert main([str(word) for word in words]) != 0
    assert re.search(said, capsys.readouterr().err)
