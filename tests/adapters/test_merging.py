"""octavo merge: merged folders, how much of the adapter they contain, and rejected merges."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from octavo import adapters, fp8, models
from octavo.adapters.merge import adapted_weights
from octavo.checkpoint.export import export
from octavo.checkpoint.export.values import iter_values
from octavo.cli.main import main
from octavo.config import load_config_text
from octavo.data.builtin import digits
from octavo.fp8.weights import codes_of_frozen, is_frozen
from octavo.train.artifacts import merge_model
from octavo.train.errors import TrainError
from octavo.train.loop import loop
from tests.adapters.conftest import inputs, logits
from tests.adapters.test_merge import adapted, filled, near

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def coded(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> its mini checkpoint in FP8, one scale a row."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            target = tmp_path_factory.mktemp("coded") / family
            export(iter_values(models.load(folder(family))), folder(family), target, "fp8-dynamic")
            made[family] = target
        return made[family]

    return get


def written(base: Path, to: Path, std: float = 0.05, **settings) -> Path:
    """An adapter over this base, as training leaves it."""
    adapters.save(filled(adapted(base, **settings), std), to, base)
    return to


def held(directory: Path) -> dict[str, torch.Tensor]:
    """Stock name -> values, as a folder holds them."""
    return {name: p.detach() for name, p in fp8.dequantize_weights(models.load(directory)).named_parameters()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_bf16_merge_loads_in_transformers_and_matches_adapted_model(
    family: str, folder: Folder, tmp_path: Path
) -> None:
    base = folder(family)
    adapter = written(base, tmp_path / "adapter")
    done = merge_model(adapter, tmp_path / "out", device="cpu")
    assert done.base == "high" and done.base_error is None and not done.merge_error.fp8_weights()
    model = _over(base, adapter)
    batch = inputs(model, models.describe(model.config))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(models.load(base), str(adapter))
    near(logits(stock, batch), logits(theirs, batch).to(torch.bfloat16), 32)
    for name, value in adapters.merged_weights(model, torch.bfloat16):
        assert torch.equal(stock.get_parameter(name).bfloat16(), value.bfloat16()), name


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("qwen3", "fp8-tensor"),
        ("qwen3_moe", "fp8-dynamic"),
        pytest.param("qwen3_moe", "fp8-block", marks=pytest.mark.long),
        pytest.param("qwen3_vl_moe", "fp8-tensor", marks=pytest.mark.long),
    ],
)
def test_reported_merge_errors_match_the_file(family: str, format: str, folder: Folder, tmp_path: Path) -> None:
    base = folder(family)
    adapter = written(base, tmp_path / "adapter", std=0.02)
    done = merge_model(adapter, tmp_path / "out", format, device="cpu")
    model, found = _over(base, adapter), held(tmp_path / "out")
    counted = 0
    for name, fold in adapted_weights(model).items():
        own = done.merge_error.weights[name]
        w, d, applied, n = 0.0, 0.0, 0.0, 0.0
        for slot in fold.slots:
            base_values = fold.base_values(slot)
            delta = fold.merged(slot) - base_values
            there = (found[name] if slot is None else found[name][slot]) - base_values
            w, d = w + float(base_values.square().sum()), d + float(delta.square().sum())
            applied, n = applied + float((there * delta).sum()), n + float((there - delta).square().sum())
        assert own.relative == pytest.approx((d / w) ** 0.5, rel=1e-3)
        assert own.kept == pytest.approx(applied / d, rel=1e-3)
        assert own.error == pytest.approx((n / d) ** 0.5, rel=1e-3)
        counted += own.fp8
    assert counted == len(done.merge_error.fp8_weights()) > 1
    assert 0.95 < done.merge_error.kept < 1.05
    assert any("of the adapter's change survives" in s for s in done.sentences())


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.long), "qwen3_moe"])
def test_merge_into_codes_rejects_tiny_changes(family: str, coded: Folder, tmp_path: Path) -> None:
    base = coded(family)
    small = written(base, tmp_path / "small", std=1e-4, targets=("q_proj", "**.layers.0.mlp"))
    before = {name: q for name, q in models.load(base).named_parameters() if is_frozen(q)}
    with pytest.raises(adapters.AdapterError, match="fp8-dynamic would round the adapter away") as refused:
        merge_model(small, tmp_path / "out", "fp8-dynamic", device="cpu")
    named = [name for name in adapted_weights(_over(base, small)) if name in str(refused.value)]
    assert "--anyway" in str(refused.value) and "--format bf16" in str(refused.value) and len(named) == 3
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))

    messages: list[str] = []
    done = merge_model(small, tmp_path / "out", "fp8-dynamic", anyway=True, device="cpu", log=messages.append)
    assert done.base == "fp8" and done.merge_error.is_lost and done.merge_error.kept < 0.1
    assert any(s.startswith("warning: fp8-dynamic would round") and s.endswith("written anyway") for s in messages)
    for name, weight in models.load(tmp_path / "out").named_parameters():
        if is_frozen(weight) and name not in done.merge_error.weights:
            a, b = codes_of_frozen(weight), codes_of_frozen(before[name])
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)

    with pytest.raises(adapters.AdapterError, match="would round the adapter away"):
        merge_model(small, tmp_path / "refused", "fp8", device="cpu")
    done = merge_model(small, tmp_path / "auto", "auto", device="cpu", log=messages.append)
    assert done.exported.format == "bf16" and not done.merge_error.fp8_weights()
    assert messages[-1].startswith("format bf16 instead: fp8-") and "--base high (or --base DIR)" in messages[-1]
    assert not (tmp_path / "refused").exists()

    large = written(base, tmp_path / "large", std=1.0, targets=("q_proj", "**.layers.0.mlp"))
    for format in ("fp8", "auto"):
        assert merge_model(large, tmp_path / format, format, device="cpu").exported.format.startswith("fp8-")
    done = merge_model(large, tmp_path / "out", "fp8-dynamic", device="cpu")  # replaces the earlier one
    assert not done.merge_error.is_lost and done.merge_error.kept > 0.95


def _over(base: Path, adapter: Path) -> nn.Module:
    model = models.load(base)
    adapters.load(model, adapter)
    return model


def test_bf16_merge_keeps_changes_that_fp8_loses(coded: Folder, tmp_path: Path) -> None:
    base = coded("qwen3")
    adapter = written(base, tmp_path / "adapter", std=2e-3)
    done = merge_model(adapter, tmp_path / "out", device="cpu")
    assert done.base == "fp8" and done.base_error is None
    found, model = held(tmp_path / "out"), _over(base, adapter)
    for name, fold in adapted_weights(model).items():
        assert torch.equal(found[name], fold.merged().bfloat16().float()), name


def test_change_below_bf16_resolution_is_reported(folder: Folder, tmp_path: Path) -> None:
    adapter = written(folder("qwen3"), tmp_path / "adapter", std=1e-5)
    done = merge_model(adapter, tmp_path / "out", device="cpu")
    assert any("BF16 rounds more than 10% of the change away" in s for s in done.sentences())
    empty = written(folder("qwen3"), tmp_path / "empty", std=0.0)
    assert any("changes nothing" in s for s in merge_model(empty, tmp_path / "out", "fp8-dynamic").sentences())


@pytest.fixture(scope="module")
def run(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short LoRA run beside codes that were made at load."""
    place = tmp_path_factory.mktemp("run")
    digits.write(place / "digits", train=16, test=4)
    loop.run(
        load_config_text(f"""
model: {{path: {folder("qwen3_vl")}, load_in_fp8: row}}
lora: {{rank: 4, alpha: 8}}
data: {{train: [{{path: {place / "digits/train.json"}}}]}}
train: {{steps: 2, seq_length: 128, micro_batch: 2, global_batch: 2, lr: 2e-3, warmup: 1}}
run: {{dir: {place / "lora"}, health_every: 0, tensorboard: false, threads: 1}}
""")
    )
    return place / "lora"


