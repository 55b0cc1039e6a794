"""Files, extends and overrides: precedence, relative paths, and round trips."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config import Config, ConfigError, load_config, load_config_text, override, to_yaml
from octavo.config.sections.names import COMPONENTS
from octavo.config.yaml.document import scalar

BASE = """
model: {path: ./m}
data: {train: [{path: a.json}]}
train: {steps: 10}
"""


def text(more: str = "", overrides=()):
    return load_config_text(BASE + more, overrides)


def test_override_of_steps_replaces_epochs_and_vice_versa():
    text = "model: {path: m}\ndata: {train: [{path: a}]}\ntrain: {epochs: 2.5}\n"
    cfg = load_config_text(text)
    assert (cfg.train.steps, cfg.train.epochs) == (None, 2.5)
    steps = override(cfg, ["train.steps=7"])
    assert (steps.train.steps, steps.train.epochs) == (7, None)
    again = override(steps, ["train.epochs=1"])
    assert (again.train.steps, again.train.epochs) == (None, 1)
    with pytest.raises(ConfigError, match="1 epochs and 7 steps both"):
        override(cfg, ["train.steps=7", "train.epochs=1"])


def test_defaults():
    cfg = text()
    assert cfg.fp8.recipe == "blockwise"
    assert cfg.fp8.format is None
    assert cfg.train.lr == 2e-5
    assert cfg.optimizer.betas == (0.9, 0.95)
    assert cfg.run.dir == "runs/octavo"
    assert cfg.fp8.image_projector is None


@pytest.mark.parametrize(
    "fp8_settings, expected",
    [
        ("{recipe: rowwise}", ("rowwise", "rowwise", "rowwise", "rowwise")),
        ("{recipe: rowwise, foundation: {wgrad: bf16}}", ("rowwise", "rowwise", "rowwise", "rowwise")),
        ("{recipe: rowwise, image_encoder: {recipe: off}}", ("rowwise", "off", "rowwise", "rowwise")),
        ("{foundation: {recipe: rowwise}}", ("off", "off", "off", "rowwise")),
        ("{foundation: {}, image_projector: {recipe: mxfp8}}", ("off", "off", "mxfp8", "blockwise")),
        ("{image_encoder: {recipe: off}}", ("blockwise", "off", "blockwise", "blockwise")),
        ("{image_encoder: null, lm_head: {recipe: rowwise}}", ("blockwise", "blockwise", "blockwise", "blockwise")),
        ("{rules: [{match: '**.o_proj', recipe: off}]}", ("blockwise", "blockwise", "blockwise", "blockwise")),
    ],
)
def test_recipe_applies_to_whole_model_or_named_components(fp8_settings, expected):
    """Expected recipes of (whole model, encoder, projector, foundation); audio components follow the whole model. The
    resolved YAML gives the same recipes."""
    cfg = text(f"fp8: {fp8_settings}\n")
    parts = [cfg.fp8.recipe_of(name) for name in COMPONENTS if "audio" not in name]
    assert cfg.fp8.recipe_of("audio_encoder") == cfg.fp8.recipe_of("audio_projector") == cfg.fp8.recipe
    assert (cfg.fp8.recipe, *parts) == expected
    assert load_config_text(to_yaml(cfg)) == cfg
    assert override(cfg, ["fp8.recipe=delayed"]).fp8.recipe == "delayed"


def test_example_configuration():
    cfg = load_config_text(
        """
model:
  path: ./Qwen3-VL-8B-Instruct
  freeze: [image_encoder]
fp8:
  recipe: blockwise
  format: e4m3
  param: false
  image_encoder: {recipe: rowwise}
  image_projector: {recipe: off}
  rules:
    - {match: "**.layers.0.**", recipe: off}
  activations: bf16
data:
  train: [{path: ./data/llava_instruct.json, images: ./data/coco, weight: 1.0, max_samples: 5000}]
  eval: [{path: ./data/held_out.json, images: ./data/coco}]
  on_bad_sample: error
