"""Massive activations: what is read of the first batch, what is said about it, and that nothing else changes."""

from __future__ import annotations

import io
import json
import runpy
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from octavo import fp8, models, train
from octavo.cli.main import main
from octavo.config import Config, override, to_yaml
from octavo.fp8.observe import uncounted
from octavo.models.tiny import tiny
from octavo.train.callbacks import evaluation_and_health
from octavo.train.forward import massive_activations as massive
from octavo.train.run_dir.run_dir import read_rows
from tests.train.test_ranks import on_ranks

pytestmark = pytest.mark.usefixtures("uncounted", "unseen")
ROOT = Path(__file__).resolve().parents[2]
SHORT = ("train.steps=2", "train.warmup=1", "data.eval=[]")


def net(recipe: str = "tensorwise") -> tuple[nn.Sequential, fp8.Plan]:
    """Two layers of 256 inputs in FP8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    plan = fp8.plan(model, recipe)
    fp8.apply(model, plan)
    return model, plan


def shares(x: torch.Tensor) -> dict[str, float]:
    """By a loop over blocks, in float64: the share of nonzero values below 2^-6 if the block's largest is 448."""
    blocks = {
        "tensorwise": [x], "rowwise": x.unbind(0), "blockwise": [b for row in x for b in row.split(128)],
        "mxfp8": [b for row in x for b in row.split(32)],
    }  # fmt: skip
    small = {
        name: sum(int(((b != 0) & (b.double().abs() * 448 / b.abs().max().double() < 2**-6)).sum()) for b in parts)
        for name, parts in blocks.items()
    }
    return {name: count / int((x != 0).sum()) for name, count in small.items()}


@pytest.mark.parametrize("width", [256, 200], ids=["whole blocks", "ragged blocks"])
def test_shares_are_those_of_each_recipe(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, width)
    x[2, 5], x[3] = 3e5, 0
    x[4, ::2] = 0
    amax, rms, *found = massive._figures(x).tolist()
    assert dict(zip(massive._BLOCK_OF, found, strict=True)) == pytest.approx(shares(x), abs=1e-7)
    assert (amax, rms) == (3e5, pytest.approx(float(x.double().square().mean().sqrt()), rel=1e-5))
    assert found[0] > 0.99 and found[1] == pytest.approx(255 / 256 / 8, abs=0.05)


def test_first_input_of_each_layer_is_read_and_hooks_are_removed() -> None:
    model, plan = net()
    x = torch.randn(4, 256)
    with massive.watch_inputs(model, plan) as watch, torch.no_grad():
        with uncounted():
            model(100 * x)  # as the forward of a dummy image
        model(x)
        model(1000 * x)
    found = watch.statistics()
    assert [*found] == ["0", "1"] and found["0"].amax == float(x.abs().max())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert found["0"].to_json()["amax_rms"] == found["0"].amax / found["0"].rms


@pytest.mark.parametrize("options", [{"fuse": "on"}, {"activations": "fp8"}], ids=str)
def test_layers_of_fused_blocks_are_read(planted: Path, options: dict[str, str]) -> None:
    model = models.load(planted.parent / "plain")
    plan = fp8.plan(model, fp8.Policy("blockwise", **options), models.describe(model).components)
    fp8.apply(model, plan)
    with massive.watch_inputs(model.train(), plan) as watch:
        model(input_ids=torch.arange(64)[None])
    assert [*watch.statistics()] == [row.name for row in plan.rows if row.fp8]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_inputs_without_figures_are_left_out(value: float) -> None:
    model, plan = net()
    with massive.watch_inputs(model, plan) as watch, torch.no_grad():
        model[0](torch.full((4, 256), value))
        model[1](torch.zeros(0, 256))
    assert watch.statistics() == {}


def test_layers_in_high_precision_are_not_read() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    policy = fp8.Policy("tensorwise", rules=(fp8.Rule("0", recipe="off"), fp8.Rule("1", fwd="bf16")))
    plan = fp8.plan(model, policy)
    fp8.apply(model, plan)
    with massive.watch_inputs(model, plan) as watch:
        model(torch.randn(4, 256))
    assert watch.statistics() == {}


def said(x: torch.Tensor, recipe: str) -> str:
    """The line about the input x of a layer in this recipe, empty if there is none."""
    model, plan = net(recipe)
    with massive.watch_inputs(model, plan) as watch, torch.no_grad():
        model[0](x)
    found = massive.find_massive(watch.statistics())
    return massive.describe_massive(found, plan) if found else ""


