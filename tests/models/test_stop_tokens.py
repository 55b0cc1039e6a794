"""The token with which a chat template ends answers: detected, used as a stop, and written to folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import models
from octavo.checkpoint import verify
from octavo.checkpoint.hf_folder import save_hf
from octavo.generation import Engine, Sampling
from octavo.generation.prompts import prompt_of
from octavo.models.processors import stop_tokens
from octavo.parallel import World
from octavo.train.artifacts import export_model

#: family -> the token that ends its answers
ENDS = {
    "qwen3": "<|im_end|>",
    "llama": "</s>",
    "gemma3": "<end_of_turn>",
    "smolvlm": "<end_of_utterance>",
    "mistral3": "</s>",
    "nvila": "<|im_end|>",
}
SETTINGS = "generation_config.json"


def edit(file: Path, **keys: Any) -> None:
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**{k: v for k, v in raw.items() if k not in keys}, **keys}))


@pytest.fixture
def base(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """base(family) -> a copy of its mini model as base models are: generation stops at another token than the chat
    template ends answers with (number 7, as the tokenizer's end too unless `tokenizer` is False)."""

    def get(family: str, tokenizer: bool = True) -> Path:
        folder = Path(shutil.copytree(checkpoint(family), tmp_path / family))
        edit(folder / SETTINGS, eos_token_id=7)
        if tokenizer:
            edit(folder / "tokenizer_config.json", eos_token=models.load_tokenizer(folder).convert_ids_to_tokens(7))
        return folder

    return get


def ends(folder: Path) -> Any:
    return json.loads((folder / SETTINGS).read_text())["eos_token_id"]


def template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize("family", ENDS)
def test_the_token_that_ends_answers_is_known(
    family: str, checkpoint: Callable[[str], Path], base: Callable[..., Path]
) -> None:
    whole = models.load_processor(checkpoint(family))
    number = whole.tokenizer.convert_tokens_to_ids(ENDS[family])
    assert stop_tokens.answer_end_token(whole) == stop_tokens.EndToken(number, ENDS[family])
    assert stop_tokens.missing_end_token(checkpoint(family)) is None  # its own settings stop there
    if family != "llama":  # whose template writes the tokenizer's end token, whichever it is
        folder = base(family)
        assert stop_tokens.missing_end_token(folder) == stop_tokens.EndToken(number, ENDS[family])


TURN = "{% for m in messages %}{{ m['content'] }}END{% endfor %}"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (TURN.replace("END", "<|im_end|>\n"), "<|im_end|>"),
        (TURN.replace("END", "<|im_start|><|im_end|>"), "<|im_end|>"),
        (TURN.replace("END", "<|im_end|>") + "{{ '<|endoftext|>' }}", "<|endoftext|>"),
        (TURN.replace("END", "\n"), None),  # as GLM's: the next turn begins, and nothing ends this one
        (TURN.replace("END", "</end>"), None),  # a mark that is no token
        ("{{ raise_exception('no') if messages[0]['role'] != 'system' }}" + TURN.replace("END", "<|im_end|>"),
         "<|im_end|>"),
        ("{% for m in messages %}{{ m['content'][0]['text'] }}<|im_end|>{% endfor %}", "<|im_end|>"),
    ],
)  # fmt: skip
def test_end_token_of_a_template(checkpoint: Callable[[str], Path], written: str, found: str | None) -> None:
    tokenizer = models.load_tokenizer(checkpoint("qwen3"))
    tokenizer.chat_template = written
    end = stop_tokens.answer_end_token(tokenizer)
    assert (end and end.text) == found
    tokenizer.chat_template = None
    assert stop_tokens.answer_end_token(tokenizer) is None


def test_template_that_ends_with_a_stop_token_needs_no_other(base: Callable[..., Path]) -> None:
    folder = base("qwen3")
    template(folder, TURN.replace("END", "<|im_end|>") + "{{ '<|endoftext|>' }}")
    edit(folder / SETTINGS, eos_token_id=[models.load_tokenizer(folder).convert_tokens_to_ids("<|im_end|>")])
    assert stop_tokens.missing_end_token(folder) is None


def test_exports_and_hf_have_both_end_tokens(base: Callable[..., Path], tmp_path: Path) -> None:
    folder, messages = base("qwen3"), []
    number = models.load_tokenizer(folder).convert_tokens_to_ids("<|im_end|>")
    done = export_model(folder, tmp_path / "served", "fp8-dynamic", log=messages.append)
    assert ends(tmp_path / "served") == [7, number] and done.end == stop_tokens.EndToken(number, "<|im_end|>")
    assert f"generation_config.json now names <|im_end|> ({number}) as an end token, too" in "\n".join(messages)
    assert done.to_json()["end_token_added"] == {"id": number, "text": "<|im_end|>"}
    assert save_hf(models.load(folder), folder, tmp_path / "hf", World()) and ends(tmp_path / "hf") == [7, number]
    again = export_model(tmp_path / "hf", tmp_path / "again", "bf16")
    assert again.end is None and ends(tmp_path / "again") == [7, number]
    assert ends(folder) == 7  # the source is as it was


