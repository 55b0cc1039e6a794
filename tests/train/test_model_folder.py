"""What plan and train say of a model folder's tokens before weights are read, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import data, models, rl, train
from octavo.checkpoint import verify
from octavo.cli.main import main
from octavo.config import Config, to_yaml
from octavo.models.weights import loading
from octavo.train.artifacts import merge_model
from octavo.train.setup import model_folder

pytestmark = pytest.mark.usefixtures("unseen", "uncounted")
SETTINGS = "generation_config.json"
ONE = ("train.steps=1", "train.warmup=0", "data.eval=[]", "fp8.recipe=off")


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(place / "text", tmp_path / "model"))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def base_model(folder: Path) -> int:
    """Make generation stop at another token than the template's; returns that of the template."""
    edit(folder / SETTINGS, lambda raw: raw.update(eos_token_id=7))
    return int(models.load_tokenizer(folder).convert_tokens_to_ids("<|im_end|>"))


def planned(cfg: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str = "plan") -> tuple[int, str]:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(cfg))
    code = main([command, str(file)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_end_token_that_the_folder_lacks_is_said(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    number = base_model(folder)
    cfg = make(f"model.path={folder}", *ONE, "run.hf=true")
    code, said = planned(cfg, tmp_path, capsys, command)
    assert code == 0 and " ".join(said.split()).count(f"the chat template ends answers with <|im_end|> ({number})") == 1
    assert "stop at 7: Octavo stops at both, hf/ and exports name both" in " ".join(said.split())
    if command == "train":
        assert json.loads((Path(cfg.run.dir) / "hf" / SETTINGS).read_text())["eos_token_id"] == [7, number]


def test_a_merge_names_both_and_a_server_of_the_adapter_is_thought_of(
    folder: Path, make: Callable[..., Config], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    number = base_model(folder)
    cfg = make(f"model.path={folder}", *ONE, "lora={rank: 2}")
    [note] = model_folder.notes(cfg, models.load_processor(folder))
    assert note.endswith(f"octavo merge names both, and a server of adapter/ needs stop_token_ids [{number}]")
    result = train.run(cfg)
    merge_model(result.dir, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / SETTINGS).read_text())["eos_token_id"] == [7, number]


def test_preferences_say_it_too(folder: Path, make: Callable[..., Config], place: Path, tmp_path: Path) -> None:
    number = base_model(folder)
    rows = [{"prompt": "a?", "chosen": "yes", "rejected": "no"}] * 4
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of = (f"data.train=[{{path: {tmp_path / 'pairs.jsonl'}}}]", "train.phase=preference", "preference={loss: orpo}")
    result = rl.run(make(f"model.path={folder}", *ONE, *of, "run.hf=true"))
    assert json.loads((result.dir / "hf" / SETTINGS).read_text())["eos_token_id"] == [7, number]
    assert any(f"<|im_end|> ({number})" in n for n in json.loads((result.dir / "plan.json").read_text())["notes"])


def added(folder: Path, *names: str) -> None:
    """Tokens added to tokenizer.json beyond the embedding: the mini model has rows up to the next 64."""

    def change(raw: dict[str, Any]) -> None:
        last = raw["added_tokens"][-1]
        for name in (*(f"<spare{i}>" for i in range(64)), *names):
            number = raw["added_tokens"][-1]["id"] + 1
            raw["added_tokens"].append({**last, "id": number, "content": name, "special": False})

    edit(folder / "tokenizer.json", change)


def moved(folder: Path) -> None:
    """`<|im_start|>` beyond the embedding, as in the tokenizer of another model."""

    def change(raw: dict[str, Any]) -> None:
        tokens = raw["added_tokens"]
        start = next(token for token in tokens if token["content"] == "<|im_start|>")
        tokens.remove(start)
        first = tokens[0]["id"]
        tokens += [{**start, "content": f"<spare{i}>"} for i in range(64)] + [start]
        for number, token in enumerate(tokens):
            token["id"] = first + number

    edit(folder / "tokenizer.json", change)


def short(folder: Path) -> None:
    """A tokenizer that lacks most letters."""

    def change(raw: dict[str, Any]) -> None:
        model = raw["model"]
        vocabulary = {text: number for text, number in model["vocab"].items() if not text.isalpha() or text in "xyzXYZ"}
        merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        kept = {*vocabulary}
        model["merges"] = [pair for pair in merges if {*pair, "".join(pair)} <= kept]
        model["vocab"] = vocabulary

    edit(folder / "tokenizer.json", change)


def test_a_tokenizer_of_another_model_is_refused_before_weights_are_read(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    moved(folder)
    sentence = "(<|im_start|>) is outside the model's embedding of"
    cfg = make(f"model.path={folder}", *ONE)
    for command in ("plan", "train"):
        with monkeypatch.context() as patched:
            patched.setattr(loading, "_load_stock", lambda *args: pytest.fail("weights were read"))
            code, said = planned(cfg, tmp_path, capsys, command)
        assert code == 1 and sentence in said and "Use the tokenizer that belongs to the model" in said
    assert main(["generate", str(folder), "--prompt", "a"]) == 1
    assert sentence in capsys.readouterr().err
    assert any(sentence in finding.text for finding in verify(folder, quick=True).failures)


def test_tokens_beyond_the_embedding_are_said_and_rows_with_them_are_refused(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    added(folder, "zebra")
    rows = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": text}]} for text in
            ("one", "a zebra", "two", "three", "four")]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = make(
        f"model.path={folder}", *ONE, f"data.train=[{{path: {tmp_path / 'rows.jsonl'}}}]", "data.on_bad_sample=skip"
    )
    code, said = planned(cfg, tmp_path, capsys)
    assert code == 0 and "the tokenizer has tokens up to number" in said
    rows_of_table = models.read_config(folder).vocab_size
    encoder = data.Encoder(models.load_processor(folder), 128)
    assert encoder.processor.embedding_rows == rows_of_table
    code, said = planned(cfg, tmp_path, capsys, "train")
    skipped = (Path(cfg.run.dir) / "skipped.jsonl").read_text()
    assert code == 0 and f"('zebra'), but the model's embedding has {rows_of_table} rows" in skipped
    assert "token-ids" in {finding.kind for finding in verify(folder, quick=True).warnings}


def test_letters_without_tokens_are_said(
    folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.missing_letters(models.load_tokenizer(folder), folder) == ""
    short(folder)
    _, said = planned(make(f"model.path={folder}", *ONE), tmp_path, capsys)
    assert "the tokenizer has no token for 46 of the 62 letters and digits of ASCII (a, b, c," in said
    assert "letters" in {finding.kind for finding in verify(folder, quick=True).warnings}
    (folder / "sealed.json").write_text("{}")
    assert models.missing_letters(models.load_tokenizer(folder), folder) == ""  # a sealed model's words are its own
