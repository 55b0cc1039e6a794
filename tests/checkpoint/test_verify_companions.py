"""`checkpoint.verify` checks all files that a loader reads, in addition to the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import models
from octavo.checkpoint import verify
from octavo.cli.main import main
from octavo.models.errors import ModelError
from octavo.models.folder import chat
from tests.checkpoint import folders
from tests.checkpoint.folders import Good
from tests.fuzz import mutate

SHARD = "model-00001-of-00002.safetensors"


class Fault(NamedTuple):
    plant: Callable[[Path], object]
    kind: str
    file: str
    fails: bool = True
    loads: bool = False  # whether Octavo itself loads model and processor all the same
    model: str = "qwen3"


def text(file: str, content: str | bytes) -> Callable[[Path], object]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(raw)


def edited(file: str, **changes: object) -> Callable[[Path], object]:
    return lambda folder: folders.edit_json(folder / file, lambda raw: raw.update(changes))


def replaced(file: str, what: str) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        (folder / file).touch()
        mutate.replace_file(None, folder / file, what)  # type: ignore[arg-type]

    return plant


def linked(folder: Path) -> None:
    shutil.move(folder / "tokenizer.json", folder.parent / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(folder.parent / "elsewhere.json")


def metadata(folder: Path) -> None:
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(raw.replace(b'"format":"pt"', b'"format": 17'))


def stray(stem: str) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:  # beside a single file: with an index its names decide
        tensors = {}
        for shard in sorted(folder.glob("model-*.safetensors")):
            tensors |= load_file(shard)
            shard.unlink()
        (folder / "model.safetensors.index.json").unlink()
        for name in ("model", stem):
            save_file(tensors, folder / f"{name}.safetensors", {"format": "pt"})

    return plant


def more_tokens(folder: Path) -> None:
    folders.edit_json(folder / "tokenizer.json", lambda raw: raw["model"]["vocab"].update(new=99_999))


_JINJA = "chat_template.jinja"
_GENERATION, _IMAGES = "generation_config.json", "preprocessor_config.json"
_SETTINGS = (
    ("max_new_tokens", "x"),
    ("cache_implementation", "nope"),
    ("suppress_tokens", 5.5),
    ("watermarking_config", 3),
    ("num_beams", 0),
    ("temperature", float("nan")),
    ("eos_token_id", 100_000),
    ("pad_token_id", "x"),
)
_PROCESSORS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("qwen3_vl", _IMAGES, {"patch_size": 8}),
    ("qwen3_vl", _IMAGES, {"merge_size": 1}),
    ("qwen3_vl", _IMAGES, {"temporal_patch_size": 1}),
    ("qwen3_vl", _IMAGES, {"image_std": [0.5, 0, 0.5]}),
    ("qwen3_vl", _IMAGES, {"image_mean": [0.5, float("nan"), 0.5]}),
    ("qwen3_vl", _IMAGES, {"size": {"shortest_edge": 1 << 20, "longest_edge": 1 << 21}}),
    ("qwen3_vl", _IMAGES, {"min_pixels": 1 << 24}),
    ("qwen3_vl", "video_preprocessor_config.json", {"patch_size": 8}),
    ("qwen3_vl", "config.json", {"image_token_id": 3}),
)
FAULTS = {
    "empty config": Fault(text("config.json", "{}"), "config", "config.json"),
    "foreign config": Fault(text("config.json", '{"_class_name": "UNet", "layers": 2}'), "config", "config.json"),
    "a layer too many": Fault(edited("config.json", num_hidden_layers=10**9), "config", "config.json"),
    "quantization of a word": Fault(edited("config.json", quantization_config="x"), "config", "config.json"),
    "labels without end": Fault(edited("config.json", num_labels=30_000_000), "config", "config.json"),
    "a number too large": Fault(edited("config.json", bos_token_id=1 << 40), "config", "config.json"),
    "no number": Fault(edited("config.json", rms_norm_eps=float("nan")), "config", "config.json"),
    "dtype of whole numbers": Fault(edited("config.json", dtype="int8"), "config", "config.json"),
    "dtype no word": Fault(edited("config.json", dtype=5), "config", "config.json"),
    "quantization of nothing": Fault(edited("config.json", quantization_config={}), "quantization", "config.json"),
    "config of no end": Fault(replaced("config.json", "device"), "config", "config.json"),
    "tokenizer cut": Fault(text("tokenizer.json", '{"version": "1.0"'), "companion", "tokenizer.json"),
    "half a tokenizer": Fault(lambda folder: (folder / "tokenizer.json").unlink(), "companion", "tokenizer.json"),
    "tokenizer of nothing": Fault(text("tokenizer.json", "{}"), "companion", "tokenizer.json"),
    "tokenizer no text": Fault(text("tokenizer_config.json", b"\xff\xfe{}"), "companion", "tokenizer_config.json"),
    "field of the tokenizer": Fault(edited("tokenizer_config.json", eos_token=[3]), "companion", "tokenizer.json"),
    "template cut": Fault(text(_JINJA, "{% for m in messages"), "template", "chat template"),
    "template of a power": Fault(text(_JINJA, "{{ 9 ** (9 ** 9) }}"), "template", "chat template"),
    "template fails": Fault(text(_JINJA, "{{ messages[99].x.y }}"), "template", "chat template"),
    "template says nothing": Fault(text(_JINJA, "hello"), "template", "chat template", loads=True),
    "processor": Fault(
        edited("preprocessor_config.json", patch_size="x"), "companion", "tokenizer.json", model="qwen3_vl"
    ),
    "processor cut": Fault(
        text("preprocessor_config.json", "["), "companion", "preprocessor_config.json", model="qwen3_vl"
    ),
    "generation settings": Fault(text(_GENERATION, "[1"), "generation-config-left-out", _GENERATION),
    "generation settings with a mark": Fault(text(_GENERATION, "\ufeff{}"), "generation-config-left-out", _GENERATION),
    "generation settings nested": Fault(text(_GENERATION, "[" * 100_000), "generation-config", _GENERATION),
    **{
        f"generation: {key}={value}": Fault(
            text(_GENERATION, json.dumps({key: value})), "generation-config", _GENERATION
        )
        for key, value in _SETTINGS
    },
    **{
        f"{family} {file.partition('.')[0]}: {change}": Fault(
            edited(file, **change), "companion", "tokenizer.json", model=family
        )
        for family, file, change in _PROCESSORS
    },
    "length no number": Fault(edited("tokenizer_config.json", model_max_length="x"), "companion", "tokenizer.json"),
    "pipe": Fault(replaced(_GENERATION, "pipe"), "generation-config", _GENERATION),
    "pipe as tokenizer": Fault(replaced("tokenizer.json", "pipe"), "companion", "tokenizer.json"),
    "pipe as shard": Fault(replaced(SHARD, "pipe"), "header", SHARD),
    "pipe nobody reads": Fault(replaced("notes", "pipe"), "special", "notes", loads=True),
    "socket": Fault(replaced("vocab.json", "socket"), "companion", "vocab.json"),
    "link out": Fault(linked, "link", "tokenizer.json", fails=False, loads=True),
    "link to nothing": Fault(replaced("added_tokens.json", "broken link"), "link", "added_tokens.json", loads=True),
    "name": Fault(text("a\x1b[2Jb.txt", "x"), "name", "a\x1b[2Jb.txt", loads=True),
    "stray weights": Fault(stray("consolidated"), "extra-shard", "consolidated.safetensors", loads=True),
    "stray adapter": Fault(stray("adapter_model"), "extra-shard", "adapter_model.safetensors", loads=True),
    "metadata": Fault(metadata, "header", SHARD),
    "adapter config": Fault(text("adapter_config.json", "{}"), "adapter-config", "adapter_config.json"),
    "tokens above": Fault(more_tokens, "token-ids", "tokenizer.json", fails=False, loads=True),
}


DEAR = "template of a power"  # a second of processor time for each reader; test_chat.py has it for one of them


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.long] if fault == DEAR else []) for fault in FAULTS]
)
def test_all_files_that_loaders_read_are_checked(
    fault: str, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1)
    plant, kind, file, fails, loads, model = FAULTS[fault]
    folder = tmp_path / "damaged"
    shutil.copytree(good("plain", model), folder)
    plant(folder)
    verified = verify(folder, quick=True)
    finding = next((f for f in verified.findings if f.kind == kind), None)
    assert finding is not None, verified.findings
    assert finding.file == file and finding.status == ("fail" if fails else "warn") and verified.ok != fails
    assert finding.text.isprintable() and any(v.verdict != "ok" or v.warns for v in verified.verdicts)
    try:
        models.load(folder)
        models.load_processor(folder)
    except ModelError as error:
        assert not loads and str(folder) in str(error) and str(error).isprintable()
    else:
        assert loads


def test_unread_files_are_listed(good: Good, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(good("plain"), tmp_path / "model"))
    (folder / "README.md").touch()
    (folder / "runs").mkdir()
    verified = verify(folder)
    assert verified.ok and not verified.findings and verified.unread == ("README.md", "runs/")
    assert main(["verify", str(folder), "--quick"]) == 0
    out = capsys.readouterr().out
    assert "Not read: README.md, runs/." in out and "No problems found" not in out
    assert "values were not read" in out


def test_hub_snapshot_passes_like_a_folder(good: Good, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "repo" / "blobs", tmp_path / "repo" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copytree(good("plain"), blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert verify(snapshot).findings == ()


def test_failing_template_is_reported(good: Good) -> None:
    processor = models.load_processor(good("plain"))
    question = [{"role": "user", "content": "Yes?"}]
    assert "Yes?" in chat.render(processor, question)
    processor.tokenizer.chat_template = "{{ raise_exception('only two') }}"
    with pytest.raises(ModelError, match="chat template .*only two"):
        chat.render(processor, question)


def test_tokenizer_of_a_larger_model_fails_at_the_first_prompt(good: Good, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good("plain"), tmp_path / "model"))
    folders.edit_json(folder / "config.json", lambda raw: raw.update(vocab_size=256))
    for shard in folder.glob("model-*.safetensors"):
        cut = {n: t[:256].clone() if t.shape[0] == 512 else t for n, t in load_file(shard).items()}
        save_file(cut, shard, {"format": "pt"})
    verified = verify(folder)
    assert "foreign-tokenizer" in {finding.kind for finding in verified.failures}
    assert {verdict.verdict for verdict in verified.verdicts} == {"loads, wrong answers"}
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], return_tensors="pt", return_dict=True)
    with pytest.raises(IndexError, match="index out of range"):
        model(input_ids=prompt["input_ids"])


def test_servers_do_not_start_without_a_tokenizer(good: Good, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good("plain"), tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    verified = verify(folder)
    assert verified.ok and "no-tokenizer" in {finding.kind for finding in verified.warnings}
    assert {verdict.loader: verdict.verdict for verdict in verified.verdicts} == {
        "transformers": "ok", "vLLM": "refuses", "SGLang": "refuses"
    }  # fmt: skip
    sources = {verdict.loader: verdict.source for verdict in verified.verdicts}
    assert sources["vLLM"] == "loaded in vLLM 0.32 on a CPU"
