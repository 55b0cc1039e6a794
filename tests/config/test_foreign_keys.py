"""Keys of transformers and TRL in an Octavo file: a suggestion is a translation, or corrects a typing error."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from octavo.base.wording import typing_error
from octavo.config import ConfigError, error_texts, load_config_text
from octavo.config.sections import foreign_words

SECTIONS = ("", "train", "rl", "preference")
BASE = "model: {path: ./m}\ndata: {train: [{path: a.json}]}\ntrain: {steps: 10, global_batch: 8}\n"


def fields(package: str, *files: str) -> Iterator[str]:
    """Yield the fields of the classes in files of an installed package, which is not imported: that takes seconds."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    for file in files:
        for node in ast.walk(ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id


@pytest.fixture(scope="module")
def keys() -> list[str]:
    for package in ("transformers", "trl"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    names = ("base", "sft", "dpo", "grpo", "rloo", "kto", "reward", "model")
    of_trl = fields("trl", *(f"trainer/{name}_config.py" for name in names))
    return sorted({*fields("transformers", "training_args.py"), *of_trl})


def advice_for(section: str, key: str) -> tuple[str, list[str]]:
    """Return the fix for an unknown key, and the keys that it suggests."""
    fix = error_texts._unknown_key_fix((section, key) if section else (key,))
    question = fix.partition("did you mean ")[2].partition("?")[0].partition(" (")[0]
    return fix, re.findall(r"`([^`]+)`", question)


def test_no_key_of_transformers_or_trl_gets_an_unrelated_near_word(keys: list[str]) -> None:
    assert {"save_steps", "loss_type", "scale_rewards", "lora_r", "beta"} <= set(keys) and len(keys) > 200
    wrong, translations = [], 0
    for section in SECTIONS:
        valid = error_texts._fields((section,) if section else ())
        for key in set(keys) - set(valid):
            fix, words = advice_for(section, key)
            translated = foreign_words.key_of(section, key, valid)
            for word in words:
                near = word.rpartition(".")[2]
                close = SequenceMatcher(None, key, near).ratio() >= 0.85
                related = near == key or close or (translated is not None and translated[0] == word)
                if not related:
                    wrong.append((section, key, fix))
            translations += translated is not None
    assert not wrong
    assert translations > 200, "most keys of a training are translated"


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("save_steps", "run.save_every"),
        ("eval_steps", "run.eval_every"),
        ("logging_steps", "run.log_every"),
        ("scale_rewards", "rl.advantage"),
        ("reward_weights", "rl.rewards"),
        ("reference_free", "preference.loss"),
        ("saev_steps", "run.save_every"),
        ("learning_rat", "train.lr"),
    ],
)
def test_keys_are_translated_wherever_they_are_written(section: str, key: str, meant: str) -> None:
    assert advice_for(section, key)[1] == [meant]


@pytest.mark.parametrize(
    ("key", "valid"),
    [("scale_rewards", "rewards"), ("save_steps", "steps"), ("reference_free", "reference"), ("lr", "rl"),
     ("local_rank", "lora_rank"),
     ("fp8", "mxfp8"), ("template", "template_args"), ("vision_tower", "revision"), ("loss", "slots")],
)  # fmt: skip
def test_other_words_are_no_typing_errors(key: str, valid: str) -> None:
    assert typing_error(key, {valid: valid}) is None


@pytest.mark.parametrize(
    ("key", "names", "meant"),
    [
        ("recpie", ["recipe"], "recipe"),
        ("BLOCK-WISE", ["blockwise"], "blockwise"),
        ("zhs", ["bash", "zsh"], "zsh"),
        ("image_encodr", ["image_encoder"], "image_encoder"),
        ("top_x", ["top_k", "top_p"], None),
        ("", ["a", "lr"], None),
        ("x" * 200, ["x" * 199], None),
    ],
)
def test_typing_errors_are_few_letters_and_of_one_word(key: str, names: list[str], meant: str | None) -> None:
    assert typing_error(key, {name: name for name in names}) == meant


def messages(text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, overrides, source="x.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vision_tower=off", "did you mean `image_encoder` (components have one name each)"),
        ("rl.loss=grpo", "did you mean `rl.algorithm` (it names the loss too)?"),
        ("data.template=qwen", "unknown key; the chat template comes from the model's folder"),
        ("fp8.recipe=fp8", "found 'fp8'; one of off, tensorwise"),
        ("fp8.recipe=hybrid", "did you mean fp8.format ("),
        ("fp8.image_encoder.recipe=e4m3", "did you mean fp8.format ("),
        ("train.loss=dpo", "did you mean preference.loss ("),
        ("train.loss=grpo", "did you mean rl.algorithm ("),
        ("loss=dpo", "did you mean `preference.loss` (of phase preference"),
        ("rl.algorithm=GRPO", "found 'GRPO'; did you mean grpo?"),
        ("rl.algorithm=dpo", "did you mean preference.loss ("),
        ("train.phase=SFT", "found 'SFT'; did you mean sft?"),
        ("train.phase=sfft", "did you mean sft?"),
        ("preference.loss=ippo", "did you mean ipo?"),
        ("preference.loss=dpoo", "did you mean sigmoid (DPO's own loss)?"),
        ("preference.loss=grpo", "did you mean rl.algorithm ("),
        ("label_smoothing=0.1", "did you mean `train.label_smoothing` or `preference.label_smoothing`?"),
        ("data.train=", "list its entries under it, each as {path: ...}"),
    ],
)
def test_words_of_others_and_typing_errors_are_answered(override: str, message: str) -> None:
    assert any(message in problem for problem in messages(BASE, (override,))), messages(BASE, (override,))


def test_unknown_components_are_reported_with_all_other_problems() -> None:
    listed = messages(BASE, ("model.freeze=[visoin]", "fp8.recpie=off", "rl.prompts=2"))
    assert any("unknown component 'visoin'; did you mean image_encoder?" in problem for problem in listed)
    assert any("did you mean `recipe`?" in problem for problem in listed)
    assert any("rl.rewards: required, but absent; add `rewards: [{reward: ...}]` under `rl`" in p for p in listed)


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        (BASE + "rl: {reward_funcs: [x]}\n", set()),
        ("model_name_or_path: m\nlearning_rate: 1\ndataset: a\nmax_steps: 3\n", set()),
        ("model_name_or_path: m\nlearning_rate: 1\ndataset: a\n", {"train.steps"}),
        ("learning_rate: 1\nmax_steps: 3\n", {"model", "data"}),
    ],
)
def test_a_key_under_a_name_of_others_is_not_missing(text: str, absent: set[str]) -> None:
    missing = {line.split(": ")[1] for line in messages(text) if "required, but absent" in line}
    assert missing == absent


def test_flat_file_of_others_names_the_import_once() -> None:
    flat = "model_name_or_path: m\nlearning_rate: 1\ndataset: a\nmax_steps: 3\n"
    listed = messages(flat)
    assert [line for line in listed if "`octavo import x.yaml -o my.yaml`" in line] == listed[:1]
    assert not any("octavo import" in line for line in messages(BASE + "learning_rate: 1\nmax_steps: 3\n"))
