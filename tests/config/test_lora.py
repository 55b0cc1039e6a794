"""Configuration of LoRA and of weights that are loaded as FP8 codes."""

from __future__ import annotations

import json

import pytest

from octavo.config import (
    Config,
    ConfigError,
    Fp8Section,
    json_schema,
    load_config_text,
    override,
    to_yaml,
)
from octavo.config.sections.data import DataSection
from octavo.config.sections.lora import LoraSection
from octavo.config.sections.model import LoadInFp8Section, ModelSection
from octavo.config.sections.train import TrainSection

BASE = "model: {{path: ./m{model}}}\ndata: {{train: [{{path: a.json}}]}}\ntrain: {{steps: 10}}\n"


def read(model: str, more: str = "lora: {}\n", overrides=()) -> Config:
    return load_config_text(BASE.format(model=model and f", {model}") + more, overrides, source="x.yaml")


def message_of(model: str, more: str = "lora: {}\n", overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        read(model, more, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "kinds, more, recipes",
    [
        ("row", "", ("rowwise", None)),
        ("block", "", ("blockwise", None)),
        ("tensor", "", ("tensorwise", None)),
        ("tensor", "fp8: {recipe: delayed}", ("delayed", None)),
        ("row", "fp8: {recipe: off}", ("off", None)),
        ("row", "fp8: {foundation: {recipe: rowwise}, recipe: blockwise}", ("blockwise", None)),
        ("{foundation: row, image_encoder: block}", "", ("rowwise", "blockwise")),
        ("{foundation: row, image_encoder: block}", "fp8: {recipe: off}", ("off", None)),
        ("{image_encoder: tensor}", "fp8: {recipe: rowwise, image_encoder: {dgrad: bf16}}", ("rowwise", "tensorwise")),
        ("{image_encoder: tensor}", "fp8: {image_encoder: {dgrad: bf16}}", ("off", "tensorwise")),
        ("{image_encoder: tensor}", "", ("blockwise", "tensorwise")),
    ],
)
def test_recipe_follows_load_in_fp8_by_default(kinds, more, recipes):
    cfg = read(f"load_in_fp8: {kinds}", f"lora: {{}}\n{more}\n")
    tower = cfg.fp8.image_encoder
    assert (cfg.fp8.recipe, tower and tower.recipe) == recipes
    assert load_config_text(to_yaml(cfg)) == cfg  # a saved configuration can be rerun unchanged


@pytest.mark.parametrize("short", ["row", "block", "tensor"])
def test_codes_and_their_recipe_share_a_name(short):
    """Both words are accepted in both places, and stored as one of them."""
    name = f"{short}wise"

    def words(codes: str, recipe: str) -> Config:
        rest = (
            f"image_encoder: {{recipe: {recipe}}}, rules: [{{match: '**.a', recipe: {recipe}}}], candidates: [{recipe}]"
        )
        return read(f"load_in_fp8: {{foundation: {codes}}}", f"lora: {{}}\nfp8: {{recipe: {recipe}, {rest}}}\n")

    cfg = words(name, name)
    assert words(short, name) == words(name, short) == words(short, short) == cfg
    assert cfg.model.load_in_fp8.kinds == {"foundation": short}
    assert cfg.fp8.recipe == cfg.model.load_in_fp8.foundation == name
    assert f" {short}\n" not in to_yaml(cfg) and to_yaml(cfg).count(f" {name}\n") == 5
    assert override(cfg, [f"model.load_in_fp8={short}", f"fp8.recipe={short}"]) == cfg
    schema = json.dumps(json_schema()["$defs"]["Rule"]["properties"]["recipe"])
    assert f'"{short}"' in schema and f'"{name}"' in schema  # editors accept both


def test_load_in_fp8_true_means_rowwise():
    rows = read("load_in_fp8: rowwise")
    assert read("load_in_fp8: true") == read("load_in_fp8: {foundation: true, image_encoder: false}") == rows
    assert override(read(""), ["model.load_in_fp8=true", "fp8.recipe=row"]) == override(rows, []) == rows
    assert (
        read("load_in_fp8: false") == read("load_in_fp8: null") == read("load_in_fp8: {foundation: null}") == read("")
    )
    assert override(rows, ["model.load_in_fp8=false"]).model.load_in_fp8.kinds == {}
    assert "true" not in to_yaml(rows).partition("keep_fp8")[0]  # the stored value is the kind
    assert {"type": "boolean"} in json_schema()["$defs"]["ModelSection"]["properties"]["load_in_fp8"]["anyOf"]


def test_recipe_follows_load_in_fp8_in_python():
    more = {"data": DataSection(train=({"path": "a.json"},)), "train": TrainSection(steps=3), "lora": LoraSection()}
    cfg = Config(model=ModelSection(path="m", load_in_fp8=LoadInFp8Section(foundation="row")), **more)
    assert cfg.fp8.recipe == "rowwise"
    with pytest.raises(ValueError, match="blockwise does not multiply by the codes of load_in_fp8"):
        Config(model=ModelSection(path="m", load_in_fp8="row"), fp8=Fp8Section(recipe="blockwise"), **more)


@pytest.mark.parametrize(
    "model, more, message",
    [
        ("load_in_fp8: blok", "", "expected a word or a mapping, found 'blok'; did you mean blockwise? use"),
        ("load_in_fp8: 1", "", "expected a word or a mapping, found 1"),
        ("load_in_fp8: {foundation: rows}", "", "'rows'; did you mean rowwise (one scale a row)? one of rowwise"),
        ("load_in_fp8: {tower: row}", "", "x.yaml:1: model.load_in_fp8.tower: unknown key; valid here: foundation"),
        ("load_in_fp8: row", "fp8: {recipe: blockwise}", "x.yaml:5: fp8.recipe: blockwise does not multiply by the "
         "codes of load_in_fp8: rowwise (foundation); use rowwise, off (high precision, from the codes' values), "
         "or load_in_fp8: blockwise"),
        ("load_in_fp8: row", "fp8: {foundation: {recipe: mxfp8}}", "x.yaml:5: fp8.foundation.recipe: mxfp8 does not"),
        ("load_in_fp8: row", "fp8: {recipe: auto}", "auto chooses a recipe, and codes fit only some (foundation)"),
        ("load_in_fp8: block, keep_fp8: false", "", "x.yaml:1: model.keep_fp8: false dequantizes the weights"),
        ("load_in_fp8: block", "fp8: {weight_codes: recast, foundation: {}}", "has no effect on weights"),
        ("", "fp8: {param: true}", "x.yaml:5: fp8.param: param keeps trained weights and their codes, and the base"),
        ("", "fp8: {foundation: {param: true}}", "fp8.foundation.param: param keeps trained weights"),
        ("", "fp8: {fwd: bf16, dgrad: bf16}", "a frozen base has no wgrad, so with fwd and dgrad in bf16 nothing"),
        ("", "optimizer: {master: bf16+sr}", "bf16+sr updates BF16 parameters, and lora.dtype keeps A and B in fp32; "
         "use `lora.dtype: bf16`, or `master: fp32`"),
    ],
)  # fmt: skip
def test_conflicting_lora_settings_are_rejected(model, more, message):
    assert message in message_of(model, f"lora: {{}}\n{more}\n")


@pytest.mark.parametrize(
    "lora, message",
    [
        ("{targets: [fundation]}", "lora.targets.0: unknown component 'fundation'; did you mean foundation?"),
        ("{dora: true, dropout: 0.1}", "lora.dropout: DoRA with dropout would also need the base layer's product"),
        ("{targets: ['q_proj|k_proj']}", "is neither a component nor a glob over module names: it is not a regular"),
        ("{exclude: ['a b']}", "lora.exclude.0: 'a b' is neither a component nor a glob over module names: module"),
        ("{targets: []}", "lora.targets: must not be empty"),
        ("{r: 8}", "lora.r: unknown key; did you mean `lora.rank`?"),
        ("{lora_alpha: 8}", "did you mean `lora.alpha`?"),
        ("{dropout: 1}", "lora.dropout: must be below 1, found 1"),
        ("{rank: 0}", "lora.rank: must be at least 1"),
        ("true", "lora: expected a mapping, found true (a boolean)"),
    ],
)  # fmt: skip
def test_invalid_adapter_settings_are_rejected(lora, message):
    assert message in message_of("", f"lora: {lora}\n")


def test_load_in_fp8_requires_frozen_weights():
    message = message_of("load_in_fp8: {foundation: row, image_encoder: row}, freeze: [image_encoder]", "")
    assert message.startswith("x.yaml:1: model.load_in_fp8.foundation: FP8 codes cannot be trained, and without `lora`")
    assert "train adapters (`lora: {}`), or freeze the component (model.freeze: [foundation])" in message
    assert read("load_in_fp8: {image_encoder: row}, freeze: [image_encoder]", "").fp8.image_encoder.recipe == "rowwise"


def test_frozen_component_rejects_split_master():
    model = "load_in_fp8: {image_encoder: block}, freeze: [image_encoder]"
    assert "use fp8.image_encoder.param: false" in message_of(model, "fp8: {param: true}\n")
    assert read(model, "fp8: {param: true, image_encoder: {param: false}}\n").fp8.param
    assert "bf16+16 splits every weight while it is read" in message_of(model, "optimizer: {master: bf16+16}\n")


def test_bf16_adapters_accept_every_master():
    for master in ("fp32", "bf16+16", "bf16+sr"):
        assert read("", f"lora: {{dtype: bf16}}\noptimizer: {{master: {master}}}\n").optimizer.master == master


def test_override_of_base_changes_its_recipe():
    cfg = read("load_in_fp8: block")
    assert "blockwise does not multiply by the codes of load_in_fp8" in str(_fails(cfg, ["model.load_in_fp8=row"]))
    assert override(cfg, ["model.load_in_fp8=row", "fp8.recipe=rowwise"]).fp8.recipe == "rowwise"


def _fails(cfg: Config, overrides: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        override(cfg, overrides)
    return caught.value