def test_advice_depends_on_the_recipe() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    assert said(x, "tensorwise") == ""
    token, channel, both = x.clone(), x.clone(), x.clone()
    token[0, 3] = 1e6
    channel[:, 3] *= 1e6
    both[:, ::16] *= 1e6
    for recipe in ("tensorwise", "delayed"):
        line = said(token, recipe)
        assert line.startswith("massive activations in the input of 0 (128 times its RMS): ")
        assert f"{recipe} leaves 100 % of their values subnormal" in line
        assert line.endswith("rowwise 1.56 %: fp8.rules=[{match: 0, recipe: rowwise}]")
    for recipe in ("rowwise", "blockwise"):
        assert f"nothing to do, {recipe} leaves " in said(token, recipe)
    assert "rowwise leaves 94.6 % of" in said(channel, "rowwise") and "blockwise 47.1 %" in said(channel, "rowwise")
    assert "nothing to do, blockwise leaves 47.1 %" in said(channel, "blockwise")
    some = x.clone()
    some[:, :128] /= 1e5  # half of the values are small
    assert "nothing to do, tensorwise leaves 50 % of their values subnormal in FP8, and outputs suffer from 90 %" in (
        said(some, "tensorwise")
    )
    end = "93.8 % of their values subnormal in FP8, and blockwise does not help; recipe: off in fp8.rules"
    assert end in said(both, "tensorwise") and end in said(both, "blockwise")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mini Qwen3 with an outlier channel in layer 0, as examples/outliers.yaml has."""
    folder = tmp_path_factory.mktemp("planted")
    tiny.write("qwen3", folder / "plain", size="mini")
    runpy.run_path(str(ROOT / "examples" / "outliers.py"))["plant"](folder / "plain", folder / "planted", 0)
    return folder / "planted"


def figures(cfg: Config) -> list[dict]:
    return read_rows(Path(cfg.run.dir) / "metrics.jsonl")


def run(cfg: Config) -> tuple[train.RunResult, str]:
    text = io.StringIO()
    return train.run(cfg, console=Console(file=text, width=1000), describe_plan=lambda planned: ()), text.getvalue()


LAYER = "model.layers.0.mlp.down_proj"
# The planted row of up_proj's weight spoils the scale of that weight: in tensorwise its other outputs would be zero.
WEIGHTS = 'fp8.rules=[{match: "**.up_proj", recipe: off}]'


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.recompute=full",),
        ("train.micro_batch=2",),
        ("fp8.recipe=rowwise", "model.load_in_fp8=rowwise", "lora={rank: 4}"),
        pytest.param(("train.compile=true",), marks=pytest.mark.long),
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
@pytest.mark.usefixtures("graphs")
def test_a_run_reports_them_once_and_losses_stay(make, planted: Path, monkeypatch, settings: tuple[str, ...]) -> None:
    common = ("fp8.recipe=tensorwise", WEIGHTS, f"model.path={planted}", *SHORT, *settings)
    cfg = make(*common)
    result, output = run(cfg)
    first, second = figures(cfg)
    assert [*first["massive_activations"]][0] == LAYER and "massive_activations" not in second
    entry = first["massive_activations"][LAYER]
    assert entry["amax_rms"] == pytest.approx(entry["amax"] / entry["rms"]) and entry["subnormal"]["tensorwise"] > 0.9
    assert output.count("massive activations in the input of") == 1 and f"{LAYER} (" in output
    assert "massive_activations" not in result.final
    monkeypatch.setattr(evaluation_and_health.MassiveActivations, "before_step", lambda *_: None)
    plain = make(*common, dir="plain")
    assert train.run(plain).losses() == result.losses()
    assert [row["grad_norm"] for row in figures(plain)] == [row["grad_norm"] for row in (first, second)]


def test_a_resumed_run_and_a_model_without_them_say_nothing(make, planted: Path) -> None:
    cfg = make("fp8.recipe=tensorwise", WEIGHTS, f"model.path={planted}", *SHORT)
    stop = train.Callback()
    stop.end_step = lambda run, step: run.stop()  # type: ignore[method-assign]
    assert train.run(cfg, callbacks=[stop]).steps == 1
    assert "massive" not in run(override(cfg, ["run.resume=auto"]))[1]
    assert [("massive_activations" in row) for row in figures(cfg)] == [True, False]
    plain = make(*SHORT, dir="plain")
    assert "massive" not in run(plain)[1]
    assert not any("massive_activations" in row for row in figures(plain))


@pytest.mark.long
def test_two_ranks_write_one_record(make, planted: Path) -> None:
    cfg = make("fp8.recipe=tensorwise", WEIGHTS, f"model.path={planted}", "train.micro_batch=2", *SHORT)
    on_ranks(cfg)
    assert [*figures(cfg)[0]["massive_activations"]][0] == LAYER


def test_plan_runs_the_first_batch(make, planted: Path, tmp_path: Path, capsys, no_memory) -> None:
    def plan(*words: str) -> tuple[int, str, str]:
        code = main(["plan", str(tmp_path / "run.yaml"), *words])
        return code, *capsys.readouterr()

    (tmp_path / "run.yaml").write_text(to_yaml(make("fp8.recipe=tensorwise", f"model.path={planted}", *SHORT)))
    assert "massive" not in plan()[1]
    code, out, _ = plan("--first-batch")
    assert code == 0 and out.count("note: massive activations in the input of") == 1
    code, out, _ = plan("--first-batch", "--json")
    record = json.loads(out)
    assert code == 0 and [*record["massive_activations"]][0] == LAYER
    assert any(note.startswith("massive activations in the input of") for note in record["notes"])
    code, out, err = plan("--first-batch", "--json", f"model.path={planted.parent / 'plain'}")
    assert code == 0 and json.loads(out)["massive_activations"] == {} and "no input of an FP8 layer has massive" in err
    code, _, err = plan("--first-batch", "train.phase=preference", "preference={loss: orpo}")
    assert code == 1 and "--first-batch reads rows of the phases pretrain and sft, and train.phase is pref" in err
    code, _, err = plan("--first-batch", "--shape", "qwen3_8b")
    assert code == 2 and "--first-batch needs weights" in err
