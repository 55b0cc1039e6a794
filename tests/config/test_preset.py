"""`preset: fast`: the keys that it sets, which keys win over it, and what is reported about it."""

from __future__ import annotations

import pytest

from octavo.config import Config, ConfigError, load_config_text, override, to_yaml
from octavo.config.config import PRESETS
from octavo.train.run_dir.run_dir import settings

BASE = "model: {path: ./m}\ndata: {train: [{path: a.json}]}\ntrain: {steps: 10}\n"


def read(more: str = "", overrides=(), base: str = BASE) -> Config:
    return load_config_text(base + more, overrides, source="x.yaml")


def fast_keys(cfg: Config) -> tuple[object, ...]:
    head = cfg.fp8.lm_head
    return cfg.fp8.fuse, head and head.recipe, cfg.optimizer.states, cfg.train.compile


ALL = ("on", "blockwise", "fp8", True)


def test_logits_stay_in_high_precision() -> None:
    """In FP8 the head costs a pretrained model more than all of its layers: docs/studies.md."""
    head = read("preset: fast\nfp8: {recipe: rowwise}\n").fp8.lm_head
    assert head is not None and (head.recipe, head.fwd, head.dgrad, head.wgrad) == ("rowwise", "bf16", None, None)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", ("off", None, "fp32", False)),
        ("preset: fast", ALL),
        ("preset: fast\nfp8: {recipe: tensorwise}", ("on", "tensorwise", "fp8", True)),
        ("preset: fast\nfp8: {recipe: block}", ALL),
        ("preset: fast\nfp8: {foundation: {recipe: rowwise}}", ("on", "rowwise", "fp8", True)),
        ("preset: fast\nfp8: {recipe: auto}", ALL),
        ("preset: fast\nfp8: {recipe: delayed}", ALL),
        ("preset: fast\nfp8: {recipe: off}", ("off", None, "fp8", True)),
        ("preset: fast\nfp8: {fuse: off}\noptimizer: {states: bf16}", ("off", "blockwise", "bf16", True)),
        ("preset: fast\nfp8: {lm_head: {recipe: off}}", ("on", "off", "fp8", True)),
        ("preset: fast\nfp8: {lm_head: null}", ("on", None, "fp8", True)),
    ],
)
def test_preset_sets_absent_keys(more: str, expected: tuple[object, ...]) -> None:
    cfg = read(more + "\n")
    assert fast_keys(cfg) == expected
    assert read(base=to_yaml(cfg)) == cfg, "config.yaml of a run says the same"


def test_plan_file_keeps_its_own_fp8_settings() -> None:
    assert fast_keys(read("preset: fast\nfp8: {plan: plan.json}\n")) == ("off", None, "fp8", True)


def test_preset_sets_the_same_for_configs_of_files_overrides_and_python() -> None:
    of_file = read("preset: fast\n")
    assert read("", ["preset=fast"]) == of_file
    assert read("", ["train.compile=false", "preset=fast"]).train.compile is False
    values = read().model_dump(exclude_unset=True) | {"preset": "fast"}
    assert fast_keys(Config.model_validate(values)) == ALL


def test_config_shows_the_preset_and_its_keys() -> None:
    text = to_yaml(read("preset: fast\n"))
    assert "preset: fast\n" in text and "  fuse: on\n" in text and "  compile: true\n" in text


def test_keys_of_the_preset_written_out_are_the_same_run() -> None:
    """So that a run can be resumed either way."""
    words = "fp8: {fuse: on, lm_head: {recipe: blockwise, fwd: bf16}}\noptimizer: {states: fp8}\n"
    assert settings(read(words, ["train.compile=true"])) == settings(read("preset: fast\n"))


def test_preset_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        override(read(), ["preset=fast"])
    message = str(caught.value)
    assert "override `preset=fast`" in message and "it changes nothing, because explicit keys win" in message
    assert "fp8.fuse, fp8.lm_head, optimizer.states, train.compile" in message
    override(read("preset: fast\n"), ["train.lr=1e-3"])  # the file's own preset may be written out


def test_problem_of_a_preset_names_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        read("preset: fast\nfp8: {adapt: true}\n")
    assert "x.yaml:4: train.compile: a compiled graph holds" in str(caught.value), "the line of the preset"


@pytest.mark.parametrize("word", ["fats", "Fast", "[fast]", "true", "1"])
def test_unknown_presets_are_errors(word: str) -> None:
    with pytest.raises(ConfigError, match="preset"):
        read(f"preset: {word}\n")


@pytest.mark.parametrize("more", ["fp8: 3", "optimizer: [1]", "fp8: {foundation: 3}", "fp8: {recipe: [1]}"])
def test_malformed_sections_are_reported_as_without_a_preset(more: str) -> None:
    problems = []
    for preset in ("", "preset: fast"):
        with pytest.raises(ConfigError) as caught:
            read(f"{more}\n{preset}\n")
        problems.append(str(caught.value))
    assert problems[0] == problems[1]


def test_every_key_of_a_preset_exists() -> None:
    for settings_of in PRESETS.values():
        for section, key in settings_of:
            assert key in Config.model_fields[str(section)].annotation.model_fields