train: {phase: sft, steps: 1000, seq_length: 4096, global_batch: 32, lr: 2e-4, schedule: cosine, loss: token}
optimizer: {states: fp32, master: fp32}
run: {dir: runs/first, seed: 0, resume: never, save_every: 200, eval_every: 100, log_every: 1}
"""
    )
    assert cfg.fp8.image_projector.recipe == "off"  # in YAML 1.2 `off` is a word
    assert cfg.fp8.rules[0].match == "**.layers.0.**"
    assert cfg.train.lr == 2e-4
    assert isinstance(cfg.data.train, tuple)


@pytest.mark.parametrize(
    "written, read",
    [
        ("3e-4", 3e-4),
        (".5e3", 500.0),
        ("1.", 1.0),
        ("-7", -7),
        ("0x10", 16),
        ("0o17", 15),
        ("010", 10),
        ("1_000", "1_000"),
        ("9" * 9999, "9" * 9999),
        ("off", "off"),
        ("no", "no"),
        ("yes", "yes"),
        ("TRUE", True),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        ("12:30", "12:30"),
        ("2020-01-01", "2020-01-01"),
        ("**.layers", "**.layers"),
    ],
)
def test_scalars_are_yaml_1_2(written, read):
    got = scalar(written)
    assert got == read and type(got) is type(read)


def test_yaml_1_1_header_changes_nothing():
    cfg = load_config_text("%YAML 1.1\n---" + BASE + "fp8: {recipe: off}\n")
    assert cfg.fp8.recipe == "off"


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        text().train.steps = 3
    hash(text())


def test_extends_chain_and_relative_paths(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.yaml").write_text(
        "model: {path: ./weights, freeze: [lm_head]}\nrun: {seed: 1, keep: 5}\n"
    )
    (tmp_path / "base" / "data.yaml").write_text(
        "data: {train: [{path: ../d.json, images: img}]}\ntrain: {steps: 5}\nrun: {seed: 2}\n"
    )
    (tmp_path / "both.yaml").write_text("extends: [base/model.yaml, base/data.yaml]\ntrain: {lr: 3e-4}\n")
    (tmp_path / "top.yaml").write_text("extends: both.yaml\nmodel: {freeze: [foundation]}\nrun: {dir: runs/x}\n")
    monkeypatch.chdir(tmp_path / "base")
    cfg = load_config("../top.yaml", ["train.steps=7", "data.eval=[{path: e.json}]"])
    assert cfg.model.path == str(tmp_path / "base" / "weights")
    assert cfg.data.train[0].path == str(tmp_path / "d.json")
    assert cfg.data.train[0].images == str(tmp_path / "base" / "img")
    assert cfg.data.eval[0].path == str(
        tmp_path / "base" / "e.json"
    )  # a path in an override is relative to the working directory
    assert cfg.model.freeze == ("foundation",)  # lists replace
    assert (cfg.run.seed, cfg.run.keep, cfg.run.dir) == (2, 5, "runs/x")  # mappings merge, later wins
    assert (cfg.train.steps, cfg.train.lr) == (7, 3e-4)


def test_home_and_absolute_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert text(overrides=["model.path=~/m"]).model.path == str(tmp_path / "m")
    assert text(overrides=["model.path=/m/../n"]).model.path == "/n"


def test_data_url_is_unchanged(tmp_path):
    url = "s3://bucket/../set/part-{000..127}.tar"
    (tmp_path / "a.yaml").write_text(f"model: {{path: ./m}}\ndata: {{train: [{{path: '{url}', fetch_gb: 2}}]}}\n")
    cfg = load_config(tmp_path / "a.yaml", ["train.steps=1"])
    assert (cfg.data.train[0].path, cfg.data.train[0].fetch_gb) == (url, 2.0)
    with pytest.raises(ConfigError) as caught:
        override(cfg, ["data.eval=[{path: x.json, fetch_gb: 1, shuffle_buffer: 9}]", "data.train.0.stream=true"])
    texts = [str(problem) for problem in caught.value.problems]
    assert len(texts) == 3 and "fetch_gb: applies only to data sets at a URL; remove it" in texts[0]
    assert "data.train.0.stream: files at a URL are fetched one by one" in texts[2]
    assert "data.eval.0.shuffle_buffer: held-out rows are read in the order of their file" in texts[1]


def test_overrides_reach_every_key():
    cfg = text(
        "fp8: {image_encoder: {recipe: rowwise, format: e4m3}, rules: [{match: a, recipe: off}]}\n",
        [
            "data.train.0.max_samples=10",
            "fp8.image_encoder.recipe=tensorwise",
            "fp8.foundation.wgrad=bf16",
            "fp8.rules.0.match=**.layers.0.**",
            "data.system=Answer: briefly # please",
            "optimizer={weight_decay: 0.1}",
            "model.freeze=[image_encoder, lm_head]",
            "train.lr=1",
            'run.dir="12"',
            "run.threads=",
        ],
    )
    assert cfg.data.train[0].max_samples == 10
    assert (cfg.fp8.image_encoder.recipe, cfg.fp8.image_encoder.format) == ("tensorwise", "e4m3")
    assert cfg.fp8.foundation.wgrad == "bf16"
    assert cfg.fp8.rules[0].match == "**.layers.0.**"
    assert cfg.data.system == "Answer: briefly # please"
    assert cfg.optimizer.weight_decay == 0.1 and cfg.optimizer.eps == 1e-8
    assert cfg.model.freeze == ("image_encoder", "lm_head")
    assert cfg.train.lr == 1.0 and isinstance(cfg.train.lr, float)
    assert cfg.run.dir == "12" and cfg.run.threads is None


def test_template_args_accept_any_mapping():
    cfg = text(overrides=["data.template_args.enable_thinking=false", "data.template_args={effort: low, n: [1, null]}"])
    assert cfg.data.template_args == {"enable_thinking": False, "effort": "low", "n": [1, None]}
    assert load_config_text(to_yaml(cfg)) == cfg


def test_the_last_override_wins():
    assert text(overrides=["run.seed=1", "run={seed: 2}", "run.seed=3"]).run.seed == 3


def test_config_from_overrides_only():
    cfg = load_config(None, ["model.path=m", "data.train=[{path: a}]", "train.steps=1"])
    assert cfg.train.steps == 1


def test_anchors_aliases_and_merge_keys():
    cfg = load_config_text(
        """
