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


@pytest.mark.parametrize("rows", [64, 1])  # the template's tokens are beyond the rows; only the last token is
def test_a_vocab_size_that_the_embedding_does_not_have_is_not_blamed_on_the_tokenizer(
    rows: int, folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = models.read_config(folder).vocab_size
    added(folder)
    wrong = rows if rows > 1 else len(models.load_tokenizer(folder)) - 1
    edit(folder / "config.json", lambda raw: raw.update(vocab_size=wrong, pad_token_id=None))
    (folder / SETTINGS).unlink()
    cfg = make(f"model.path={folder}", *ONE)
    sentence = f"config.json describes an embedding of {wrong} rows (vocab_size), but 'model.embed_tokens.weight' in"
    for command in ("plan", "train"):
        code, said = planned(cfg, tmp_path, capsys, command)
        assert code == 1 and sentence in said and f"has {right}. Use the config.json that" in said
        assert "tokenizer" not in said
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "bf16"]) == 1
    assert main(["generate", str(folder), "--prompt", "a"]) == 1
    said = capsys.readouterr().err
    assert sentence in said and "tokenizer" not in said
    verified = verify(folder, quick=True)
    assert [finding.kind for finding in verified.failures] == ["shape"]
    assert not any("tokenizer that belongs" in finding.text for finding in verified.findings)


def test_a_vocab_size_below_the_end_token_is_named_before_generation_config(folder: Path) -> None:
    edit(folder / "config.json", lambda raw: raw.update(vocab_size=64))
    with pytest.raises(models.ModelError, match=r"model/config.json gives vocab_size=64, but eos_token_id in gen"):
        models.load_tokenizer(folder)


WRONG_VALUES = {
    "hidden_act='sillu', a value that transformers": {"hidden_act": "sillu"},
    "rope_parameters.rope_type='foo', a value that transformers": {
        "rope_parameters": {"rope_type": "foo", "rope_theta": 10000.0}
    },
    "pad_token_id=100000 beyond vocab_size=": {"pad_token_id": 100000},
    "quantization_config must be a mapping, and is 'fp8'": {"quantization_config": "fp8"},
    "num_hidden_layers=0; it must be above 0": {"num_hidden_layers": 0, "layer_types": []},
}


@pytest.mark.parametrize("sentence", WRONG_VALUES)
def test_a_wrong_value_is_named_with_its_key(
    sentence: str, folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder / "config.json", lambda raw: raw.update(WRONG_VALUES[sentence]))
    code, said = planned(make(f"model.path={folder}", *ONE), tmp_path, capsys)
    assert code == 1 and sentence in said
    (failure,) = verify(folder, quick=True).failures
    assert sentence in failure.text and "object has no attribute" not in failure.text
    if "quantization_config" in sentence:
        assert main(["convert", "hf_to_dcp", str(folder), str(tmp_path / "dcp")]) == 1
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("key", ["vocab_size", "hidden_act"])
def test_a_run_starts_in_the_directory_of_one_that_was_refused(
    key: str, folder: Path, make: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory, its lock and its config.yaml are written first, so that ranks agree and a failure is on record."""
    right = (folder / "config.json").read_text()
    wrong = {"vocab_size": 64, "hidden_act": "sillu"}
    edit(folder / "config.json", lambda raw: raw.update({key: wrong[key]}, pad_token_id=None))
    cfg = make(f"model.path={folder}", *ONE)
    code, _ = planned(cfg, tmp_path, capsys, "train")
    assert code == 1 and (Path(cfg.run.dir) / "config.yaml").is_file()
    (folder / "config.json").write_text(right)
    code, said = planned(cfg, tmp_path, capsys, "train")
    assert code == 0, said
    assert json.loads((Path(cfg.run.dir) / "result.json").read_text())["steps"] == 1