def test_generation_settings_are_created_if_missing(base: Callable[..., Path], tmp_path: Path) -> None:
    folder = base("qwen3")
    (folder / SETTINGS).unlink()
    edit(folder / "config.json", eos_token_id=7, pad_token_id=5)
    export_model(folder, tmp_path / "served", "bf16")
    number = models.load_tokenizer(folder).convert_tokens_to_ids("<|im_end|>")
    result = json.loads((tmp_path / "served" / SETTINGS).read_text())
    assert result == {"pad_token_id": 5, "eos_token_id": [7, number]}
    assert models.load(tmp_path / "served").generation_config.eos_token_id == [7, number]


def test_weights_are_written_without_a_tokenizer(base: Callable[..., Path], tmp_path: Path) -> None:
    folder = base("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    assert export_model(folder, tmp_path / "served", "bf16").end is None and ends(tmp_path / "served") == 7


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_answers_stop_at_both_end_tokens(base: Callable[..., Path], family: str) -> None:
    folder = base(family)
    model, processor = models.load(folder), models.load_processor(folder)
    number = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens.stop_ids(model.generation_config, processor) == [7, number]
    assert stop_tokens.stop_ids(SimpleNamespace(eos_token_id=None), processor) == [7, number]  # the tokenizer's end
    with torch.no_grad():  # every token is <|im_end|>
        for parameter in model.parameters():
            parameter.zero_()
        model.get_input_embeddings().weight[number] = 1
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, out: out.index_fill(-1, torch.tensor([number]), 9.0))
    messages = [{"role": "user", "content": "Which?"}]
    assert models.generate(model, processor, messages, max_new_tokens=4) == ""
    for whole in (processor, processor.tokenizer):
        [done] = Engine(model, whole, slots=1).generate([prompt_of(processor, messages)], Sampling(4, temperature=0))
        assert done.reason == "stop" and done.tokens.tolist() == [number]


@pytest.mark.parametrize(("tokenizer", "kind"), [(True, "end-token"), (False, "end-token-of-tokenizer")])
def test_verify_warns(base: Callable[..., Path], tokenizer: bool, kind: str) -> None:
    verified = verify(base("qwen3", tokenizer), quick=True)
    [finding] = verified.findings
    assert verified.ok and finding.kind == kind and finding.file == SETTINGS and "<|im_end|>" in finding.text
    warned = {verdict.loader for verdict in verified.verdicts if verdict.warns}
    assert warned == ({"transformers", "vLLM", "SGLang"} if tokenizer else {"transformers"})


def test_settings_without_end_token_are_reported_and_completed(base: Callable[..., Path], tmp_path: Path) -> None:
    """transformers then uses nothing else; the tokenizer's end token stays a stop, as in Octavo's answers."""
    folder = base("qwen3")
    settings = json.loads((folder / SETTINGS).read_text())
    del settings["eos_token_id"]
    (folder / SETTINGS).write_text(json.dumps(settings))
    tokenizer = models.load_tokenizer(folder)
    learned = stop_tokens.missing_end_token(folder)
    assert learned is not None and learned.text == "<|im_end|>"
    assert stop_tokens.stop_ids(SimpleNamespace(eos_token_id=None), tokenizer) == [7, learned.id]
    assert stop_tokens.stop_ids(SimpleNamespace(eos_token_id=[]), tokenizer) == [7, learned.id]
    assert any(f"write eos_token_id [7, {learned.id}]" in one.text for one in verify(folder, quick=True).warnings)
    export_model(folder, tmp_path / "served", "bf16")
    assert ends(tmp_path / "served") == [7, learned.id]
    assert stop_tokens.missing_end_token(tmp_path / "served") is None


def test_an_end_token_that_only_the_tokenizer_names(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path / "model"))
    (folder / SETTINGS).write_text("{}")
    (warning,) = (one for one in verify(folder, quick=True).warnings if one.kind.startswith("end-token"))
    assert "the tokenizer's end token" in warning.text


def test_folder_with_foreign_tokenizer_is_not_exported(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    del raw["image_token_id"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").unlink()  # no weights are read
    with pytest.raises(models.ModelError, match="config.json has no image_token_id"):
        export_model(folder, tmp_path / "served", "bf16")
    assert not (tmp_path / "served").exists()
