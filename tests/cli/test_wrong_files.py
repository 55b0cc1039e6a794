"""Every command names the file of a model folder that is wrong, config.json before all others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.data.builtin import digits
from octavo.models.tiny import tiny

YAML = """
model: {{path: {place}/m}}
fp8: {{recipe: off}}
data: {{train: [{{path: {place}/digits/train.json}}], eval: [{{path: {place}/digits/test.json}}]}}
train: {{steps: 1, seq_length: 128, micro_batch: 1, global_batch: 1, warmup: 0}}
run: {{dir: {place}/lora, health_every: 0, tensorboard: false, hf: false, threads: 1}}
lora: {{rank: 2}}
"""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "export": ("export", "m", "out", "--format", "bf16"),
    "plan": ("plan", "run.yaml"),
    "train": ("train", "run.yaml", "run.dir=out"),
    "verify": ("verify", "m", "--quick"),
    "generate": ("generate", "m", "--prompt", "a", "--max-new-tokens", "1"),
    "merge": ("merge", "lora", "out"),
    "convert": ("convert", "hf_to_dcp", "m", "out"),
    "eval": ("eval", "m", "--config", "run.yaml", "--answers", "1"),
    "seal": ("seal", "model", "m", "out", "--key-file", "key"),
}
#: commands that load no processor: they copy its settings as they are
NO_PROCESSOR = {"export", "convert", "merge"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with m/ (mini Qwen3-VL), a LoRA run on it, and a sealing key; the working directory."""
    folder = tmp_path_factory.mktemp("wrong")
    tiny.write("qwen3_vl", folder / "good", size="mini")
    (folder / "good" / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    shutil.copytree(folder / "good", folder / "m")
    digits.write(folder / "digits", train=8, test=4)
    (folder / "run.yaml").write_text(YAML.format(place=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "run.yaml"]) == 0 and main(["seal", "key", "key"]) == 0
        yield folder


def changed(**fields: object) -> Callable[[str], str]:
    """A file with other values of some fields, in its part for text if it has one; None removes a field."""

    def change(text: str) -> str:
        raw = json.loads(text)
        for key, value in fields.items():
            part = raw if key == "model_type" else raw.get("text_config", raw)
            part.update({key: value}) if value is not None else part.pop(key)
        return json.dumps(raw)

    return change


def truncated(text: str) -> str:
    return text[: len(text) // 2]


CONFIG, SETTINGS = "config.json", ("tokenizer_config.json", "preprocessor_config.json", "generation_config.json")
BAD: Mapping[str, tuple[str, Callable[[str], str], str, set[str]]] = {
    # name: (file, its change, what is said, the commands that do not judge it)
    "truncated": (CONFIG, truncated, "is not JSON", set()),
    "another family": (CONFIG, changed(model_type="qwen9"), "has model_type 'qwen9', which transformers", set()),
    "no family": (CONFIG, changed(model_type=None), "has no model_type", set()),
    "heads": (CONFIG, changed(num_attention_heads=5), "num_attention_heads=5; it must be a multiple of", set()),
    "class": (CONFIG, changed(hidden_size="wide"), "hidden_size", set()),
    **{f"{name} truncated": (name, truncated, "is not JSON", set()) for name in (*SETTINGS, "processor_config.json")},
    **{f"{name} list": (name, lambda text: "[1]", "contains a list; expected an object", set()) for name in SETTINGS},
    "tokens": ("tokenizer_config.json", changed(eos_token=5), "eos_token", {"convert"}),
    "pixels": ("preprocessor_config.json", changed(image_mean="x"), "cannot take an image", NO_PROCESSOR),
}


@pytest.mark.parametrize("case", BAD)
def test_file_at_fault_is_named(place: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    name, change, said, not_judged = BAD[case]
    (place / "m" / name).write_text(change((place / "good" / name).read_text()))
    try:
        for command in (command for command in COMMANDS if command not in not_judged):
            shutil.rmtree(place / "out", ignore_errors=True)
            code, text = call(capsys, command)
            if command == "convert" and "family" in case:  # bytes of any family are converted
                assert code == 0 and "m/config.json has" in text and "it is copied without a check" in text
                continue
            if command == "merge" and name != CONFIG:  # of a run, which knows the file that it was made with
                assert code == 1 and (said in text or f"{name} has changed" in text), text
                continue
            assert code == 1 and f"m/{name}" in text and said in text, (command, text)
            assert name != CONFIG or "the tokenizer" not in text, (command, text)
            assert not (place / "out" / "config.json").exists(), command
    finally:
        shutil.copyfile(place / "good" / name, place / "m" / name)
        shutil.rmtree(place / "out", ignore_errors=True)


def test_config_is_named_before_other_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in SETTINGS:
        (place / "m" / name).write_text("[1]")
    (place / "m" / CONFIG).write_text(changed(num_attention_heads=5)((place / "good" / CONFIG).read_text()))
    try:
        for command in COMMANDS:
            code, text = call(capsys, command)
            assert code == 1 and "m/config.json gives num_attention_heads=5" in text, (command, text)
            assert command == "verify" or not any(name in text for name in SETTINGS), (command, text)
    finally:
        for name in (*SETTINGS, CONFIG):
            shutil.copyfile(place / "good" / name, place / "m" / name)
        shutil.rmtree(place / "out", ignore_errors=True)


def test_unchanged_folder_is_accepted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (command for command in COMMANDS if command not in ("train", "eval", "merge")):
        code, text = call(capsys, command)
        assert code == 0, (command, text)
        shutil.rmtree(place / "out", ignore_errors=True)


def call(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(list(COMMANDS[command]))
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())
