"""Every example is read as written, and those for tiny checkpoints train 10 of their 20 steps with a passing proof."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from octavo import models, rl
from octavo.cli.main import main
from octavo.config import load_config
from octavo.models.structure import shapes
from octavo.models.tiny import tiny
from octavo.train.estimate.memory import Card, MemoryEstimator
from octavo.train.setup import frozen_base, planning
from octavo.train.setup.token_counts import assume_tokens

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TINY = sorted((EXAMPLES / "tiny").glob("*.yaml"))
SEVERAL = EXAMPLES / "tiny" / "scale.yaml"  # on four processes, which train/test_scale.py does


CONFIGS = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name not in ("launch", "import"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_an_example_is_a_valid_configuration(path: Path) -> None:
    cfg = load_config(path)
    assert cfg.fp8.recipe != "off"


def test_the_configuration_beside_mpt_1b_is_the_published_shape() -> None:
    written, shape = models.read_config(EXAMPLES / "mpt_1b"), shapes.shape_config("mpt_1b")
    ids = {"bos_token_id": 0, "eos_token_id": 0}  # GPT-NeoX's
    wanted = {name: getattr(shape, name) for name in type(shape).__annotations__} | ids
    assert {name: getattr(written, name) for name in wanted} == wanted


def test_the_outlier_channel_changes_nothing_in_high_precision_and_fills_a_tensors_scale(tmp_path: Path) -> None:
    tiny.write("qwen3", tmp_path / "plain", size="mini")
    runpy.run_path(str(EXAMPLES / "outliers.py"))["plant"](tmp_path / "plain", tmp_path / "planted", 0)
    plain, planted = (models.load(tmp_path / name) for name in ("plain", "planted"))
    ids = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, planted(input_ids=ids).logits, atol=1e-4)
    rows = planted.get_submodule("model.layers.0.mlp.up_proj").weight.abs().amax(1)
    assert rows[0] > 1e5 * rows[1:].max()


COLUMNS = {
    "weights": ("weights",),
    "optimizer": ("master", "gradients", "optimizer"),
    "codes": ("codes",),
    "reference": ("reference",),
    "cache": ("kv_cache",),
    "activations": ("activations", "logits"),
    "workspace": ("workspace",),
}


def table(path: Path) -> list[str]:
    """The comment of an example that names a published shape and a card: what is predicted, which must fit."""
    command = next(line for line in path.read_text().split("\n") if "--shape" in line).split()
    shape, card = (command[command.index(option) + 1] for option in ("--shape", "--card"))
    cfg = load_config(path, [f"model.path={shape}"])
    model, family = shapes.shape_model(shape)
    frozen_base.prepare_meta_model(model, family, cfg)
    plan, family, _ = planning.plan_model(cfg, model, family)
    tokens, _ = assume_tokens(cfg, family.components, model.config)
    usable = Card.parse(card).usable
    sizes = MemoryEstimator(
        cfg, model, family, plan, tokens, copy=rl.reference_kind(cfg) == "copy", usable=usable
    ).estimate(cfg)
    assert sizes.total <= usable
    moments = {"update": sizes.kinds}
    if sizes.rollout is not None:
        moments = {f"rollout, {sizes.rollout.sequences} at a time": sizes.rollout.kinds} | moments
    rows = [[name, *(sum(kinds.get(k, 0) for k in of) for of in COLUMNS.values())] for name, kinds in moments.items()]
    heads = [n for n, name in enumerate(COLUMNS, 1) if any(row[n] >= 5e7 for row in rows)]
    lines = [["", *([*COLUMNS][n - 1] for n in heads), "total"]]
    lines += [[row[0], *(f"{row[n] / 1e9:.1f}" for n in heads), f"{sum(row[1:]) / 1e9:.1f}"] for row in rows]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  ".join([name.ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(cells, wide[1:], strict=True))])
        for name, *cells in lines
    ]
    return ["# Predicted, not measured, in GB of 10^9 bytes:", *(f"#   {line}" for line in shown)]


PREDICTED = [path for path in sorted(EXAMPLES.glob("*.yaml")) if "Predicted, not measured" in path.read_text()]


@pytest.mark.long
@pytest.mark.parametrize("path", PREDICTED, ids=lambda p: p.stem)
def test_the_memory_that_an_example_names_is_what_is_predicted(path: Path) -> None:
    assert "\n".join(table(path)) + "\n" in path.read_text()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set that every example asks for, written once: the command accepts one that is there."""
    folder = tmp_path_factory.mktemp("set") / "digits"
    assert main(["digits", str(folder)]) == 0
    return folder


def commands(path: Path, sets: Path, home: Path) -> list[list[str]]:
    """The commands at the top of an example, typed in the root of the repository: `home` has its layout, and in build/
    the sets that are there already."""
    lines = path.read_text(encoding="utf-8").split("\n")
    copy = home / path.relative_to(EXAMPLES.parent)
    copy.parent.mkdir(parents=True)
    copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    (home / "build").mkdir()
    for made in sets.iterdir():
        (home / "build" / made.name).symlink_to(made)
    return [line.removeprefix("#").split()[1:] for line in lines if line.startswith("#   octavo ")]


def test_the_tiny_example_of_several_processes_names_its_commands(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    typed = commands(SEVERAL, tmp_path / "sets", tmp_path)
    assert typed[0][:2] == ["tiny", "qwen3_vl_moe"] and typed[1][0] == "digits"
    assert typed[2] == ["train", "examples/tiny/scale.yaml", "--nproc", "4"]


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("path", [path for path in TINY if path != SEVERAL], ids=lambda p: p.stem)
def test_a_tiny_example_trains_as_its_comment_says(
    path: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = commands(path, digits.parent, tmp_path)
    assert [words[0] for words in typed] == ["tiny", "digits", "train"]
    monkeypatch.chdir(tmp_path)
    for words in typed:
        assert main([*words, *(["train.steps=10"] if words[0] == "train" else [])]) == 0
    copy = tmp_path / "examples" / "tiny" / path.name
    run = tmp_path / load_config(copy).run.dir
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    proof = json.loads((run / "proof.json").read_text())
    assert [m["step"] for m in metrics] == list(range(1, 11)) and load_config(copy).train.steps == 20
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert not proof["pending"] and proof["share"] > 0
    written = "hf/config.json" if load_config(copy).lora is None else "adapter/adapter_config.json"
    assert (run / written).is_file()


PRETRAIN = sorted(EXAMPLES.glob("pretrain_*.yaml"))


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("path", PRETRAIN, ids=lambda p: p.stem)
def test_an_example_of_pretraining_learns_from_nothing(
    path: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands, with fewer steps and rows, and without the weights of the checkpoint that it names."""
    *typed, train = commands(path, digits.parent, tmp_path)
    cfg = load_config(path)
    monkeypatch.chdir(tmp_path)
    for words in typed:
        assert main(words) == 0
    for weights in (tmp_path / "build" / "tiny").rglob("*.safetensors"):
        weights.unlink()
    few = [f"data.train.{n}.max_samples=40" for n in range(len(cfg.data.train))]
    assert main([*train, *few, "data.eval.0.max_samples=1", "train.steps=12", "train.warmup=1"]) == 0
    run = tmp_path / cfg.run.dir
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]
    assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]
    assert metrics[-1]["eval"]["loss"] < metrics[0]["loss"] and "exact_match" not in metrics[-1]["eval"]
    assert json.loads((run / "proof.json").read_text())["share"] > 0
    assert (run / "hf" / "model.safetensors").is_file()
