"""Extreme configurations: short errors, found without processing the excess."""

import os

import pytest

from octavo.config import ConfigError, json_schema, load_config, load_config_text
from octavo.config.check import Config
from octavo.config.yaml.problems import MAX_SHOWN

BASE = """model: {path: ./m}
data: {train: [{path: a.json}]}
train: {steps: 10, global_batch: 8}
"""
DIGITS = "9" * 5000
LONG = "x" * 100_000


def refused(text: str, overrides=()) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config_text(BASE + text, overrides, source="x.yaml")
    message = str(caught.value)
    assert len(message) < 20_000 and all(line.isprintable() for line in message.splitlines())
    return caught.value


def numbers(node, path=""):
    """Yield (key, schema) of every number in a JSON schema."""
    if isinstance(node, dict):
        if node.get("type") in ("integer", "number"):
            yield path, node
        for key, value in node.items():
            yield from numbers(value, f"{path}.{key}")
    if isinstance(node, list):
        for value in node:
            yield from numbers(value, path)


def test_every_number_has_bounds():
    found = dict(numbers(json_schema()))
    assert len(found) > 30
    for where, schema in found.items():
        assert schema.keys() & {"maximum", "exclusiveMaximum"}, where
        assert schema.keys() & {"minimum", "exclusiveMinimum"}, where


@pytest.mark.parametrize(
    "override, message",
    [
        ("train.micro_batch=1000000000", "train.micro_batch: must be at most 65536, found 1000000000"),  # 0.4.0 hung
        ("train.global_batch=" + "9" * 300, "train.global_batch: must be at most 16777216, found 999"),
        ("train.steps=" + DIGITS, "train.steps: expected a whole number, found '999"),
        ("train.steps=0x" + "f" * 900, "train.steps: must be at most 1000000000"),
        ("train.steps=1e300", "train.steps: expected a whole number, found 1e+300"),
        ("train.lr=" + "9" * 400, "train.lr: expected a number, found 999"),
        ("train.lr=1e400", "train.lr: expected a finite number, found inf"),
        ("data.train.0.weight=1e308", "data.train.0.weight: must be at most 1000000"),
        ("run.threads=100000", "run.threads: must be at most 1024"),
        (f"data.train.{DIGITS}.path=x", "data.train: has one entry, 0; found `999"),
        (".".join("a" * 50_000) + "=1", "the key has 50,000 parts"),
        ("fp8=" + "[" * 500, "the value is not YAML"),
        ("fp8." + LONG + "=1", "unknown key"),
        ("fp8.recipe=" + LONG, "fp8.recipe: found 'xxx"),
        ("fp8.rules=[{match: '" + "*" * 50_000 + "', recipe: off}]", "is not a glob"),
        ("model.path=a\0b", "model.path: contains a NUL character, which a file name cannot have"),
        ("run.resume=~x\0/y", "run.resume: contains a NUL character"),
        ("model.path=~x\0/y", "model.path: contains a NUL character"),
        ("model.path=a\udc80b", "model.path: contains a lone surrogate (U+D800"),
        ("data.system=a\ud800b", "data.system: contains a lone surrogate"),
        ("run.dir=" + LONG, "run.dir: is not a path: 100,000 bytes, its longest name 100,000 (at most 4,095"),
        ("data.train.0.images=" + "é" * 200, "data.train.0.images: is not a path: "),
        ("run.dir=" + "a/" * 2000, "run.dir: is not a path: 2,001 names deep"),  # pathlib creates them recursively
    ],
)
def test_extreme_value_is_rejected(override, message):
    assert message in str(refused("", [override]))


@pytest.mark.parametrize(
    "text, message",
    [
        ('run: {dir: "\\U00110000"}\n', "cannot be read as YAML (chr() arg not in range"),
        ("extends: " + LONG + "\n", "is not a path: "),
        ('extends: "a\\0b"\n', "contains a NUL character, which a file name cannot have"),
        ("a: " + "[" * 100 + "]" * 100, "nested in more than 32 levels"),
        ("a: [" + "1, " * 150_000 + "]\n", "more than 10,000 values"),
        ("a: " + "x" * 1_000_001, "the text is too long for a configuration (1,000,0"),
    ],
)
def test_extreme_text_is_rejected(text, message):
    assert message in str(refused(text))


@pytest.mark.parametrize(
    "text, overrides",
    [
        ("".join(f"key_{i}: 1\n" for i in range(3000)), []),
        ("fp8:\n  rules:\n" + "".join(f"  - {{match: 'x {i}', recipe: of}}\n" for i in range(3000)), []),
        ("run: {" + ", ".join(["seed: 1"] * 3001) + "}\n", []),
        ("x: &x {lr: 1}\nfp8:\n  rules:\n" + "  - *x\n" * 3000, []),
        ("", [f"x{i}=1" for i in range(3000)]),
        ("", ["fp8={" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}"]),
        ("extends: [" + ", ".join(f"x{i}.yaml" for i in range(3000)) + "]\n", []),
    ],
)
def test_first_of_thousands_of_problems_are_listed(text, overrides):
    error = refused(text, overrides)
    assert len(error.problems) == MAX_SHOWN and error.more >= 3000 - MAX_SHOWN
    assert f"and {error.more:,} more" in str(error).splitlines()[-1]


def test_names_are_suggested_only_for_listed_problems(monkeypatch):
    """Each suggestion compares a name with about sixty others; 3,000 of them took seconds."""
    from octavo.config import error_texts

    names = []
    monkeypatch.setattr(error_texts, "nearest", lambda name, *more: names.append(name))
    refused("".join(f"key_{i}: 1\n" for i in range(3000)))
    assert len(names) <= 3 * MAX_SHOWN


def test_pairwise_extends_are_bounded(tmp_path):
    (tmp_path / "0.yaml").write_text(BASE)
    for level in range(1, 40):
        (tmp_path / f"{level}.yaml").write_text(f"extends: [{level - 1}.yaml, {level - 1}.yaml]\n")
    with pytest.raises(ConfigError, match="is one file more than the limit of 100"):
        load_config(tmp_path / "39.yaml")


def test_configuration_of_largest_numbers_is_valid(tmp_path):
    """The bounds allow these values, and rules over such numbers are fast."""
    most = [f"run.{key}=1000000000" for key in ("save_every", "keep", "log_every", "health_every")]
    cfg = load_config_text(
        BASE, ["train.steps=1000000000", "train.micro_batch=65536", "train.global_batch=16777216", *most]
    )
    assert isinstance(cfg, Config) and cfg.train.global_batch == 2**24
    with pytest.raises(ConfigError, match="use e.g. micro_batch 65535 or global_batch 16777216"):
        load_config_text(BASE, ["train.micro_batch=65536", "train.global_batch=16776960"])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_devices_and_folders_are_rejected(tmp_path, make):
    make(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="x.yaml"):
        load_config(tmp_path / "x.yaml")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/tty", "/dev/stdin"])
def test_a_device_is_not_read(device):
    with pytest.raises(ConfigError, match=device):
        load_config(device)