def test_run_is_merged_into_its_codes_or_the_folders_weights(run: Path, folder: Folder, tmp_path: Path) -> None:
    base, found = folder("qwen3_vl"), {}
    for asked in (None, "high"):
        messages: list[str] = []
        done = merge_model(run, tmp_path / "out", base=asked, device="cpu", log=messages.append)
        found[asked] = held(tmp_path / "out")
        assert done.base == (asked or "fp8") and (done.base_error is None) == (asked == "high")
        assert ("the FP8 codes of training" in messages[0]) == (asked != "high")
        if asked != "high":
            assert messages[0].endswith("loaded with foundation: rowwise)")
            assert 0.02 < done.base_error.relative < 0.03 and "--base high" in done.sentences()[-1]
    model = _over(base, run / "adapter")
    for name, value in adapters.merged_weights(model):
        assert torch.equal(found["high"][name], value.bfloat16().float()), name
    frozen = models.load(base, load_in_fp8="row")
    adapters.load(frozen, run / "adapter")
    for name, fold in adapted_weights(frozen).items():
        assert torch.equal(found[None][name], fold.merged().bfloat16().float())
    # the adapter's folder, inside the run, knows the same
    assert merge_model(run / "adapter", tmp_path / "out", device="cpu").base == "fp8"
    assert all(torch.equal(v, found[None][n]) for n, v in held(tmp_path / "out").items())