model: {path: m}
data:
  train: &sets [{path: a.json}]
  eval: *sets
fp8:
  image_encoder: &tower {recipe: rowwise, fwd: bf16}
  foundation:
    <<: *tower
    fwd: fp8
train: {steps: 3}
"""
    )
    assert cfg.data.eval == cfg.data.train
    assert (cfg.fp8.foundation.recipe, cfg.fp8.foundation.fwd) == ("rowwise", "fp8")


def test_override_does_not_change_the_original():
    cfg = text()
    other = override(cfg, ["fp8.recipe=off", "run.seed=4"])
    assert (other.fp8.recipe, other.run.seed) == ("off", 4)
    assert (cfg.fp8.recipe, cfg.run.seed) == ("blockwise", 0)
    with pytest.raises(
        ConfigError, match=r"override `train.stpes=1`: train.stpes: unknown key; did you mean `steps`\?"
    ):
        override(cfg, ["train.stpes=1"])


def test_recompute_accepts_a_word_or_a_mapping():
    assert text().train.recompute.foundation == "none"
    both = override(text(), ["train.recompute=full"]).train.recompute
    assert (both.image_encoder, both.foundation) == ("full", "full")
    one = override(text(), ["train.recompute={foundation: selective}"]).train.recompute
    assert (one.image_encoder, one.foundation) == ("none", "selective")
    with pytest.raises(ConfigError, match="found 'ful'; did you mean full. use none, selective or full, or a mapping"):
        override(text(), ["train.recompute=ful"])


def test_config_built_in_python_is_checked():
    with pytest.raises(ValueError, match="makes a BF16 model, which does not compute in fp32"):
        Config(
            model={"path": "m"}, data={"train": [{"path": "a"}]}, train={"steps": 1, "precision": "fp32"},
            optimizer={"master": "bf16+sr"},
        )  # fmt: skip


def test_resolved_yaml_loads_to_an_equal_config(tmp_path, monkeypatch):
    cfg = text(
        "fp8: {format: hybrid, recipe: tensorwise, rules: [{match: '**', wgrad: bf16}]}\n",
        ["optimizer.eps=1e-20", "train.lr=123456789e-12", "data.system='3e-4'", "run.resume=./a/b"],
    )
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    monkeypatch.chdir("/")  # from any working directory
    assert load_config(tmp_path / "config.yaml") == cfg


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    system=st.one_of(
        st.text(),
        st.sampled_from([".5e3", "null", "~", "0o7", "- a", "a: b", "#x", "1_0", "''", "\u2028", "\x85", "a\n b"]),
    ),
    lr=st.floats(min_value=1e-300, max_value=1000),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
)
def test_resolved_yaml_preserves_texts_and_numbers(system, lr, seed):
    cfg = text()
    cfg = cfg.model_copy(
        update={
            "data": cfg.data.model_copy(update={"system": system}),
            "train": cfg.train.model_copy(update={"lr": lr}),
            "run": cfg.run.model_copy(update={"seed": seed}),
        }
    )
    assert load_config_text(to_yaml(cfg)) == cfg


def test_plan_override_replaces_recipe_and_reloads():
    text = BASE + "fp8: {recipe: rowwise}\n"
    cfg = load_config_text(text, ["fp8.plan=p.json"])
    assert cfg.fp8.plan.endswith("p.json") and cfg.fp8.recipe == "blockwise"
    assert "recipe" not in to_yaml(cfg) and load_config_text(to_yaml(cfg)) == cfg
    assert override(cfg, ["train.lr=0.1"]).fp8.plan == cfg.fp8.plan
    assert override(cfg, ["fp8.recipe=rowwise", "fp8.plan=null"]).fp8.recipe == "rowwise"
    assert override(load_config_text(text, []), ["fp8.plan=p.json"]).fp8.plan == cfg.fp8.plan
    for source, over in ((text, ["fp8.recipe=blockwise", "fp8.plan=p.json"]), (to_yaml(cfg), ["fp8.recipe=blockwise"])):
        with pytest.raises(ConfigError, match="override `fp8.recipe=blockwise`: fp8.recipe: has no effect with"):
            load_config_text(source, over)
