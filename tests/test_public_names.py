"""Names that others import: each stays where it is, whatever file it is written in."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import pytest

from octavo import fp8

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "octavo": ["load", "run"],
    "octavo.checkpoint.trainer": ["Fp8Callback"],
    "octavo.config": ["Config", "Dataset", "load_config", "load_config_text"],
    "octavo.data": ["IGNORE", "Encoder", "read", "train_loader"],
    "octavo.generation": ["Completion", "Engine", "Prompt", "Sampling"],
    "octavo.models": ["frames", "load", "load_processor"],
    "octavo.rl.rewards": ["RewardError", "Rewards"],
    "octavo.train": ["Callback", "run"],
}
VALUES = {"IGNORE": -100}
MODULES = {"frames"}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_a_public_name_is_where_it_was(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if name in VALUES:
        assert value == VALUES[name]
    elif name in MODULES:
        assert inspect.ismodule(value) and value.__name__.startswith(f"{module}.")
    elif name[0].isupper():
        assert inspect.isclass(value) and value.__name__ == name
    else:
        assert inspect.isfunction(value) and value.__name__ == name


def test_bench_is_run_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo.bench", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("octavo.bench", run_name="__main__")
    assert end.value.code == 2 and "usage: python -m octavo.bench report DIR" in capsys.readouterr().out


FP8_MODULES = {
    "octavo.fp8": fp8.__all__,
    "octavo.fp8.metrics": ["calc_diff", "cosine", "saturation", "sqnr", "underflow"],
    "octavo.fp8.delayed": ["move_scaling", "reduce_scaling_state", "scale_gradient_histories"],
}
PUBLIC = [(module, name) for module, names in (FP8_MODULES | NAMES).items() for name in names]
# Pages that are made from the code or tell its history name everything, which explains nothing.
NOT_PAGES = ("docs/reference", "docs/architecture.md", "docs/decisions", "docs/lab")


def pages() -> str:
    """What a user reads: README, the pages of docs and the examples."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    paths = {str(file.relative_to(ROOT)): file for file in files}
    read = [path.read_text(encoding="utf-8") for name, path in paths.items() if not name.startswith(NOT_PAGES)]
    return "\n".join(read)


def is_named(module: str, name: str, text: str) -> bool:
    """Whether a text has ``<last part of the module>.<name>``, or imports the name from the module."""
    imports = re.findall(rf"from {re.escape(module)} import (\([^)]*\)|[^\n]*)", text)
    attribute = rf"\b{module.rpartition('.')[2]}\.{name}\b"
    return bool(re.search(attribute, text)) or any(name in re.findall(r"\w+", line) for line in imports)


def test_every_public_name_is_on_a_page_or_in_an_example() -> None:
    text = pages()
    missing = [f"{module}.{name}" for module, name in PUBLIC if not is_named(module, name, text)]
    assert not missing, "name them where a user reads, such as in docs/python.md: " + ", ".join(missing)
    assert not is_named("octavo.fp8", "plan", "the plan of octavo.fp8, my_fp8.plan")


# "<public name>[.<method>] <argument or return>" -> why its type is Any. The table may only get shorter.
_TRAINER = "transformers' Trainer, and what it hands to callbacks"
_PROCESSOR = "transformers' processors have no common type"
_ROWS = "subclasses encode rows of their own types: conversations, documents, pairs"
ANY = {
    "octavo.checkpoint.trainer.Fp8Callback.__init__ trainer": _TRAINER,
    "octavo.checkpoint.trainer.Fp8Callback.on_train_begin kwargs": _TRAINER,
    "octavo.checkpoint.trainer.Fp8Callback.on_pre_optimizer_step kwargs": _TRAINER,
    "octavo.checkpoint.trainer.Fp8Callback.on_evaluate kwargs": _TRAINER,
    "octavo.checkpoint.trainer.Fp8Callback.on_save kwargs": _TRAINER,
    "octavo.checkpoint.trainer.Fp8Callback.on_step_end kwargs": _TRAINER,
    "octavo.data.Encoder.__init__ processor": _PROCESSOR,
    "octavo.data.train_loader processor": _PROCESSOR,
    "octavo.generation.Engine.__init__ processor": _PROCESSOR,
    "octavo.data.Encoder.encode row": _ROWS,
    "octavo.data.Encoder.encode return": _ROWS,
    "octavo.data.Encoder.encode_all rows": _ROWS,
    "octavo.data.Encoder.encode_all return": _ROWS,
    "octavo.data.Encoder.encoding conversation": _ROWS,
    "octavo.data.Encoder.encoding return": _ROWS,
    "octavo.data.Encoder.tokenizer_input row": _ROWS,
}


def functions_of(name: str, value: object) -> Iterator[tuple[str, Callable[..., object]]]:
    """A function, or the public methods and properties of a class and what makes it."""
    if inspect.isfunction(value):
        yield name, value
    elif inspect.isclass(value):
        for key, member in vars(value).items():
            if isinstance(member, property):
                member = member.fget
            elif isinstance(member, cached_property):
                member = member.func
            elif isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if inspect.isfunction(member) and (key == "__init__" or not key.startswith("_")):
                yield f"{name}.{key}", inspect.unwrap(member)


def test_public_signatures_have_types() -> None:
    untyped = {
        f"{name} {argument}"
        for module, public in PUBLIC
        for name, function in functions_of(f"{module}.{public}", getattr(importlib.import_module(module), public))
        for argument, annotation in function.__annotations__.items()
        if re.search(r"\bAny\b", str(annotation))
    }
    assert not untyped - ANY.keys(), f"give them a type: {sorted(untyped - ANY.keys())}"
    assert not ANY.keys() - untyped, f"take them out of the table: {sorted(ANY.keys() - untyped)}"