def test_small_change_survives_in_high_precision_weights(run: Path, tmp_path: Path) -> None:
    """What is refused over the codes that training saw is not lost over the weights that they were made of."""
    over = merge_model(run, tmp_path / "over", "fp8-dynamic", anyway=True, device="cpu").merge_error
    high = merge_model(run, tmp_path / "high", "fp8-dynamic", base="high", anyway=True, device="cpu").merge_error
    assert over.kept < 0.9 < high.kept < 1.1 and over.is_lost


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"format": "fp4"}, "there is no format 'fp4'; there are bf16, fp8-block"),
        ({"base": "fp8"}, "has no record of training on FP8 codes"),
        ({"base": "nowhere"}, "nowhere was given as the base of"),
        ({"include": ["image_encoder"]}, "bf16 has none"),
        ({"include": ["lm_head"], "format": "fp8-dynamic"}, "'lm_head' cannot be included"),
    ],
)
def test_invalid_merges_are_rejected(ask: dict, message: str, folder: Folder, tmp_path: Path) -> None:
    adapter = written(folder("qwen3"), tmp_path / "adapter")
    with pytest.raises(TrainError, match=message):
        merge_model(adapter, tmp_path / "out", **ask)
    assert not (tmp_path / "out").exists()


def test_merge_command(folder: Folder, coded: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = folder("qwen3")
    adapter = written(base, tmp_path / "adapter")
    assert (
        main(["merge", str(adapter), str(tmp_path / "out"), "--format", "fp8-dynamic", "--json", "--device", "cpu"])
        == 0
    )
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["base"] == "high" and found["export"]["format"] == "fp8-dynamic" and not found["delta"]["lost"]
    assert found["delta"]["weights"][0].keys() >= {"name", "kept", "error", "cosine", "changed", "drowned"}
    assert "folded into the high-precision weights" in err
    for argv, message in (
        ([adapter, base], "is the folder that is exported"),
        ([adapter, adapter.parent], "is a folder above the one"),
        ([base, tmp_path / "new"], "is a whole model: there is no adapter to merge. Use octavo export"),
        ([tmp_path / "nothing", tmp_path / "new"], "there is no folder"),
        (
            [written(coded("qwen3"), tmp_path / "over"), tmp_path / "new", "--base", "high"],
            "holds FP8 codes and no high",
        ),
    ):
        assert main(["merge", *map(str, argv)]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main(["merge", str(adapter), str(tmp_path / "full")]) == 1
    assert "is not empty" in capsys.readouterr().err and (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert main(["merge", str(adapter), str(tmp_path / "new"), "--format", "fp4"]) == 2
    assert not (tmp_path / "new").exists()
